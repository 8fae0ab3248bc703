"""The compiled kernel: what it reads itself, what it leaves to Python, and what becomes of it without a compiler."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from file_tier_kit import BLOCK_BYTES, block_file, flip, open_tier

from forebay.errors import ConfigError, TierUnavailable
from forebay.testing.tier_contract import get, key_of, payload_of, put, slot
from forebay.tiers.file import FileTier, Io, Verify, fastpath
from forebay.tiers.file.directio import REAL_CALLS
from forebay.tiers.file.health import RootState
from forebay.tiers.file.native import Found, find_kernel
from forebay.tiers.file.native.compile import HERE, LIBRARY, CannotCompile, compile_kernel, is_current
from forebay.tiers.file.probe import Verdict, probe
from forebay.types import Outcome

needs_kernel = pytest.mark.skipif(find_kernel().kernel is None, reason=find_kernel().words)
NO_KERNEL = Found(None, "there is none in this test")


def read_by(tier: FileTier) -> tuple[int, int]:
    """Blocks that the kernel and that Python have read."""
    report = tier.reads()
    return report.native_blocks, report.python_blocks


@needs_kernel
@pytest.mark.parametrize("verify", Verify)
def test_sound_blocks_need_no_python(tmp_path: Path, verify: Verify) -> None:
    tier = open_tier(tmp_path / "a", tmp_path / "b", io=Io.NATIVE, verify=verify)
    put(tier, range(20), BLOCK_BYTES)
    views = [slot(BLOCK_BYTES) for _ in range(20)]
    assert list(tier.read([key_of(i) for i in range(20)], views)) == [Outcome.OK] * 20
    assert [bytes(view[:BLOCK_BYTES]) for view in views] == [payload_of(i, BLOCK_BYTES) for i in range(20)]
    assert tier.reads().by is Io.NATIVE
    assert read_by(tier) == (20, 0)
    tier.close()


@needs_kernel
def test_all_else_goes_to_python(tmp_path: Path) -> None:
    root = tmp_path / "a"
    tier = open_tier(root, io=Io.NATIVE)
    put(tier, [1, 2, 3], BLOCK_BYTES)
    flip(block_file(root, key_of(1)), 4096 + BLOCK_BYTES - 1)
    assert get(tier, 1, BLOCK_BYTES) is Outcome.CORRUPT
    assert read_by(tier) == (0, 1)
    assert get(tier, 4, BLOCK_BYTES) is Outcome.MISSING
    assert read_by(tier) == (0, 2)
    view = slot(BLOCK_BYTES, misaligned_by=1)
    assert list(tier.read([key_of(2)], [view])) == [Outcome.OK]
    assert bytes(view[:BLOCK_BYTES]) == payload_of(2, BLOCK_BYTES)
    assert read_by(tier) == (0, 3)
    assert get(tier, 3, BLOCK_BYTES) == payload_of(3, BLOCK_BYTES)
    assert read_by(tier) == (1, 3)
    tier.close()


def test_other_system_calls_mean_python(tmp_path: Path) -> None:
    seen: list[int] = []

    def preadv(descriptor: int, parts: list[memoryview], offset: int) -> int:
        seen.append(offset)
        return os.preadv(descriptor, parts, offset)

    tier = open_tier(tmp_path / "a", calls=replace(REAL_CALLS, preadv=preadv), io=Io.NATIVE)
    put(tier, [1], BLOCK_BYTES)
    seen.clear()
    assert get(tier, 1, BLOCK_BYTES) == payload_of(1, BLOCK_BYTES)
    assert seen == [0]
    assert tier.reads().by is Io.PYTHON
    tier.close()


@needs_kernel
def test_a_whole_batch_is_read_while_others_hold_the_interpreter(tmp_path: Path) -> None:
    """From the kernel's call on, this thread never lets go of the lock, and still sees every block arrive."""
    numbers, called, outcomes = range(24), threading.Event(), list[Outcome]()
    keys, views = [key_of(i) for i in numbers], [slot(BLOCK_BYTES) for _ in numbers]
    payloads = [payload_of(i, BLOCK_BYTES) for i in numbers]
    tier = open_tier(tmp_path / "a", io=Io.NATIVE)
    put(tier, numbers, BLOCK_BYTES)

    def read() -> None:
        called.set()
        outcomes.extend(tier.read(keys, views))

    before = sys.getswitchinterval()
    reader = threading.Thread(target=read)
    sys.setswitchinterval(1000)  # seconds: the lock changes hands only where a thread blocks, or calls the kernel
    try:
        reader.start()
        called.wait()
        patience_s = time.monotonic() + 30
        while [bytes(view[:BLOCK_BYTES]) for view in views] != payloads and time.monotonic() < patience_s:
            pass
        arrived, ended = [bytes(view[:BLOCK_BYTES]) for view in views] == payloads, bool(outcomes)
    finally:
        sys.setswitchinterval(before)
        reader.join()
    assert (arrived, ended) == (True, False)
    assert outcomes == [Outcome.OK] * len(numbers)
    tier.close()


