"""The planner: the examples, the rules of the field one by one, and files that are no plan."""

from __future__ import annotations

import functools
import json
import re
import xml.etree.ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from forebay.bench.calibration.model import DRAM_TIER_BYTES, KEPT_SHARE, NEW_TOKENS, SETUP_S, TP8
from forebay.cli import cli
from forebay.cli import run as run_cli
from forebay.errors import ConfigError
from forebay.fairness import Order
from forebay.planning import cells
from forebay.planning.options import PlanFile, check_plan, read_plan
from forebay.planning.plan import make_plan, steps
from forebay.planning.report import encode_json, how_close, render_page
from forebay.planning.results import Plan
from forebay.planning.setting import read_setting
from forebay.planning.storms import Medium, Restores, computing_nothing, storm
from forebay.sim.host import Hosting
from forebay.sim.media import medium_named
from forebay.sim.storm import StormSpec, run_storm

EXAMPLES = Path(__file__).parents[2] / "examples"
BIG, EDGE, RACK = (EXAMPLES / name for name in ("480b-tp8.toml", "edge-box.toml", "rack.toml"))


@functools.cache
def example(path: Path) -> Plan:
    return make_plan(read_plan(path), path.parent)


def rules(plan: Plan) -> dict[str, str]:
    """All texts of each rule that applies."""
    found: dict[str, str] = {}
    for each in plan.findings:
        found[each.rule] = found.get(each.rule, "") + each.text + "\n"
        assert each.source
    return found


BASE: dict[str, Any] = {
    "name": "small",
    "baseline": "one",
    "model": {"name": "Llama-3.3-70B-Instruct"},
    "engine": {"prefill_tokens_per_s": 4000, "decode_step_ms": 20, "restore_setup_ms": 100},
    "fleet": {"gpus": 8, "tensor_parallel": 8},
    "workload": {"sessions": 100, "context_tokens": 10_000, "concurrency": [8, 16]},
    "candidates": [{"name": "one", "read": "7GB/s"}, {"name": "two", "read": "14GB/s"}],
}


def planned(**changes: Any) -> Plan:
    """BASE with some of its tables changed, key by key."""
    found: dict[str, Any] = {**BASE}
    for name, change in changes.items():
        found[name] = {**BASE.get(name, {}), **change} if isinstance(change, dict) else change
    file = msgspec.convert(found, PlanFile)
    check_plan(file)
    return make_plan(file, EXAMPLES)


# ---- the published machine


def test_the_simulation_meets_every_published_cell_within_a_tenth() -> None:
    measured = [cell for cell in example(BIG).cells if cell.measured_p50_s is not None]
    assert len(measured) == 6
    for cell in measured:
        assert cell.ttft_p50_s == pytest.approx(cell.best_p50_s, rel=0.10), cell
        assert cell.throughput_tok_s == pytest.approx(cell.best_throughput_tok_s, rel=0.10), cell
    assert "6 measured cells" in how_close(example(BIG))


def test_the_published_conclusions_come_out() -> None:
    plan = example(BIG)
    gains = {each: plan.gain("NVMe-oF, 1 port", each) for each in (8, 16, 32)}
    assert [round(gains[each].best * 100) for each in gains] == [29, 40, 33]
    assert all(0.29 <= gain.simulated <= 0.42 for gain in gains.values())
    for basis in (plan.best_concurrency, plan.measured_best_concurrency):
        assert basis["NVMe-oF, 1 port"] == basis["local NVMe"] == 16
    for basis in (plan.saturation, plan.measured_saturation):
        assert (basis["local NVMe"], basis["NVMe-oF, 1 port"]) == (8, 32)
    assert plan.measured_saturation["NVMe-oF, 2 ports"] is plan.measured_best_concurrency["NVMe-oF, 2 ports"] is None
    assert 8_192 < plan.tie_context_tokens[8] < 12_000  # sessions of 8k tokens tied, those of 30k did not
    assert "8,192 tokens: up to a concurrency of 8 they demand 6.2 GB/s" in rules(plan)["tie"]
    recompute = next(each for each in plan.recompute if each.concurrency == 16)
    assert recompute.throughput_tok_s == pytest.approx(4.1, rel=0.05)
    assert recompute.ttft_p90_s == pytest.approx(237.34, rel=0.05)


