"""Which transfer goes next: order, credits in flight, shares of the bandwidth. A pure state machine.

It moves nothing and knows no clock: every time comes in as an argument, so it runs unchanged over threads and under
virtual time. The order is that of `fairness`, the credits those of `credits`, and what transfers take is learned in
`costs`.

A channel is one place of one tier. It has a number of blocks in flight, enough to keep the device busy and no more,
since what is in flight cannot be reordered.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import msgspec

from forebay.costs import ChannelCost
from forebay.credits import Depth, Rate
from forebay.errors import ConfigError
from forebay.events import ChannelState, ChannelView, TrafficView
from forebay.fairness import Order, Queue
from forebay.types import Channel, Job, JobId, JobResult, Outcome, Traffic

_LATE_BY = 8
"""A read is late when it takes this many times what it should, and not before the deadline that the options give."""


class FlowOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    order: Order = Order.FAIR_SOJOURN
    stretch: float = 1.0
    """A load never ends later than fair sharing would end one `stretch` times as long. Above 1, short loads may pass
    long ones for longer, which lowers the mean."""
    first_depth_blocks: int = 32
    """Blocks in flight on a channel until measurements say better."""
    most_depth_blocks: int = 256
    prefetch_share: float = 0.9
    """Share of a channel's bandwidth that prefetches may take."""
    write_share: float = 0.1
    """Share of a tier's bandwidth that writes keep while demand waits there. Without demand they have all of it."""
    retry_s: float = 1.0
    """How long a channel that let a read hang is left alone before one block is tried; doubles up to a minute."""
    state_every_s: float = 1.0
    """How often an event says how the shares and the queue stand, while anything moves."""


def check_flow_options(options: FlowOptions) -> None:
    """Raises ConfigError for values that cannot work."""
    if not (math.isfinite(options.stretch) and options.stretch >= 1):
        raise ConfigError(f"flow: stretch must be 1 or more, not {options.stretch}")
    if not 1 <= options.first_depth_blocks <= options.most_depth_blocks:
        raise ConfigError("flow: first_depth_blocks must be 1 or more, and at most most_depth_blocks")
    for name in ("prefetch_share", "write_share"):
        if not 0 < getattr(options, name) <= 1:
            raise ConfigError(f"flow: {name} must be above 0 and at most 1, not {getattr(options, name)}")
    for name in ("retry_s", "state_every_s"):
        seconds = getattr(options, name)
        if not (math.isfinite(seconds) and seconds > 0):
            raise ConfigError(f"flow: {name} must be a number of seconds above 0, not {seconds}")


class _Gate:
    """Whether a place is asked for anything: it is left alone for a while, twice as long each time, when it hangs."""

    def __init__(self, retry_ns: int) -> None:
        self.state = ChannelState.OPEN
        self.opens_ns = 0
        self._first_retry_ns = self._retry_ns = retry_ns

    def lets_through(self, now_ns: int) -> bool:
        if self.state is ChannelState.CLOSED and now_ns >= self.opens_ns:
            self.state = ChannelState.TRYING
        return self.state is not ChannelState.CLOSED

    def close(self, now_ns: int) -> None:
        if self.state is not ChannelState.CLOSED:
            self.state, self.opens_ns = ChannelState.CLOSED, now_ns + self._retry_ns
            self._retry_ns = min(2 * self._retry_ns, 60_000_000_000)

    def reopen(self) -> None:
        self.state, self._retry_ns = ChannelState.OPEN, self._first_retry_ns


class _Lane:
    """A channel as flow sees it."""

    def __init__(self, options: FlowOptions) -> None:
        self.depth = Depth(options.first_depth_blocks, options.most_depth_blocks)
        self.cost = ChannelCost()
        self.in_flight: Counter[Traffic] = Counter()
        """Blocks, without those of jobs that are late."""
        self.waiting: Counter[Traffic] = Counter()
        """Blocks that have not been granted."""
        self.gate = _Gate(int(options.retry_s * 1e9))
        self.share: Rate | None = None
        """What prefetches may take here."""
        self.read_at_ns = 0
        """When a read last ended."""


