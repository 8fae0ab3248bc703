"""vLLM's paged KV cache as pages of bytes, and the port through which the engine copies whole blocks of all layers.

One stored block is the pages of one block id over all layers, in the order of the layers. A page is copied as it lies
in memory, because its inside belongs to the attention backend; where ranks of different sizes share a page's heads, it
is copied head by head, because they lie otherwise among more of them.
"""

from __future__ import annotations

import itertools
import logging
import math
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from forebay.connectors.streams import PinnedMemory, StreamJobs
from forebay.errors import ConfigError
from forebay.hostpool import HostPool
from forebay.types import BlockKey, DeviceBlock, Job, JobKind, JobResult, Outcome

log = logging.getLogger("forebay.connectors.vllm")

_STAGING_BYTES = 64 * 2**20
"""Device memory that one direction of transfer uses at a time, unless a single block is larger."""


@dataclass(frozen=True, slots=True)
class KvPages:
    """The registered KV cache of one rank."""

    layers: tuple[torch.Tensor, ...]
    """One a layer: uint8 [num_blocks, ...page], a page in the order in which it lies in memory where it lies dense."""
    whole: torch.Tensor | None
    """uint8 [num_blocks, layers, page_bytes] over the same memory; None where the layers are not evenly spaced."""
    num_blocks: int
    page_bytes: int
    kernel_blocks: int = 1
    """Blocks of the attention kernel in a page, one after the other."""

    @property
    def block_bytes(self) -> int:
        return self.page_bytes * len(self.layers)

    @property
    def device(self) -> torch.device:
        return self.layers[0].device