def test_order_a_second_port_and_both_media_add_what_they_should() -> None:
    plan = example(BIG)
    one, both, two = (plan.cell(name, 32) for name in ("NVMe-oF, 1 port", "local NVMe + 1 port", "NVMe-oF, 2 ports"))
    assert one.ordered_p50_s < 0.6 * one.ttft_p50_s
    assert one.ordered_p99_s < 1.02 * one.ttft_p99_s
    assert two.ttft_p50_s < both.ttft_p50_s < one.ttft_p50_s
    assert plan.gain("NVMe-oF, 2 ports", 32).best > 1.0
    fixed_s = SETUP_S + 32 * TP8.prefill_s(NEW_TOKENS, 30_208)
    restored_s = one.ttft_p99_s - fixed_s
    assert (both.ttft_p99_s - fixed_s) / restored_s == pytest.approx(10.5 / (10.5 + 6.94), rel=0.02)
    assert plan.recommended == "NVMe-oF, 2 ports"
    assert "ordered flow" in rules(plan)


def test_volumes_and_staging_of_the_published_machine() -> None:
    plan = example(BIG)
    assert plan.volume.token_bytes == 253_952
    assert plan.volume.session_bytes == 7_671_382_016
    assert plan.volume.session_rank_bytes * 8 == plan.volume.session_bytes
    assert plan.demand.held_staging_bytes == 32 * plan.volume.session_bytes
    assert plan.demand.mean_read_bytes_per_s == pytest.approx(0.4 * 7_671_382_016)
    assert "streaming only" in rules(plan)["staging"]


def test_the_calibrated_simulator_comes_to_the_same() -> None:
    """It has the blocks of the reports; the plan has coarse ones."""
    plan = example(BIG)
    for name, medium in (("local NVMe", "nvme-gen4"), ("NVMe-oF, 1 port", "4*nvme-gen4@100gbe")):
        calibrated = run_storm(
            StormSpec(
                profile=TP8, media=(medium_named(medium),), waves=(8, 16, 32), stored_tokens=30_208,
                new_tokens=NEW_TOKENS, output_tokens=64, host_bytes=8 * round(KEPT_SHARE * DRAM_TIER_BYTES),
                order=Order.INTERLEAVED, hosting=Hosting.BLOCKING, setup_s=SETUP_S,
            )
        )  # fmt: skip
        for wave in calibrated.waves:
            cell = plan.cell(name, wave.sessions)
            assert cell.ttft_p50_s == pytest.approx(wave.ttft_at_s(0.5), rel=0.03)
            assert cell.throughput_tok_s == pytest.approx(wave.tokens_per_s, rel=0.03)


def test_storms_come_cold_unless_they_are_said_to_come_in_a_row() -> None:
    cold, row = (
        planned(workload={"in_a_row": each}, fleet={"kept_dram": "12GB"}) for each in ([], [8, 16])
    )  # fmt: skip
    assert row.cell("one", 8).ttft_p50_s == pytest.approx(cold.cell("one", 8).ttft_p50_s, rel=0.01)
    assert row.cell("one", 16).ttft_p50_s == pytest.approx(cold.cell("one", 16).ttft_p50_s - 12 / 7, rel=0.05)
    for wrong in ([8, 8], [4]):
        with pytest.raises(ConfigError, match="in_a_row must name each"):
            planned(workload={"in_a_row": wrong})
    with pytest.raises(ConfigError, match="not a size"):
        planned(fleet={"kept_dram": "12"})


# ---- the other examples


