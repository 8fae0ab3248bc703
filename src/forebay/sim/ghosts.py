"""Tiers and device memory without bytes: where only times and contents matter, not what blocks hold."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from forebay.ports import View
from forebay.types import BlockKey, DeviceBlock, Job, JobResult, Outcome, Stored, TierSpec

BLOCK_BYTES = 64
"""What stands for a block of any length; a device's bandwidth is scaled alike."""


class GhostTier:
    """A tier that knows which blocks it holds. Every read of one succeeds, and fills nothing."""

    def __init__(self, name: str, capacity_blocks: int, read_latency_ns: int, held: Iterable[BlockKey] = ()) -> None:
        self._held = dict.fromkeys(held)
        self.spec = TierSpec(
            name=name,
            capacity_bytes=capacity_blocks * BLOCK_BYTES,
            stored_bytes=BLOCK_BYTES,
            read_latency_ns=read_latency_ns,
        )

    def contains(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        return [key in self._held for key in keys]

    def read(self, keys: Sequence[BlockKey], into: Sequence[View]) -> Sequence[Outcome]:
        return [Outcome.OK if key in self._held else Outcome.MISSING for key in keys]

    def write(self, keys: Sequence[BlockKey], views: Sequence[View]) -> Sequence[Outcome]:
        self._held.update(dict.fromkeys(keys))
        return [Outcome.OK] * len(keys)

    def delete(self, keys: Sequence[BlockKey]) -> Sequence[Outcome]:
        for key in keys:
            self._held.pop(key, None)
        return [Outcome.OK] * len(keys)

    def scan(self) -> Iterator[Stored]:
        return iter([Stored(key, BLOCK_BYTES) for key in self._held])

    def close(self) -> None:
        """Nothing to release."""


class GhostMemory:
    """Device memory. Copies to it run beside the reads: in no time, or one after the other at a rate."""

    def __init__(self, now_ns: Callable[[], int], block_ns: int = 0) -> None:
        """`block_ns`: what copying a block takes."""
        self._now_ns, self._block_ns = now_ns, block_ns
        self._free_ns = 0
        """When the last copy will have ended."""
        self._running: deque[JobResult] = deque()

    def submit(self, job: Job, blocks: Sequence[DeviceBlock]) -> None:
        started_ns = max(self._free_ns, self._now_ns())
        self._free_ns = started_ns + len(job.keys) * self._block_ns
        self._running.append(JobResult(job, dict.fromkeys(job.keys, Outcome.OK), started_ns, self._free_ns))

    def poll(self) -> Sequence[JobResult]:
        ended = []
        while self._running and self._running[0].finished_ns <= self._now_ns():
            ended.append(self._running.popleft())
        return ended


class AdmitNothing:
    """An `AdmissionPolicy` under which what is stored stays where it is: nothing is copied from tier to tier."""

    def requested(self, keys: Sequence[BlockKey]) -> None: ...

    def admit(self, key: BlockKey, tier: TierSpec, used_bytes: int) -> bool:
        return False
