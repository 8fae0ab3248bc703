"""`vllm serve` as operators run it: pasted arguments, streamed answers, `/metrics`, a restart."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import pytest

from forebay.testing.small_models import TELLING, save_tokenizer
from forebay.testing.vllm_server import Metrics, VllmServer, bench_serve, serving

B = 32
MAX_TOKENS = 12
DOCUMENT = Path(__file__).parents[2] / "docs" / "vllm.md"


def prompt(seed: int, tokens: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(500) for _ in range(tokens)]


COMMON = prompt(1, 20 * B)
PROMPTS = [prompt(2, 3 * B), prompt(3, 40 * B + 1), *(COMMON + prompt(10 + i, 9) for i in range(4))]
BLOCKS = 3 + 40 + 4 * 20
DISTINCT_BLOCKS = 3 + 40 + 20


@dataclass(frozen=True)
class Stop:
    """What a server had said by the time it was stopped."""

    answers: list[list[int]]
    metrics: Metrics


def environment() -> dict[str, str]:
    return os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        "PYTHONHASHSEED": "0",
    }


def server(model: Path, pool: Path, *, native: bool = False) -> AbstractContextManager[VllmServer]:
    command = [sys.executable, "-m", "forebay", "vllm-args", str(pool), "--capacity", "1GiB", "--cpu-gib", "0.1"]
    printed = subprocess.run([*command, *["--native"] * native], capture_output=True, text=True, check=True).stdout
    settings = {
        "dtype": "float32", "block-size": B, "max-model-len": 4096, "num-gpu-blocks-override": 512, "seed": 0,
        "max-num-batched-tokens": 512,
    }  # fmt: skip
    arguments = [argument for name, value in settings.items() for argument in (f"--{name}", str(value))]
    pasted = on_a_cpu(shlex.split(printed)) if native else shlex.split(printed)
    return serving(model, [*arguments, *pasted, "--enforce-eager"], environment())


def on_a_cpu(pasted: list[str]) -> list[str]:
    """With copies that vLLM's native offloading can do on a CPU."""
    at = pasted.index("--kv-transfer-config") + 1
    config = json.loads(pasted[at])
    config["kv_connector_extra_config"] |= {
        "spec_name": "CpuTieringSpec", "spec_module_path": "forebay.testing.vllm_cpu_spec",
    }  # fmt: skip
    return [*pasted[:at], json.dumps(config), *pasted[at + 1 :]]


def stream_all(running: VllmServer) -> list[list[int]]:
    """All at once, as clients do."""
    with ThreadPoolExecutor(len(PROMPTS)) as clients:
        return list(clients.map(lambda tokens: running.stream(tokens, MAX_TOKENS), PROMPTS))


