"""Gate G2: the single machine without the candidate. Recompute and the baseline medium, at each concurrency.

It passes when its rounds repeat: what does not repeat without the candidate proves nothing about it later.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import msgspec

from forebay.bench.gates.restoring import (
    RestoreGate,
    check_concurrency,
    doubt,
    failed_requests,
    restore_options,
)
from forebay.bench.gates.verdicts import Bound, Check, check
from forebay.bench.restore import audit
from forebay.bench.restore.metrics import round_p50s, round_rates
from forebay.bench.restore.options import Limits as EvidenceLimits
from forebay.bench.restore.options import RestoreOptions
from forebay.bench.restore.results import RequestRecord, RestoreRecord, Role
from forebay.errors import ConfigError

_ROLES = (Role.RECOMPUTE, Role.BASELINE)


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    repeat_drift: float = 0.05
    """Of a group's rounds at one concurrency, of their p50s of TTFT and of their output tokens a second: largest over
    smallest, less 1."""
    rounds: int = 3
    """At least."""
    concurrency: tuple[int, ...] = ()
    """At which the limits hold. None named: at each that is measured."""


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    restore: dict[str, Any]
    """As `forebay bench restore` takes them."""
    limits: Limits = Limits()


def build(options: Options) -> RestoreGate:
    restore = restore_options(options.restore, *_ROLES)
    check_concurrency(options.limits.concurrency, restore)
    if restore.rounds < max(2, options.limits.rounds):
        raise ConfigError(f"restore.rounds must be {max(2, options.limits.rounds)} or more, not {restore.rounds}")
    return RestoreGate(
        restore,
        lambda record: checks(record, options.limits, restore.limits),
        lambda requests: drifted(requests, restore, options.limits),
    )


def checks(record: RestoreRecord, limits: Limits, evidence: EvidenceLimits) -> tuple[Check, ...]:
    """The record against the limits. `evidence`: those that the record itself was judged by."""
    return (failed_requests(record), *_repeats(record, limits, evidence))


def drifted(requests: Sequence[RequestRecord], restore: RestoreOptions, limits: Limits) -> str:
    """Which group's rounds do not repeat already: more of them only add to that. Empty as long as they do."""
    for concurrency in limits.concurrency or restore.concurrency:
        for group in restore.group:
            for figures in _rounds(requests, group.name, concurrency) if group.role in _ROLES else ():
                drift = _drift(figures)
                if drift is not None and drift > limits.repeat_drift:
                    return f"rounds of {group.name} at {concurrency} at once differ by {drift:.1%}"
    return ""


def _rounds(requests: Sequence[RequestRecord], group: str, concurrency: int) -> tuple[tuple[float, ...], ...]:
    """Of each round its p50 of TTFT, and its output tokens a second."""
    mine = [each for each in requests if (each.group, each.concurrency) == (group, concurrency) and not each.error]
    return round_p50s(mine), round_rates(mine)


def _drift(figures: Sequence[float]) -> float | None:
    """None where there is nothing to compare."""
    return max(figures) / min(figures) - 1 if len(figures) > 1 and min(figures) > 0 else None


def _repeats(record: RestoreRecord, limits: Limits, evidence: EvidenceLimits) -> Iterator[Check]:
    is_sound = not audit.broken_claims(record.groups, record.requests, record.waves, (), evidence)
    names = {role: [each.name for each in record.groups if each.role is role] or [role.value] for role in _ROLES}

    def judged(name: str, figures: Sequence[float]) -> Check:
        drift, few = _drift(figures), ""
        if drift is None or len(figures) < limits.rounds:
            few = f"{len(figures)} rounds have a TTFT, {max(2, limits.rounds)} are needed"
        is_over = drift is not None and drift > limits.repeat_drift  # more rounds only add to it
        doubts = "" if is_over and is_sound else doubt(record)
        invalid = doubts if is_over else few or doubts
        return check(name, drift, Bound.AT_MOST, limits.repeat_drift, "ratio", invalid=invalid)

    for concurrency in limits.concurrency or sorted({each.concurrency for each in record.cells}):
        for group in chain(*names.values()):
            p50s_s, rates = _rounds(record.requests, group, concurrency)
            yield judged(f"repeat_drift@{concurrency} {group}", p50s_s)
            yield judged(f"throughput_drift@{concurrency} {group}", rates)