class SlowKernel:
    """The kernel, but each look at a batch first says that it has not ended, as often as `looks` has numbers.

    Each number is how many blocks of the first job are said to be done; `look` is called with it.
    """

    def __init__(self, looks: list[int], look: Callable[[int], None]) -> None:
        kernel = find_kernel().kernel
        assert kernel is not None
        self._kernel, self._looks, self._look = kernel, looks, look
        self.open, self.close, self.free, self.start = kernel.open, kernel.close, kernel.free, kernel.start
        self.end = kernel.end

    def wait(self, reading: object, deadline_ns: int, done: list[int]) -> int:
        if not self._looks:
            return self._kernel.wait(reading, deadline_ns, done)
        done[0] = self._looks.pop(0)
        self._look(done[0])
        return 0


@needs_kernel
@pytest.mark.parametrize(("looks", "stopped"), [([1, 2, 3], False), ([1, 1, 1], True)], ids=["slow", "hung"])
def test_a_batch_that_hangs_is_told_from_a_slow_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks: list[int], stopped: bool
) -> None:
    now_s, states = [0.0], list[RootState]()

    def look(done_blocks: int) -> None:
        now_s[0] += 6
        states.append(tier.describe()[0].state)

    kernel = SlowKernel([], look)
    monkeypatch.setattr(fastpath, "find_kernel", lambda: Found(kernel, "slow"))  # type: ignore[arg-type]
    tier = open_tier(tmp_path / "a", clock_ns=lambda: int(now_s[0] * 1e9), hang_s=10.0)
    put(tier, range(4), BLOCK_BYTES)
    kernel._looks.extend(looks)
    views = [slot(BLOCK_BYTES) for _ in range(4)]
    assert list(tier.read([key_of(i) for i in range(4)], views)) == [Outcome.OK] * 4  # late, but of use
    assert (states[-1] is RootState.STOPPED) == stopped
    tier.close()


@needs_kernel
def test_a_sound_block_speaks_for_the_device_and_an_unsound_one_says_nothing(tmp_path: Path) -> None:
    tier = open_tier(tmp_path / "a", io=Io.NATIVE, failures_in_a_row=2)
    put(tier, [1, 2], BLOCK_BYTES)
    reads = tier._members[0].root.health.reads

    def fail_once() -> None:
        with reads.call() as call:
            call.failed("EIO")

    fail_once()
    get(tier, 1, BLOCK_BYTES)
    fail_once()
    assert tier.describe()[0].state is RootState.ONLINE
    block_file(tmp_path / "a", key_of(1)).unlink()
    fast = tier._fast_reads
    assert fast is not None
    assert fast.move([0], [key_of(1)], [slot(BLOCK_BYTES)]) == []
    fail_once()
    assert tier.describe()[0].state is RootState.STOPPED
    assert fast.move([0], [key_of(2)], [slot(BLOCK_BYTES)]) == []  # left to Python, which asks the breaker
    tier.close()


def test_without_a_kernel_reads_go_through_python_and_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fastpath, "find_kernel", lambda: NO_KERNEL)
    with caplog.at_level(logging.WARNING):
        tier = open_tier(tmp_path / "a", io=Io.AUTO)
    [line] = [record.getMessage() for record in caplog.records]
    assert NO_KERNEL.words in line
    put(tier, [1], BLOCK_BYTES)
    assert get(tier, 1, BLOCK_BYTES) == payload_of(1, BLOCK_BYTES)
    assert tier.reads() == fastpath.PathReport(Io.PYTHON, NO_KERNEL.words)
    tier.close()
    with pytest.raises(ConfigError, match="io = 'native', but there is none"):
        open_tier(tmp_path / "a", io=Io.NATIVE)


