"""Blocks that the compiled kernel writes: what it leaves to Python; a death at each system call, and a failing one."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from file_tier_kit import BLOCK_BYTES, STORED_BYTES, block_file, namespace_dir, open_tier, unfinished, write_all

from forebay.testing.tier_contract import filled, get, key_of, payload_of, put, slot
from forebay.tiers.file import Durability, FileTier, Io, directio
from forebay.tiers.file.native import find_kernel
from forebay.types import Outcome

needs_kernel = pytest.mark.skipif(find_kernel().kernel is None, reason=find_kernel().words)
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")


def written_by(tier: FileTier) -> tuple[int, int]:
    """Blocks that the kernel and that Python have written."""
    report = tier.writes()
    return report.native_blocks, report.python_blocks


@needs_kernel
@pytest.mark.parametrize("block_bytes", [1, 4095, 4096, 5000, 3 * 4096])
def test_both_ways_write_the_same_bytes(tmp_path: Path, block_bytes: int) -> None:
    files = []
    for io in (Io.NATIVE, Io.PYTHON):
        tier = open_tier(tmp_path / io.value, io=io, block_bytes=block_bytes)
        assert write_all(tier, range(5), block_bytes) == [Outcome.OK] * 5
        assert written_by(tier) == ((5, 0) if io is Io.NATIVE else (0, 0))
        files.append({path.name: path.read_bytes() for path in (tmp_path / io.value).rglob("*.kv")})
        assert [get(tier, i, block_bytes) for i in range(5)] == [payload_of(i, block_bytes) for i in range(5)]
        tier.close()
    assert files[0] == files[1]
    assert len(files[0]) == 5


@needs_kernel
def test_what_lies_behind_the_payload_does_not_reach_the_disk(tmp_path: Path) -> None:
    tier = open_tier(tmp_path / "a", io=Io.NATIVE)
    view = slot(BLOCK_BYTES)
    view[:] = b"\xff" * len(view)
    assert list(tier.write([key_of(1)], [view])) == [Outcome.OK]
    assert written_by(tier) == (1, 0)
    padding = block_file(tmp_path / "a", key_of(1)).read_bytes()[4096 + BLOCK_BYTES :]
    assert padding == bytes(STORED_BYTES - 4096 - BLOCK_BYTES)
    tier.close()


@needs_kernel
def test_all_else_goes_to_python(tmp_path: Path) -> None:
    root = tmp_path / "a"
    tier = open_tier(root, io=Io.NATIVE)
    assert write_all(tier, [1, 2, 2]) == [Outcome.OK] * 3  # one of the twins comes second
    assert written_by(tier) == (2, 1)
    assert write_all(tier, [1]) == [Outcome.OK]  # it is there
    assert written_by(tier) == (2, 2)
    view = slot(BLOCK_BYTES, misaligned_by=1)
    view[:BLOCK_BYTES] = payload_of(3, BLOCK_BYTES)
    assert list(tier.write([key_of(3)], [view])) == [Outcome.OK]
    assert written_by(tier) == (2, 3)
    block_file(root, key_of(4)).parent.mkdir(exist_ok=True)
    block_file(root, key_of(4)).write_bytes(b"no block")  # which the catalogue does not know
    assert write_all(tier, [4]) == [Outcome.OK]
    assert written_by(tier) == (2, 4)
    shutil.rmtree(namespace_dir(root))
    assert write_all(tier, [5]) == [Outcome.OK]  # the place that it belongs to is gone
    assert written_by(tier) == (2, 5)
    assert [get(tier, i, BLOCK_BYTES) for i in (4, 5)] == [Outcome.MISSING, payload_of(5, BLOCK_BYTES)]
    tier.close()


@needs_kernel
def test_waiting_for_the_medium_is_pythons(tmp_path: Path) -> None:
    tier = open_tier(tmp_path / "a", io=Io.NATIVE, durability=Durability.BLOCK)
    put(tier, [1], BLOCK_BYTES)
    assert tier.writes().by is Io.PYTHON
    assert "durability" in tier.writes().reason
    assert tier.reads().by is Io.NATIVE
    tier.close()


@needs_kernel
def test_without_unnamed_files_python_writes_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(directio, "_has_unnamed", lambda *_: False)
    tier = open_tier(tmp_path / "a", io=Io.NATIVE)
    put(tier, [1, 2], BLOCK_BYTES)
    assert written_by(tier) == (0, 2)
    assert [record.getMessage() for record in caplog.records if "without names" in record.getMessage()] == [
        f"root {tmp_path / 'a'}: no files without names here: Python writes the blocks"
    ]
    tier.close()


@needs_kernel
def test_room_is_kept_also_by_the_kernel(tmp_path: Path) -> None:
    tier = open_tier(tmp_path / "a", io=Io.NATIVE, capacity_bytes=3 * STORED_BYTES)
    assert write_all(tier, [1, 2, 3, 4]).count(Outcome.FULL) == 1
    assert tier.used_bytes == 3 * STORED_BYTES == sum(path.stat().st_size for path in tmp_path.rglob("*.kv"))
    tier.close()
    free_bytes = shutil.disk_usage(tmp_path).free
    tier = open_tier(tmp_path / "b", io=Io.NATIVE, free_floor_bytes=2 * free_bytes)
    assert write_all(tier, [1]) == [Outcome.FULL]
    assert written_by(tier) == (0, 0)
    tier.close()


@needs_kernel
def test_a_whole_batch_is_written_while_others_hold_the_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the kernel's call on, this thread never lets go of the lock, and still sees every block's result."""
    numbers, called, outcomes, results = (
        range(24),
        threading.Event(),
        list[object](),
        list[ctypes.Array[ctypes.c_char]](),
    )
    tier = open_tier(tmp_path / "a", io=Io.NATIVE)
    put(tier, numbers, BLOCK_BYTES)
    tier.delete([key_of(i) for i in numbers])
    views = [filled(payload_of(i, BLOCK_BYTES)) for i in numbers]
    fast = tier._fast_writes
    assert fast is not None
    start, before = fast._kernel.start, sys.getswitchinterval()

    def started(jobs: Any, *others: object) -> object:
        address = ctypes.c_void_p.from_buffer(jobs[0], type(jobs[0]).results.offset).value
        results.append((ctypes.c_char * len(numbers)).from_address(address or 0))
        sys.setswitchinterval(1000)  # seconds: the lock changes hands only where a thread blocks, or calls the kernel
        called.set()
        return start(jobs, *others)

    def write() -> None:
        outcomes.extend(tier.write([key_of(i) for i in numbers], views))

    monkeypatch.setattr(fast._kernel, "start", started)
    writer = threading.Thread(target=write)
    try:
        writer.start()
        called.wait()
        patience_s = time.monotonic() + 30
        while results[0].raw != b"\1" * len(numbers) and time.monotonic() < patience_s:
            pass
        arrived, ended = results[0].raw == b"\1" * len(numbers), bool(outcomes)
    finally:
        sys.setswitchinterval(before)
        writer.join()
    assert (arrived, ended) == (True, False)
    assert outcomes == [Outcome.OK] * len(numbers)
    tier.close()


