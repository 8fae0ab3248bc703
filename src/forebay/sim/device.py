"""How long a storage device takes under virtual time, by a model small enough to reason about.

```
blocks submitted --> at most `queue_depth` in the device --> one pipe of so many bytes a second --> + latency --> ended
```
First come, first served. With k blocks of B bytes kept in flight, throughput follows from Little's law:

    min(bytes_per_s, k * B / (latency + B / bytes_per_s)),  k at most queue_depth

so few blocks in flight do not saturate a device, and what waits in it can no longer be reordered.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from forebay.types import Job, JobKind


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceModel:
    """What distinguishes one device from another."""

    read_bytes_per_s: float
    write_bytes_per_s: float
    """Reads and writes share the device: each byte takes the pipe for its own time."""
    latency_ns: int
    """What a block takes beside its bytes, however idle the device is. Latencies of different blocks overlap."""
    queue_depth: int = 256
    """Blocks that the device, or whoever drives it, works on at a time. The rest waits before it."""


@dataclass(frozen=True, slots=True)
class Span:
    """When a job was taken up, and when it ended."""

    started_ns: int
    ended_ns: int


class Device:
    """The state of one device. Deterministic: the same calls give the same times."""

    def __init__(self, model: DeviceModel) -> None:
        self._model = model
        self._free_ns = 0.0
        """When the pipe has nothing more to move."""
        self._ends_ns: deque[float] = deque()
        """Of the latest `queue_depth` blocks, in order."""

    def serve(self, job: Job, now_ns: int) -> Span:
        """Take a job in. Its blocks go one after the other; it ends with the last of them.

        Time must not run backwards from call to call. A PROBE, and what a WRITE deletes, costs one latency in all.
        """
        model = self._model
        if job.kind is JobKind.PROBE or not job.keys:
            return Span(now_ns, now_ns + model.latency_ns)
        rate = model.write_bytes_per_s if job.kind is JobKind.WRITE else model.read_bytes_per_s
        block_ns = job.moved_bytes / len(job.keys) / rate * 1e9
        start_ns = float(now_ns) + (model.latency_ns if job.evicts else 0)
        started_ns: float | None = None
        for _ in job.keys:
            begins_ns = start_ns
            if len(self._ends_ns) == model.queue_depth:
                begins_ns = max(begins_ns, self._ends_ns.popleft())
            started_ns = begins_ns if started_ns is None else started_ns
            self._free_ns = max(self._free_ns, begins_ns) + block_ns
            self._ends_ns.append(self._free_ns + model.latency_ns)
        assert started_ns is not None
        return Span(round(started_ns), math.ceil(self._ends_ns[-1]))
