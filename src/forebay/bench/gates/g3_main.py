"""Gate G3: the candidate against the baseline medium on the same machine, in one interleaved run.

At each named concurrency TTFT p50 goes down and throughput goes up by the limits or more, and every output is equal:
to the baseline's, and to what computing gives, where the plan has a group that recomputes.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import Any

import msgspec

from forebay.bench.gates.restoring import (
    RestoreGate,
    at,
    check_concurrency,
    doubt,
    failed_requests,
    restore_options,
)
from forebay.bench.gates.verdicts import Bound, Check, check
from forebay.bench.restore.results import Comparison, RestoreRecord, Role, Spread
from forebay.errors import ConfigError


class Judged(Enum):
    """What has to meet a limit."""

    VALUE = "value"
    INTERVAL = "interval"
    """All of the 95 % confidence interval."""


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    ttft_p50_change: float = -0.25
    """At most: down by a quarter or more."""
    throughput_change: float = 0.29
    """At least, of output tokens a second of the whole machine."""
    concurrency: tuple[int, ...] = ()
    """At which the limits hold. None named: at each that is measured."""
    judged: Judged = Judged.VALUE
    least_requests: int = 0
    """With a record of its own and a first token, of each group at each concurrency; at least one a session in flight
    and round in any case."""


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    restore: dict[str, Any]
    """As `forebay bench restore` takes them."""
    limits: Limits = Limits()


def build(options: Options) -> RestoreGate:
    restore = restore_options(options.restore, Role.BASELINE)
    check_concurrency(options.limits.concurrency, restore)
    if not {Role.CANDIDATE, Role.SHARED} & {group.role for group in restore.group}:
        raise ConfigError("restore: no group has the role candidate or shared, and this gate judges it: add one")
    return RestoreGate(restore, lambda record: checks(record, options.limits))


def checks(record: RestoreRecord, limits: Limits) -> tuple[Check, ...]:
    """The record against the limits."""
    return (failed_requests(record), *_comparisons(record, limits))


def _comparisons(record: RestoreRecord, limits: Limits) -> Iterator[Check]:
    candidates = [each.name for each in record.groups if each.role in (Role.CANDIDATE, Role.SHARED)]
    baselines = [each.name for each in record.groups if each.role is Role.BASELINE]
    computed = [each.name for each in record.groups if each.role is Role.RECOMPUTE]
    pairs = {(each.group, each.against, each.concurrency): each for each in record.comparisons}
    for concurrency in limits.concurrency or sorted({each.concurrency for each in record.cells}):
        for candidate in candidates:
            for baseline in baselines:
                where = at(concurrency, candidate, candidates) + (f" {baseline}" if len(baselines) > 1 else "")
                yield from _compared(where, pairs.get((candidate, baseline, concurrency)), record, limits)
            for other in computed:
                where = f"{at(concurrency, candidate, candidates)} {other}"
                yield _tokens_equal(where, pairs.get((candidate, other, concurrency)))
            yield _evidence(at(concurrency, candidate, candidates), candidate, concurrency, record, limits)


def _compared(where: str, found: Comparison | None, record: RestoreRecord, limits: Limits) -> Iterator[Check]:
    doubts = doubt(record)
    ttft, rate = (found.ttft_p50_change, found.throughput_change) if found else (None, None)
    measured_ttft = _judged(ttft, limits.judged, Bound.AT_MOST)
    measured_rate = _judged(rate, limits.judged, Bound.AT_LEAST)
    yield check(
        f"ttft_p50_change@{where}", measured_ttft, Bound.AT_MOST, limits.ttft_p50_change, "ratio", invalid=doubts
    )
    yield check(
        f"throughput_change@{where}", measured_rate, Bound.AT_LEAST, limits.throughput_change, "ratio", invalid=doubts
    )
    yield _tokens_equal(where, found)


def _tokens_equal(where: str, found: Comparison | None) -> Check:
    return check(f"tokens_equal@{where}", float(found.tokens_equal) if found else None, Bound.EQUAL, 1, "count")


def _judged(spread: Spread | None, judged: Judged, bound: Bound) -> float | None:
    """The value, or the end of its interval that meets the limit last."""
    if spread is None or judged is Judged.VALUE:
        return None if spread is None else spread.value
    return spread.high if bound is Bound.AT_MOST else spread.low


def _evidence(where: str, group: str, concurrency: int, record: RestoreRecord, limits: Limits) -> Check:
    """A record for each request: a comparison of figures that nobody can look into proves nothing."""
    found = [each for each in record.requests if each.group == group and each.concurrency == concurrency]
    rounds = max((each.rounds for each in record.cells if each.group == group), default=1)
    answered = sum(each.ttft_s is not None for each in found)
    least = max(limits.least_requests, concurrency * max(1, rounds))
    invalid = doubt(record) if answered < least else ""  # it was stopped: then too few say nothing of the candidate
    return check(f"requests@{where}", answered if found else None, Bound.AT_LEAST, least, "count", invalid=invalid)
