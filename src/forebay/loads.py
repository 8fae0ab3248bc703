"""Loads: planned prefixes on their way from the tiers, through host slots, to device blocks.

A load, block by block:

    planned --start--> waiting --slot granted--> being read --+--> in the host pool --copied in--> on the device
                          |                          |        |
                          |                          +--failed: next place that holds it, else the load ends before it
                          +--somebody else is filling it: parked until that fill has ended

A block counts for a load only if every block before it does. Host slots are granted in token order as they become free,
so a prefix longer than the host pool streams through it.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from forebay.events import LoadEnded, Reason
from forebay.planner import source_of
from forebay.stage import Stage
from forebay.types import HOST, BlockKey, DeviceBlock, JobId, JobKind, JobResult, Loaded, LoadPlan, Outcome

_WITHDRAWN = {
    Outcome.MISSING: Reason.MISSING,
    Outcome.CORRUPT: Reason.CORRUPT,
    Outcome.FAILED: Reason.UNREADABLE,
}
"""Outcomes of a read after which the tier may be known not to give the block."""


@dataclass(slots=True)
class _Load:
    """A load from its plan to its end. For each position with a source, it holds one pin there."""

    plan: LoadPlan
    sources: list[str | None]
    limit: int
    """Positions from here on are lost, and with them all that follows."""
    copied: bytearray
    blocks: tuple[DeviceBlock, ...] = ()
    started: bool = False
    waiting: list[int] = field(default_factory=list)
    """Heap of positions that need a slot."""
    parked: set[int] = field(default_factory=set)
    """Positions that wait for somebody else's fill."""
    ready: list[int] = field(default_factory=list)
    """Positions whose host copy can be copied in."""
    open_blocks: int = 0
    """Positions being read, parked, ready or being copied."""
    tried: dict[int, set[str]] = field(default_factory=dict)
    """Tiers that failed to give a position's block."""

    def key(self, position: int) -> BlockKey:
        return self.plan.reads[position].key


@dataclass(frozen=True, slots=True)
class _Positions:
    """What a READ or COPY_IN job is about, in the order of its keys."""

    load: _Load
    positions: tuple[int, ...]


