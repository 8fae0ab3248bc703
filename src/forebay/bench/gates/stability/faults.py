"""When which fault strikes. The same options give the same faults, so that a resumed gate goes on with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forebay.bench.gates.stability.options import FaultKind, Options


@dataclass(frozen=True, slots=True)
class Fault:
    """Times are seconds of load since the gate began."""

    number: int
    kind: FaultKind
    begins_s: float
    ends_s: float
    target: int
    """Worker that is killed, or root that is lost."""


def schedule(options: Options) -> tuple[Fault, ...]:
    """All faults of a gate, in order. None reaches into the first or the last window."""
    found: list[Fault] = []
    begins_s = options.warmup_s + options.window_s
    while options.faults and begins_s + options.fault_for_s + options.settle_s <= options.duration_s - options.window_s:
        kind = options.faults[len(found) % len(options.faults)]
        turn = len(found) // len(options.faults)
        target = _killed(turn, options.workers) if kind is FaultKind.KILL else turn % len(options.roots)
        ends_s = begins_s + (0.0 if kind is FaultKind.KILL else options.fault_for_s)
        found.append(Fault(len(found), kind, begins_s, ends_s, target))
        begins_s += max(options.fault_every_s, options.fault_for_s + options.settle_s)
    return tuple(found)


def _killed(turn: int, workers: int) -> int:
    """The first one only once, and soon: all of the time after that is one process's, in which a slow leak shows."""
    return 0 if turn == 0 else 1 + (turn - 1) % (workers - 1)


def is_quiet(faults: Sequence[Fault], from_s: float, to_s: float, settle_s: float) -> bool:
    """Whether no fault struck in this time, or shortly before."""
    return not any(fault.begins_s <= to_s and from_s <= fault.ends_s + settle_s for fault in faults)
