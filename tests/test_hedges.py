"""A read that is slow is asked for a second time, of another tier: whichever comes first counts, and only once."""

from __future__ import annotations

import random

import pytest

from engine_world import PROMPT, SECOND_NS, World, make_world
from forebay.engine import EngineOptions
from forebay.errors import ConfigError
from forebay.events import ChannelState, Overdue
from forebay.flow import FlowOptions
from forebay.testing.schedule import BLOCK_BYTES, Chances, Schedule, truth
from forebay.types import Job, JobKind, Loaded, Traffic

QUICK_NS, SLOW_NS = 1_000_000, 900_000_000


def two_tiers(**options: object) -> World:
    """Everything is in both tiers and in no host slot, and reads of both have been seen to take a millisecond."""
    world = make_world(
        tiers={"disk": 100, "remote": 100},
        options=EngineOptions(batch_blocks=4, hedge_patience_s=0.01, **options),  # type: ignore[arg-type]
    )
    world.store(PROMPT)
    world.executor._cost_ns = lambda job: QUICK_NS
    for _ in range(4):
        world.engine.drop_host_copies()
        world.load("learn", PROMPT)
    world.engine.drop_host_copies()
    world.events.clear()
    return world


def slow_disk(world: World, jobs: int) -> None:
    """The next reads of the disk take long; the others are quick."""
    left = jobs

    def cost_ns(job: Job) -> int:
        nonlocal left
        if job.kind is JobKind.READ and job.tier == "disk" and left:
            left -= 1
            return SLOW_NS
        return QUICK_NS

    world.executor._cost_ns = cost_ns


