"""The host pool: one slab of DRAM cut into slots, the DRAM tier and the gateway of every transfer.

Why a slab: direct I/O wants aligned memory, devices want pinned memory, and both are slow to make. Why huge pages:
a 2 MiB read into 4 KiB pages needs up to 512 segments where the block layer takes a few hundred in one request; huge
pages make it one. Why first touch: reading into memory that was never touched costs a page fault for every page in the
middle of the transfer. All three are paid once, at start.
"""

from __future__ import annotations

import logging
import mmap
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from forebay.errors import ConfigError
from forebay.types import Slot

log = logging.getLogger("forebay.hostpool")

ALIGNMENT = 4096
"""Slots start and end on multiples of this, which satisfies direct I/O on every common device (512 or 4096)."""

HUGE_PAGE_BYTES = 2 * 2**20
_TOUCH_THREADS = 4
_WORTH_A_WARNING_BYTES = 64 * 2**20


def slot_bytes(block_bytes: int) -> int:
    """Bytes of one slot: the block, padded to `ALIGNMENT`."""
    return -(-block_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """What the pool really got, in bytes."""

    slab_bytes: int
    huge_bytes: int
    """Bytes of the slab that the kernel backs with huge pages (0 where it does not say)."""


class HostPool:
    """`slots` slots of at least `block_bytes` each. Single-threaded: owned by the engine.

    The memory of a slot may be read and written by worker threads and devices while the engine has handed it out.
    """

    def __init__(self, slots: int, block_bytes: int) -> None:
        if slots < 2:
            raise ConfigError(
                f"the host pool needs 2 slots or more, not {slots}: give it more memory or smaller blocks"
            )
        self.slots = slots
        self.block_bytes = block_bytes
        self.slot_bytes = slot_bytes(block_bytes)
        self.slab = _huge_slab(slots * self.slot_bytes).reshape(slots, self.slot_bytes)
        """uint8 [slots, slot_bytes]; the start address is a multiple of HUGE_PAGE_BYTES."""
        self._views = [memoryview(self.slab[i]) for i in range(slots)]
        self._free = [Slot(i) for i in reversed(range(slots))]
        self._is_free = bytearray(b"\1" * slots)
        self.memory = PoolMemory(self.slab.nbytes, _huge_bytes(self.slab.ctypes.data, self.slab.nbytes))
        if self.memory.slab_bytes >= _WORTH_A_WARNING_BYTES and self.memory.huge_bytes < self.memory.slab_bytes // 2:
            log.warning(
                "only %.2f of the %.2f GiB of the host pool are in huge pages: direct reads will be slower",
                self.memory.huge_bytes / 2**30, self.memory.slab_bytes / 2**30,
            )  # fmt: skip
        log.info(
            "host pool: %d slots of %d bytes, %.2f GiB in all, %.2f GiB of it in huge pages",
            slots, self.slot_bytes, self.memory.slab_bytes / 2**30, self.memory.huge_bytes / 2**30,
        )  # fmt: skip

    def view(self, slot: Slot) -> memoryview:
        """The whole slot, `slot_bytes` long and aligned; the block is its first `block_bytes`."""
        return self._views[slot]

    def take(self) -> Slot | None:
        """A free slot, now the caller's, or None."""
        if not self._free:
            return None
        slot = self._free.pop()
        self._is_free[slot] = 0
        return slot

    def give(self, slot: Slot) -> None:
        """Return a slot. Giving one back twice is a bug and says so."""
        assert not self._is_free[slot], f"slot {slot} is already free"
        self._is_free[slot] = 1
        self._free.append(slot)

    @property
    def free_slots(self) -> int:
        return len(self._free)


def _huge_slab(slab_bytes: int) -> npt.NDArray[np.uint8]:
    """Anonymous private memory on a huge-page boundary, advised to be huge, every page touched."""
    try:
        region = mmap.mmap(-1, slab_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"cannot get {slab_bytes / 2**30:.2f} GiB for the host pool ({error}): ask for less"
        ) from None
    try:
        region.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:
        log.warning("no huge pages for the host pool (%s): direct reads will be slower", error)
    whole = np.frombuffer(region, dtype=np.uint8)  # keeps the mapping alive
    start = -whole.ctypes.data % HUGE_PAGE_BYTES
    slab = whole[start : start + slab_bytes]
    share = -(-slab_bytes // _TOUCH_THREADS // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    touch = [
        threading.Thread(target=slab[at : at + share].fill, args=(0,)) for at in range(0, slab_bytes, max(share, 1))
    ]
    for thread in touch:
        thread.start()
    for thread in touch:
        thread.join()
    return slab


def _huge_bytes(address: int, slab_bytes: int) -> int:
    """AnonHugePages of the mappings that overlap the slab, from /proc/self/smaps; 0 where that cannot be read."""
    found, inside = 0, False
    try:
        with Path("/proc/self/smaps").open() as smaps:
            for line in smaps:
                head = line.split(maxsplit=1)[0]
                if "-" in head and not head.endswith(":"):
                    low, high = (int(part, 16) for part in head.split("-"))
                    inside = low < address + slab_bytes and address < high
                elif inside and head == "AnonHugePages:":
                    found += int(line.split()[1]) * 1024
    except (OSError, ValueError):
        return 0
    return min(found, slab_bytes)
