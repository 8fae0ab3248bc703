"""Traces through the engine under virtual time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from forebay.bench.progress import Silence
from forebay.bench.replay.options import ReplayOptions, check_options
from forebay.bench.replay.page import render_page
from forebay.bench.replay.results import Outcome, ReplayRecord
from forebay.bench.replay.run import run_replays
from forebay.choice import LoadOrCompute
from forebay.cli import cli
from forebay.errors import ConfigError

BLOCK_BYTES = 512 * 262_144


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """40 conversations of 3 turns each, a turn 8 blocks longer than the one before, 100 s apart."""
    path = tmp_path / "trace.jsonl"
    lines = [
        {
            "timestamp": 1000 * (100 * turn + conversation),
            "input_length": 512 * 8 * (turn + 1),
            "output_length": 10,
            "hash_ids": [1000 * conversation + block for block in range(8 * (turn + 1))],
        }
        for turn in range(3)
        for conversation in range(40)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def run(trace: Path, **changes: Any) -> ReplayRecord:
    options = ReplayOptions(trace=trace, load_or_compute=LoadOrCompute.OFF, **{"dram_bytes": (10**11,), **changes})
    return run_replays(options, command=("forebay",), progress=Silence())


def only(record: ReplayRecord) -> Outcome:
    assert len(record.outcomes) == 1
    return record.outcomes[0]


def test_what_can_hit_hits_and_what_is_not_loaded_is_computed(trace: Path) -> None:
    outcome = only(run(trace))
    assert outcome.requests == 120
    assert outcome.wanted_blocks == 40 * (8 + 16 + 24)
    assert outcome.dram_blocks + outcome.disk_blocks == outcome.loaded_blocks == 40 * (8 + 16)
    assert outcome.loaded_share == pytest.approx(0.5, abs=0.001)
    assert outcome.read_bytes == outcome.disk_blocks * BLOCK_BYTES
    assert outcome.written_bytes == 40 * 24 * BLOCK_BYTES
    assert sum(each.requests for each in outcome.bins) == 120
    assert sum(each.read_bytes_per_s for each in outcome.bins) * 60 == pytest.approx(outcome.read_bytes)


def test_a_replay_ends_with_the_last_write_where_nothing_else_is_under_way(trace: Path) -> None:
    outcome = only(run(trace, requests=1))
    assert outcome.written_bytes == 8 * BLOCK_BYTES
    assert len(outcome.bins) == 1


def test_a_larger_tier_hits_more_and_a_slower_medium_is_slower(trace: Path) -> None:
    record = run(trace, disk_bytes=(100 * BLOCK_BYTES, 10**12), dram_bytes=(64 * BLOCK_BYTES,))
    small, large = record.outcomes
    assert small.hit_share < large.hit_share
    slow = only(run(trace, media=("sata-ssd@25gbe",), dram_bytes=(64 * BLOCK_BYTES,)))
    assert slow.ttft_p90_s > 1.5 * large.ttft_p90_s


def test_processes_and_repetition_change_nothing(trace: Path) -> None:
    one = run(trace, evictions=("lru", "prefix_aware"), requests=60)
    assert one == run(trace, evictions=("lru", "prefix_aware"), requests=60)
    assert one == run(trace, evictions=("lru", "prefix_aware"), requests=60, processes=2)


def test_an_azure_trace_never_hits(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.03,3180,8\n"
    )
    outcome = only(run(path))
    assert (outcome.requests, outcome.hit_share) == (2, 0.0)
    assert outcome.ttft_p50_s > 0


def test_the_page_is_whole_and_foreign_text_is_harmless(trace: Path) -> None:
    record = msgspec.structs.replace(run(trace), workload="<script>alert(1)</script>\x1b[31m")
    page = render_page(record)
    assert "<script" not in page
    assert "\x1b" not in page
    assert page.count("<svg") == 5
    assert "The 48 instances are one that prefills 48 times as fast" in page
    assert "instances are one" not in render_page(msgspec.structs.replace(record, accelerators=1))
    assert "http:" not in page
    assert "https:" not in page


@pytest.mark.parametrize(
    "changes",
    [
        {"profile": "none"}, {"media": ("floppy",)}, {"media": ("none.json",)}, {"evictions": ("none",)},
        {"admissions": ()}, {"dram_bytes": (1,)}, {"dram_bytes": (10**18,)}, {"disk_bytes": (1,)}, {"pace": 0.0},
        {"pace": float("nan")}, {"bin_s": -1.0}, {"processes": 0}, {"accelerators": 0}, {"trace_block_tokens": 0},
        {"out": Path("/nonexistent")},
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_before_anything_runs(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as refused:
        check_options(ReplayOptions(**changes))
    assert "\n" not in str(refused.value)


def test_the_command_writes_json_and_a_page(trace: Path, tmp_path: Path) -> None:
    arguments = [
        "sim",
        "replay",
        str(trace),
        "--requests",
        "30",
        "--dram",
        "20GB,40GB",
        "--json",
        "--out",
        str(tmp_path),
    ]
    result = CliRunner().invoke(cli, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    shown = json.loads(result.stdout)
    assert len(shown["outcomes"]) == 2
    assert json.loads((tmp_path / "sim-replay.json").read_text()) == shown
    assert (tmp_path / "sim-replay.html").read_text().startswith("<!DOCTYPE html>")