def test_an_edge_box_needs_one_good_drive() -> None:
    plan, said = example(EDGE), rules(example(EDGE))
    assert plan.recommended == "NVMe, PCIe 4"
    assert {"few GPUs", "small concurrency", "SATA", "tie", "wear", "recomputing is faster"} <= set(said)
    assert "It saves 0% of what the other does" in said["SATA"]
    assert "asks for no more" in said["small concurrency"]
    costs = {each.candidate: each for each in plan.costs}
    tokens = 0.02 * 200 * 86_400 * 365.25
    assert costs["NVMe, PCIe 4"].per_year == 160 / 5
    assert costs["NVMe, PCIe 4"].with_fleet_per_million_tokens == pytest.approx((1500 + 32) / tokens * 1e6)


def test_a_rack_takes_the_cheapest_that_covers_the_storm_and_lasts() -> None:
    plan = example(RACK)
    assert plan.recommended == "NVMe-oF, 4 x 100 GbE"
    assert any("local NVMe: worn out" in reason for reason in plan.reasons)
    assert any("object store: more than 10 s" in reason for reason in plan.reasons)
    rates = [each.token_hit_rate for each in plan.hit_rates]
    assert rates == sorted(rates)
    assert 0 < rates[0] < rates[-1] <= plan.demand.reuse + 1e-9
    assert "restore: " in plan.hit_rate_basis
    shares = {each.capacity_bytes: each.token_hit_rate for each in plan.hit_rates}
    assert plan.volume.total_bytes > 52e12
    assert shares[30_700_000_000_000] < 0.95 * shares[92_000_000_000_000]  # which holds all of them
    wear = {each.candidate: each for each in plan.wear}
    flash = wear["NVMe-oF, 4 x 100 GbE"]
    assert flash.years == pytest.approx(12 * 28e15 / flash.written_bytes_per_day / 365.25)


# ---- the rules of the field, each where it applies and where it does not


def test_below_the_baselines_ceiling_the_media_tie_and_above_it_they_do_not() -> None:
    short = planned(workload={"context_tokens": 500})
    assert "tie" in rules(short)
    assert short.recommended == "one"  # covers the peak, and is the baseline
    long = planned(workload={"context_tokens": 60_000})
    assert "tie" not in rules(long)
    assert long.recommended == "two"


def test_the_longest_tied_context_is_where_demand_meets_the_ceiling() -> None:
    file = msgspec.convert(BASE, PlanFile)
    setting = read_setting(file, EXAMPLES)
    for concurrency in (1, 8, 32):
        longest = cells.tie_context_tokens(setting, concurrency)
        assert cells.demand_bytes_per_s(setting, concurrency, longest) <= 7e9
        assert cells.demand_bytes_per_s(setting, concurrency, longest + 1) > 7e9


def test_the_gain_grows_with_concurrency_until_the_faster_medium_is_full() -> None:
    plan = planned(workload={"context_tokens": 20_000, "concurrency": [1, 4, 16, 64]})
    gains = [plan.gain("two", each).best for each in (1, 4, 16, 64)]
    assert gains == sorted(gains)
    assert gains[3] - gains[2] < gains[2] - gains[1]  # it levels off once both are full
    assert plan.saturation["one"] is not None
    assert plan.saturation["one"] <= (plan.saturation["two"] or 1000)
    assert "gain grows with concurrency" in rules(plan)


def test_few_sessions_and_few_gpus_are_told_to_look_elsewhere_first() -> None:
    assert "small concurrency" in rules(planned(workload={"concurrency": [2, 4]}))
    assert "small concurrency" not in rules(planned(workload={"concurrency": [8]}))
    assert "few GPUs" in rules(planned(fleet={"gpus": 2, "tensor_parallel": 2}))
    assert "few GPUs" not in rules(planned())


def test_a_sata_drive_takes_the_gain_away() -> None:
    sata = {"name": "sata", "kind": "sata", "read": "0.55GB/s"}
    plan = planned(candidates=[*BASE["candidates"], sata])
    assert plan.cell("sata", 16).ttft_p50_s > 8 * plan.cell("one", 16).ttft_p50_s
    assert "sata takes most of the gain away" in rules(plan)["SATA"]
    assert "SATA" not in rules(planned())


