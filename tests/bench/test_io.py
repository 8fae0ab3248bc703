"""`forebay bench io`: a whole small run, and the parts that decide what it says."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

from forebay.bench.evidence import Kernel, Medium, ReadCounts, Validity
from forebay.bench.io.fio import FioEngine, FioFailed, FioFound, FioJob, arguments, parse
from forebay.bench.io.options import Direction, IoOptions, Load, blocks_a_pass, check_options
from forebay.bench.io.report import exit_code, notes, write_files
from forebay.bench.io.results import TIER, Cell, Pass, compare, curve_of, summarize
from forebay.bench.io.run import run_bench
from forebay.bench.io.setting import percentile
from forebay.cli import run
from forebay.errors import ConfigError
from forebay.sim.media import curve_medium

NO_FIO = FioFound(None, "fio is left out")
CELL = Cell(direction=Direction.READS, block_bytes=2**21, depth=4)


def small(tmp_path: Path, **changes: object) -> IoOptions:
    wanted = {"block_bytes": (8192,), "depths": (1, 3), "rounds": 2, "pass_bytes": 8192, "out": tmp_path, **changes}
    return IoOptions(roots=(tmp_path,), **wanted)  # type: ignore[arg-type]


def passed(contestant: str, turn: int, wall_s: float, load: Load = Load.IDLE) -> Pass:
    return Pass(
        cell=CELL, contestant=contestant, load=load, round=turn, moved_bytes=10**9, wall_s=wall_s, core_s=0.1,
        others_cores=0.0, p50_s=0.001, p99_s=0.002,
    )  # fmt: skip


def test_a_whole_run_measures_everything_and_leaves_nothing(tmp_path: Path) -> None:
    options = small(tmp_path, loads=(Load.IDLE, Load.BUSY), export=tmp_path / "curve.json")
    record = run_bench(options, fio=NO_FIO)
    assert list(tmp_path.iterdir()) == []
    assert len(record.passes) == 2 * 2 * 2 * 2 * 2  # directions, depths, contestants, loads, rounds
    assert {each.contestant for each in record.passes} == {TIER, "threads"}
    blocks = blocks_a_pass(options, 8192)
    assert {each.moved_bytes for each in record.passes} == {blocks * 8192}
    assert [each.best_control for each in record.comparisons] == ["threads"] * 4
    assert all(each.busy_to_idle for each in record.comparisons)
    reads_bytes = sum(each.moved_bytes for each in record.passes if each.cell.direction is Direction.READS)
    assert record.evidence.wanted_bytes > reads_bytes  # single blocks too
    files = write_files(record)
    assert json.loads(files[0].read_text())["schema"] == "forebay-bench-io/1"
    plot = ElementTree.parse(files[1]).getroot()
    assert plot.tag.endswith("svg")
    assert sum(each.tag.endswith("circle") for each in plot.iter()) == len(record.summaries)
    points = json.loads(files[2].read_text())["points"]
    assert [(each["direction"], each["depth"]) for each in points] == [
        ("reads", 1), ("reads", 3), ("writes", 1), ("writes", 3),
    ]  # fmt: skip
    medium = curve_medium(files[2], 8192)  # what is exported is what a model of the device is made from
    reads = [each["gb_per_s"] * 1e9 for each in points if each["direction"] == "reads"]
    assert (medium.read_bytes_per_s, medium.stream_bytes_per_s) == (max(reads), min(reads[0], max(reads)))


def test_without_counters_it_says_invalid(tmp_path: Path) -> None:
    """An empty /proc and /sys: nothing shows that the reads were physical."""
    record = run_bench(small(tmp_path, depths=(1,)), kernel=Kernel(tmp_path / "p", tmp_path / "s"), fio=NO_FIO)
    assert record.verdict.validity is Validity.INVALID
    assert exit_code(record) == 3
    assert "INVALID" in notes(record)


class Told(Kernel):
    """A disk whose counter of written bytes shows a share of what is in files, wherever the test runs."""

    share: float | None = 1.0

    def medium_of(self, path: Path) -> Medium:
        return Medium(path=str(path), filesystem="ext4", source="/dev/told", device_number="7:7")

    def read_counts(self, medium: Medium) -> ReadCounts:
        return ReadCounts(process_bytes=0, device_bytes=0)

    def written_bytes(self, medium: Medium) -> int | None:
        held_bytes = sum(path.stat().st_size for path in Path(medium.path).rglob("*") if path.is_file())
        return None if self.share is None else int(self.share * held_bytes)


@pytest.mark.parametrize(
    ("share", "reasons"),
    [
        (1.0, ()),
        (0.5, (f"the writes of {TIER} were not physical: ", "the writes of threads were not physical: ")),
        (None, ("physical writes cannot be shown: the kernel does not say what the device wrote",)),
    ],
)
def test_writes_are_called_valid_only_when_the_device_has_written_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float | None, reasons: tuple[str, ...]
) -> None:
    monkeypatch.setattr(Told, "share", share)
    options = small(tmp_path, depths=(1,), directions=(Direction.WRITES,))
    record = run_bench(options, kernel=Told(), fio=NO_FIO)
    assert record.verdict.validity is (Validity.INVALID if reasons else Validity.VALID)
    assert [told.startswith(said) for told, said in zip(record.verdict.reasons, reasons, strict=True)] == [True] * len(
        reasons
    )
    assert set(record.written) == (set() if share is None else {TIER, "threads"})


def test_writes_to_memory_are_invalid(tmp_path: Path) -> None:
    """An empty /proc and /sys: nothing is known of what lies under the path."""
    options = small(tmp_path, depths=(1,), directions=(Direction.WRITES,))
    record = run_bench(options, kernel=Kernel(tmp_path / "p", tmp_path / "s"), fio=NO_FIO)
    assert record.verdict.reasons == ("physical writes cannot be shown: the mount table cannot be read",)


def test_ratios_are_taken_round_by_round_to_the_control_with_the_best_median() -> None:
    passes = [
        *(passed(TIER, turn, wall_s) for turn, wall_s in enumerate((1.0, 2.0, 4.0))),
        *(passed("threads", turn, wall_s) for turn, wall_s in enumerate((0.5, 1.0, 2.0))),
        *(passed("fio psync", turn, wall_s) for turn, wall_s in enumerate((0.1, 9.0, 9.0))),
        *(passed(TIER, turn, 2 * wall_s, Load.BUSY) for turn, wall_s in enumerate((1.0, 2.0, 4.0))),
    ]
    [found] = compare(passes, "threads")
    assert (found.best_control, found.to_best_control, found.lowest, found.highest) == ("threads", 0.5, 0.5, 0.5)
    assert (found.to_threads, found.busy_to_idle, found.threads_busy_to_idle) == (0.5, 0.5, None)
    assert found.gb_per_s == 0.5
    assert [each.gb_per_s for each in summarize(passes)] == [0.5, 1.0, 1 / 9, 0.25]


def test_percentiles() -> None:
    assert [percentile([3, 1, 2, 4], share) for share in (0.25, 0.5, 0.99)] == [1, 2, 4]
    assert percentile(range(1, 101), 0.99) == 99


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"roots": ()}, "at least one directory"),
        ({"roots": (Path("/no/such"),)}, "not a directory"),
        ({"block_bytes": (5000,)}, "multiples of 4096"),
        ({"block_bytes": (4096, 4096)}, "each once"),
        ({"depths": (0,)}, "between 1 and"),
        ({"rounds": 0}, "rounds must be"),
        ({"out": Path("/no/such")}, "make it first"),
        ({"pass_bytes": 2**60}, "give --bytes less"),
    ],
)
def test_what_cannot_be_measured_is_one_line(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_options(msgspec.structs.replace(small(tmp_path), **changes))


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["bench", "io", str(tmp_path), "--out", str(tmp_path), "--block-size", "8KiB", "--in-flight", "2"]
    code = run([*where, "--rounds", "1", "--bytes", "8KiB", "--only", "reads", "--json"])
    told = capsys.readouterr()
    assert code in (0, 3)
    found = json.loads(told.out)
    assert found["verdict"]["validity"] == ("valid" if code == 0 else "invalid")
    assert "[1/1] reads of 8 KiB, 2 in flight" in told.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bench-io.json", "bench-io.svg"]
    assert run([*where, "--io", "sometimes"]) == 2
    assert run(["bench", "io", str(tmp_path / "no")]) == 2


REPORT = """fio: a note of its own
{"jobs": [{"usr_cpu": 1.0, "sys_cpu": 9.0, "read": {"io_bytes": 1000000000, "bw_bytes": 2000000000,
 "clat_ns": {"max": 9000000, "percentile": {"50.000000": 1000000, "99.000000": 3000000}}}}]}"""


def fio_job(engine: FioEngine, direction: Direction = Direction.READS) -> FioJob:
    return FioJob(engine, direction, (Path("/a/x"), Path("/b/x")), 4096, 4, 10)


def test_what_fio_is_told_and_what_it_says() -> None:
    found = parse(REPORT, fio_job(FioEngine.PSYNC))
    assert (found.wall_s, found.p50_s, found.p99_s, found.worst_s) == (0.5, 0.001, 0.003, 0.009)
    assert found.core_s == pytest.approx(4 * 0.5 * 0.1)  # four threads
    assert parse(REPORT, fio_job(FioEngine.LIBAIO)).core_s == pytest.approx(0.5 * 0.1)
    told = arguments(fio_job(FioEngine.PSYNC))
    assert {"--numjobs=4", "--iodepth=1", "--io_size=49152", "--filename=/a/x:/b/x"} <= set(told)
    told = arguments(fio_job(FioEngine.IO_URING, Direction.WRITES))
    assert {"--numjobs=1", "--iodepth=4", "--nrfiles=10", "--directory=/a/x:/b/x"} <= set(told)
    for text in ("", "{}", '{"jobs": [{}]}'):
        with pytest.raises(FioFailed):
            parse(text, fio_job(FioEngine.PSYNC))


def test_the_curve_is_the_tiers_own_in_an_idle_process(tmp_path: Path) -> None:
    record = run_bench(small(tmp_path, depths=(2,), loads=(Load.IDLE, Load.BUSY)), fio=NO_FIO)
    idle = {each.cell: each.gb_per_s for each in record.summaries if (each.contestant, each.load) == (TIER, Load.IDLE)}
    curve = curve_of(record)
    assert [each.gb_per_s for each in curve.points] == [*idle.values()]
    assert curve.validity == record.verdict.validity.value


FAKE_FIO = """#!{python}
import json, os, sys
told = dict(each.removeprefix("--").partition("=")[::2] for each in sys.argv[1:])
if "version" in told:
    sys.exit(print("fio-3.99"))