@pytest.fixture(scope="module")
def model(make_model: object, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = make_model(path=tmp_path_factory.mktemp("served"))  # type: ignore[operator]
    save_tokenizer(path, TELLING)
    return path


def test_a_restart_keeps_what_was_streamed(model: Path, tmp_path: Path) -> None:
    pool = tmp_path / "pool"
    with server(model, pool) as first:
        report = bench_serve(first, PREFIX_REPETITION, tmp_path / "bench.json", environment())
        assert (report["completed"], report["failed"]) == (24, 0)
        before = Stop(stream_all(first), first.metrics())
    assert {len(answer) for answer in before.answers} == {MAX_TOKENS}
    assert len({tuple(answer) for answer in before.answers}) == len(PROMPTS)

    spoil_one(pool)
    with server(model, pool) as second:
        after = Stop(stream_all(second), second.metrics())
        for line in ("host pool: ", "part 1 of 1: ", f"root {pool}: "):  # as docs/vllm.md says
            assert line in second.log, line
    assert after.answers == before.answers
    check_counts(before.metrics, after.metrics)


def test_a_restart_keeps_what_was_streamed_under_the_native_tier(model: Path, tmp_path: Path) -> None:
    pool, trace, tiered = tmp_path / "pool", tmp_path / "trace.jsonl", "vllm:kv_offload_tiering_"
    trace.write_text("".join(json.dumps(request) + "\n" for request in TRACE))
    with server(model, pool, native=True) as first:
        report = bench_serve(first, [*TIMED_TRACE, str(trace)], tmp_path / "bench.json", environment())
        assert (report["completed"], report["failed"]) == (len(TRACE), 0)
        assert report["total_input_tokens"] == sum(request["input_length"] for request in TRACE)
        before = Stop(stream_all(first), first.metrics())
    assert before.metrics.total(f"{tiered}chunk_hits", tier="1:forebay") == 0
    assert len({tuple(answer) for answer in before.answers}) == len(PROMPTS)

    with server(model, pool, native=True) as second:
        after = Stop(stream_all(second), second.metrics())
    assert after.answers == before.answers
    assert after.metrics.total(f"{tiered}chunk_hits", tier="1:forebay") == DISTINCT_BLOCKS
    assert after.metrics.total(f"{tiered}read_bytes", tier="1:forebay") > 0
    assert after.metrics.total("vllm:forebay_tier_failed_blocks") == 0


TRACE = [
    {
        "timestamp": 100 * i, "input_length": 640 + 32 * i, "output_length": 4 + i,
        "hash_ids": [*range(8), *range(10 * i + 10, 10 * i + 16)],
    }
    for i in range(6)
]  # fmt: skip
"""In Mooncake's form, with 64 tokens to a hash: 512 that all have in common, then their own."""
TIMED_TRACE = [
    "--dataset-name", "timed_trace", "--num-prompts", str(len(TRACE)), "--timed-trace-chunk-hash-size", "64",
    "--timed-trace-sec-multiplier", "0.001", "--dataset-path",
]  # fmt: skip
PREFIX_REPETITION = [
    "--dataset-name", "prefix_repetition", "--num-prompts", "24", "--prefix-repetition-num-prefixes", "4",
    "--prefix-repetition-prefix-len", "640", "--prefix-repetition-suffix-len", "64",
    "--prefix-repetition-output-len", "8", "--request-rate", "inf", "--max-concurrency", "6",
]  # fmt: skip


def spoil_one(pool: Path) -> None:
    """One bit of the newest block, which belongs to a prompt that is asked again."""
    newest = max(pool.glob("*/??/*.kv"), key=lambda path: path.stat().st_mtime_ns)
    whole = bytearray(newest.read_bytes())
    whole[len(whole) // 2] ^= 1
    newest.write_bytes(whole)


def check_counts(before: Metrics, after: Metrics) -> None:
    """Hits, misses, loads, bytes, seconds, failures by kind and the queue, from the server itself."""
    own = "vllm:forebay_"
    assert before.total(f"{own}missed_blocks") > BLOCKS
    assert before.total(f"{own}moved_bytes", kind="write") > 0
    assert before.total(f"{own}busy_seconds", kind="write") > 0
    assert after.total(f"{own}hit_blocks") > BLOCKS // 2
    assert after.total(f"{own}missed_blocks") == 0, "all that was asked for had reached the pool when the first stopped"
    assert after.total(f"{own}loads") > 0
    assert after.total(f"{own}moved_bytes", kind="read") > 0
    assert after.total(f"{own}busy_seconds", kind="read") > 0
    assert after.total(f"{own}load_seconds_count") == after.total(f"{own}loads")
    assert after.total(f"{own}failed_blocks", outcome="corrupt") == 1
    assert after.total(f"{own}broken_workers") == 0
    assert f"{own}queue" in after.names
    assert after.total("vllm:external_prefix_cache_hits") > 0
    documented = set(re.findall(r"`(vllm:(?:external|forebay)_(?!tier)\w+)", DOCUMENT.read_text()))
    assert documented, "docs/vllm.md lists them"
    assert documented <= after.names, documented - after.names
    everywhere = set(re.findall(r"`(vllm:forebay_\w+)", DOCUMENT.read_text()))
    undocumented = {name for name in after.names if name.startswith(own)} - everywhere
    assert not undocumented
