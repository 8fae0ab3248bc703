"""A worker's side over a real engine, real copies and a reference tier: steps as vLLM takes them, without vLLM."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from forebay.connectors.vllm.device import CpuDevice, find_pages
from forebay.connectors.vllm.rank import RankSide
from forebay.connectors.vllm.wire import Load, StepPlan, Store
from forebay.connectors.vllm.worker import EndedLoads, WorkerSide
from forebay.engine import Engine
from forebay.events import Totals
from forebay.executor import ThreadExecutor
from forebay.hostpool import HostPool
from forebay.keys import derived_key
from forebay.policies import frugal
from forebay.policies.admit_all import AdmitAll
from forebay.policies.lru import LRU
from forebay.ports import AdmissionPolicy
from forebay.stage import Policies
from forebay.tiers import memory
from forebay.types import HOST, BlockKey, JobKind, Outcome

BLOCKS = 40
ROOT = BlockKey(b"r" * 32)
NAMES = [bytes([i]) * 32 for i in range(BLOCKS)]
CONTENT = [torch.rand((2, 2, 4, 8)) for _ in range(BLOCKS)]
"""Of the block that is named alike: [layers, heads, tokens, content]."""


class Worker:
    """A rank with one part. The device's blocks are `caches`."""

    def __init__(
        self, *, slots: int = 64, tier: memory.MemoryTier | None = None, admission: AdmissionPolicy | None = None
    ) -> None:
        self.caches = {f"layers.{i}": torch.zeros((BLOCKS, 2, 4, 8)) for i in range(2)}
        pages = find_pages(self.caches, list(self.caches), BLOCKS)
        pool = HostPool(slots, pages.block_bytes)
        self.tier = tier or memory.MemoryTier(memory.Options(capacity_bytes=2**24), pages.block_bytes)
        device = CpuDevice(pages, pool)
        self.totals, self.forgotten, self.reported_forgotten = Totals(), 0, 0
        self.may_delete = threading.Event()
        self.may_delete.set()
        self.idle_at_delete: list[bool] = []
        policies = Policies({HOST: LRU(), "memory": LRU()}, admission or AdmitAll())
        self.engine = Engine(pool, {"memory": self.tier}, policies, device, ThreadExecutor(), self.totals.add)
        self.part = WorkerSide(self.engine, device, ROOT, self._forget, drain_s=30.0)
        self.side = RankSide([self.part])
        self.released: set[int] = set()

    def _forget(self) -> None:
        self.idle_at_delete.append(self.engine.idle)
        assert self.may_delete.wait(60)
        self.forgotten += 1

    def fill(self, block: int, content: torch.Tensor) -> None:
        for cache, layer in zip(self.caches.values(), content, strict=True):
            cache[block] = layer

    def block(self, block: int) -> torch.Tensor:
        return torch.stack([cache[block] for cache in self.caches.values()])

    def step(self, plan: StepPlan | None = None) -> EndedLoads:
        self.side.begin(plan or StepPlan(idle=True))
        self.side.offer_stores()
        self.side.linger()
        self.side.poll()
        report = self.side.take_report()
        if report is not None:
            self.released |= set(report.released)
            self.reported_forgotten += report.forgotten
        return self.side.take_ended_loads()

    def steps_until(self, done: Callable[[], bool]) -> None:
        for _ in range(20_000):
            if done():
                return
            self.step()
        raise AssertionError("it does not come to that")

    def store(self, number: int, first: int, end: int, absent_from: int | None = None) -> Store:
        """Blocks [first, end), which lie on the device where their number says."""
        for block in range(first, end):
            self.fill(block, CONTENT[block])
        absent_from = end - first if absent_from is None else absent_from
        return Store(number, tuple(NAMES[first:end]), tuple(range(first, end)), absent_from)

    def load(self, load: Load, plan: StepPlan | None = None) -> EndedLoads:
        """Step until it has ended."""
        ended = self.step(plan or StepPlan(loads=(load,)))
        for _ in range(20_000):
            if ended.request_ids:
                return ended
            ended = self.step()
        raise AssertionError("the load does not end")

    def holds(self, *blocks: int) -> list[bool]:
        return list(self.tier.contains([derived_key(ROOT, NAMES[block]) for block in blocks]))


@pytest.mark.parametrize("slots", [2, 3, 5, 64])
def test_what_was_stored_is_loaded_by_the_next_worker_however_few_slots_there_are(slots: int) -> None:
    first = Worker(slots=slots)
    first.step(StepPlan(stores=(first.store(1, 0, 12), first.store(2, 12, 20))))
    first.steps_until(lambda: first.released == {1, 2})
    first.part._settle(30.0)
    assert all(first.holds(*range(20)))
    second = Worker(slots=slots, tier=first.tier)
    ended = second.load(Load(1, "r", tuple(NAMES[:20]), tuple(range(39, 19, -1))))
    assert (ended.request_ids, ended.failed_blocks) == ({"r"}, frozenset())
    assert all(torch.equal(second.block(39 - i), CONTENT[i]) for i in range(20))
    assert all(not second.block(i).any() for i in range(20)), "no other block was touched"
    second.part._settle(30.0)
    second.engine.check_idle()


