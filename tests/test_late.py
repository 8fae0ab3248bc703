"""Time runs out: reads that hang, loads that take too long, and places that are left alone for a while."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from engine_world import PROMPT, SECOND_NS, World, make_world
from forebay.engine import EngineOptions
from forebay.events import JobEnded, LoadEnded, Overdue, Reason, Refused
from forebay.flow import FlowOptions
from forebay.ports import Tier
from forebay.testing.schedule import BLOCK_BYTES, Chances, truth
from forebay.types import BlockKey, Job, JobKind, Loaded, Outcome

OPTIONS = EngineOptions(batch_blocks=4, read_deadline_s=1.0, load_deadline_s=100.0, flow=FlowOptions(retry_s=10.0))
HANG_NS = 1_000 * SECOND_NS


def hang(world: World, *, places: Sequence[tuple[str, int]] = (("disk", 0),)) -> None:
    """From now on, reads of these places take longer than anybody waits."""
    world.executor._cost_ns = lambda job: (
        HANG_NS if job.kind is JobKind.READ and (job.tier, job.route) in places else 100_000
    )


def heal(world: World) -> None:
    world.executor._cost_ns = lambda job: 100_000


def start(world: World, name: str, keys: Sequence[BlockKey], at: int = 0) -> None:
    plan = world.plan(name, keys)
    world.engine.start_load(plan, world.lend(at, plan.hit_blocks))


def test_a_hung_read_is_a_miss_at_its_deadline_and_its_slots_come_back_when_it_ends() -> None:
    world = make_world(options=OPTIONS)
    world.store(PROMPT)
    world.engine.drop_host_copies()
    hang(world)
    began_ns = world.executor.now_ns()
    start(world, "r", PROMPT)
    world.run_until(began_ns + 2 * SECOND_NS)
    assert world.ended == [Loaded("r", 0)]
    (ended,) = [event for event in world.events if isinstance(event, LoadEnded)]
    assert ended.at_ns - began_ns == pytest.approx(1.0 * SECOND_NS, rel=0.01)
    assert sum(isinstance(event, Overdue) for event in world.events) >= 1
    stranded = world.engine._stage.stranded_slots
    assert stranded > 0
    world.engine.check_idle()
    world.ended.clear()
    assert world.load("meanwhile", PROMPT) == 0  # the place is left alone: nobody waits for it a second time
    heal(world)
    world.run_until(began_ns + 20 * HANG_NS)  # the lane of this executor serves one job after the other
    world.ended.clear()
    assert world.engine._stage.stranded_slots == 0
    assert world.load("after", PROMPT) == 40
    world.engine.check_idle()


def test_late_data_never_reaches_a_block_that_was_filled_anew() -> None:
    """The hung read ends after the same block was read again into another slot, and overwrites its old slot."""
    world = make_world(options=OPTIONS)
    world.store(PROMPT[:4])
    world.engine.drop_host_copies()
    disk = world.tiers["disk"]
    read = disk.read

    def read_rubbish(keys: Sequence[BlockKey], into: Sequence[memoryview]) -> Sequence[Outcome]:
        for view in into:
            view[:] = b"\xee" * len(view)
        return [Outcome.OK] * len(keys)

    disk.read = read_rubbish  # type: ignore[method-assign]
    hang(world)
    began_ns = world.executor.now_ns()
    start(world, "hung", PROMPT[:4])
    world.run_until(began_ns + 12 * SECOND_NS)  # past the deadline, and past the pause of the place
    assert world.ended == [Loaded("hung", 0)]
    world.ended.clear()
    heal(world)
    hung = world.engine._stage._stranded.copy()
    assert hung
    read_late, disk.read = disk.read, read  # type: ignore[method-assign]
    assert world.load("sound", PROMPT[:4]) == 4
    for slots in hung.values():  # what the late read does to the memory that it was given
        assert read_late([PROMPT[0]] * len(slots), [world.engine._stage.pool.view(slot) for slot in slots])
    assert world.load("from dram", PROMPT[:4]) == 4
    world.engine.check()


def test_what_a_late_read_found_out_is_believed() -> None:
    world = make_world(options=OPTIONS)
    world.store(PROMPT[:4])
    world.engine.drop_host_copies()
    world.tiers["disk"].delete(PROMPT[:1])
    hang(world)
    start(world, "hung", PROMPT[:4])
    world.run_until(world.executor.now_ns() + 20 * HANG_NS)
    assert world.engine.holds(PROMPT[:4]) == [False, True, True, True]
    world.engine.check_idle()


def test_a_block_that_another_tier_holds_too_comes_from_there() -> None:
    world = make_world(tiers={"disk": 100, "remote": 100}, options=OPTIONS)
    world.store(PROMPT)
    world.engine.drop_host_copies()
    hang(world)
    assert world.load("r", PROMPT) == 40
    assert world.count(JobKind.READ, "remote") == 40
    assert world.load("r2", PROMPT) == 40


class TwoDisks:
    """A memory tier in two places, by the parity of a key's first byte."""

    def __init__(self, tier: Tier) -> None:
        self.spec, self.contains, self.write, self.delete = tier.spec, tier.contains, tier.write, tier.delete
        self.scan, self.close, self.read = tier.scan, tier.close, tier.read

    def route(self, key: BlockKey) -> int:
        return key[0] % 2


