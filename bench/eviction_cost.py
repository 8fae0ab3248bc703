"""What an eviction policy costs with a million blocks: adopting them at once, uses, evictions, memory.

    python bench/eviction_cost.py [--blocks 1000000] [policy ...]

Times are the best of three rounds, on one core. Memory is what Python allocated for the policy, keys aside.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
import tracemalloc
from collections.abc import Callable

from forebay.ports import EvictionPolicy
from forebay.types import BlockKey

POLICIES = ("lru", "lrfu", "s3fifo", "prefix_aware")
PROMPT_BLOCKS = 32
TURNOVER_BLOCKS = 20_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("policies", nargs="*", default=POLICIES)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    given = parser.parse_args()
    held = [BlockKey(os.urandom(32)) for _ in range(given.blocks)]
    print(f"{given.blocks} blocks, Python {sys.version.split()[0]}")
    print(f"{'policy':14} {'adopt':>8} {'use':>10} {'evict+insert':>13} {'after half is new':>18} {'memory':>12}")
    for name in given.policies:
        module = importlib.import_module(f"forebay.policies.{name}")
        print(row(name, lambda module=module: module.build(module.Options()), held), flush=True)


def row(name: str, make: Callable[[], EvictionPolicy], held: list[BlockKey]) -> str:
    adopt_s = min(seconds(lambda: make().inserted(held)) for _ in range(3))
    policy = make()
    policy.inserted(held)
    prompts = [held[at : at + PROMPT_BLOCKS] for at in range(0, TURNOVER_BLOCKS, PROMPT_BLOCKS)]
    use_s = min(seconds(lambda: [policy.accessed(prompt) for prompt in prompts]) for _ in range(3))
    early_s = min(seconds(lambda: turn_over(policy, TURNOVER_BLOCKS)) for _ in range(3))
    turn_over(policy, len(held) // 2)
    late_s = min(seconds(lambda: turn_over(policy, TURNOVER_BLOCKS)) for _ in range(3))
    tracemalloc.start()
    measured = make()
    measured.inserted(held)
    memory_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    use_us, early_us, late_us = (part_s / TURNOVER_BLOCKS * 1e6 for part_s in (use_s, early_s, late_s))
    costs = f"{adopt_s:6.2f} s {use_us:7.2f} us {early_us:10.2f} us {late_us:15.2f} us"
    return f"{name:14} {costs} {memory_bytes / len(held):4.0f} B/block"


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def turn_over(policy: EvictionPolicy, blocks: int) -> None:
    for _ in range(0, blocks, PROMPT_BLOCKS):
        for _ in range(PROMPT_BLOCKS):
            policy.removed(policy.victims(1, lambda key: True))
        policy.inserted([BlockKey(os.urandom(32)) for _ in range(PROMPT_BLOCKS)])


if __name__ == "__main__":
    main()
