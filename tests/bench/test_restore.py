"""The restore benchmark: a whole run on real disk with an emulated accelerator, and each part by itself."""

from __future__ import annotations

import json
import xml.etree.ElementTree
from pathlib import Path

import pytest
from click.testing import CliRunner

from forebay.cli import cli

PLAN = """
concurrency = [4]
rounds = 2
[limits]
rounds = 2
control_drift = 1000.0
foreign_share = 1000.0
[workload]
kind = "cold"
[workload.options]
sessions = 4
prefix_tokens = 1024
output_tokens = 4
[[group]]
name = "recompute"
role = "recompute"
options = {{ block_tokens = 256, kv_scale = 0.004, time_scale = 0.001 }}
[[group]]
name = "baseline"
role = "baseline"
roots = ["{root}"]
limit = "100MB/s"
options = {{ block_tokens = 256, kv_scale = 0.004, time_scale = 0.001, host_bytes = 8000000 }}
[[group]]
name = "pool"
role = "shared"
instances = 2
roots = ["{root}"]
options = {{ block_tokens = 256, kv_scale = 0.004, time_scale = 0.001, host_bytes = 8000000 }}
"""


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("restore")
    (folder / "pool").mkdir()
    (folder / "plan.toml").write_text(PLAN.format(root=folder / "pool"))
    result = CliRunner().invoke(cli, ["bench", "restore", str(folder / "plan.toml"), "--out", str(folder), "--json"])
    (folder / "stdout.json").write_text(result.stdout)
    assert result.exit_code in (0, 3), result.output  # 3: where the temporary directory is not on a disk
    return folder


def test_a_run_restores_every_block_with_the_outputs_of_recomputing(out: Path) -> None:
    record = json.loads((out / "restore.json").read_text())
    assert record == json.loads((out / "stdout.json").read_text())
    assert len(record["requests"]) == 3 * 2 * 4
    for each in record["requests"]:
        assert each["error"] == ""
        assert each["output_tokens"] == 4
        assert each["hit_tokens"] == (0 if each["group"] == "recompute" else 1024)
    assert all(each["tokens_equal"] for each in record["comparisons"])
    shared = [each["written_by"] == each["instance"] for each in record["requests"] if each["group"] == "pool"]
    assert shared.count(True) == shared.count(False)  # its own sessions, and the other's
    assert not list((out / "pool").iterdir())  # what was made is removed


def test_the_throttled_group_says_so_and_is_as_slow_as_it_says(out: Path) -> None:
    record = json.loads((out / "restore.json").read_text())
    facts = {group["name"]: group["facts"] for group in record["groups"]}
    assert "100MB/s" in facts["baseline"]["throttled"]
    assert "throttled" not in facts["pool"]
    waves = [wave for wave in record["waves"] if wave["group"] == "baseline"]
    for wave in waves:
        assert wave["wanted_bytes"] == 4 * 4 * 260_048
        assert wave["ended_s"] - wave["began_s"] >= wave["wanted_bytes"] / 100e6


def test_requests_are_lines_and_the_picture_is_well_formed(out: Path) -> None:
    lines = [json.loads(line) for line in (out / "requests.jsonl").read_text().splitlines()]
    assert len(lines) == 24
    assert all(line["end_to_end_s"] >= line["ttft_s"] > 0 for line in lines)
    picture = xml.etree.ElementTree.fromstring((out / "restore.svg").read_text())
    assert "baseline" in "".join(picture.itertext())
