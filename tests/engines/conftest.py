"""Tests with a real vLLM on the CPU, in the environment that `make test-engines` makes. Without vLLM there are none."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

import pytest

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
    """Write a small Qwen3 shape with random weights: `make_model(seed=0, path=None)` -> its directory.

    Its answers depend on the whole prompt: weights are large enough, and attention sharp enough, that the residual
    stream is not just the last token. With the usual random weights wrong KV would give the right tokens.
    """

    def make(seed: int = 0, path: Path | None = None) -> Path:
        import torch
        from transformers import Qwen3Config, Qwen3ForCausalLM

        torch.manual_seed(seed)
        config = Qwen3Config(
            vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=32, max_position_embeddings=8192, tie_word_embeddings=False,
            initializer_range=0.2,
        )  # fmt: skip
        path = path or tmp_path_factory.mktemp("model")
        model = Qwen3ForCausalLM(config)
        for layer in model.model.layers:
            layer.self_attn.q_norm.weight.data.fill_(4.0)
        model.save_pretrained(path)
        return path

    return make
