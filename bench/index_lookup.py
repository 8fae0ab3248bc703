"""Look up a 131,072-token prompt (512 blocks of 256 tokens) in an index of 1,000,000 blocks; and weigh the index.

    python bench/index_lookup.py [--blocks N] [--json]

Prints the best time of hashing the prompt, of the lookup in the engine (walk and pin) and of giving it up again, and
the resident memory of index and eviction policy a block. Exits with 1 when the lookup takes 2 ms or more.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from forebay.engine import Engine
from forebay.hostpool import HostPool
from forebay.keys import block_keys
from forebay.policies.admit_all import AdmitAll
from forebay.policies.lru import LRU
from forebay.sim.executor import SimExecutor
from forebay.stage import Policies
from forebay.types import HOST, BlockKey, DeviceBlock, Job, JobResult, Namespace, Outcome, Request, Stored, TierSpec

BLOCK_TOKENS, PROMPT_TOKENS, LIMIT_MS, ROUNDS = 256, 131_072, 2.0, 51


class CatalogueTier:
    """A tier that only knows what it holds: nothing here reads or writes a block."""

    def __init__(self, keys: Sequence[BlockKey]) -> None:
        self._keys = keys
        self.spec = TierSpec(
            name="file", capacity_bytes=2**50, stored_bytes=2**21 + 4096, read_latency_ns=100_000, shared=False
        )

    def scan(self) -> Iterator[Stored]:
        return (Stored(key, self.spec.stored_bytes) for key in self._keys)

    def contains(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        return [True] * len(keys)

    def read(self, keys: Sequence[BlockKey], into: Sequence[memoryview]) -> Sequence[Outcome]:
        return [Outcome.FAILED] * len(keys)

    write = read

    def delete(self, keys: Sequence[BlockKey]) -> Sequence[Outcome]:
        return [Outcome.FAILED] * len(keys)

    def close(self) -> None:
        self._keys = ()


class NoDevice:
    def submit(self, job: Job, blocks: Sequence[DeviceBlock]) -> None:
        raise AssertionError("a lookup copies nothing")

    def poll(self) -> Sequence[JobResult]:
        return ()


def resident_bytes() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def best_ms(action: Callable[[], object], undo: Callable[[], object] = lambda: None) -> float:
    """The fastest of the rounds: what the code costs, without what else the machine was doing."""
    seconds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - started)
        undo()
    return min(seconds) * 1e3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()

    namespace = Namespace(
        model="bench", weights_digest="none", kv_dtype="bfloat16", rope="none", layers=1, kv_heads=1, head_dim=1,
        block_tokens=BLOCK_TOKENS, block_bytes=2**21, layout="bench",
    )  # fmt: skip
    tokens = np.random.default_rng(7).integers(0, 150_000, PROMPT_TOKENS, dtype=np.int32)
    prompt = block_keys(namespace, tokens)
    noise = np.random.default_rng(9).bytes(32 * (arguments.blocks - len(prompt)))
    others = [BlockKey(noise[at : at + 32]) for at in range(0, len(noise), 32)]
    pool = HostPool(2, 4096)

    before = resident_bytes()
    engine = Engine(
        pool,
        {"file": CatalogueTier([*others, *prompt])},
        Policies({HOST: LRU(), "file": LRU()}, AdmitAll()),
        NoDevice(),
        SimExecutor(lambda job: 0),
        lambda event: None,
    )
    index_bytes = resident_bytes() - before

    def look_up() -> None:
        plan = engine.plan_load(Request("r", prompt))
        assert plan is not None
        assert plan.hit_blocks == len(prompt), "every block of the prompt is in the index"

    def give_up() -> None:
        engine.cancel_load("r")

    def both() -> None:
        look_up()
        give_up()

    result = {
        "blocks": arguments.blocks,
        "prompt_blocks": len(prompt),
        "hash_ms": round(best_ms(lambda: block_keys(namespace, tokens)), 3),
        "lookup_ms": round(best_ms(look_up, give_up), 3),
        "lookup_and_cancel_ms": round(best_ms(both), 3),
        "limit_ms": LIMIT_MS,
        "bytes_a_block": round(index_bytes / arguments.blocks),
        "key_bytes_a_block": others[0].__sizeof__(),
    }
    if arguments.json:
        print(json.dumps(result))
    else:
        print(
            f"{result['prompt_blocks']} blocks looked up among {result['blocks']:,}: {result['lookup_ms']} ms "
            f"(limit {LIMIT_MS} ms), given up again {result['lookup_and_cancel_ms']} ms; "
            f"hashing the tokens {result['hash_ms']} ms\n"
            f"memory: {result['bytes_a_block']} B a block for index and policy, "
            f"and {result['key_bytes_a_block']} B for the key itself"
        )
    return 0 if result["lookup_ms"] < LIMIT_MS else 1


if __name__ == "__main__":
    raise SystemExit(main())