def test_a_hung_place_takes_no_block_of_the_sound_one_with_it() -> None:
    world = make_world(wrap=TwoDisks, options=OPTIONS)
    world.store(PROMPT)
    world.engine.drop_host_copies()
    hang(world, places=[("disk", 1)])
    first_hung = next(i for i, key in enumerate(PROMPT) if key[0] % 2)
    assert world.load("mixed", PROMPT) == first_hung
    sound = [key for key in PROMPT if not key[0] % 2]
    began_ns = world.executor.now_ns()
    assert world.load("sound", sound) == len(sound)
    assert world.executor.now_ns() - began_ns < SECOND_NS // 10
    assert world.plan("next", PROMPT).hit_blocks >= first_hung
    world.engine.cancel_load("next")


def test_a_load_ends_at_its_deadline_with_what_has_arrived() -> None:
    options = EngineOptions(batch_blocks=4, read_deadline_s=1_000.0, load_deadline_s=5.0)
    world = make_world(options=options)
    world.store(PROMPT)
    world.engine.drop_host_copies()
    served = 0

    def cost_ns(job: Job) -> int:
        nonlocal served
        if job.kind is not JobKind.READ:
            return 100_000
        served += 1
        return 100_000 if served <= 3 else HANG_NS

    world.executor._cost_ns = cost_ns
    began_ns = world.executor.now_ns()
    start(world, "r", PROMPT)
    world.run_until(began_ns + 6 * SECOND_NS)
    assert world.ended == [Loaded("r", 12)]
    (ended,) = [event for event in world.events if isinstance(event, LoadEnded)]
    assert ended.at_ns - began_ns == pytest.approx(5 * SECOND_NS, rel=0.01)


def test_who_waited_for_a_fill_that_hangs_looks_elsewhere_itself() -> None:
    world = make_world(tiers={"disk": 100, "remote": 100}, options=OPTIONS)
    world.store(PROMPT[:4])
    world.engine.drop_host_copies()
    hang(world)
    for number in range(3):
        start(world, f"r{number}", PROMPT[:4], at=10 * number)
    world.run_until(world.executor.now_ns() + 3 * SECOND_NS)
    assert sorted(world.ended, key=lambda loaded: loaded.request_id) == [Loaded(f"r{i}", 4) for i in range(3)]
    assert world.count(JobKind.READ, "remote") == 4  # one of them reads, the others wait again
    for number in range(3):
        for i, key in enumerate(PROMPT[:4]):
            assert world.device.memory[10 * number + i] == truth(key)


def test_a_slow_device_is_not_taken_for_a_hung_one() -> None:
    """Jobs that take longer than the deadline are in time as soon as it is known that such jobs take so long."""
    options = EngineOptions(batch_blocks=4, read_deadline_s=1.0)
    world = make_world(options=options)
    world.store(PROMPT)
    world.engine.drop_host_copies()
    world.executor._cost_ns = lambda job: len(job.keys) * SECOND_NS // 5
    assert world.load("learn", PROMPT[:4]) == 4
    world.engine.drop_host_copies()
    world.executor._cost_ns = lambda job: len(job.keys) * SECOND_NS // 3
    assert world.load("slow", PROMPT) == 40
    assert not [event for event in world.events if isinstance(event, Overdue)]
    assert all(event.job.moved_bytes == len(event.job.keys) * BLOCK_BYTES for event in world.events
               if isinstance(event, JobEnded) and event.job.kind is JobKind.READ)  # fmt: skip


