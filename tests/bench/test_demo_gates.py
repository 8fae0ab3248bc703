"""The demonstration of the gates is read for what is wrong in it: here its record is made up, and spoilt."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest

import demo_gates
from forebay.bench.environment import describe_environment
from forebay.bench.gates.verdicts import Bound, Check, GateResult, GatesRecord, Outcome, worst


def record(outcomes: Mapping[str, Outcome] = {}, ended: str = "2026-01-01T00:02:40+00:00") -> GatesRecord:
    """All pass, but for those named, in whatever gate they are."""

    def made(name: str) -> Check:
        outcome = outcomes.get(name, Outcome.PASS)
        return Check(name=f"{name}@it", measured=0, bound=Bound.EQUAL, limit=0, unit="count", outcome=outcome)

    results = []
    for gate, names in demo_gates.LEAST_CHECKS.items():
        checks = tuple(made(name) for name in sorted(names))
        results.append(GateResult(gate=gate, outcome=worst(checks), checks=checks, began=ended, ended=ended))
    return GatesRecord(
        created="2026-01-01T00:00:00+00:00", title="made up", plan_text="", plan_sha256="", planned=demo_gates.GATES,
        results=tuple(results), environment=describe_environment(), command=(),
    )  # fmt: skip


def test_a_sound_demonstration_has_nothing_to_complain_of() -> None:
    assert list(demo_gates.complaints(record())) == []
    busy = {"repeat_drift": Outcome.FAIL, "ttft_p50_change": Outcome.INVALID, "read_bandwidth": Outcome.INVALID}
    assert list(demo_gates.complaints(record(busy))) == []


@pytest.mark.parametrize(
    ("name", "outcome"),
    [
        ("wrong_bytes", Outcome.FAIL),
        ("tokens_equal", Outcome.INVALID),
        ("ttft_p50_change", Outcome.FAIL),
        ("fault_seen", Outcome.INVALID),
        ("shm_segments_left", Outcome.FAIL),
    ],
)
def test_what_is_wrong_is_named(name: str, outcome: Outcome) -> None:
    assert any(name in said for said in demo_gates.complaints(record({name: outcome})))


def test_what_is_missing_or_late_is_named() -> None:
    sound = record()
    part = msgspec.structs.replace(sound, results=sound.results[:3])
    assert list(demo_gates.complaints(part)) == ["g4 has no result"]
    empty = msgspec.structs.replace(sound.results[3], checks=())
    without = msgspec.structs.replace(sound, results=(*sound.results[:3], empty))
    assert len(list(demo_gates.complaints(without))) == len(demo_gates.LEAST_CHECKS["g4"])
    assert "it took 601 s" in next(demo_gates.complaints(record(ended="2026-01-01T00:10:01+00:00")))
