"""The state machine that says which transfer goes next, without an engine: order, credits, shares, closed channels."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.costs import ChannelCost, PrefillCost
from forebay.credits import Depth, Rate
from forebay.errors import ConfigError
from forebay.events import ChannelState
from forebay.fairness import FairSharing, Order, Queue
from forebay.flow import Flow, FlowOptions
from forebay.types import BlockKey, Channel, Job, JobId, JobKind, JobResult, Outcome, Slot, Traffic

MB = 1_000_000
SECOND_NS = 1_000_000_000
DISK = Channel("disk", 0)


# --- order


@dataclass(frozen=True)
class Arrival:
    at: int
    """Work that the device has done when it arrives."""
    work: int


ARRIVALS = st.lists(st.builds(Arrival, at=st.integers(0, 2_000), work=st.integers(1, 400)), min_size=1, max_size=14)


def ends_under_fair_sharing(arrivals: list[Arrival]) -> list[float]:
    """Device work after which each load ends when all that are present share evenly; by stepping through events."""
    left = {i: float(arrival.work) for i, arrival in enumerate(arrivals)}
    ends = [0.0] * len(arrivals)
    now = 0.0
    while left:
        present = [i for i in left if arrivals[i].at <= now]
        coming = [arrivals[i].at for i in left if arrivals[i].at > now]
        if not present:
            now = float(min(coming))
            continue
        step = min(left[i] for i in present)
        if coming:
            step = min(step, (min(coming) - now) / len(present))
        now += step * len(present)
        for i in present:
            left[i] -= step
            if left[i] < 1e-9:
                ends[i] = now
                del left[i]
    return ends


def ends_in_order(arrivals: list[Arrival], order: Order, stretch: float = 1.0) -> list[int]:
    """The same device serving one unit of work after the other, each for the first load of the queue."""
    queue = Queue(order, stretch)
    left: dict[str, int] = {}
    ends = [0] * len(arrivals)
    waiting = sorted(range(len(arrivals)), key=lambda i: (arrivals[i].at, i))
    now = 0
    while waiting or left:
        while waiting and arrivals[waiting[0]].at <= now:
            i = waiting.pop(0)
            left[str(i)] = arrivals[i].work
            queue.enter(str(i), Traffic.DEMAND, arrivals[i].work, None)
        if not left:
            now = arrivals[waiting[0]].at
            continue
        name = queue.in_order()[0]
        queue.granted(name, 1)
        queue.served(1)
        now += 1
        left[name] -= 1
        if not left[name]:
            ends[int(name)] = now
            del left[name]
            queue.leave(name)
    return ends


@given(ARRIVALS)
def test_no_load_ends_later_than_under_fair_sharing(arrivals: list[Arrival]) -> None:
    for ordered, fair in zip(
        ends_in_order(arrivals, Order.FAIR_SOJOURN), ends_under_fair_sharing(arrivals), strict=True
    ):
        assert ordered <= fair + len(arrivals)  # the model of sharing is continuous, a unit of work is not


@given(ARRIVALS, st.sampled_from((1.5, 3.0)))
def test_stretch_bounds_how_long_a_load_may_be_passed(arrivals: list[Arrival], stretch: float) -> None:
    ordered = ends_in_order(arrivals, Order.FAIR_SOJOURN, stretch)
    for i, arrival in enumerate(arrivals):
        stretched = [*arrivals[:i], replace(arrival, work=round(arrival.work * stretch) + 1), *arrivals[i + 1 :]]
        assert ordered[i] <= ends_under_fair_sharing(stretched)[i] + len(arrivals)


@given(st.lists(st.integers(1, 300), min_size=2, max_size=12))
def test_of_loads_that_arrive_together_the_shorter_goes_first_and_the_last_ends_no_later(works: list[int]) -> None:
    arrivals = [Arrival(0, work) for work in works]
    ordered = ends_in_order(arrivals, Order.FAIR_SOJOURN)
    assert max(ordered) == sum(works) == round(max(ends_under_fair_sharing(arrivals)))
    by_end = sorted(range(len(works)), key=lambda i: ordered[i])
    assert [works[i] for i in by_end] == sorted(works)


def test_sixteen_equal_loads_get_half_the_mean_of_fair_sharing() -> None:
    arrivals = [Arrival(0, 100)] * 16
    ordered, interleaved = ends_in_order(arrivals, Order.FAIR_SOJOURN), ends_in_order(arrivals, Order.INTERLEAVED)
    assert sum(ordered) / 16 == pytest.approx(850)
    assert min(interleaved) > 1580
    assert max(ordered) == max(interleaved) == 1600


def test_arrival_order_serves_whole_loads_as_they_came() -> None:
    assert ends_in_order([Arrival(0, 300), Arrival(0, 10), Arrival(5, 1)], Order.ARRIVAL) == [300, 310, 311]


def test_a_load_that_is_given_up_leaves_no_trace_in_the_order_of_others() -> None:
    queue = Queue(Order.FAIR_SOJOURN, 1.0)
    queue.enter("long", Traffic.DEMAND, 1_000, None)
    queue.enter("gone", Traffic.DEMAND, 10, None)
    queue.leave("gone")
    queue.leave("gone")
    queue.served(500)
    queue.enter("late", Traffic.DEMAND, 400, None)  # the long one has 500 left under fair sharing
    assert queue.in_order() == ["late", "long"]
    queue.enter("later", Traffic.DEMAND, 501, None)
    assert queue.in_order() == ["late", "long", "later"]


def test_demand_goes_before_prefetches_and_those_by_their_deadlines() -> None:
    queue = Queue(Order.FAIR_SOJOURN, 1.0)
    queue.enter("later", Traffic.PREFETCH, 1, 200)
    queue.enter("soon", Traffic.PREFETCH, 10_000, 100)
    queue.enter("now", Traffic.DEMAND, 1_000_000, None)
    assert queue.in_order() == ["now", "soon", "later"]


def test_the_work_ahead_of_a_load_is_what_would_be_served_before_it() -> None:
    queue = Queue(Order.FAIR_SOJOURN, 1.0)
    for name, work in (("small", 10), ("middle", 100), ("large", 1_000)):
        queue.enter(name, Traffic.DEMAND, work, None)
    queue.granted("small", 4)
    assert [queue.ahead_bytes(work) for work in (5, 50, 500, 5_000)] == [0, 6, 106, 1_106]


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 40)), max_size=40))
def test_the_imaginary_system_drains_with_the_work_that_is_done(steps: list[tuple[int, int]]) -> None:
    fair, entered, served = FairSharing(), 0, 0
    for number, (work, done) in enumerate(steps):
        fair.enter(str(number), work)
        entered += work
        done = min(done, entered - served)
        fair.served(done)
        served += done
    fair.served(entered - served)
    begins = fair.enter("fresh", 7)
    fair.served(7)
    assert fair.level == pytest.approx(begins + 7), "old loads still take a part of the work"


# --- credits


@dataclass
class Device:
    """Throughput grows with the blocks in flight up to a knee."""

    knee_blocks: int
    blocks_per_s: float

    def run(self, depth: Depth, seconds: float) -> tuple[float, list[int]]:
        """Keeps the channel full; returns blocks a second over the last half, and the depths that were tried there."""
        now_s, moved, depths = 0.0, 0, []
        while now_s < seconds:
            blocks = max(1, depth.blocks // 2)
            now_s += blocks / (self.blocks_per_s * min(1.0, depth.blocks / self.knee_blocks))
            depth.moved(blocks, int(now_s * 1e9), lacked_work=False)
            if now_s > seconds / 2:
                moved += blocks
                depths.append(depth.blocks)
        return moved / (seconds / 2), depths


@pytest.mark.parametrize("knee_blocks", [2, 8, 32, 100, 200])
def test_the_depth_is_found_by_measuring(knee_blocks: int) -> None:
    device = Device(knee_blocks, 1_000)
    rate, depths = device.run(Depth(32, 256), 400)
    assert rate >= 970
    assert knee_blocks * 0.9 <= sorted(depths)[len(depths) // 2] <= max(2 * knee_blocks, 4)


def test_the_depth_follows_a_device_that_changes() -> None:
    depth = Depth(32, 256)
    Device(8, 1_000).run(depth, 100)
    shallow = depth.blocks
    rate, _ = Device(128, 4_000).run(depth, 200)
    assert shallow <= 16
    assert rate >= 0.9 * 4_000


def test_a_channel_that_lacks_work_teaches_nothing_about_its_depth() -> None:
    depth = Depth(32, 256)
    for at_ms in range(1, 10_000):
        depth.moved(1, at_ms * 1_000_000, lacked_work=True)
    assert depth.blocks == 32


def test_a_rate_holds_over_time_and_tells_when_it_opens() -> None:
    rate, now_ns, moved = Rate(100.0 * MB, 0), 0, 0
    while now_ns < 10 * SECOND_NS:
        if rate.allows(now_ns):
            rate.take(8 * MB, now_ns)
            moved += 8 * MB
        else:
            opens_ns = rate.opens_ns(now_ns)
            assert opens_ns > now_ns
            assert not rate.allows(opens_ns - 2_000_000)
            now_ns = opens_ns
            assert rate.allows(now_ns)
    assert moved == pytest.approx(1_000 * MB, rel=0.03)


# --- flow


def job(number: int, blocks: int = 1, traffic: Traffic = Traffic.DEMAND, channel: Channel = DISK) -> Job:
    keys = tuple(BlockKey(bytes([number % 251, i]) * 16) for i in range(blocks))
    kind = JobKind.WRITE if traffic is Traffic.WRITE else JobKind.READ
    slots = tuple(Slot(i) for i in range(blocks))
    return Job(
        JobId(number), kind, channel.tier, keys, slots, blocks * MB, route=channel.route, traffic=traffic
    )  # fmt: skip


def result(of: Job, started_ns: int, finished_ns: int, outcome: Outcome = Outcome.OK) -> JobResult:
    return JobResult(of, dict.fromkeys(of.keys, outcome), started_ns, finished_ns)


def make_flow(**options: object) -> Flow:
    return Flow(FlowOptions(**options), MB)  # type: ignore[arg-type]


def teach(flow: Flow, bytes_per_s: float = 1e9, channel: Channel = DISK) -> int:
    """Let the flow see a few jobs; returns the time after them."""
    now_ns = 0
    for number in range(1, 20):
        flow.sent(job(number, 4, channel=channel), now_ns)
        now_ns += int(4 * MB / bytes_per_s * 1e9)
        flow.ended(result(job(number, 4, channel=channel), 0, now_ns), now_ns)
    return now_ns


def test_no_more_is_granted_than_the_depth() -> None:
    flow = make_flow(first_depth_blocks=10)
    flow.want(DISK, Traffic.DEMAND, 100)
    assert flow.grant(DISK, Traffic.DEMAND, 0).blocks == 10
    flow.sent(job(1, 7), 0)
    grant = flow.grant(DISK, Traffic.DEMAND, 0)
    assert (grant.blocks, grant.batch_blocks, grant.is_idle) == (3, 5, False)
    flow.ended(result(job(1, 7), 0, SECOND_NS), SECOND_NS)
    assert flow.grant(DISK, Traffic.DEMAND, SECOND_NS).is_idle


def test_prefetches_wait_for_demand_and_keep_to_their_share() -> None:
    flow = make_flow(prefetch_share=0.5)
    now_ns = teach(flow, 1e9)
    flow.want(DISK, Traffic.PREFETCH, 10_000)
    moved, number, start_ns = 0, 100, now_ns
    while now_ns < start_ns + 2 * SECOND_NS:
        if not flow.grant(DISK, Traffic.PREFETCH, now_ns).blocks:
            opens_ns = flow.next_ns(now_ns)
            assert opens_ns is not None
            now_ns = max(opens_ns, now_ns + 1)
            continue
        number += 1
        sent = job(number, 8, Traffic.PREFETCH)
        flow.sent(sent, now_ns)
        now_ns += 8_000_000  # 8 MB at 1 GB/s
        flow.ended(result(sent, 0, now_ns), now_ns)
        moved += 8 * MB
    assert moved == pytest.approx(1_000 * MB, rel=0.15)
    flow.want(DISK, Traffic.DEMAND, 1)
    assert flow.grant(DISK, Traffic.PREFETCH, now_ns + SECOND_NS).blocks == 0


def test_writes_keep_a_share_while_demand_waits_and_have_all_of_it_otherwise() -> None:
    flow = make_flow(write_share=0.1)
    now_ns = teach(flow, 1e9)
    flow.want(DISK, Traffic.DEMAND, 1)
    written, end_ns = 0, now_ns + 2 * SECOND_NS
    while now_ns < end_ns:
        if flow.may_write("disk", now_ns):
            flow.sent(job(1, 8, Traffic.WRITE), now_ns)
            written += 8 * MB
        else:
            now_ns = flow.next_ns(now_ns) or end_ns
    assert written == pytest.approx(200 * MB, rel=0.2)
    flow.want(DISK, Traffic.DEMAND, -1)
    for number in range(100):
        assert flow.may_write("disk", now_ns)
        flow.sent(job(number, 8, Traffic.WRITE), now_ns)


def test_a_rate_limit_can_be_set_changed_and_lifted_while_running() -> None:
    flow = make_flow()
    flow.want(DISK, Traffic.DEMAND, 100)
    flow.limit("disk", Traffic.DEMAND, 10.0 * MB, 0)
    flow.sent(job(1, 5), 0)
    assert flow.grant(DISK, Traffic.DEMAND, 0).blocks == 0
    assert flow.next_ns(0) == pytest.approx(400_000_000, rel=0.01)
    flow.limit("disk", Traffic.DEMAND, 100.0 * MB, 0)
    assert flow.grant(DISK, Traffic.DEMAND, 0).blocks > 0
    flow.sent(job(2, 20), 0)
    assert flow.grant(DISK, Traffic.DEMAND, 0).blocks == 0
    flow.limit("disk", Traffic.DEMAND, None, 0)
    assert flow.grant(DISK, Traffic.DEMAND, 0).blocks > 0
    for nonsense in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="above 0"):
            flow.limit("disk", Traffic.DEMAND, nonsense, 0)


def test_failures_that_come_at_once_teach_no_bandwidth() -> None:
    flow, now_ns = make_flow(), 0
    flow.want(DISK, Traffic.DEMAND, 10_000)
    for number in range(8):
        flow.sent(job(number, 4), now_ns)
        now_ns += 40_000_000
        flow.ended(result(job(number, 4), 0, now_ns), now_ns)
    (before,) = flow.channels()
    assert before.bytes_per_s == pytest.approx(100 * MB, rel=0.01)
    for number in range(8, 200):
        flow.sent(job(number, 32), now_ns)
        now_ns += 1_000
        outcome = Outcome.FAILED if number % 2 else Outcome.MISSING
        flow.ended(result(job(number, 32), 0, now_ns, outcome), now_ns)
    (after,) = flow.channels()
    assert (after.bytes_per_s, after.depth_blocks) == (before.bytes_per_s, before.depth_blocks)
    flow.sent(job(200, 4), now_ns)
    now_ns += 20_000_000
    half = {key: Outcome.OK if at < 2 else Outcome.FAILED for at, key in enumerate(job(200, 4).keys)}
    flow.ended(JobResult(job(200, 4), half, 0, now_ns), now_ns)
    (after,) = flow.channels()
    assert after.bytes_per_s == pytest.approx(100 * MB, rel=0.01)


def test_a_channel_with_a_late_read_is_left_alone_then_tried_with_one_block() -> None:
    flow = make_flow(retry_s=1.0)
    other = Channel("disk", 1)
    flow.want(DISK, Traffic.DEMAND, 100)
    flow.sent(job(1, 5), 0)
    flow.late(job(1, 5), 10 * SECOND_NS)
    assert not flow.is_open(DISK, 10 * SECOND_NS)
    assert flow.is_open(other, 10 * SECOND_NS)
    assert flow.grant(DISK, Traffic.DEMAND, 10 * SECOND_NS).blocks == 0
    assert flow.grant(other, Traffic.DEMAND, 10 * SECOND_NS).blocks > 0
    assert flow.next_ns(10 * SECOND_NS) == 11 * SECOND_NS
    assert flow.is_open(DISK, 11 * SECOND_NS)
    assert flow.grant(DISK, Traffic.DEMAND, 11 * SECOND_NS).blocks == 1
    flow.sent(job(2), 11 * SECOND_NS)
    assert flow.grant(DISK, Traffic.DEMAND, 11 * SECOND_NS).blocks == 0
    flow.late(job(2), 21 * SECOND_NS)
    assert not flow.is_open(DISK, 22 * SECOND_NS), "the second pause is twice as long"
    assert flow.is_open(DISK, 23 * SECOND_NS)
    flow.sent(job(3), 23 * SECOND_NS)
    flow.ended(result(job(3), 23 * SECOND_NS, 24 * SECOND_NS), 24 * SECOND_NS)
    (view,) = (view for view in flow.channels() if view.channel == DISK)
    assert view.state is ChannelState.OPEN
    assert not flow.all_open, "a late read is still out"
    flow.ended(result(job(1, 5), 0, 30 * SECOND_NS), 30 * SECOND_NS)
    flow.ended(result(job(2), 0, 30 * SECOND_NS), 30 * SECOND_NS)
    assert flow.all_open
    assert view.in_flight_blocks == 0


def test_a_channel_that_could_be_tried_is_no_reason_to_wake_up() -> None:
    flow = make_flow(retry_s=1.0)
    flow.want(DISK, Traffic.DEMAND, 100)
    flow.sent(job(1), 0)
    flow.late(job(1), 10 * SECOND_NS)
    assert flow.next_ns(10 * SECOND_NS) == 11 * SECOND_NS
    assert flow.next_ns(11 * SECOND_NS) is None, "what it lacks is a slot"


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 9)), max_size=60))
def test_no_credit_is_lost_and_none_held_back_whatever_becomes_of_the_jobs(steps: list[tuple[int, int]]) -> None:
    flow, now_ns, number = make_flow(first_depth_blocks=16, retry_s=0.001), 0, 0
    flow.want(DISK, Traffic.DEMAND, 10_000)
    running: list[Job] = []
    late: list[Job] = []
    for what, blocks in steps:
        now_ns += 2_000_000
        if what <= 1:
            granted = min(blocks, flow.grant(DISK, Traffic.DEMAND, now_ns).blocks)
            if granted:
                number += 1
                running.append(job(number, granted))
                flow.sent(running[-1], now_ns)
        elif what == 2 and running:
            flow.ended(result(running.pop(0), 0, now_ns), now_ns)
        elif what == 3 and running:
            late.append(running.pop())
            flow.late(late[-1], now_ns)
        elif what == 4 and running:
            late.append(running.pop())
            flow.given_up(late[-1])
        (view,) = flow.channels()
        assert view.in_flight_blocks == sum(len(out.keys) for out in running)
        granted = flow.grant(DISK, Traffic.DEMAND, now_ns).blocks
        if view.state is ChannelState.OPEN:  # whatever has happened: what the depth leaves may go
            assert granted == max(0, view.depth_blocks - view.in_flight_blocks)
        elif flow.is_open(DISK, now_ns):
            assert granted == (0 if view.in_flight_blocks else 1)
    now_ns += 1_000 * SECOND_NS
    for out in running + late:
        flow.ended(result(out, 0, now_ns), now_ns)
    (view,) = flow.channels()
    assert view.in_flight_blocks == 0
    assert view.state is ChannelState.OPEN
    assert flow.grant(DISK, Traffic.DEMAND, now_ns).blocks == view.depth_blocks


@pytest.mark.parametrize(
    "options",
    [
        {"stretch": 0.5},
        {"stretch": float("nan")},
        {"first_depth_blocks": 0},
        {"first_depth_blocks": 9, "most_depth_blocks": 8},
        {"prefetch_share": 0.0},
        {"write_share": 1.5},
        {"retry_s": 0.0},
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        make_flow(**options)


# --- costs


@given(
    st.floats(1e-5, 1e-2), st.floats(1e8, 2e10),
    st.lists(st.integers(1, 400), min_size=8, max_size=40).filter(lambda sizes: len(set(sizes)) > 3),
)  # fmt: skip
def test_what_a_channel_takes_is_learned_from_its_busy_times(
    latency_s: float, bytes_per_s: float, sizes: list[int]
) -> None:
    cost, now_ns = ChannelCost(), 0
    for blocks in sizes:
        cost.began(now_ns)
        now_ns += round((latency_s + blocks * MB / bytes_per_s) * 1e9)
        cost.ended(blocks * MB, now_ns, is_idle=True)
        now_ns += 5_000_000
    assert cost.read_ns(200 * MB) == pytest.approx((latency_s + 200 * MB / bytes_per_s) * 1e9, rel=0.02)


def test_overlapping_reads_are_charged_once() -> None:
    cost, now_ns = ChannelCost(), 0
    cost.began(now_ns)
    for number in range(1, 200):
        cost.began(now_ns)
        now_ns = number * 10_000_000
        cost.ended(10 * MB, now_ns, is_idle=False)
    assert cost.bytes_per_s == pytest.approx(1e9, rel=0.05)


@given(st.floats(0, 0.05), st.floats(1e-5, 1e-3), st.floats(0, 1e-8), st.randoms(use_true_random=False))
def test_what_a_prefill_takes_is_learned_from_a_few(
    overhead_s: float, token_s: float, pair_s: float, rng: object
) -> None:
    cost = PrefillCost()

    def takes_ns(tokens: int, context: int) -> int:
        return round((overhead_s + token_s * tokens + pair_s * tokens * (context + tokens / 2)) * 1e9)

    for tokens, context in ((16, 0), (512, 0), (2_048, 0), (4_096, 8_192), (300, 20_000), (64, 1_000)):
        cost.computed(tokens, context, takes_ns(tokens, context))
    for tokens, context in ((1_000, 0), (8_000, 0), (100, 10_000)):
        assert cost.prefill_ns(tokens, context) == pytest.approx(takes_ns(tokens, context), rel=0.05, abs=2e5)
