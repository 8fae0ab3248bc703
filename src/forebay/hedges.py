"""Hedged reads: a block whose read takes much longer than it should is asked for again, of another tier that has it.

Whichever read brings the block first fills it; the other one's bytes are thrown away. Source of the idea: Dean and
Barroso, "The tail at scale", Communications of the ACM 56(2), 2013. The second reads are paid from a budget, a share of
all that is read, so that a tier that is slow throughout does not double the load of the one behind it, and no further
than a moment's worth of it is saved up. They take credits as all reads do, and have the same deadline.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container
from dataclasses import dataclass

from forebay.due import Due
from forebay.stage import Stage
from forebay.types import BlockKey, Channel, Job, JobId, JobResult, Outcome, Slot, Traffic

_LATE_BY = 3
"""A read is hedged when it takes this many times what all that is in flight with it should take."""

_MOST_BUDGET_BLOCKS = 64
"""However much was read without a second read, no more are paid for at once."""


@dataclass(frozen=True, slots=True)
class Won:
    """A second read was first: the block is in the host copy's new slot, and `original` is not waited for."""

    key: BlockKey
    original: JobId


class Hedges:
    def __init__(
        self, stage: Stage, share: float, patience_ns: int, deadline_ns: int, running: Container[JobId]
    ) -> None:
        """`share`: of the bytes read, how many may be read a second time. `patience_ns`: no read is hedged sooner.

        `deadline_ns`: no second read is late sooner. `running`: the first reads that are waited for.
        """
        self._stage, self._share, self._patience_ns, self._deadline_ns = stage, share, patience_ns, deadline_ns
        self._running = running
        self._budget_bytes, self._most_budget_bytes = 0.0, _MOST_BUDGET_BLOCKS * stage.pool.block_bytes
        self._watched = Due(running)
        """The first reads, by when they are slow."""
        self._hedged: dict[JobId, JobId] = {}
        """Second reads in flight, and which read each of them hedges."""
        self._due = Due(self._hedged)
        """The second reads, by when they are late."""
        self._pins: Counter[tuple[BlockKey, str]] = Counter()

    def __contains__(self, job_id: JobId) -> bool:
        return job_id in self._hedged

    def pins(self) -> Counter[tuple[BlockKey, str]]:
        """Every pin that second reads hold, to be checked against the index."""
        return self._pins.copy()

    def watch(self, job: Job, now_ns: int) -> None:
        """A read has been sent; its keys' host copies are FILLING."""
        if self._share <= 0 or len(self._stage.order) < 2:
            return
        self._budget_bytes = min(self._most_budget_bytes, self._budget_bytes + job.moved_bytes * self._share)
        expected_ns = self._stage.flow.flight_ns(job.channel)
        if expected_ns:
            self._watched.add(now_ns + max(self._patience_ns, _LATE_BY * expected_ns), job.job_id)

    def next_ns(self) -> int | None:
        """When a first read is slow or a second one late, if nothing ends before."""
        times = (self._watched.next_ns(), self._due.next_ns())
        return min((at_ns for at_ns in times if at_ns is not None), default=None)

    def start(self, now_ns: int) -> None:
        """Ask again for the blocks of every read that is slow by now, as far as others have them and credits go."""
        for job_id in self._watched.take(now_ns):
            self._hedge(self._stage.jobs[job_id], now_ns)

    def give_up_late(self, now_ns: int) -> None:
        """Second reads that are late are stranded as first ones are; what they were to bring comes from elsewhere."""
        for job_id in self._due.take(now_ns):
            job = self._stage.strand_spare(job_id)
            self._stage.flow.late(job, now_ns)
            del self._hedged[job_id]
            self._unpin(job)

    def _hedge(self, slow: Job, now_ns: int) -> None:
        stage, by_channel = self._stage, defaultdict[Channel, list[BlockKey]](list)
        for key in slow.keys:
            if (channel := self._elsewhere(key, slow.tier, now_ns)) is not None:
                by_channel[channel].append(key)
        for channel, keys in by_channel.items():
            affordable = int(self._budget_bytes // stage.pool.block_bytes)
            chosen = keys[: min(affordable, stage.flow.grant(channel, Traffic.DEMAND, now_ns).blocks)]
            slots = self._take_slots(len(chosen))
            if not slots:
                continue
            chosen = chosen[: len(slots)]
            self._budget_bytes -= len(chosen) * stage.pool.block_bytes
            for key in chosen:
                stage.index.pin(key, channel.tier)
                self._pins[key, channel.tier] += 1
            job = stage.spare_read(channel, chosen, slots)
            self._hedged[job.job_id] = slow.job_id
            self._due.add(stage.flow.due_ns(channel, self._deadline_ns, now_ns), job.job_id)

    def _elsewhere(self, key: BlockKey, slow_tier: str, now_ns: int) -> Channel | None:
        """Another tier that can give the block now."""
        stage = self._stage
        for tier in stage.order:
            if tier != slow_tier and stage.index.is_ready(key, tier):
                channel = Channel(tier, stage.route(tier, key))
                if stage.flow.is_open(channel, now_ns):
                    return channel
        return None

    def _take_slots(self, count: int) -> list[Slot]:
        """As many as can be had, up to so many."""
        slots: list[Slot] = []
        while len(slots) < count and (slot := self._stage.take_slot()) is not None:
            slots.append(slot)
        return slots

    def _unpin(self, job: Job) -> None:
        for key in job.keys:
            self._stage.index.unpin(key, job.tier)
        self._pins.subtract((key, job.tier) for key in job.keys)
        self._pins = +self._pins

    def on_read(self, result: JobResult) -> list[Won]:
        """Apply a second read; returns the blocks that it brought first, now in their host copies."""
        job, stage = result.job, self._stage
        original = self._hedged.pop(job.job_id)
        won: list[Won] = []
        self._unpin(job)
        for key in job.keys:
            is_wanted = original in self._running and stage.is_filled_by(key, original)
            if is_wanted and result.outcomes[key] is Outcome.OK:
                stage.swap_slot(key, job.job_id, original)
                won.append(Won(key, original))
        stage.end_spare(result)
        return won
