"""The reference tier's capacity, and the fault wrapper: deterministic, honest about the tier behind, paced."""

from __future__ import annotations

import random
import threading

import pytest
from file_tier_kit import digest_of

from forebay.errors import ConfigError, TierUnavailable
from forebay.ports import Tier
from forebay.testing.fault import FaultPlan, FaultTier, Pace
from forebay.testing.tier_contract import filled, get, key_of, namespace_of, payload_of, put, slot
from forebay.tiers import memory
from forebay.types import BlockKey, Outcome

BLOCK_BYTES = 64
NUMBERS = range(200)


def memory_tier(blocks: int = 1000) -> memory.MemoryTier:
    namespace = namespace_of(BLOCK_BYTES)
    return memory.build(memory.Options(capacity_bytes=blocks * BLOCK_BYTES), namespace, digest_of(namespace))


def write(tier: Tier, number: int) -> Outcome:
    [outcome] = tier.write([key_of(number)], [filled(payload_of(number, BLOCK_BYTES))])
    return outcome


def test_memory_tier_is_full_at_its_capacity() -> None:
    tier = memory_tier(blocks=2)
    assert [write(tier, number) for number in (1, 2, 3, 1)] == [Outcome.OK, Outcome.OK, Outcome.FULL, Outcome.OK]
    tier.delete([key_of(1)])
    assert write(tier, 3) is Outcome.OK
    assert [stored.key for stored in tier.scan()] == [key_of(2), key_of(3)]


def test_memory_tier_wants_a_capacity() -> None:
    with pytest.raises(ConfigError, match="capacity_bytes"):
        memory_tier(blocks=0)


STORMY = FaultPlan(
    seed=7, read_failed=0.1, read_missing=0.1, read_corrupt=0.1, write_failed=0.1, write_full=0.1, delete_failed=0.2
)


def outcomes_of(tier: Tier, numbers: list[int]) -> dict[tuple[str, int], Outcome]:
    """Write, read, read again and delete each block; one call a block."""
    found: dict[tuple[str, int], Outcome] = {}
    for number in numbers:
        found["write", number] = write(tier, number)
        for turn in ("read 1", "read 2"):
            [found[turn, number]] = tier.read([key_of(number)], [slot(BLOCK_BYTES)])
        [found["delete", number]] = tier.delete([key_of(number)])
    return found


def test_faults_do_not_depend_on_the_order_of_threads() -> None:
    alone = outcomes_of(FaultTier(memory_tier(), STORMY), list(NUMBERS))
    shuffled = random.Random(3).sample(NUMBERS, len(NUMBERS))
    shared, parts = FaultTier(memory_tier(), STORMY), [shuffled[i::4] for i in range(4)]
    together: dict[tuple[str, int], Outcome] = {}
    threads = [threading.Thread(target=lambda part=part: together.update(outcomes_of(shared, part))) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone
    assert outcomes_of(FaultTier(memory_tier(), FaultPlan(seed=8, read_failed=0.5)), list(NUMBERS)) != alone


def test_faults_come_as_often_as_planned() -> None:
    tier = FaultTier(memory_tier(), STORMY)
    outcomes_of(tier, list(NUMBERS))
    assert set(tier.injected) == {
        "read_failed", "read_missing", "read_corrupt", "write_failed", "write_full", "delete_kept", "delete_landed",
    }  # fmt: skip
    for kind, draws, rate in (("read_failed", 400, 0.1), ("write_full", 200, 0.1), ("delete_kept", 200, 0.1)):
        assert tier.injected[kind] == pytest.approx(draws * rate, abs=18)


def certain(**rates: float) -> FaultTier:
    tier = FaultTier(memory_tier(), FaultPlan(seed=1))
    put(tier, [1], BLOCK_BYTES)
    return FaultTier(tier, FaultPlan(seed=1, **rates))


@pytest.mark.parametrize(
    ("fault", "outcome", "still_held"),
    [
        ("read_failed", Outcome.FAILED, True),
        ("read_missing", Outcome.MISSING, False),
        ("read_corrupt", Outcome.CORRUPT, False),
    ],
)
def test_a_failed_read_leaves_garbage_and_the_tier_in_the_right_state(
    fault: str, outcome: Outcome, still_held: bool
) -> None:
    tier = certain(**{fault: 1.0})
    view = slot(BLOCK_BYTES)
    assert list(tier.read([key_of(1)], [view])) == [outcome]
    assert set(view) == {0xA5}
    assert list(tier.contains([key_of(1)])) == [still_held]


@pytest.mark.parametrize(("fault", "outcome"), [("write_failed", Outcome.FAILED), ("write_full", Outcome.FULL)])
def test_a_failed_write_leaves_nothing(fault: str, outcome: Outcome) -> None:
    tier = certain(**{fault: 1.0})
    assert write(tier, 2) is outcome
    assert list(tier.contains([key_of(2)])) == [False]


def test_a_failed_delete_may_have_landed() -> None:
    tier = FaultTier(memory_tier(), FaultPlan(seed=1, delete_failed=1.0))
    put(tier, NUMBERS, BLOCK_BYTES)
    keys = [key_of(number) for number in NUMBERS]
    assert set(tier.delete(keys)) == {Outcome.FAILED}
    assert sum(tier.contains(keys)) == tier.injected["delete_kept"] == pytest.approx(100, abs=30)


def test_a_tier_that_is_gone_raises() -> None:
    tier = certain(unavailable=1.0)
    for call in (
        lambda: tier.read([key_of(1)], [slot(BLOCK_BYTES)]),
        lambda: write(tier, 1),
        lambda: tier.delete([key_of(1)]),
    ):
        with pytest.raises(TierUnavailable):
            call()
    assert list(tier.contains([key_of(1)])) == [True]


def test_faults_strike_single_blocks_of_a_batch() -> None:
    behind = memory_tier()
    put(behind, NUMBERS, BLOCK_BYTES)
    tier = FaultTier(behind, FaultPlan(seed=5, read_failed=0.5))
    views: dict[BlockKey, memoryview] = {key_of(number): slot(BLOCK_BYTES) for number in NUMBERS}
    outcomes = tier.read(list(views), list(views.values()))
    assert set(outcomes) == {Outcome.OK, Outcome.FAILED}
    for number, outcome in zip(NUMBERS, outcomes, strict=True):
        if outcome is Outcome.OK:
            assert bytes(views[key_of(number)][:BLOCK_BYTES]) == payload_of(number, BLOCK_BYTES)


class Clock:
    """Time that passes only by sleeping."""

    def __init__(self) -> None:
        self.time_ns = 0

    def now_ns(self) -> int:
        return self.time_ns

    def sleep_ns(self, wait_ns: int) -> None:
        self.time_ns += wait_ns


def test_bandwidth_is_limited() -> None:
    clock = Clock()
    tier = FaultTier(memory_tier(), FaultPlan(seed=1), Pace(1000.0, clock.now_ns, clock.sleep_ns))
    put(tier, range(10), BLOCK_BYTES)
    assert clock.time_ns == 10 * BLOCK_BYTES * 1_000_000
    assert get(tier, 1, BLOCK_BYTES) == payload_of(1, BLOCK_BYTES)
    assert clock.time_ns == 11 * BLOCK_BYTES * 1_000_000
    with pytest.raises(ValueError, match="positive"):
        Pace(0.0, clock.now_ns, clock.sleep_ns)