def find_pages(
    kv_caches: Mapping[str, torch.Tensor], layer_names: Sequence[str], num_blocks: int, *, by_head: bool = False
) -> KvPages:
    """Pages of the layers named, in that order. Raises ConfigError for a cache that is not `num_blocks` equal pages.

    `by_head`: a page's bytes are one head after the other, however they lie in memory.
    """
    missing = [name for name in layer_names if name not in kv_caches]
    if missing:
        raise ConfigError(f"vLLM registered no KV cache for layer {missing[0]}: this model cannot be served")
    layers = tuple(_pages(kv_caches[name], num_blocks, by_head) for name in layer_names)
    page_bytes = math.prod(layers[0].shape[1:])
    if any(math.prod(layer.shape[1:]) != page_bytes for layer in layers):
        raise ConfigError("the layers' KV pages differ in size: this model cannot be served")
    return KvPages(layers, _whole(layers), num_blocks, page_bytes, kv_caches[layer_names[0]].shape[0] // num_blocks)


def _pages(cache: torch.Tensor, num_blocks: int, by_head: bool) -> torch.Tensor:
    """[num_blocks * k, heads, tokens, content] of any dtype -> uint8 [num_blocks, page_bytes]; [num_blocks, ...] if a
    page cannot be copied as it lies."""
    if cache.shape[0] % num_blocks:
        raise ConfigError(
            f"a KV cache of {cache.shape[0]} blocks where {num_blocks} were planned: this cannot be served"
        )
    pages = cache.unflatten(0, (num_blocks, -1)).view(torch.uint8)
    if not (pages[0].is_contiguous() if by_head else _is_dense(pages[0])):
        return pages
    page_bytes = math.prod(pages.shape[1:])
    return pages.as_strided((num_blocks, page_bytes), (pages.stride(0), 1), pages.storage_offset())


def _is_dense(page: torch.Tensor) -> bool:
    """Whether a page occupies one run of bytes, in whatever order of its axes."""
    expected = 1
    for stride, length in sorted(zip(page.stride(), page.shape, strict=True)):
        if length == 1:
            continue
        if stride != expected:
            return False
        expected *= length
    return True


def _whole(layers: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """All layers as one tensor, when they lie in one allocation at even distances: then one kernel moves a batch."""
    first = layers[0]
    same = all(
        layer.dim() == 2
        and layer.stride() == first.stride()
        and layer.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        for layer in layers
    )
    offsets = [layer.storage_offset() for layer in layers]
    steps = {after - before for before, after in itertools.pairwise(offsets)}
    if not same or len(steps) > 1 or any(step <= 0 for step in steps):
        return None
    step = steps.pop() if steps else first.shape[1]
    num_blocks, page_bytes = first.shape
    return first.as_strided((num_blocks, len(layers), page_bytes), (first.stride(0), step, 1), offsets[0])


class KvDevice(Protocol):
    """A `DevicePort` that also says which blocks it is reading."""

    def submit(self, job: Job, blocks: Sequence[DeviceBlock]) -> None: ...

    def poll(self) -> Sequence[JobResult]: ...

    def is_copying_out(self, block: DeviceBlock) -> bool:
        """Whether a COPY_OUT of this block has not ended, as far as `poll` has said."""
        ...

    def drain(self) -> None:
        """Block until no copy is in flight. Their results come with the next `poll`."""
        ...

    def close(self) -> None:
        """Drain, and let the host pool's memory go."""
        ...


def open_device(pages: KvPages, pool: HostPool) -> KvDevice:
    """Raises ConfigError for devices that nobody has taught Forebay to copy to."""
    if pool.block_bytes != pages.block_bytes:
        raise ConfigError(f"vLLM's blocks have {pages.block_bytes} bytes, the store's {pool.block_bytes}")
    if pages.device.type == "cpu":
        return CpuDevice(pages, pool)
    if pages.device.type == "cuda":  # ROCm calls itself that too
        return CudaDevice(pages, pool)
    raise ConfigError(f"KV on a {pages.device.type} device cannot be copied: CPU, CUDA and ROCm are supported")


class _Reading:
    """Blocks that COPY_OUT jobs read, with how many do."""

    def __init__(self) -> None:
        self._blocks: Counter[DeviceBlock] = Counter()

    def begin(self, job: Job, blocks: Sequence[DeviceBlock]) -> None:
        if job.kind is JobKind.COPY_OUT:
            self._blocks.update(blocks)

    def end(self, job: Job, blocks: Sequence[DeviceBlock]) -> None:
        if job.kind is JobKind.COPY_OUT:
            self._blocks -= Counter(blocks)

    def __contains__(self, block: DeviceBlock) -> bool:
        return block in self._blocks


# --- CPU


@dataclass(frozen=True, slots=True)
class _Copied:
    result: JobResult
    blocks: tuple[DeviceBlock, ...]


class _Urgency(IntEnum):
    LOAD = 0
    STORE = 1
    END = 2


@dataclass(frozen=True, slots=True, order=True)
class _Waiting:
    urgency: _Urgency
    number: int
    job: Job | None = field(default=None, compare=False)
    blocks: tuple[DeviceBlock, ...] = field(default=(), compare=False)


class CpuDevice:
    """Copies on one thread of its own, so that a step of the model never waits for one. Loads go first."""

    def __init__(self, pages: KvPages, pool: HostPool, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._layers = [layer.numpy() for layer in pages.layers]
        self._whole = None if pages.whole is None else pages.whole.numpy()
        self._page_bytes, self._block_bytes = pages.page_bytes, pages.block_bytes
        self._slab, self._clock = pool.slab, clock
        self._reading = _Reading()
        self._jobs: queue.PriorityQueue[_Waiting] = queue.PriorityQueue()
        self._submitted = itertools.count()
        self._ended: queue.SimpleQueue[_Copied] = queue.SimpleQueue()
        self._open_jobs = 0
        self._drained: list[_Copied] = []
        self._thread = threading.Thread(target=self._serve, name="forebay-kv-copy", daemon=True)
        self._thread.start()

    def submit(self, job: Job, blocks: Sequence[DeviceBlock]) -> None:
        self._reading.begin(job, blocks)
        self._open_jobs += 1
        urgency = _Urgency.LOAD if job.kind is JobKind.COPY_IN else _Urgency.STORE
        self._jobs.put(_Waiting(urgency, next(self._submitted), job, tuple(blocks)))

    def poll(self) -> Sequence[JobResult]:
        ended, self._drained = self._drained, []
        while len(ended) < self._open_jobs:
            try:
                ended.append(self._ended.get_nowait())
            except queue.Empty:
                break
        self._open_jobs -= len(ended)
        for copied in ended:
            self._reading.end(copied.result.job, copied.blocks)
        return [copied.result for copied in ended]

    def is_copying_out(self, block: DeviceBlock) -> bool:
        return block in self._reading

    def drain(self) -> None:
        while len(self._drained) < self._open_jobs:
            self._drained.append(self._ended.get())

    def close(self) -> None:
        self._jobs.put(_Waiting(_Urgency.END, next(self._submitted)))
        self._thread.join()

    def _serve(self) -> None:
        while (waiting := self._jobs.get()).job is not None:
            job, blocks = waiting.job, waiting.blocks
            started_ns = self._clock()
            outcomes = {
                key: self._copy(job.kind, slot, block)
                for key, slot, block in zip(job.keys, job.slots, blocks, strict=True)
            }
            self._ended.put(_Copied(JobResult(job, outcomes, started_ns, self._clock()), blocks))

    def _copy(self, kind: JobKind, slot: int, block: int) -> Outcome:
        host = self._slab[slot, : self._block_bytes].reshape(len(self._layers), self._page_bytes)
        try:
            if self._whole is not None:
                _move(kind, host, self._whole[block])
            else:
                for page, layer in zip(host, self._layers, strict=True):
                    _move(kind, page.reshape(layer.shape[1:]), layer[block])
        except (IndexError, ValueError) as error:
            log.error("%s of block %d failed: %s", kind.value, block, error)
            return Outcome.FAILED
        return Outcome.OK


def _move(kind: JobKind, host: npt.NDArray[np.uint8], device: npt.NDArray[np.uint8]) -> None:
    if kind is JobKind.COPY_IN:
        device[...] = host
    else:
        host[...] = device


# --- CUDA and ROCm


class CudaDevice:
    """Copies on a stream of its own each way, ordered after what the model has queued when a job is submitted.

    One gather or scatter kernel moves a batch between the pages and a staging buffer, and one transfer a block moves it
    between there and its host slot.
    """

    def __init__(self, pages: KvPages, pool: HostPool, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._pages = pages
        self._host = torch.from_numpy(pool.slab)[:, : pages.block_bytes]
        self._pinned = PinnedMemory(self._host)
        self._batch_blocks = max(1, _STAGING_BYTES // pages.block_bytes)
        self._reading = _Reading()
        self._jobs = StreamJobs(pages.device, clock)

    def submit(self, job: Job, blocks: Sequence[DeviceBlock]) -> None:
        self._reading.begin(job, blocks)
        ids: list[torch.Tensor] = []

        def queue_copies() -> Mapping[BlockKey, Outcome]:
            try:
                for at in range(0, len(blocks), self._batch_blocks):
                    batch = slice(at, at + self._batch_blocks)
                    ids.append(torch.tensor(blocks[batch], dtype=torch.int64).pin_memory())
                    self._move(job.kind, job.slots[batch], ids[-1].to(self._pages.device, non_blocking=True))
            except RuntimeError as error:  # what torch makes of a device's errors
                log.error("%s of %d blocks failed: %s", job.kind.value, len(blocks), error)
                return dict.fromkeys(job.keys, Outcome.FAILED)
            return dict.fromkeys(job.keys, Outcome.OK)

        self._jobs.start(job, blocks, queue_copies, kept=ids)

    def poll(self) -> Sequence[JobResult]:
        ended = self._jobs.take_ended()
        for each in ended:
            self._reading.end(each.result.job, each.blocks)
        return [each.result for each in ended]

    def is_copying_out(self, block: DeviceBlock) -> bool:
        return block in self._reading

    def drain(self) -> None:
        self._jobs.drain()

    def close(self) -> None:
        self.drain()
        self._pinned.close()

    def _move(self, kind: JobKind, slots: Sequence[int], ids: torch.Tensor) -> None:
        """On the current stream. Staging memory belongs to it, so that reuse is ordered."""
        pages = self._pages
        staging = torch.empty((len(slots), pages.block_bytes), dtype=torch.uint8, device=pages.device)
        if kind is JobKind.COPY_OUT:
            gather(pages, staging, ids)
            for i, slot in enumerate(slots):
                self._host[slot].copy_(staging[i], non_blocking=True)
        else:
            for i, slot in enumerate(slots):
                staging[i].copy_(self._host[slot], non_blocking=True)
            scatter(pages, staging, ids)


def gather(pages: KvPages, staging: torch.Tensor, ids: torch.Tensor) -> None:
    """Copy blocks `ids` to the rows of `staging`, uint8 [len(ids), block_bytes]. One kernel, or one a layer."""
    for part in _parts(pages, staging):
        if part.staging.is_contiguous():
            torch.index_select(part.pages, 0, ids, out=part.staging)
        else:
            part.staging.copy_(part.pages.index_select(0, ids))


def scatter(pages: KvPages, staging: torch.Tensor, ids: torch.Tensor) -> None:
    """Copy the rows of `staging` to the blocks `ids`."""
    for part in _parts(pages, staging):
        part.pages.index_copy_(0, ids, part.staging)


@dataclass(frozen=True, slots=True)
class _Part:
    """Pages and the staging memory that stands for them: equal shapes but for the first axis."""

    pages: torch.Tensor
    staging: torch.Tensor


def _parts(pages: KvPages, staging: torch.Tensor) -> list[_Part]:
    """One, or one a layer where layers lie apart."""
    word, count = _word(pages), len(staging)
    if pages.whole is not None:
        whole = pages.whole.view(word)
        return [_Part(whole, staging.view(word).view(count, *whole.shape[1:]))]
    by_layer = staging.view(count, len(pages.layers), pages.page_bytes)
    layers = [layer.view(word) for layer in pages.layers]
    return [_Part(layer, by_layer[:, i].view(word).unflatten(1, layer.shape[1:])) for i, layer in enumerate(layers)]


def _word(pages: KvPages) -> torch.dtype:
    """The widest integer in which everything is aligned: kernels move elements, not bytes."""
    views = pages.layers if pages.whole is None else (pages.whole,)
    numbers = [pages.page_bytes]
    for view in views:
        numbers += [view.shape[-1], view.storage_offset(), *view.stride()[:-1]]
    for dtype in (torch.int64, torch.int32, torch.int16):
        if all(number % dtype.itemsize == 0 for number in numbers):
            return dtype
    return torch.uint8
