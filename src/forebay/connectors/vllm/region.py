"""The engine's own DRAM, seen as a host pool, and its pages made huge.

The region is a file in /dev/shm that the engine has populated with small pages. Direct I/O into those is slower, since
each 4 KiB page is a segment of its own in the request. Three ways were measured (1 GiB, XXH3 on, two processors under
other load, medians of 5 interleaved rounds; GB/s and core-seconds a GB):

                                     768 KiB blocks    2 MiB blocks
    straight into the small pages    1.26  .296        1.25  .234
    into huge slots, then memcpy     1.19  .438        1.43  .352
    small pages collapsed, straight  1.31  .257        1.56  .171

so blocks are read and written straight in the region, whose pages the kernel is asked to collapse into huge ones.
Memory that a device driver has pinned cannot be collapsed; it stays as it is, and one line says so.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time

import numpy as np

from forebay.hostpool import HUGE_PAGE_BYTES, HostPool
from forebay.types import Slot

log = logging.getLogger("forebay.connectors.vllm.region")

_MADV_COLLAPSE = 25
"""Linux 6.1 and later; not in Python's mmap module."""
_STEP_BYTES = 32 * HUGE_PAGE_BYTES
"""Collapsed in one system call: about 30 ms, the longest that `close` waits for it."""


class RegionPool(HostPool):
    """A pool whose slots the engine gives out with a job and has back when the job has ended. None is ever free.

    `region` is C-contiguous, [slots, slot_bytes]; views of it must be gone before the engine can unmap it.
    """

    def __init__(self, region: memoryview) -> None:
        # deliberately not HostPool.__init__, which makes memory of its own
        assert region.shape is not None
        self.slots, self.slot_bytes = region.shape
        self.block_bytes = self.slot_bytes
        self._flat = region.cast("B")
        self._lent: set[Slot] = set()

    def view(self, slot: Slot) -> memoryview:
        return self._flat[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]

    def lend(self, slot: Slot) -> None:
        """A job of the engine works on this slot from now on."""
        assert slot not in self._lent, f"two jobs on slot {slot}"
        self._lent.add(slot)

    def take(self) -> Slot | None:
        return None

    def give(self, slot: Slot) -> None:
        self._lent.remove(slot)

    @property
    def free_slots(self) -> int:
        """Slots on which no job works."""
        return self.slots - len(self._lent)

    def release(self) -> None:
        """Let go of the engine's memory."""
        self._flat.release()


class HugePages:
    """Collapses a region's pages on a thread of its own, from its construction until it is done or closed."""

    def __init__(self, region: memoryview) -> None:
        whole = np.frombuffer(region, dtype=np.uint8)
        self._address, self._region_bytes = whole.ctypes.data, whole.nbytes
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._collapse, name="forebay-huge-pages", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Return when the region's memory is not touched any more. Safe to call twice."""
        self._stop.set()
        self._thread.join()

    def _collapse(self) -> None:
        """Step by step, since each step holds up page faults in the region."""
        started_s = time.monotonic()
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        first = -(-self._address // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        end = (self._address + self._region_bytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        huge_bytes, refusal = 0, ""
        for at in range(first, end, _STEP_BYTES):
            if self._stop.is_set():
                return
            step_bytes = min(_STEP_BYTES, end - at)
            if madvise(ctypes.c_void_p(at), ctypes.c_size_t(step_bytes), _MADV_COLLAPSE) == 0:
                huge_bytes += step_bytes
            else:
                refusal = f", the rest refused ({os.strerror(ctypes.get_errno())})"
        log.info(
            "huge pages: %.2f of %.2f GiB of the host tier in %.1f s%s",
            huge_bytes / 2**30, self._region_bytes / 2**30, time.monotonic() - started_s, refusal,
        )  # fmt: skip
