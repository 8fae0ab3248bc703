"""Jobs on real threads: one small group of threads for each kind of work on each place of each tier.

Separate groups, so that a slow write cannot hold up a read, nor one disk another. The threads are daemons: a read that
never returns must not keep the host's process from exiting.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Mapping, Sequence

from forebay.ports import Work
from forebay.types import BlockKey, Job, JobId, JobKind, JobResult, Outcome

log = logging.getLogger("forebay.executor")

_MOST_SPARE_THREADS = 8
"""Threads that a group may get beyond its own, each in place of one that hangs in a job that was given up."""


class _Lane:
    """Threads that take jobs from one queue, first come, first served."""

    def __init__(self, executor: ThreadExecutor, name: str) -> None:
        self._executor, self._name = executor, name
        self._jobs: queue.SimpleQueue[tuple[Job, Work] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self.spares = 0

    def submit(self, job: Job, work: Work) -> None:
        self._jobs.put((job, work))

    @property
    def threads(self) -> int:
        return len(self._threads)

    def add_thread(self) -> None:
        """Raises RuntimeError when the system has no thread to give."""
        thread = threading.Thread(target=self._serve, name=f"{self._name}-{len(self._threads)}", daemon=True)
        thread.start()
        self._threads.append(thread)

    def close(self, until_s: float) -> int:
        """End the threads after what is queued; returns how many still hang when the time is up."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        return sum(thread.is_alive() for thread in self._threads)

    def _serve(self) -> None:
        while (entry := self._jobs.get()) is not None:
            self._executor.run(*entry)
            del entry  # an idle thread must not keep the views of its last job alive


class ThreadExecutor:
    """`threads_per_lane` jobs of one kind on one place at a time; a job is itself parallel inside its tier."""

    def __init__(self, threads_per_lane: int = 2, close_within_s: float = 30.0) -> None:
        self._threads_per_lane, self._close_within_s = threads_per_lane, close_within_s
        self._pid = os.getpid()
        self._lanes: dict[tuple[str, JobKind, int], _Lane] = {}
        self._ended: queue.SimpleQueue[JobResult] = queue.SimpleQueue()
        self._collected: list[JobResult] = []
        self._given_up: dict[JobId, _Lane] = {}
        self._closed = False

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def submit(self, job: Job, work: Work) -> None:
        if os.getpid() != self._pid:  # a fork has no threads: everything is a miss there, at once
            self._end(job, _failed(job), self.now_ns())
            return
        try:
            self._lane_of(job).submit(job, work)
        except RuntimeError as error:  # no thread to be had, or closed
            log.error("no thread for a %s on %s: %s", job.kind.value, job.tier, error)
            self._end(job, _failed(job), self.now_ns())

    def _lane_of(self, job: Job) -> _Lane:
        """A lane with at least one thread."""
        if self._closed:
            raise RuntimeError("the executor is closed")
        place = (job.tier, job.kind, job.route)
        lane = self._lanes.get(place)
        if lane is None:
            lane = self._lanes[place] = _Lane(self, f"forebay-{job.tier}-{job.kind.value}-{job.route}")
        if lane.threads < self._threads_per_lane:
            try:
                lane.add_thread()
            except RuntimeError:
                if not lane.threads:
                    raise
        return lane

    def run(self, job: Job, work: Work) -> None:
        """On a lane's thread."""
        started_ns = self.now_ns()
        try:
            outcomes = work()
        except BaseException:  # a broken tier must cost a recompute, not the host engine or a job that never ends
            log.exception("%s on %s failed for all of its %d blocks", job.kind.value, job.tier, len(job.keys))
            outcomes = _failed(job)
        self._end(job, outcomes, started_ns)

    def _end(self, job: Job, outcomes: Mapping[BlockKey, Outcome], started_ns: int) -> None:
        self._ended.put(JobResult(job, outcomes, started_ns, self.now_ns()))

    def give_up(self, job: Job) -> None:
        """The thread that hangs in it gets a substitute, as far as there are spares."""
        lane = self._lanes.get((job.tier, job.kind, job.route))
        if lane is None:
            return
        self._given_up[job.job_id] = lane
        if lane.spares == _MOST_SPARE_THREADS:
            return
        try:
            lane.add_thread()
            lane.spares += 1
        except RuntimeError as error:
            log.error("no spare thread for a %s on %s: %s", job.kind.value, job.tier, error)

    def poll(self) -> Sequence[JobResult]:
        results, self._collected = self._collected, []
        try:
            while True:
                results.append(self._ended.get_nowait())
        except queue.Empty:
            pass
        for result in results if self._given_up else ():
            self._given_up.pop(result.job.job_id, None)
        return results

    def wait(self, until_ns: int) -> None:
        if self._collected:
            return
        try:
            timeout_s = min(max(0, until_ns - self.now_ns()) / 1e9, threading.TIMEOUT_MAX)
            self._collected.append(self._ended.get(timeout=timeout_s))
        except queue.Empty:
            return

    def close(self) -> None:
        """Waits for running jobs, but not where some were given up, nor longer than `close_within_s`."""
        self._closed = True
        hung = {id(lane) for lane in self._given_up.values()}
        until_s = time.monotonic() + self._close_within_s
        hanging = sum(lane.close(0.0 if id(lane) in hung else until_s) for lane in self._lanes.values())
        if hanging:
            log.error("%d I/O threads still hang in a tier: they are left behind", hanging)


def _failed(job: Job) -> dict[BlockKey, Outcome]:
    return dict.fromkeys((*job.keys, *job.evicts), Outcome.FAILED)