def test_what_a_medium_is_follows_from_its_name_and_what_it_takes_away_from_the_figures() -> None:
    named = [{"name": "slow", "medium": "sata-ssd"}, {"name": "far", "medium": "4*nvme-gen4@100gbe"}]
    said = rules(planned(candidates=[*BASE["candidates"], *named], workload={"concurrency": [8]}))
    assert "slow takes most of the gain away" in said["SATA"]
    assert "far: check that the ports" in said["check the network"]
    quick = {"name": "many", "kind": "sata", "read": "13GB/s"}
    said = rules(planned(candidates=[*BASE["candidates"], quick], workload={"concurrency": [8]}))
    assert "many leaves most of the gain" in said["SATA"]


def test_the_peak_decides_and_the_mean_is_shown_beside_it() -> None:
    plan = planned(workload={"requests_per_s": 0.01, "context_tokens": 60_000})
    assert plan.demand.mean_read_bytes_per_s is not None
    assert plan.demand.mean_read_bytes_per_s < 0.2e9
    assert plan.recommended == "two"  # though the mean is a thirtieth of what the slower one delivers
    assert "times less" in rules(plan)["plan for the peak"]
    assert all(each.load_share < 0.1 for each in plan.steady)


def test_the_narrower_of_link_and_drives_decides() -> None:
    far = {"name": "two", "kind": "network", "read": "14GB/s", "link": "5GB/s"}
    plan = planned(candidates=[BASE["candidates"][0], far])
    assert "the link decides: 5.0 GB/s of 14.0" in rules(plan)["check the network"]
    assert plan.gain("two", 16).best < 0
    assert "check the network" not in rules(planned())


def test_staging_below_the_bytes_in_flight_is_said() -> None:
    assert "too little for either" in rules(planned(budget={"dram": "1GB"}))["staging"]
    assert "of this plan" not in rules(planned(budget={"dram": "4TB"}))["staging"]


def test_copies_over_ranks_are_counted_and_said() -> None:
    plan = planned(model={"name": "DeepSeek-V3"})
    assert plan.volume.copies == 8
    assert plan.volume.session_bytes == 8 * 10_000 * 61 * 576 * 2
    assert "8.0 copies" in rules(plan)["copies"]


def test_an_overloaded_medium_has_no_steady_times() -> None:
    plan = planned(workload={"requests_per_s": 100.0})
    assert all(each.load_share > 1 and each.restore_p50_s is None for each in plan.steady)


def test_budgets_leave_out_what_does_not_fit_and_say_so() -> None:
    priced = [{**BASE["candidates"][0], "price": 100}, {**BASE["candidates"][1], "price": 900}]
    heavy = {"context_tokens": 60_000}
    assert planned(candidates=priced, workload=heavy).recommended == "two"
    plan = planned(candidates=priced, workload=heavy, budget={"price": 500})
    assert plan.recommended == "one"
    assert any("two: dearer than the budget" in reason for reason in plan.reasons)
    unpriced = planned(candidates=[priced[0], BASE["candidates"][1]], workload=heavy, budget={"price": 500})
    assert unpriced.recommended == "one"
    assert any("two: without a price" in reason for reason in unpriced.reasons)
    assert not any("for no less" in reason for reason in planned(workload={"context_tokens": 500}).reasons)
    impossible = planned(budget={"ttft_p50_s": 0.001})
    assert any("No candidate that is left avoids this" in reason for reason in impossible.reasons)


