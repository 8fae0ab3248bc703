"""Copies on GPU streams, and the page-locked host memory they need: what the device ports of connectors share.

ROCm's torch calls itself CUDA too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from forebay.types import BlockKey, DeviceBlock, Job, JobKind, JobResult, Outcome

log = logging.getLogger("forebay.connectors.streams")


@dataclass(frozen=True, slots=True)
class Ended:
    """A job whose copies are through, and the device blocks that they were about."""

    result: JobResult
    blocks: tuple[DeviceBlock, ...]


@dataclass(frozen=True, slots=True)
class _Running:
    job: Job
    blocks: tuple[DeviceBlock, ...]
    outcomes: Mapping[BlockKey, Outcome]
    started_ns: int
    ended: torch.cuda.Event
    kept: Sequence[torch.Tensor]


class StreamJobs:
    """COPY_IN and COPY_OUT jobs, on a stream each. One thread: the engine's."""

    def __init__(self, device: torch.device, clock: Callable[[], int]) -> None:
        self._device, self._clock = device, clock
        self._streams = {kind: torch.cuda.Stream(device) for kind in (JobKind.COPY_IN, JobKind.COPY_OUT)}
        self._running: list[_Running] = []

    def __len__(self) -> int:
        """Jobs that `take_ended` has not given back."""
        return len(self._running)

    def start(
        self,
        job: Job,
        blocks: Sequence[DeviceBlock],
        queue_copies: Callable[[], Mapping[BlockKey, Outcome]],
        kept: Sequence[torch.Tensor] = (),
    ) -> None:
        """Call `queue_copies` on the job's stream, ordered after what the model has queued so far.

        It says which copies could be queued. `kept`, which it may fill, lives until the job has ended.
        """
        stream, started_ns = self._streams[job.kind], self._clock()
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            outcomes = queue_copies()
            ended = torch.cuda.Event()
            ended.record(stream)
        self._running.append(_Running(job, tuple(blocks), outcomes, started_ns, ended, kept))

    def take_ended(self) -> list[Ended]:
        """In the order of their start. A job whose event cannot be asked has FAILED as a whole."""
        running: list[_Running] = []
        through: list[Ended] = []
        for each in self._running:
            outcomes = each.outcomes
            try:
                ended = each.ended.query()
            except RuntimeError as error:  # what torch makes of a device's errors
                log.error("%s of %d blocks failed: %s", each.job.kind.value, len(each.blocks), error)
                ended, outcomes = True, dict.fromkeys(each.job.keys, Outcome.FAILED)
            if ended:
                through.append(Ended(JobResult(each.job, outcomes, each.started_ns, self._clock()), each.blocks))
            else:
                running.append(each)
        self._running = running
        return through

    def drain(self) -> None:
        """Block until no copy is in flight. Their jobs come with the next `take_ended`."""
        for stream in self._streams.values():
            stream.synchronize()


class PinnedMemory:
    """A host pool, page-locked for the GPU until it is closed.

    Where the driver refuses, one line says so, and copies work too: at a fraction of the bandwidth, and holding up
    whoever submits them.
    """

    def __init__(self, slab: torch.Tensor) -> None:
        self._address: int | None = int(slab.data_ptr())
        status = torch.cuda.cudart().cudaHostRegister(self._address, slab.stride(0) * slab.shape[0], 0)
        if int(status) != 0:
            log.warning("the host pool is not page-locked (driver status %s): device copies will be slow", status)
            self._address = None

    def close(self) -> None:
        """No copy may be in flight. Safe to call twice."""
        if self._address is not None:
            torch.cuda.cudart().cudaHostUnregister(self._address)
            self._address = None
