"""What a run of `forebay bench io` found, as it is written to JSON; and what follows from it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec

from forebay.bench.environment import Environment
from forebay.bench.evidence import Evidence, Verdict
from forebay.bench.io.options import Direction, IoOptions, Load

SCHEMA = "forebay-bench-io/1"
TIER = "tier"


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """What is compared with each other."""

    direction: Direction
    block_bytes: int
    depth: int
    """Blocks in flight."""

    @property
    def words(self) -> str:
        return f"{self.direction.value} of {block_text(self.block_bytes)}, {self.depth} in flight"


def block_text(block_bytes: int) -> str:
    """`512 KiB`, `2 MiB`: block sizes are powers of two."""
    for unit, name in ((2**20, "MiB"), (2**10, "KiB")):
        if block_bytes % unit == 0:
            return f"{block_bytes // unit} {name}"
    return f"{block_bytes} B"


class Pass(msgspec.Struct, frozen=True, kw_only=True):
    """One contestant moving one pass of blocks once."""

    cell: Cell
    contestant: str
    load: Load
    round: int
    moved_bytes: int
    wall_s: float
    core_s: float
    """User and system time of the process, the busy thread's own excepted."""
    others_cores: float
    """Cores that other processes kept busy meanwhile."""
    p50_s: float
    """Of one block, from asking for it to having it, with `depth` of them in flight."""
    p99_s: float
    worst_s: float | None = None
    """None in records of versions that did not write it."""

    @property
    def gb_per_s(self) -> float:
        return self.moved_bytes / 1e9 / self.wall_s


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Medians over the rounds; of the longest that a block took, the worst."""

    cell: Cell
    contestant: str
    load: Load
    gb_per_s: float
    core_s_per_gb: float
    p50_s: float
    p99_s: float
    worst_s: float | None = None


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """The tier in one cell: medians of ratios, each within one round."""

    cell: Cell
    gb_per_s: float
    """Of the tier in an idle process."""
    best_control: str
    """The control with the highest median rate."""
    to_best_control: float
    lowest: float
    highest: float
    to_threads: float
    """To plain threads, which use the same memory as the tier: fio has as many buffers as blocks in flight, which may
    stay in the processor's cache."""
    busy_to_idle: float | None = None
    """The tier beside a busy Python thread, to the tier in an idle process."""
    threads_busy_to_idle: float | None = None
    """The same of plain threads."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    schema: str = SCHEMA
    command: tuple[str, ...]
    began: str
    """UTC, ISO 8601."""
    options: IoOptions
    environment: Environment
    reads_by: str
    """Who reads in the tier, and why."""
    writes_by: str = ""
    access: tuple[str, ...]
    """Of each root: direct or buffered."""
    fio: str
    """Its version; or why it is missing."""
    passes: tuple[Pass, ...]
    summaries: tuple[Summary, ...]
    comparisons: tuple[Comparison, ...]
    checksum_core_s_per_gb: float = 0.0
    """What the tier's checksum alone takes of memory that no cache holds, here."""
    others_cores: float
    """Cores that other processes kept busy during the passes, on average: above a few tenths, distrust the figures."""
    evidence: Evidence
    written: dict[str, float] = {}
    """Of what each contestant wrote, the share that the device had written when it was said to be done; fio's engines
    together."""
    verdict: Verdict


def summarize(passes: Sequence[Pass]) -> tuple[Summary, ...]:
    groups: dict[tuple[Cell, str, Load], list[Pass]] = {}
    for each in passes:
        groups.setdefault((each.cell, each.contestant, each.load), []).append(each)
    return tuple(
        Summary(
            cell=cell,
            contestant=contestant,
            load=load,
            gb_per_s=statistics.median(each.gb_per_s for each in group),
            core_s_per_gb=statistics.median(each.core_s / (each.moved_bytes / 1e9) for each in group),
            p50_s=statistics.median(each.p50_s for each in group),
            p99_s=statistics.median(each.p99_s for each in group),
            worst_s=max((each.worst_s for each in group if each.worst_s is not None), default=None),
        )
        for (cell, contestant, load), group in groups.items()
    )


def compare(passes: Sequence[Pass], threads: str) -> tuple[Comparison, ...]:
    """Each cell's tier against its best control, round by round; `threads` is the name of the threaded control."""
    rates: dict[tuple[Cell, str, Load], dict[int, float]] = {}
    for each in passes:
        rates.setdefault((each.cell, each.contestant, each.load), {})[each.round] = each.gb_per_s
    found = []
    for cell in dict.fromkeys(each.cell for each in passes):
        controls = {
            name: statistics.median(by_round.values())
            for (of, name, load), by_round in rates.items()
            if of == cell and name != TIER and load is Load.IDLE
        }
        best = max(controls, key=lambda name: controls[name])
        ratios = _ratios(rates[cell, TIER, Load.IDLE], rates[cell, best, Load.IDLE])
        found.append(
            Comparison(
                cell=cell,
                gb_per_s=statistics.median(rates[cell, TIER, Load.IDLE].values()),
                best_control=best,
                to_best_control=statistics.median(ratios),
                lowest=min(ratios),
                highest=max(ratios),
                to_threads=statistics.median(_ratios(rates[cell, TIER, Load.IDLE], rates[cell, threads, Load.IDLE])),
                busy_to_idle=_busy_to_idle(rates, cell, TIER),
                threads_busy_to_idle=_busy_to_idle(rates, cell, threads),
            )
        )
    return tuple(found)


def _busy_to_idle(rates: dict[tuple[Cell, str, Load], dict[int, float]], cell: Cell, contestant: str) -> float | None:
    busy = rates.get((cell, contestant, Load.BUSY))
    return statistics.median(_ratios(busy, rates[cell, contestant, Load.IDLE])) if busy else None


def _ratios(ours: dict[int, float], theirs: dict[int, float]) -> list[float]:
    """Of the rounds that both have."""
    return [ours[at] / theirs[at] for at in ours.keys() & theirs.keys()]


class CurvePoint(msgspec.Struct, frozen=True, kw_only=True):
    direction: Direction
    block_bytes: int
    depth: int
    gb_per_s: float
    p50_s: float
    p99_s: float


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """How a device behaves beneath the tier, for a model of it."""

    schema: str = "forebay-device-curve/1"
    device: str
    filesystem: str
    began: str
    validity: str
    points: tuple[CurvePoint, ...]


def curve_of(record: Record) -> Curve:
    """The tier's own medians in an idle process."""
    medium = record.evidence.medium
    return Curve(
        device=medium.device or medium.source,
        filesystem=medium.filesystem,
        began=record.began,
        validity=record.verdict.validity.value,
        points=tuple(
            CurvePoint(
                direction=each.cell.direction,
                block_bytes=each.cell.block_bytes,
                depth=each.cell.depth,
                gb_per_s=each.gb_per_s,
                p50_s=each.p50_s,
                p99_s=each.p99_s,
            )
            for each in record.summaries
            if each.contestant == TIER and each.load is Load.IDLE
        ),
    )
