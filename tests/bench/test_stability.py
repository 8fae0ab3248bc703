"""Gate G4: its faults, its findings from a log, and what its supervisor does when devices do not answer."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import subprocess
import threading
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.bench.evidence import Kernel, Medium
from forebay.bench.files import CannotWrite
from forebay.bench.gates.gate import Workplace
from forebay.bench.gates.stability import disks, supervisor
from forebay.bench.gates.stability.disks import Disks
from forebay.bench.gates.stability.faults import is_quiet, schedule
from forebay.bench.gates.stability.findings import Findings
from forebay.bench.gates.stability.log import (
    Closing,
    GateError,
    Line,
    Log,
    Look,
    Report,
    Resumed,
    Sample,
    Strike,
    WorkerEnded,
    WorkerStuck,
    read_log,
)
from forebay.bench.gates.stability.options import FaultKind, Limits, Options, check_machine, check_options
from forebay.bench.gates.stability.supervisor import Stopwatch
from forebay.bench.gates.verdicts import Outcome
from forebay.bench.progress import Silence
from forebay.errors import ConfigError

DAY = Options(
    roots=("a", "b"), duration_s=100.0, warmup_s=10.0, window_s=20.0, fault_every_s=10.0, fault_for_s=2.0, settle_s=1.0,
    slow_s=0.2, rest_s=1.0,
    limits=Limits(rss_growth_bytes=1000, descriptor_growth=3, p99_drift=2.0, least_loads=100),
)  # fmt: skip


# --- the fold


def report(**changed: object) -> Report:
    usual: dict[str, object] = {
        "age_s": 50.0, "covers_s": 1.0, "loads": 10, "disk_loads": 8, "loaded_blocks": 80, "disk_blocks": 64,
        "offered_blocks": 10, "wrong_blocks": 0, "wrong_bytes": 0, "unsound": (), "rss_bytes": 5000, "descriptors": 20,
        "threads": 9, "shm_segments": (), "errors": {}, "disk_load_s": (0.01,) * 8,
    }  # fmt: skip
    return Report(**{**usual, **changed})  # type: ignore[arg-type]


def sound_log() -> list[Line]:
    """A run that passes."""
    faults = schedule(DAY)
    media = tuple(Medium(path=root, filesystem="ext4", source="/dev/sda1", device="sda1") for root in DAY.roots)
    lines: list[Line] = [Resumed(elapsed_s=0.0, at="now", media=media), Look(elapsed_s=0.0, pool_bytes=100)]
    for second in range(1, 101):
        found = report(age_s=float(second))
        for fault in faults:
            if fault.begins_s == second:
                lines.append(Strike(elapsed_s=second, number=fault.number, kind=fault.kind, target=fault.target))
            if fault.begins_s < second <= fault.begins_s + 1:
                errors = {FaultKind.FULL: {"file ENOSPC": 2}, FaultKind.LOST: {"file vanished": 1}}
                slow_s = (0.3,) if fault.kind is FaultKind.SLOW else (0.01,)
                found = report(age_s=float(second), errors=errors.get(fault.kind, {}), disk_load_s=slow_s)
                if fault.kind is FaultKind.KILL:
                    lines.append(WorkerEnded(elapsed_s=second, worker=0, incarnation=0, exit_code=-9, was_asked=True))
        lines.append(Sample(elapsed_s=second, worker=0, incarnation=1, report=found))
        lines.append(Sample(elapsed_s=second, worker=1, incarnation=2, report=report(age_s=float(second))))
    lines.append(Closing(elapsed_s=100.0, files_bytes=5, counted_bytes=5, temporary_files=0, shm_segments=0))
    return lines


def outcomes(lines: list[Line]) -> dict[str, Outcome]:
    findings = Findings(DAY, schedule(DAY))
    for line in lines:
        findings.add(line)
    return {each.name: each.outcome for each in findings.checks()}


def sample(second: int, **changed: object) -> Sample:
    return Sample(elapsed_s=second, worker=0, incarnation=1, report=report(age_s=float(second), **changed))


def test_a_sound_run_passes_and_nothing_else_does() -> None:
    assert set(outcomes(sound_log()).values()) == {Outcome.PASS}
    assert {kind for kind in outcomes(sound_log()) if kind.startswith("fault")} == {
        f"fault_seen@{kind.value}" for kind in DAY.faults
    }
    assert Outcome.PASS not in outcomes([]).values()


@pytest.mark.parametrize(
    ("line", "name"),
    [
        (sample(60, wrong_blocks=1, wrong_bytes=1), "wrong_bytes"),
        (sample(60, wrong_blocks=1, wrong_bytes=1), "wrong_tokens"),
        (sample(60, unsound=("host: 2 pins where 1 are held",)), "unsound_rests"),
        (WorkerEnded(elapsed_s=60, worker=1, incarnation=2, exit_code=-11, was_asked=False), "crashes"),
        (WorkerEnded(elapsed_s=60, worker=1, incarnation=2, exit_code=1, was_asked=True), "crashes"),
        (WorkerStuck(elapsed_s=60, worker=1, incarnation=2), "crashes"),
        (sample(60, errors={"file read corrupt": 1}), "unexpected_errors"),
        (sample(20, errors={"file ENOSPC": 1}), "unexpected_errors"),
        (sample(68, errors={"file stopped": 1}), "unexpected_errors"),  # a root was lost from 60 to 62 s
        (sample(60, rss_bytes=6001), "rss_growth"),
        (sample(60, descriptors=24), "descriptor_growth"),
        (Look(elapsed_s=60, pool_bytes=DAY.capacity_bytes + 1), "pool_bytes"),
    ],
)
def test_what_fails_it_and_that_nothing_can_mend_it(line: Line, name: str) -> None:
    lines = sound_log()
    at = next(i for i, each in enumerate(lines) if each.elapsed_s >= line.elapsed_s)
    lines.insert(at, line)
    assert outcomes(lines)[name] is Outcome.FAIL
    findings = Findings(DAY, schedule(DAY))
    for each in lines[:at]:
        findings.add(each)
    assert findings.lost_cause == ""
    findings.add(line)
    assert findings.lost_cause != ""


@pytest.mark.parametrize(
    ("closing", "name"),
    [
        (Closing(elapsed_s=100, files_bytes=5, counted_bytes=6, temporary_files=0, shm_segments=0), "miscounted_bytes"),
        (
            Closing(elapsed_s=100, files_bytes=5, counted_bytes=5, temporary_files=1, shm_segments=0),
            "temporary_files_left",
        ),
        (
            Closing(elapsed_s=100, files_bytes=5, counted_bytes=5, temporary_files=0, shm_segments=1),
            "shm_segments_left",
        ),
    ],
)
def test_what_is_left_over_fails_it(closing: Closing, name: str) -> None:
    assert outcomes([*sound_log()[:-1], closing])[name] is Outcome.FAIL


def test_growth_is_over_what_a_warm_worker_had() -> None:
    cold = [sample(second, rss_bytes=100) for second in range(1, 10)]
    assert outcomes([*cold, *sound_log()])["rss_growth"] is Outcome.PASS


def test_latencies_drift() -> None:
    lines = sound_log()
    for at, line in enumerate(lines):
        if isinstance(line, Sample) and line.elapsed_s > 80:
            lines[at] = sample(int(line.elapsed_s), disk_load_s=(0.03,) * 8)
    assert outcomes(lines)["p99_drift"] is Outcome.FAIL
    without = [line for line in sound_log() if not (isinstance(line, Sample) and line.elapsed_s > 79)]
    assert outcomes(without)["p99_drift"] is Outcome.INVALID


def test_a_worker_that_gets_nothing_from_disk_any_more() -> None:
    assert outcomes(sound_log())["last_disk_loads@worker 1"] is Outcome.PASS
    lines = [
        msgspec.structs.replace(line, report=report(disk_loads=0, disk_load_s=()))
        if isinstance(line, Sample) and line.worker == 1 and line.elapsed_s > 60 else line
        for line in sound_log()
    ]  # fmt: skip
    found = outcomes(lines)
    assert {name for name, outcome in found.items() if outcome is not Outcome.PASS} == {"last_disk_loads@worker 1"}
    assert found["last_disk_loads@worker 1"] is Outcome.FAIL


@pytest.mark.parametrize(("bytes_per_hour", "outcome"), [(30_000_000, Outcome.FAIL), (3_000_000, Outcome.PASS)])
@pytest.mark.parametrize("workers", [2, 8])
def test_a_slow_leak_shows_in_three_days(workers: int, bytes_per_hour: int, outcome: Outcome) -> None:
    """Although workers are killed, and begin anew with what a new process has."""
    options = Options(roots=("a", "b"), workers=workers)
    faults = schedule(options)
    findings = Findings(options, faults)
    killed = [fault for fault in faults if fault.kind is FaultKind.KILL]
    assert {fault.target for fault in killed} == set(range(workers)), "each is killed some time"
    for elapsed_s in range(600, int(options.duration_s) + 1, 600):
        for worker in range(workers):
            began_s = [fault.begins_s for fault in killed if fault.target == worker and fault.begins_s <= elapsed_s]
            age_s = elapsed_s - max(began_s, default=0.0)
            leaked = report(age_s=age_s, rss_bytes=10**9 + int(bytes_per_hour * age_s / 3600))
            incarnation = worker + workers * len(began_s)
            findings.add(Sample(elapsed_s=elapsed_s, worker=worker, incarnation=incarnation, report=leaked))
    assert {each.name: each.outcome for each in findings.checks()}["rss_growth"] is outcome


def test_a_fault_that_nobody_noticed_proves_nothing() -> None:
    lines = [line for line in sound_log() if not (isinstance(line, Sample) and "file vanished" in line.report.errors)]
    assert outcomes(lines)["fault_seen@lost root"] is Outcome.INVALID


def test_memory_is_no_disk() -> None:
    findings = Findings(DAY, schedule(DAY))
    media = [Medium(path=root, filesystem="tmpfs", source="tmpfs", doubt=f"{root} is memory") for root in DAY.roots]
    findings.add(Resumed(elapsed_s=0.0, at="now", media=tuple(media)))
    assert findings.lost_cause == "a is memory"
    [found] = [each for each in findings.checks() if each.name == "roots_on_disk"]
    assert (found.outcome, found.measured, found.why) == (Outcome.INVALID, 0, "a is memory")


def test_what_is_left_of_a_device_that_is_gone_is_not_known() -> None:
    found = outcomes([*sound_log()[:-1], GateError(elapsed_s=100, kind="close failed")])
    unknown = {"miscounted_bytes", "temporary_files_left", "shm_segments_left"}
    assert {name for name, outcome in found.items() if outcome is not Outcome.PASS} == unknown
    assert {found[name] for name in unknown} == {Outcome.INVALID}


def test_roots_that_answer_with_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    found = Disks([tmp_path / "a", tmp_path / "b"], notes.append)
    found.make()
    for pool in found.pools:
        pool.mkdir()
        (pool / "one.kv").write_bytes(b"12345")
    assert found.look(100) == 10
    found.take_away(0)
    assert found.look(100) == 5
    found.bring_back_all()
    assert found.look(100) == 10
    assert notes == []

    def fails(path: object, *, dir_fd: int | None = None) -> os.stat_result:
        raise OSError(errno.EIO, "Input/output error", str(path))

    with monkeypatch.context() as broken:
        broken.setattr(os, "lstat", fails)
        assert found.look(100) == 0, "what cannot be seen is not counted, and nothing ends for that"
    shutil.rmtree(tmp_path / "b")
    found.take_away(1)
    found.take_away(1)
    assert notes == ["rename ENOENT"], "each kind once"
    with pytest.raises(FileNotFoundError):
        found.check_there()
    (tmp_path / "a/disk.away").mkdir()
    found.bring_back(0)
    assert notes == ["rename ENOENT", "rename ENOTEMPTY"]
    shutil.rmtree(tmp_path / "a/disk")
    found.bring_back_late()
    assert (tmp_path / "a/disk").is_dir()
    (tmp_path / "b").write_bytes(b"no directory")
    with pytest.raises(CannotWrite, match="bring its device back, and give the command again"):
        found.find()


def test_a_root_that_does_not_answer_holds_up_no_gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    found = Disks([tmp_path / "a", tmp_path / "b"], notes.append, patience_s=0.05)
    found.make()
    found.take_away(1)
    answers, asked, lstat = threading.Event(), threading.Semaphore(0), Path.lstat

    def hangs(path: Path) -> os.stat_result:
        if path.is_relative_to(tmp_path / "a"):
            asked.release()
            answers.wait(60)
        return lstat(path)

    monkeypatch.setattr(Path, "lstat", hangs)
    found.bring_back_all()
    assert (tmp_path / "b/disk").is_dir(), "the other root is unhurt"
    assert notes == ["rename hung"]
    found.bring_back_late()
    assert found.look(100) is None
    with pytest.raises(TimeoutError):
        found.check_there()
    with pytest.raises(CannotWrite, match="does not answer"):
        found.find()
    assert notes == ["rename hung"], "once"
    assert asked.acquire(timeout=60)
    assert not asked.acquire(blocking=False), "it is not asked again meanwhile"
    answers.set()
    hung = next(each for each in threading.enumerate() if each.name == "forebay-gate-disks")
    hung.join(60)
    found.bring_back_late()
    found.check_there()
    assert found.look(100) == 0
    answers.clear()
    monkeypatch.setattr(disks, "file_bytes", lambda pool: answers.wait(60))
    assert found.look(100) is None
    assert found.look(100) is None
    assert notes == ["rename hung", "look hung"]
    answers.set()


@given(
    st.floats(10, 1e6), st.floats(0.1, 1e3), st.floats(0.1, 1e3), st.floats(0.1, 1e4), st.floats(0, 1e3),
    st.floats(0, 1e3), st.lists(st.sampled_from(FaultKind), unique=True),
)  # fmt: skip
def test_faults_keep_away_from_the_windows_and_from_each_other(
    duration_s: float,
    warmup_s: float,
    window_s: float,
    every_s: float,
    for_s: float,
    settle_s: float,
    kinds: list[FaultKind],
) -> None:
    options = Options(
        roots=("a",), duration_s=duration_s, warmup_s=warmup_s, window_s=window_s, faults=tuple(kinds),
        fault_every_s=max(every_s, duration_s / 99), fault_for_s=for_s, settle_s=settle_s,
    )  # fmt: skip
    faults = schedule(options)
    assert [fault.number for fault in faults] == list(range(len(faults)))
    for fault in faults:
        assert fault.begins_s >= warmup_s + window_s
        assert fault.ends_s + settle_s <= duration_s - window_s + 1e-6
    for one, next_one in itertools.pairwise(faults):
        assert one.ends_s <= next_one.begins_s
    assert is_quiet(faults, 0, warmup_s, settle_s) or window_s < 1e-9


def test_a_machine_that_is_too_small(tmp_path: Path) -> None:
    usual = {"roots": (str(tmp_path),), "workers": 2, "host_bytes": 2**26, "capacity_bytes": 2**28}
    check_machine(Options(**usual))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="of memory that are free"):
        check_machine(Options(**{**usual, "host_bytes": 2**50}))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="free in the roots"):
        check_machine(Options(**{**usual, "capacity_bytes": 2**60}))  # type: ignore[arg-type]


def test_evidence_that_cannot_be_written_is_no_finding(tmp_path: Path) -> None:
    log = Log(Path("/dev/full"))
    with pytest.raises(CannotWrite, match="make room, and give the command again"):
        log.add(Look(elapsed_s=1, pool_bytes=7))
    log.close()


def test_time_in_which_the_gate_stands_still_is_no_load() -> None:
    now_s = [100.0]
    watch = Stopwatch(lambda: now_s[0])
    assert watch.read_s() == 0
    watch.start()
    for passed_s in (1.0, 2.0, 60.0, 0.5):
        now_s[0] += passed_s
        watch.read_s()
    assert watch.read_s() == 1.0 + 2.0 + 5.0 + 0.5
    assert watch.stood_still_s == 55.0


class Undying(subprocess.Popen[bytes]):
    """As one that waits in a system call of a dead device."""

    def kill(self) -> None: ...


@pytest.mark.parametrize("says_that_it_ends", [False, True])
def test_a_killed_worker_that_does_not_end_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says_that_it_ends: bool
) -> None:
    """Whether its output is closed already or not."""
    monkeypatch.setattr(supervisor, "_DIES_WITHIN_S", 0.01)
    monkeypatch.setattr(supervisor, "_WAKE_S", 0.001)
    work = Workplace(directory=tmp_path, run_name="it", progress=Silence(), kernel=Kernel())
    it = supervisor.Supervisor(DAY, work)
    it._log = Log(tmp_path / "log")
    process = Undying(["sleep", "600"])
    try:
        it._running[1] = supervisor._Running(1, 7, process)
        if says_that_it_ends:
            it._heard.put(supervisor._Heard(7, None))
        it._kill(1)
        assert it._running == {}, "and no other one is started in its place: nothing can pass any more"
        assert it._findings.lost_cause == "crashes: 1 is not equal to 0"
    finally:
        subprocess.Popen.kill(process)
        process.wait()
        it._log.close()
    assert list(read_log(tmp_path / "log")) == [WorkerStuck(elapsed_s=0.0, worker=1, incarnation=7)]


def test_a_log_goes_on_after_a_torn_line(tmp_path: Path) -> None:
    log = Log(tmp_path / "log")
    log.add(Look(elapsed_s=1, pool_bytes=7))
    log.close()
    with (tmp_path / "log").open("ab") as file:
        file.write(b'{"type":"look","elaps')
    assert list(read_log(tmp_path / "log")) == [Look(elapsed_s=1, pool_bytes=7)]
    log = Log(tmp_path / "log")
    log.add(Look(elapsed_s=2, pool_bytes=8))
    log.close()
    assert [line.elapsed_s for line in read_log(tmp_path / "log")] == [1, 2]
    (tmp_path / "log").write_bytes(b'{"type":"nonsense"}\n')
    with pytest.raises(ConfigError, match="line 1 cannot be read"):
        list(read_log(tmp_path / "log"))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"roots": ()}, "at least one directory"),
        ({"roots": ("/nowhere/at/all",)}, "not a directory"),
        ({"roots": ("/tmp", "/tmp/.")}, "named twice"),
        ({"workers": 1}, "workers must be 2"),
        ({"duration_s": float("inf")}, "duration_s must be a number"),
        ({"duration_s": 10.0}, "no room for the warm-up"),
        ({"capacity_bytes": 1000}, "less than 4 prompts"),
        ({"host_bytes": 1000}, "host_bytes"),
        ({"block_bytes": 4097}, "multiple of 8"),
    ],
)
def test_options_that_cannot_work(changed: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_options(Options(**{"roots": ("/tmp",), **changed}))  # type: ignore[arg-type]