assert os.environ["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1", "no huge pages are asked for"
if told["ioengine"] == "io_uring":
    sys.exit("engine io_uring not loadable")
places = told.get("filename", told.get("directory")).split(":")
assert all(os.path.exists(place) for place in places), places
rate = dict(psync=10**15, libaio=2 * 10**15)[told["ioengine"]]
side = dict(io_bytes=int(told.get("io_size", told["bs"])), bw_bytes=rate)
side["clat_ns"] = dict(max=3000, percentile={{"50.000000": 1000, "99.000000": 2000}})
print(json.dumps(dict(jobs=[{{"usr_cpu": 1.0, "sys_cpu": 1.0, told["rw"]: side}}])))
"""


def test_the_best_engine_of_fio_is_a_control(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    programs, disk = tmp_path / "bin", tmp_path / "disk"
    programs.mkdir()
    disk.mkdir()
    (programs / "fio").write_text(FAKE_FIO.format(python=sys.executable))
    (programs / "fio").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    record = run_bench(small(disk, depths=(2,)), kernel=Told())
    assert record.fio == "fio-3.99"
    assert {each.contestant for each in record.passes} == {TIER, "threads", "fio libaio"}
    assert [each.best_control for each in record.comparisons] == ["fio libaio"] * 2
    assert caplog.text.count("fio's io_uring is left out: engine io_uring not loadable") == 1
    assert any(reason.startswith("fio's reads were not physical: 0%") for reason in record.verdict.reasons)


def test_a_run_without_fio_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    record = run_bench(small(tmp_path, depths=(1,), directions=(Direction.WRITES,), rounds=1), kernel=Told())
    assert record.fio.startswith("fio is not installed")
    assert any(record.fio in note for note in notes(record))
