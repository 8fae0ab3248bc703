"""Prefetches: blocks that are in the host pool before their request comes, and in nobody's way."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from engine_world import PROMPT, SECOND_NS, World, make_world
from forebay.engine import EngineOptions
from forebay.errors import ConfigError
from forebay.events import FlowState, PrefetchEnded, PrefetchFate, Reason
from forebay.flow import FlowOptions
from forebay.journal import encode
from forebay.keys import block_keys
from forebay.ports import Tier
from forebay.testing.schedule import BLOCK_BYTES, NAMESPACE
from forebay.types import JobKind, Loaded, Request, Traffic


class Scrubber:
    """A tier that reads of its own accord, and keeps what it is told."""

    def __init__(self, tier: Tier) -> None:
        self.spec, self.contains, self.write, self.delete = tier.spec, tier.contains, tier.write, tier.delete
        self.scan, self.close, self.read = tier.scan, tier.close, tier.read
        self.told: list[bool] = []
        self.rate, self.moved = 1e6, 0

    def stand_aside(self, demand_waits: bool) -> None:
        self.told.append(demand_waits)

    def limit_scrub(self, bytes_per_s: float | None) -> None:
        self.rate = bytes_per_s or 1e6

    def scrub_bytes_per_s(self) -> float:
        return self.rate

    def scrubbed_bytes(self) -> int:
        return self.moved


def fates(world: World) -> list[tuple[PrefetchFate, int]]:
    return [(event.fate, event.arrived_blocks) for event in world.events if isinstance(event, PrefetchEnded)]


def stored_world(**options: object) -> World:
    world = make_world(options=EngineOptions(batch_blocks=4, **options))  # type: ignore[arg-type]
    world.store(PROMPT)
    world.engine.drop_host_copies()
    return world


def in_s(world: World, seconds: float) -> int:
    return world.executor.now_ns() + int(seconds * SECOND_NS)


def test_a_prefetched_prompt_is_loaded_from_dram() -> None:
    world = stored_world()
    assert world.engine.prefetch(Request("r", PROMPT[:30]), in_s(world, 5)) == 30
    assert world.settle() == []
    world.engine.check_idle()
    plan = world.plan("r", PROMPT)
    assert {read.source for read in plan.reads[:30]} == {"host"}
    assert {read.source for read in plan.reads[30:]} == {"disk"}
    world.engine.cancel_load("r")
    assert fates(world) == [(PrefetchFate.USED, 30)]
    world.engine.check_idle()


def test_a_request_that_comes_while_its_prefetch_is_under_way_reads_nothing_twice() -> None:
    world = stored_world()
    world.engine.prefetch(Request("r", PROMPT), in_s(world, 5))
    assert world.load("r", PROMPT) == 40
    assert world.count(JobKind.READ, "disk") == 40
    assert len(fates(world)) == 1
    world.engine.check_idle()


def test_prefetched_blocks_stay_until_the_request_has_not_come_for_a_while() -> None:
    world = stored_world(prefetch_linger_s=3.0)
    world.engine.prefetch(Request("r", PROMPT[:8]), in_s(world, 1))
    world.settle()
    assert world.engine.drop_host_copies() == 0, "they are pinned"
    world.run_until(in_s(world, 10))
    assert fates(world) == [(PrefetchFate.UNUSED, 8)]
    assert world.engine.drop_host_copies() == 8


def test_a_prefetch_whose_time_is_over_before_it_began_is_dropped_and_counted() -> None:
    world = stored_world()
    world.executor._cost_ns = lambda job: SECOND_NS if job.kind is JobKind.READ else 1_000
    world.engine.prefetch(Request("first", PROMPT[:4]), in_s(world, 0.5))
    world.engine.prefetch(Request("second", PROMPT[4:8]), in_s(world, 0.6))
    world.settle()
    assert fates(world) == [(PrefetchFate.LATE, 0), (PrefetchFate.LATE, 0)]
    world.engine.check_idle()


def test_a_prefetch_whose_first_block_is_found_missing_last_lets_go_of_the_others() -> None:
    """As when one disk of several goes: without the first block, the others are of no use to the request."""
    world = make_world(tiers={"disk": 1000, "far": 1000})
    world.store(PROMPT[:12])
    world.engine.drop_host_copies()
    world.engine._stage.withdraw(PROMPT[0], "disk", Reason.MISSING)
    for tier in world.tiers.values():  # believed to be far, and nowhere
        tier.delete(PROMPT[:1])
    world.executor._cost_ns = lambda job: SECOND_NS if job.tier == "far" else 1_000
    world.engine.prefetch(Request("r", PROMPT[:12]), in_s(world, 5))
    world.settle()
    world.engine.check_idle()
    assert world.engine.drop_host_copies() == 11, "none is pinned"


def test_a_cancelled_prefetch_leaves_nothing_pinned() -> None:
    world = stored_world()
    world.engine.prefetch(Request("r", PROMPT), in_s(world, 5))
    world.engine.cancel_prefetch("r")
    world.engine.cancel_prefetch("nobody")
    world.settle()
    world.engine.check_idle()
    assert [fate for fate, _ in fates(world)] == [PrefetchFate.UNUSED]


def test_the_same_request_is_prefetched_once_and_unknown_blocks_not_at_all() -> None:
    world = stored_world()
    assert world.engine.prefetch(Request("r", PROMPT), in_s(world, 5)) == 40
    assert world.engine.prefetch(Request("r", PROMPT), in_s(world, 6)) == 0
    unknown = block_keys(NAMESPACE, [9] * 40)
    assert world.engine.prefetch(Request("other", unknown), in_s(world, 5)) == 0
    world.settle()
    assert world.count(JobKind.READ, "disk") == 32  # half of the 64 slots


def test_the_earliest_deadline_goes_first() -> None:
    world = stored_world(flow=FlowOptions(first_depth_blocks=4))
    world.executor._cost_ns = lambda job: 10_000_000 * len(job.keys)
    plan = world.plan("now", PROMPT[16:])
    world.engine.start_load(plan, world.lend(0, 24))
    world.engine.prefetch(Request("late", PROMPT[:8]), in_s(world, 50))
    world.engine.prefetch(Request("soon", PROMPT[8:16]), in_s(world, 20))
    while world.engine._loads.leading_blocks("prefetch\0soon") < 8:
        world.run_until(in_s(world, 0.01))
    assert world.ended == [Loaded("now", 24)]
    assert world.engine._loads.leading_blocks("prefetch\0late") <= 4


def test_demand_takes_the_slots_of_the_prefetch_that_is_needed_last() -> None:
    world = make_world(slots=16, options=EngineOptions(batch_blocks=2, prefetch_pool_share=1.0))
    world.store(PROMPT)
    world.engine.drop_host_copies()
    world.engine.prefetch(Request("soon", PROMPT[:6]), in_s(world, 5))
    world.engine.prefetch(Request("late", PROMPT[6:16]), in_s(world, 9))
    world.settle()
    assert world.load("now", PROMPT[20:]) == 20
    assert fates(world)[0][0] is PrefetchFate.YIELDED
    assert world.plan("soon", PROMPT[:6]).reads[0].source == "host"
    world.engine.cancel_load("soon")


def test_demand_goes_first_when_both_wait() -> None:
    world = stored_world()
    world.executor._cost_ns = lambda job: 10_000_000 * len(job.keys)
    world.engine.prefetch(Request("later", PROMPT[:20]), in_s(world, 30))
    began_ns = world.executor.now_ns()
    assert world.load("now", PROMPT[20:]) == 20
    took_ns = world.executor.now_ns() - began_ns
    assert took_ns <= (20 + 32) * 10_000_000, "only what was in flight already went before it"


def test_a_limit_needs_a_tier_that_exists() -> None:
    world = make_world()
    with pytest.raises(ConfigError, match="no tier is named 'dsik'"):
        world.engine.limit_rate("dsik", Traffic.DEMAND, 1e9)


def test_the_shares_the_queue_and_the_limits_are_told_while_anything_moves() -> None:
    world = make_world(options=EngineOptions(batch_blocks=4, flow=FlowOptions(first_depth_blocks=4, state_every_s=0.5)))
    world.store(PROMPT)
    world.engine.drop_host_copies()
    world.events.clear()
    world.executor._cost_ns = lambda job: 200_000_000
    world.engine.limit_rate("disk", Traffic.WRITE, 1e6)
    plan = world.plan("r", PROMPT)
    world.engine.start_load(plan, world.lend(0, 40))
    world.run_until(world.executor.now_ns() + 60 * SECOND_NS)
    states = [event for event in world.events if isinstance(event, FlowState)]
    assert 6 <= len(states) <= 9, "two a second while it loads, and none afterwards"
    assert all(later.at_ns - state.at_ns >= SECOND_NS // 2 for state, later in pairwise(states))
    (first, limited), (channel,) = states[0].traffic, states[0].channels
    assert (first.tier, first.traffic) == ("disk", Traffic.DEMAND)
    assert (first.in_flight_blocks, first.waiting_blocks) == (channel.in_flight_blocks, channel.waiting_blocks)
    assert first.in_flight_blocks == 4
    assert first.waiting_blocks >= 20
    assert states[0].waiting_loads == 1
    assert (limited.traffic, limited.limit_bytes_per_s) == (Traffic.WRITE, 1e6)
    moved = sum(view.moved_bytes for state in states for view in state.traffic if view.traffic is Traffic.DEMAND)
    assert 20 * BLOCK_BYTES <= moved <= 40 * BLOCK_BYTES
    for state in states:
        assert json.loads(encode(state))["traffic"][-1]["traffic"] in ("demand", "write")


def test_a_scrub_is_told_when_loads_wait_and_has_a_rate_that_can_be_changed() -> None:
    world = make_world(wrap=Scrubber)
    world.store(PROMPT)
    world.engine.drop_host_copies()
    scrubber = world.engine._stage.tiers["disk"]
    assert isinstance(scrubber, Scrubber)
    assert scrubber.told == []
    world.load("r", PROMPT)
    assert scrubber.told == [True, False]
    world.engine.limit_rate("disk", Traffic.SCRUB, 5e6)
    assert scrubber.rate == 5e6
    scrubber.moved = 1_000
    world.run_until(world.executor.now_ns() + 2 * SECOND_NS)
    views = [view for event in world.events if isinstance(event, FlowState) for view in event.traffic]
    (scrubbed,) = [view for view in views if view.traffic is Traffic.SCRUB and view.moved_bytes]
    assert (scrubbed.moved_bytes, scrubbed.limit_bytes_per_s) == (1_000, 5e6)
    with pytest.raises(ConfigError, match="does not scrub"):
        make_world().engine.limit_rate("disk", Traffic.SCRUB, 5e6)