class Loads:
    def __init__(self, stage: Stage, batch_blocks: int) -> None:
        self._stage, self._index, self._batch_blocks = stage, stage.index, batch_blocks
        self._loads: dict[str, _Load] = {}
        self._queue: dict[str, _Load] = {}
        """Started loads with positions that wait for a slot, in the order of their starts."""
        self._touched: dict[str, _Load] = {}
        """Started loads that something has happened to since the last `advance`."""
        self._waiters: defaultdict[BlockKey, list[tuple[_Load, int]]] = defaultdict(list)
        self._in_transit: set[BlockKey] = set()
        """Blocks whose slot was granted to a load and that have not reached its device."""
        self._failed_once: set[tuple[BlockKey, str]] = set()
        """Blocks whose last read from a tier failed."""
        self._subjects: dict[JobId, _Positions] = {}
        self._ended: list[Loaded] = []

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._loads

    @property
    def idle(self) -> bool:
        return not (self._loads or self._ended or self._waiters or self._in_transit or self._queue)

    @property
    def has_ended(self) -> bool:
        """Whether `take_ended` has something to give."""
        return bool(self._ended)

    def pins(self) -> Counter[tuple[BlockKey, str]]:
        """Every pin that loads hold, to be checked against the index."""
        return Counter(
            (load.key(position), source)
            for load in self._loads.values()
            for position, source in enumerate(load.sources)
            if source is not None
        )

    # --- what the host engine asks for

    def add(self, plan: LoadPlan) -> None:
        """Pin what a plan names."""
        load = _Load(plan, [None] * plan.hit_blocks, plan.hit_blocks, bytearray(plan.hit_blocks))
        self._loads[plan.request_id] = load
        for position, read in enumerate(plan.reads):
            self._hold(load, position, read.source)

    def start(self, plan: LoadPlan, device_blocks: Sequence[DeviceBlock]) -> None:
        load = self._loads[plan.request_id]
        assert load.plan is plan, f"this is not the open plan of request {plan.request_id}"
        assert not load.started, f"request {plan.request_id} is started already"
        load.started, load.blocks = True, tuple(device_blocks[: plan.hit_blocks])
        for position, source in enumerate(load.sources):
            if position >= load.limit:
                self._release(load, position)
            elif source == HOST:
                self._take_from_host(load, position)  # at once and out of order: these pins hold slots
            else:
                load.waiting.append(position)
        if load.waiting:
            self._queue[plan.request_id] = load
        self._touched[plan.request_id] = load

    def cancel(self, request_id: str) -> None:
        load = self._loads.get(request_id)
        if load is None:
            return
        self._cut(load, 0)
        if not load.started:
            del self._loads[request_id]
            for position in range(len(load.sources)):
                self._release(load, position)

    def take_ended(self) -> list[Loaded]:
        ended, self._ended = self._ended, []
        return ended

    # --- progress

    def advance(self) -> None:
        """Grant slots in the order of the starts, copy in what is in the pool, end what is done.

        Costs what there is to do, however many loads are open.
        """
        for load in list(self._queue.values()):
            self._grant(load)
            if load.waiting:
                break  # no slot for it, and so none for those behind it
            del self._queue[load.plan.request_id]
        touched, self._touched = self._touched, {}
        for load in touched.values():
            self._copy_in(load)
            if not load.open_blocks and not load.waiting:
                self._end(load)

    def _grant(self, load: _Load) -> None:
        """Give the load's next positions a slot each and start their reads, as far as slots go."""
        reads: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
        room = self._stage.usable_slots - len(self._in_transit)
        quantum = min(self._batch_blocks, max(1, self._stage.usable_slots // 4), len(load.waiting))
        patient = room < quantum and bool(self._stage.jobs)  # more slots will come; jobs of one block are wasteful
        while load.waiting:
            position = load.waiting[0]
            key, source = load.key(position), load.sources[position]
            assert source is not None, "a position without a source is at or past the limit, and not waiting"
            if self._index.get(key, HOST) is not None:  # somebody else has brought it meanwhile, or is about to
                self._release(load, heapq.heappop(load.waiting))
                self._hold(load, position, HOST)
                self._take_from_host(load, position)
                continue
            slot = self._stage.take_slot() if room > 0 and not patient else None
            if slot is None:
                break
            room -= 1
            self._stage.reserve_host(key, slot)
            self._in_transit.add(key)
            reads[source, self._stage.route(source, key)].append(heapq.heappop(load.waiting))
            load.open_blocks += 1
        for (tier, _), positions in reads.items():
            for at in range(0, len(positions), self._batch_blocks):
                batch = tuple(positions[at : at + self._batch_blocks])
                job = self._stage.read(tier, [load.key(position) for position in batch])
                self._subjects[job.job_id] = _Positions(load, batch)

    def _cut(self, load: _Load, position: int) -> None:
        """This position is lost, and with it all that follows: nothing more is read for them."""
        load.limit = min(load.limit, position)
        for late in [waiting for waiting in load.waiting if waiting >= load.limit]:
            self._release(load, late)
        load.waiting = [waiting for waiting in load.waiting if waiting < load.limit]
        heapq.heapify(load.waiting)
        if load.started:
            self._touched[load.plan.request_id] = load

    def _take_from_host(self, load: _Load, position: int) -> None:
        """Have a position whose host copy is pinned copied in, now or when its fill has ended."""
        load.open_blocks += 1
        if self._index.is_ready(load.key(position), HOST):
            self._make_ready(load, position)
        else:
            load.parked.add(position)

    def _make_ready(self, load: _Load, position: int) -> None:
        load.ready.append(position)
        self._touched[load.plan.request_id] = load

    def on_read(self, result: JobResult) -> list[BlockKey]:
        """Apply a READ; returns the blocks that are in the host pool now."""
        tier, subject = result.job.tier, self._subjects.pop(result.job.job_id)
        load = subject.load
        arrived: list[BlockKey] = []
        for position, key in zip(subject.positions, result.job.keys, strict=True):
            outcome = result.outcomes[key]
            self._release(load, position)
            if outcome is Outcome.OK:
                arrived.append(key)
                self._failed_once.discard((key, tier))
                self._fill_ended(key)
                self._hold(load, position, HOST)
                self._make_ready(load, position)
                continue
            self._fill_failed(key)
            load.open_blocks -= 1
            load.tried.setdefault(position, set()).add(tier)
            if self._is_disproved(key, tier, outcome) and self._index.is_ready(key, tier):
                self._stage.withdraw(key, tier, _WITHDRAWN[outcome])
            self._seek(load, position)
        self._stage.eviction[HOST].inserted(arrived)
        self._stage.eviction[tier].accessed(arrived)
        return arrived

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
                self._fill_failed(key)
        self._stage.eviction[HOST].inserted(arrived)
        return arrived

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
            heapq.heappush(load.waiting, position)
            self._queue[load.plan.request_id] = load

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
                load.copied[position] = 1
            else:
                self._cut(load, position)
        self._touched[load.plan.request_id] = load

    def _leave(self, load: _Load, position: int) -> None:
        """A position is through with its host slot."""
        self._in_transit.discard(load.key(position))
        self._release(load, position)
        load.open_blocks -= 1

    def _end(self, load: _Load) -> None:
        del self._loads[load.plan.request_id]
        self._queue.pop(load.plan.request_id, None)
        leading = (bytes(load.copied[: load.limit]) + b"\0").index(0)
        self._ended.append(Loaded(load.plan.request_id, leading))
        self._stage.emit(LoadEnded(self._stage.now_ns(), load.plan.request_id, load.plan.hit_blocks, leading))

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

    def _fill_failed(self, key: BlockKey) -> None:
        """A host copy will not come: those who waited for it look elsewhere."""
        waiters = self._waiters.pop(key, [])
        for load, position in waiters:
            self._index.unpin(key, HOST)
            load.sources[position] = None
        self._stage.abandon_host(key)
        self._in_transit.discard(key)
        for load, position in waiters:
            if position in load.parked:
                load.parked.remove(position)
                load.open_blocks -= 1
            self._seek(load, position)