def test_a_slow_read_is_overtaken_by_the_other_tier_and_its_slots_come_back() -> None:
    world = two_tiers(hedge_share=1.0)
    slow_disk(world, 1)
    began_ns = world.executor.now_ns()
    plan = world.plan("r", PROMPT[:4])
    world.engine.start_load(plan, world.lend(0, 4))
    world.run_until(began_ns + SLOW_NS // 2)
    assert world.ended == [Loaded("r", 4)]
    assert [world.device.memory[i] for i in range(4)] == [truth(key) for key in PROMPT[:4]]
    assert world.count(JobKind.READ, "remote") == 4
    assert world.engine._stage.stranded_slots == 4
    world.engine.check_idle()
    world.run_until(began_ns + 2 * SLOW_NS)
    assert world.engine._stage.stranded_slots == 0
    world.engine.check_idle()


def test_second_reads_that_hang_too_give_back_their_credits_and_at_last_their_slots() -> None:
    world = two_tiers(hedge_share=1.0, read_deadline_s=1.0)
    hang_ns = 1_000 * SECOND_NS
    world.executor._cost_ns = lambda job: hang_ns if job.kind is JobKind.READ else QUICK_NS
    began_ns = world.executor.now_ns()
    plan = world.plan("r", PROMPT)
    world.engine.start_load(plan, world.lend(0, 40))
    world.run_until(began_ns + 10 * SECOND_NS)
    assert world.ended == [Loaded("r", 0)]
    overdue = {event.job.tier for event in world.events if isinstance(event, Overdue)}
    assert overdue == {"disk", "remote"}
    views = {view.channel.tier: view for view in world.engine.channels()}
    assert [views[tier].in_flight_blocks for tier in ("disk", "remote")] == [0, 0]
    assert views["remote"].state is not ChannelState.OPEN
    assert world.engine.stranded_slots > 0
    world.engine.check_idle()
    world.executor._cost_ns = lambda job: QUICK_NS
    world.run_until(began_ns + 100 * hang_ns)
    assert world.engine.stranded_slots == 0
    world.ended.clear()
    assert world.load("after", PROMPT) == 40
    world.engine.check_idle()


def test_what_was_saved_up_is_bounded_and_credits_are_asked_for() -> None:
    world = make_world(
        slots=400,
        tiers={"disk": 400, "remote": 400},
        options=EngineOptions(
            batch_blocks=4, hedge_patience_s=0.01, hedge_share=1.0, flow=FlowOptions(most_depth_blocks=400)
        ),
    )
    world.store(PROMPT)
    world.executor._cost_ns = lambda job: QUICK_NS
    for _ in range(40):
        world.engine.drop_host_copies()
        world.load("learn", PROMPT)
    hedges = world.engine._loads._hedges
    assert hedges._budget_bytes == 64 * BLOCK_BYTES
    world.engine.drop_host_copies()
    world.events.clear()
    world.engine.limit_rate("remote", Traffic.DEMAND, 0.01 * BLOCK_BYTES)
    slow_disk(world, 4)
    assert world.load("r", PROMPT) == 40
    assert world.count(JobKind.READ, "remote") == 4, "one job, and then the limit"


def test_a_first_read_that_comes_first_after_all_wins() -> None:
    world = two_tiers(hedge_share=1.0)
    disk_ns, remote_ns = 40_000_000, 500_000_000
    world.executor._cost_ns = lambda job: disk_ns if job.tier == "disk" else remote_ns
    began_ns = world.executor.now_ns()
    plan = world.plan("r", PROMPT[:4])
    world.engine.start_load(plan, world.lend(0, 4))
    world.run_until(began_ns + 2 * disk_ns)
    assert world.ended == [Loaded("r", 4)]
    assert world.engine._stage.stranded_slots == 4, "the second reads are still out"
    world.run_until(began_ns + 2 * SECOND_NS)
    assert world.engine._stage.stranded_slots == 0
    world.engine.check_idle()


def test_second_reads_stay_within_their_budget() -> None:
    world = two_tiers(hedge_share=0.05)
    world.executor._cost_ns = lambda job: 50_000_000 if job.tier == "disk" else QUICK_NS
    for number in range(20):
        assert world.load(f"r{number}", PROMPT) == 40
        world.engine.drop_host_copies()
    read_blocks = 24 * 40
    assert 0 < world.count(JobKind.READ, "remote") <= 0.05 * read_blocks + 1


@pytest.mark.parametrize("share", [0.0, 0.05])
def test_quick_reads_are_never_asked_for_twice(share: float) -> None:
    world = two_tiers(hedge_share=share)
    assert world.load("r", PROMPT) == 40
    assert world.count(JobKind.READ, "remote") == 0


def test_a_hedge_of_a_hung_read_saves_the_load_from_its_deadline() -> None:
    world = two_tiers(hedge_share=1.0, read_deadline_s=5.0)
    world.executor._cost_ns = lambda job: 10**12 if job.tier == "disk" and job.kind is JobKind.READ else QUICK_NS
    began_ns = world.executor.now_ns()
    assert world.load("r", PROMPT[:4]) == 4
    assert world.executor.now_ns() - began_ns < SECOND_NS // 2


@pytest.mark.parametrize("first_seed", range(0, 45, 15))
def test_random_schedules_with_slow_reads_keep_every_promise(first_seed: int) -> None:
    from test_schedules import memory_tier

    hedged = 0
    for seed in range(first_seed, first_seed + 15):
        slow = random.Random(seed)
        tiers = {"fast": memory_tier("fast", 60, 100_000), "slow": memory_tier("slow", 60, 200_000)}
        options = EngineOptions(batch_blocks=3, hedge_share=1.0, hedge_patience_s=0.0005, read_deadline_s=0.5)
        schedule = Schedule(seed, tiers, host_slots=12, chances=Chances(hung_read=0.1), engine_options=options)
        cost_ns = schedule._executor._cost_ns
        schedule._executor._cost_ns = lambda job, slow=slow, cost_ns=cost_ns: (
            cost_ns(job) * (slow.choice((1, 1, 30)) if job.kind is JobKind.READ else 1)
        )
        spare_read = schedule.engine._stage.spare_read

        def counting(*args: object, spare_read: object = spare_read) -> Job:
            nonlocal hedged
            hedged += 1
            return spare_read(*args)  # type: ignore[no-any-return, operator]

        schedule.engine._stage.spare_read = counting  # type: ignore[method-assign]
        schedule.run(steps=150)
    assert hedged > 10, "hardly anything is hedged: this tests nothing"


@pytest.mark.parametrize("share", [-0.1, 1.5])
def test_a_share_that_makes_no_sense_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match="hedge_share"):
        make_world(options=EngineOptions(hedge_share=share))
