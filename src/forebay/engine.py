"""The one orchestrator: decides what moves, tells executors and the device to move it, and applies what came of it.

Owns the index and the host pool. Does no I/O and holds no lock; one thread calls it, and only `poll` applies results.

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
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import msgspec

from forebay.errors import InvariantBroken, TierUnavailable
from forebay.events import Dropped, EventSink, JobEnded, LoadEnded, Planned, Reason, Refused
from forebay.hostpool import HostPool
from forebay.index import BlockIndex
from forebay.planner import by_speed, known_prefix, source_of
from forebay.ports import AdmissionPolicy, DevicePort, EvictionPolicy, Executor, Tier
from forebay.types import (
    HOST,
    BlockKey,
    CopyState,
    DeviceBlock,
    Job,
    JobId,
    JobKind,
    JobResult,
    Loaded,
    LoadPlan,
    Outcome,
    Request,
    Slot,
)

log = logging.getLogger("forebay.engine")
_T = TypeVar("_T")


class EngineOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    batch_blocks: int = 32
    """Blocks a read or write job carries at most: large enough to keep a tier busy, small enough to copy in early."""
    reserve_share: float = 0.125
    """Share of the host slots that loads always leave to stores, and stores to loads; at least one slot each."""
    probe_deadline_s: float = 0.05
    """How long a lookup waits for a shared tier's answer before it takes the index's word."""
    full_backoff_s: float = 10.0
    """How long a tier that had no room, below its own limit, is held to what it holds."""


@dataclass(frozen=True, slots=True)
class Policies:
    eviction: Mapping[str, EvictionPolicy]
    """One for `HOST` and one for each tier."""
    admission: AdmissionPolicy


@dataclass(slots=True)
class _Load:
    """A load from its plan to its end. For each position with a source, this load holds one pin there."""

    plan: LoadPlan
    sources: list[str | None]
    blocks: tuple[DeviceBlock, ...] = ()
    started: bool = False
    waiting: list[int] = field(default_factory=list)
    """Heap of positions that need a slot or a look."""
    parked: set[int] = field(default_factory=set)
    """Positions that wait for somebody else's fill."""
    open_blocks: int = 0
    """Positions being read, parked or copied."""
    copied: bytearray = field(default_factory=bytearray)
    limit: int = 0
    """Positions from here on are lost, and with them all that follows."""
    tried: dict[int, set[str]] = field(default_factory=dict)
    """Tiers that failed to give a position's block."""

    @property
    def request_id(self) -> str:
        return self.plan.request_id

    def key(self, position: int) -> BlockKey:
        return self.plan.reads[position].key


@dataclass(slots=True)
class _Probe:
    deadline_ns: int
    open_jobs: int


@dataclass(frozen=True, slots=True)
class _Positions:
    """What a READ or COPY_IN job is about, in the order of its keys."""

    load: _Load
    positions: tuple[int, ...]


@dataclass(slots=True)
class _Room:
    """What a tier may hold; lower than its capacity for a while after it found no room."""

    capacity_bytes: int
    limit_bytes: int
    limited_until_ns: int = 0


