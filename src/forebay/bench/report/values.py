"""Figures as people read them, and nothing of a record that is not in it: no figure is worked out here anew."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

from forebay.bench.gates.report import quantity_text
from forebay.bench.gates.verdicts import Check
from forebay.bench.report import texts
from forebay.bench.report.texts import Voice
from forebay.bench.restore.results import Cell, Comparison, Group, RestoreRecord, Role, Spread
from forebay.bench.units import NOTHING, bytes_text

_HOURS_FROM_S = 7200

Show = Callable[[float], str]


def change_text(share: float) -> str:
    """`-33.5 %`, `+29.0 %`."""
    return f"{100 * share:+.1f} %"


def part_text(share: float) -> str:
    """`33.5 %`: how much, where words say which way."""
    return f"{100 * abs(share):.1f} %"


def token_rate_text(tokens_per_s: float) -> str:
    return f"{tokens_per_s:,.1f}"


def byte_rate_text(bytes_per_s: float | None) -> str:
    return NOTHING if bytes_per_s is None else f"{bytes_text(bytes_per_s)}/s"


def time_text(written: str) -> str:
    """`2026-01-31 09:05 UTC`; what is no time stays as it is."""
    try:
        return datetime.fromisoformat(written).astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (ValueError, OverflowError):
        return written


def value_text(spread: Spread | None, show: Show) -> str:
    return NOTHING if spread is None else show(spread.value)


def interval_text(spread: Spread | None, show: Show) -> str:
    """`[0.510 s, 0.560 s]`, or nothing without a figure."""
    return "" if spread is None else f"[{show(spread.low)}, {show(spread.high)}]"


def measured_text(check: Check, quantity: float | None) -> str:
    """A check's measured value or limit, in its unit."""
    if quantity is not None and check.unit == "ratio" and _is_change(check.name):
        return change_text(quantity)
    if quantity is not None and check.unit == "s" and abs(quantity) >= _HOURS_FROM_S:
        return f"{quantity / 3600:,.1f} h"
    return quantity_text(quantity, check.unit)


def limit_text(voice: Voice, check: Check) -> str:
    return voice.plain(texts.BOUNDS[check.bound], limit=measured_text(check, check.limit))


def check_title(voice: Voice, check: Check) -> str:
    """In words, with what comes after the `@`; a check without a text by its own name."""
    kind, at, where = check.name.partition("@")
    known = texts.CHECK_NAMES.get(kind)
    if known is None:
        return check.name
    title = voice.plain(known)
    concurrency, _, group = where.partition(" ")
    if kind in texts.BY_CONCURRENCY and concurrency.isdecimal():
        where = voice.plain(texts.WHERE, concurrency=concurrency, group=f", {group}" if group else "")
    fault = next((text for each, text in texts.FAULTS.items() if (kind, where) == ("fault_seen", each.value)), None)
    if fault is not None:
        where = voice.plain(fault)
    return f"{title} @ {where}" if at else title


def _is_change(name: str) -> bool:
    return name.partition("@")[0].endswith("_change")


def yes_or_no(voice: Voice, is_so: object) -> str:
    return voice.plain(texts.YES if is_so else texts.NO)


# ---- looking things up in a record


def group_of(record: RestoreRecord, role: Role) -> Group | None:
    """The first group of a role."""
    return next((group for group in record.groups if group.role is role), None)


def group_label(voice: Voice, record: RestoreRecord, name: str) -> str:
    """A group's role and its name; the name alone if the record does not describe the group."""
    group = next((each for each in record.groups if each.name == name), None)
    if group is None:
        return name
    role = voice.plain(texts.ROLES[group.role])
    return role if name in (group.role.value, role) else voice.plain(texts.GROUP_NAME, role=role, name=name)


def group_said(voice: Voice, record: RestoreRecord, name: str) -> str:
    """A group within a sentence."""
    group = next((each for each in record.groups if each.name == name), None)
    if group is None:
        return name
    role = voice.plain(texts.ROLES_SAID[group.role])
    is_named = name not in (group.role.value, voice.plain(texts.ROLES[group.role]))
    return voice.plain(texts.GROUP_NAME, role=role, name=name) if is_named else role


def cell_of(record: RestoreRecord, group: str, concurrency: int) -> Cell | None:
    return next((cell for cell in record.cells if cell.group == group and cell.concurrency == concurrency), None)


def comparison_of(record: RestoreRecord, group: str, against: str, concurrency: int) -> Comparison | None:
    wanted = (group, against, concurrency)
    return next((each for each in record.comparisons if (each.group, each.against, each.concurrency) == wanted), None)


def concurrencies(record: RestoreRecord) -> list[int]:
    return sorted({cell.concurrency for cell in record.cells})


def group_names(record: RestoreRecord) -> list[str]:
    """In the record's order; those that only cells know come last."""
    return list(dict.fromkeys((*(each.name for each in record.groups), *(cell.group for cell in record.cells))))
