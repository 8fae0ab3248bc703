"""Loads: planned prefixes on their way from the tiers, through host slots, to device blocks.

A load, block by block:

    planned --start--> waiting --granted by flow--> being read --+--> in the host pool --copied in--> on the device
                          |                             |        |
                          |                             +--failed or late: next place that holds it, else the load
                          |                                ends before it
                          +--somebody else is filling it: parked until that fill has ended

A block counts for a load only if every block before it does. `flow` says whose blocks go next and how many may be in
flight; host slots are granted in that order, each load's in token order, so a storm of loads, and a prefix longer than
the host pool, stream through whatever pool there is.

A prefetch is a load without a device: its blocks end in the host pool, where they stay pinned until the request comes,
or until its time is over.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from forebay.due import Due
from forebay.events import LoadEnded, PrefetchEnded, PrefetchFate, Reason
from forebay.hedges import Hedges
from forebay.planner import source_of
from forebay.stage import DISPROVED, Stage
from forebay.types import (
    HOST,
    BlockKey,
    Channel,
    DeviceBlock,
    Job,
    JobId,
    JobKind,
    JobResult,
    Loaded,
    LoadPlan,
    Outcome,
    Slot,
    Traffic,
)

_WITHDRAWN = {**DISPROVED, Outcome.FAILED: Reason.UNREADABLE}
"""Outcomes of a read after which the tier may be known not to give the block."""


@dataclass(slots=True)
class _Load:
    """A load or prefetch from its plan to its end. For each position with a source, it holds one pin there."""

    plan: LoadPlan
    traffic: Traffic
    sources: list[str | None]
    limit: int
    """Positions from here on are lost, and with them all that follows."""
    arrived: bytearray
    """1 for positions that are where they should be: on the device, or for a prefetch in the host pool."""
    deadline_ns: int | None = None
    """Past it a load ends with what has arrived. For a prefetch, when the request is expected."""
    blocks: tuple[DeviceBlock, ...] = ()
    started: bool = False
    waiting: dict[Channel, list[int]] = field(default_factory=dict)
    """Heaps of the positions that flow has not granted yet."""
    reading: set[JobId] = field(default_factory=set)
    parked: set[int] = field(default_factory=set)
    """Positions that wait for somebody else's fill."""
    ready: list[int] = field(default_factory=list)
    """Positions whose host copy can be copied in."""
    open_blocks: int = 0
    """Positions being read, parked, ready or being copied."""
    tried: dict[int, set[str]] = field(default_factory=dict)
    """Tiers that failed to give a position's block."""

    @property
    def name(self) -> str:
        return self.plan.request_id

    @property
    def leading_blocks(self) -> int:
        return (bytes(self.arrived[: self.limit]) + b"\0").index(0)

    def key(self, position: int) -> BlockKey:
        return self.plan.reads[position].key


@dataclass(frozen=True, slots=True)
class _Positions:
    """What a READ or COPY_IN job is about, in the order of its keys."""

    load: _Load
    positions: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadLimits:
    batch_blocks: int
    read_deadline_ns: int
    prefetch_slots: int
    """Host slots that prefetches may hold."""
    prefetch_linger_ns: int
    """How long past its deadline a prefetch keeps its blocks pinned for a request that has not come."""
    hedge_share: float
    hedge_patience_ns: int


