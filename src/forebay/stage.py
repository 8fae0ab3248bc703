"""What loads and stores share: the host pool with its index and eviction policies, and the jobs in flight.

Every change to the index that frees or takes a slot, and every job, goes through here.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from forebay.errors import ConfigError, TierUnavailable
from forebay.events import Dropped, EventSink, JobEnded, Overdue, Reason, Refused, TrafficView
from forebay.flow import Flow, FlowOptions
from forebay.hostpool import HostPool
from forebay.index import BlockIndex
from forebay.pins import Pins
from forebay.planner import by_speed
from forebay.ports import (
    AdmissionPolicy,
    Catalogued,
    DevicePort,
    EvictionPolicy,
    Executor,
    Observed,
    Routed,
    Scrubbing,
    SeesLookups,
    Tier,
    Watched,
    Work,
)
from forebay.tenancy import Whose, by_tenant
from forebay.types import (
    HOST,
    BlockKey,
    Change,
    ChangeKind,
    Channel,
    CopyState,
    DeviceBlock,
    Happening,
    Job,
    JobId,
    JobKind,
    JobResult,
    Outcome,
    Pinned,
    Slot,
    Traffic,
)

log = logging.getLogger("forebay.stage")

DISPROVED = {Outcome.MISSING: Reason.MISSING, Outcome.CORRUPT: Reason.CORRUPT}
"""Outcomes of a read after which the tier is known not to hold the block."""


@dataclass(frozen=True, slots=True)
class Policies:
    eviction: Mapping[str, EvictionPolicy]
    """One for `HOST` and one for each tier."""
    admission: AdmissionPolicy
    ours: Mapping[str, EvictionPolicy] = field(default_factory=dict)
    """A second one for each tier with a quota, of the same kind."""


@dataclass(frozen=True, slots=True)
class _Spare:
    job: Job
    slots: dict[BlockKey, Slot]
    """Those that belong to no copy yet."""


class Stage:
    def __init__(
        self,
        pool: HostPool,
        tiers: Mapping[str, Tier],
        policies: Policies,
        device: DevicePort,
        executor: Executor,
        emit: EventSink,
        reserve_share: float,
        flow: FlowOptions,
        pin_share: float = 0.0,
    ) -> None:
        assert set(policies.eviction) == {HOST, *tiers}, "one eviction policy for the host pool and for each tier"
        self.pool, self.tiers, self.policies, self.emit = pool, dict(tiers), policies, emit
        self.specs = {name: tier.spec for name, tier in tiers.items()}
        self._routed = {name: tier for name, tier in tiers.items() if isinstance(tier, Routed)}
        self._watched = {name: tier for name, tier in tiers.items() if isinstance(tier, Watched)}
        self._scrubbing = {name: tier for name, tier in tiers.items() if isinstance(tier, Scrubbing)}
        self._told_to_wait: set[str] = set()
        """Tiers that know that loads wait for them."""
        self._scrubbed_bytes = Counter[str]()
        self.order = by_speed(self.specs.values())
        """Tiers from fast to slow."""
        self.index = BlockIndex((HOST, *tiers))
        self._quotas = {
            name: by_tenant(policies.eviction[name], policies.ours[name], partial(self._is_foreign, name))
            for name in self.order
            if self.specs[name].quota_bytes is not None
        }
        self.eviction: Mapping[str, EvictionPolicy] = {**policies.eviction, **self._quotas}
        self._reserved_slots = max(1, int(pool.slots * reserve_share))
        pinnable = {HOST: int((pool.slots - 2 * self._reserved_slots) * pin_share)}
        pinnable |= {
            name: int(self.specs[name].capacity_bytes * pin_share) // self.specs[name].stored_bytes
            for name in self.order
        }
        self.pins = Pins(pinnable)
        self.flow = Flow(flow, pool.block_bytes)
        self.jobs: dict[JobId, Job] = {}
        """In flight, and somebody waits for them."""
        self._stranded: dict[JobId, list[Slot]] = {}
        """Jobs in flight that nobody waits for any more, with the slots that they may still write to."""
        self._spares: dict[JobId, _Spare] = {}
        """Second reads of blocks that another read is to bring."""
        self._outgrown: dict[JobId, list[Slot]] = {}
        """Reads of which a second read brought some blocks first, with the slots that they may still write to."""
        self._device, self._executor = device, executor
        self._last_job_id = 0
        self._device_jobs = 0
        for name, tier in tiers.items():
            self._take_stock(name, tier)

    def _take_stock(self, name: str, tier: Tier) -> None:
        """Learn what the tier holds already."""
        if name in self._watched:
            self._watched[name].changes()  # from here on, so that nothing is missed between this and the inventory
        found: list[BlockKey] = []
        if isinstance(tier, Catalogued):
            for run in tier.inventory():
                if name in self._quotas and not run.is_ours:
                    self.index.mark_foreign(run.keys, name)
                self.index.adopt_many(run.keys, name, run.stored_bytes)
                found.extend(run.keys)
        else:
            for stored in tier.scan():
                self.index.adopt(stored.key, name, stored.stored_bytes)
                found.append(stored.key)
        self.eviction[name].inserted(found[::-1])  # the oldest last: it ranks coldest

    def apply_changes(self) -> None:
        """Others add and remove blocks. One that is on its way from here will tell by its own job."""
        for tier, watched in self._watched.items():
            for change in watched.changes():
                if change.kind is ChangeKind.REMOVED and self.index.is_ready(change.key, tier):
                    self.withdraw(change.key, tier, Reason.REMOVED)
                elif change.kind is ChangeKind.ADDED and self.index.get(change.key, tier) is None:
                    self._adopt(change, tier)
        self._tell_scrubs()

    def _adopt(self, change: Change, tier: str) -> None:
        if tier in self._quotas and not change.is_ours:
            self.index.mark_foreign((change.key,), tier)
        self.index.adopt(change.key, tier, change.stored_bytes)
        self.eviction[tier].inserted((change.key,))

    def _is_foreign(self, tier: str, key: BlockKey) -> bool:
        return self.index.is_foreign(key, tier)

    def now_ns(self) -> int:
        return self._executor.now_ns()

    @property
    def usable_slots(self) -> int:
        """Slots that loads may hold at a time, and stores too: each always leaves some to the other."""
        return self.pool.slots - self._reserved_slots - self.pins.blocks(HOST)

    # --- the tiers' own reading

    def _tell_scrubs(self) -> None:
        for name, tier in self._scrubbing.items():
            waits = self.flow.demand_waits(name)
            if waits != (name in self._told_to_wait):
                tier.stand_aside(waits)
                (self._told_to_wait.add if waits else self._told_to_wait.discard)(name)

    def limit_scrub(self, tier: str, bytes_per_s: float | None) -> None:
        """Raises ConfigError for a tier that does not scrub, and unless the rate is positive."""
        if bytes_per_s is not None and not (math.isfinite(bytes_per_s) and bytes_per_s > 0):
            raise ConfigError(f"a rate limit must be above 0 bytes a second, not {bytes_per_s}")
        if tier not in self._scrubbing or not self._scrubbing[tier].scrub_bytes_per_s():
            raise ConfigError(f"tier {tier!r} does not scrub")
        self._scrubbing[tier].limit_scrub(bytes_per_s)

    def scrubs(self) -> Iterator[TrafficView]:
        """How the scrubs stand, since the last call."""
        for name, tier in self._scrubbing.items():
            if bytes_per_s := tier.scrub_bytes_per_s():
                moved = tier.scrubbed_bytes() - self._scrubbed_bytes[name]
                self._scrubbed_bytes[name] += moved
                yield TrafficView(name, Traffic.SCRUB, 0, 0, moved, bytes_per_s, None)

    # --- what policies learn

    def looked_up(self, prompt: Sequence[BlockKey], held: Sequence[BlockKey]) -> None:
        """A prompt was looked up, and these leading blocks of it are held somewhere: a use of them in every place.

        Also where they are not read from: what is served from the pool for a while must not grow cold in the tiers.
        """
        self.policies.admission.requested(prompt)
        for policy in self.eviction.values():
            if isinstance(policy, SeesLookups):
                policy.requested(prompt)
            elif held:
                policy.accessed(held)

    # --- slots and copies

    def take_slot(self) -> Slot | None:
        """A free host slot, if need be that of the most dispensable copy in the pool."""
        if not self.pool.free_slots:
            victim = self.victim(HOST)
            if victim is not None:
                self.forget(victim, HOST, Reason.EVICTED)
        return self.pool.take()

    def victim(self, place: str, whose: Whose = Whose.ANYBODYS) -> BlockKey | None:
        """The most dispensable copy of a place, by its policy. A policy that proposes anything else is not followed."""
        pinned: list[BlockKey] = []

        def evictable(key: BlockKey) -> bool:
            if self.pins.holds(key, place):
                pinned.append(key)
                return False
            return self.index.is_evictable(key, place)

        rank = self.eviction[place].victims if whose is Whose.ANYBODYS else self._quotas[place].own_victims
        proposed = rank(1, evictable)
        if pinned:  # out of the policy until they are unpinned: else it would pass over them for every victim
            self.eviction[place].removed(pinned)
            self.pins.set_aside(pinned, place)
        if not proposed:
            return None
        if not self.index.is_evictable(proposed[0], place) or self.pins.holds(proposed[0], place):
            log.error("%s: the eviction policy proposed a block that cannot go", place)
            return None
        return proposed[0]

    def pin(self, keys: Sequence[BlockKey]) -> Pinned:
        answer = self.pins.pin(keys)
        if answer.refused_blocks:
            log.warning(
                "%d of %d blocks are not pinned: no place may set aside more room", answer.refused_blocks, len(keys)
            )
            self.emit(Refused(self.now_ns(), HOST, answer.refused_blocks, Reason.PINS_FULL))
        return answer

    def unpin(self, keys: Sequence[BlockKey]) -> None:
        for place, key in self.pins.unpin(keys):
            if self.index.is_ready(key, place):  # what is on its way will be inserted when it has arrived
                self.eviction[place].inserted((key,))

    def reserve_host(self, key: BlockKey, slot: Slot) -> None:
        self.index.reserve(key, HOST, self.pool.slot_bytes, slot)

    def abandon_host(self, key: BlockKey, still_written_by: JobId | None) -> None:
        """A fill of the host pool failed: its slot is free again, unless a stranded read may still write to it."""
        slot = self.index.abandon(key, HOST).slot
        assert slot is not None
        if still_written_by is None:
            self.pool.give(slot)
        else:
            self._stranded[still_written_by].append(slot)

    def forget(self, key: BlockKey, place: str, reason: Reason) -> None:
        self.eviction[place].removed((key,))
        slot = self.index.forget(key, place).slot
        if slot is not None:
            self.pool.give(slot)
        self.emit(Dropped(self.now_ns(), place, 1, reason))

    def withdraw(self, key: BlockKey, tier: str, reason: Reason) -> None:
        """A tier turned out not to hold a block: nobody will look for it there again."""
        self.eviction[tier].removed((key,))
        self.index.withdraw(key, tier)
        self.emit(Dropped(self.now_ns(), tier, 1, reason))

    # --- jobs

    def route(self, tier: str, key: BlockKey) -> int:
        """Which of the tier's places a read of this block goes to; 0 for a tier that is one place."""
        routed = self._routed.get(tier)
        return routed.route(key) if routed is not None else 0

    def happened(self) -> Mapping[Happening, int]:
        """What has happened to the places of the tiers, how often."""
        counted: dict[Happening, int] = {}
        for tier in self.tiers.values():
            if isinstance(tier, Observed):
                counted.update(tier.happened())
        return counted

    def read(self, channel: Channel, keys: Sequence[BlockKey], traffic: Traffic) -> Job:
        """The keys' host copies are FILLING, and their `route` is the channel's."""
        tier = channel.tier
        job = replace(self._new_job(JobKind.READ, tier, keys), route=channel.route, traffic=traffic)
        self.flow.sent(job, self.now_ns())
        self._tell_scrubs()
        views = [self.pool.view(slot) for slot in job.slots]
        return self._submit(job, partial(_by_key, self.tiers[tier].read, job.keys, views))

    def strand(self, job: Job) -> None:
        """Stop waiting for a job. The slots of the host copies that are abandoned for it come back when it ends."""
        self._forget_job(job)
        self._stranded[job.job_id] = []
        if job.tier != HOST:
            self._executor.give_up(job)
        self.emit(Overdue(self.now_ns(), job))

    def spare_read(self, channel: Channel, keys: Sequence[BlockKey], slots: Sequence[Slot]) -> Job:
        """Read blocks whose host copies are FILLING by another read, into slots of their own. Nobody waits for it."""
        job = self._new_job(JobKind.READ, channel.tier, keys)
        job = replace(job, route=channel.route, slots=tuple(slots))
        self._spares[job.job_id] = _Spare(job, dict(zip(keys, slots, strict=True)))
        self.flow.sent(job, self.now_ns())
        views = [self.pool.view(slot) for slot in slots]
        work = partial(_by_key, self.tiers[channel.tier].read, job.keys, views)
        self._executor.submit(job, partial(_attempt, job, work))
        return job

    def strand_spare(self, job_id: JobId) -> Job:
        """A second read is late: its slots come back when it ends."""
        spare = self._spares.pop(job_id)
        self._stranded[job_id] = list(spare.slots.values())
        self._executor.give_up(spare.job)
        self.emit(Overdue(self.now_ns(), spare.job))
        return spare.job

    def is_filled_by(self, key: BlockKey, job_id: JobId) -> bool:
        """Whether the block's host copy is FILLING into the slot that this job reads to."""
        copy, job = self.index.get(key, HOST), self.jobs[job_id]
        return copy is not None and copy.state is CopyState.FILLING and copy.slot == job.slots[job.keys.index(key)]

    def swap_slot(self, key: BlockKey, spare: JobId, original: JobId) -> None:
        """The spare read has brought the block: its slot is the host copy's now, and the old one comes back later."""
        old = self.index.move(key, HOST, self._spares[spare].slots.pop(key))
        self._outgrown.setdefault(original, []).append(old)

    def end_spare(self, result: JobResult) -> None:
        """What nobody took of a spare read is thrown away, but not what it found out."""
        for slot in self._spares.pop(result.job.job_id).slots.values():
            self.pool.give(slot)
        self._believe(result)

    @property
    def stranded_slots(self) -> int:
        """Slots that belong to no copy, since a read may still write to them."""
        spare = (spare.slots for spare in self._spares.values())
        return sum(map(len, (*self._stranded.values(), *spare, *self._outgrown.values())))

    def reading(self) -> Counter[Channel]:
        """Blocks of the reads that somebody waits for, and of second reads: what holds credits."""
        blocks = Counter[Channel]()
        for job in (*self.jobs.values(), *(spare.job for spare in self._spares.values())):
            if job.kind is JobKind.READ:
                blocks[job.channel] += len(job.keys)
        return blocks

    def write(self, tier: str, keys: Sequence[BlockKey], evicts: Sequence[BlockKey]) -> Job:
        job = replace(self._new_job(JobKind.WRITE, tier, keys, tuple(evicts)), traffic=Traffic.WRITE)
        self.flow.sent(job, self.now_ns())
        views = [self.pool.view(slot) for slot in job.slots]
        return self._submit(job, partial(_replace, self.tiers[tier], job, views))

    def probe(self, tier: str, keys: Sequence[BlockKey]) -> Job:
        job = self._new_job(JobKind.PROBE, tier, keys)
        return self._submit(job, partial(_probe, self.tiers[tier], job.keys))

    def copy(self, kind: JobKind, keys: Sequence[BlockKey], blocks: Sequence[DeviceBlock]) -> Job:
        """Start a COPY_IN or COPY_OUT between the host copies of `keys` and these device blocks."""
        job = self._new_job(kind, HOST, keys)
        self.jobs[job.job_id] = job
        self._device_jobs += 1
        self._device.submit(job, tuple(blocks))
        return job

    def ended_jobs(self) -> Iterable[JobResult]:
        for result in (*self._executor.poll(), *self._device.poll()):
            job_id = result.job.job_id
            if result.job.kind in (JobKind.READ, JobKind.WRITE):
                self.flow.ended(result, self.now_ns())
            for slot in self._outgrown.pop(job_id, ()):
                self.pool.give(slot)
            if job_id in self._stranded:
                self._end_stranded(result)
                if result.job.kind is not JobKind.WRITE:  # of which the stores still hold what it uses
                    continue
            self._forget_job(result.job)
            self._note(result)
            yield result

    def _forget_job(self, job: Job) -> None:
        """Spare reads and stranded writes are not among the jobs."""
        if self.jobs.pop(job.job_id, None) is not None and job.tier == HOST:
            self._device_jobs -= 1

    def _note(self, result: JobResult) -> None:
        counts = Counter(result.outcomes[key] for key in result.job.keys)
        outcomes = tuple(sorted(counts.items(), key=lambda item: item[0].value))
        self.emit(JobEnded(result.finished_ns, result.job, result.started_ns, outcomes))

    def _end_stranded(self, result: JobResult) -> None:
        """What it brought is thrown away, but not what it found out."""
        for slot in self._stranded.pop(result.job.job_id):
            self.pool.give(slot)
        if result.job.kind in (JobKind.READ, JobKind.PROBE):
            self._believe(result)

    def _believe(self, result: JobResult) -> None:
        """Nobody waited for this read; that a block is gone or damaged is a fact all the same."""
        for key, outcome in result.outcomes.items():
            if outcome in DISPROVED and self.index.is_ready(key, result.job.tier):
                self.withdraw(key, result.job.tier, DISPROVED[outcome])

    def wait(self, until_ns: int) -> None:
        """Block until a job may have ended, or the clock reaches `until_ns`."""
        if self._device_jobs:  # only the device knows when; look again soon
            until_ns = min(until_ns, self.now_ns() + 100_000)
        self._executor.wait(until_ns)

    def close(self) -> None:
        self._executor.close()
        for tier in self.tiers.values():
            tier.close()

    def _new_job(self, kind: JobKind, tier: str, keys: Sequence[BlockKey], evicts: tuple[BlockKey, ...] = ()) -> Job:
        self._last_job_id += 1
        slots = () if kind is JobKind.PROBE else tuple(self._slot_of(key) for key in keys)
        moved_bytes = len(slots) * self.pool.block_bytes
        return Job(JobId(self._last_job_id), kind, tier, tuple(keys), slots, moved_bytes, evicts=evicts)

    def _submit(self, job: Job, work: Work) -> Job:
        self.jobs[job.job_id] = job
        self._executor.submit(job, partial(_attempt, job, work))
        return job

    def _slot_of(self, key: BlockKey) -> Slot:
        copy = self.index.get(key, HOST)
        assert copy is not None
        assert copy.slot is not None
        return copy.slot


