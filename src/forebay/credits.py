"""How much may be in flight: a depth for each channel, found by measuring, and rates in bytes a second."""

from __future__ import annotations

import math


class Depth:
    """How many blocks to keep in flight on a channel: the fewest that give its full rate.

    Hill climbing over windows during which the channel never lacked work. Up if that brought more than 3 %, down if it
    cost less than 2 % of the best rate that was seen lately; after a try that did not pay, the next one waits longer.
    """

    _STEP = 1.5
    _WINDOW_DEPTHS = 4
    """A window is as long as it takes to move this many times the blocks in flight."""
    _MOST_PATIENCE = 32

    def __init__(self, first_blocks: int, most_blocks: int) -> None:
        self.blocks = first_blocks
        self._most_blocks = most_blocks
        self._settled_blocks = first_blocks
        self._settled_rate = 0.0
        self._best_rate = 0.0
        self._up = True
        self._patience, self._windows_to_wait = 1, 0
        self._began_ns: int | None = None
        self._moved_blocks = 0

    def moved(self, blocks: int, now_ns: int, *, lacked_work: bool) -> None:
        """Blocks have landed. `lacked_work`: fewer than `self.blocks` were in flight, for want of more."""
        if lacked_work or self._began_ns is None:
            self._began_ns, self._moved_blocks = (None if lacked_work else now_ns), 0
            return
        self._moved_blocks += blocks
        if self._moved_blocks >= self._WINDOW_DEPTHS * self.blocks and now_ns > self._began_ns:
            self._end_window(self._moved_blocks / (now_ns - self._began_ns))
            self._began_ns, self._moved_blocks = now_ns, 0

    def _end_window(self, rate: float) -> None:
        self._best_rate = max(rate, self._best_rate * 0.99)
        if self.blocks == self._settled_blocks:
            self._settled_rate = rate
            if self._windows_to_wait:
                self._windows_to_wait -= 1
                return
        else:
            pays = rate > 1.03 * self._settled_rate if self._up else rate > 0.98 * self._best_rate
            if pays:
                self._settled_blocks, self._settled_rate, self._patience = self.blocks, rate, 1
            else:
                self.blocks, self._up = self._settled_blocks, not self._up
                self._patience = min(2 * self._patience, self._MOST_PATIENCE)
                self._windows_to_wait = self._patience
                return
        self._try_another()

    def _try_another(self) -> None:
        tried = math.ceil(self.blocks * self._STEP) if self._up else int(self.blocks / self._STEP)
        tried = max(1, min(tried, self._most_blocks))
        if tried == self.blocks:
            self._up = not self._up
        self.blocks = tried


class Rate:
    """A limit in bytes a second, as a bucket that holds a tenth of a second and may go into debt by one transfer."""

    def __init__(self, bytes_per_s: float, now_ns: int) -> None:
        self.bytes_per_s = bytes_per_s
        self._level_bytes, self._at_ns = bytes_per_s / 10, now_ns

    def allows(self, now_ns: int) -> bool:
        self._fill(now_ns)
        return self._level_bytes > 0

    def take(self, moved_bytes: int, now_ns: int) -> None:
        self._fill(now_ns)
        self._level_bytes -= moved_bytes

    def opens_ns(self, now_ns: int) -> int:
        """When `allows` will hold."""
        self._fill(now_ns)
        return now_ns if self._level_bytes > 0 else now_ns + 1 + math.ceil(-self._level_bytes * 1e9 / self.bytes_per_s)

    def _fill(self, now_ns: int) -> None:
        grown_bytes = self.bytes_per_s * (now_ns - self._at_ns) / 1e9
        self._level_bytes = min(self.bytes_per_s / 10, self._level_bytes + grown_bytes)
        self._at_ns = now_ns
