"""The restore benchmark: a whole run on real disk with an emulated accelerator, and each part by itself."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path

import pytest
import restore_kit
from click.testing import CliRunner

from forebay.bench.restore.tables import encode_parquet, request_row
from forebay.cli import cli, run

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


def test_requests_are_columns_where_pyarrow_is_installed() -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    encoded = encode_parquet(restore_kit.requests())
    assert encoded is not None
    rows = parquet.read_table(io.BytesIO(encoded)).to_pylist()
    assert rows == [request_row(each) for each in restore_kit.requests()]


# --- what cannot work is refused before anything is made


def refused(folder: Path, plan: str, capsys: pytest.CaptureFixture[str]) -> str:
    (folder / "plan.toml").write_text(plan)
    assert run(["bench", "restore", str(folder / "plan.toml"), "--out", str(folder)]) == 2
    assert {place.name for place in folder.iterdir()} <= {"plan.toml", "pool"}
    *_, said = capsys.readouterr().err.splitlines()
    assert said.startswith("forebay: ")
    return said


def test_plans_that_cannot_work_are_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "pool").mkdir()
    group = '[[group]]\nname = "a"\nrole = "candidate"\n'
    stored = f'{group}roots = ["{tmp_path / "pool"}"]\n'
    fast = "block_tokens = 256, kv_scale = 0.004"
    for plan, said in {
        "": "missing required field `group`",
        "group = []": "there is nothing to compare",
        "group = 1": "Expected `array`",
        "x = ": "Invalid value",
        f"concurrency = [0]\n{group}": "concurrency must be numbers from 1",
        f"concurrency = [2, 2]\n{group}": "a concurrency is given twice",
        f"rounds = 0\n{group}": "rounds must be 1 or more",
        f"seed = -1\n{group}": "seed must be from 0",
        f"sessions = 1\n{group}": "sessions must be from the largest concurrency",
        f"{group}[limits]\ncontrol_drift = nan": "limits: control_drift must be a number",
        f"{group}[limits]\nforeign_share = inf": "limits: foreign_share must be a number",
        f"{group}[limits]\nrounds = 0": "limits: rounds must be 1",
        f"{group}{group}": "two groups have one name",
        f"{group}instances = 0": "instances must be from 1",
        f'{group}limit = "1MB/s"': "a limit needs roots",
        f'{stored}limit = "fast"': "is not a rate",
        f'{group}roots = ["{tmp_path / "none"}"]': "is not a directory",
        f'{group}roots = ["a\\u0000b"]': "a path is wanted",
        group: "give one or more roots to store in",
        group.replace("candidate", "shared"): "a shared pool needs 2 instances",
        stored.replace("candidate", "recompute"): "what is recomputed is not stored",
        f'{group}target = "nothing"': "no 'nothing' among the bench.restore.targets",
        f'{group}target = "os.path"': "has no Options and build",
        f"{stored}options = {{ speed = 1 }}": "unknown field `speed`",
        f'{stored}options = {{ profile = "x" }}': "no engine profile is named",
        f"{stored}options = {{ time_scale = 0.0 }}": "time_scale must be above 0",
        f"{stored}options = {{ kv_scale = 1e-9 }}": "a block has 0 bytes",
        f"{stored}options = {{ {fast}, host_bytes = 8192 }}": "holds less than 16 blocks",
        f"{stored}options = {{ {fast}, host_bytes = 4000000000000 }}": "of memory for its host pools",
        f'{stored}limit = "1kB/s"\noptions = {{ {fast} }}': "takes more than a second",
        f'{stored}[workload]\nkind = "cold"\noptions = {{ sessions = 1 }}': "has 1 requests that come back where 32",
        f'{stored}[workload]\nkind = "a b"': "names none of the workloads",
        '[[group]]\nname = "\\u001b[2J"\nrole = "recompute"': "is no name of a group",
    }.items():
        assert said in refused(tmp_path, plan, capsys), plan
    assert not list((tmp_path / "pool").iterdir())


def test_a_disk_that_is_too_small_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pool").mkdir()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 10**6))
    assert "make room, or ask for fewer" in refused(tmp_path, PLAN.format(root=tmp_path / "pool"), capsys)
    assert not list((tmp_path / "pool").iterdir())


def test_a_polite_end_in_the_middle_of_a_wave_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "pool").mkdir()
    (tmp_path / "plan.toml").write_text(
        PLAN.format(root=tmp_path / "pool").replace("time_scale = 0.001", "time_scale = 9")
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "forebay", "bench", "restore", str(tmp_path / "plan.toml"), "--out", str(tmp_path)],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    seen = next(line for line in process.stderr if "pool: populated" in line)  # the waves begin
    assert list((tmp_path / "pool").iterdir()), seen
    process.terminate()
    process.stderr.read()
    assert process.wait(timeout=60) == 128 + 15
    process.stderr.close()
    assert not list((tmp_path / "pool").iterdir())
    assert not (tmp_path / "restore.json").exists()