class _Writing:
    """The writes of a tier, whatever their places."""

    def __init__(self, options: FlowOptions) -> None:
        self.gate = _Gate(int(options.retry_s * 1e9))
        self.cost = ChannelCost()
        self.in_flight_blocks = 0
        """Without those of jobs that are late."""
        self.share: Rate | None = None
        """What they may take while demand waits."""


@dataclass(frozen=True, slots=True)
class _Assumed:
    """What reading from a tier takes, as somebody said."""

    bytes_per_s: float
    latency_ns: int


@dataclass(frozen=True, slots=True)
class Grant:
    """How much may be sent on a channel now."""

    blocks: int
    batch_blocks: int
    """Blocks that one job should carry, so that more than one is in flight."""
    is_idle: bool
    """Nothing is in flight: even a small job is better than none."""

    def is_worth_a_job(self, batch_blocks: int) -> bool:
        """Whether a load with much to read should send some of it now, in jobs of so many blocks at most.

        Half a job is: where only whole ones were, what is in flight would run low after the odd last job of each load.
        Less is not, as the next job to end makes room for more, and each costs the interpreter as much as a long one.
        """
        return self.is_idle or 2 * self.blocks >= min(batch_blocks, self.batch_blocks)


class Flow:
    """All channels and the queue before them."""

    def __init__(self, options: FlowOptions, block_bytes: int) -> None:
        check_flow_options(options)
        self._options, self._block_bytes = options, block_bytes
        self.queue = Queue(options.order, options.stretch)
        self._lanes: defaultdict[Channel, _Lane] = defaultdict(lambda: _Lane(options))
        self._rates: dict[tuple[str, Traffic], Rate] = {}
        self._writing: defaultdict[str, _Writing] = defaultdict(lambda: _Writing(options))
        self._late: set[JobId] = set()
        """Reads and writes that nobody waits for any more and that have not ended."""
        self._assumed: dict[str, _Assumed] = {}
        self._moved_blocks = Counter[tuple[str, Traffic]]()
        """Since `traffic` was last asked."""

    # --- what is wanted

    def want(self, channel: Channel, traffic: Traffic, blocks: int) -> None:
        """So many more blocks wait for this channel; negative when some do not any more."""
        self._lanes[channel].waiting[traffic] += blocks

    def demand_waits(self, tier: str) -> bool:
        return any(
            lane.waiting[Traffic.DEMAND] or lane.in_flight[Traffic.DEMAND]
            for channel, lane in self._lanes.items()
            if channel.tier == tier
        )

    # --- what may go

    def grant(self, channel: Channel, traffic: Traffic, now_ns: int) -> Grant:
        """How many blocks of this traffic may be put in flight now."""
        lane = self._lanes[channel]
        in_flight = lane.in_flight.total()
        batch_blocks = max(1, lane.depth.blocks // 2)
        free_blocks = lane.depth.blocks - in_flight
        if not self.is_open(channel, now_ns):
            free_blocks = 0
        elif lane.gate.state is ChannelState.TRYING:
            free_blocks, batch_blocks = (0 if in_flight else 1), 1
        if traffic is Traffic.PREFETCH and (lane.waiting[Traffic.DEMAND] or not self._share_allows(lane, now_ns)):
            free_blocks = 0
        rate = self._rates.get((channel.tier, traffic))
        if rate is not None and not rate.allows(now_ns):
            free_blocks = 0
        return Grant(max(0, free_blocks), batch_blocks, in_flight == 0)

    def is_saturated(self, batch_blocks: int, now_ns: int) -> bool:
        """No channel that blocks wait for would take a job of so many: there is no need to ask load by load."""
        for channel, lane in self._lanes.items():
            if lane.waiting.total():
                grant = self.grant(channel, Traffic.DEMAND, now_ns)
                if lane.gate.state is not ChannelState.OPEN or grant.is_worth_a_job(batch_blocks):
                    return False
        return True

    def may_write(self, tier: str, now_ns: int) -> bool:
        """Whether a write job may start: no demand in the way, or its share not used up."""
        writing = self._writing[tier]
        if not writing.gate.lets_through(now_ns) or (self.tries_writes(tier) and writing.in_flight_blocks):
            return False
        rate = self._rates.get((tier, Traffic.WRITE))
        if rate is not None and not rate.allows(now_ns):
            return False
        if not self.demand_waits(tier):
            return True
        share = self._write_share(tier, now_ns)
        return share is None or share.allows(now_ns)

    def is_open(self, channel: Channel, now_ns: int) -> bool:
        """Whether reads may be sent to a channel, be it one block to try it."""
        lane = self._lanes.get(channel)
        return lane is None or lane.gate.lets_through(now_ns)

    @property
    def all_open(self) -> bool:
        """No channel is closed or being tried: the common case, and cheap to ask."""
        return not self._late and all(lane.gate.state is ChannelState.OPEN for lane in self._lanes.values())

    def takes_writes(self, tier: str, now_ns: int) -> bool:
        """Whether blocks may wait to be written to a tier; not while it is left alone since a write hung."""
        return self._writing[tier].gate.lets_through(now_ns)

    def tries_writes(self, tier: str) -> bool:
        """A write of one block is to tell whether the tier is well again."""
        return self._writing[tier].gate.state is ChannelState.TRYING

    def limit(self, tier: str, traffic: Traffic, bytes_per_s: float | None, now_ns: int) -> None:
        """Set or lift a limit, at any time. Raises ConfigError unless it is positive."""
        if bytes_per_s is None:
            self._rates.pop((tier, traffic), None)
            return
        if not (math.isfinite(bytes_per_s) and bytes_per_s > 0):
            raise ConfigError(f"a rate limit must be above 0 bytes a second, not {bytes_per_s}")
        self._rates[tier, traffic] = Rate(bytes_per_s, now_ns)

    # --- what went, and what came of it

    def sent(self, job: Job, now_ns: int) -> None:
        if (rate := self._rates.get((job.tier, job.traffic))) is not None:
            rate.take(job.moved_bytes, now_ns)
        if job.traffic is Traffic.WRITE:
            writing = self._writing[job.tier]
            writing.in_flight_blocks += len(job.keys)
            writing.cost.began(now_ns)
            if (share := self._write_share(job.tier, now_ns)) is not None and self.demand_waits(job.tier):
                share.take(job.moved_bytes, now_ns)
            return
        lane = self._lanes[job.channel]
        lane.in_flight[job.traffic] += len(job.keys)
        lane.cost.began(now_ns)
        if job.traffic is Traffic.PREFETCH and lane.share is not None:
            lane.share.take(job.moved_bytes, now_ns)

    def ended(self, result: JobResult, now_ns: int) -> None:
        """A read or write has ended, in time or late."""
        job = result.job
        gate = self._gate(job)
        is_late = job.job_id in self._late
        self._late.discard(job.job_id)
        self._moved_blocks[job.tier, job.traffic] += _moved_blocks(result)
        if is_late or gate.state is ChannelState.TRYING:
            gate.reopen()
        if is_late:
            return
        if job.traffic is Traffic.WRITE:
            self._wrote(self._writing[job.tier], result, now_ns)
            return
        lane = self._lanes[job.channel]
        lane.in_flight[job.traffic] -= len(job.keys)
        self._learn(lane, result, now_ns)
        lane.read_at_ns = now_ns
        if job.traffic is Traffic.DEMAND:
            self.queue.served(job.moved_bytes)

    def _learn(self, lane: _Lane, result: JobResult, now_ns: int) -> None:
        """What reading takes, from the blocks that came: those that failed at once say nothing about the device."""
        moved_blocks = _moved_blocks(result)
        before_blocks = lane.in_flight.total() + len(result.job.keys)
        lacked_work = not moved_blocks or not lane.waiting.total() or 2 * before_blocks < lane.depth.blocks
        lane.depth.moved(moved_blocks, now_ns, lacked_work=lacked_work)
        self._learn_cost(lane.cost, moved_blocks, now_ns, is_idle=not lane.in_flight.total())

    def _wrote(self, writing: _Writing, result: JobResult, now_ns: int) -> None:
        writing.in_flight_blocks -= len(result.job.keys)
        self._learn_cost(writing.cost, _moved_blocks(result), now_ns, is_idle=not writing.in_flight_blocks)

    def _learn_cost(self, cost: ChannelCost, moved_blocks: int, now_ns: int, *, is_idle: bool) -> None:
        if moved_blocks:
            cost.ended(moved_blocks * self._block_bytes, now_ns, is_idle=is_idle)
        else:
            cost.stalled(is_idle=is_idle)

    def _gate(self, job: Job) -> _Gate:
        return self._writing[job.tier].gate if job.traffic is Traffic.WRITE else self._lanes[job.channel].gate

    def late(self, job: Job, now_ns: int) -> None:
        """A read or write is overdue: nobody waits for it any more, and its place is left alone for a while."""
        self.given_up(job)
        self._gate(job).close(now_ns)

    def given_up(self, job: Job) -> None:
        """Nobody waits for this read or write any more, for no fault of its place."""
        self._late.add(job.job_id)
        if job.traffic is Traffic.WRITE:
            writing = self._writing[job.tier]
            writing.in_flight_blocks -= len(job.keys)
            writing.cost.stalled(is_idle=not writing.in_flight_blocks)
            return
        lane = self._lanes[job.channel]
        lane.in_flight[job.traffic] -= len(job.keys)
        lane.cost.stalled(is_idle=not lane.in_flight.total())

    def _share_allows(self, lane: _Lane, now_ns: int) -> bool:
        """Whether prefetches have some of their share of this channel left; it follows what the channel gives."""
        bytes_per_s = lane.cost.bytes_per_s
        if bytes_per_s is None:
            return not lane.in_flight.total()
        if lane.share is None:
            lane.share = Rate(bytes_per_s * self._options.prefetch_share, now_ns)
        lane.share.bytes_per_s = bytes_per_s * self._options.prefetch_share
        return lane.share.allows(now_ns)

    def _write_share(self, tier: str, now_ns: int) -> Rate | None:
        """What writes may take of a tier while demand waits there; None before anything is known of it."""
        known = [
            lane.cost.bytes_per_s for channel, lane in self._lanes.items()
            if channel.tier == tier and lane.cost.bytes_per_s is not None
        ]  # fmt: skip
        if not known:
            return None
        writing = self._writing[tier]
        if writing.share is None:
            writing.share = Rate(1.0, now_ns)
        writing.share.bytes_per_s = sum(known) * self._options.write_share
        return writing.share

    # --- what it takes

    def assume(self, tier: str, bytes_per_s: float, latency_ns: int) -> None:
        """What a place of a tier is taken to give until something was read there."""
        self._assumed[tier] = _Assumed(bytes_per_s, latency_ns)

    def read_ns(self, channel: Channel, moved_bytes: int) -> int | None:
        """Expected time of reading so much with nothing else in the way; None while nothing is known."""
        lane, assumed = self._lanes.get(channel), self._assumed.get(channel.tier)
        expected_ns = lane.cost.read_ns(moved_bytes) if lane is not None else None
        if expected_ns is None and assumed is not None:
            expected_ns = assumed.latency_ns + int(moved_bytes / assumed.bytes_per_s * 1e9)
        rate = self._rates.get((channel.tier, Traffic.DEMAND))
        if expected_ns is None or rate is None:
            return expected_ns
        return max(expected_ns, int(moved_bytes / rate.bytes_per_s * 1e9))

    def read_at_ns(self, channel: Channel) -> int:
        """When a read there last ended; 0 before the first."""
        lane = self._lanes.get(channel)
        return lane.read_at_ns if lane is not None else 0

    def due_ns(self, channel: Channel, deadline_ns: int, now_ns: int) -> int:
        """When what is sent now is late: after `deadline_ns`, or many times what all that is in flight should take."""
        return now_ns + max(deadline_ns, _LATE_BY * self.flight_ns(channel))

    def write_due_ns(self, tier: str, deadline_ns: int, now_ns: int) -> int:
        """The same for a write."""
        writing = self._writing[tier]
        expected_ns = writing.cost.read_ns(writing.in_flight_blocks * self._block_bytes) or 0
        return now_ns + max(deadline_ns, _LATE_BY * expected_ns)

    def flight_ns(self, channel: Channel) -> int:
        """Expected time until all that is in flight has ended; 0 before the first job there."""
        lane = self._lanes[channel]
        return lane.cost.read_ns(lane.in_flight.total() * self._block_bytes) or 0

    def wait_ns(self, channel: Channel, work_bytes: int) -> int:
        """Expected time until a demand load of this size is served: what is in flight and what goes before it."""
        lane = self._lanes.get(channel)
        if lane is None:
            return 0
        waiting_bytes = lane.waiting[Traffic.DEMAND] * self._block_bytes
        ahead_bytes = min(self.queue.ahead_bytes(work_bytes), waiting_bytes) if waiting_bytes else 0
        before_bytes = lane.in_flight.total() * self._block_bytes + ahead_bytes
        bytes_per_s = self._bytes_per_s(channel)
        return int(before_bytes / bytes_per_s * 1e9) if bytes_per_s is not None else 0

    def _bytes_per_s(self, channel: Channel) -> float | None:
        """What demand gets of a channel: as measured, else as assumed, and no more than its limit."""
        lane, assumed = self._lanes.get(channel), self._assumed.get(channel.tier)
        bytes_per_s = lane.cost.bytes_per_s if lane is not None else None
        if bytes_per_s is None and assumed is not None:
            bytes_per_s = assumed.bytes_per_s
        rate = self._rates.get((channel.tier, Traffic.DEMAND))
        if bytes_per_s is None or rate is None:
            return bytes_per_s
        return min(bytes_per_s, rate.bytes_per_s)

    def next_ns(self, now_ns: int) -> int | None:
        """When something may go that may not go now, although nothing ends before; None if no time matters."""
        times = [rate.opens_ns(now_ns) for rate in self._rates.values() if not rate.allows(now_ns)]
        for lane in self._lanes.values():
            is_closed = lane.gate.state is ChannelState.CLOSED and lane.waiting.total()
            if is_closed and lane.gate.opens_ns > now_ns:
                times.append(lane.gate.opens_ns)  # one that could be tried by now waits for slots
            if lane.share is not None and lane.waiting[Traffic.PREFETCH] and not lane.share.allows(now_ns):
                times.append(lane.share.opens_ns(now_ns))
        shares = (writing.share for writing in self._writing.values())
        times += [share.opens_ns(now_ns) for share in shares if share is not None and not share.allows(now_ns)]
        return min(times, default=None)

    def channels(self) -> Iterator[ChannelView]:
        for channel, lane in sorted(self._lanes.items()):
            yield ChannelView(
                channel, lane.gate.state, lane.depth.blocks, lane.in_flight.total(), lane.waiting.total(),
                lane.cost.bytes_per_s,
            )  # fmt: skip

    def traffic(self, queued_writes: Mapping[str, int]) -> Iterator[TrafficView]:
        """How the shares stand, by tier and traffic, where there is any or a limit.

        `queued_writes`: blocks that wait to be written, by tier. What has moved counts since the last call.
        """
        waiting, in_flight = Counter[tuple[str, Traffic]](), Counter[tuple[str, Traffic]]()
        for (tier, _), lane in self._lanes.items():
            for kind in (Traffic.DEMAND, Traffic.PREFETCH):
                waiting[tier, kind] += lane.waiting[kind]
                in_flight[tier, kind] += lane.in_flight[kind]
        for tier, writing in self._writing.items():
            waiting[tier, Traffic.WRITE] = queued_writes.get(tier, 0)
            in_flight[tier, Traffic.WRITE] = writing.in_flight_blocks
        moved, self._moved_blocks = self._moved_blocks, Counter()
        for place in sorted({*waiting, *self._rates, *moved}, key=lambda place: (place[0], place[1].value)):
            limit = self._rates.get(place)
            if waiting[place] or in_flight[place] or moved[place] or limit is not None:
                yield TrafficView(
                    *place, waiting[place], in_flight[place], moved[place] * self._block_bytes,
                    limit.bytes_per_s if limit is not None else None, self._share_bytes_per_s(*place),
                )  # fmt: skip

    def _share_bytes_per_s(self, tier: str, traffic: Traffic) -> float | None:
        if traffic is Traffic.WRITE:
            share = self._writing[tier].share
            return share.bytes_per_s if share is not None else None
        if traffic is not Traffic.PREFETCH:
            return None
        shares = [lane.share.bytes_per_s for (of, _), lane in self._lanes.items() if of == tier and lane.share]
        return sum(shares) if shares else None


def _moved_blocks(result: JobResult) -> int:
    return sum(result.outcomes[key] is Outcome.OK for key in result.job.keys)