def test_a_library_of_other_sources_is_not_loaded(tmp_path: Path) -> None:
    assert "no compiled kernel" in find_kernel(tmp_path).words
    (tmp_path / LIBRARY).write_bytes(b"\x7fELF of another version")
    assert not is_current(tmp_path / LIBRARY)
    assert "other sources" in find_kernel(tmp_path).words


@needs_kernel
def test_a_library_that_cannot_be_loaded_is_said(tmp_path: Path) -> None:
    torn = (HERE / LIBRARY).read_bytes()
    (tmp_path / LIBRARY).write_bytes(b"\0" * 64 + torn[64:])
    assert "cannot be loaded" in find_kernel(tmp_path).words


def test_no_compiler_and_a_broken_one(tmp_path: Path) -> None:
    with pytest.raises(CannotCompile, match="no C compiler"):
        compile_kernel(tmp_path, ("no-such-compiler",))
    with pytest.raises(CannotCompile, match="exit code 1"):
        compile_kernel(tmp_path, ("false",))
    assert list(tmp_path.iterdir()) == []


def test_doctor_says_who_reads(tmp_path: Path) -> None:
    [item] = [item for item in probe(tmp_path).items if item.name == "reads, writes"]
    there = find_kernel().kernel is not None
    assert (item.verdict is Verdict.OK) == there
    assert ("kernel.so" in item.words) == there


@needs_kernel
def test_closing_during_reads(tmp_path: Path) -> None:
    """A read that began is finished, one that comes later is refused; nothing crashes or hangs."""
    numbers = range(30)
    filling = open_tier(tmp_path / "a")
    put(filling, numbers, BLOCK_BYTES)
    filling.close()
    for _ in range(10):
        tier, outcomes = open_tier(tmp_path / "a", io=Io.NATIVE), list[object]()
        reading = threading.Barrier(3)

        def read(
            tier: FileTier = tier, outcomes: list[object] = outcomes, reading: threading.Barrier = reading
        ) -> None:
            views = [slot(BLOCK_BYTES) for _ in numbers]
            reading.wait()
            try:
                for _ in range(50):
                    outcomes.extend(tier.read([key_of(i) for i in numbers], views))
            except TierUnavailable:
                return

        readers = [threading.Thread(target=read) for _ in range(2)]
        for reader in readers:
            reader.start()
        reading.wait()
        tier.close()
        for reader in readers:
            reader.join()
        assert set(outcomes) <= {Outcome.OK}


def run_script(script: str, root: Path) -> str:
    ran = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", script, str(root), str(Path(__file__).parent)],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


BEGIN = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from file_tier_kit import open_tier
from forebay.errors import TierUnavailable
from forebay.testing.tier_contract import get, put
from forebay.tiers.file import Io
tier = open_tier(Path(sys.argv[1]), io=Io.NATIVE)
put(tier, [1], 5000)
get(tier, 1, 5000)
"""


@needs_kernel
def test_a_fork_is_refused_and_does_not_hang(tmp_path: Path) -> None:
    script = """
child = os.fork()
if child == 0:
    try:
        get(tier, 1, 5000)
    except TierUnavailable:
        os._exit(7)
    os._exit(1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), len(get(tier, 1, 5000)))
tier.close()
"""
    assert run_script(BEGIN + script, tmp_path / "a") == "7 5000\n"


@needs_kernel
@pytest.mark.parametrize("ending", ["", "del tier", "del tier; import gc; gc.collect()"])
def test_a_host_that_forgets_to_close_can_still_exit(tmp_path: Path, ending: str) -> None:
    assert run_script(f"{BEGIN}\n{ending}\nprint('end')", tmp_path / "a") == "end\n"


@needs_kernel
def test_nothing_leaks(tmp_path: Path) -> None:
    def held() -> int:
        """Descriptors and threads. Those of the tests before may still be going."""
        return len(os.listdir("/proc/self/fd")) + len(os.listdir("/proc/self/task"))

    filling = open_tier(tmp_path / "a")
    put(filling, range(10), BLOCK_BYTES)
    filling.close()
    before = held()
    for _ in range(3):
        tier = open_tier(tmp_path / "a", io=Io.NATIVE, reads_in_flight=7)
        assert get(tier, 1, BLOCK_BYTES) == payload_of(1, BLOCK_BYTES)
        block_file(tmp_path / "a", key_of(2)).write_bytes(b"short")
        get(tier, 2, BLOCK_BYTES)
        tier.close()
    patience_s = time.monotonic() + 10
    while held() > before and time.monotonic() < patience_s:  # a thread that was joined stays listed for a moment
        os.sched_yield()
    assert held() <= before
