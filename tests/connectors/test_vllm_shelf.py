"""What vLLM's native tiering may rely on, without vLLM: stores, loads and lookups over a stand-in for its DRAM."""

from __future__ import annotations

import dataclasses
import random
import sys
from collections.abc import Sequence

import numpy as np
import pytest

from forebay.connectors.vllm.region import HugePages, RegionPool
from forebay.connectors.vllm.shelf import Ended, Presence, Shelf, ShelfOptions
from forebay.connectors.vllm.turns import ShortTurns
from forebay.events import Reason, Totals
from forebay.keys import block_keys
from forebay.policies.admit_all import AdmitAll
from forebay.policies.lru import LRU
from forebay.ports import Tier
from forebay.sim.executor import SimExecutor
from forebay.testing.fault import FaultPlan, FaultTier
from forebay.testing.schedule import BLOCK_BYTES, NAMESPACE, truth
from forebay.tiers import memory
from forebay.types import BlockKey, JobKind, Outcome, Slot

MS_NS = 1_000_000
PROMPT = block_keys(NAMESPACE, list(range(64 * NAMESPACE.block_tokens)))
"""64 blocks."""


class World:
    """A region of 32 slots over a tier with room for 16 blocks."""

    def __init__(self, tier: Tier | None = None, *, shared: bool = False, slots: int = 32, job_ns: int = MS_NS) -> None:
        self.memory = memory.build(memory.Options(capacity_bytes=16 * BLOCK_BYTES), NAMESPACE, b"")
        self.memory.spec = dataclasses.replace(self.memory.spec, shared=shared)
        self.region = np.zeros((slots, BLOCK_BYTES), dtype=np.int8)
        self.pool = RegionPool(memoryview(self.region))
        self.clock = SimExecutor(lambda job: job_ns)
        self.totals = Totals()
        self.shelf = Shelf(
            self.pool, tier or self.memory, LRU, AdmitAll(), self.clock, self.totals.add,
            ShelfOptions(write_batch_blocks=4),
        )  # fmt: skip
        self._tasks = 0

    def settle(self) -> list[Ended]:
        self.shelf.drain()
        ended = self.shelf.poll()
        self.shelf.check()
        return ended

    def store(self, keys: Sequence[BlockKey], first_slot: int = 0) -> Ended:
        for at, key in enumerate(keys):
            self.region[first_slot + at] = np.frombuffer(truth(key), dtype=np.int8)
        self._tasks += 1
        self.shelf.store(self._tasks, keys, [Slot(first_slot + at) for at in range(len(keys))])
        (ended,) = self.settle()
        assert ended.task == self._tasks
        return ended

    def load(self, keys: Sequence[BlockKey], first_slot: int = 0) -> list[BlockKey]:
        """The keys that arrived; each is checked, byte for byte."""
        self.region[:] = 0
        self._tasks += 1
        self.shelf.load(self._tasks, keys, [Slot(first_slot + at) for at in range(len(keys))])
        (ended,) = self.settle()
        good = [key for key in keys if key not in ended.failed]
        for at, key in enumerate(keys):
            assert key in ended.failed or self.region[first_slot + at].tobytes() == truth(key)
        return good

    def held(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        return [key for key in keys if self.shelf.look_up(key) is Presence.HELD]


def test_what_was_stored_comes_back() -> None:
    world = World()
    assert world.held(PROMPT[:8]) == []
    assert world.store(PROMPT[:8]).failed == frozenset()
    assert world.held(PROMPT[:9]) == list(PROMPT[:8])
    assert world.load(PROMPT[:8], first_slot=20) == list(PROMPT[:8])
    world.shelf.check_idle()


def test_draining_waits_for_a_disk_that_hangs_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    world = World(job_ns=25_000 * MS_NS)
    world.store(PROMPT[:2])
    assert [record.args for record in caplog.records] == [("memory", 1, 10), ("memory", 1, 20)]


def test_a_block_is_offered_only_when_its_write_has_ended() -> None:
    world = World()
    world.shelf.store(1, PROMPT[:4], [Slot(i) for i in range(4)])
    assert world.shelf.poll() == []
    assert world.held(PROMPT[:4]) == []
    assert world.shelf.open_jobs == 1
    world.settle()
    assert world.held(PROMPT[:4]) == list(PROMPT[:4])


def test_storing_again_writes_nothing() -> None:
    world = World()
    world.store(PROMPT[:4])
    moved = world.totals.moved_blocks["memory", JobKind.WRITE]
    assert world.store(PROMPT[:4]).failed == frozenset()
    assert world.totals.moved_blocks["memory", JobKind.WRITE] == moved


def test_capacity_holds_and_tails_go_first() -> None:
    world = World()
    world.store(PROMPT[:16])
    world.store(PROMPT[32:40])
    assert world.shelf.used_bytes == 16 * BLOCK_BYTES
    assert world.held(PROMPT[:16]) == list(PROMPT[:8])
    assert world.held(PROMPT[32:40]) == list(PROMPT[32:40])
    assert world.totals.dropped["memory", Reason.EVICTED] == 8
    assert world.load(PROMPT[:8]) == list(PROMPT[:8])


def test_blocks_that_were_used_stay() -> None:
    world = World()
    world.store(PROMPT[:8])
    world.store(PROMPT[8:16])
    world.shelf.accessed(PROMPT[:8])
    world.store(PROMPT[16:24])
    assert world.held(PROMPT[:16]) == list(PROMPT[:8])


def test_a_store_larger_than_the_tier_keeps_what_fits() -> None:
    world = World()
    ended = world.store(PROMPT[:24])
    assert len(ended.failed) == 8
    assert len(world.held(PROMPT[:24])) == 16
    world.shelf.check_idle()


def test_a_damaged_block_fails_alone_and_is_stored_anew() -> None:
    world = World()
    world.store(PROMPT[:4])
    world.memory.damage(PROMPT[2])
    assert world.load(PROMPT[:4]) == [PROMPT[0], PROMPT[1], PROMPT[3]]
    assert world.held(PROMPT[:4]) == [PROMPT[0], PROMPT[1], PROMPT[3]]
    assert world.totals.failures["memory", JobKind.READ, Outcome.CORRUPT] == 1
    world.store(PROMPT[2:3])
    assert world.held(PROMPT[:4]) == list(PROMPT[:4])
    assert world.load(PROMPT[:4]) == list(PROMPT[:4])


def test_a_block_that_could_not_be_read_is_not_offered_for_a_while() -> None:
    failing = World()
    tier = FaultTier(failing.memory, FaultPlan(seed=1, read_failed=1.0))
    world = World(tier)
    world.store(PROMPT[:2])
    assert world.load(PROMPT[:2]) == []
    assert world.held(PROMPT[:2]) == []
    world.clock.wait(world.clock.now_ns() + 11_000 * MS_NS)
    assert world.held(PROMPT[:2]) == list(PROMPT[:2])


def test_a_tier_that_is_gone_fails_every_block_and_nothing_else() -> None:
    world = World()
    world.store(PROMPT[:4])
    world.memory.close()
    assert world.load(PROMPT[:4]) == []
    assert world.store(PROMPT[4:8]).failed == frozenset(PROMPT[4:8])
    world.shelf.check_idle()


def test_blocks_of_another_process_are_found() -> None:
    world = World(shared=True)
    for key in PROMPT[:3]:
        world.memory.write((key,), [memoryview(truth(key))])
    assert {world.shelf.look_up(key) for key in PROMPT[:5]} == {Presence.ASKING}
    world.shelf.ask()
    world.settle()
    assert world.held(PROMPT[:5]) == list(PROMPT[:3])
    assert world.shelf.look_up(PROMPT[4]) is Presence.ABSENT
    assert world.shelf.used_bytes == 3 * BLOCK_BYTES
    assert world.load(PROMPT[:3]) == list(PROMPT[:3])


def test_an_absent_block_is_asked_for_again_later() -> None:
    world = World(shared=True)
    world.shelf.look_up(PROMPT[0])
    world.shelf.ask()
    world.settle()
    assert world.shelf.look_up(PROMPT[0]) is Presence.ABSENT
    world.memory.write(PROMPT[:1], [memoryview(truth(PROMPT[0]))])
    world.clock.wait(world.clock.now_ns() + 1_001 * MS_NS)
    assert world.shelf.look_up(PROMPT[0]) is Presence.ASKING


def test_a_question_without_an_answer_ends_at_its_deadline() -> None:
    world = World(shared=True, job_ns=10_000 * MS_NS)
    assert world.shelf.look_up(PROMPT[0]) is Presence.ASKING
    world.shelf.ask()
    world.clock.wait(249 * MS_NS)
    assert world.shelf.look_up(PROMPT[0]) is Presence.ASKING
    world.clock.wait(250 * MS_NS)
    assert world.shelf.look_up(PROMPT[0]) is Presence.ABSENT
    assert world.shelf.open_jobs == 1, "and it is not asked again meanwhile"


def test_a_block_on_its_way_out_of_one_slot_is_not_read_into_another() -> None:
    world = World()
    world.store(PROMPT[:1])
    world.shelf.load(7, PROMPT[:1], [Slot(3)])
    world.shelf.load(8, PROMPT[:1], [Slot(4)])
    ended = {each.task: each.failed for each in world.settle()}
    assert ended == {7: frozenset(), 8: frozenset(PROMPT[:1])}
    world.shelf.check_idle()


@pytest.mark.parametrize("seed", range(100))
def test_random_schedules(seed: int) -> None:
    """vLLM's side as a model: it lends each slot to one job at a time and believes what `Ended` says."""
    draw = random.Random(seed)
    deletes_fail = draw.random() < 0.5  # then a tier may hold more than its capacity for a while
    plan = FaultPlan(
        seed=seed, unavailable=0.02 * deletes_fail, read_failed=0.05, read_missing=0.05, read_corrupt=0.05,
        write_failed=0.05, write_full=0.02, delete_failed=0.2 * deletes_fail,
    )  # fmt: skip
    beneath = World(shared=draw.random() < 0.5)
    world = World(FaultTier(beneath.memory, plan), job_ns=draw.randrange(1, 300) * MS_NS)
    free = list(range(32))
    lent: dict[int, dict[BlockKey, int]] = {}
    loads: set[int] = set()
    busy: set[BlockKey] = set()

    def apply() -> None:
        for ended in world.shelf.poll():
            for key, slot in lent.pop(ended.task).items():
                if ended.task in loads and key not in ended.failed:
                    assert world.region[slot].tobytes() == truth(key)
                busy.discard(key)
                free.append(slot)
        world.shelf.check()

    for task in range(60):
        start = draw.randrange(40)
        keys = [key for key in PROMPT[start : start + draw.randrange(1, 10)] if key not in busy][: len(free)]
        held = [key for key in keys if world.shelf.look_up(key) is Presence.HELD]
        is_load = draw.random() < 0.5
        chosen = held if is_load else keys
        slots = [free.pop(draw.randrange(len(free))) for _ in chosen]
        lent[task] = dict(zip(chosen, slots, strict=True))
        busy.update(chosen)
        if is_load:
            loads.add(task)
            world.region[slots] = 0
            world.shelf.load(task, chosen, [Slot(slot) for slot in slots])
        else:
            for key, slot in lent[task].items():
                world.region[slot] = np.frombuffer(truth(key), dtype=np.int8)
            world.shelf.store(task, chosen, [Slot(slot) for slot in slots])
        world.shelf.ask()
        if draw.random() < 0.7:
            world.clock.wait(world.clock.now_ns() + draw.randrange(1, 400) * MS_NS)
        apply()
        assert deletes_fail or world.shelf.used_bytes <= 16 * BLOCK_BYTES
    world.shelf.drain()
    apply()
    assert not lent
    assert sorted(free) == list(range(32))
    world.shelf.check_idle()


def test_turns_are_short_only_while_loads_are_in_flight() -> None:
    usual_s = sys.getswitchinterval()
    turns = ShortTurns(usual_s / 10)
    turns.begin()
    turns.begin()
    turns.end()
    assert sys.getswitchinterval() < usual_s
    turns.end()
    assert sys.getswitchinterval() == usual_s
    turns.begin()
    turns.close()
    assert sys.getswitchinterval() == usual_s


def test_turns_can_be_left_alone() -> None:
    usual_s = sys.getswitchinterval()
    turns = ShortTurns(0.0)
    turns.begin()
    assert sys.getswitchinterval() == usual_s
    turns.end()


def test_the_region_can_be_let_go_of() -> None:
    world = World()
    view = memoryview(world.region)
    pool = RegionPool(view)
    assert pool.view(Slot(3)).nbytes == BLOCK_BYTES
    pages = HugePages(view)
    pages.close()
    pool.release()
    view.release()


def test_collapsing_pages_changes_no_byte() -> None:
    region = np.random.default_rng(1).integers(0, 256, (64, 65536), dtype=np.uint8)
    before = region.copy()
    HugePages(memoryview(region)).close()
    assert (region == before).all()
