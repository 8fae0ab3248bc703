"""A storm's record: what each session waited, what both orders come to, and what may be claimed.

TTFT is here the time from the storm's beginning until a session is restored in full. Seconds and bytes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence

import msgspec

from forebay.bench.environment import Environment
from forebay.bench.evidence import Evidence, Verdict
from forebay.fairness import Order

ORDERED, SHARED = Order.FAIR_SOJOURN, Order.INTERLEAVED
LABELS = {ORDERED: "in order", SHARED: "fair sharing"}
MEAN_GOAL, P99_GOAL, BANDWIDTH_GOAL = 0.40, 0.05, 0.03
"""In order, against fair sharing: mean and p50 lower by this share, p99 higher and bandwidth lower by no more than."""


class Wave(msgspec.Struct, frozen=True, kw_only=True):
    """One storm in one order."""

    order: Order
    round: int
    restored_bytes: int
    ttft_s: tuple[float, ...]
    """Of each session, in the order in which they came."""
    short: tuple[int, ...] = ()
    """Which of them are the short ones, where lengths are mixed."""

    @property
    def whole_s(self) -> float:
        return max(self.ttft_s)

    @property
    def bytes_per_s(self) -> float:
        return self.restored_bytes / self.whole_s

    @property
    def short_s(self) -> tuple[float, ...]:
        return tuple(self.ttft_s[number] for number in self.short)

    @property
    def long_s(self) -> tuple[float, ...]:
        return tuple(found for number, found in enumerate(self.ttft_s) if number not in set(self.short))


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """One order over all rounds: medians of the rounds' figures."""

    order: Order
    mean_s: float
    p50_s: float
    p99_s: float
    bytes_per_s: float
    short_mean_s: float | None
    """Where lengths are mixed."""
    long_mean_s: float | None


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """In order over fair sharing: medians of the rounds' ratios, so that a machine that drifts cancels out."""

    mean: float
    p50: float
    p99: float
    bytes_per_s: float
    short_mean: float | None
    long_mean: float | None

    @property
    def missed(self) -> tuple[str, ...]:
        """The goals that were missed, and by how much. Of mixed lengths the short ones have to gain most."""
        found = []
        for name, ratio in (("mean", self.mean), ("p50", self.p50)):
            if ratio > 1 - MEAN_GOAL:
                found.append(f"{name} is {1 - ratio:.1%} lower, not {MEAN_GOAL:.0%}")
        if self.p99 > 1 + P99_GOAL:
            found.append(f"p99 is {self.p99 - 1:.1%} higher, not {P99_GOAL:.0%} at most")
        if self.bytes_per_s < 1 - BANDWIDTH_GOAL:
            found.append(f"bandwidth is {1 - self.bytes_per_s:.1%} lower, not {BANDWIDTH_GOAL:.0%} at most")
        if self.short_mean is not None and self.long_mean is not None and self.short_mean > self.long_mean:
            found.append(
                f"short sessions gain {1 - self.short_mean:.1%} and long ones {1 - self.long_mean:.1%}: short ones "
                f"have to gain most"
            )
        return tuple(found)


class Storm(msgspec.Struct, frozen=True, kw_only=True):
    """All rounds with one number of sessions."""

    sessions: int
    blocks: tuple[int, ...]
    """Of each session."""
    waves: tuple[Wave, ...]
    summaries: tuple[Summary, ...]
    comparison: Comparison
    missed: tuple[str, ...]
    """Goals that were missed; empty when all were met."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    created: str
    verdict: Verdict
    storms: tuple[Storm, ...]
    evidence: tuple[Evidence, ...]
    """Of each block device under the roots."""
    wrong_blocks: int
    options: dict[str, object]
    environment: Environment
    command: tuple[str, ...]


def percentile(values: Sequence[float], share: float) -> float:
    """By nearest rank: with fewer than 100 values, p99 is the largest."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def storm_of(blocks: Sequence[int], waves: Sequence[Wave]) -> Storm:
    comparison = _compare(waves)
    return Storm(
        sessions=len(blocks),
        blocks=tuple(blocks),
        waves=tuple(waves),
        summaries=tuple(_summarise(order, [wave for wave in waves if wave.order is order]) for order in LABELS),
        comparison=comparison,
        missed=comparison.missed,
    )


def _summarise(order: Order, waves: Sequence[Wave]) -> Summary:
    return Summary(
        order=order,
        mean_s=statistics.median(statistics.fmean(wave.ttft_s) for wave in waves),
        p50_s=statistics.median(percentile(wave.ttft_s, 0.5) for wave in waves),
        p99_s=statistics.median(percentile(wave.ttft_s, 0.99) for wave in waves),
        bytes_per_s=statistics.median(wave.bytes_per_s for wave in waves),
        short_mean_s=_median_mean(wave.short_s for wave in waves),
        long_mean_s=_median_mean(wave.long_s for wave in waves) if waves[0].short else None,
    )


def _median_mean(groups: Iterable[Sequence[float]]) -> float | None:
    means = [statistics.fmean(group) for group in groups if group]
    return statistics.median(means) if means else None


def _compare(waves: Sequence[Wave]) -> Comparison:
    of = {(wave.order, wave.round): wave for wave in waves}
    pairs = [(of[ORDERED, number], of[SHARED, number]) for number in sorted({wave.round for wave in waves})]

    def ratio(figure: Callable[[Wave], float]) -> float:
        return statistics.median(figure(ordered) / figure(shared) for ordered, shared in pairs)

    is_mixed = bool(waves[0].short)
    return Comparison(
        mean=ratio(lambda wave: statistics.fmean(wave.ttft_s)),
        p50=ratio(lambda wave: percentile(wave.ttft_s, 0.5)),
        p99=ratio(lambda wave: percentile(wave.ttft_s, 0.99)),
        bytes_per_s=ratio(lambda wave: wave.bytes_per_s),
        short_mean=ratio(lambda wave: statistics.fmean(wave.short_s)) if is_mixed else None,
        long_mean=ratio(lambda wave: statistics.fmean(wave.long_s)) if is_mixed else None,
    )