def test_media_by_name_by_curve_and_by_figures_are_alike(tmp_path: Path) -> None:
    points = [
        {"direction": "reads", "block_bytes": 1 << 20, "depth": depth, "gb_per_s": rate}
        for depth, rate in ((1, 2.0), (32, 7.0))
    ]
    curve = {"schema": "forebay-device-curve/1", "device": "disk", "points": points}
    (tmp_path / "curve.json").write_text(json.dumps(curve))
    ways = [
        {"name": "one", "read": "6.9GB/s"},
        {"name": "named", "medium": "nvme-gen4"},
        {"name": "far", "medium": "4*nvme-gen4@100gbe", "kind": "network"},
        {"name": "curve", "curve": "curve.json"},
    ]
    plan = make_plan(msgspec.convert({**BASE, "candidates": ways}, PlanFile), tmp_path)
    waits = {name: plan.cell(name, 16).ttft_p50_s for name in ("one", "named", "far", "curve")}
    assert waits["named"] == pytest.approx(waits["one"], rel=0.03)
    assert waits["curve"] == pytest.approx(waits["one"] * 6.9 / 7, rel=0.05)
    assert waits["far"] < 0.75 * waits["one"]


def test_an_engine_is_given_by_figures_or_by_a_profile_and_not_by_both() -> None:
    profile = {"profile": "qwen3-coder-480b-fp8/8xmi308x", "restore_setup_ms": 1400}
    big = msgspec.toml.decode(BIG.read_bytes())
    big["engine"], big["candidates"] = profile, big["candidates"][:2]
    big["workload"]["concurrency"] = [8]
    plan = make_plan(msgspec.convert(big, PlanFile), EXAMPLES)
    for name in ("local NVMe", "NVMe-oF, 1 port"):
        cell = plan.cell(name, 8)
        assert cell.throughput_tok_s == pytest.approx(cell.best_throughput_tok_s, rel=0.1)
    for engine in ({}, {**profile, "decode_step_ms": 20}):
        with pytest.raises(ConfigError, match="either a profile"):
            check_plan(msgspec.convert({**BASE, "engine": engine}, PlanFile))


def test_a_measured_profile_takes_the_place_of_a_plans_engine(tmp_path: Path) -> None:
    profile = {"ranks": 1, "kv_bytes_per_token": 131072, "token_s": 1.0, "step_s": 0.01}
    lines = [f"{name} = {value}" for name, value in profile.items()]
    text = "\n".join((*lines, "half_speed_tokens = inf", "kv_bytes_per_s = inf", 'name = "slow"', 'source = "a test"'))
    (tmp_path / "slow.toml").write_text(text)
    (tmp_path / "plan.toml").write_text(EDGE.read_text())
    arguments = [str(tmp_path / "plan.toml"), "--json", "--out", str(tmp_path)]
    result = CliRunner().invoke(cli, ["plan", *arguments, "--profile", str(tmp_path / "slow.toml")])
    assert result.exit_code == 0, result.output
    plan = msgspec.json.decode(result.stdout, type=Plan)
    assert plan.recompute[0].ttft_p50_s == pytest.approx(8016)
    assert run_cli(["plan", *arguments, "--profile", "none.toml"]) == 2
    assert run_cli(["plan", *arguments, "--profile", "none"]) == 2


# ---- storms and files


def test_a_storm_takes_the_time_of_its_bytes_in_any_order() -> None:
    medium = Medium(name="m", bytes_per_s=5e9, latency_s=1e-4, in_flight_blocks=256)
    restores = Restores(
        medium=medium, profile=computing_nothing(TP8), session_bytes=10**9, block_bytes=10**7, context_tokens=10_000,
        new_tokens=1,
    )  # fmt: skip
    for order in Order:
        result = storm(restores, (10,), order)
        assert max(result.last.ttft_s) == pytest.approx(2.0, rel=0.03)
        assert result == storm(restores, (10,), order)
    calm = storm(restores, (10,), Order.FAIR_SOJOURN, [float(at) for at in range(10)])
    assert calm.last.ttft_s == pytest.approx([0.2] * 10, rel=0.05)


FAR = {"name": "store", "medium": "s3"}


