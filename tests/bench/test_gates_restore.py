"""Gates G2 and G3: made-up records against limits, and real runs over roots that are equal and that are not."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from restore_kit import groups, requests, waves

from forebay.bench.environment import describe_environment
from forebay.bench.evidence import Kernel, Verdict
from forebay.bench.gates import g2_baseline, g3_main
from forebay.bench.gates.plan import read_plan
from forebay.bench.gates.restoring import RestoreGate, makes_its_pool, wrong_answers
from forebay.bench.gates.run import run_plan
from forebay.bench.gates.verdicts import Check, Outcome, worst
from forebay.bench.restore.metrics import cell_of, comparisons
from forebay.bench.restore.options import GroupOptions
from forebay.bench.restore.options import Limits as EvidenceLimits
from forebay.bench.restore.results import RequestRecord, RestoreRecord, Role
from forebay.cli import run
from forebay.errors import ConfigError


def record(changed: Sequence[RequestRecord] | None = None, reasons: Sequence[str] = ()) -> RestoreRecord:
    """Candidate 2 s, baseline 3 s, recompute 10 s, at 4 at once in three rounds."""
    asked = requests() if changed is None else list(changed)
    return RestoreRecord(
        created="2026-01-01T00:00:00+00:00", title="made up", verdict=Verdict.of(reasons), notes=(), workload="cold",
        groups=groups(),
        cells=tuple(
            cell_of(
                group, 4, [each for each in asked if each.group == group.name],
                [each for each in waves() if each.group == group.name], 0,
            )
            for group in groups()
        ),
        comparisons=comparisons(groups(), asked, 0),
        waves=tuple(waves()), requests=tuple(asked), environment=describe_environment(), options={}, command=(),
    )  # fmt: skip


def altered(change: Callable[[RequestRecord], RequestRecord], group: str = "candidate") -> list[RequestRecord]:
    return [change(each) if each.group == group else each for each in requests()]


def g2_checks(record: RestoreRecord, limits: g2_baseline.Limits) -> tuple[Check, ...]:
    return g2_baseline.checks(record, limits, EvidenceLimits())


def outcomes(checks: Sequence[Check]) -> dict[str, Outcome]:
    return {each.name: each.outcome for each in checks}


def test_g3_passes_a_third_less_and_fails_a_stricter_limit() -> None:
    found = g3_main.checks(record(), g3_main.Limits())
    assert set(outcomes(found).values()) == {Outcome.PASS}
    assert {each.name for each in found} == {
        "failed_requests", "ttft_p50_change@4", "throughput_change@4", "tokens_equal@4",
        "tokens_equal@4 recompute", "requests@4",
    }  # fmt: skip
    change = next(each for each in found if each.name == "ttft_p50_change@4")
    assert change.measured == pytest.approx(-1 / 3)
    stricter = outcomes(g3_main.checks(record(), g3_main.Limits(ttft_p50_change=-0.5, throughput_change=5.0)))
    assert stricter["ttft_p50_change@4"] is stricter["throughput_change@4"] is Outcome.FAIL


def test_g3_may_ask_for_the_whole_interval() -> None:
    limits = g3_main.Limits(judged=g3_main.Judged.INTERVAL)
    [by_value] = [e for e in g3_main.checks(record(), g3_main.Limits()) if e.name == "ttft_p50_change@4"]
    [by_interval] = [e for e in g3_main.checks(record(), limits) if e.name == "ttft_p50_change@4"]
    assert by_value.measured is not None
    assert by_interval.measured is not None
    assert by_interval.measured > by_value.measured


def test_g3_fails_equal_media_other_tokens_and_failed_requests() -> None:
    as_slow = altered(lambda each: msgspec.structs.replace(each, ttft_s=3.0, ended_s=each.sent_s + 4.0))
    assert outcomes(g3_main.checks(record(as_slow), g3_main.Limits()))["ttft_p50_change@4"] is Outcome.FAIL
    other = altered(lambda each: msgspec.structs.replace(each, output_digest="another"))
    assert outcomes(g3_main.checks(record(other), g3_main.Limits()))["tokens_equal@4"] is Outcome.FAIL
    computed = altered(lambda each: msgspec.structs.replace(each, output_digest="another"), "recompute")
    found = outcomes(g3_main.checks(record(computed), g3_main.Limits()))
    assert {name for name, outcome in found.items() if outcome is Outcome.FAIL} == {"tokens_equal@4 recompute"}
    failed = altered(lambda each: msgspec.structs.replace(each, error="gone", ttft_s=None, output_digest=""))
    checks = g3_main.checks(record(failed, ["requests failed"]), g3_main.Limits())
    assert outcomes(checks)["failed_requests"] is Outcome.FAIL
    assert worst(checks) is Outcome.FAIL


def test_g3_says_nothing_without_samples_or_of_a_bad_measurement() -> None:
    warm = g3_main.checks(record(reasons=["the page cache was warm"]), g3_main.Limits())
    assert worst(warm) is Outcome.INVALID
    assert {each.name for each in warm if each.outcome is Outcome.INVALID} == {
        "ttft_p50_change@4",
        "throughput_change@4",
    }
    for limits in (g3_main.Limits(), g3_main.Limits(concurrency=(8,))):
        assert worst(g3_main.checks(record([]), limits)) is Outcome.INVALID
    half = [each for each in requests() if each.group != "candidate" or each.round == 1]
    assert outcomes(g3_main.checks(record(half), g3_main.Limits(least_requests=12)))["requests@4"] is Outcome.FAIL


def test_g2_wants_rounds_that_repeat() -> None:
    limits = g2_baseline.Limits()
    found = g2_checks(record(), limits)
    assert set(outcomes(found).values()) == {Outcome.PASS}
    assert {*outcomes(found)} == {
        "failed_requests", "repeat_drift@4 recompute", "repeat_drift@4 baseline", "throughput_drift@4 recompute",
        "throughput_drift@4 baseline",
    }  # fmt: skip

    def drifted(each: RequestRecord) -> RequestRecord:
        ttft_s = (each.ttft_s or 0) * (1.06 if each.round == 2 else 1.0)
        return msgspec.structs.replace(each, ttft_s=ttft_s)

    drifting = g2_checks(record(altered(drifted, "baseline")), limits)
    [check] = [each for each in drifting if each.name == "repeat_drift@4 baseline"]
    assert check.outcome is Outcome.FAIL
    assert check.measured == pytest.approx(0.06)

    def lasts_longer(each: RequestRecord) -> RequestRecord:
        return msgspec.structs.replace(each, ended_s=each.ended_s + (1.0 if each.round == 2 else 0.0))

    slower = outcomes(g2_checks(record(altered(lasts_longer, "baseline")), limits))
    assert {name for name, outcome in slower.items() if outcome is Outcome.FAIL} == {"throughput_drift@4 baseline"}
    assert worst(g2_checks(record(), g2_baseline.Limits(rounds=4))) is Outcome.INVALID
    assert worst(g2_checks(record([]), limits)) is Outcome.INVALID
    assert worst(g2_checks(record(reasons=["a clock jumped"]), limits)) is Outcome.INVALID


def test_wrong_answers_are_a_lost_cause() -> None:
    assert wrong_answers(requests()) == ""
    assert "failed in round" in wrong_answers(altered(lambda each: msgspec.structs.replace(each, error="gone")))
    assert "another output" in wrong_answers(altered(lambda each: msgspec.structs.replace(each, output_digest="else")))


def gate(tmp_path: Path, kind: str) -> RestoreGate:
    """Over the groups of the kit."""
    usual = {"name": "recompute", "role": "recompute"}, {"name": "baseline", "role": "baseline", "roots": [tmp_path]}
    roles = (*usual, *([{"name": "candidate", "role": "candidate", "roots": [tmp_path]}] if kind == "g3_main" else []))
    plain = json.loads(json.dumps({"concurrency": [4], "rounds": 5, "group": roles}, default=str))
    module = {"g2_baseline": g2_baseline, "g3_main": g3_main}[kind]
    return module.build(module.Options(restore=plain))


def seen(rounds: int, names: Sequence[str], requests_of: Sequence[RequestRecord]) -> tuple[Any, Any, Any]:
    """Groups, requests and waves after so many rounds."""
    return (
        [each for each in groups() if each.name in names],
        [each for each in requests_of if each.group in names and each.round <= rounds],
        [each for each in waves() if each.group in names and each.round <= rounds],
    )


def test_a_drift_in_round_2_of_5_ends_g2(tmp_path: Path) -> None:
    def drifted(each: RequestRecord) -> RequestRecord:
        return msgspec.structs.replace(each, ttft_s=(each.ttft_s or 0) * (1.06 if each.round == 2 else 1.0))

    names, drifting = ("recompute", "baseline"), altered(drifted, "baseline")
    lost_cause = gate(tmp_path, "g2_baseline").lost_cause
    assert lost_cause(*seen(3, names, requests())) == ""
    assert lost_cause(*seen(1, names, drifting)) == ""
    of, asked, in_waves = seen(2, names, drifting)
    assert lost_cause(of, asked, in_waves) == "stopped after round 2: rounds of baseline at 4 at once differ by 6.0%"
    assert lost_cause(of, asked, in_waves[:-1]) == "", "in the middle of a round others have not been asked yet"
    early = record([each for each in drifting if each.round <= 2], ["2 of 3 rounds: too few"])
    [check] = [each for each in g2_checks(early, g2_baseline.Limits()) if each.name == "repeat_drift@4 baseline"]
    assert (check.outcome, check.measured) == (Outcome.FAIL, pytest.approx(0.06))


@pytest.mark.parametrize(
    ("spoilt", "words"),
    [
        ({"foreign_bytes": 4_000_000_000}, "others used the device"),
        ({"clock_step_s": 9.0}, "the clock jumped"),
        ({"resident_bytes": 4_000_000_000}, "warm page cache"),
    ],
)
def test_evidence_that_nothing_mends_ends_g3_after_its_round(
    tmp_path: Path, spoilt: dict[str, object], words: str
) -> None:
    of, asked, in_waves = seen(1, ("recompute", "baseline", "candidate"), requests())
    lost_cause = gate(tmp_path, "g3_main").lost_cause
    assert lost_cause(of, asked, in_waves) == "", "too few rounds are no lost cause"
    in_waves = [msgspec.structs.replace(each, **spoilt) if each.group == "baseline" else each for each in in_waves]
    cause = lost_cause(of, asked, in_waves)
    assert cause.startswith("stopped after round 1: baseline: ")
    assert words in cause


# --- real runs


def plan_file(
    folder: Path, baseline: str, candidate: str, *, kind: str = "g3_main", target: str = "emulated", limits: str = ""
) -> Path:
    """Media of so many bytes a second, over this disk: what it gives by itself plays no part.

    Five sessions: in the middle of them the p50 stays where it is when one round of three is disturbed.
    """
    for name in ("a", "b"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    options = "{ block_tokens = 256, kv_scale = 0.004, time_scale = 0.0005, host_bytes = 8000000, FILE }"
    options = options.replace("FILE", 'file = { verify = "header" }')
    text = f"""
