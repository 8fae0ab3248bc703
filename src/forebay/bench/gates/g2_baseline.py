"""Gate G2: the single machine without the candidate. Recompute and the baseline medium, at each concurrency.

It passes when its rounds repeat: what does not repeat without the candidate proves nothing about it later.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from forebay.bench.gates.restoring import (
    RestoreGate,
    cells_of,
    check_concurrency,
    doubt,
    failed_requests,
    restore_options,
)
from forebay.bench.gates.verdicts import Bound, Check, check
from forebay.bench.restore import audit
from forebay.bench.restore.metrics import round_p50s
from forebay.bench.restore.options import Limits as EvidenceLimits
from forebay.bench.restore.options import RestoreOptions
from forebay.bench.restore.results import RequestRecord, RestoreRecord, Role
from forebay.errors import ConfigError

_ROLES = (Role.RECOMPUTE, Role.BASELINE)


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    repeat_drift: float = 0.05
    """Of the p50s of TTFT of a group's rounds at one concurrency: the largest over the smallest, less 1."""
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
            mine = [each for each in requests if (each.group, each.concurrency) == (group.name, concurrency)]
            drift = _drift(round_p50s(mine)) if group.role in _ROLES else None
            if drift is not None and drift > limits.repeat_drift:
                return f"rounds of {group.name} at {concurrency} at once differ by {drift:.1%}"
    return ""


def _drift(p50s_s: Sequence[float]) -> float | None:
    """None where there is nothing to compare."""
    return max(p50s_s) / min(p50s_s) - 1 if len(p50s_s) > 1 and min(p50s_s) > 0 else None


def _repeats(record: RestoreRecord, limits: Limits, evidence: EvidenceLimits) -> Iterator[Check]:
    doubts = doubt(record)
    is_sound = not audit.broken_claims(record.groups, record.requests, record.waves, (), evidence)
    for concurrency in limits.concurrency or sorted({each.concurrency for each in record.cells}):
        for role in _ROLES:
            found = cells_of(record, role, concurrency)
            for name, p50s_s in [(each.group, each.ttft_p50_of_rounds_s) for each in found] or [(role.value, ())]:
                drift = _drift(p50s_s)
                few = "" if drift is not None and len(p50s_s) >= limits.rounds else _few(len(p50s_s), limits)
                is_over = drift is not None and drift > limits.repeat_drift and is_sound  # more rounds only add to it
                invalid = "" if is_over else few or doubts
                yield check(
                    f"repeat_drift@{concurrency} {name}", drift, Bound.AT_MOST, limits.repeat_drift, "ratio",
                    invalid=invalid,
                )  # fmt: skip


def _few(rounds: int, limits: Limits) -> str:
    return f"{rounds} rounds have a TTFT, {max(2, limits.rounds)} are needed"
