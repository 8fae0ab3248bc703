"""The engine in virtual time under random schedules with faults; every seed runs twice and must repeat itself."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from forebay.keys import namespace_key
from forebay.testing.fault import FaultPlan, FaultTier
from forebay.testing.schedule import BLOCK_BYTES, NAMESPACE, Chances, Record, Schedule, truth
from forebay.tiers import file, memory
from forebay.types import BlockKey

NO_CHANCES = Chances(failed_copy=0.0, hung_read=0.0, hung_write=0.0, beneath=0.0)
FAULTS = FaultPlan(
    seed=0, unavailable=0.05, read_failed=0.05, read_missing=0.03, read_corrupt=0.03,
    write_failed=0.05, write_full=0.05, delete_failed=0.1,
)  # fmt: skip


def memory_tier(name: str, blocks: int, read_latency_ns: int, *, shared: bool = False) -> memory.MemoryTier:
    options = memory.Options(name=name, capacity_bytes=blocks * BLOCK_BYTES, read_latency_ns=read_latency_ns)
    tier = memory.MemoryTier(options, BLOCK_BYTES)
    tier.spec = dataclasses.replace(tier.spec, shared=shared)
    return tier


def with_faults(seed: int) -> Record:
    """A small fast tier that evicts all the time and a shared slow one, both failing, damage and another process."""
    fast, slow = memory_tier("fast", 10, 100_000), memory_tier("slow", 40, 20_000_000, shared=True)

    def beneath(rng: random.Random, keys: Sequence[BlockKey]) -> None:
        key = rng.choice(keys)
        match rng.randrange(4):
            case 0 if fast.contains([key])[0]:
                fast.damage(key)
            case 1 if slow.contains([key])[0]:
                slow.damage(key)
            case 2:
                slow.write([key], [memoryview(bytearray(truth(key)))])
            case 3:
                slow.delete([key])

    tiers = {
        "fast": FaultTier(fast, seeded(FAULTS, seed)),
        "slow": FaultTier(slow, seeded(FAULTS, seed + 1_000_000)),
    }
    return Schedule(seed, tiers, beneath=beneath).run(steps=120)


def seeded(plan: FaultPlan, seed: int) -> FaultPlan:
    return msgspec.structs.replace(plan, seed=seed)


@pytest.mark.parametrize("first_seed", range(0, 320, 20))
def test_random_runs_with_faults_keep_every_promise_and_repeat(first_seed: int) -> None:
    loaded_blocks = 0
    for seed in range(first_seed, first_seed + 20):
        record = with_faults(seed)
        assert record == with_faults(seed), f"seed {seed} does not repeat itself"
        loaded_blocks += record.loaded_blocks
    assert loaded_blocks > 300, "the schedules hardly load anything: they test nothing"


@pytest.mark.parametrize("seed", range(20))
def test_without_faults_every_planned_block_arrives(seed: int) -> None:
    tiers = {"fast": memory_tier("fast", 10, 100_000), "slow": memory_tier("slow", 400, 20_000_000)}
    chances = dataclasses.replace(NO_CHANCES, cancel_plan=0.0, cancel_load=0.0)
    record = Schedule(seed, tiers, chances=chances).run(steps=120)
    assert record.loaded_blocks == record.planned_blocks > 10


@pytest.mark.parametrize("seed", range(8))
def test_two_slots_are_enough(seed: int) -> None:
    tiers = {"fast": memory_tier("fast", 10, 100_000), "slow": memory_tier("slow", 400, 20_000_000)}
    chances = dataclasses.replace(NO_CHANCES, cancel_plan=0.0, cancel_load=0.0)
    record = Schedule(seed, tiers, host_slots=2, chances=chances).run(steps=120)
    assert record.loaded_blocks == record.planned_blocks > 10


@pytest.mark.parametrize("seed", range(10))
def test_over_the_file_tier_with_damage_on_the_disk(tmp_path: Path, seed: int) -> None:
    """The damage is done to the bytes of files, beneath everything that could know: hence `shared`."""
    root = tmp_path / "root"
    options = file.Options(roots=(file.RootOptions(path=str(root)),), capacity_bytes=12 * 8192, shared=True)
    tier = file.build(options, NAMESPACE, bytes(namespace_key(NAMESPACE)))

    def beneath(rng: random.Random, keys: Sequence[BlockKey]) -> None:
        held = sorted(root.rglob("*.kv"))
        if not held:
            return
        path = rng.choice(held)
        content = bytearray(path.read_bytes()) or bytearray(1)
        if rng.random() < 0.5:
            content[rng.randrange(min(len(content), 4096 + BLOCK_BYTES))] ^= 1 << rng.randrange(8)
        else:
            del content[rng.randrange(len(content)) :]
        path.write_bytes(content)

    plan = FaultPlan(seed=seed, write_failed=0.05, read_failed=0.02, unavailable=0.02)
    schedule = Schedule(seed, {"file": FaultTier(tier, plan)}, chances=Chances(beneath=0.1), beneath=beneath)
    record = schedule.run(steps=150)
    assert record.loaded_blocks > 20
    assert len(list(root.rglob("*.kv"))) <= 12


def test_a_tier_that_never_answers_costs_only_recomputes() -> None:
    plan = FaultPlan(seed=1, unavailable=1.0)
    tiers = {"fast": FaultTier(memory_tier("fast", 10, 100_000), plan)}
    record = Schedule(3, tiers).run(steps=100)
    assert any("FAILED" in line for line in record.log)
