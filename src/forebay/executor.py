"""Jobs on real threads: one small group of threads for each kind of work on each place of each tier.

Separate groups, so that a slow write cannot hold up a read, nor one disk another.
"""

from __future__ import annotations

import logging
import os
import queue
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from forebay.ports import Work
from forebay.types import BlockKey, Job, JobId, JobKind, JobResult, Outcome

log = logging.getLogger("forebay.executor")


class ThreadExecutor:
    """`threads_per_lane` jobs of one kind on one tier at a time; a job is itself parallel inside its tier."""

    def __init__(self, threads_per_lane: int = 2) -> None:
        self._threads_per_lane = threads_per_lane
        self._pid = os.getpid()
        self._lanes: dict[tuple[str, JobKind, int], ThreadPoolExecutor] = {}
        self._ended: queue.SimpleQueue[JobResult] = queue.SimpleQueue()
        self._collected: list[JobResult] = []
        self._refused: set[JobId] = set()
        """Jobs that have ended as failed because no thread could be started for them."""

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def submit(self, job: Job, work: Work) -> None:
        if os.getpid() != self._pid:  # a fork has no threads: everything is a miss there, at once
            self._end(job, _failed(job), self.now_ns())
            return
        place = (job.tier, job.kind, job.route)
        lane = self._lanes.get(place)
        if lane is None:
            name = f"forebay-{job.tier}-{job.kind.value}-{job.route}"
            lane = ThreadPoolExecutor(self._threads_per_lane, thread_name_prefix=name)
            self._lanes[place] = lane
        try:
            lane.submit(self._run, job, work)
        except RuntimeError as error:  # no thread to be had, or closed; a job that was queued all the same must not run
            log.error("no thread for a %s on %s: %s", job.kind.value, job.tier, error)
            self._refused.add(job.job_id)
            self._end(job, _failed(job), self.now_ns())

    def _run(self, job: Job, work: Work) -> None:
        if job.job_id in self._refused:
            return
        started_ns = self.now_ns()
        try:
            outcomes = work()
        except BaseException:  # a broken tier must cost a recompute, not the host engine or a job that never ends
            log.exception("%s on %s failed for all of its %d blocks", job.kind.value, job.tier, len(job.keys))
            outcomes = _failed(job)
        self._end(job, outcomes, started_ns)

    def _end(self, job: Job, outcomes: Mapping[BlockKey, Outcome], started_ns: int) -> None:
        self._ended.put(JobResult(job, outcomes, started_ns, self.now_ns()))

    def poll(self) -> Sequence[JobResult]:
        results, self._collected = self._collected, []
        try:
            while True:
                results.append(self._ended.get_nowait())
        except queue.Empty:
            return results

    def wait(self, until_ns: int) -> None:
        if self._collected:
            return
        try:
            self._collected.append(self._ended.get(timeout=max(0, until_ns - self.now_ns()) / 1e9))
        except queue.Empty:
            return

    def close(self) -> None:
        for lane in self._lanes.values():
            lane.shutdown(wait=True)


def _failed(job: Job) -> dict[BlockKey, Outcome]:
    return dict.fromkeys((*job.keys, *job.evicts), Outcome.FAILED)
