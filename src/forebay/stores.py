"""Stores: finished blocks on their way from the device, through host slots, to the tiers that admit them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from forebay.events import Dropped, Reason, Refused
from forebay.stage import Stage
from forebay.types import HOST, BlockKey, DeviceBlock, JobId, JobKind, JobResult, Outcome


@dataclass(slots=True)
class _Limit:
    """What a tier may hold now: its capacity, or less for a while after its medium was full."""

    capacity_bytes: int
    held_bytes: int
    until_ns: int = 0


class Stores:
    def __init__(self, stage: Stage, batch_blocks: int, full_backoff_ns: int) -> None:
        self._stage, self._index = stage, stage.index
        self._batch_blocks, self._full_backoff_ns = batch_blocks, full_backoff_ns
        self._limits = {name: _Limit(spec.capacity_bytes, spec.capacity_bytes) for name, spec in stage.specs.items()}
        self._in_transit: Counter[BlockKey] = Counter()
        """Blocks whose slots stores hold, with the number of jobs that use them."""
        self._doubts: set[JobId] = set()
        """PROBE jobs that ask whether a failed delete has landed."""

    @property
    def idle(self) -> bool:
        return not self._in_transit

    def offer(self, keys: Sequence[BlockKey], device_blocks: Sequence[DeviceBlock]) -> int:
        at_hand = [key for key in keys if self._index.is_ready(key, HOST)]
        self.write_through(at_hand)  # first, since the slots taken below may be theirs
        fresh: list[BlockKey] = []
        blocks: list[DeviceBlock] = []
        taken = 0
        for key, block in zip(keys, device_blocks, strict=True):
            if self._index.get(key, HOST) is None:
                slot = self._stage.take_slot() if self._has_slot_for(key) else None
                if slot is None:
                    self._refuse(HOST, len(keys) - taken, Reason.NO_SLOT)
                    break
                self._stage.reserve_host(key, slot)
                self._in_transit[key] += 1
                fresh.append(key)
                blocks.append(block)
            taken += 1
        if fresh:
            self._stage.copy(JobKind.COPY_OUT, fresh, blocks)
        return taken

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

    def write(self, tier: str, keys: Sequence[BlockKey]) -> None:
        """Write blocks that are READY in the host pool to a tier that lacks them, evicting there what must go."""
        spec = self._stage.specs[tier]
        writes: list[BlockKey] = []
        evicts: dict[BlockKey, list[BlockKey]] = {}
        for key in keys:
            if self._index.get(key, tier) is not None:
                continue
            if not self._has_slot_for(key):
                self._refuse(tier, 1, Reason.NO_SLOT)
            elif not self._stage.policies.admission.admit(key, spec, self._index.used_bytes(tier)):
                self._refuse(tier, 1, Reason.NOT_ADMITTED)
            elif (victims := self._make_room(tier)) is None:
                self._refuse(tier, 1, Reason.NO_ROOM)
            else:
                writes.append(key)
                evicts[key] = victims
                self._index.reserve(key, tier, spec.stored_bytes)
                self._index.pin(key, HOST)
                self._in_transit[key] += 1
        for at in range(0, len(writes), self._batch_blocks):
            batch = writes[at : at + self._batch_blocks]
            self._stage.write(tier, batch, [victim for key in batch for victim in evicts[key]])

    def on_written(self, result: JobResult) -> None:
        tier, eviction = result.job.tier, self._stage.eviction[result.job.tier]
        doubtful: list[BlockKey] = []
        for key in result.job.evicts:
            if result.outcomes[key] is Outcome.OK:
                self._index.drop(key, tier)
            else:
                doubtful.append(key)
        if doubtful:  # a failed delete may have landed all the same: they stay DROPPING until the tier has said
            self._doubts.add(self._stage.probe(tier, doubtful).job_id)
        written: list[BlockKey] = []
        for key in result.job.keys:
            self._index.unpin(key, HOST)
            self._let_go(key)
            if result.outcomes[key] is Outcome.OK:
                self._index.commit(key, tier)
                written.append(key)
            else:
                self._index.abandon(key, tier)
        eviction.inserted(written)
        if Outcome.FULL in result.outcomes.values():
            self._lower_limit(tier)

    def on_probed(self, result: JobResult) -> None:
        """Settle what became of blocks whose delete failed. Without an answer they count as still there."""
        tier = result.job.tier
        self._doubts.remove(result.job.job_id)
        for key in result.job.keys:
            if result.outcomes[key] is Outcome.MISSING:
                self._index.drop(key, tier)
            else:
                self._index.keep(key, tier)
                self._stage.eviction[tier].inserted((key,))

    def asked(self, job_id: JobId) -> bool:
        """Whether this PROBE is a question of the stores."""
        return job_id in self._doubts

    def _has_slot_for(self, key: BlockKey) -> bool:
        """Whether stores may hold one more slot, or hold this block's already."""
        return key in self._in_transit or len(self._in_transit) < self._stage.usable_slots

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
        over_bytes = index.used_bytes(tier) + self._stage.specs[tier].stored_bytes - self._limit_bytes(tier)
        victims: list[BlockKey] = []
        while over_bytes > 0:
            victim = self._stage.victim(tier)
            if victim is None:
                for key in victims:
                    index.keep(key, tier)
                eviction.inserted(victims)
                return None
            before_bytes = index.used_bytes(tier)
            index.begin_drop(victim, tier)
            over_bytes -= before_bytes - index.used_bytes(tier)
            eviction.removed((victim,))
            victims.append(victim)
        if victims:
            self._stage.emit(Dropped(self._stage.now_ns(), tier, len(victims), Reason.EVICTED))
        return victims

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
