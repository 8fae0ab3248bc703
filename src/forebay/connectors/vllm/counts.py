"""The numbers that the connector keeps: what they are called, what they mean, and how a step's share is found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forebay.events import Totals


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    documentation: str
    labels: tuple[str, ...] = ()


COUNTERS = (
    Metric("lookups", "Prefixes that were looked up in the pool.", ("result",)),
    Metric("hit_blocks", "Blocks that lookups found and that were to be loaded."),
    Metric("missed_blocks", "Blocks that lookups did not find, and that were computed and offered."),
    Metric("recomputed_blocks", "Blocks that were found, could not be loaded, and were computed."),
    Metric("loads", "Loads that ended, by whether all of their blocks came.", ("result",)),
    Metric("moved_blocks", "Blocks moved, by place and kind of job.", ("place", "kind")),
    Metric("moved_bytes", "Payload bytes moved, by place and kind of job.", ("place", "kind")),
    Metric("busy_seconds", "Time that jobs took, by place and kind of job.", ("place", "kind")),
    Metric("failed_blocks", "Blocks that a job did not get through.", ("place", "kind", "outcome")),
    Metric("dropped_blocks", "Blocks that left a place.", ("place", "reason")),
    Metric("refused_blocks", "Blocks that a place did not take when they were offered.", ("place", "reason")),
    Metric("tier_events", "What happened to a root (by its place in the list), by kind.", ("tier", "root", "kind")),
    Metric("broken_workers", "Workers that stopped after a bug in Forebay."),
)
GAUGES = (Metric("queue", "Requests that load, and stores whose blocks are held, now.", ("what",)),)
LOAD_SECONDS = Metric("load_seconds", "Time from the start of a load to its end.")
SECONDS_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


def flat(totals: Totals) -> dict[str, float]:
    """The engine's running sums under the names of `COUNTERS`."""
    numbers: dict[str, float] = {}
    for (place, kind), blocks in totals.moved_blocks.items():
        numbers[f"moved_blocks|{place}|{kind.value}"] = blocks
    for (place, kind), moved_bytes in totals.moved_bytes.items():
        numbers[f"moved_bytes|{place}|{kind.value}"] = moved_bytes
    for (place, kind), busy_ns in totals.busy_ns.items():
        numbers[f"busy_seconds|{place}|{kind.value}"] = busy_ns / 1e9
    for (place, kind, outcome), blocks in totals.failures.items():
        numbers[f"failed_blocks|{place}|{kind.value}|{outcome.value}"] = blocks
    for (place, reason), blocks in totals.dropped.items():
        numbers[f"dropped_blocks|{place}|{reason.value}"] = blocks
    for (place, reason), blocks in totals.refused.items():
        numbers[f"refused_blocks|{place}|{reason.value}"] = blocks
    return numbers


class Changes:
    """Running sums -> what was added since the last call."""

    def __init__(self) -> None:
        self._before: dict[str, float] = {}

    def take(self, sums: Mapping[str, float]) -> dict[str, float]:
        added = {name: value - self._before.get(name, 0) for name, value in sums.items()}
        self._before = dict(sums)
        return {name: value for name, value in added.items() if value}


def summary(numbers: Mapping[str, Any]) -> dict[str, int | float]:
    """An interval in a few numbers, for vLLM's log."""
    seconds = numbers.get(LOAD_SECONDS.name, ())
    shown = {
        "hit blocks": numbers.get("hit_blocks", 0),
        "missed blocks": numbers.get("missed_blocks", 0),
        "loads": len(seconds),
        "load s": round(sum(seconds), 4),
        "MB read": round(_sum(numbers, "moved_bytes|", "|read") / 1e6, 3),
        "MB written": round(_sum(numbers, "moved_bytes|", "|write") / 1e6, 3),
        "failed blocks": _sum(numbers, "failed_blocks|", ""),
        "refused blocks": _sum(numbers, "refused_blocks|", ""),
    }
    return {name: value for name, value in shown.items() if value}


def _sum(numbers: Mapping[str, Any], start: str, end: str) -> float:
    return float(sum(value for name, value in numbers.items() if name.startswith(start) and name.endswith(end)))
