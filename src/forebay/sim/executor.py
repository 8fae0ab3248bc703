"""Jobs under virtual time: the same work, charged by a cost model instead of by the hardware.

Deterministic: jobs end in the order of (end time, submission). The work itself runs at the job's virtual end, on the
caller's thread.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence

from forebay.ports import Work
from forebay.sim.device import Device, DeviceModel, Span
from forebay.types import Channel, Job, JobKind, JobResult


class SimExecutor:
    """Each place of a tier with a device model is one such device, for reads and writes together.

    Elsewhere each kind of work on each place is a lane that serves one job at a time, in order, at a cost in ns.
    """

    def __init__(self, cost_ns: Callable[[Job], int], devices: Mapping[str, DeviceModel] | None = None) -> None:
        """`devices`: by the tier's name."""
        self._cost_ns, self._models = cost_ns, dict(devices or {})
        self._now_ns = 0
        self._submitted = 0
        self._busy_until_ns: dict[tuple[str, JobKind, int], int] = {}
        self._devices: dict[Channel, Device] = {}
        self._running: list[tuple[int, int, int, Job, Work]] = []

    def now_ns(self) -> int:
        return self._now_ns

    def submit(self, job: Job, work: Work) -> None:
        span = self._serve(job)
        self._submitted += 1
        heapq.heappush(self._running, (span.ended_ns, self._submitted, span.started_ns, job, work))

    def _serve(self, job: Job) -> Span:
        model = self._models.get(job.tier)
        if model is not None:
            return self._devices.setdefault(job.channel, Device(model)).serve(job, self._now_ns)
        lane = (job.tier, job.kind, job.route)
        started_ns = max(self._now_ns, self._busy_until_ns.get(lane, 0))
        ended_ns = self._busy_until_ns[lane] = started_ns + self._cost_ns(job)
        return Span(started_ns, ended_ns)

    def poll(self) -> Sequence[JobResult]:
        results: list[JobResult] = []
        while self._running and self._running[0][0] <= self._now_ns:
            ended_ns, _, started_ns, job, work = heapq.heappop(self._running)
            results.append(JobResult(job, work(), started_ns, ended_ns))
        return results

    def give_up(self, job: Job) -> None:
        """Later jobs are served as if a substitute had taken its lane over."""
        self._busy_until_ns.pop((job.tier, job.kind, job.route), None)

    def wait(self, until_ns: int) -> None:
        """Advance the clock to the end of the next job, or to `until_ns` if that comes first."""
        next_ns = self._running[0][0] if self._running else until_ns
        self._now_ns = max(self._now_ns, min(next_ns, until_ns))

    def close(self) -> None:
        """Nothing to release."""