def hang_writes(world: World) -> None:
    world.executor._cost_ns = lambda job: HANG_NS if job.kind is JobKind.WRITE and job.tier == "disk" else 100_000


def offer(world: World, keys: Sequence[BlockKey]) -> int:
    blocks = world.lend(100, len(keys))
    for key, block in zip(keys, blocks, strict=True):
        world.device.memory[block] = truth(key)
    return world.engine.offer(keys, blocks)


def test_writes_that_hang_give_back_all_but_what_they_still_use() -> None:
    world = make_world(
        slots=32, tiers={"disk": 100, "remote": 100}, options=msgspec.structs.replace(OPTIONS, write_deadline_s=5.0)
    )
    hang_writes(world)
    began_ns = world.executor.now_ns()
    assert offer(world, PROMPT[:12]) == 12
    world.run_until(began_ns + 6 * SECOND_NS)
    overdue = [event.job for event in world.events if isinstance(event, Overdue)]
    assert {(job.kind, job.tier) for job in overdue} == {(JobKind.WRITE, "disk")}
    hung = {key for job in overdue for key in job.keys}
    assert len(hung) == 8, "two jobs; the other blocks were refused"
    assert [event.blocks for event in world.events if isinstance(event, Refused)] == [4]
    world.engine.check_idle()
    assert world.load("from dram", PROMPT[:12]) == 12
    for first in range(12, 40, 4):  # the hung writes' slots are not among those that these go through
        assert offer(world, PROMPT[first : first + 4]) == 4
        world.run_until(world.executor.now_ns() + SECOND_NS // 100)
    assert world.count(JobKind.WRITE, "remote") == 40
    refused = {(event.place, event.reason) for event in world.events if isinstance(event, Refused)}
    assert refused == {("disk", Reason.HUNG)}
    heal(world)
    world.run_until(began_ns + 3 * HANG_NS)
    world.ended.clear()
    assert all(world.tiers["disk"].contains(sorted(hung)))
    world.engine.check_idle()
    world.store(PROMPT[12:16])
    world.engine.drop_host_copies()
    assert world.load("from both", PROMPT) == 40
    world.engine.check_idle()


def test_a_tier_whose_writes_hang_is_tried_with_one_block() -> None:
    world = make_world(slots=32, options=msgspec.structs.replace(OPTIONS, write_deadline_s=1.0))
    hang_writes(world)
    assert offer(world, PROMPT[:4]) == 4
    world.run_until(world.executor.now_ns() + 12 * SECOND_NS)  # past the deadline, and past the pause of the tier
    assert offer(world, PROMPT[4:12]) == 8
    world.run_until(world.executor.now_ns() + 2 * SECOND_NS)
    tried = [len(event.job.keys) for event in world.events if isinstance(event, Overdue)]
    assert tried == [4, 1]
    heal(world)
    world.run_until(world.executor.now_ns() + 40 * SECOND_NS)
    world.store(PROMPT[12:24])
    assert all(world.tiers["disk"].contains(PROMPT[12:24]))


def test_a_copy_out_of_the_device_that_hangs_keeps_no_load_waiting() -> None:
    world = make_world(options=msgspec.structs.replace(OPTIONS, write_deadline_s=0.01))
    sound, world.device._chances = world.device._chances, Chances(late_copy=1.0)
    began_ns = world.executor.now_ns()
    assert offer(world, PROMPT[:4]) == 4
    start(world, "waits", PROMPT[:4])
    world.run_until(began_ns + SECOND_NS // 50)
    assert world.ended == [Loaded("waits", 0)]
    assert world.engine.stranded_slots == 4
    world.engine.check_idle()
    world.device._chances = sound
    world.run_until(began_ns + SECOND_NS)
    assert world.engine.stranded_slots == 0
    world.ended.clear()
    world.store(PROMPT[:4])
    assert world.load("after", PROMPT[:4]) == 4
    world.engine.check_idle()
