"""Forebay as a secondary tier of vLLM's native offloading, beside vLLM's own `fs` tier and beside recomputing.

    python bench/vllm_native_tier.py [--tokens 8192] [--rounds 6] [--directory DIR]

Needs the environment of `make test-engines`. Each tier's pool is filled by a vLLM process that ends. Then one new
process of each kind takes the same prompts in turn, so that all meet the same state of the machine; a prompt is new to
its process, so its KV comes from the pool or is computed. The files are read with O_DIRECT in both tiers, hence cold in
this system's page cache; whether the device or a host beneath it caches cannot be told from here.

Reported for each kind: time to the first token (seconds), processor time of the whole process (core-seconds a prompt),
medians with the lowest and highest. Exit code 1 when first tokens differ.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

VOCABULARY = 8192
KINDS = ("recompute", "fs", "forebay")


@dataclass(frozen=True)
class Sample:
    kind: str
    first_token: int
    ttft_s: float
    core_s: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--blocks-per-chunk", type=int, default=1, help="vLLM blocks of 128 tokens in a stored block")
    parser.add_argument("--directory", type=Path, help="where the pools go; default: a temporary one")
    options = parser.parse_args()
    os.environ.update(
        HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        VLLM_CPU_KVCACHE_SPACE="2",
        VLLM_CPU_OMP_THREADS_BIND=f"0-{(os.cpu_count() or 1) - 1}",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_LOGGING_LEVEL="ERROR",
    )
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="forebay-bench-") as scratch:
        samples = measure(Path(scratch), options.tokens, options.rounds, options.blocks_per_chunk)
    return report(samples, options.tokens)


def measure(scratch: Path, tokens: int, rounds: int, blocks_per_chunk: int) -> list[Sample]:
    spawn = get_context("spawn")
    make = spawn.Process(target=make_model, args=(scratch / "model",))
    make.start()
    make.join()
    prompts = [prompt(seed, tokens) for seed in range(rounds)]
    for kind in KINDS[1:]:
        with Child(kind, scratch, blocks_per_chunk) as filler:
            for each in [*prompts, prompt(rounds + 1, 3)]:
                filler.serve(each)
    children = [Child(kind, scratch, blocks_per_chunk) for kind in KINDS]
    try:
        for child in children:
            child.serve(prompt(rounds, tokens))  # warm: not in any pool
        rounds_of = [children[at % len(KINDS) :] + children[: at % len(KINDS)] for at in range(rounds)]
        return [child.serve(each) for each, turn in zip(prompts, rounds_of, strict=True) for child in turn]
    finally:
        for child in children:
            child.close()


class Child:
    """A vLLM of its own process."""

    def __init__(self, kind: str, scratch: Path, blocks_per_chunk: int) -> None:
        spawn = get_context("spawn")
        self._kind = kind
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=run_child, args=(theirs, kind, scratch, blocks_per_chunk))
        self._process.start()

    def serve(self, tokens: list[int]) -> Sample:
        self._pipe.send(tokens)
        return Sample(self._kind, **self._pipe.recv())

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def run_child(pipe: Connection, kind: str, scratch: Path, blocks_per_chunk: int) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(scratch / "model"),
        dtype="float32",
        max_model_len=32768,
        enforce_eager=True,
        skip_tokenizer_init=True,
        prefix_caching_hash_algo="sha256_cbor",
        kv_transfer_config=transfer_config(kind, scratch, blocks_per_chunk),
    )
    llm.collective_rpc(touch_cache)
    greedy = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    while (tokens := pipe.recv()) is not None:
        started_s, started_core_s = time.perf_counter(), time.process_time()
        (answer,) = llm.generate([{"prompt_token_ids": tokens}], greedy, use_tqdm=False)
        ttft_s = time.perf_counter() - started_s
        core_s = time.process_time() - started_core_s
        pipe.send({"first_token": answer.outputs[0].token_ids[0], "ttft_s": ttft_s, "core_s": core_s})
    llm.llm_engine.engine_core.shutdown()


def touch_cache(worker: Any) -> None:
    """Else each prompt pays for the page faults of the part of the KV cache that it is the first to use."""
    for layer in worker.model_runner.kv_caches:
        layer.zero_()


def transfer_config(kind: str, scratch: Path, blocks_per_chunk: int) -> Any:
    from vllm.config import KVTransferConfig

    tiers = {
        "fs": {"type": "fs", "root_dir": str(scratch / "fs")},
        "forebay": {
            "type": "forebay",
            "module_path": "forebay.connectors.vllm.tier",
            "pool": str(scratch / "forebay"),
            "capacity_gib": 16,
        },
    }
    if kind not in tiers:
        return None
    return KVTransferConfig(
        kv_connector="OffloadingConnector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "forebay.testing.vllm_cpu_spec",
            "cpu_bytes_to_use": 2**30,
            "blocks_per_chunk": blocks_per_chunk,
            "secondary_tiers": [tiers[kind]],
        },
    )


def make_model(path: Path) -> None:
    """A Qwen3 shape of 23 million parameters: 6 layers, 4 KV heads of 64; 12 KiB of KV a token in float32."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=512, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=4, head_dim=64, max_position_embeddings=32768, tie_word_embeddings=False,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(path)


def prompt(seed: int, tokens: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(VOCABULARY) for _ in range(tokens)]


def report(samples: list[Sample], tokens: int) -> int:
    print(f"{tokens} tokens, {len(samples) // len(KINDS)} prompts, median [lowest .. highest]")
    for kind in KINDS:
        own = [sample for sample in samples if sample.kind == kind]
        ttft = spread([sample.ttft_s for sample in own])
        core = spread([sample.core_s for sample in own])
        print(f"  {kind:10} TTFT {ttft} s   processor {core} core-s")
    by_round = [samples[at : at + len(KINDS)] for at in range(0, len(samples), len(KINDS))]
    for kind in KINDS[:2]:
        ratios = [named(each, kind).ttft_s / named(each, "forebay").ttft_s for each in by_round]
        print(f"  {kind} / forebay, pair by pair: {spread(ratios)}")
    same = all(len({sample.first_token for sample in each}) == 1 for each in by_round)
    print(json.dumps({"samples": [asdict(sample) for sample in samples], "tokens_equal": same}))
    return 0 if same else 1


def named(samples: list[Sample], kind: str) -> Sample:
    return next(sample for sample in samples if sample.kind == kind)


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} [{min(values):.3f} .. {max(values):.3f}]"


if __name__ == "__main__":
    sys.exit(main())
