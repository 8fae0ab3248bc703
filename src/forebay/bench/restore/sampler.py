"""Bandwidth over time: a thread that reads a counter of bytes at even intervals.

No sample is of less than half an interval: over a shorter time one read that ends is a bandwidth that no device has.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise

from forebay.bench.restore.results import BandwidthSample

_LEAST_SHARE = 0.5
"""Of an interval."""


Count = tuple[int, int]
"""When a counter was read, in nanoseconds, and what it said."""


class Sampler:
    """Between `__enter__` and `__exit__`, bytes a second of a counter. Times are seconds since `epoch_ns`."""

    def __init__(self, count_bytes: Callable[[], int | None], interval_s: float, epoch_ns: int) -> None:
        self._count_bytes, self._interval_s, self._epoch_ns = count_bytes, interval_s, epoch_ns
        self._ending = threading.Event()
        self._counts: list[Count] = []
        self._thread = threading.Thread(target=self._run, name="forebay-sampler", daemon=True)

    def __enter__(self) -> Sampler:
        self._count()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join()
        self._count()  # what is left of the last interval

    @property
    def samples(self) -> tuple[BandwidthSample, ...]:
        return samples_of(self._counts, self._interval_s, self._epoch_ns)

    def _run(self) -> None:
        while not self._ending.wait(self._interval_s):
            self._count()

    def _count(self) -> None:
        """At the middle of what reading takes: this thread may have to wait for its turn on either side of it."""
        before_ns, counted_bytes, after_ns = time.monotonic_ns(), self._count_bytes(), time.monotonic_ns()
        if counted_bytes is not None:
            self._counts.append(((before_ns + after_ns) // 2, counted_bytes))


def samples_of(counts: Sequence[Count], interval_s: float, epoch_ns: int) -> tuple[BandwidthSample, ...]:
    """What was counted from one reading to the next; a reading that comes too soon is passed over, and where it is the
    last one, it ends the interval before it."""
    kept = list(counts[:1])
    for at, count in enumerate(counts[1:], 1):
        if count[0] - kept[-1][0] >= _LEAST_SHARE * interval_s * 1e9:
            kept.append(count)
        elif at == len(counts) - 1:
            kept[max(1, len(kept) - 1) :] = [count]
    return tuple(
        BandwidthSample(at_s=(at_ns - epoch_ns) / 1e9, bytes_per_s=(counted - before) / ((at_ns - before_ns) / 1e9))
        for (before_ns, before), (at_ns, counted) in pairwise(kept)
        if at_ns > before_ns
    )
