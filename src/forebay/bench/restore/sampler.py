"""Bandwidth over time: a thread that reads a counter of bytes at even intervals."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from forebay.bench.restore.results import BandwidthSample


class Sampler:
    """Between `__enter__` and `__exit__`, bytes a second of a counter. Times are seconds since `epoch_ns`."""

    def __init__(self, count_bytes: Callable[[], int | None], interval_s: float, epoch_ns: int) -> None:
        self._count_bytes, self._interval_s, self._epoch_ns = count_bytes, interval_s, epoch_ns
        self._ending = threading.Event()
        self._samples: list[BandwidthSample] = []
        self._thread = threading.Thread(target=self._run, name="forebay-sampler", daemon=True)

    def __enter__(self) -> Sampler:
        self._at_ns, self._so_far_bytes = time.monotonic_ns(), self._count_bytes()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join()
        self._sample()  # what is left of the last interval

    @property
    def samples(self) -> tuple[BandwidthSample, ...]:
        return tuple(self._samples)

    def _run(self) -> None:
        while not self._ending.wait(self._interval_s):
            self._sample()

    def _sample(self) -> None:
        now_ns, counted_bytes = time.monotonic_ns(), self._count_bytes()
        if counted_bytes is not None and self._so_far_bytes is not None and now_ns > self._at_ns:
            rate = (counted_bytes - self._so_far_bytes) / ((now_ns - self._at_ns) / 1e9)
            self._samples.append(BandwidthSample(at_s=(now_ns - self._epoch_ns) / 1e9, bytes_per_s=rate))
        self._at_ns, self._so_far_bytes = now_ns, counted_bytes