# --- on worker threads: a tier's call by key, and its failure as a value


def _attempt(job: Job, work: Work) -> Mapping[BlockKey, Outcome]:
    """An `Outcome` for every key of the job, whatever the tier does."""
    keys = (*job.keys, *job.evicts)
    try:
        outcomes = work()
    except (TierUnavailable, OSError) as error:
        log.warning("%s: a %s of %d blocks failed: %s", job.tier, job.kind.value, len(job.keys), error)
        return dict.fromkeys(keys, Outcome.FAILED)
    if not all(isinstance(outcome, Outcome) for outcome in outcomes.values()):
        log.error("%s: a %s ended in something that is no Outcome: counted as failed", job.tier, job.kind.value)
        return dict.fromkeys(keys, Outcome.FAILED)
    return outcomes


def _by_key(
    call: Callable[[Sequence[BlockKey], Sequence[memoryview]], Sequence[Outcome]],
    keys: Sequence[BlockKey],
    views: Sequence[memoryview],
) -> dict[BlockKey, Outcome]:
    return dict(zip(keys, call(keys, views), strict=True))


def _replace(tier: Tier, job: Job, views: Sequence[memoryview]) -> dict[BlockKey, Outcome]:
    """Delete, then write into the room that this made; without the room nothing is written."""
    gone = dict(zip(job.evicts, tier.delete(job.evicts), strict=True)) if job.evicts else {}
    if any(outcome is not Outcome.OK for outcome in gone.values()):
        return {**dict.fromkeys(job.keys, Outcome.FAILED), **gone}
    try:
        return {**_by_key(tier.write, job.keys, views), **gone}
    except (TierUnavailable, OSError) as error:  # what was deleted stays deleted
        log.warning("%s: a write of %d blocks failed: %s", job.tier, len(job.keys), error)
        return {**dict.fromkeys(job.keys, Outcome.FAILED), **gone}


def _probe(tier: Tier, keys: Sequence[BlockKey]) -> dict[BlockKey, Outcome]:
    held = tier.contains(keys)
    return {key: Outcome.OK if found else Outcome.MISSING for key, found in zip(keys, held, strict=True)}