def step_library(directory: Path) -> Path:
    library = directory / "steps.so"
    source = Path(__file__).with_name("steps.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", str(source), "-o", str(library), "-ldl"], check=True, timeout=60)
    return library


def stepping(script: str, directory: Path) -> None:
    """Run one of the functions below in a process that has the steps."""
    library = step_library(directory)
    here = str(Path(__file__).parent)
    code = f"import sys; sys.path.insert(0, {here!r}); import test_file_native_writes as me; me.{script}"
    ran = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code], capture_output=True, text=True, timeout=120,
        env={**os.environ, "LD_PRELOAD": str(library), "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr


@needs_kernel
@needs_compiler
def test_killed_at_any_system_call_of_the_kernel(tmp_path: Path) -> None:
    stepping(f"kill_at_each({str(tmp_path)!r})", tmp_path)


@needs_kernel
@needs_compiler
def test_any_system_call_of_the_kernel_may_fail(tmp_path: Path) -> None:
    stepping(f"fail_at_each({str(tmp_path)!r})", tmp_path)


@needs_kernel
@needs_compiler
def test_any_read_of_the_kernel_may_fail_or_come_short(tmp_path: Path) -> None:
    stepping(f"fail_reads_at_each({str(tmp_path)!r})", tmp_path)


def fail_reads_at_each(place: str) -> None:
    """A read that fails makes the block Python's business, one that is short or interrupted is gone on with."""
    steps, tier = ctypes.CDLL(None), open_tier(Path(place) / "a", io=Io.NATIVE, reads_in_flight=1, writes_in_flight=1)
    put(tier, [1, 2], BLOCK_BYTES)
    short, keys = -1, [key_of(1), key_of(2)]
    for error in (errno.EIO, errno.EMFILE, errno.EINTR, short):
        for calls in range(1, 20):
            open_files, before = len(os.listdir("/proc/self/fd")), tier.reads()
            views = [slot(BLOCK_BYTES) for _ in keys]
            steps.steps_arm_reads(calls, error)
            outcomes = list(tier.read(keys, views))
            struck = steps.steps_reads_left() == 0
            steps.steps_arm_reads(-1, 0)
            assert outcomes == [Outcome.OK] * 2, (error, calls, outcomes)
            assert [bytes(view[:BLOCK_BYTES]) for view in views] == [payload_of(i, BLOCK_BYTES) for i in (1, 2)]
            assert len(os.listdir("/proc/self/fd")) == open_files
            by_python = tier.reads().python_blocks - before.python_blocks
            assert by_python == (struck and error != short and (error, calls % 2) != (errno.EINTR, 0)), (error, calls)
            if not struck:
                break
        assert not struck
        assert calls > (2 if error == short else 4)
    assert tier.describe()[0].events == {}
    tier.close()


def kill_at_each(place: str) -> None:
    """After each death: every block whole or absent, nothing left over, and the catalogue right."""
    steps, root, deaths = ctypes.CDLL(None), Path(place) / "a", 0
    for calls in range(1, 60):
        child = os.fork()
        if child == 0:
            tier = open_tier(root, io=Io.NATIVE, reads_in_flight=1, writes_in_flight=1)
            put(tier, [1, 2], BLOCK_BYTES)
            tier.delete([key_of(1), key_of(2)])
            block_file(root, key_of(2)).parent.rmdir()
            before = written_by(tier)[0]
            steps.steps_arm(calls, 0)
            written = write_all(tier, [1, 2])
            steps.steps_arm(-1, 0)
            assert written == [Outcome.OK] * 2
            os._exit(0 if written_by(tier)[0] == before + 2 else 1)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status in (0, -signal.SIGKILL), status
        deaths += status != 0
        tier = open_tier(root, io=Io.NATIVE)
        files = {path.name[:-3]: path.stat().st_size for path in root.rglob("*.kv")}
        assert unfinished(root) == []
        assert {stored.key.hex(): stored.stored_bytes for stored in tier.scan()} == files
        assert tier.used_bytes == sum(files.values())
        for number in (1, 2):
            there = key_of(number).hex() in files
            assert get(tier, number, BLOCK_BYTES) == (payload_of(number, BLOCK_BYTES) if there else Outcome.MISSING)
        tier.close()
        if status == 0:
            break
    assert status == 0, "the writes have no end"
    assert deaths >= 12, "hardly any call was a step"


def fail_at_each(place: str) -> None:
    """A call that fails makes the block Python's business, which writes it; nothing leaks and nothing is half there."""
    steps, tier = ctypes.CDLL(None), open_tier(Path(place) / "a", io=Io.NATIVE, reads_in_flight=1, writes_in_flight=1)
    put(tier, [1, 2], BLOCK_BYTES)
    for error in (errno.ENOSPC, errno.EIO, errno.EINTR):
        for calls in range(1, 60):
            tier.delete([key_of(1), key_of(2)])
            block_file(Path(place) / "a", key_of(2)).parent.rmdir()
            open_files = len(os.listdir("/proc/self/fd"))
            steps.steps_arm(calls, error)
            outcomes = write_all(tier, [1, 2])
            struck = steps.steps_left() == 0
            steps.steps_arm(-1, 0)
            assert outcomes == [Outcome.OK] * 2, (error, calls, outcomes)
            assert [get(tier, i, BLOCK_BYTES) for i in (1, 2)] == [payload_of(i, BLOCK_BYTES) for i in (1, 2)]
            assert unfinished(Path(place) / "a") == []
            assert len(os.listdir("/proc/self/fd")) == open_files
            if not struck:
                break
        assert not struck
        assert calls > 10
    tier.close()
