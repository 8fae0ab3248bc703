"""By when jobs have to have ended."""

from __future__ import annotations

import heapq
from collections.abc import Container, Iterator

from forebay.types import JobId


class Due:
    """Running jobs, by when they are late. Those that have ended need not be taken out: they are skipped."""

    def __init__(self, running: Container[JobId]) -> None:
        self._running = running
        self._heap: list[tuple[int, JobId]] = []

    def add(self, due_ns: int, job_id: JobId) -> None:
        heapq.heappush(self._heap, (due_ns, job_id))

    def next_ns(self) -> int | None:
        """When the next one is late; None without any."""
        while self._heap and self._heap[0][1] not in self._running:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def take(self, now_ns: int) -> Iterator[JobId]:
        """Those that are late by now, the longest first, each once."""
        while (due_ns := self.next_ns()) is not None and due_ns <= now_ns:
            yield heapq.heappop(self._heap)[1]
