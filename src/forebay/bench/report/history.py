"""The log of the stability gate, folded into a few hundred intervals: what a picture of three days can show."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec
import numpy as np

from forebay.bench.gates.stability.log import Line, Look, Sample, Strike
from forebay.bench.gates.stability.options import FaultKind
from forebay.errors import ConfigError

MOST_INTERVALS = 400
_DECODER = msgspec.json.Decoder(Line)


@dataclass(frozen=True, slots=True)
class Interval:
    """None: nothing of the kind was seen in it."""

    ends_s: float
    """Seconds of load."""
    p50_s: float | None
    """Of loads from disk."""
    p99_s: float | None
    rss_bytes: int | None
    """Of the largest worker."""
    pool_bytes: int | None
    """The most that was seen."""


@dataclass(frozen=True, slots=True)
class History:
    gate: str
    intervals: tuple[Interval, ...]
    strikes_s: tuple[float, ...]
    """When faults began."""
    strikes: dict[FaultKind, int]
    """How many of each kind."""


@dataclass(slots=True)
class _Seen:
    loads_s: array[float] = field(default_factory=lambda: array("f"))
    rss_bytes: int | None = None
    pool_bytes: int | None = None

    def merge(self, other: _Seen) -> None:
        self.loads_s.extend(other.loads_s)
        self.rss_bytes = _larger(self.rss_bytes, other.rss_bytes)
        self.pool_bytes = _larger(self.pool_bytes, other.pool_bytes)


def history_of(gate: str, lines: Iterable[bytes]) -> History:
    """One pass over the log, however long. A last line that was cut short is left out.

    Raises ConfigError for another line that cannot be read.
    """
    seen: dict[int, _Seen] = {}
    length_s, strikes_s, kinds = 1.0, list[float](), Counter[FaultKind]()
    for number, text in enumerate(lines, 1):
        line = _decoded(gate, number, text)
        match line:
            case Sample():
                found = _Seen(array("f", line.report.disk_load_s), rss_bytes=line.report.rss_bytes)
            case Look():
                found = _Seen(pool_bytes=line.pool_bytes)
            case Strike():
                strikes_s.append(line.elapsed_s)
                kinds[line.kind] += 1
                continue
            case _:
                continue
        while line.elapsed_s >= MOST_INTERVALS * length_s:
            length_s, seen = 2 * length_s, _halved(seen)
        seen.setdefault(int(line.elapsed_s / length_s), _Seen()).merge(found)
    intervals = tuple(_interval((number + 1) * length_s, each) for number, each in sorted(seen.items()))
    return History(gate, intervals, tuple(strikes_s), dict(kinds))


def _decoded(gate: str, number: int, text: bytes) -> Line | None:
    if not text.endswith(b"\n"):
        return None
    try:
        line: Line = _DECODER.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"the log of {gate} cannot be read at line {number}: {error}") from None
    if not 0 <= line.elapsed_s < 1e9:
        raise ConfigError(f"the log of {gate} has a time that cannot be, in line {number}")
    return line


def _halved(seen: dict[int, _Seen]) -> dict[int, _Seen]:
    """Intervals twice as long."""
    found: dict[int, _Seen] = {}
    for number, each in seen.items():
        found.setdefault(number // 2, _Seen()).merge(each)
    return found


def _interval(ends_s: float, seen: _Seen) -> Interval:
    p50_s, p99_s = np.quantile(seen.loads_s, (0.5, 0.99)) if seen.loads_s else (None, None)
    return Interval(
        ends_s=ends_s,
        p50_s=None if p50_s is None else float(p50_s),
        p99_s=None if p99_s is None else float(p99_s),
        rss_bytes=seen.rss_bytes,
        pool_bytes=seen.pool_bytes,
    )


def _larger(one: int | None, other: int | None) -> int | None:
    return other if one is None else one if other is None else max(one, other)
