"""Stores: finished blocks on their way from the device, through host slots, to the tiers that admit them.

Writes wait in a queue for each tier until flow lets them go, after the demand of readers. The queues are bounded by the
host slots that stores may hold; past that an offer is refused, and costs a later hit.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from forebay.due import Due
from forebay.events import Dropped, Reason, Refused
from forebay.ports import Metered
from forebay.stage import Stage
from forebay.tenancy import Whose
from forebay.types import HOST, BlockKey, DeviceBlock, Job, JobId, JobKind, JobResult, Outcome

log = logging.getLogger("forebay.stores")


@dataclass(slots=True)
class _Limit:
    """What a tier may hold now: its capacity, or less for a while after its medium was full."""

    capacity_bytes: int
    held_bytes: int
    until_ns: int = 0


_MOST_JOBS = 2
"""WRITE jobs in flight on a tier: each is parallel inside, and the second keeps the tier busy while one ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLimits:
    batch_blocks: int
    pool_share: float
    """Of the host slots that stores may use, how many they hold at a time: the bound of the queues."""
    full_backoff_ns: int
    deadline_ns: int | None = None
    """How long a write, a copy out of the device or an answer about a delete may take; None: they are waited for."""


class Stores:
    def __init__(self, stage: Stage, limits: StoreLimits) -> None:
        self._stage, self._index = stage, stage.index
        self._pool_share = limits.pool_share
        self._batch_blocks, self._full_backoff_ns = limits.batch_blocks, limits.full_backoff_ns
        self._deadline_ns = limits.deadline_ns
        self._queues: dict[str, dict[BlockKey, None]] = {name: {} for name in stage.order}
        """Blocks that wait to be written, by tier, first come first; each holds a pin on its host copy."""
        self._jobs: Counter[str] = Counter()
        """WRITE jobs in flight by tier."""
        self._filling: Counter[str] = Counter()
        """Blocks that those jobs write."""
        self._limits = {name: _Limit(spec.capacity_bytes, spec.capacity_bytes) for name, spec in stage.specs.items()}
        self._metered = {name: tier for name, tier in stage.tiers.items() if isinstance(tier, Metered)}
        self._spent: set[str] = set()
        """Tiers whose write budget was found spent, which is said once each time."""
        self._in_transit: Counter[BlockKey] = Counter()
        """Blocks whose slots stores hold, with the number of jobs that use them."""
        self._full: list[tuple[str, BlockKey]] = []
        """Blocks that their tier has just had no room for."""
        self._tried_again: set[tuple[str, BlockKey]] = set()
        """Blocks on their second way to a tier that had no room."""
        self._doubts: set[JobId] = set()
        """PROBE jobs that ask whether a failed delete has landed."""
        self._due, self._copies_due = Due(stage.jobs), Due(stage.jobs)
        """WRITE jobs and doubts, and COPY_OUT jobs."""
        self._late: dict[JobId, Job] = {}
        """WRITE jobs that nobody waits for any more. They may still read their slots and change the tier."""

    @property
    def idle(self) -> bool:
        return not self._in_transit

    def offer(self, keys: Sequence[BlockKey], device_blocks: Sequence[DeviceBlock], again: bool) -> int:
        most = self._write_at_hand(keys)  # first, since the slots taken below may be theirs
        fresh: list[BlockKey] = []
        blocks: list[DeviceBlock] = []
        taken = 0
        for key, block in zip(keys[:most], device_blocks, strict=False):
            if self._index.get(key, HOST) is None:
                slot = self._stage.take_slot() if self._has_slot_for(key) else None
                if slot is None:
                    break
                self._stage.reserve_host(key, slot)
                self._in_transit[key] += 1
                fresh.append(key)
                blocks.append(block)
            taken += 1
        if not again:
            self.give_up(len(keys) - taken)
        if fresh:
            job = self._stage.copy(JobKind.COPY_OUT, fresh, blocks)
            if self._deadline_ns is not None:
                self._copies_due.add(self._stage.now_ns() + self._deadline_ns, job.job_id)
        return taken

    def give_up(self, blocks: int) -> None:
        """So many blocks found no slot, and are not offered again."""
        if blocks:
            self._refuse(HOST, blocks, Reason.NO_SLOT)

    def _write_at_hand(self, keys: Sequence[BlockKey]) -> int:
        """Queue those that are in the host pool already; returns how many leading keys may be taken."""
        for position, key in enumerate(keys):
            if not self._index.is_ready(key, HOST) or not self._is_lacking(key):
                continue
            if not self._has_slot_for(key):
                return position
            self.write_through((key,))
        return len(keys)

    def _is_lacking(self, key: BlockKey) -> bool:
        """Whether some tier neither holds the block nor is about to."""
        now_ns = self._stage.now_ns()
        return any(
            key not in queue and self._index.get(key, tier) is None and self._stage.flow.takes_writes(tier, now_ns)
            for tier, queue in self._queues.items()
        )

    def on_copied_out(self, result: JobResult, arrived: Sequence[BlockKey]) -> None:
        self.write_through(arrived)
        for key in result.job.keys:
            self._let_go(key)

    def write_through(self, keys: Sequence[BlockKey]) -> None:
        for tier in self._stage.order:
            self.write(tier, keys)

    def promote(self, keys: Sequence[BlockKey], source: str) -> None:
        """Write blocks that were read from a tier to the faster ones."""
        for tier in self._stage.order[: self._stage.order.index(source)]:
            self.write(tier, keys)

    def write(self, tier: str, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Queue blocks that are READY in the host pool for a tier that lacks them; returns those that were taken."""
        taken: list[BlockKey] = []
        spec, queue, budget_blocks = self._stage.specs[tier], self._queues[tier], self._budget_blocks(tier)
        takes_writes = self._stage.flow.takes_writes(tier, self._stage.now_ns())
        for key in keys:
            if key in queue or self._index.get(key, tier) is not None:
                continue
            if not takes_writes:
                self._refuse(tier, 1, Reason.HUNG)
            elif not self._has_slot_for(key):
                self._refuse(tier, 1, Reason.QUEUE_FULL)
            elif not self._stage.policies.admission.admit(key, spec, self._index.used_bytes(tier)):
                self._refuse(tier, 1, Reason.NOT_ADMITTED)
            elif budget_blocks is not None and len(taken) >= budget_blocks:
                self._refuse_over_budget(tier)
            elif (len(queue) + self._filling[tier] + 1) * spec.stored_bytes > self._limit_bytes(tier):
                self._refuse(tier, 1, Reason.NO_ROOM)  # it could only evict what is written together with it
            else:
                self._index.pin(key, HOST)
                self._in_transit[key] += 1
                queue[key] = None
                taken.append(key)
        return taken

    def _budget_blocks(self, tier: str) -> int | None:
        """Further blocks that the tier's write budget allows, after those on their way; None without a budget."""
        metered = self._metered.get(tier)
        budget_bytes = metered.write_budget_bytes() if metered is not None else None
        if budget_bytes is None:
            return None
        on_their_way = len(self._queues[tier]) + self._filling[tier]
        blocks = budget_bytes // self._stage.specs[tier].stored_bytes - on_their_way
        if blocks > 0:
            self._spent.discard(tier)
        return max(0, blocks)

    def _refuse_over_budget(self, tier: str) -> None:
        if tier not in self._spent:
            self._spent.add(tier)
            log.warning("%s: the write budget is spent: blocks go to the host pool alone until it has grown", tier)
        self._refuse(tier, 1, Reason.OVER_BUDGET)

    def _on_full(self) -> None:
        """Blocks found no room: try each once more, with as much evicted.

        Called when the changes that others made have been applied: if these explain it, the limits stand as they are.
        """
        full, self._full = self._full, []
        for tier in {tier for tier, _ in full}:
            spec = self._stage.specs[tier]
            fits = self._index.used_bytes(tier) + spec.stored_bytes <= spec.capacity_bytes
            if fits and self._over_quota_bytes(tier) <= 0:
                self._lower_limit(tier)
        for tier, key in full:
            if (tier, key) in self._tried_again:
                self._tried_again.remove((tier, key))
            elif self._index.is_ready(key, HOST):
                self._tried_again.add((tier, key))
                if not self.write(tier, (key,)):
                    self._tried_again.remove((tier, key))

    def advance(self) -> list[BlockKey]:
        """Start the writes that flow lets go; returns the blocks that will not be written after all."""
        self._on_full()
        given_up = self._give_up_late()
        for tier, queue in self._queues.items():
            while queue and self._jobs[tier] < _MOST_JOBS and self._stage.flow.may_write(tier, self._stage.now_ns()):
                given_up += self._start_job(tier, queue)
        return given_up

    def next_ns(self) -> int | None:
        """When something is late, if nothing ends before."""
        times = (self._due.next_ns(), self._copies_due.next_ns())
        return min((at_ns for at_ns in times if at_ns is not None), default=None)

    def give_up_copies(self) -> list[Job]:
        """The COPY_OUT jobs that are late. Their host copies are still FILLING."""
        late = [self._stage.jobs[job_id] for job_id in self._copies_due.take(self._stage.now_ns())]
        for job in late:
            self._stage.strand(job)
            for key in job.keys:
                self._let_go(key)
        return late

    def _give_up_late(self) -> list[BlockKey]:
        """Wait no longer for what is late, nor write to its tier for now; returns the blocks that waited for that.

        What a late write works on stays as it is until it has ended: the slots that it reads, its copies in the tier.
        """
        given_up: list[BlockKey] = []
        now_ns = self._stage.now_ns()
        for job_id in self._due.take(now_ns):
            job = self._stage.jobs[job_id]
            self._stage.strand(job)
            if job_id in self._doubts:
                self._settle_doubts(job, {})
                continue
            self._stage.flow.late(job, now_ns)
            self._late[job_id] = job
            self._jobs[job.tier] -= 1
            queue = self._queues[job.tier]
            if queue:
                self._refuse(job.tier, len(queue), Reason.HUNG)
            for key in queue:
                self._index.unpin(key, HOST)
            for key in (*job.keys, *queue):
                self._let_go(key)
            given_up.extend(queue)
            queue.clear()
        return given_up

    def _start_job(self, tier: str, queue: dict[BlockKey, None]) -> list[BlockKey]:
        given_up: list[BlockKey] = []
        writes: list[BlockKey] = []
        evicts: list[BlockKey] = []
        most = 1 if self._stage.flow.tries_writes(tier) else self._batch_blocks
        while queue and len(writes) < most:
            key = next(iter(queue))
            del queue[key]
            is_there = self._index.get(key, tier) is not None  # by a probe, since it was queued
            victims = None if is_there else self._make_room(tier)
            if victims is None:
                if not is_there:
                    self._refuse(tier, 1, Reason.NO_ROOM)
                self._index.unpin(key, HOST)
                self._let_go(key)
                given_up.append(key)
                continue
            self._index.reserve(key, tier, self._stage.specs[tier].stored_bytes)
            writes.append(key)
            evicts.extend(victims)
        if writes:
            self._jobs[tier] += 1
            self._filling[tier] += len(writes)
            job = self._stage.write(tier, writes, evicts)
            if self._deadline_ns is not None:
                due_ns = self._stage.flow.write_due_ns(tier, self._deadline_ns, self._stage.now_ns())
                self._due.add(due_ns, job.job_id)
        return given_up

    @property
    def most_slots(self) -> int:
        """Host slots that stores may hold now, and so the bound of the queues."""
        return math.ceil(self._stage.usable_slots * self._pool_share)

    @property
    def queued(self) -> bool:
        """Writes wait for flow to let them go."""
        return any(self._queues.values())

    def queued_blocks(self) -> dict[str, int]:
        """Blocks that wait to be written, by tier."""
        return {tier: len(queue) for tier, queue in self._queues.items()}

    def pins(self) -> Counter[tuple[BlockKey, str]]:
        """Every pin that waiting and hung writes hold, to be checked against the index."""
        held = (*self._queues.values(), *(job.keys for job in self._late.values()))
        return Counter((key, HOST) for keys in held for key in keys)

    def hung(self) -> set[tuple[BlockKey, str]]:
        """Copies in the tiers that hung writes may still make or remove."""
        return {(key, job.tier) for job in self._late.values() for key in (*job.keys, *job.evicts)}

    def on_written(self, result: JobResult) -> None:
        tier, eviction = result.job.tier, self._stage.eviction[result.job.tier]
        is_late = self._late.pop(result.job.job_id, None) is not None
        if not is_late:
            self._jobs[tier] -= 1
            for key in result.job.keys:
                self._let_go(key)
        self._filling[tier] -= len(result.job.keys)
        doubtful: list[BlockKey] = []
        for key in result.job.evicts:
            if result.outcomes[key] is Outcome.OK:
                self._index.drop(key, tier)
            else:
                doubtful.append(key)
        if doubtful:  # a failed delete may have landed all the same: they stay DROPPING until the tier has said
            self._ask(tier, doubtful)
        written: list[BlockKey] = []
        for key in result.job.keys:
            self._index.unpin(key, HOST)
            if result.outcomes[key] is Outcome.OK:
                self._index.commit(key, tier)
                written.append(key)
            else:
                self._index.abandon(key, tier)
        eviction.inserted(written)
        if not is_late:
            self._full.extend((tier, key) for key in result.job.keys if result.outcomes[key] is Outcome.FULL)
        self._tried_again.difference_update((tier, key) for key in (result.job.keys if is_late else written))

    def _ask(self, tier: str, doubtful: Sequence[BlockKey]) -> None:
        job = self._stage.probe(tier, doubtful)
        self._doubts.add(job.job_id)
        if self._deadline_ns is not None:
            self._due.add(self._stage.now_ns() + self._deadline_ns, job.job_id)

    def on_probed(self, result: JobResult) -> None:
        """Settle what became of blocks whose delete failed."""
        self._settle_doubts(result.job, result.outcomes)

    def _settle_doubts(self, job: Job, outcomes: Mapping[BlockKey, Outcome]) -> None:
        """Without an answer they count as still there."""
        self._doubts.remove(job.job_id)
        for key in job.keys:
            if outcomes.get(key) is Outcome.MISSING:
                self._index.drop(key, job.tier)
            else:
                self._index.keep(key, job.tier)
                self._stage.eviction[job.tier].inserted((key,))

    def asked(self, job_id: JobId) -> bool:
        """Whether this PROBE is a question of the stores."""
        return job_id in self._doubts

    def _has_slot_for(self, key: BlockKey) -> bool:
        """Whether stores may hold one more slot, or hold this block's already."""
        return key in self._in_transit or len(self._in_transit) < self.most_slots

    def _let_go(self, key: BlockKey) -> None:
        self._in_transit[key] -= 1
        if not self._in_transit[key]:
            del self._in_transit[key]

    def _refuse(self, place: str, blocks: int, reason: Reason) -> None:
        self._stage.emit(Refused(self._stage.now_ns(), place, blocks, reason))

    # --- room in a tier

    def _make_room(self, tier: str) -> list[BlockKey] | None:
        """Blocks, now DROPPING, that have to be deleted before one more fits; None when no room can be made."""
        index, eviction = self._index, self._stage.eviction[tier]
        victims: list[BlockKey] = []
        while (whose := self._whose_must_go(tier)) is not None:
            victim = self._stage.victim(tier, whose)
            if victim is None:
                for key in victims:
                    index.keep(key, tier)
                eviction.inserted(victims)
                return None
            index.begin_drop(victim, tier)
            eviction.removed((victim,))
            victims.append(victim)
        if victims:
            self._stage.emit(Dropped(self._stage.now_ns(), tier, len(victims), Reason.EVICTED))
        return victims

    def _whose_must_go(self, tier: str) -> Whose | None:
        """Whose block has to make room for one more; None when there is room.

        A tenant at its quota pays with its own. So it does where a tier that knows of a quota had no room, and nothing
        says why: it may have been the quota.
        """
        has_quota = self._stage.specs[tier].quota_bytes is not None
        if self._over_quota_bytes(tier) > 0:
            return Whose.OURS
        if self._over_bytes(tier) > 0:
            return Whose.OURS if has_quota and self._limits[tier].until_ns else Whose.ANYBODYS
        return None

    def _over_bytes(self, tier: str) -> int:
        """By how much one more block would exceed what the tier may hold now."""
        return self._index.used_bytes(tier) + self._stage.specs[tier].stored_bytes - self._limit_bytes(tier)

    def _over_quota_bytes(self, tier: str) -> int:
        """By how much one more block would exceed the tenant's quota."""
        spec = self._stage.specs[tier]
        return 0 if spec.quota_bytes is None else self._index.our_bytes(tier) + spec.stored_bytes - spec.quota_bytes

    def _limit_bytes(self, tier: str) -> int:
        limit = self._limits[tier]
        if limit.until_ns and self._stage.now_ns() >= limit.until_ns:
            limit.held_bytes, limit.until_ns = limit.capacity_bytes, 0
        return limit.held_bytes

    def _lower_limit(self, tier: str) -> None:
        """The medium was full before the tier's own limit: for a while, write only by evicting as much."""
        limit = self._limits[tier]
        limit.held_bytes = min(limit.held_bytes, self._index.used_bytes(tier))
        limit.until_ns = self._stage.now_ns() + self._full_backoff_ns
