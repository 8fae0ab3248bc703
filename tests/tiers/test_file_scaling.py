"""Several roots: their bandwidths add up. Each root here gives one block a tick, and no more."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from file_tier_kit import BLOCK_BYTES, open_tier, write_all

from forebay.testing.tier_contract import key_of, slot
from forebay.tiers.file.directio import REAL_CALLS
from forebay.tiers.file.placement import Home, order
from forebay.types import Outcome

BLOCKS_A_ROOT = 12


@pytest.mark.parametrize("count", [2, 4])
def test_roots_of_one_speed_read_at_once(tmp_path: Path, count: int) -> None:
    """A tick ends when every root has given a block: all blocks take 1/count of the ticks that one root would need."""
    ticks, limited = [0], [False]

    def tick() -> None:
        ticks[0] += 1

    barrier = threading.Barrier(count, action=tick)

    def preadv(descriptor: int, parts: list[memoryview], offset: int) -> int:
        if limited[0]:
            barrier.wait(timeout=60)
        return os.preadv(descriptor, parts, offset)

    tier = open_tier(
        *(tmp_path / str(i) for i in range(count)), reads_in_flight=1, calls=replace(REAL_CALLS, preadv=preadv)
    )
    at_root: dict[int, list[int]] = {i: [] for i in range(count)}
    for number in range(100 * count):
        home = at_root[tier.route(key_of(number))]
        if len(home) < BLOCKS_A_ROOT:
            home.append(number)
    numbers = [number for at_one in at_root.values() for number in at_one]
    assert write_all(tier, numbers) == [Outcome.OK] * len(numbers)
    limited[0] = True
    outcomes = tier.read([key_of(number) for number in numbers], [slot(BLOCK_BYTES) for _ in numbers])
    assert list(outcomes) == [Outcome.OK] * len(numbers)
    assert ticks[0] == len(numbers) / count
    tier.close()


@pytest.mark.parametrize(("count", "speedup"), [(2, 1.9), (4, 3.7)])
def test_chance_leaves_no_root_behind(count: int, speedup: float) -> None:
    """10,000 blocks in batches are done when the root with the most of them is."""
    homes = [Home(bytes([i]) * 16, 1.0) for i in range(count)]
    loads = [0] * count
    for number in range(10_000):
        loads[order(homes, key_of(number))[0]] += 1
    assert 10_000 / max(loads) >= speedup
