"""Whether a device is asked at all: a circuit breaker over calls that fail or hang.

A pure state machine over a clock that is passed in. Who makes the calls, and what a refused one means, is `root.py`'s
business. The pattern: Nygard, "Release It!", 2007, chapter 5.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from types import TracebackType


class BreakerState(Enum):
    CLOSED = "closed"
    """Every call is made."""
    OPEN = "open"
    """No call is made."""
    HALF_OPEN = "half-open"
    """One call is being tried; no other is made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerLimits:
    failures_in_a_row: int
    hang_ns: int
    """A call in flight for longer than this is hung."""
    retry_ns: int
    """From the opening to the next try."""
    threads: int
    """Threads that make these calls. A try needs a free one: else it would queue up behind the calls that hang."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A change of state, for the log."""

    was: BreakerState
    state: BreakerState
    why: str
    lasted_ns: int
    """How long the breaker had not been closed, when it closes; else 0."""


class Call:
    """One call to the device, as a context. Made by `Breaker.call`, used by one thread."""

    __slots__ = ("_breaker", "began_ns", "failure", "is_glance", "is_hung", "is_trial", "refused")

    def __init__(self, breaker: Breaker, began_ns: int) -> None:
        self._breaker = breaker
        self.began_ns = began_ns
        self.is_trial, self.is_glance = False, False
        self.refused = False
        """The breaker is open: leave the device alone."""
        self.is_hung = False
        self.failure = ""

    def failed(self, why: str) -> None:
        """The device is to blame. A call that never says so has worked."""
        self.failure = why

    def __enter__(self) -> Call:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if not self.refused:
            self._breaker._end(self)


class Breaker:
    """CLOSED --`failures_in_a_row`, or a call that hangs--> OPEN
    OPEN --`retry_ns` later, or once a call that hung has ended well--> HALF_OPEN, for the next call
    HALF_OPEN --that call worked--> CLOSED, --it failed or hangs--> OPEN

    Thread-safe. Hung calls are noticed by whoever comes next, since those who make them cannot. `turned` and `hung` are
    called on that thread, outside the lock, at each change of state and once for each call that hangs.
    """

    def __init__(
        self,
        limits: BreakerLimits,
        clock_ns: Callable[[], int],
        turned: Callable[[Turn], None],
        hung: Callable[[], None],
    ) -> None:
        self._limits = limits
        self._clock_ns = clock_ns
        self._turned, self._hung = turned, hung
        self._lock = threading.Lock()
        self._state = BreakerState.CLOSED
        self._why = ""
        self._in_flight: dict[Call, None] = {}
        """Oldest first."""
        self._failures = 0
        """In a row."""
        self._opened_ns = 0
        """When it was last closed before now."""
        self._retry_at_ns = 0
        self._turns: list[Turn] = []
        self._hangs = 0
        """Both: what is to be told once the lock is released."""

    def call(self) -> Call:
        """Begin a call: `with breaker.call() as call: ...`, unless it is `refused`."""
        now_ns = self._clock_ns()
        call = Call(self, now_ns)
        with self._lock:
            self._look(now_ns)
            call.is_trial = self._state is not BreakerState.CLOSED
            call.refused = call.is_trial and not self._may_try(now_ns)
            if not call.refused:
                self._in_flight[call] = None
                if call.is_trial:
                    self._turn(BreakerState.HALF_OPEN, self._why, now_ns)
        self._tell()
        return call

    def glance(self) -> Call:
        """Begin a call that the system may answer from its memory: if it works, that says nothing of the device.

        If it fails or hangs, that counts. It is never the one that is tried.
        """
        now_ns = self._clock_ns()
        call = Call(self, now_ns)
        call.is_glance = True
        with self._lock:
            self._look(now_ns)
            call.refused = self._state is not BreakerState.CLOSED
            if not call.refused:
                self._in_flight[call] = None
        self._tell()
        return call

    def refuses(self) -> bool:
        """Whether a call begun now would be refused. To be asked before work is queued where it could get stuck."""
        return self.state is not BreakerState.CLOSED and not self.is_due()

    def is_due(self) -> bool:
        """Whether it is time for a try."""
        now_ns = self._clock_ns()
        with self._lock:
            return self._may_try(now_ns)

    def trip(self, why: str) -> None:
        """Open it, whatever the calls so far."""
        now_ns = self._clock_ns()
        with self._lock:
            self._open(why, now_ns)
        self._tell()

    @property
    def state(self) -> BreakerState:
        now_ns = self._clock_ns()
        with self._lock:
            self._look(now_ns)
            state = self._state
        self._tell()
        return state

    @property
    def why(self) -> str:
        """Why it is not closed; empty when it is."""
        return self._why

    # --- under the lock, except `_tell`

    def _end(self, call: Call) -> None:
        now_ns = self._clock_ns()
        with self._lock:
            self._look(now_ns)
            del self._in_flight[call]
            if call.failure:
                self._failed(call, now_ns)
            else:
                self._worked(call, now_ns)
        self._tell()

    def _failed(self, call: Call, now_ns: int) -> None:
        self._failures += 1
        if self._state is BreakerState.HALF_OPEN and call.is_trial:
            self._open(call.failure, now_ns)
        elif self._state is BreakerState.CLOSED and self._failures >= self._limits.failures_in_a_row:
            self._open(f"{self._failures} in a row failed, the last with {call.failure}", now_ns)

    def _worked(self, call: Call, now_ns: int) -> None:
        if self._state is BreakerState.CLOSED:
            self._failures = self._failures if call.is_glance else 0
        elif call.is_hung:  # it answers again: no need to wait any longer before it is tried
            self._retry_at_ns = min(self._retry_at_ns, now_ns)
        elif call.is_trial and self._state is BreakerState.HALF_OPEN:
            self._failures = 0
            self._turn(BreakerState.CLOSED, "", now_ns)

    def _look(self, now_ns: int) -> None:
        """Notice what hangs."""
        for call in self._in_flight:
            if now_ns - call.began_ns <= self._limits.hang_ns:
                break
            if call.is_hung:
                continue
            call.is_hung = True
            self._hangs += 1
            if self._state is BreakerState.CLOSED or (call.is_trial and self._state is BreakerState.HALF_OPEN):
                self._open(f"one has not come back for {self._limits.hang_ns / 1e9:g} s", now_ns)

    def _may_try(self, now_ns: int) -> bool:
        has_thread = len(self._in_flight) < self._limits.threads
        return self._state is BreakerState.OPEN and now_ns >= self._retry_at_ns and has_thread

    def _open(self, why: str, now_ns: int) -> None:
        self._retry_at_ns = now_ns + self._limits.retry_ns
        self._turn(BreakerState.OPEN, why, now_ns)

    def _turn(self, state: BreakerState, why: str, now_ns: int) -> None:
        if self._state is BreakerState.CLOSED:
            self._opened_ns = now_ns
        lasted_ns = now_ns - self._opened_ns if state is BreakerState.CLOSED else 0
        turn = Turn(self._state, state, why, lasted_ns)
        self._state, self._why = state, why
        self._turns.append(turn)

    def _tell(self) -> None:
        if not self._turns and not self._hangs:
            return
        with self._lock:
            turns, self._turns = self._turns, []
            hangs, self._hangs = self._hangs, 0
        for _ in range(hangs):
            self._hung()
        for turn in turns:
            self._turned(turn)