def test_a_distant_medium_is_taken_for_what_it_reaches_and_its_latency_counts_once() -> None:
    plan = planned(candidates=[*BASE["candidates"], FAR], workload={"context_tokens": 15_000})
    cell, demand = plan.cell("store", 16), plan.demand
    one_s = 0.1 + plan.volume.block_bytes / 87e6
    reached = 256 * plan.volume.block_bytes / one_s
    assert reached < demand.peak_read_bytes_per_s < 100e9
    assert plan.recommended == "store"
    assert "is the fastest; nothing here delivers" in plan.reasons[0]
    assert cell.ttft_p99_s == pytest.approx(16 * plan.volume.session_bytes / reached + one_s, rel=0.1)
    assert 0.6 < cell.busy_share <= 1.0
    assert demand.streamed_staging_bytes == 2 * 256 * plan.volume.block_bytes  # all of its reads are needed


def test_nothing_slower_than_the_baseline_is_taken_in_its_place() -> None:
    quick = {**BASE["candidates"][1], "price": 900}
    slow = {**BASE["candidates"][0], "price": 100}
    short = {"context_tokens": 500}
    assert planned(candidates=[quick, slow], workload=short, baseline="one").recommended == "one"
    plan = planned(candidates=[quick, slow], workload=short, baseline="two")
    assert plan.recommended == "two"
    assert any("one: slower than two in a storm" in reason for reason in plan.reasons)


def test_staging_grows_with_the_instances_and_is_shown_for_each_rank() -> None:
    one, two = (
        planned(fleet={"instances": each, "tensor_parallel": 4}, budget={"dram": "80GB"}).demand for each in (1, 2)
    )
    assert two.streamed_staging_bytes == 2 * one.streamed_staging_bytes
    assert two.streamed_staging_rank_bytes == one.streamed_staging_rank_bytes == one.streamed_staging_bytes / 4
    assert two.held_staging_rank_bytes == two.held_staging_bytes / 8
    assert (one.dram_rank_bytes, two.dram_rank_bytes) == (20e9, 10e9)


def test_few_reads_in_flight_do_not_reach_a_distant_mediums_ceiling() -> None:
    far = Medium(name="object", bytes_per_s=10e9, latency_s=0.1, in_flight_blocks=8)
    assert far.reached_bytes_per_s(10e6) == pytest.approx(8 * 10e6 / 0.101)
    assert replace(far, in_flight_blocks=1024).reached_bytes_per_s(10e6) == 10e9


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('name = "Meta-Llama-3-8B"', 'name = "gpt-9"', "no model 'gpt-9' is built in"),
        ('name = "Meta-Llama-3-8B"', "", "either the name of a built-in model, or a config.json"),
        ('name = "Meta-Llama-3-8B"', 'config = "nowhere"', "cannot read"),
        ("gpus = 1\n", "gpus = 1\ninstances = 3\n", "do not fit on 1 GPUs"),
        ("gpus = 1\n", "gpus = 8\ntensor_parallel = 3\n", "3 tensor-parallel ranks"),
        ('baseline = "NVMe, PCIe 4"', 'baseline = "tape"', "baseline 'tape'"),
        ('read = "6.9GB/s"', 'read = "6.9"', "is not a rate"),
        ('read = "6.9GB/s"', "", "give what it reads"),
        ('capacity = "2TB"', 'capacity = "2"', "is not a size"),
        ('name = "two NVMe, PCIe 4"', 'name = "SATA SSD"', "two candidates have one name"),
        ("context_tokens = 8000", "", "give context_tokens, or a trace"),
        ("concurrency = [1, 2, 4]", "concurrency = []", "at least one concurrency"),
        ("concurrency = [1, 2, 4]", "concurrency = [0]", "workload.concurrency"),
        ("requests_per_s = 0.02", "requests_per_s = nan", "workload.requests_per_s"),
        ("requests_per_s = 0.02", "request_per_s = 0.02", "request_per_s"),
        ("[budget]", "[budget", "Expected ']'"),
        ('kind = "sata"', 'kind = "tape"', "'tape'"),
        ('kind = "sata"', 'together = ["tape"]', "'tape' is no candidate"),
        ('kind = "sata"', 'together = ["NVMe, PCIe 4", "NVMe, PCIe 4"]', "names a candidate twice"),
        ('read = "6.9GB/s"', 'curve = "\\u0000"', "cannot read the curve"),
        ("requests_per_s = 0.02", "requests_per_s = 1e-9", "workload.requests_per_s"),
        ("prefill_tokens_per_s = 6000", "prefill_tokens_per_s = 1e-9", "engine.prefill_tokens_per_s"),
        ("reuse = 0.7", 'trace = { kind = "trace", options = { path = "no.jsonl" } }', "cannot read the trace"),
    ],
)  # fmt: skip
def test_a_bad_plan_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, said: str
) -> None:
    text = EDGE.read_text()
    assert old in text
    path = tmp_path / "plan.toml"
    path.write_text(text.replace(old, new, 1))
    assert run_cli(["plan", str(path), "--out", str(tmp_path)]) == 2
    shown = capsys.readouterr().err.strip().splitlines()
    assert said in shown[-1]
    assert not any("Traceback" in line for line in shown)


