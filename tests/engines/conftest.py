"""Tests with a real vLLM on the CPU, in the environment that `make test-engines` makes. Without vLLM there are none."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from forebay.testing.small_models import TELLING, save_model

HAS_VLLM = importlib.util.find_spec("vllm") is not None
collect_ignore_glob = [] if HAS_VLLM else ["*.py"]

if HAS_VLLM:
    os.environ.update(
        HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_OMP_THREADS_BIND="0-1",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",  # the engine in this process: it starts in seconds
        VLLM_LOGGING_LEVEL="WARNING",
    )


def pytest_configure(config: pytest.Config) -> None:
    if HAS_VLLM:  # vLLM and what it imports warn of much that is not ours
        config.addinivalue_line("filterwarnings", "ignore")


MakeModel = Callable[..., Path]


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """Write a small model: `make_model(seed=0, path=None)` -> its directory."""

    def make(seed: int = 0, path: Path | None = None) -> Path:
        path = path or tmp_path_factory.mktemp("model")
        save_model(path, TELLING, seed)
        return path

    return make
