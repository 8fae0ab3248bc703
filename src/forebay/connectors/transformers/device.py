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

from forebay.connectors.streams import PinnedMemory, StreamJobs
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
        self._jobs = StreamJobs(device, clock) if device.type == "cuda" else None
        self._pinned = PinnedMemory(self._slot_bytes) if self._jobs is not None else None

    # ---- blocks and keys

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    @property
    def hot_blocks(self) -> int:
        return len(self._block_of)

    @property
    def copies_in_flight(self) -> int:
        return 0 if self._jobs is None else len(self._jobs)

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
        if self._jobs is None:
            started_ns = self._clock()
            self._done.append(JobResult(job, self._copy(job, blocks), started_ns, self._clock()))
            return
        self._jobs.start(job, blocks, lambda: self._copy(job, blocks))
        self._copying.update(blocks)

    def poll(self) -> Sequence[JobResult]:
        if self._jobs is None:
            done, self._done = self._done, []
            return done
        ended = self._jobs.take_ended()
        for each in ended:
            self._copying.subtract(each.blocks)
        return [each.result for each in ended]

    def close(self) -> None:
        """Wait for copies in flight and let the pool's memory go. The cache is of no use afterwards."""
        if self._jobs is not None:
            self._jobs.drain()
        if self._pinned is not None:
            self._pinned.close()

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
