"""How much of a disk that is shared with other data may still be filled."""

from __future__ import annotations

import threading
from collections.abc import Callable

from forebay.tiers.file.directio import Calls

_FRESH_NS = 1_000_000_000
"""An answer of the system is gone by for this long, less what is written here meanwhile."""


class FreeSpace:
    """Of one root. Thread-safe."""

    def __init__(self, root: str, floor_bytes: int, calls: Calls, clock_ns: Callable[[], int]) -> None:
        self._root, self._floor_bytes = root, floor_bytes
        self._calls, self._clock_ns = calls, clock_ns
        self._lock = threading.Lock()
        self._spare_bytes = 0
        self._asked_ns: int | None = None

    def take(self, stored_bytes: int) -> bool:
        """Whether so many bytes more leave the floor free; if so, they count as written. Raises OSError."""
        if not self._floor_bytes:
            return True
        now_ns = self._clock_ns()
        with self._lock:
            if self._asked_ns is None or now_ns - self._asked_ns >= _FRESH_NS or self._spare_bytes < stored_bytes:
                space = self._calls.statvfs(self._root)
                self._spare_bytes = space.f_bavail * space.f_frsize - self._floor_bytes
                self._asked_ns = now_ns
            if self._spare_bytes < stored_bytes:
                return False
            self._spare_bytes -= stored_bytes
            return True
