"""Gate G4 passes on the product, also when it is killed on the way, and fails on builds with a planted bug."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from forebay.bench.evidence import Kernel
from forebay.bench.gates.stability.log import Strike, read_log

SOURCES = Path(__file__).parents[2] / "src"


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """A directory that is not in memory: there the gate ends at once."""
    if doubt := Kernel().medium_of(tmp_path).doubt:
        pytest.skip(doubt)
    return tmp_path


def plan_file(folder: Path, **changed: object) -> Path:
    """A compressed profile: all four faults in a quarter of a minute."""
    roots = [folder / "a", folder / "b"]
    for root in roots:
        root.mkdir(parents=True)
    options = {
        "roots": [str(root) for root in roots], "duration_s": 18.0, "block_bytes": 65536, "capacity_bytes": 20_000_000,
        "host_bytes": 4_194_304, "prompt_blocks": 8, "requests_per_s": 20, "warmup_s": 1.5, "window_s": 3.0,
        "fault_every_s": 1.6, "fault_for_s": 1.0, "settle_s": 1.5, "slow_s": 0.05, "rest_s": 0.3, "look_s": 0.3,
        **changed,
    }  # fmt: skip
    text = 'title = "compressed"\n[[gate]]\nkind = "g4_stability"\n[gate.options]\n'
    text += "".join(f"{name} = {json.dumps(value)}\n" for name, value in options.items())
    # the machine of a test may be busy with anything: figures of time are not what this proves
    text += "[gate.options.limits]\nrss_growth_bytes = 40_000_000\np99_drift = 1000.0\nleast_loads = 20\n"
    (folder / "plan.toml").write_text(text)
    return folder / "plan.toml"


def start(plan: Path, sources: Path = SOURCES) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "forebay", "gate", "run", str(plan), "--out", str(plan.with_name("out")), "--json"]
    environment = {**os.environ, "PYTHONPATH": str(sources)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def finish(process: subprocess.Popen[str]) -> dict[str, dict[str, object]]:
    """The checks of the gate, by name."""
    output, errors = process.communicate(timeout=300)
    assert output, errors
    [result] = json.loads(output)["results"]
    return {"gate": result} | {check["name"]: check for check in result["checks"]}


def wait_until_closed(path: Path) -> None:
    """No process has the file open any more: the workers end with their supervisor."""
    ends_s = time.monotonic() + 60
    while time.monotonic() < ends_s:
        if not any(is_open(path, descriptors) for descriptors in Path("/proc").glob("[0-9]*/fd")):
            return
    pytest.fail(f"somebody still writes {path}")


def is_open(path: Path, descriptors: Path) -> bool:
    try:
        return any(each.readlink() == path for each in descriptors.iterdir())
    except OSError:  # it has ended meanwhile
        return False


def test_the_product_passes_although_the_gate_is_killed_on_the_way(disk: Path) -> None:
    plan = plan_file(disk)
    killed = start(plan)
    assert killed.stderr is not None
    for line in killed.stderr:
        if line.startswith("[8/"):  # in the middle of the faults
            break
    killed.kill()
    killed.communicate()
    for worker in (0, 1):
        wait_until_closed(disk / f"out/g4/worker{worker}.log")
    before = list(read_log(disk / "out/g4/log.jsonl"))
    found = finish(start(plan))
    assert {name: check["outcome"] for name, check in found.items() if check["outcome"] != "pass"} == {}
    after = list(read_log(disk / "out/g4/log.jsonl"))
    assert after[: len(before)] == before, "what was measured is kept"
    strikes = [line.number for line in after if isinstance(line, Strike)]
    assert strikes == sorted(set(strikes)), "no fault strikes twice"
    assert "gone on with 1 times" in found["gate"]["reasons"][0]  # type: ignore[index]
    assert list(Path(disk / "a").iterdir()) == list(Path(disk / "b").iterdir()) == []


def until(process: subprocess.Popen[str], words: str, lines: int = 1) -> None:
    """So many lines with these words have been said."""
    assert process.stderr is not None
    for line in process.stderr:
        lines -= words in line
        if lines == 0:
            return
    pytest.fail(f"it ended and never said {words!r} so often")


def test_devices_that_go_when_the_gate_says_so_and_for_good(disk: Path) -> None:
    """Both at once. What goes is the gate's whole directory in a root."""
    once = start(plan_file(disk / "once", duration_s=14.0, faults=["pulled device"], fault_every_s=60, fault_for_s=3.0))
    ever = start(plan_file(disk / "ever", duration_s=60.0, faults=[]))
    until(once, "pull the device under")
    [scratch] = (disk / "once/a").iterdir()
    scratch.rename(disk / "pulled")
    until(once, " % of ", 2)
    (disk / "pulled").rename(scratch)
    until(ever, " % of ")
    [scratch] = (disk / "ever/a").iterdir()
    scratch.rename(disk / "pulled")
    found = finish(ever)
    assert (found["gate"]["outcome"], found["unexpected_errors"]["outcome"]) == ("fail", "fail")
    assert "file vanished" in str(found["unexpected_errors"]["why"])
    assert (found["wrong_bytes"]["outcome"], found["miscounted_bytes"]["outcome"]) == ("pass", "invalid")
    assert "gate close failed: 1" in str(found["gate"]["reasons"])
    found = finish(once)
    assert {name: check for name, check in found.items() if check["outcome"] != "pass"} == {}
    assert int(str(found["fault_seen@pulled device"]["measured"])) >= 1


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs memory that looks like a disk")
def test_memory_ends_it_at_once() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        found = finish(start(plan_file(Path(folder) / "run")))
    assert found["gate"]["outcome"] == found["roots_on_disk"]["outcome"] == "invalid"
    assert "which keeps files in memory" in str(found["gate"]["stopped_early"])


