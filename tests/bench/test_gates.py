"""Plans, verdicts, and runs that are killed at every point and go on."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import zipfile
from pathlib import Path

import pytest

from forebay.bench import files
from forebay.bench.bundle import verify_bundle
from forebay.bench.gates.plan import read_plan
from forebay.bench.gates.run import RECORD_NAME, read_record, run_plan, steps
from forebay.bench.gates.verdicts import Bound, GatesRecord, Outcome, check, worst
from forebay.cli import run
from forebay.errors import ConfigError


def plan_file(path: Path, *gates: str, top: str = "") -> Path:
    text = f'title = "a plan"\n{top}\n'
    for number, options in enumerate(gates):
        text += f'[[gate]]\nkind = "gate_kit.scripted"\nname = "g{number}"\n[gate.options]\n{options}\n'
    path.write_text(text)
    return path


def test_no_sample_never_passes() -> None:
    assert worst([]) is Outcome.INVALID
    assert check("a", None, Bound.AT_MOST, 1, "s").outcome is Outcome.INVALID
    assert check("a", 0, Bound.AT_MOST, 1, "s", invalid="warm").outcome is Outcome.INVALID
    assert check("a", float("nan"), Bound.AT_MOST, 1, "s").outcome is Outcome.INVALID


@pytest.mark.parametrize(
    ("gates", "exit_code", "outcomes"),
    [
        (["measured = 1"], 0, ["pass"]),
        (["measured = 1", "measured = 2"], 1, ["pass", "fail"]),
        (["samples = false", "measured = 1"], 3, ["invalid", "pass"]),
        (["measured = 2", "samples = false"], 1, ["fail", "invalid"]),
        (['raises = "the disk is gone"', "measured = 1"], 3, ["invalid", "pass"]),
    ],
)
def test_verdicts_and_exit_codes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], gates: list[str], exit_code: int, outcomes: list[str]
) -> None:
    plan = plan_file(tmp_path / "plan.toml", *gates)
    assert run(["gate", "run", str(plan), "--out", str(tmp_path / "out"), "--json"]) == exit_code
    record = json.loads(capsys.readouterr().out)
    assert [result["outcome"] for result in record["results"]] == outcomes
    assert record["plan_text"] == plan.read_text()
    assert (tmp_path / "out/plan.toml").read_text() == plan.read_text()
    verify_bundle(tmp_path / "out/gates.zip")
    with zipfile.ZipFile(tmp_path / "out/gates.zip") as bundle:
        assert bundle.read("gates.json") == (tmp_path / "out" / RECORD_NAME).read_bytes()
        measured = [result["gate"] for result in record["results"] if result["files"]]
        assert {f"{name}/found.txt" for name in measured} <= set(bundle.namelist())
        page = (tmp_path / "out/report.html").read_bytes()
        assert bundle.read("report.html") == page
        assert f'<span class="word">{record_outcome(outcomes)}</span>'.encode() in page


def record_outcome(outcomes: list[str]) -> str:
    return next(each.upper() for each in ("fail", "invalid", "pass") if each in outcomes)


def test_text_names_every_check_with_its_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_file(tmp_path / "plan.toml", "measured = 3\nlimit = 2", 'raises = "the disk is gone"')
    assert run(["gate", "run", str(plan), "--out", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().out
    for words in ("g0: FAIL", "value", "3", "at most 2", "g1: INVALID", "the disk is gone", "a plan: FAIL"):
        assert words in said


def test_stop_loss_over_gates(tmp_path: Path) -> None:
    plan = plan_file(tmp_path / "plan.toml", "measured = 2", "measured = 1", top='after_failure = "stop"')
    record = run_plan(read_plan(plan), tmp_path / "out")
    assert [result.outcome for result in record.results] == [Outcome.FAIL, Outcome.INVALID]
    assert "not run: g0 ended as FAIL" in record.results[1].reasons[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "title"),
        ('title = "t"\ngate = []', "has no gate"),
        ('title = "t"\nspeed = 1\n[[gate]]\nkind = "gate_kit.scripted"', "speed"),
        ('title = "t"\n[[gate]]\nkind = "gate_kit.scripted"\n[[gate]]\nkind = "gate_kit.scripted"', "two gates"),
        ('title = "t"\n[[gate]]\nkind = "gate_kit.scripted"\nname = "../up"', "no name for a gate"),
        ('title = "t"\n[[gate]]\nkind = "no_such_gate"', "no_such_gate"),
        ('title = "t"\n[[gate]]\nkind = "plan"', "no Options and build"),
        ('title = "t"\n[[gate]]\nkind = "gate_kit.scripted"\noptions = {steps = -1}', "steps must be"),
        ('title = "t"\n[[gate]]\nkind = "gate_kit.scripted"\noptions = {lmit = 1}', "lmit"),
        ("title = \xe9", "plan.toml"),
    ],
)
def test_bad_plans(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: str) -> None:
    (tmp_path / "plan.toml").write_bytes(text.encode("latin-1"))
    assert run(["gate", "run", str(tmp_path / "plan.toml"), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_the_plan_of_the_demonstration_can_be_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "demo-gates/baseline").mkdir(parents=True)
    (tmp_path / "demo-gates/candidate").mkdir()
    monkeypatch.chdir(tmp_path)
    plan = read_plan(Path(__file__).parents[2] / "examples/gates-demo.toml")
    assert list(plan.gates) == ["g1", "g2", "g3", "g4"]


def test_a_plan_is_not_changed_on_the_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path / "out")]
    plan = plan_file(tmp_path / "plan.toml", "measured = 3\nlimit = 2")
    assert run(["gate", "run", str(plan), *out]) == 1
    plan_file(plan, "measured = 3\nlimit = 3")
    assert run(["gate", "run", str(plan), *out]) == 2
    assert "the plan is not the one" in capsys.readouterr().err
    plan.write_text(plan.read_text().replace("limit = 3", "limit = 2"))
    assert run(["gate", "run", str(plan), *out]) == 1


def test_directories_of_others(tmp_path: Path) -> None:
    plan = read_plan(plan_file(tmp_path / "plan.toml", "measured = 1"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.tex").touch()
    with pytest.raises(ConfigError, match=r"holds 'thesis\.tex'"):
        run_plan(plan, tmp_path / "mine")
    (tmp_path / "halved").mkdir()
    for half in (".gates.json.ab12cd", ".plan.toml.ab12cd"):
        (tmp_path / "halved" / half).write_text("{")
    assert run_plan(plan, tmp_path / "halved").outcome is Outcome.PASS
    assert sorted(each.name for each in (tmp_path / "halved").iterdir()) == [".lock", "g0", "gates.json", "plan.toml"]
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / RECORD_NAME).write_text("{}")
    with pytest.raises(ConfigError, match="no record of gates"):
        run_plan(plan, tmp_path / "broken")
    (tmp_path / "busy").mkdir()
    with (tmp_path / "busy/.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another process runs gates"):
            run_plan(plan, tmp_path / "busy")
    assert run_plan(plan, tmp_path / "busy").outcome is Outcome.PASS


# --- killed


class Killer:
    """The process dies at the n-th event of its progress, or before or after the n-th file that is written."""

    def __init__(self, events: int) -> None:
        self._left = events

    def strike(self) -> None:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def begins(self, doing: str) -> None:
        self.strike()

    def ended(self, done: str) -> None:
        self.strike()


def dies(plan: Path, out: Path, events: int) -> bool:
    child = os.fork()
    if child == 0:
        try:
            killer, replace = Killer(events), files._replace

            def dangerous(path: Path, content: bytes) -> None:
                killer.strike()
                replace(path, content)
                killer.strike()

            files._replace = dangerous
            run_plan(read_plan(plan), out, progress=killer)
        except BaseException:
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def findings(record: GatesRecord) -> list[tuple[str, Outcome, float | None]]:
    return [(each.gate, each.outcome, each.checks[0].measured) for each in record.results]


def test_killed_anywhere_it_goes_on_and_decides_nothing_twice(tmp_path: Path) -> None:
    for events in range(1, 100):
        out, diary = tmp_path / f"out{events}", tmp_path / f"diary{events}"
        line = f'diary = "{diary}"'
        plan = plan_file(tmp_path / "plan.toml", f"measured = 1\n{line}", f"measured = 0.5\n{line}", line)
        was_killed = dies(plan, out, events)
        before = read_record(out)
        decided = [result.gate for result in before.results] if before else []
        assert before is None or (len(decided) == 3) == (before.outcome is Outcome.PASS), (
            "a part of a plan never passes"
        )
        done_before = diary.read_text().splitlines() if diary.exists() else []
        record = run_plan(read_plan(plan), out)
        assert findings(record) == [(f"g{n}", Outcome.PASS, m) for n, m in enumerate((1, 0.5, 1))]
        done_after = diary.read_text().splitlines()[len(done_before) :]
        assert not any(line.split()[0] in decided for line in done_after)
        names = {line.split()[2] for line in (*done_before, *done_after) if line.startswith("g1")}
        assert len(names) == 1 or before is None, "a resumed gate finds its directories again"
        assert len(record.starts) == (len(before.starts) if before else 0) + (len(decided) < 3)
        assert all(each.environment is not None for each in record.starts)
        attempts = [len(result.attempts) for result in record.results]
        assert sum(attempts) - 3 <= was_killed, "each attempt is counted"
        for gate, times in (before.attempts if before else {}).items():
            assert len(record.attempts[gate]) == len(times) + (gate not in decided)
        if not was_killed:
            break
    else:
        pytest.fail("the run has no end")
    assert events > 20


def test_a_run_of_another_version_is_not_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_file(tmp_path / "plan.toml", "measured = 1", "measured = 1")
    assert dies(plan, tmp_path / "out", 12)
    monkeypatch.setattr("forebay.__version__", "99.0")
    with pytest.raises(ConfigError, match=r"this is 99\.0"):
        run_plan(read_plan(plan), tmp_path / "out")


def test_a_full_disk_of_evidence_stops_the_run_and_decides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, replace = read_plan(plan_file(tmp_path / "plan.toml", "measured = 1", "measured = 1")), files._replace
    written: list[Path] = []

    def full(path: Path, content: bytes) -> None:
        written.append(path)
        if len(written) == 6:  # the second result
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(path, content)

    monkeypatch.setattr(files, "_replace", full)
    with pytest.raises(files.CannotWrite, match="No space left"):
        run_plan(plan, tmp_path / "out")
    record = read_record(tmp_path / "out")
    assert record is not None
    assert [result.gate for result in record.results] == ["g0"]
    monkeypatch.undo()
    assert run_plan(plan, tmp_path / "out").outcome is Outcome.PASS


def test_progress_hears_of_as_many_steps_as_were_announced(tmp_path: Path) -> None:
    ended: list[str] = []

    class Watch:
        def begins(self, doing: str) -> None: ...

        def ended(self, done: str) -> None:
            ended.append(done)

    plan = read_plan(plan_file(tmp_path / "plan.toml", "steps = 3", 'raises = "gone"'))
    run_plan(plan, tmp_path / "out", progress=Watch())
    assert len(ended) == steps(plan)
