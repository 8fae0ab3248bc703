"""The paged device cache: hot blocks in the model's own memory, and the port through which the engine copies them.

A block is in one of three places: on the free list; held under a key (hot); or taken, which means that whoever took it
is filling it. A hot block may leave at any time at which no copy of it is in flight: whoever reads one does so at once
(or, on a GPU, in an order that the streams keep), so nothing needs to pin it for longer.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from forebay.errors import ConfigError
from forebay.hostpool import HostPool
from forebay.ports import EvictionPolicy
from forebay.types import BlockKey, DeviceBlock, Job, JobKind, JobResult, Outcome

from .memory import touched

log = logging.getLogger("forebay.connectors.transformers.device")


@dataclass(frozen=True, slots=True)
class BlockShape:
    """Axes of one block, outermost first: [layers, 2 (keys, values), kv_heads, block_tokens, head_dim]."""

    layers: int
    kv_heads: int
    block_tokens: int
    head_dim: int
    dtype: torch.dtype

    @property
    def axes(self) -> tuple[int, ...]:
        return (self.layers, 2, self.kv_heads, self.block_tokens, self.head_dim)

    @property
    def block_bytes(self) -> int:
        return math.prod(self.axes) * int(self.dtype.itemsize)


@dataclass(slots=True)
class _Transfer:
    """A job whose copies are under way on a GPU stream."""

    job: Job
    blocks: tuple[DeviceBlock, ...]
    outcomes: dict[BlockKey, Outcome]
    started_ns: int
    ended: torch.cuda.Event


class PagedDeviceCache:
    """`num_blocks` blocks of `shape` on `device`, and a `DevicePort` over the host pool. One thread: the engine's.

    On a CPU a copy has ended when `submit` returns. On CUDA and ROCm it runs on a stream of its own, one each way,
    ordered after whatever the model has queued so far, and `poll` asks its event.
    """

    def __init__(
        self,
        pool: HostPool,
        shape: BlockShape,
        num_blocks: int,
        *,
        device: torch.device,
        policy: EvictionPolicy,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        if num_blocks < 1:
            raise ConfigError(f"the device cache must hold a block of {shape.block_bytes} bytes or more: give it more")
        if pool.block_bytes != shape.block_bytes:
            raise ConfigError(
                f"the store keeps blocks of {pool.block_bytes} bytes and this model has {shape.block_bytes}: "
                "make the namespace from this model"
            )
        self.shape = shape
        self.num_blocks = num_blocks
        self.device = device
        self.blocks = touched((num_blocks, *shape.axes), shape.dtype, device)
        """[num_blocks, layers, 2, kv_heads, block_tokens, head_dim]; a block is contiguous."""
        self._block_bytes = self.blocks.view(num_blocks, -1).view(torch.uint8)
        self._slot_bytes = torch.from_numpy(pool.slab)[:, : shape.block_bytes]
        self._policy = policy
        self._clock = clock
        self._free = [DeviceBlock(block) for block in reversed(range(num_blocks))]
        self._block_of: dict[BlockKey, DeviceBlock] = {}
        self._copying: Counter[DeviceBlock] = Counter()
        """Blocks with a copy in flight, either way."""
        self._done: list[JobResult] = []
        self._transfers: list[_Transfer] = []
        self._streams: dict[JobKind, torch.cuda.Stream] = {}
        if device.type == "cuda":
            self._streams = {kind: torch.cuda.Stream(device) for kind in (JobKind.COPY_IN, JobKind.COPY_OUT)}
        self._pinned = _pin(self._slot_bytes) if self._streams else None

    # ---- blocks and keys

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    @property
    def hot_blocks(self) -> int:
        return len(self._block_of)

    @property
    def copies_in_flight(self) -> int:
        return len(self._transfers)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._block_of

    def hot_keys(self) -> list[BlockKey]:
        """Every key held, in order of insertion."""
        return list(self._block_of)

    def block(self, key: BlockKey) -> DeviceBlock:
        """Where a hot block lies. Raises KeyError for a key that is not held."""
        return self._block_of[key]

    def take(self, count: int) -> list[DeviceBlock]:
        """Up to `count` free blocks, now the caller's until it gives or inserts them."""
        count = min(count, len(self._free))
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        return taken[::-1]

    def give(self, blocks: Iterable[DeviceBlock]) -> None:
        """Back to the free list, unfilled."""
        self._free.extend(blocks)

    def insert(self, keys: Sequence[BlockKey], blocks: Sequence[DeviceBlock]) -> None:
        """Taken blocks, now filled, become hot under `keys` (token order). A hot key keeps its block."""
        fresh = []
        for key, block in zip(keys, blocks, strict=True):
            if key in self._block_of:
                self._free.append(block)
            else:
                self._block_of[key] = block
                fresh.append(key)
        self._policy.inserted(fresh)

    def accessed(self, keys: Sequence[BlockKey]) -> None:
        self._policy.accessed(keys)

    def victims(self, count: int, leaves: Callable[[BlockKey], bool] = lambda _: True) -> Sequence[BlockKey]:
        """Up to `count` hot keys that may go now and for which `leaves` holds, the most dispensable first."""
        return self._policy.victims(count, lambda key: not self._copying[self._block_of[key]] and leaves(key))

    def drop(self, keys: Iterable[BlockKey]) -> None:
        """Forget hot blocks. None of them may have a copy in flight."""
        gone = list(keys)
        for key in gone:
            block = self._block_of.pop(key)
            assert not self._copying[block], f"device block {block} is dropped while it is being copied"
            self._free.append(block)
        self._policy.removed(gone)

    # ---- DevicePort

    def submit(self, job: Job, blocks: Sequence[DeviceBlock]) -> None:
        """Start one contiguous copy for each block. A copy that cannot be made is FAILED."""
        started_ns = self._clock()
        stream = self._streams.get(job.kind)
        if stream is None:
            self._done.append(JobResult(job, self._copy(job, blocks), started_ns, self._clock()))
            return
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            outcomes = self._copy(job, blocks)
            ended = torch.cuda.Event()
            ended.record(stream)
        self._copying.update(blocks)
        self._transfers.append(_Transfer(job, tuple(blocks), outcomes, started_ns, ended))

    def poll(self) -> Sequence[JobResult]:
        if self._transfers:
            self._collect()
        done, self._done = self._done, []
        return done

    def close(self) -> None:
        """Wait for copies in flight and let the pool's memory go. The cache is of no use afterwards."""
        for transfer in self._transfers:
            transfer.ended.synchronize()
        self._collect()
        if self._pinned is not None:
            torch.cuda.cudart().cudaHostUnregister(self._pinned)
            self._pinned = None

    def _copy(self, job: Job, blocks: Sequence[DeviceBlock]) -> dict[BlockKey, Outcome]:
        inward = job.kind is JobKind.COPY_IN
        outcomes: dict[BlockKey, Outcome] = {}
        for key, slot, block in zip(job.keys, job.slots, blocks, strict=True):
            try:
                host, device = self._slot_bytes[slot], self._block_bytes[block]
                (device if inward else host).copy_(host if inward else device, non_blocking=True)
                outcomes[key] = Outcome.OK
            except (RuntimeError, IndexError) as error:  # torch reports a device's errors as the former
                log.error("%s of device block %d failed: %s", job.kind.value, block, error)
                outcomes[key] = Outcome.FAILED
        return outcomes

    def _collect(self) -> None:
        running = []
        for transfer in self._transfers:
            outcomes = transfer.outcomes
            try:
                ended = transfer.ended.query()
            except RuntimeError as error:
                log.error("%s of %d blocks failed: %s", transfer.job.kind.value, len(transfer.blocks), error)
                ended, outcomes = True, dict.fromkeys(transfer.job.keys, Outcome.FAILED)
            if not ended:
                running.append(transfer)
                continue
            self._copying.subtract(transfer.blocks)
            self._done.append(JobResult(transfer.job, outcomes, transfer.started_ns, self._clock()))
        self._transfers = running


def _pin(slab: torch.Tensor) -> int | None:
    """Page-lock the pool for the GPU: its address, or None (said in the log) when the driver refuses.

    Unpinned memory works too, at a fraction of the bandwidth and with copies that block the caller.
    """
    address, pinned_bytes = int(slab.data_ptr()), slab.stride(0) * slab.shape[0]
    status = torch.cuda.cudart().cudaHostRegister(address, pinned_bytes, 0)
    if int(status) == 0:
        return address
    log.warning("the host pool is not page-locked (driver status %s): device copies will be slow", status)
    return None
