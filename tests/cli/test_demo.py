"""`forebay demo` as its users run it, on small random weights: exit codes, output, reuse, damage, and honesty."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest

from forebay.bench import files
from forebay.bench.demo import setting
from forebay.bench.demo.report import FIGURES
from forebay.bench.demo.results import Record, Way
from forebay.bench.evidence import Kernel, ReadCounts, Validity
from forebay.cli import run
from forebay.tiers.file import layout

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.model

SMALL = ("--random-weights", "--sessions", "2", "--tokens", "64", "--answer-tokens", "4", "--block-tokens", "16")


@dataclass(frozen=True)
class Ended:
    code: int
    stdout: str
    stderr: str
    folder: Path

    @property
    def said(self) -> str:
        """Standard output as one line: where it was wrapped depends on the paths in it."""
        return " ".join(self.stdout.split())

    @property
    def record(self) -> Record:
        return msgspec.json.decode((self.folder / "demo.json").read_bytes(), type=Record)


Demo = Callable[..., Ended]


@pytest.fixture(scope="session")
def tiny_model() -> Any:
    import torch

    from forebay.connectors.transformers import RandomWeights, load_model

    torch.set_num_threads(1)  # so small that a second thread only waits for the first
    return load_model(RandomWeights(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16))


@pytest.fixture
def demo(tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Demo:
    """Run the command in `tmp_path`, on the tiny model, with a kernel that vouches for every read."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(setting, "load", lambda options: tiny_model)

    def start(*arguments: str) -> Ended:
        capfd.readouterr()
        code = run(["demo", *SMALL, *arguments])
        captured = capfd.readouterr()
        return Ended(code, captured.out, captured.err, tmp_path)

    return start