title = "two media"
[[gate]]
kind = "{kind}"
[gate.options.limits]
{limits}
[gate.options.restore]
concurrency = [5]
limits = {{ control_drift = 1000.0, foreign_share = 1000.0 }}
workload = {{ kind = "cold", options = {{ sessions = 5, prefix_tokens = 768, output_tokens = 4 }} }}
[[gate.options.restore.group]]
name = "baseline"
role = "baseline"
roots = ["{folder}/a"]
limit = "{baseline}"
options = {options}
[[gate.options.restore.group]]
name = "candidate"
role = "candidate"
target = "{target}"
roots = ["{folder}/b"]
limit = "{candidate}"
options = {options}
"""
    (folder / "plan.toml").write_text(text)
    return folder / "plan.toml"


def test_g3_fails_on_two_equal_roots_and_passes_on_one_throttled_to_65_percent(tmp_path: Path) -> None:
    """INVALID where the temporary directory is not on a disk: then nothing shows that reads were cold."""
    is_on_disk = not Kernel().medium_of(tmp_path).doubt
    equal = run_plan(read_plan(plan_file(tmp_path / "equal", "6MB/s", "6MB/s")), tmp_path / "equal/out")
    assert equal.outcome is (Outcome.FAIL if is_on_disk else Outcome.INVALID)
    throttled = run_plan(read_plan(plan_file(tmp_path / "slow", "3.9MB/s", "6MB/s")), tmp_path / "slow/out")
    assert throttled.outcome is (Outcome.PASS if is_on_disk else Outcome.INVALID), throttled.results
    [result] = throttled.results
    [change] = [each.measured for each in result.checks if each.name == "ttft_p50_change@5"]
    assert change == pytest.approx(-0.35, abs=0.08)
    assert set(result.files) == {"g3/restore.json", "g3/requests.jsonl", "g3/restore.svg"}
    assert list((tmp_path / "slow/a").iterdir()) == [], "what was made is removed"


def test_g2_measures_recomputing_and_a_baseline(tmp_path: Path) -> None:
    """How far rounds differ on the machine of a test says nothing: the limits are wide."""
    plan = plan_file(tmp_path, "20MB/s", "20MB/s", kind="g2_baseline", limits="repeat_drift = 1000.0")
    text = plan.read_text().replace('name = "candidate"\nrole = "candidate"', 'name = "recompute"\nrole = "recompute"')
    plan.write_text(text.replace(f'roots = ["{tmp_path}/b"]\nlimit = "20MB/s"\n', ""))
    [result] = run_plan(read_plan(plan), tmp_path / "out").results
    is_on_disk = not Kernel().medium_of(tmp_path).doubt
    assert result.outcome is (Outcome.PASS if is_on_disk else Outcome.INVALID), result
    drifts = [each for each in result.checks if "drift" in each.name]
    assert [each.name for each in drifts] == [
        "repeat_drift@5 recompute", "throughput_drift@5 recompute", "repeat_drift@5 baseline",
        "throughput_drift@5 baseline",
    ]  # fmt: skip
    if is_on_disk:
        assert all(each.measured is not None and each.measured > 0 for each in drifts)


def test_wrong_bytes_end_g3_early(tmp_path: Path) -> None:
    plan = plan_file(tmp_path, "100MB/s", "100MB/s", target="restore_plants.flipped")
    record = run_plan(read_plan(plan), tmp_path / "out")
    [result] = record.results
    assert result.outcome is Outcome.FAIL
    assert result.stopped_early.startswith("stopped: ")
    waves = json.loads((tmp_path / "out/g3/restore.json").read_text())["waves"]
    assert len(waves) < 6


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("concurrency = [5]", "concurrency = [6]"),
        ('role = "candidate"', 'role = "baseline"'),
        ("concurrency = [5]", "concurency = [5]"),
        ('limit = "16MB/s"', 'limit = "16"'),
    ],
)
def test_plans_that_cannot_work(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: str) -> None:
    plan = plan_file(tmp_path, "16MB/s", "16MB/s", limits="concurrency = [5]")
    plan.write_text(plan.read_text().replace(text, words, 1))
    assert run(["gate", "run", str(plan), "--out", str(tmp_path / "out")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_pools_that_a_killed_gate_leaves_are_in_its_own_directory(tmp_path: Path) -> None:
    """Also those of servers that it starts; what somebody else keeps in a root stays where it is."""

    def makes(target: str, **options: object) -> bool:
        return makes_its_pool(GroupOptions(name="a", role=Role.CANDIDATE, target=target, options=options))

    assert makes("emulated")
    assert makes("openai", command=["serve", "--pool={pool}"])
    assert makes("openai", command=["serve"], files={"config.json": '{{"root": "{pool1}"}}'})
    assert not makes("openai", command=["serve", "--port={port}"])
    assert not makes("openai", urls=["http://pooled:8000/v1"])


def test_g2_needs_its_roles(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no group has the role recompute"):
        read_plan(plan_file(tmp_path, "16MB/s", "16MB/s", kind="g2_baseline"))
