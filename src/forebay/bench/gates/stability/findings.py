"""The log folded into checks. The same fold judges while the gate runs, after a resumption, and at the end."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from forebay.bench.evidence import Medium
from forebay.bench.gates.stability.faults import Fault, is_quiet
from forebay.bench.gates.stability.log import (
    Closing,
    GateError,
    Line,
    Look,
    Report,
    Resumed,
    Sample,
    Strike,
    WorkerEnded,
    WorkerStuck,
)
from forebay.bench.gates.stability.options import BLOCK_TOKENS, FaultKind, Options
from forebay.bench.gates.verdicts import Bound, Check, Outcome, check

_LEAST_LATENCIES = 20
"""In each window, for a p99 to be compared."""
_WARM_SAMPLES = 3
"""Their median is what later ones are compared with."""
_MOST_WORDS = 5

_ALWAYS_EXPECTED = {"file read missing", "file write full"}
"""A full pool that several processes evict from."""
_GONE = {
    "file vanished", "file returned", "file ENOENT", "file read failed", "file read missing", "file write failed",
    "file write full", "file stopped", "file writes stopped",
}  # fmt: skip
_PULLED = {f"file {name}" for name in ("EIO", "ENODEV", "ENXIO", "EROFS", "hung", "read late")}
"""What a device that goes answers with, before its directory is gone; and what a file system does then."""
_EXPECTED = {
    FaultKind.KILL: set[str](),
    FaultKind.FULL: {"file ENOSPC", "file write failed", "file write full", "file writes stopped"},
    FaultKind.SLOW: {
        "file hung", "file read failed", "file write failed", "file stopped", "file writes stopped", "file read late",
    },
    FaultKind.LOST: _GONE,
    FaultKind.PULLED: _GONE | _PULLED,
}  # fmt: skip
_SEEN_BY = {FaultKind.FULL: "file ENOSPC", FaultKind.LOST: "file vanished"}
"""Kind of error by which the product shows that a fault has reached it."""


@dataclass(slots=True)
class _Growth:
    """Of one gauge of one worker, over what it was when warm."""

    warm: list[int] = field(default_factory=list)
    base: int | None = None
    most: int | None = None

    def add(self, value: int, is_warm: bool) -> None:
        if not is_warm:
            return
        if self.base is None:
            self.warm.append(value)
            if len(self.warm) == _WARM_SAMPLES:
                self.base = sorted(self.warm)[_WARM_SAMPLES // 2]
            return
        self.most = max(self.most or 0, value - self.base)


class Findings:
    """`add` each line of the log; `checks` at any time. Limits are those of the options."""

    def __init__(self, options: Options, faults: Sequence[Fault]) -> None:
        self._options, self._faults = options, faults
        self.elapsed_s = 0.0
        self.starts = 0
        self.incarnations = 0
        self.closing: Closing | None = None
        self.media: tuple[Medium, ...] = ()
        """Under each root, when the gate was last gone on with."""
        self._doubt = ""
        """Why a root is no disk."""
        self.struck = 0
        """Faults that have begun."""
        self._sums: Counter[str] = Counter()
        self._rests = 0
        self._unsound: list[str] = []
        self._unsound_rests = 0
        self._errors: Counter[str] = Counter()
        self._unexpected: Counter[str] = Counter()
        """Those that no fault at the time explains."""
        self._slow_loads = 0
        self._rss: dict[int, _Growth] = {}
        self._descriptors: dict[int, _Growth] = {}
        self._most_pool_bytes: int | None = None
        self._kills = 0
        self._crashes: list[str] = []
        self._first_s, self._last_s = array("d"), array("d")
        self._last_loads = [0] * options.workers
        """From disk in the last window, of each worker."""

    def add(self, line: Line) -> None:
        self.elapsed_s = max(self.elapsed_s, line.elapsed_s)
        match line:
            case Resumed():
                self.starts += 1
                self.media = line.media
                self._doubt = next((each.doubt for each in line.media if each.doubt), self._doubt)
            case GateError():
                self._errors[f"gate {line.kind}"] += 1
            case Sample():
                self.incarnations = max(self.incarnations, line.incarnation + 1)
                self._add_report(line, line.report)
            case Look():
                self._most_pool_bytes = max(self._most_pool_bytes or 0, line.pool_bytes)
            case Strike():
                self.struck = max(self.struck, line.number + 1)
            case WorkerEnded():
                self.incarnations = max(self.incarnations, line.incarnation + 1)
                self._kills += line.was_asked and line.exit_code < 0
                if not line.was_asked or line.exit_code > 0:
                    self._crashes.append(f"worker {line.worker} ended with {line.exit_code}")
            case WorkerStuck():
                self.incarnations = max(self.incarnations, line.incarnation + 1)
                self._crashes.append(f"worker {line.worker} was killed and does not end: it waits for a device")
            case Closing():
                self.closing = line

    def _add_report(self, sample: Sample, report: Report) -> None:
        self._rests += 1
        for name in ("loads", "disk_loads", "disk_blocks", "wrong_blocks", "wrong_bytes"):
            self._sums[name] += getattr(report, name)
        self._errors.update(report.errors)
        expected = self._expected(sample.elapsed_s - report.covers_s, sample.elapsed_s)
        self._unexpected.update({kind: count for kind, count in report.errors.items() if kind not in expected})
        if report.unsound:
            self._unsound_rests += 1
            self._unsound += (f"worker {sample.worker}: {words}" for words in report.unsound)
            del self._unsound[_MOST_WORDS:]
        is_warm = report.age_s >= self._options.warmup_s
        self._rss.setdefault(sample.incarnation, _Growth()).add(report.rss_bytes, is_warm)
        self._descriptors.setdefault(sample.incarnation, _Growth()).add(report.descriptors, is_warm)
        if sample.elapsed_s > self._options.duration_s - self._options.window_s:
            self._last_loads[sample.worker] += report.disk_loads
        self._add_latencies(sample.elapsed_s - report.covers_s, sample.elapsed_s, report.disk_load_s)

    def _add_latencies(self, from_s: float, to_s: float, latencies_s: Sequence[float]) -> None:
        options = self._options
        slow = [fault for fault in self._faults if fault.kind is FaultKind.SLOW]
        if not is_quiet(slow, from_s, to_s, 0.0):
            self._slow_loads += sum(each >= options.slow_s for each in latencies_s)
        if from_s < options.warmup_s or not is_quiet(self._faults, from_s, to_s, options.settle_s):
            return
        if to_s <= options.warmup_s + options.window_s:
            self._first_s.extend(latencies_s)
        if from_s >= options.duration_s - options.window_s - options.rest_s:
            self._last_s.extend(latencies_s)

    # --- verdicts

    @property
    def lost_cause(self) -> str:
        """Why the gate cannot pass any more whatever comes; empty as long as it can."""
        if self._doubt:
            return self._doubt
        final = [each for each in self._settled() if each.outcome is Outcome.FAIL]
        return (
            f"{final[0].name}: {final[0].measured:g} is not {final[0].bound.value} {final[0].limit:g}" if final else ""
        )

    def checks(self) -> tuple[Check, ...]:
        return (*self._settled(), *self._open())

    def _settled(self) -> Iterator[Check]:
        """Those that can only become worse."""
        on_disk = sum(not medium.doubt for medium in self.media) if self.starts else None
        yield check("roots_on_disk", on_disk, Bound.EQUAL, len(self._options.roots), "count", invalid=self._doubt)
        limits, sums = self._options.limits, self._sums
        was_loaded = sums["disk_blocks"] > 0
        wrong_tokens = sums["wrong_blocks"] * BLOCK_TOKENS
        yield self._none("wrong_bytes", sums["wrong_bytes"] if was_loaded else None, "bytes")
        yield self._none("wrong_tokens", wrong_tokens if was_loaded else None, "tokens")
        yield self._none(
            "unsound_rests", self._unsound_rests if self._rests else None, "count", "; ".join(self._unsound)
        )
        crashes = len(self._crashes) if self._rests or self._crashes else None
        yield self._none("crashes", crashes, "count", "; ".join(self._crashes[:3]))
        words = ", ".join(f"{kind}: {count}" for kind, count in sorted(self._unexpected.items()))
        yield self._none("unexpected_errors", self._unexpected.total() if self._rests else None, "count", words)
        yield check("rss_growth", _most(self._rss), Bound.AT_MOST, limits.rss_growth_bytes, "bytes")
        yield check("descriptor_growth", _most(self._descriptors), Bound.AT_MOST, limits.descriptor_growth, "count")
        yield check("pool_bytes", self._most_pool_bytes, Bound.AT_MOST, self._options.capacity_bytes, "bytes")

    def _open(self) -> Iterator[Check]:
        """Those that are known at the end only."""
        options, closing = self._options, self.closing
        miscounted = abs(closing.files_bytes - closing.counted_bytes) if closing else None
        yield self._none("miscounted_bytes", miscounted, "bytes")
        yield self._none("temporary_files_left", closing.temporary_files if closing else None, "count")
        yield self._none("shm_segments_left", closing.shm_segments if closing else None, "count")
        yield self._drift()
        loads, least = self._sums["disk_loads"], options.limits.least_loads
        yield check("disk_loads", loads, Bound.AT_LEAST, least, "count", invalid=self._doubt)
        for worker, loads in enumerate(self._last_loads):
            measured = loads if self.elapsed_s >= options.duration_s else None
            yield check(f"last_disk_loads@worker {worker}", measured, Bound.AT_LEAST, 1, "count")
        yield check("load_time", self.elapsed_s, Bound.AT_LEAST, options.duration_s, "s", invalid=self._doubt)
        for kind in dict.fromkeys(fault.kind for fault in self._faults):
            seen = self._seen(kind)
            invalid = "" if seen else "the fault did not reach the product: nothing is known of it"
            yield check(f"fault_seen@{kind.value}", seen, Bound.AT_LEAST, 1, "count", invalid=invalid)

    def _drift(self) -> Check:
        lacking = [
            f"{len(values)} loads in the {name} window, {_LEAST_LATENCIES} are needed"
            for name, values in (("first", self._first_s), ("last", self._last_s))
            if len(values) < _LEAST_LATENCIES
        ]
        drift = None if lacking else _p99(self._last_s) / _p99(self._first_s)
        return check("p99_drift", drift, Bound.AT_MOST, self._options.limits.p99_drift, "x", invalid="; ".join(lacking))

    def _seen(self, kind: FaultKind) -> int:
        if kind is FaultKind.KILL:
            return self._kills
        if kind is FaultKind.PULLED:
            return sum(self._errors[each] for each in _PULLED | {"file vanished"})
        return self._slow_loads if kind is FaultKind.SLOW else self._errors[_SEEN_BY[kind]]

    def _expected(self, from_s: float, to_s: float) -> set[str]:
        """Kinds that the faults of this time explain: each from its begin until all has settled and come to rest."""
        settle_s = self._options.settle_s + self._options.rest_s
        struck = [fault for fault in self._faults[: self.struck] if not is_quiet([fault], from_s, to_s, settle_s)]
        return _ALWAYS_EXPECTED.union(*(_EXPECTED[fault.kind] for fault in struck))

    def _none(self, name: str, measured: int | None, unit: str, words: str = "") -> Check:
        found = check(name, measured, Bound.EQUAL, 0, unit)
        if found.outcome is not Outcome.FAIL or not words:
            return found
        return Check(
            name=name, measured=measured, bound=Bound.EQUAL, limit=0, unit=unit, outcome=Outcome.FAIL, why=words
        )

    @property
    def summary(self) -> str:
        sums = self._sums
        return (
            f"{sums['loads']:,} loads, {sums['disk_loads']:,} from disk, {sums['wrong_bytes']} wrong bytes, "
            f"{self.struck} faults"
        )

    @property
    def errors(self) -> dict[str, int]:
        """By kind, over all workers."""
        return dict(sorted(self._errors.items()))


def _most(growths: dict[int, _Growth]) -> int | None:
    return max((each.most for each in growths.values() if each.most is not None), default=None)


def _p99(values: array[float]) -> float:
    return float(np.percentile(np.frombuffer(values), 99))