@pytest.fixture
def trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counters that show every read, so that a test does not depend on the file system it happens to run on."""
    told: Iterator[int] = iter(range(0, 10**15, 10**12))
    counts = lambda self, medium: ReadCounts(process_bytes=(n := next(told)), device_bytes=n)  # noqa: E731
    real = Kernel.medium_of
    monkeypatch.setattr(Kernel, "read_counts", counts)
    monkeypatch.setattr(Kernel, "medium_of", lambda self, path: msgspec.structs.replace(real(self, path), doubt=""))


@pytest.mark.usefixtures("trusted")
def test_a_run_measures_three_ways_and_reports_them(demo: Demo) -> None:
    ended = demo()
    assert ended.code == 0, ended.stderr
    found = ended.record
    assert found.verdict.validity is Validity.VALID
    assert found.tokens_equal
    assert [(each.session, each.way) for each in found.measurements] == [(n, way) for n in (1, 2) for way in Way]
    for each in found.measurements:
        expected = {Way.RECOMPUTE: {}, Way.DISK: {"file": 64}, Way.DRAM: {"host": 64}}
        assert each.hit_tokens == expected[each.way] or each.restored_tokens > 64
        assert len(each.tokens) == 4
    for figure in FIGURES:
        for summary in found.summaries:
            assert figure.show(summary) in ended.stdout
    assert "VALID" in ended.stdout
    page = ElementTree.fromstring((ended.folder / "demo.html").read_text())
    assert found.headline in "".join(page.itertext())
    steps = [line for line in ended.stderr.splitlines() if line.startswith("[")]
    assert len(steps) == 1 + 2 * 4
    assert steps[-1].startswith("[9/9]")
    assert sorted(path.name for path in ended.folder.iterdir()) == ["demo.html", "demo.json"], "the pool is gone"


@pytest.mark.usefixtures("trusted")
def test_json_is_all_there_is_on_standard_output(demo: Demo) -> None:
    ended = demo("--json", "--host-memory", "64MiB", "--out", "reports")
    assert ended.code == 0, ended.stderr
    printed = msgspec.json.decode(ended.stdout, type=Record)
    assert printed == msgspec.json.decode((ended.folder / "reports/demo.json").read_bytes(), type=Record)
    assert printed.resources.host_pool_bytes == 64 * 2**20
    assert printed.options["sessions"] == 2


@pytest.mark.usefixtures("trusted")
def test_a_pool_that_is_given_is_kept_and_found_again(demo: Demo, tmp_path: Path) -> None:
    first = demo("--pool", "pool")
    assert first.code == 0, first.stderr
    assert (first.record.pool.found_blocks, first.record.pool.document_blocks) == (0, 8)
    assert "is kept: a further run" in first.said
    second = demo("--pool", "pool")
    assert second.code == 0, second.stderr
    assert second.record.pool.found_blocks == 8
    assert all(session.found_tokens >= 63 for session in second.record.sessions)
    assert any("8 of the 8 document blocks from an earlier run" in note for note in second.record.notes)
    assert [each.tokens for each in second.record.measurements] == [each.tokens for each in first.record.measurements]


@pytest.mark.usefixtures("trusted")
def test_a_damaged_pool_costs_a_recompute_and_is_reported(
    demo: Demo, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = demo("--pool", "pool").record
    [namespace] = layout.walk_namespaces(str(tmp_path / "pool"))
    blocks = sorted(layout.walk_blocks(str(tmp_path / "pool"), namespace), key=lambda block: block.mtime_ns)
    flipped, cut = Path(blocks[0].path), Path(blocks[7].path)  # the 8 blocks of the documents were written first
    content = bytearray(flipped.read_bytes())
    content[len(content) // 2] ^= 1
    flipped.write_bytes(content)
    cut.write_bytes(cut.read_bytes()[:5000])

    ended = demo("--pool", "pool")
    assert ended.code == 0, ended.stderr
    found = ended.record
    assert found.tokens_equal
    assert found.verdict.validity is Validity.VALID
    assert [each.tokens for each in found.measurements] == [each.tokens for each in before.measurements]
    assert found.damage.lost_blocks >= 1
    assert sorted(Path(name).name.split(".")[0] for name in found.damage.set_aside) == sorted([flipped.stem, cut.stem])
    assert all((tmp_path / "pool" / name).exists() for name in found.damage.set_aside)
    assert any(note.startswith("Damage:") for note in found.notes)

    assert run(["pool", "verify", "pool"]) == 1
    named = [line for line in capfd.readouterr().out.splitlines() if line.startswith("damaged ")]
    assert len(named) == 2
    assert {path for path in (flipped, cut) for line in named if f"{path}:" in line} == {flipped, cut}
    assert run(["pool", "verify", "pool"]) == 0
    assert "0 damaged" in capfd.readouterr().out
    mended = demo("--pool", "pool")
    assert mended.code == 0
    assert mended.record.damage.lost_blocks == 0
    assert mended.record.pool.found_blocks == 8


def test_a_pool_in_memory_is_invalid_and_exits_3(demo: Demo, tmp_path: Path) -> None:
    shm = Path("/dev/shm")
    if not shm.is_dir():
        pytest.skip("no /dev/shm here")
    pool = shm / f"forebay-test-{tmp_path.name}"
    try:
        ended = demo("--pool", str(pool))
    finally:
        for path in sorted(pool.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        pool.rmdir()
    assert ended.code == 3, ended.stderr
    assert ended.record.verdict.validity is Validity.INVALID
    assert "tmpfs" in ended.record.verdict.reasons[0]
    assert "INVALID" in ended.stdout
    assert "INVALID" in (ended.folder / "demo.html").read_text()


@pytest.mark.usefixtures("trusted")
def test_one_wrong_token_is_found_and_exits_1(demo: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    from forebay.connectors.transformers import Runner

    real = Runner.generate

    def wrong(self: Runner, tokens: Any, new_tokens: int, request_id: str, **given: Any) -> Any:
        taken = real(self, tokens, new_tokens, request_id, **given)
        if request_id != "disk-2":
            return taken
        return replace(taken, tokens=(*taken.tokens[:-1], taken.tokens[-1] ^ 1))

    monkeypatch.setattr(Runner, "generate", wrong)
    ended = demo()
    assert ended.code == 1
    assert [session.tokens_equal for session in ended.record.sessions] == [True, False]
    assert "session 2: the answer from cold disk differs from token 4 on" in ended.said
    assert "not equal" in (ended.folder / "demo.html").read_text()


@pytest.mark.usefixtures("trusted")
def test_a_way_that_was_not_what_it_is_called_is_invalid(demo: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    from forebay.connectors.transformers import Runner

    monkeypatch.setattr(Runner, "drop_device", lambda self: 0)  # so that DRAM is never asked
    ended = demo()
    assert ended.code == 3
    assert any("from DRAM: tokens came from device" in reason for reason in ended.record.verdict.reasons)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--host-memory", "2"), "number and its unit"),
        (("--host-memory", "1kB"), "does not hold one session"),
        (("--tokens", "many"), "--tokens"),
        (("--tokens", "10000000"), "ask for fewer"),
        (("--sessions", "100000"), "ask for fewer"),
        (("--nonsense",), "--nonsense"),
        (("--pool", "/proc/self/pool"), "cannot be written"),
    ],
)
def test_what_cannot_work_is_one_line_and_exit_code_2(demo: Demo, arguments: tuple[str, ...], said: str) -> None:
    ended = demo(*arguments)
    assert ended.code == 2
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("forebay: ")
    assert said in last
    assert "Traceback" not in ended.stderr
    assert list(ended.folder.iterdir()) == []


@pytest.mark.usefixtures("trusted")
@pytest.mark.parametrize("given", [(), ("--json",)])
def test_a_report_that_cannot_be_kept_is_shown_all_the_same(
    demo: Demo, monkeypatch: pytest.MonkeyPatch, given: tuple[str, ...]
) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "_replace", full)
    ended = demo(*given)
    assert ended.code == 2
    assert ended.stderr.splitlines()[-1].startswith("forebay: demo.json cannot be written (No space left on device)")
    if given:
        assert msgspec.json.decode(ended.stdout, type=Record).tokens_equal
    else:
        assert "TTFT p50" in ended.stdout


def test_a_model_that_cannot_be_loaded_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/config.json").write_text('{"model_type": "qwen3", "vocab_size": -5}')
    assert run(["demo", *SMALL[1:], "--model", str(tmp_path / "broken"), "--out", str(tmp_path)]) == 2
    printed = capfd.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"forebay: cannot load {tmp_path}/broken: ")
    assert printed.err.count("\n") == 1


def test_without_torch_it_says_what_to_install(tmp_path: Path) -> None:
    code = "import sys; sys.modules['torch'] = None; from forebay.cli import run; sys.exit(run(['demo']))"
    ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1].startswith("forebay: the demo needs torch and transformers")
    assert "pip install 'forebay[demo]'" in ended.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("trusted")
def test_a_terminated_run_takes_its_temporary_pool_along(demo: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    from forebay.connectors.transformers import Runner

    monkeypatch.setattr(Runner, "drop_device", lambda self: signal.raise_signal(signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        demo()
    assert ended.value.code == 128 + signal.SIGTERM
    assert list(Path.cwd().iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is before


def test_random_weights_run_as_a_user_runs_them(tmp_path: Path) -> None:
    """With a process of its own, and this machine's real counters: valid where they can say so."""
    command = [sys.executable, "-c", "from forebay.cli import main; main()", "demo", *SMALL, "--seed", "1"]
    command += ["--threads", "1", "--json"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
    found = msgspec.json.decode(ended.stdout, type=Record)
    assert found.model.name == "random-qwen3-6x512-seed1"
    assert found.tokens_equal
    assert ended.returncode == (0 if found.verdict.validity is Validity.VALID else 3)
    if not found.evidence.medium.doubt:
        assert found.verdict.validity is Validity.VALID
