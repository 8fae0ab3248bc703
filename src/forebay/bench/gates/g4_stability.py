"""Gate G4: 72 hours, or any time, of mixed load with faults. No wrong byte, no leak, no drift, no overflow.

Real engines in processes of their own share one pool; they load, prove and store without an end, while one of them is
killed, the disk is full or slow, and a root goes and comes back. See `stability`.
"""

from __future__ import annotations

from dataclasses import dataclass

from forebay.bench.gates.gate import Found, Workplace
from forebay.bench.gates.stability.faults import schedule
from forebay.bench.gates.stability.options import FaultKind, Options, check_options
from forebay.bench.gates.stability.supervisor import PROGRESS_STEPS, Supervisor

__all__ = ["Options", "build"]


@dataclass(frozen=True, slots=True)
class StabilityGate:
    options: Options

    @property
    def steps(self) -> int:
        pulls = [fault for fault in schedule(self.options) if fault.kind is FaultKind.PULLED]
        return PROGRESS_STEPS + len(pulls)

    def run(self, work: Workplace) -> Found:
        """Goes on where the log in the workplace ends."""
        work.progress.begins("starting workers")
        return Supervisor(self.options, work).run()


def build(options: Options) -> StabilityGate:
    check_options(options)
    return StabilityGate(options)
