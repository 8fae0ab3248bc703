"""A call that is interrupted (Ctrl-C, a host's own signal) ends only when nothing touches its views any more."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from file_tier_kit import BLOCK_BYTES, open_tier, write_all

from forebay.testing.tier_contract import get, key_of, payload_of, slot
from forebay.tiers.file import Io
from forebay.tiers.file.directio import REAL_CALLS
from forebay.tiers.file.native import find_kernel
from forebay.types import Outcome

needs_kernel = pytest.mark.skipif(find_kernel().kernel is None, reason="no compiled kernel")
NUMBERS = range(8)
KEYS = [key_of(i) for i in NUMBERS]
PAYLOADS = [payload_of(i, BLOCK_BYTES) for i in NUMBERS]

STORM = """
import signal, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from file_tier_kit import BLOCK_BYTES, open_tier, write_all
from forebay.testing.tier_contract import key_of, payload_of, slot
from forebay.tiers.file import Io

tier = open_tier(Path(sys.argv[1]), io=Io(sys.argv[3]))
write_all(tier, range(64))
keys, views = [key_of(i) for i in range(64)], [slot(BLOCK_BYTES) for _ in range(64)]
interrupts, end_s = 0, time.monotonic() + 2

def interrupt(*_):
    if time.monotonic() < end_s:
        raise KeyboardInterrupt

signal.signal(signal.SIGALRM, interrupt)
signal.setitimer(signal.ITIMER_REAL, 0.013)
while time.monotonic() < end_s:
    try:
        while time.monotonic() < end_s:
            tier.read(keys, views)
    except KeyboardInterrupt:
        interrupts += 1
        signal.setitimer(signal.ITIMER_REAL, 0.001 + interrupts % 13 / 1000)
tier.read(keys, views)
assert [bytes(view[:BLOCK_BYTES]) for view in views] == [payload_of(i, BLOCK_BYTES) for i in range(64)]
assert interrupts > 10, interrupts
tier.close()
"""


@pytest.mark.parametrize("io", [Io.PYTHON, pytest.param(Io.NATIVE, marks=needs_kernel)])
def test_interrupts_at_any_moment_hurt_nothing(tmp_path: Path, io: Io) -> None:
    command = [sys.executable, "-c", STORM, str(tmp_path / "a"), str(Path(__file__).parent), io.value]
    filled_when_freed = {**os.environ, "MALLOC_PERTURB_": "165"}
    ran = subprocess.run(command, env=filled_when_freed, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, f"{ran.returncode}\n{ran.stderr}"


class Interrupting:
    """The kernel; `start` and `wait` are interrupted once each, before they do anything or when they have done it."""

    def __init__(self, point: str) -> None:
        kernel = find_kernel().kernel
        assert kernel is not None
        self._kernel, self._point = kernel, point
        self.ends: list[int] = []
        """What `wait` has returned to whom asked, or was about to."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    def start(self, *args: object) -> int:
        return self._interrupted("start", self._kernel.start, args)

    def wait(self, *args: object) -> int:
        return self._interrupted("wait", self._wait, args)

    def _wait(self, *args: object) -> int:
        self.ends.append(int(self._kernel.wait(*args)))
        return self.ends[-1]

    def _interrupted(self, name: str, call: Callable[..., int], args: Sequence[object]) -> int:
        point, self._point = self._point, self._point if name not in self._point else ""
        if point == f"before {name}":
            raise KeyboardInterrupt
        result = call(*args)
        if point == f"after {name}":
            raise KeyboardInterrupt
        return result


@needs_kernel
@pytest.mark.parametrize("point", ["before start", "after start", "before wait", "after wait"])
def test_the_kernel_is_waited_for_after_an_interrupt(tmp_path: Path, point: str) -> None:
    tier = open_tier(tmp_path / "a", io=Io.NATIVE)
    write_all(tier, NUMBERS)
    assert tier._fast_reads is not None
    kernel = Interrupting(point)
    tier._fast_reads._kernel = kernel  # type: ignore[assignment]
    views = [slot(BLOCK_BYTES) for _ in NUMBERS]
    with pytest.raises(KeyboardInterrupt):
        tier.read(KEYS, views)
    if point != "before start":
        assert kernel.ends[-1] == 1
        assert [bytes(view[:BLOCK_BYTES]) for view in views] == PAYLOADS
    assert list(tier.read(KEYS, views)) == [Outcome.OK] * len(KEYS)
    tier.close()


@pytest.fixture
def _signal() -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.usefixtures("_signal")
def test_python_lanes_are_waited_for_after_an_interrupt(tmp_path: Path) -> None:
    caller, ended, came_early = threading.get_ident(), threading.Event(), list[bool]()
    interrupt = threading.Semaphore(1)

    def preadv(descriptor: int, parts: Sequence[memoryview], at: int) -> int:
        if Path(f"/proc/self/fd/{descriptor}").readlink().suffix == ".kv" and interrupt.acquire(blocking=False):
            signal.pthread_kill(caller, signal.SIGUSR1)
            came_early.append(ended.wait(0.5))
        return os.preadv(descriptor, parts, at)

    tier = open_tier(tmp_path / "a", calls=replace(REAL_CALLS, preadv=preadv))
    write_all(tier, NUMBERS)
    with pytest.raises(KeyboardInterrupt):
        tier.read(KEYS, [slot(BLOCK_BYTES) for _ in NUMBERS])
    ended.set()
    tier.close()
    assert came_early == [False], "the read had ended, and a lane was still at its view"


def test_what_nobody_has_begun_is_left_after_an_interrupt(tmp_path: Path) -> None:
    tier = open_tier(tmp_path / "a", io=Io.PYTHON)
    write_all(tier, NUMBERS)
    lanes = tier._members[0].readers
    put = lanes.put

    def interrupted(batch: object) -> None:
        raise KeyboardInterrupt

    lanes.put = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        tier.read(KEYS, [slot(BLOCK_BYTES) for _ in NUMBERS])
    lanes.put = put  # type: ignore[method-assign]
    assert get(tier, 1, BLOCK_BYTES) == PAYLOADS[1]
    tier.close()
