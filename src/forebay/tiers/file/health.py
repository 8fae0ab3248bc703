"""How a root is: whether it is there, whether it answers, and what has happened to it, counted by kind."""

from __future__ import annotations

import errno
import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path

from forebay.tiers.file.breaker import Breaker, BreakerLimits, BreakerState, Call, Turn

log = logging.getLogger("forebay.tiers.file")

NO_ROOM = {errno.ENOSPC, errno.EDQUOT}
_NOT_THE_ROOTS = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR, errno.EFBIG}
"""Limits of this process or this machine: they say nothing about the device."""


class RootState(Enum):
    """The worst of what holds, in this order.

    ABSENT is whether the marker can be read. STOPPED and WRITES_STOPPED are the two breakers of a root: reads and
    writes can fail one without the other, as on a file system that has turned read-only.
    """

    ABSENT = "absent"
    """No marker: its blocks are missing, writes go to the next root."""
    STOPPED = "stopped"
    """Reads fail or hang: each is FAILED at once, lookups say that nothing is there, writes go to the next root."""
    WRITES_STOPPED = "writes stopped"
    """Writes fail or hang, and go to the next root at once; reads are served."""
    ONLINE = "online"


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthLimits:
    failures_in_a_row: int
    hang_ns: int
    retry_ns: int
    read_threads: int
    write_threads: int


class Health:
    """Of one root. Thread-safe."""

    def __init__(
        self, path: Path, limits: HealthLimits, clock_ns: Callable[[], int], works_again: Callable[[], None]
    ) -> None:
        """`works_again` is called when reads are no longer stopped."""
        self._path, self._works_again = path, works_again
        self._retry_ns = limits.retry_ns
        self._lock = threading.Lock()
        self._events: Counter[str] = Counter()
        self.is_present = False
        """Whether the marker was there when it was last looked for. Set by the root, under its own lock."""

        def breaker(threads: int, turned: Callable[[Turn], None]) -> Breaker:
            breaker_limits = BreakerLimits(
                failures_in_a_row=limits.failures_in_a_row,
                hang_ns=limits.hang_ns,
                retry_ns=limits.retry_ns,
                threads=threads,
            )
            return Breaker(breaker_limits, clock_ns, turned, partial(self.count, "hung"))

        self.reads = breaker(limits.read_threads, self._reads_turned)
        self.writes = breaker(limits.write_threads, self._writes_turned)

    @property
    def state(self) -> RootState:
        if not self.is_present:
            return RootState.ABSENT
        if self.reads.state is not BreakerState.CLOSED:
            return RootState.STOPPED
        if self.writes.state is not BreakerState.CLOSED:
            return RootState.WRITES_STOPPED
        return RootState.ONLINE

    def takes_reads(self) -> bool:
        """Whether to send reads there; one of them may be a try. An absent root is asked: it may be back."""
        return not self.reads.refuses()

    def takes_writes(self) -> bool:
        """Whether to send writes there. A root that cannot be read gets none, however well it writes."""
        return self.is_present and self.reads.state is BreakerState.CLOSED and not self.writes.refuses()

    def takes_deletes(self) -> bool:
        """An absent or stopped root has left the pool together with its blocks."""
        return self.is_present and self.reads.state is BreakerState.CLOSED

    @property
    def why(self) -> str:
        """Why reads or writes are stopped; empty when neither is."""
        return self.reads.why or self.writes.why

    @property
    def events(self) -> Mapping[str, int]:
        """What has happened since the start, by kind: the names of errors (`EIO`), `hung`, `vanished`, reasons for
        which files were set aside."""
        with self._lock:
            return dict(self._events)

    def count(self, kind: str) -> None:
        with self._lock:
            self._events[kind] += 1

    def blame(self, call: Call, error: OSError) -> None:
        """Count an error of a call. It speaks against the device unless the device is only full, or not at fault."""
        kind = errno.errorcode.get(error.errno or 0, type(error).__name__)
        self.count(kind)
        if error.errno not in NO_ROOM | _NOT_THE_ROOTS:
            call.failed(kind)

    def _reads_turned(self, turn: Turn) -> None:
        if turn.state is BreakerState.OPEN and turn.was is BreakerState.HALF_OPEN:
            log.info("root %s stays stopped (%s)", self._path, turn.why)
        elif turn.state is BreakerState.OPEN:
            self.count("stopped")
            log.warning(
                "root %s is stopped (reads: %s): they fail at once and writes go to the next root; a try in %g s",
                self._path, turn.why, self._retry_ns / 1e9,
            )  # fmt: skip
        elif turn.state is BreakerState.HALF_OPEN:
            log.info("root %s: one read is tried", self._path)
        else:
            log.warning("root %s works again, after %.1f s", self._path, turn.lasted_ns / 1e9)
            self._works_again()

    def _writes_turned(self, turn: Turn) -> None:
        if turn.state is BreakerState.OPEN and turn.was is BreakerState.HALF_OPEN:
            log.info("root %s: writes stay stopped (%s)", self._path, turn.why)
        elif turn.state is BreakerState.OPEN:
            self.count("writes stopped")
            log.warning(
                "root %s: writes are stopped (%s) and go to the next root; a try in %g s",
                self._path, turn.why, self._retry_ns / 1e9,
            )  # fmt: skip
        elif turn.state is BreakerState.HALF_OPEN:
            log.info("root %s: one write is tried", self._path)
        else:
            log.warning("root %s: writes work again, after %.1f s", self._path, turn.lasted_ns / 1e9)
