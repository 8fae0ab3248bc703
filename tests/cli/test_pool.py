"""`forebay pool` and `forebay doctor` on real pools, and the errors of the command line."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from forebay.assemble import StoreConfig, open_tiers
from forebay.cli import run
from forebay.errors import ConfigError
from forebay.keys import block_keys, namespace_key
from forebay.testing.schedule import BLOCK_BYTES, NAMESPACE, truth
from forebay.testing.tier_contract import key_of, put
from forebay.tiers import file
from forebay.tiers.file import admin
from forebay.types import Outcome

Capture = pytest.CaptureFixture[str]
HOSTILE = "\x1b[31m[bold]\u202eevil\x9b2J"
KEYS = block_keys(NAMESPACE, range(10 * NAMESPACE.block_tokens))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A pool of 10 blocks."""
    path = tmp_path / "pool"
    options = file.Options(roots=(file.RootOptions(path=str(path)),), capacity_bytes=2**20)
    tier = file.build(options, NAMESPACE, bytes(namespace_key(NAMESPACE)))
    views = [memoryview(bytearray(truth(key))) for key in KEYS]
    assert tier.write(KEYS, views) == [Outcome.OK] * 10
    tier.close()
    return path


def block_file(root: Path, number: int) -> Path:
    (found,) = root.rglob(f"{KEYS[number].hex()}.kv")
    return found