def test_a_block_may_be_overwritten_once_it_is_released() -> None:
    worker = Worker(slots=4)
    worker.step(StepPlan(stores=(worker.store(1, 0, 10),)))
    while not worker.released:
        worker.step()
    for block in range(10):
        worker.fill(block, torch.zeros_like(CONTENT[block]))
    worker.part._settle(30.0)
    worker.engine.drop_host_copies()
    worker.load(Load(1, "r", tuple(NAMES[:10]), tuple(range(20, 30))))
    assert all(torch.equal(worker.block(20 + i), CONTENT[i]) for i in range(10))


@pytest.mark.parametrize("revoked", [(), (1,)])
def test_a_block_is_not_released_while_it_is_being_copied(
    monkeypatch: pytest.MonkeyPatch, revoked: tuple[int, ...]
) -> None:
    worker, go_on = Worker(), threading.Event()
    device = worker.part._device
    assert isinstance(device, CpuDevice)
    sound = device._copy

    def slow(kind: JobKind, slot: int, block: int) -> Outcome:
        assert go_on.wait(60)
        return sound(kind, slot, block)

    monkeypatch.setattr(device, "_copy", slow)
    worker.step(StepPlan(stores=(worker.store(1, 0, 4),)))
    worker.step(StepPlan(revoked=revoked))
    for _ in range(10):
        worker.step()
    assert not worker.released
    go_on.set()
    worker.steps_until(lambda: worker.released == {1})


def test_a_revoked_store_finishes_only_what_is_being_copied() -> None:
    worker = Worker(slots=2)
    worker.step(StepPlan(stores=(worker.store(1, 0, 30),), revoked=()))
    worker.step(StepPlan(revoked=(1,)))
    worker.steps_until(lambda: worker.released == {1})
    worker.part._settle(30.0)
    held = worker.holds(*range(30))
    assert not held[-1]
    assert held == sorted(held, reverse=True), "an unbroken beginning"
    worker.step(StepPlan(revoked=(1, 7)))  # of what has ended, or never was
    worker.engine.check_idle()


def test_blocks_that_are_not_there_any_more_fail_and_all_before_them_are_loaded() -> None:
    worker = Worker()
    worker.step(StepPlan(stores=(worker.store(1, 0, 8),)))
    worker.part._settle(30.0)
    worker.engine.drop_host_copies()
    worker.tier.delete([derived_key(ROOT, NAMES[5])])
    ended = worker.load(Load(1, "r", tuple(NAMES[:8]), tuple(range(20, 28))))
    assert (ended.request_ids, ended.failed_blocks) == ({"r"}, {25, 26, 27})
    assert all(torch.equal(worker.block(20 + i), CONTENT[i]) for i in range(5))
    never = worker.load(Load(2, "s", tuple(NAMES[30:32]), (30, 31)))
    assert (never.request_ids, never.failed_blocks) == ({"s"}, {30, 31})
    assert (worker.part.loads, worker.part.loads_cut_short) == (2, 2)


def test_only_what_is_missing_is_stored_and_what_is_said_to_be_missing_is() -> None:
    worker = Worker()
    worker.step(StepPlan(stores=(worker.store(1, 0, 4),)))
    worker.part._settle(30.0)
    copied = dict(worker.totals.moved_blocks)
    worker.step(StepPlan(stores=(worker.store(2, 0, 4),)))
    assert 2 in worker.released
    worker.part._settle(30.0)
    assert worker.totals.moved_blocks == copied, "known blocks move no byte"
    worker.step(StepPlan(stores=(worker.store(3, 0, 6),)))
    worker.part._settle(30.0)
    assert all(worker.holds(*range(6)))


@pytest.mark.parametrize("steps", range(4))
def test_a_cancelled_load_ends_without_a_complaint(steps: int) -> None:
    worker = Worker(slots=3)
    worker.step(StepPlan(stores=(worker.store(1, 0, 15),)))
    worker.steps_until(lambda: worker.released == {1})
    worker.part._settle(30.0)
    worker.engine.drop_host_copies()
    load = Load(1, "r", tuple(NAMES[:15]), tuple(range(20, 35)))
    ended = worker.step(StepPlan(loads=(load,), cancelled=(1,) if steps == 0 else ()))
    for _ in range(steps):
        ended = ended if ended.request_ids else worker.step()
    if not ended.request_ids:
        ended = worker.load(load, StepPlan(cancelled=(1,)))
    assert (ended.request_ids, ended.failed_blocks) == ({"r"}, frozenset())
    worker.part._settle(30.0)
    worker.engine.check_idle()


