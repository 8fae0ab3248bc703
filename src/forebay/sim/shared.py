"""One virtual clock for several engines: each has a seat, and whoever owns the clock moves it for all of them."""

from __future__ import annotations

from collections.abc import Sequence

from forebay.ports import Work
from forebay.sim.executor import SimExecutor
from forebay.types import Job, JobResult


class Seat:
    """An `Executor` whose `wait` only says until when: the clock is not this engine's alone."""

    def __init__(self, clock: SharedClock) -> None:
        self._clock = clock
        self.wakes_ns: int | None = None
        """When the engine wants to be polled, if nothing of its own ends before."""
        self._ended: list[JobResult] = []

    def now_ns(self) -> int:
        return self._clock.now_ns()

    def submit(self, job: Job, work: Work) -> None:
        self._clock.submit(self, job, work)

    def poll(self) -> Sequence[JobResult]:
        self._clock.collect()
        ended, self._ended = self._ended, []
        return ended

    def give_up(self, job: Job) -> None:
        self._clock.give_up(job)

    def wait(self, until_ns: int) -> None:
        self.wakes_ns = until_ns

    def close(self) -> None:
        """Nothing to release."""

    def take(self, result: JobResult) -> None:
        self._ended.append(result)


class SharedClock:
    """Engines with seats here see one time, and share the devices of one executor."""

    def __init__(self, executor: SimExecutor) -> None:
        self._executor = executor
        self._seats: list[Seat] = []
        self._owners: dict[int, Seat] = {}
        """Of running jobs, by their identity: engines number their jobs alike."""

    def seat(self) -> Seat:
        self._seats.append(Seat(self))
        return self._seats[-1]

    def now_ns(self) -> int:
        return self._executor.now_ns()

    def submit(self, seat: Seat, job: Job, work: Work) -> None:
        self._owners[id(job)] = seat
        self._executor.submit(job, work)

    def give_up(self, job: Job) -> None:
        self._executor.give_up(job)

    def collect(self) -> None:
        """Give what has ended to those who wait for it."""
        for result in self._executor.poll():
            self._owners.pop(id(result.job)).take(result)

    def advance(self, until_ns: int) -> None:
        """To the end of the next job, the first time at which an engine wants to be polled, or `until_ns`."""
        wakes = [seat.wakes_ns for seat in self._seats if seat.wakes_ns is not None]
        self._executor.wait(min([until_ns, *wakes]))
        for seat in self._seats:
            seat.wakes_ns = None