def test_a_long_count_says_how_far_it_is(
    root: Path, capsys: Capture, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks are counted on the disk, and again when the catalogue has to be made anew."""
    (root / "catalogue").unlink()
    monkeypatch.setattr("forebay.tiers.file.admin.looking._TELL_BLOCKS", 4)
    monkeypatch.setattr("forebay.tiers.file.rebuild._TELL_BLOCKS", 4)
    shown: list[str] = []
    monkeypatch.setattr("rich.status.Status.update", lambda self, words: shown.append(words))
    assert run(["pool", "stat", str(root)]) == 0
    assert shown == ["counting blocks: 4, 32.00 KiB", "counting blocks: 8, 64.00 KiB"]
    lines = [record.getMessage() for record in caplog.records if "found so far" in record.getMessage()]
    assert [int(line.split()[-5]) for line in lines] == sorted(int(line.split()[-5]) for line in lines)
    assert 4 <= int(lines[0].split()[-5]) <= 10
    assert all(record.levelname == "WARNING" for record in caplog.records)


def test_stat(root: Path, capsys: Capture) -> None:
    assert run(["pool", "stat", str(root)]) == 0
    assert "10 in 1 namespaces, 80.00 KiB" in capsys.readouterr().out
    assert run(["pool", "stat", "--json", str(root)]) == 0
    (found,) = json.loads(capsys.readouterr().out)["roots"]
    assert (found["blocks"], found["stored_bytes"], found["set_aside_files"]) == (10, 10 * 8192, 0)


def test_stat_tells_what_was_written_what_the_budget_leaves_and_when_the_drive_is_worn(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    roots = [tmp_path / "a", tmp_path / "b"]
    config = StoreConfig.embedded(
        roots, host_bytes=2**20, capacity_bytes=2**20, write_budget_bytes_per_day=20 * 8192,
        endurance_bytes=1000 * 8192,
    )  # fmt: skip
    (tier,) = open_tiers(config, NAMESPACE).values()
    put(tier, range(10), BLOCK_BYTES)
    tier.delete([key_of(0)])
    paths = [str(root) for root in roots]
    assert run(["pool", "stat", "--json", *paths]) == 0
    wear = json.loads(capsys.readouterr().out)["wear"]
    assert (wear["written_bytes"], wear["today_bytes"], wear["budget_left_bytes"]) == (81920, 81920, 81920)
    assert wear["days_to_rated_wear"] is None
    assert run(["pool", "stat", *paths]) == 0
    text = capsys.readouterr().out
    assert "80.00 KiB left today of 160.00 KiB" in text
    assert "not known in the first hour" in text
    tier.close()
    later = admin.wear(roots, wear["since_unix_s"] + 5 * 86_400.0)
    assert (later.today_bytes, later.budget_left_bytes) == (0, 20 * 8192)
    assert later.days_to_rated_wear == pytest.approx(5 * 99)
    monkeypatch.setattr("time.time", lambda: wear["since_unix_s"] + 5 * 86_400.0)
    assert run(["pool", "stat", *paths]) == 0
    assert "in 495 days at this rate" in capsys.readouterr().out


def test_ls_explains_the_namespace(root: Path, capsys: Capture) -> None:
    assert run(["pool", "ls", str(root)]) == 0
    text = capsys.readouterr().out
    assert namespace_key(NAMESPACE).hex()[:16] in text
    assert "kv_dtype        uint8" in text
    assert run(["pool", "ls", "--json", str(root)]) == 0
    (listing,) = json.loads(capsys.readouterr().out)["namespaces"]
    assert listing["fields"]["block_bytes"] == BLOCK_BYTES
    assert listing["blocks"] == 10


def test_verify_names_the_damaged_and_exits_1_then_finds_nothing(root: Path, capsys: Capture) -> None:
    assert run(["pool", "verify", str(root)]) == 0
    assert "10 blocks, 80.00 KiB checked: 0 damaged" in capsys.readouterr().out
    flipped, cut = block_file(root, 3), block_file(root, 7)
    content = bytearray(flipped.read_bytes())
    content[4096 + 5] ^= 4
    flipped.write_bytes(content)
    cut.write_bytes(cut.read_bytes()[:5000])
    assert run(["pool", "verify", "--json", str(root)]) == 1
    report = json.loads(capsys.readouterr().out)
    assert {(item["path"], item["reason"]) for item in report["set_aside"]} == {
        (str(flipped), "payload-checksum"),
        (str(cut), "wrong-length"),
    }
    assert run(["pool", "verify", str(root)]) == 0
    assert "8 blocks" in capsys.readouterr().out


def test_verify_says_how_many_blocks_the_catalogue_had_wrong(root: Path, capsys: Capture) -> None:
    gone = sorted(root.rglob("*.kv"))[:2]
    for path in gone:
        path.unlink()
    assert run(["pool", "verify", str(root)]) == 0
    assert "2 blocks were wrong in the catalogue" in capsys.readouterr().out
    assert run(["pool", "verify", str(root)]) == 0
    assert "catalogue" not in capsys.readouterr().out


def test_verify_also_names_what_a_read_has_set_aside_and_only_once(root: Path, capsys: Capture) -> None:
    path = block_file(root, 4)
    path.write_bytes(path.read_bytes()[:100])
    options = file.Options(roots=(file.RootOptions(path=str(root)),), capacity_bytes=2**20)
    tier = file.build(options, NAMESPACE, bytes(namespace_key(NAMESPACE)))
    assert tier.read([KEYS[4]], [memoryview(bytearray(BLOCK_BYTES))]) == [Outcome.CORRUPT]
    tier.close()
    assert run(["pool", "verify", str(root)]) == 1
    text = capsys.readouterr().out
    assert f"{path}: wrong-length, found by a read since the last check" in text
    assert "1 damaged" in text
    assert run(["pool", "verify", str(root)]) == 0
    assert run(["pool", "stat", str(root)]) == 0
    assert "1 damaged files" in capsys.readouterr().out


def test_purge_removes_one_namespace_or_all(root: Path, capsys: Capture) -> None:
    assert run(["pool", "purge", "--yes", "--namespace", "ffff", str(root)]) == 2
    assert "0 namespaces begin with ffff" in capsys.readouterr().err
    digest = namespace_key(NAMESPACE).hex()
    assert run(["pool", "purge", "--yes", "--namespace", digest[:8], str(root)]) == 0
    assert "removed 10 blocks, 80.00 KiB" in capsys.readouterr().out
    assert list(root.rglob("*.kv")) == []
    assert (root / "forebay-pool.json").is_file()


def test_purge_asks_and_without_an_answer_does_nothing(root: Path) -> None:
    command = [sys.executable, "-c", "from forebay.cli import main; main()", "pool", "purge", str(root)]
    ended = subprocess.run(command, input="n\n", capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "Remove 10 blocks, 80.00 KiB?" in ended.stderr
    assert "nothing was removed" in ended.stderr
    assert len(list(root.rglob("*.kv"))) == 10


def test_doctor_says_what_a_root_gets(tmp_path: Path, capsys: Capture) -> None:
    assert run(["doctor", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    for item in ("writable", "medium", "direct I/O", "space", "huge pages", "locked memory", "in all"):
        assert item in text
    assert run(["doctor", "--json", str(tmp_path)]) == 0
    (report,) = json.loads(capsys.readouterr().out)["paths"]
    assert report["verdict"] in ("ok", "warn")
    assert report["io"]["access"] in ("direct", "buffered")
    assert list(tmp_path.iterdir()) == [], "the doctor leaves nothing behind"


def test_doctor_says_when_a_path_is_not_there(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "mistyped"
    assert run(["doctor", str(path)]) == 0
    text = capsys.readouterr().out
    assert f"{path}\n" in text
    assert "warn  directory" in text
    assert run(["doctor", str(path / "deeper")]) == 1
    assert "BAD   directory" in capsys.readouterr().out
    assert not path.exists()


def test_purge_without_anybody_to_ask_is_refused(root: Path) -> None:
    command = [sys.executable, "-m", "forebay", "pool", "purge", str(root)]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "give --yes" in ended.stderr
    assert len(list(root.rglob("*.kv"))) == 10


def test_doctor_refuses_what_cannot_be_a_root(capsys: Capture) -> None:
    assert run(["doctor", "/proc/nowhere"]) == 1
    assert "BAD   writable" in capsys.readouterr().out


def no_pool(path: Path) -> list[str]:
    return ["pool", "stat", str(path)]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (no_pool, "is not a pool of Forebay"),
        (lambda path: ["pool", "stat", str(path / "nowhere")], "is not a pool of Forebay"),
        (lambda path: ["pool", "stat"], "Missing argument"),
        (lambda path: ["pool", "verify", "--fast", str(path)], "No such option '--fast'"),
        (lambda path: ["pool", "mend", str(path)], "No such command 'mend'"),
        (lambda path: ["pool", "ls", str(path / ("x" * 300))], "ame too long"),
        (lambda path: ["doctor", str(path / ("x" * 300))], "ame too long"),
        (lambda path: ["demo", "--model", str(path / ("x" * 300))], "ame too long"),
        (lambda path: ["demo", "--out", str(path / ("x" * 300))], "ame too long"),
        (lambda path: ["demo", "--pool", str(path / ("x" * 300))], "ame too long"),
        (lambda path: ["demo", "--host-memory", "9" * 400 + "GB"], "more than any machine has"),
        (lambda path: ["demo", "--seed", str(2**70)], "--seed must be 0 or more and below 2**63"),
        (lambda path: ["demo", "--threads", str(2**31)], "--threads must be from 1 to 4096"),
    ],
)
def test_a_bad_call_is_one_line_and_exit_code_2(
    arguments: Callable[[Path], list[str]], says: str, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "precious.txt").write_text("not ours")
    assert run(arguments(tmp_path)) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert printed.err.startswith("forebay: ")
    assert says in printed.err
    assert (tmp_path / "precious.txt").read_text() == "not ours"


def test_no_arguments_shows_the_commands(capsys: Capture) -> None:
    assert run([]) == 2
    assert "doctor" in capsys.readouterr().err


def test_a_root_named_twice_counts_once(root: Path, capsys: Capture) -> None:
    assert run(["pool", "verify", str(root), str(root), f"{root}/../pool"]) == 0
    assert "10 blocks" in capsys.readouterr().out


def test_a_name_that_is_no_text_is_shown_with_escapes(root: Path, capsys: Capture) -> None:
    odd = root.with_name(os.fsdecode(b"odd\xff"))
    root.rename(odd)
    assert run(["pool", "stat", "--json", str(odd)]) == 0
    assert json.loads(capsys.readouterr().out)["roots"][0]["root"].endswith("odd\\udcff")


def test_what_a_namespace_says_is_printed_harmless_and_kept_in_json(tmp_path: Path, capsys: Capture) -> None:
    namespace = dataclasses.replace(NAMESPACE, model=f"{HOSTILE}\nmodel           another")
    options = file.Options(roots=(file.RootOptions(path=str(tmp_path / "pool")),), capacity_bytes=2**20)
    file.build(options, namespace, bytes(namespace_key(namespace))).close()
    assert run(["pool", "ls", str(tmp_path / "pool")]) == 0
    text = capsys.readouterr().out
    assert not set(text) & {"\x1b", "\u202e", "\x9b"}
    assert sum(line.startswith("  model ") for line in text.splitlines()) == 1
    assert "[bold]" in text
    assert run(["pool", "ls", "--json", str(tmp_path / "pool")]) == 0
    (listing,) = json.loads(capsys.readouterr().out)["namespaces"]
    assert listing["fields"]["model"] == namespace.model


def test_a_hostile_path_is_printed_harmless(tmp_path: Path, capsys: Capture) -> None:
    assert run(["pool", "stat", str(tmp_path / HOSTILE)]) == 2
    assert run(["doctor", str(tmp_path / HOSTILE / "below")]) == 1
    printed = capsys.readouterr()
    assert "[bold]" in printed.out
    assert "[bold]" in printed.err
    assert not set(printed.out + printed.err) & {"\x1b", "\u202e", "\x9b"}


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (os.mkfifo, "is not a regular file"),
        (Path.mkdir, "is not a regular file"),
        (lambda marker: marker.symlink_to("nowhere"), "is a link to nothing"),
    ],
    ids=["fifo", "directory", "broken link"],
)
def test_a_marker_that_is_no_file_is_named(
    root: Path, make: Callable[[Path], object], says: str, capsys: Capture
) -> None:
    marker = root / "forebay-pool.json"
    marker.unlink()
    make(marker)
    assert run(["pool", "stat", str(root)]) == 2
    said = capsys.readouterr().err
    assert str(marker) in said
    assert says in said
    options = file.Options(roots=(file.RootOptions(path=str(root)),), capacity_bytes=2**20)
    with pytest.raises(ConfigError, match=f"{marker}.*{says}"):
        file.build(options, NAMESPACE, bytes(namespace_key(NAMESPACE)))


def test_every_root_that_cannot_be_used_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    roots = tuple(file.RootOptions(path=str(tmp_path / name)) for name in ("no/parent", "file/below"))
    with pytest.raises(ConfigError) as caught:
        file.build(file.Options(roots=roots, capacity_bytes=2**20), NAMESPACE, bytes(namespace_key(NAMESPACE)))
    assert f"{tmp_path}/no/parent: No such file or directory" in str(caught.value)
    assert f"{tmp_path}/file/below: Not a directory" in str(caught.value)


def test_purge_says_truly_why_a_directory_stays(root: Path, capsys: Capture) -> None:
    kept = root / namespace_key(NAMESPACE).hex()
    (kept / "notes.txt").write_text("mine")
    assert run(["pool", "purge", "--yes", str(root)]) == 0
    assert f"kept {kept}: there is something in it, blocks that a store has written meanwhile or what Forebay" in (
        capsys.readouterr().out
    )
    assert (kept / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("command", [["pool", "verify"], ["pool", "ls", "--json"], ["pool", "--help"]])
def test_a_reader_that_has_left_is_141_and_no_word(root: Path, command: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    ended = subprocess.run(
        [sys.executable, "-m", "forebay", *command, *([str(root)] if "--help" not in command else [])],
        stdout=writing,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (141, b"")


def test_with_stderr_closed_an_error_goes_nowhere(tmp_path: Path) -> None:
    program = f"{sys.executable} -m forebay pool stat {tmp_path} 2>&-"
    ended = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", "")


@pytest.mark.parametrize(("redirection", "code"), [(">&-", 0), (">/dev/full", 2), ("| true", 0)])
def test_an_output_that_cannot_be_written_is_no_traceback(root: Path, redirection: str, code: int) -> None:
    program = f"{sys.executable} -c 'from forebay.cli import main; main()' pool stat {root} {redirection}"
    ended = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == code
    assert "Traceback" not in ended.stderr
    assert "Exception ignored" not in ended.stderr