def _evenly(positions: Sequence[int], most: int) -> Iterator[tuple[int, ...]]:
    """As few parts as may be of at most so many, all about as long: a short one would leave little in flight."""
    parts = -(-len(positions) // most)
    for part in range(parts):
        yield tuple(positions[part * len(positions) // parts : (part + 1) * len(positions) // parts])


class Loads:
    def __init__(self, stage: Stage, limits: LoadLimits) -> None:
        self._stage, self._index, self._flow, self._limits = stage, stage.index, stage.flow, limits
        self._loads: dict[str, _Load] = {}
        """Open loads by request, and prefetches by their own names."""
        self._touched: dict[str, _Load] = {}
        """Started loads that something has happened to since the last `advance`."""
        self._waiters: defaultdict[BlockKey, list[tuple[_Load, int]]] = defaultdict(list)
        self._in_transit: set[BlockKey] = set()
        """Blocks whose slot was granted to a load and that have not reached its device."""
        self._prefetched: Counter[BlockKey] = Counter()
        """Blocks that prefetches hold in the host pool, with the number of those that do."""
        self._prefetching = 0
        """Blocks whose reads for prefetches are in flight."""
        self._failed_once: set[tuple[BlockKey, str]] = set()
        """Blocks whose last read from a tier failed."""
        self._subjects: dict[JobId, _Positions] = {}
        self._hedges = Hedges(
            stage, limits.hedge_share, limits.hedge_patience_ns, limits.read_deadline_ns, self._subjects
        )
        self._won: defaultdict[JobId, set[BlockKey]] = defaultdict(set)
        """Blocks of running READ jobs that a second read brought first."""
        self._due = Due(self._subjects)
        """The READ jobs."""
        self._deadlines: list[tuple[int, str]] = []
        """Heap of the loads with a deadline; those that have ended are skipped."""
        self._ended: list[Loaded] = []

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._loads

    @property
    def idle(self) -> bool:
        """Nothing is under way. Prefetched blocks that wait for their request do not count."""
        return not (self._ended or self._waiters or self._in_transit or self._subjects) and not any(
            load.traffic is Traffic.DEMAND or load.waiting for load in self._loads.values()
        )

    @property
    def has_ended(self) -> bool:
        """Whether `take_ended` has something to give."""
        return bool(self._ended)

    def pins(self) -> Counter[tuple[BlockKey, str]]:
        """Every pin that loads hold, to be checked against the index."""
        return (
            Counter(
                (load.key(position), source)
                for load in self._loads.values()
                for position, source in enumerate(load.sources)
                if source is not None
            )
            + self._hedges.pins()
        )

    # --- what the host engine asks for

    def add(self, plan: LoadPlan, traffic: Traffic = Traffic.DEMAND) -> None:
        """Pin what a plan names."""
        blocks = plan.hit_blocks
        load = _Load(plan, traffic, [None] * blocks, blocks, bytearray(blocks))
        self._loads[plan.request_id] = load
        for position, read in enumerate(plan.reads):
            self._hold(load, position, read.source)

    def start(self, plan: LoadPlan, device_blocks: Sequence[DeviceBlock], deadline_ns: int | None) -> None:
        load = self._loads[plan.request_id]
        assert load.plan is plan, f"this is not the open plan of request {plan.request_id}"
        assert not load.started, f"request {plan.request_id} is started already"
        load.blocks = tuple(device_blocks[: plan.hit_blocks])
        self._begin(load, deadline_ns)

    def prefetch(self, plan: LoadPlan, deadline_ns: int) -> None:
        """Start bringing a plan's blocks to the host pool by `deadline_ns`. Its name must be free."""
        self.add(plan, Traffic.PREFETCH)
        self._begin(self._loads[plan.request_id], deadline_ns)

    def _begin(self, load: _Load, deadline_ns: int | None) -> None:
        load.started, load.deadline_ns = True, deadline_ns
        if deadline_ns is not None:
            heapq.heappush(self._deadlines, (deadline_ns, load.name))
        to_read: list[int] = []
        for position, source in enumerate(load.sources):
            if position >= load.limit:
                self._release(load, position)
            elif source == HOST:
                self._take_from_host(load, position)  # at once and out of order: these pins hold slots
            else:
                to_read.append(position)
        if to_read:
            work_bytes = len(to_read) * self._stage.pool.block_bytes
            self._flow.queue.enter(load.name, load.traffic, work_bytes, deadline_ns)
            for position in to_read:
                self._await_grant(load, position)
        self._touched[load.name] = load

    def cancel(self, request_id: str) -> None:
        load = self._loads.get(request_id)
        if load is None:
            return
        self._cut(load, 0)
        if not load.started:
            del self._loads[request_id]
            for position in range(len(load.sources)):
                self._release(load, position)

    def leading_blocks(self, request_id: str) -> int:
        """How many leading blocks of an open load are where they should be."""
        return self._loads[request_id].leading_blocks

    def take_ended(self) -> list[Loaded]:
        ended, self._ended = self._ended, []
        return ended

    # --- progress

    def advance(self) -> None:
        """Give up what is late, grant what flow allows, copy in what is in the pool, end what is done.

        Costs what there is to do, however many loads are open.
        """
        now_ns = self._stage.now_ns()
        self._give_up_late(now_ns)
        self._hedges.start(now_ns)
        for name in self._flow.queue.in_order():
            if self._flow.is_saturated(self._limits.batch_blocks, now_ns):
                break
            load = self._loads.get(name)
            if load is not None and not self._grant(load, now_ns):
                break  # no slot for it, and so none for those behind it
        touched, self._touched = self._touched, {}
        for load in touched.values():
            self._copy_in(load)
            if not load.open_blocks and not load.waiting:
                self._end(load)

    def next_ns(self) -> int | None:
        """When something is late, if nothing ends before."""
        while self._deadlines and self._deadlines[0][1] not in self._loads:
            heapq.heappop(self._deadlines)
        ends_ns = self._deadlines[0][0] if self._deadlines else None
        times = (ends_ns, self._due.next_ns(), self._hedges.next_ns())
        return min((at_ns for at_ns in times if at_ns is not None), default=None)

    def _grant(self, load: _Load, now_ns: int) -> bool:
        """Start reads of the load's next positions, as far as flow and slots go. False when slots are the limit."""
        for channel in tuple(load.waiting):
            self._join_fills(load, channel)
            waiting = load.waiting.get(channel)
            if not waiting:
                continue
            if not self._flow.is_open(channel, now_ns):
                self._fail_over(load, channel)
                continue
            grant = self._flow.grant(channel, load.traffic, now_ns)
            quantum = min(self._limits.batch_blocks, grant.batch_blocks, len(waiting))
            if not grant.blocks or (grant.blocks < len(waiting) and not grant.is_worth_a_job(quantum)):
                continue  # more will be free in a moment
            slots = self._free_for(load.traffic)
            wanted = min(grant.blocks, len(waiting))
            if slots < min(quantum, max(1, self._stage.usable_slots // 4)) and self._in_transit:
                return False  # likewise
            if self._read(load, channel, min(wanted, slots), quantum) < wanted and load.waiting.get(channel):
                return False
        if not load.waiting:
            self._flow.queue.leave(load.name)
        return True

    def _free_for(self, traffic: Traffic) -> int:
        """Slots that this traffic may take now. A demand load that finds none makes prefetched blocks give way."""
        free = self._stage.usable_slots - len(self._in_transit)
        if traffic is Traffic.PREFETCH:
            return max(0, min(free, self._limits.prefetch_slots - len(self._prefetched) - self._prefetching))
        return max(0, free)

    def _join_fills(self, load: _Load, channel: Channel) -> None:
        """Leading positions that somebody else has brought meanwhile, or is about to, need no read."""
        while (waiting := load.waiting.get(channel)) and self._index.get(load.key(waiting[0]), HOST) is not None:
            position = self._next(load, channel)
            self._release(load, position)
            self._hold(load, position, HOST)
            self._take_from_host(load, position)

    def _fail_over(self, load: _Load, channel: Channel) -> None:
        """The channel is closed: its blocks have to come from elsewhere."""
        positions = sorted(load.waiting.pop(channel))
        self._flow.want(channel, load.traffic, -len(positions))
        for position in positions:
            self._release(load, position)
            load.tried.setdefault(position, set()).add(channel.tier)
        for position in positions:
            self._seek(load, position)

    def _read(self, load: _Load, channel: Channel, blocks: int, batch_blocks: int) -> int:
        """Start reads of up to so many of the next positions; returns of how many."""
        positions: list[int] = []
        while len(positions) < blocks:
            self._join_fills(load, channel)
            slot = self._take_slot(load.traffic) if channel in load.waiting else None
            if slot is None:
                break
            position = self._next(load, channel)
            key = load.key(position)
            self._stage.reserve_host(key, slot)
            self._in_transit.add(key)
            load.open_blocks += 1
            positions.append(position)
        now_ns = self._stage.now_ns()
        for batch in _evenly(positions, batch_blocks):
            job = self._stage.read(channel, [load.key(position) for position in batch], load.traffic)
            self._subjects[job.job_id] = _Positions(load, batch)
            load.reading.add(job.job_id)
            self._due.add(self._flow.due_ns(channel, self._limits.read_deadline_ns, now_ns), job.job_id)
            if load.traffic is Traffic.DEMAND:
                self._hedges.watch(job, now_ns)
        self._prefetching += len(positions) if load.traffic is Traffic.PREFETCH else 0
        if positions:
            self._flow.queue.granted(load.name, len(positions) * self._stage.pool.block_bytes)
        return len(positions)

    def _take_slot(self, traffic: Traffic) -> Slot | None:
        slot = self._stage.take_slot()
        while slot is None and traffic is Traffic.DEMAND and self._is_starved() and self._yield_prefetch():
            slot = self._stage.take_slot()
        return slot

    def _is_starved(self) -> bool:
        """Loads move so few blocks at a time that it slows them down."""
        return 4 * len(self._in_transit) < self._stage.usable_slots

    def _next(self, load: _Load, channel: Channel) -> int:
        """Take the channel's first waiting position."""
        waiting = load.waiting[channel]
        position = heapq.heappop(waiting)
        self._flow.want(channel, load.traffic, -1)
        if not waiting:
            del load.waiting[channel]
        return position

    def _await_grant(self, load: _Load, position: int) -> None:
        source = load.sources[position]
        assert source is not None
        assert source != HOST
        channel = Channel(source, self._stage.route(source, load.key(position)))
        heapq.heappush(load.waiting.setdefault(channel, []), position)
        self._flow.want(channel, load.traffic, 1)

    def _cut(self, load: _Load, position: int) -> None:
        """This position is lost, and with it all that follows: nothing more is read for them."""
        load.limit = min(load.limit, position)
        for channel, waiting in list(load.waiting.items()):
            kept = [at for at in waiting if at < load.limit]
            for late in waiting:
                if late >= load.limit:
                    self._release(load, late)
            self._flow.want(channel, load.traffic, len(kept) - len(waiting))
            if kept:
                heapq.heapify(kept)
                load.waiting[channel] = kept
            else:
                del load.waiting[channel]
        if not load.waiting:
            self._flow.queue.leave(load.name)
        if load.traffic is Traffic.PREFETCH:
            self._let_go_of_arrived(load)
        if load.started:
            self._touched[load.name] = load

    def _take_from_host(self, load: _Load, position: int) -> None:
        """Have a position whose host copy is pinned copied in, now or when its fill has ended."""
        load.open_blocks += 1
        if self._index.is_ready(load.key(position), HOST):
            self._make_ready(load, position)
        else:
            load.parked.add(position)

    def _make_ready(self, load: _Load, position: int) -> None:
        """Its host copy is READY and pinned."""
        if load.traffic is Traffic.PREFETCH:
            self._rest(load, position)
        else:
            load.ready.append(position)
        self._touched[load.name] = load

    # --- results

    def on_read(self, result: JobResult) -> list[BlockKey]:
        """Apply a READ; returns the blocks that are in the host pool now."""
        job = result.job
        if job.job_id in self._hedges:
            arrived = self._on_hedge(result)
        else:
            subject = self._subjects.pop(job.job_id)
            self._stop_reading(subject.load, job)
            won = self._won.pop(job.job_id, ())
            arrived = []
            for position, key in zip(subject.positions, job.keys, strict=True):
                if key in won:
                    continue
                if result.outcomes[key] is Outcome.OK:
                    arrived.append(key)
                    self._failed_once.discard((key, job.tier))
                    self._on_arrived(subject.load, position)
                else:
                    self._on_failed(subject.load, position, job.tier, result.outcomes[key])
        self._stage.eviction[HOST].inserted(arrived)
        self._stage.eviction[job.tier].accessed(arrived)
        return arrived

    def _on_arrived(self, load: _Load, position: int) -> None:
        self._release(load, position)
        self._fill_ended(load.key(position))
        self._hold(load, position, HOST)
        self._make_ready(load, position)

    def _on_failed(self, load: _Load, position: int, tier: str, outcome: Outcome) -> None:
        key = load.key(position)
        self._release(load, position)
        self._fill_failed(key, None)
        load.open_blocks -= 1
        load.tried.setdefault(position, set()).add(tier)
        if self._is_disproved(key, tier, outcome) and self._index.is_ready(key, tier):
            self._stage.withdraw(key, tier, _WITHDRAWN[outcome])
        self._seek(load, position)

    def _on_hedge(self, result: JobResult) -> list[BlockKey]:
        """Apply a second read. A read of which nothing is left to wait for is given up."""
        arrived: list[BlockKey] = []
        for won in self._hedges.on_read(result):
            job, subject = self._stage.jobs[won.original], self._subjects[won.original]
            self._won[won.original].add(won.key)
            arrived.append(won.key)
            self._on_arrived(subject.load, subject.positions[job.keys.index(won.key)])
            if len(self._won[won.original]) == len(job.keys):
                self._flow.given_up(job)
                self._strand(won.original)
        return arrived

    def _stop_reading(self, load: _Load, job: Job) -> None:
        load.reading.discard(job.job_id)
        if job.traffic is Traffic.PREFETCH:
            self._prefetching -= len(job.keys)

    def _is_disproved(self, key: BlockKey, tier: str, outcome: Outcome) -> bool:
        """MISSING and CORRUPT are facts. A read that failed may have been bad luck; one that fails twice is not.

        Then the next offer of the block writes it anew.
        """
        if outcome is not Outcome.FAILED:
            self._failed_once.discard((key, tier))
            return outcome is not Outcome.FULL
        if (key, tier) in self._failed_once:
            self._failed_once.remove((key, tier))
            return True
        self._failed_once.add((key, tier))
        return False

    def on_copied_out(self, result: JobResult) -> list[BlockKey]:
        """Apply a COPY_OUT, a fill from the device that loads may wait for; returns the blocks in the host pool now."""
        arrived = [key for key in result.job.keys if result.outcomes[key] is Outcome.OK]
        for key in result.job.keys:
            if result.outcomes[key] is Outcome.OK:
                self._fill_ended(key)
            else:
                self._fill_failed(key, None)
        self._stage.eviction[HOST].inserted(arrived)
        return arrived

    def abandon_fills(self, copy_out: Job) -> None:
        """A COPY_OUT is late: those who wait for its blocks look elsewhere, and its slots come back when it ends."""
        for key in copy_out.keys:
            self._fill_failed(key, copy_out.job_id)

    def _seek(self, load: _Load, position: int) -> None:
        """Find another source for a position that lost its own; without one the load ends before it."""
        source = source_of(load.key(position), self._index, self._stage.order, load.tried.get(position, ()))
        if source is None or position >= load.limit:
            self._cut(load, position)
            return
        self._hold(load, position, source)
        if load.started and source == HOST:
            self._take_from_host(load, position)
        elif load.started:
            self._flow.queue.again(load.name, load.traffic, self._stage.pool.block_bytes, load.deadline_ns)
            self._await_grant(load, position)
        self._touched[load.name] = load

    def _copy_in(self, load: _Load) -> None:
        wanted = sorted(position for position in load.ready if position < load.limit)
        for position in load.ready:
            if position >= load.limit:
                self._leave(load, position)
        load.ready.clear()
        if wanted:
            keys = [load.key(position) for position in wanted]
            job = self._stage.copy(JobKind.COPY_IN, keys, [load.blocks[position] for position in wanted])
            self._subjects[job.job_id] = _Positions(load, tuple(wanted))

    def on_copied_in(self, result: JobResult) -> None:
        subject = self._subjects.pop(result.job.job_id)
        load = subject.load
        for position, key in zip(subject.positions, result.job.keys, strict=True):
            self._leave(load, position)
            if result.outcomes[key] is Outcome.OK:
                load.arrived[position] = 1
            else:
                self._cut(load, position)
        self._touched[load.name] = load

    def _leave(self, load: _Load, position: int) -> None:
        """A position is through with its host slot."""
        self._in_transit.discard(load.key(position))
        self._release(load, position)
        load.open_blocks -= 1

    def _end(self, load: _Load) -> None:
        self._flow.queue.leave(load.name)
        if load.traffic is Traffic.PREFETCH:
            if not load.limit:  # the others end when their request comes, or has not come for too long
                del self._loads[load.name]
            return
        del self._loads[load.name]
        self._ended.append(Loaded(load.name, load.leading_blocks))
        self._stage.emit(LoadEnded(self._stage.now_ns(), load.name, load.plan.hit_blocks, load.leading_blocks))

    # --- what is late

    def _give_up_late(self, now_ns: int) -> None:
        for job_id in self._due.take(now_ns):
            self._flow.late(self._stage.jobs[job_id], now_ns)
            self._strand(job_id)
        self._hedges.give_up_late(now_ns)
        while self._deadlines and self._deadlines[0][0] <= now_ns:
            load = self._loads.get(heapq.heappop(self._deadlines)[1])
            if load is not None and load.deadline_ns is not None and load.deadline_ns <= now_ns:
                self._on_deadline(load, now_ns)

    def _strand(self, job_id: JobId) -> None:
        """Nobody waits for this READ any more. Its slots come back when it ends; what it brings is thrown away."""
        subject, job = self._subjects.pop(job_id), self._stage.jobs[job_id]
        load = subject.load
        self._stop_reading(load, job)
        self._stage.strand(job)
        won = self._won.pop(job_id, ())
        lost = [position for position in subject.positions if load.key(position) not in won]
        for position in lost:
            self._release(load, position)
            self._fill_failed(load.key(position), job_id)
            load.open_blocks -= 1
            load.tried.setdefault(position, set()).add(job.tier)
        for position in lost:
            self._seek(load, position)

    def _on_deadline(self, load: _Load, now_ns: int) -> None:
        """A load ends with what has arrived. A prefetch reads nothing more, and waits a while for its request."""
        if load.traffic is Traffic.PREFETCH:
            assert load.deadline_ns is not None
            leading, linger_ns = load.leading_blocks, load.deadline_ns + self._limits.prefetch_linger_ns
            if now_ns >= linger_ns or not leading:
                self._end_prefetch(load, PrefetchFate.UNUSED if leading else PrefetchFate.LATE)
            else:
                self._cut(load, leading)
                heapq.heappush(self._deadlines, (linger_ns, load.name))
            return
        self._cut(load, load.leading_blocks)
        for job_id in tuple(load.reading):
            self._flow.given_up(self._stage.jobs[job_id])
            self._strand(job_id)
        self._unpark(load)

    # --- prefetched blocks

    def _rest(self, load: _Load, position: int) -> None:
        """This position of a prefetch is in the host pool, and stays pinned there."""
        if position >= load.limit:
            self._leave(load, position)
            return
        key = load.key(position)
        self._in_transit.discard(key)
        load.open_blocks -= 1
        load.arrived[position] = 1
        self._prefetched[key] += 1

    def end_prefetch(self, name: str) -> None:
        """The request is here and its plan holds what it needs: the prefetch lets go of it. Unknown names are fine."""
        load = self._loads.get(name)
        if load is not None:
            self._end_prefetch(load, PrefetchFate.USED)

    def cancel_prefetch(self, name: str) -> None:
        load = self._loads.get(name)
        if load is not None:
            self._end_prefetch(load, PrefetchFate.UNUSED)

    def _yield_prefetch(self) -> bool:
        """Give up the prefetch that is needed last, so that its slots can go to demand; False if there is none."""
        held = [load for load in self._loads.values() if load.traffic is Traffic.PREFETCH and any(load.arrived)]
        if not held:
            return False
        self._end_prefetch(max(held, key=lambda load: (load.deadline_ns or 0, load.name)), PrefetchFate.YIELDED)
        return True

    def _end_prefetch(self, load: _Load, fate: PrefetchFate) -> None:
        """Let go of its blocks. Reads that are under way end in the host pool: somebody may wait for them already."""
        arrived = sum(load.arrived)
        self._cut(load, 0)
        self._unpark(load)
        self._stage.emit(PrefetchEnded(self._stage.now_ns(), load.name, load.plan.hit_blocks, arrived, fate))
        if not load.open_blocks:
            self._touched.pop(load.name, None)
            del self._loads[load.name]

    def _let_go_of_arrived(self, load: _Load) -> None:
        """A prefetch needs no block past its limit: without those before it, the request could not use it."""
        for position in range(load.limit, len(load.arrived)):
            if load.arrived[position]:
                key = load.key(position)
                self._release(load, position)
                self._prefetched[key] -= 1
                if not self._prefetched[key]:
                    del self._prefetched[key]
                load.arrived[position] = 0

    def _unpark(self, load: _Load) -> None:
        """Wait no longer for fills of others."""
        for position in tuple(load.parked):
            load.parked.remove(position)
            load.open_blocks -= 1
            self._release(load, position)

    # --- pins, and fills that several loads may wait for

    def _hold(self, load: _Load, position: int, source: str) -> None:
        key = load.key(position)
        load.sources[position] = source
        self._index.pin(key, source)
        if source == HOST and not self._index.is_ready(key, HOST):
            self._waiters[key].append((load, position))

    def _release(self, load: _Load, position: int) -> None:
        source, load.sources[position] = load.sources[position], None
        if source is None:
            return
        key = load.key(position)
        self._index.unpin(key, source)
        if source == HOST and key in self._waiters:
            self._waiters[key] = [
                (other, at) for other, at in self._waiters[key] if other is not load or at != position
            ]
            if not self._waiters[key]:
                del self._waiters[key]

    def _fill_ended(self, key: BlockKey) -> None:
        """A host copy is READY: those who waited for it can have it."""
        self._index.commit(key, HOST)
        for load, position in self._waiters.pop(key, ()):
            if position in load.parked:
                load.parked.remove(position)
                self._make_ready(load, position)

    def _fill_failed(self, key: BlockKey, still_written_by: JobId | None) -> None:
        """A host copy will not come: those who waited for it look elsewhere."""
        waiters = self._waiters.pop(key, [])
        for load, position in waiters:
            self._index.unpin(key, HOST)
            load.sources[position] = None
        self._stage.abandon_host(key, still_written_by)
        self._in_transit.discard(key)
        for load, position in waiters:
            if position in load.parked:
                load.parked.remove(position)
                load.open_blocks -= 1
            self._seek(load, position)
