"""The system beneath refuses, falls short, is full: outcomes and one log line, and nothing left behind."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from file_tier_kit import BLOCK_BYTES, block_file, failing, open_tier, unfinished, write_all

from forebay.errors import ConfigError
from forebay.testing.tier_contract import get, key_of, payload_of, put
from forebay.tiers.file import DirectMode
from forebay.tiers.file.directio import REAL_CALLS, Access
from forebay.types import Outcome

NO_DIRECT = replace(
    REAL_CALLS, open=failing(os.open, lambda path, flags, mode: bool(flags & os.O_DIRECT), errno.EINVAL)
)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_no_direct_io_means_buffered_and_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier = open_tier(tmp_path / "a", calls=NO_DIRECT)
    put(tier, range(5), BLOCK_BYTES)
    assert [get(tier, i, BLOCK_BYTES) for i in range(5)] == [payload_of(i, BLOCK_BYTES) for i in range(5)]
    [line] = warnings_of(caplog)
    assert str(tmp_path / "a") in line
    assert f"errno {errno.EINVAL}" in line
    assert tier.describe()[0].io.access is Access.BUFFERED
    tier.close()


def test_direct_io_that_is_refused_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    refuse = [False]
    opener = failing(os.open, lambda path, flags, mode: refuse[0] and bool(flags & os.O_DIRECT), errno.EINVAL)
    tier = open_tier(tmp_path / "a", calls=replace(REAL_CALLS, open=opener))
    put(tier, range(4), BLOCK_BYTES)
    assert tier.describe()[0].io.access is Access.DIRECT
    refuse[0] = True
    put(tier, [4], BLOCK_BYTES)
    assert [get(tier, i, BLOCK_BYTES) for i in range(5)] == [payload_of(i, BLOCK_BYTES) for i in range(5)]
    assert len(warnings_of(caplog)) == 1
    tier.close()


def test_direct_always_refuses_instead(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="refuses O_DIRECT"):
        open_tier(tmp_path / "a", calls=NO_DIRECT, direct=DirectMode.ALWAYS)


@pytest.mark.parametrize("error_number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_full(tmp_path: Path, error_number: int) -> None:
    full = [False]
    pwritev = failing(os.pwritev, lambda *_: full[0], error_number)
    tier = open_tier(tmp_path / "a", calls=replace(REAL_CALLS, pwritev=pwritev))
    full[0] = True
    assert write_all(tier, [1, 2]) == [Outcome.FULL] * 2
    assert unfinished(tmp_path / "a") == []
    assert list(tier.scan()) == []
    full[0] = False
    assert write_all(tier, [1]) == [Outcome.OK]
    tier.close()


@pytest.mark.parametrize("call", ["open", "pwritev", "rename"])
def test_a_failed_write_leaves_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture, call: str) -> None:
    root, broken = tmp_path / "a", [False]
    guarded = failing(getattr(REAL_CALLS, call), lambda *_: broken[0], errno.EIO)
    tier = open_tier(root, calls=replace(REAL_CALLS, **{call: guarded}))
    broken[0] = True
    assert write_all(tier, [1, 2]) == [Outcome.FAILED] * 2
    broken[0] = False
    assert unfinished(root) == []
    assert list(tier.contains([key_of(1), key_of(2)])) == [False, False]
    assert write_all(tier, [1, 2]) == [Outcome.OK] * 2
    [line] = warnings_of(caplog)
    assert "a write failed" in line
    tier.close()


def test_a_write_cut_short_for_good(tmp_path: Path) -> None:
    """The device takes half a block and then nothing: FAILED, and no torn file is published."""
    calls_seen: list[int] = []

    def half(descriptor: int, parts: Sequence[memoryview], offset: int) -> int:
        calls_seen.append(offset)
        return os.pwritev(descriptor, [parts[0][:4096]], offset) if offset == 0 else 0

    tier = open_tier(tmp_path / "a", calls=replace(REAL_CALLS, pwritev=half))
    assert write_all(tier, [1]) == [Outcome.FAILED]
    assert calls_seen[-2:] == [0, 4096]
    assert unfinished(tmp_path / "a") == []
    assert list(tier.contains([key_of(1)])) == [False]
    tier.close()


def test_short_transfers_are_continued(tmp_path: Path) -> None:
    """Every call moves one page at most."""

    def read_page(descriptor: int, parts: Sequence[memoryview], offset: int) -> int:
        return os.preadv(descriptor, [parts[0][:4096]], offset)

    def write_page(descriptor: int, parts: Sequence[memoryview], offset: int) -> int:
        return os.pwritev(descriptor, [parts[0][:4096]], offset)

    tier = open_tier(tmp_path / "a", calls=replace(REAL_CALLS, preadv=read_page, pwritev=write_page))
    put(tier, range(3), BLOCK_BYTES)
    assert [get(tier, i, BLOCK_BYTES) for i in range(3)] == [payload_of(i, BLOCK_BYTES) for i in range(3)]
    tier.close()


def test_a_read_error_is_failed_and_the_block_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    broken = [False]
    preadv = failing(os.preadv, lambda *_: broken[0], errno.EIO)
    tier = open_tier(tmp_path / "a", calls=replace(REAL_CALLS, preadv=preadv))
    put(tier, [1], BLOCK_BYTES)
    broken[0] = True
    assert [get(tier, 1, BLOCK_BYTES) for _ in range(3)] == [Outcome.FAILED] * 3
    broken[0] = False
    assert get(tier, 1, BLOCK_BYTES) == payload_of(1, BLOCK_BYTES)
    assert len(warnings_of(caplog)) == 1
    tier.close()


def test_a_file_size_limit_of_the_process(tmp_path: Path) -> None:
    """The real kernel refuses in the middle of a block (a subprocess with RLIMIT_FSIZE)."""
    script = """
import resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from file_tier_kit import open_tier, write_all, unfinished
root = Path(sys.argv[1])
tier = open_tier(root)
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
print(write_all(tier, [1, 2])[0].name, unfinished(root), list(tier.scan()))
tier.close()
"""
    ran = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "a"), str(Path(__file__).parent)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert ran.stdout == "FAILED [] []\n"


def test_a_read_only_root_still_serves(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = tmp_path / "a"
    tier = open_tier(root)
    put(tier, [1], BLOCK_BYTES)
    tier.close()
    create = failing(os.open, lambda path, flags, mode: bool(flags & os.O_CREAT), errno.EROFS)
    frozen = open_tier(root, calls=replace(REAL_CALLS, open=create))
    assert get(frozen, 1, BLOCK_BYTES) == payload_of(1, BLOCK_BYTES)
    assert write_all(frozen, [2]) == [Outcome.FAILED]
    assert len(warnings_of(caplog)) == 1
    frozen.close()


def test_the_blocks_directory_may_be_purged_under_an_open_tier(tmp_path: Path) -> None:
    root = tmp_path / "a"
    tier = open_tier(root)
    put(tier, [1], BLOCK_BYTES)
    path = block_file(root, key_of(1))
    path.unlink()
    path.parent.rmdir()
    (path.parent.parent / "namespace.json").unlink()
    path.parent.parent.rmdir()
    assert get(tier, 1, BLOCK_BYTES) is Outcome.MISSING
    put(tier, [1], BLOCK_BYTES)
    assert get(tier, 1, BLOCK_BYTES) == payload_of(1, BLOCK_BYTES)
    assert (path.parent.parent / "namespace.json").exists()
    tier.close()


def test_descriptors_and_threads_do_not_leak(tmp_path: Path) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    descriptors_before, threads_before = descriptors(), threading.active_count()
    broken = [False]
    preadv = failing(os.preadv, lambda *_: broken[0], errno.EIO)
    pwritev = failing(os.pwritev, lambda *_: broken[0], errno.EIO)
    for _ in range(3):
        tier = open_tier(tmp_path / "a", tmp_path / "b", calls=replace(REAL_CALLS, preadv=preadv, pwritev=pwritev))
        put(tier, range(10), BLOCK_BYTES)
        broken[0] = True
        write_all(tier, range(10, 20))
        get(tier, 1, BLOCK_BYTES)
        broken[0] = False
        block_file(tmp_path / "a", key_of(1)).unlink(missing_ok=True)
        list(tier.scan())
        tier.drop_page_cache()
        tier.delete([key_of(i) for i in range(20)])
        tier.close()
    assert descriptors() == descriptors_before
    assert threading.active_count() == threads_before
