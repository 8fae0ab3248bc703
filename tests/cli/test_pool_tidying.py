"""`forebay pool scrub`, `gc` and the choices of `purge`, as an operator types them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from forebay.bench.units import parse_rate, parse_seconds
from forebay.cli import run
from forebay.errors import ConfigError
from forebay.keys import block_keys, namespace_key
from forebay.testing.schedule import NAMESPACE, truth
from forebay.tiers import file
from forebay.types import Outcome

Capture = pytest.CaptureFixture[str]
KEYS = block_keys(NAMESPACE, range(10 * NAMESPACE.block_tokens))
STORED_BYTES = 8192


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A pool of 10 blocks, 4 of them from the year 2001."""
    path = tmp_path / "pool"
    options = file.Options(roots=(file.RootOptions(path=str(path)),), capacity_bytes=2**20)
    tier = file.build(options, NAMESPACE, bytes(namespace_key(NAMESPACE)))
    assert tier.write(KEYS, [memoryview(bytearray(truth(key))) for key in KEYS]) == [Outcome.OK] * 10
    tier.close()
    for key in KEYS[:4]:
        os.utime(block_file(path, key), ns=(10**18, 10**18))
    return path


def block_file(root: Path, key: bytes) -> Path:
    (found,) = root.rglob(f"{key.hex()}.kv")
    return found


def answer(capsys: Capture, *arguments: str) -> dict[str, object]:
    assert run([*arguments, "--json"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    decoded: dict[str, object] = json.loads(printed.out)
    return decoded


def test_scrub_finds_damage_and_ends_with_1(root: Path, capsys: Capture) -> None:
    assert run(["pool", "scrub", "--rate", "1GB/s", str(root)]) == 0
    assert "10 blocks, 80.00 KiB checked: 0 damaged, 0 unreadable" in capsys.readouterr().out
    block_file(root, KEYS[5]).write_bytes(b"x" * STORED_BYTES)
    assert run(["pool", "scrub", "--rate", "1GB/s", str(root)]) == 1
    printed = capsys.readouterr()
    assert "bad-magic" in printed.out
    assert printed.err == ""
    report = answer(capsys, "pool", "scrub", "--ttl", "52w", "--rate", "1GB/s", str(root))
    assert (report["checked_blocks"], report["expired_blocks"], report["expired_bytes"]) == (5, 4, 4 * STORED_BYTES)


def test_scrub_is_paced_and_goes_on_after_an_interrupt(root: Path, capsys: Capture) -> None:
    """At 8 KiB/s the second block comes after a second: interrupted before it, in a real process."""
    program = """
import os, signal, sys, time
time.sleep = lambda seconds: os.kill(os.getpid(), signal.SIGINT)
from forebay.cli import main
main()
"""
    ended = subprocess.run(
        [sys.executable, "-c", program, "pool", "scrub", "--rate", "8KiB/s", str(root)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr.strip()) == (130, "forebay: interrupted")
    assert answer(capsys, "pool", "scrub", "--rate", "1GB/s", str(root))["checked_blocks"] == 9


def test_purge_says_first_what_it_would_do(root: Path, capsys: Capture) -> None:
    assert run(["pool", "purge", "--dry-run", "--older-than", "52w", str(root)]) == 0
    assert capsys.readouterr().out == "would remove 4 blocks, 32.00 KiB, of 1 namespaces\n"
    would = answer(capsys, "pool", "purge", "--dry-run", "--model", NAMESPACE.model, str(root))
    assert (would["removed_blocks"], would["effect"]) == (10, "dry run")
    assert len(list(root.rglob("*.kv"))) == 10
    assert run(["pool", "purge", "--yes", "--older-than", "52w", str(root)]) == 0
    assert capsys.readouterr().out == "removed 4 blocks, 32.00 KiB, of 1 namespaces\n"
    assert len(list(root.rglob("*.kv"))) == 6


def test_gc_says_what_it_removed(root: Path, capsys: Capture) -> None:
    (root / "tmp" / "abc.0123456789abcdef.tmp").write_bytes(b"x" * 70)
    words = "1 unfinished files (70 B), 4 expired blocks (32.00 KiB), 0 files of the quarantine (0 B), "
    assert run(["pool", "gc", "--ttl", "52w", "--dry-run", str(root)]) == 0
    assert capsys.readouterr().out.startswith(f"would remove {words}")
    assert run(["pool", "gc", "--ttl", "52w", str(root)]) == 0
    assert capsys.readouterr().out.startswith(f"removed {words}")
    report = answer(capsys, "pool", "gc", "--ttl", "52w", str(root))
    assert (report["unfinished_files"], report["expired_blocks"], report["effect"]) == (0, 0, "remove")


def test_stat_shows_the_room_of_odd_and_unfinished_files(root: Path, capsys: Capture) -> None:
    (root / "tmp" / "abc.0123456789abcdef.tmp").write_bytes(b"x" * 70)
    os.truncate(block_file(root, KEYS[7]), 4096 * 3)
    assert run(["pool", "stat", str(root)]) == 0
    text = capsys.readouterr().out
    assert "1 of another length, 12.00 KiB: newer or damaged" in text
    assert "unfinished   1 files, 70 B" in text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["scrub", "--rate", "fast"], "'fast' is not a rate"),
        (["scrub", "--rate", "0MB/s"], "is not a rate"),
        (["scrub", "--rate", "200MB"], "is not a rate"),
        (["scrub", "--rate", "-1MB/s"], "is not a rate"),
        (["scrub", "--rate", "\x1b[31m"], "is not a rate"),
        (["gc", "--ttl", "7"], "'7' is not a time"),
        (["gc", "--ttl", "-7d"], "is not a time"),
        (["gc", "--quarantine", "soon"], "'soon' is not a time"),
        (["gc", "--quarantine", "nan"], "is not a time"),
        (["purge", "--yes", "--older-than", "1 month"], "is not a time"),
        (["purge", "--yes", "--tenant", "../x"], "does not name a tenant"),
        (["purge", "--yes", "--model", "../x"], "no namespace of a model named '../x'"),
        (["purge", "--yes", "--model", "x" * 300], "no namespace of a model named"),
        (["purge", "--yes", "--namespace", "\x1b[31m"], "does not name a namespace"),
    ],
)
def test_a_wrong_option_is_one_line_and_touches_nothing(
    root: Path, arguments: list[str], says: str, capsys: Capture
) -> None:
    assert run(["pool", *arguments, str(root)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert says in printed.err
    assert "\x1b" not in printed.err
    assert len(list(root.rglob("*.kv"))) == 10


def test_a_root_that_cannot_keep_a_position_is_one_line(root: Path, capsys: Capture) -> None:
    (root / "scrub.json").mkdir()
    assert run(["pool", "scrub", str(root)]) == 2
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1
    assert "scrub.json" in printed.err


def test_units() -> None:
    assert parse_rate("200MB/s") == 200_000_000
    assert parse_rate("1.5 GiB / s") == 1.5 * 2**30
    assert [parse_seconds(text) for text in ("90s", "1.5m", "12h", "7d", "2w")] == [90, 90, 43_200, 604_800, 1_209_600]
    for text in ("", "7", "d", "1e9d", "7D", "\N{ARABIC-INDIC DIGIT SEVEN}d"):
        with pytest.raises(ConfigError, match="not a time"):
            parse_seconds(text)