def test_forgetting_deletes_when_nothing_is_on_its_way_and_holds_nobody_up() -> None:
    worker = Worker(slots=3)
    worker.step(StepPlan(stores=(worker.store(1, 0, 10),)))
    worker.may_delete.clear()
    worker.step(StepPlan(forget=True, stores=(worker.store(2, 10, 12),)))
    worker.steps_until(lambda: worker.released == {1} and bool(worker.idle_at_delete))
    for _ in range(5):
        worker.step()
    assert (worker.idle_at_delete, worker.released) == ([True], {1}), "what comes later is not deleted with the old"
    assert not any(worker.holds(10, 11))
    worker.step(StepPlan(forget=True))
    worker.may_delete.set()
    worker.steps_until(lambda: worker.reported_forgotten == 2)
    assert worker.forgotten == 2, "what was stored before the second is deleted too"
    worker.steps_until(lambda: not worker.part.forgets)
    worker.step(StepPlan(stores=(worker.store(3, 20, 22),)))
    worker.steps_until(lambda: 3 in worker.released)
    worker.part._settle(30.0)
    assert all(worker.holds(20, 21))
    worker.engine.check_idle()


def test_only_what_is_lost_counts_as_refused() -> None:
    patient = Worker(slots=2)
    patient.step(StepPlan(stores=(patient.store(1, 0, 30),)))
    patient.steps_until(lambda: patient.released == {1})
    patient.part._settle(30.0)
    assert all(patient.holds(*range(30)))
    assert not patient.totals.refused
    pressed = Worker(slots=2)
    pressed.step(StepPlan(stores=(pressed.store(1, 0, 30),)))
    pressed.step(StepPlan(revoked=(1,)))
    pressed.steps_until(lambda: pressed.released == {1})
    pressed.part._settle(30.0)
    assert sum(pressed.totals.refused.values()) == 30 - sum(pressed.holds(*range(30)))


@pytest.mark.parametrize("where", ["plan_load", "offer", "poll", "holds", "distrust"])
def test_after_a_bug_all_loads_fail_all_stores_are_released_and_nothing_is_raised(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker(slots=3)
    worker.step(StepPlan(stores=(worker.store(1, 0, 10),)))
    worker.steps_until(lambda: worker.released == {1})

    def bug(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a bug")

    monkeypatch.setattr(worker.engine, where, bug)
    load = Load(1, "r", tuple(NAMES[:10]), tuple(range(20, 30)))
    ended = worker.step(StepPlan(loads=(load,), stores=(worker.store(2, 10, 14),)))
    assert (ended.request_ids, ended.failed_blocks) == ({"r"}, set(load.blocks))
    assert worker.released == {1, 2}
    assert worker.side.is_broken
    second = Load(2, "s", tuple(NAMES[:10]), tuple(range(20, 30)))
    ended = worker.step(StepPlan(loads=(second,), stores=(worker.store(3, 10, 14),)))
    assert (ended.request_ids, ended.failed_blocks) == ({"s"}, set(second.blocks))
    assert worker.released == {1, 2, 3}
    report = worker.side.take_report()
    assert report is not None
    assert report.broken
    worker.step(StepPlan(forget=True))
    assert worker.reported_forgotten == 1, "nobody waits for a broken worker"
    assert worker.part._deleting is not None
    worker.part._deleting.join(60)
    assert worker.forgotten == 1
    worker.side.close()


def test_a_load_of_several_parts_ends_when_the_last_one_does() -> None:
    parts = [Worker(), Worker()]
    for worker in parts:
        worker.step(StepPlan(stores=(worker.store(1, 0, 4),)))
        worker.part._settle(30.0)
        worker.engine.drop_host_copies()
    parts[1].tier.delete([derived_key(ROOT, NAMES[2])])
    side = RankSide([worker.part for worker in parts])
    plan = StepPlan(loads=(Load(1, "r", tuple(NAMES[:4]), (20, 21, 22, 23)),))
    failed: set[int] = set()
    parts[0].part.begin(plan)
    parts[0].part._settle(30.0)
    ended = side.take_ended_loads()
    assert not ended.request_ids, "the other part has not even begun"
    parts[1].part.begin(plan)
    parts[1].part._settle(30.0)
    ended = side.take_ended_loads()
    failed |= ended.failed_blocks
    assert (ended.request_ids, failed) == ({"r"}, {22, 23})
    assert not side.take_ended_loads().request_ids
    side.close()


def test_policies_hear_of_prompts_that_have_nothing_to_load() -> None:
    """Else `frugal` would never see a prompt a second time, and would write none."""
    worker = Worker(admission=frugal.build(frugal.Options(min_uses=2)))
    names = tuple(NAMES[:4])
    for number in (1, 2):
        for block in range(4):
            worker.fill(block, CONTENT[block])
        worker.step(StepPlan(prompts=(names,), stores=(Store(number, names, (0, 1, 2, 3), 0),)))
        worker.steps_until(lambda number=number: number in worker.released and worker.engine.idle)
        assert worker.tier.contains([derived_key(ROOT, name) for name in names]) == [number == 2] * 4
        worker.engine.drop_host_copies()
    worker.step(StepPlan(prompts=(names,), loads=(Load(3, "r", names, (10, 11, 12, 13)),)))
    worker.steps_until(lambda: not worker.part.open_loads)
    assert torch.equal(worker.block(12), CONTENT[2])
    worker.side.close()