@dataclass(frozen=True)
class Bug:
    file: str
    before: str
    after: str


SEGMENTS = f"/dev/shm/forebay-planted-{os.getpid()}-"
PLANTED = {
    "wrong_bytes": Bug(
        "tiers/file/root.py",
        "        self.proved((key,))\n        return Outcome.OK",
        "        view[5000] ^= key[0] < 16\n        self.proved((key,))\n        return Outcome.OK",
    ),
    "unsound_rests": Bug(
        "stage.py",
        "        if still_written_by is None:\n            self.pool.give(slot)",
        "        if still_written_by is None:\n            pass",
    ),
    "rss_growth": Bug(
        "executor.py",
        "            outcomes = work()\n",
        "            outcomes = work()\n            self.__dict__.setdefault('kept', []).append(b'x' * 2**20)\n",
    ),
    "descriptor_growth": Bug(
        "tiers/file/root.py",
        "        finally:\n            self._calls.close(temp.descriptor)\n",
        "        finally:\n            if claim.key[0] % 4:\n                self._calls.close(temp.descriptor)\n",
    ),
    "shm_segments_left": Bug(
        "hostpool.py",
        "        self.slots = slots\n",
        f"        self.slots = slots\n        self._segment = open(f'{SEGMENTS}{{id(self)}}', 'wb')\n",
    ),
}
"""By the check that must find it."""
AT_THE_END = {"shm_segments_left"}
"""What is left then. All the others end the gate early."""


def planted(name: str, folder: Path) -> Path:
    """A build with a bug."""
    bug = PLANTED[name]
    shutil.copytree(SOURCES / "forebay", folder / "forebay", ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / "forebay" / bug.file
    assert path.read_text().count(bug.before) == 1, f"the bug {name} has to follow the code"
    path.write_text(path.read_text().replace(bug.before, bug.after))
    return folder


def test_builds_with_a_planted_bug_fail_and_end_early(disk: Path) -> None:
    """All at once: they wait for time to go by more than they work."""
    builds = {
        name: start(
            plan_file(disk / name / "run", requests_per_s=12, duration_s=10.0 if name in AT_THE_END else 60.0),
            planted(name, disk / name / "build"),
        )
        for name in PLANTED
    }
    try:
        for name, build in builds.items():
            found = finish(build)
            assert found[name]["outcome"] == "fail", (name, found)
            assert found["gate"]["outcome"] == "fail"
            assert ("stopped after" in str(found["gate"]["stopped_early"])) == (name not in AT_THE_END)
    finally:
        for build in builds.values():
            build.kill()
        for segment in Path("/dev/shm").glob(f"{Path(SEGMENTS).name}*"):
            segment.unlink()