def test_what_is_no_plan_at_all_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    for content in (b"", b"\xff", b"a = " + b"[" * 5000, b"#" * (1 << 21)):
        path.write_bytes(content)
        with pytest.raises(ConfigError):
            read_plan(path)
    with pytest.raises(ConfigError, match="cannot read"):
        read_plan(tmp_path / "absent.toml")


def test_a_trace_gives_rate_context_and_reuse(tmp_path: Path) -> None:
    lines = [
        {"timestamp": at * 1000, "input_length": 1024, "output_length": 10, "hash_ids": [0, 1 + at % 2]}
        for at in range(11)
    ]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
    workload = {**BASE["workload"], "trace": {"kind": "trace", "options": {"path": "trace.jsonl"}}}
    del workload["context_tokens"]
    plan = make_plan(msgspec.convert({**BASE, "workload": workload}, PlanFile), tmp_path)
    assert plan.demand.requests_per_s == pytest.approx(1.1)
    assert plan.demand.reuse == pytest.approx(1 - 3 / 22)
    assert plan.volume.session_bytes == 1024 * 327_680
    assert plan.hit_rates[-1].token_hit_rate == pytest.approx(19 / 22)
    assert plan.hit_rates[-1].capacity_bytes == plan.volume.total_bytes  # the trace stands for all 100 sessions
    assert "stands for 66.7 times as much" in plan.hit_rate_basis


def test_the_command_writes_json_and_a_page_that_hostile_names_cannot_break(tmp_path: Path) -> None:
    hostile = "<script>alert(1)</script>\\u001b[31m"
    path = tmp_path / "plan.toml"
    path.write_text(EDGE.read_text().replace("two NVMe, PCIe 4", hostile).replace("Edge box", hostile))
    result = CliRunner().invoke(cli, ["plan", str(path), "--out", str(tmp_path / "out"), "--json"])
    assert result.exit_code == 0, result.output
    plan = msgspec.json.decode((tmp_path / "out" / "plan.json").read_bytes(), type=Plan)
    assert json.loads(result.stdout) == json.loads(encode_json(plan))
    page = (tmp_path / "out" / "plan.html").read_text()
    assert "<script" not in page
    assert "\x1b" not in page
    root = xml.etree.ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>\n"))
    assert len(root.findall(".//{http://www.w3.org/2000/svg}polyline")) == 3 * 3 + 1
    assert not re.search(r"https?://(?!www\.w3\.org)", page)


def test_a_plan_is_the_same_every_time_and_progress_counts_all_of_it(tmp_path: Path) -> None:
    class Count:
        done = 0

        def begins(self, doing: str) -> None: ...

        def ended(self, done: str) -> None:
            self.done += 1

    file, count = read_plan(EDGE), Count()
    again = make_plan(file, EXAMPLES, count)
    assert count.done == steps(file)
    assert encode_json(again) == encode_json(example(EDGE))
    assert render_page(again) == render_page(example(EDGE))
