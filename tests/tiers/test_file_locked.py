"""The lock of a catalogue: others that hold it too long, roots that come back without it, and what is given back."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from file_tier_kit import BLOCK_BYTES, STORED_BYTES, block_file, open_tier, write_all

from forebay.errors import ConfigError
from forebay.testing.tier_contract import get, key_of, payload_of, put
from forebay.tiers.file import Io
from forebay.tiers.file.directio import REAL_CALLS
from forebay.tiers.file.native import NativeLanes, find_kernel
from forebay.types import Outcome

LOCK_FILE = "catalogue.lock"
SHORT_S = 30.0
"""Far longer than anything here takes, far shorter than for ever."""


@contextlib.contextmanager
def locked_by_another(root: Path) -> Iterator[None]:
    """A process that stands still with the lock: an open file of its own is all that tells it from this one."""
    descriptor = os.open(root / LOCK_FILE, os.O_RDWR)
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, struct.pack("@hhqqi0q", fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0))
        yield
    finally:
        os.close(descriptor)


def in_time(call: object) -> list[object]:
    """What it returns, or nothing if it hangs."""
    answers: list[object] = []
    assert callable(call)
    thread = threading.Thread(target=lambda: answers.append(call()), daemon=True)
    thread.start()
    thread.join(SHORT_S)
    return answers


def test_a_process_that_stands_still_with_the_lock_holds_up_nobody(tmp_path: Path) -> None:
    root = tmp_path / "a"
    tier = open_tier(root, hang_s=0.2, retry_s=0.01)
    put(tier, range(6), BLOCK_BYTES)
    for number in (1, 2):
        block_file(root, key_of(number)).unlink()
    with locked_by_another(root):
        assert in_time(lambda: list(tier.contains([key_of(1), key_of(3)]))) == [[False, True]]
        assert in_time(lambda: get(tier, 2, BLOCK_BYTES)) == [Outcome.MISSING]
        assert in_time(lambda: get(tier, 3, BLOCK_BYTES)) == [payload_of(3, BLOCK_BYTES)]
        assert in_time(lambda: write_all(tier, [10])) == [[Outcome.FAILED]]
        assert in_time(lambda: list(tier.delete([key_of(4)]))) == [[Outcome.OK]]
        assert tier.describe()[0].events["ETIMEDOUT"] >= 2
    deadline_s = time.monotonic() + SHORT_S
    while write_all(tier, [10]) != [Outcome.OK]:
        assert time.monotonic() < deadline_s, "it takes part again"
    assert {stored.key for stored in tier.scan()} == {key_of(i) for i in (0, 3, 5, 10)}
    assert tier.used_bytes == 4 * STORED_BYTES
    tier.close()


def test_a_store_opens_although_another_process_stands_still_with_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "a"
    tier = open_tier(root)
    put(tier, [1, 2], BLOCK_BYTES)
    tier.close()
    monkeypatch.setattr("forebay.tiers.file.catalogue._OPENING_S", 0.05)
    with locked_by_another(root):
        [again] = in_time(lambda: open_tier(root, hang_s=0.05))
    assert get(again, 1, BLOCK_BYTES) == payload_of(1, BLOCK_BYTES)  # type: ignore[arg-type]
    assert "kept in memory ([Errno 110] another process has held its lock" in caplog.text
    again.close()  # type: ignore[attr-defined]


def test_a_root_that_comes_back_without_locks_is_counted_in_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root, has_locks = tmp_path / "a", [True]

    def lock(descriptor: int, command: int, range_: bytes) -> bytes:
        if not has_locks[0] and os.fstat(descriptor).st_nlink:  # that of the old mount still works
            raise OSError(errno.ENOLCK, "No locks available")
        return fcntl.fcntl(descriptor, command, range_)

    tier = open_tier(root, calls=replace(REAL_CALLS, lock=lock))
    put(tier, [1, 2], BLOCK_BYTES)
    has_locks[0] = False
    (root / LOCK_FILE).unlink()  # another mount
    put(tier, [3], BLOCK_BYTES)
    assert get(tier, 3, BLOCK_BYTES) == payload_of(3, BLOCK_BYTES)
    assert tier.used_bytes == 3 * STORED_BYTES
    assert caplog.text.count("kept in memory (No locks available)") == 1
    tier.close()


def test_every_descriptor_is_closed_once(tmp_path: Path) -> None:
    """A number that is closed twice may by then be the file of somebody else."""
    root, is_open, fails = tmp_path / "a", set[int](), [False]

    def opened(path: str, flags: int, mode: int) -> int:
        descriptor = os.open(path, flags, mode)
        is_open.add(descriptor)
        return descriptor

    def closed(descriptor: int) -> None:
        is_open.remove(descriptor)
        os.close(descriptor)

    def lock(descriptor: int, command: int, range_: bytes) -> bytes:
        at = struct.unpack("@hhqqi0q", range_)[2]
        if fails[0] and at == 0 and os.fstat(descriptor).st_nlink:  # the new one's; the old one has lost its name
            raise OSError(errno.EIO, "Input/output error")
        return fcntl.fcntl(descriptor, command, range_)

    calls = replace(REAL_CALLS, open=opened, close=closed, lock=lock)
    tier = open_tier(root, calls=calls)
    put(tier, [1], BLOCK_BYTES)
    (root / LOCK_FILE).unlink()
    fails[0] = True
    tier.close()
    assert is_open == set()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_refused_opening_gives_everything_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, copy = tmp_path / "a", tmp_path / "b"
    open_tier(one).close()
    shutil.copytree(one, copy)
    before, threads = descriptors(), set(threading.enumerate())
    for _ in range(5):
        with pytest.raises(ConfigError, match="the same identity"):
            open_tier(one, copy, io=Io.PYTHON)
    monkeypatch.setattr("forebay.tiers.file.tier.say_differences", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        open_tier(one, io=Io.PYTHON)
    assert descriptors() == before
    assert {thread for thread in threading.enumerate() if thread.is_alive()} <= threads


@pytest.mark.skipif(find_kernel().kernel is None, reason="no compiled kernel")
def test_threads_that_cannot_be_had_are_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: NativeLanes, kernel: object, in_flight: int) -> None:
        raise OSError(errno.EAGAIN, f"cannot start threads for {in_flight} transfers")

    monkeypatch.setattr(NativeLanes, "__init__", refuse)
    with pytest.raises(ConfigError, match="for 2 transfers: Resource temporarily unavailable; have fewer"):
        open_tier(tmp_path / "a", io=Io.NATIVE)