class Engine:
    def __init__(
        self,
        pool: HostPool,
        tiers: Mapping[str, Tier],
        policies: Policies,
        device: DevicePort,
        executor: Executor,
        emit: EventSink,
        options: EngineOptions | None = None,
    ) -> None:
        assert set(policies.eviction) == {HOST, *tiers}, "one eviction policy for the host pool and for each tier"
        self._options = options or EngineOptions()
        self._pool, self._tiers, self._device, self._executor, self._emit = pool, dict(tiers), device, executor, emit
        self._eviction, self._admission = policies.eviction, policies.admission
        self._specs = {name: tier.spec for name, tier in tiers.items()}
        self._order = by_speed(self._specs.values())
        self._shared = tuple(name for name in self._order if self._specs[name].shared)
        self._room = {name: _Room(spec.capacity_bytes, spec.capacity_bytes) for name, spec in self._specs.items()}
        self._reserve_slots = max(1, int(pool.slots * self._options.reserve_share))

        self._index = BlockIndex((HOST, *tiers))
        self._loads: dict[str, _Load] = {}
        self._ready: defaultdict[str, list[int]] = defaultdict(list)  # request id -> positions to copy in
        self._waiters: defaultdict[BlockKey, list[tuple[_Load, int]]] = defaultdict(list)
        self._reading: set[BlockKey] = set()  # slots that loads hold for blocks on their way to the device
        self._storing: Counter[BlockKey] = Counter()  # slots that stores hold, with the jobs that use them
        self._probes: dict[str, _Probe] = {}
        self._jobs: dict[JobId, Job] = {}
        self._subjects: dict[JobId, _Positions] = {}
        self._probing: dict[JobId, _Probe] = {}
        self._device_jobs = 0
        self._last_job_id = 0
        self._ended: list[Loaded] = []
        for name, tier in tiers.items():
            for stored in tier.scan():
                self._index.adopt(stored.key, name, stored.stored_bytes)
                self._eviction[name].inserted((stored.key,))

    # --- load: tokens -> keys -> index -> plan -> reads -> device

    def plan_load(self, request: Request) -> LoadPlan | None:
        """The longest known prefix of a request, pinned. None: a shared tier is being asked; poll, and ask again.

        A plan with hits must be started or cancelled, an unanswered request asked again or cancelled. Never blocks.
        """
        assert request.request_id not in self._loads, f"request {request.request_id} has a load already"
        reads = known_prefix(request.keys, self._index, self._order)
        if self._shared and len(reads) < len(request.keys) and not self._is_probed(request, len(reads)):
            return None
        self._probes.pop(request.request_id, None)
        plan = LoadPlan(request.request_id, reads, len(request.keys))
        if reads:
            load = _Load(plan, [read.source for read in reads], limit=len(reads), copied=bytearray(len(reads)))
            self._loads[request.request_id] = load
            for position, read in enumerate(reads):
                self._hold(load, position, read.source)
            self._eviction[HOST].accessed([read.key for read in reads if read.source == HOST])
        hits = Counter(read.source for read in reads)
        self._emit(Planned(self.now_ns(), request.request_id, plan.wanted_blocks, tuple(sorted(hits.items()))))
        return plan

    def start_load(self, plan: LoadPlan, device_blocks: Sequence[DeviceBlock]) -> None:
        """Bring the plan's blocks to the first `plan.hit_blocks` of these device blocks.

        They are the engine's until `poll` returns the one `Loaded` of this request.
        """
        assert len(device_blocks) >= plan.hit_blocks, "a device block for each block of the plan"
        load = self._loads[plan.request_id] if plan.reads else self._loads.setdefault(plan.request_id, _Load(plan, []))
        assert load.plan is plan, f"this is not the open plan of request {plan.request_id}"
        assert not load.started, f"request {plan.request_id} is started already"
        load.started, load.blocks = True, tuple(device_blocks[: plan.hit_blocks])
        for position, source in enumerate(load.sources):
            if source == HOST:
                self._take_from_host(load, position)  # at once and out of order: these pins hold slots
            else:
                load.waiting.append(position)
        self._advance()

    def cancel_load(self, request_id: str) -> None:
        """Give up a plan, or a started load, which still ends with its `Loaded`, of 0 blocks. Unknown ids are fine."""
        self._probes.pop(request_id, None)
        load = self._loads.get(request_id)
        if load is None:
            return
        load.limit = 0
        if load.started:
            self._advance()
            return
        del self._loads[request_id]
        for position in range(len(load.sources)):
            self._release(load, position)

    def _is_probed(self, request: Request, known_blocks: int) -> bool:
        """Whether the shared tiers have said what they hold past the known blocks, or had their time to say it."""
        probe = self._probes.get(request.request_id)
        if probe is None:
            probe = _Probe(self.now_ns() + int(self._options.probe_deadline_s * 1e9), len(self._shared))
            self._probes[request.request_id] = probe
            for name in self._shared:
                job = self._new_job(JobKind.PROBE, name, request.keys[known_blocks:], ())
                self._probing[job.job_id] = probe
                self._executor.submit(job, partial(_probe, self._tiers[name], job.keys))
        return not probe.open_jobs or self.now_ns() >= probe.deadline_ns

    def _advance(self) -> None:
        """Grant slots to loads in the order of their plans, hand over what is in the pool, end what is done."""
        for load in [load for load in self._loads.values() if load.started]:
            self._grant(load)
        for request_id, positions in sorted(self._ready.items()):
            self._copy_in(self._loads[request_id], positions)
        self._ready.clear()
        for load in [load for load in self._loads.values() if load.started]:
            if not load.open_blocks and not load.waiting:
                self._end(load)

    def _grant(self, load: _Load) -> None:
        """Give the load's next positions a slot each and start their reads, as far as slots go."""
        reads: defaultdict[str, list[int]] = defaultdict(list)
        room = self._pool.slots - self._reserve_slots - len(self._reading)
        quantum = min(self._options.batch_blocks, max(1, self._pool.slots // 4), len(load.waiting))
        patient = room < quantum and bool(self._jobs)  # more slots will come, and jobs of one block are wasteful
        while load.waiting:
            position = load.waiting[0]
            key, source = load.key(position), load.sources[position]
            if position >= load.limit or source is None:
                load.limit = min(load.limit, position)
                self._release(load, heapq.heappop(load.waiting))
            elif self._index.get(key, HOST) is not None:  # somebody else has brought it meanwhile, or is about to
                self._release(load, heapq.heappop(load.waiting))
                self._hold(load, position, HOST)
                self._take_from_host(load, position)
            else:
                slot = self._take_slot() if room > 0 and not patient else None
                if slot is None:
                    break
                room -= 1
                self._index.reserve(key, HOST, self._pool.slot_bytes, slot)
                self._reading.add(key)
                reads[source].append(heapq.heappop(load.waiting))
                load.open_blocks += 1
        for name, positions in reads.items():
            for batch in _batches(positions, self._options.batch_blocks):
                self._read(load, name, batch)

    def _take_from_host(self, load: _Load, position: int) -> None:
        """Hand a position whose host copy is pinned to the copy-in, now or when its fill has ended."""
        load.open_blocks += 1
        if self._index.is_ready(load.key(position), HOST):
            self._ready[load.request_id].append(position)
        else:
            load.parked.add(position)

    def _read(self, load: _Load, name: str, positions: Sequence[int]) -> None:
        keys = tuple(load.key(position) for position in positions)
        job = self._new_job(JobKind.READ, name, keys, self._slots_of(keys))
        self._subjects[job.job_id] = _Positions(load, tuple(positions))
        views = [self._pool.view(slot) for slot in job.slots]
        self._executor.submit(job, partial(_by_key, self._tiers[name].read, keys, views))

    def _on_read(self, result: JobResult) -> None:
        name, subject = result.job.tier, self._subjects.pop(result.job.job_id)
        load = subject.load
        arrived: list[BlockKey] = []
        for position, key in zip(subject.positions, result.job.keys, strict=True):
            outcome = result.outcomes[key]
            self._release(load, position)
            if outcome is Outcome.OK:
                arrived.append(key)
                self._fill_ended(key)
                self._hold(load, position, HOST)
                self._ready[load.request_id].append(position)
                continue
            self._fill_failed(key)
            load.open_blocks -= 1
            load.tried.setdefault(position, set()).add(name)
            if outcome in (Outcome.MISSING, Outcome.CORRUPT) and self._index.is_evictable(key, name):
                self._forget(key, name, Reason.MISSING if outcome is Outcome.MISSING else Reason.CORRUPT)
            self._seek(load, position)
        self._eviction[HOST].inserted(arrived)
        self._eviction[name].accessed(arrived)
        for faster in self._order[: self._order.index(name)]:
            self._store(faster, arrived)

    def _seek(self, load: _Load, position: int) -> None:
        """Find another source for a position that lost its own; without one the load ends before it."""
        source = source_of(load.key(position), self._index, self._order, load.tried.get(position, ()))
        if source is None:
            load.limit = min(load.limit, position)
            return
        self._hold(load, position, source)
        if load.started and source == HOST:
            self._take_from_host(load, position)
        elif load.started:
            heapq.heappush(load.waiting, position)

    def _copy_in(self, load: _Load, positions: list[int]) -> None:
        wanted = sorted(position for position in positions if position < load.limit)
        for position in positions:
            if position >= load.limit:
                self._reading.discard(load.key(position))
                self._release(load, position)
                load.open_blocks -= 1
        if not wanted:
            return
        keys = tuple(load.key(position) for position in wanted)
        job = self._new_job(JobKind.COPY_IN, HOST, keys, self._slots_of(keys))
        self._subjects[job.job_id] = _Positions(load, tuple(wanted))
        self._device_jobs += 1
        self._device.submit(job, tuple(load.blocks[position] for position in wanted))

    def _on_copy_in(self, result: JobResult) -> None:
        subject = self._subjects.pop(result.job.job_id)
        load = subject.load
        for position, key in zip(subject.positions, result.job.keys, strict=True):
            self._reading.discard(key)
            self._release(load, position)
            load.open_blocks -= 1
            if result.outcomes[key] is Outcome.OK:
                load.copied[position] = 1
            else:
                load.limit = min(load.limit, position)

    def _end(self, load: _Load) -> None:
        del self._loads[load.request_id]
        leading = (bytes(load.copied[: load.limit]) + b"\0").index(0)
        self._ended.append(Loaded(load.request_id, leading))
        self._emit(LoadEnded(self.now_ns(), load.request_id, load.plan.hit_blocks, leading))

    # --- pins of loads, and fills that several loads may wait for

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
            self._waiters[key] = [entry for entry in self._waiters[key] if entry != (load, position)]

    def _fill_ended(self, key: BlockKey) -> None:
        """A host copy is READY: those who waited for it can have it."""
        self._index.commit(key, HOST)
        for load, position in self._waiters.pop(key, ()):
            if position in load.parked:
                load.parked.remove(position)
                self._ready[load.request_id].append(position)

    def _fill_failed(self, key: BlockKey) -> None:
        """A host copy will not come: those who waited for it look elsewhere."""
        waiters = self._waiters.pop(key, [])
        for load, position in waiters:
            self._index.unpin(key, HOST)
            load.sources[position] = None
        slot = self._index.abandon(key, HOST).slot
        assert slot is not None
        self._pool.give(slot)
        self._reading.discard(key)
        for load, position in waiters:
            if position in load.parked:
                load.parked.remove(position)
                load.open_blocks -= 1
            self._seek(load, position)

    # --- store: finished blocks -> host slots -> admission -> tier writes

    def offer(self, keys: Sequence[BlockKey], device_blocks: Sequence[DeviceBlock]) -> int:
        """Store finished blocks; returns how many leading ones were taken. Offer the rest again after a poll.

        A taken block must stay as it is on the device until its COPY_OUT job has ended there.
        """
        at_hand = [key for key in keys if self._index.is_ready(key, HOST)]
        for name in self._order:
            self._store(name, at_hand)  # first, since the slots taken below may be theirs
        fresh: list[tuple[BlockKey, DeviceBlock]] = []
        taken = 0
        for key, block in zip(keys, device_blocks, strict=True):
            if self._index.get(key, HOST) is None:
                slot = self._take_slot() if self._may_store(key) else None
                if slot is None:
                    self._emit(Refused(self.now_ns(), HOST, len(keys) - taken, Reason.NO_SLOT))
                    break
                self._index.reserve(key, HOST, self._pool.slot_bytes, slot)
                self._storing[key] += 1
                fresh.append((key, block))
            taken += 1
        if fresh:
            fresh_keys = tuple(key for key, _ in fresh)
            job = self._new_job(JobKind.COPY_OUT, HOST, fresh_keys, self._slots_of(fresh_keys))
            self._device_jobs += 1
            self._device.submit(job, tuple(block for _, block in fresh))
        return taken

    def _on_copy_out(self, result: JobResult) -> None:
        good = tuple(key for key in result.job.keys if result.outcomes[key] is Outcome.OK)
        for key in result.job.keys:
            if result.outcomes[key] is Outcome.OK:
                self._fill_ended(key)
            else:
                self._fill_failed(key)
        self._eviction[HOST].inserted(good)
        for name in self._order:
            self._store(name, good)
        for key in result.job.keys:
            self._let_go(key)

    def _store(self, name: str, keys: Sequence[BlockKey]) -> None:
        """Write blocks that are READY in the host pool to a tier that lacks them, evicting there what must go."""
        spec = self._specs[name]
        writes: list[BlockKey] = []
        evicts: dict[BlockKey, list[BlockKey]] = {}
        refused: Counter[Reason] = Counter()
        for key in keys:
            if self._index.get(key, name) is not None:
                continue
            if not self._may_store(key):
                refused[Reason.NO_SLOT] += 1
            elif not self._admission.admit(key, spec, self._index.used_bytes(name)):
                refused[Reason.NOT_ADMITTED] += 1
            elif (victims := self._make_room(name)) is None:
                refused[Reason.NO_ROOM] += 1
            else:
                writes.append(key)
                evicts[key] = victims
                self._index.reserve(key, name, spec.stored_bytes)
                self._index.pin(key, HOST)
                self._storing[key] += 1
        for reason, blocks in refused.items():
            self._emit(Refused(self.now_ns(), name, blocks, reason))
        for batch in _batches(writes, self._options.batch_blocks):
            gone = tuple(victim for key in batch for victim in evicts[key])  # each job makes the room that it fills
            job = self._new_job(JobKind.WRITE, name, tuple(batch), self._slots_of(batch), gone)
            views = [self._pool.view(slot) for slot in job.slots]
            self._executor.submit(job, partial(_replace, self._tiers[name], job.evicts, job.keys, views))

    def _may_store(self, key: BlockKey) -> bool:
        """Whether a store may hold one more slot, or holds this block's already."""
        return key in self._storing or len(self._storing) < self._pool.slots - self._reserve_slots

    def _on_write(self, result: JobResult) -> None:
        name = result.job.tier
        written: list[BlockKey] = []
        for key in result.job.evicts:
            if result.outcomes[key] is Outcome.OK:
                self._index.drop(key, name)
            else:
                self._index.keep(key, name)
                self._eviction[name].inserted((key,))
        for key in result.job.keys:
            self._index.unpin(key, HOST)
            self._let_go(key)
            if result.outcomes[key] is Outcome.OK:
                self._index.commit(key, name)
                written.append(key)
            else:
                self._index.abandon(key, name)
        self._eviction[name].inserted(written)
        if Outcome.FULL in result.outcomes.values():
            self._limit_room(name)

    def _let_go(self, key: BlockKey) -> None:
        self._storing[key] -= 1
        if not self._storing[key]:
            del self._storing[key]

    # --- room

    def _take_slot(self) -> Slot | None:
        """A free host slot, if need be that of the most dispensable copy in the pool."""
        if not self._pool.free_slots:
            for key in self._eviction[HOST].victims(1, lambda key: self._index.is_evictable(key, HOST)):
                self._forget(key, HOST, Reason.EVICTED)
        return self._pool.take()

    def _make_room(self, name: str) -> list[BlockKey] | None:
        """Blocks, now DROPPING, that have to be deleted before one more fits; None when no room can be made."""
        limit_bytes = self._limit_bytes(name)
        over_bytes = self._index.used_bytes(name) + self._specs[name].stored_bytes - limit_bytes
        victims: list[BlockKey] = []
        while over_bytes > 0:
            found = self._eviction[name].victims(1, lambda key: self._index.is_evictable(key, name))
            copy = self._index.get(found[0], name) if found else None
            if copy is None:
                for key in victims:
                    self._index.keep(key, name)
                self._eviction[name].inserted(victims)
                return None
            over_bytes -= copy.stored_bytes
            victims += found
            self._index.begin_drop(found[0], name)
            self._eviction[name].removed(found)
        if victims:
            self._emit(Dropped(self.now_ns(), name, len(victims), Reason.EVICTED))
        return victims

    def _limit_bytes(self, name: str) -> int:
        room = self._room[name]
        if room.limited_until_ns and self.now_ns() >= room.limited_until_ns:
            room.limit_bytes, room.limited_until_ns = room.capacity_bytes, 0
        return room.limit_bytes

    def _limit_room(self, name: str) -> None:
        """The medium was full before the tier's own limit: for a while, write only by evicting as much."""
        room = self._room[name]
        room.limit_bytes = min(room.limit_bytes, self._index.used_bytes(name))
        room.limited_until_ns = self.now_ns() + int(self._options.full_backoff_s * 1e9)

    def _forget(self, key: BlockKey, place: str, reason: Reason) -> None:
        self._eviction[place].removed((key,))
        slot = self._index.forget(key, place).slot
        if slot is not None:
            self._pool.give(slot)
        self._emit(Dropped(self.now_ns(), place, 1, reason))

    # --- what the host engine may ask

    def holds(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Which blocks are in the host pool or a tier, or on their way into the pool."""
        return [source_of(key, self._index, self._order) is not None for key in keys]

    def drop_host_copies(self) -> int:
        """Forget every unpinned host copy that some tier holds too; returns how many. Their slots are free."""
        spare = [
            key
            for key, _ in self._index.copies(HOST)
            if self._index.is_evictable(key, HOST) and any(self._index.is_ready(key, name) for name in self._order)
        ]
        for key in spare:
            self._forget(key, HOST, Reason.ASKED)
        return len(spare)

    def now_ns(self) -> int:
        return self._executor.now_ns()

    @property
    def idle(self) -> bool:
        """No job in flight and no load open."""
        return not self._jobs and not self._loads and not self._ended

    def poll(self) -> list[Loaded]:
        """Apply every job that has ended, start what became possible, and say which loads are over. Never blocks."""
        for result in (*self._executor.poll(), *self._device.poll()):
            del self._jobs[result.job.job_id]
            outcomes = Counter(result.outcomes[key] for key in result.job.keys)
            by_value = tuple(sorted(outcomes.items(), key=lambda item: item[0].value))
            self._emit(JobEnded(result.finished_ns, result.job, result.started_ns, by_value))
            match result.job.kind:
                case JobKind.READ:
                    self._on_read(result)
                case JobKind.WRITE:
                    self._on_write(result)
                case JobKind.COPY_IN:
                    self._device_jobs -= 1
                    self._on_copy_in(result)
                case JobKind.COPY_OUT:
                    self._device_jobs -= 1
                    self._on_copy_out(result)
                case JobKind.PROBE:
                    self._on_probe(result)
        self._advance()
        ended, self._ended = self._ended, []
        return ended

    def wait(self, until_ns: int) -> None:
        """Block until `poll` may have something to apply, or the clock reaches `until_ns`. Changes nothing."""
        if self._ended:
            return
        if self._device_jobs:  # only the device knows when; look again soon
            until_ns = min(until_ns, self.now_ns() + 100_000)
        self._executor.wait(until_ns)

    def close(self) -> None:
        """Let running jobs end, and close the tiers. Blocks that were not written by then are lost to later runs."""
        self._executor.close()
        for tier in self._tiers.values():
            tier.close()

    def _on_probe(self, result: JobResult) -> None:
        name = result.job.tier
        self._probing.pop(result.job.job_id).open_jobs -= 1
        for key in result.job.keys:
            if result.outcomes[key] is Outcome.OK and self._index.get(key, name) is None:
                self._index.adopt(key, name, self._specs[name].stored_bytes)
                self._eviction[name].inserted((key,))

    def _new_job(
        self,
        kind: JobKind,
        tier: str,
        keys: tuple[BlockKey, ...],
        slots: tuple[Slot, ...],
        evicts: tuple[BlockKey, ...] = (),
    ) -> Job:
        self._last_job_id += 1
        job = Job(JobId(self._last_job_id), kind, tier, keys, slots, len(slots) * self._pool.block_bytes, evicts)
        self._jobs[job.job_id] = job
        return job

    def _slots_of(self, keys: Iterable[BlockKey]) -> tuple[Slot, ...]:
        slots: list[Slot] = []
        for key in keys:
            copy = self._index.get(key, HOST)
            assert copy is not None
            assert copy.slot is not None
            slots.append(copy.slot)
        return tuple(slots)

    # --- the promises, for tests

    def check(self) -> None:
        """Raises InvariantBroken unless slots, bytes and pins add up. Costs a walk over everything."""
        self._index.check(self._pool.slots, self._pool.free_slots)
        expected: Counter[tuple[BlockKey, str]] = Counter()
        for load in self._loads.values():
            for position, source in enumerate(load.sources):
                if source is not None:
                    expected[load.key(position), source] += 1
        for job in self._jobs.values():
            if job.kind is JobKind.WRITE:
                expected.update((key, HOST) for key in job.keys)
        for place in (HOST, *self._order):
            for key, copy in self._index.copies(place):
                fill = copy.state is CopyState.FILLING
                if copy.pins != expected[key, place] + fill:
                    raise InvariantBroken(f"{place}: {copy.pins} pins where {expected[key, place] + fill} are held")

    def check_idle(self) -> None:
        """At rest: nothing pinned, half filled or on its way out, and every claim of the index true."""
        self.check()
        if not self.idle or self._probes or self._waiters or self._reading or self._storing or self._ready:
            raise InvariantBroken("something is still under way")
        for place in (HOST, *self._order):
            for key, copy in self._index.copies(place):
                if copy.pins or copy.state is not CopyState.READY:
                    raise InvariantBroken(f"{place}: {copy} left behind")
                if place != HOST and not self._tiers[place].contains((key,))[0]:
                    raise InvariantBroken(f"{place} does not hold a block that the index says is READY")


def _batches(items: Sequence[_T], most: int) -> Iterable[Sequence[_T]]:
    return (items[at : at + most] for at in range(0, len(items), most))


# --- what runs on worker threads: a tier's call, and its failure as a value


def _by_key(
    call: Callable[[Sequence[BlockKey], Sequence[memoryview]], Sequence[Outcome]],
    keys: Sequence[BlockKey],
    views: Sequence[memoryview],
) -> dict[BlockKey, Outcome]:
    try:
        return dict(zip(keys, call(keys, views), strict=True))
    except (TierUnavailable, OSError) as error:
        log.warning("%d blocks failed: %s", len(keys), error)
        return dict.fromkeys(keys, Outcome.FAILED)


def _replace(
    tier: Tier, evicts: Sequence[BlockKey], keys: Sequence[BlockKey], views: Sequence[memoryview]
) -> dict[BlockKey, Outcome]:
    """Delete, then write into the room that this made; without the room nothing is written."""
    outcomes = _by_key(lambda gone, _: tier.delete(gone), evicts, ()) if evicts else {}
    if any(outcome is not Outcome.OK for outcome in outcomes.values()):
        return {**outcomes, **dict.fromkeys(keys, Outcome.FAILED)}
    return {**outcomes, **_by_key(tier.write, keys, views)}


def _probe(tier: Tier, keys: Sequence[BlockKey]) -> dict[BlockKey, Outcome]:
    def call(asked: Sequence[BlockKey], _: Sequence[memoryview]) -> list[Outcome]:
        return [Outcome.OK if held else Outcome.MISSING for held in tier.contains(asked)]

    return _by_key(call, keys, ())
