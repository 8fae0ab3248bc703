"""Gate G2: the single machine without the candidate. Recompute and the baseline medium, at each concurrency.

It passes when its rounds repeat: what does not repeat without the candidate proves nothing about it later.
"""

from __future__ import annotations

from collections.abc import Iterator
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
from forebay.bench.restore.results import RestoreRecord, Role
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
    return RestoreGate(restore, lambda record: checks(record, options.limits))


def checks(record: RestoreRecord, limits: Limits) -> tuple[Check, ...]:
    """The record against the limits."""
    return (failed_requests(record), *_repeats(record, limits))


def _repeats(record: RestoreRecord, limits: Limits) -> Iterator[Check]:
    doubts = doubt(record)
    for concurrency in limits.concurrency or sorted({each.concurrency for each in record.cells}):
        for role in _ROLES:
            found = cells_of(record, role, concurrency)
            for name, p50s_s in [(each.group, each.ttft_p50_of_rounds_s) for each in found] or [(role.value, ())]:
                enough = len(p50s_s) >= max(2, limits.rounds) and min(p50s_s) > 0
                few = "" if enough else f"{len(p50s_s)} rounds have a TTFT, {max(2, limits.rounds)} are needed"
                drift = max(p50s_s) / min(p50s_s) - 1 if enough else None
                invalid = few or doubts
                yield check(
                    f"repeat_drift@{concurrency} {name}", drift, Bound.AT_MOST, limits.repeat_drift, "ratio",
                    invalid=invalid,
                )  # fmt: skip
