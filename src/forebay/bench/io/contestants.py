"""Who moves the blocks: the tier as the engine calls it, plain threads, and fio."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from forebay.bench.io.fio import FioEngine, FioJob, run_fio
from forebay.bench.io.options import Direction
from forebay.bench.io.results import TIER, Cell
from forebay.bench.io.setting import Setting, percentile
from forebay.tiers.file import FileTier, Io
from forebay.types import BlockKey, Outcome

THREADS = "threads"
ENGINE_BATCH_BLOCKS = 32
"""What the engine puts into one job, unless told otherwise."""
ENGINE_JOBS = 2
"""How many jobs of a kind the executor has on their way at a time."""
_HEADER_BYTES = 4096
_SINGLES_A_CALLER = 8


@dataclass(frozen=True, slots=True)
class Timed:
    moved_bytes: int
    wall_s: float
    core_s: float
    p50_s: float
    p99_s: float
    worst_s: float
    all_bytes: int
    """With what was moved beside the timed pass, to time single blocks."""


Clock = Callable[[], float]
"""Seconds of processor time so far, of all that the contestant's process does for it."""


class Contestant(Protocol):
    @property
    def name(self) -> str: ...

    def run(self, cell: Cell, turn: int, core_s: Clock) -> Timed:
        """Move one pass. Reads find nothing of it in the system's cache; writes find none of their files there."""
        ...

    def clear(self) -> None:
        """Remove what the last pass has written. Not timed."""
        ...


class TierContestant:
    name = TIER

    def __init__(self, setting: Setting, io: Io) -> None:
        self._setting, self._io = setting, io
        self._tiers: dict[int, FileTier] = {}
        self._written: tuple[BlockKey, ...] = ()

    def tier(self, depth: int) -> FileTier:
        if depth not in self._tiers:
            self._tiers[depth] = self._setting.open_tier(depth, self._io)
        return self._tiers[depth]

    def fill(self) -> None:
        """Store the blocks that are read."""
        setting = self._setting
        self._must_be_ok(next(iter(self._tiers.values())).write(setting.keys, setting.views))

    def run(self, cell: Cell, turn: int, core_s: Clock) -> Timed:
        tier, setting = self.tier(cell.depth), self._setting
        if cell.direction is Direction.READS:
            tier.drop_page_cache()
            keys = setting.keys
        else:
            keys = setting.other_keys(f"{cell.depth} {turn}")
            self._written = keys
        move = _move(tier, cell)
        batches = [slice(at, at + ENGINE_BATCH_BLOCKS) for at in range(0, len(keys), ENGINE_BATCH_BLOCKS)]
        with ThreadPoolExecutor(ENGINE_JOBS) as executor:
            began_s, began_core_s = time.perf_counter(), core_s()
            jobs = [executor.submit(move, keys[batch], setting.views[batch]) for batch in batches]
            outcomes = [outcome for job in jobs for outcome in job.result()]
            wall_s, used_s = time.perf_counter() - began_s, core_s() - began_core_s
        self._must_be_ok(outcomes)
        took_s = self._one_by_one(cell, turn)
        return Timed(
            setting.moved_bytes, wall_s, used_s, percentile(took_s, 0.5), percentile(took_s, 0.99), max(took_s),
            setting.moved_bytes + len(took_s) * setting.block_bytes,
        )  # fmt: skip

    def _one_by_one(self, cell: Cell, turn: int) -> list[float]:
        """How long single blocks take, with as many callers as blocks in flight: a batch does not tell."""
        tier, views = self.tier(cell.depth), self._setting.views
        count = min(len(views), _SINGLES_A_CALLER * cell.depth)
        if cell.direction is Direction.READS:
            tier.drop_page_cache()
            keys = self._setting.keys
        else:
            keys = self._setting.other_keys(f"{cell.depth} {turn} single")
            self._written += keys[:count]
        move = _move(tier, cell)
        return in_threads(cell.depth, range(count), lambda i: self._must_be_ok(move((keys[i],), (views[i],))))

    def _must_be_ok(self, outcomes: Sequence[Outcome]) -> None:
        wrong = [outcome for outcome in outcomes if outcome is not Outcome.OK]
        if wrong:
            words = f"{len(wrong)} of {len(outcomes)} blocks ended as {wrong[0].value}; the log says why"
            raise OSError(errno.EIO, words, str(self._setting.directories[0]))

    def clear(self) -> None:
        if self._written:
            next(iter(self._tiers.values())).delete(self._written)
            self._written = ()

    def close(self) -> None:
        for tier in self._tiers.values():
            tier.close()


class ThreadsContestant:
    """Opens and os.preadv's the tier's own files, or writes new ones, into the same slots; checks nothing."""

    name = THREADS

    def __init__(self, setting: Setting, paths: Sequence[str]) -> None:
        self._setting, self._paths = setting, paths

    def run(self, cell: Cell, turn: int, core_s: Clock) -> Timed:
        setting = self._setting
        if cell.direction is Direction.READS:
            paths, one = self._paths, self._read_one
            _drop(paths)
        else:
            paths, one = self._new_paths(), self._write_one
        began_s, began_core_s = time.perf_counter(), core_s()
        took_s = in_threads(cell.depth, range(len(paths)), lambda i: one(paths[i], setting.views[i]))
        wall_s, used_s = time.perf_counter() - began_s, core_s() - began_core_s
        moved_bytes = setting.moved_bytes
        return Timed(
            moved_bytes, wall_s, used_s, percentile(took_s, 0.5), percentile(took_s, 0.99), max(took_s), moved_bytes
        )

    def clear(self) -> None:
        for path in self._new_paths():
            Path(path).unlink(missing_ok=True)

    def _new_paths(self) -> list[str]:
        directories = self._setting.directories
        return [f"{directories[i % len(directories)]}/{i}.new" for i in range(len(self._setting.views))]

    def _read_one(self, path: str, view: memoryview) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        try:
            if os.preadv(descriptor, [view], _HEADER_BYTES) != len(view):
                raise OSError(errno.EIO, "a short read", path)
        finally:
            os.close(descriptor)

    def _write_one(self, path: str, view: memoryview) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT | os.O_CLOEXEC, 0o600)
        try:
            if os.pwritev(descriptor, [view], 0) != len(view):
                raise OSError(errno.EIO, "a short write", path)
        finally:
            os.close(descriptor)


class FioContestant:
    """Reads the control file of each root, or writes a new file a block."""

    def __init__(self, setting: Setting, fio: str, engine: FioEngine) -> None:
        self.name = f"fio {engine.value}"
        self._setting, self._fio, self._engine = setting, fio, engine

    def run(self, cell: Cell, turn: int, core_s: Clock) -> Timed:
        setting = self._setting
        places = setting.control_files if cell.direction is Direction.READS else setting.directories
        job = FioJob(self._engine, cell.direction, places, setting.block_bytes, cell.depth, len(setting.keys))
        found = run_fio(self._fio, job)
        return Timed(
            found.moved_bytes, found.wall_s, found.core_s, found.p50_s, found.p99_s, found.worst_s, found.moved_bytes
        )

    def clear(self) -> None:
        """fio removes its files itself."""


def _move(tier: FileTier, cell: Cell) -> Callable[[Sequence[BlockKey], Sequence[memoryview]], Sequence[Outcome]]:
    return tier.read if cell.direction is Direction.READS else tier.write


def in_threads(depth: int, items: Sequence[int], one: Callable[[int], None]) -> list[float]:
    """Do every item, `depth` at a time; how long each took, in seconds. Raises what an item raised."""
    left, took_s, errors = deque(items), list[float](), list[BaseException]()

    def work() -> None:
        try:
            while True:
                try:
                    i = left.popleft()
                except IndexError:
                    return
                began_s = time.perf_counter()
                one(i)
                took_s.append(time.perf_counter() - began_s)
        except BaseException as error:  # told to the caller: a pass that is not whole is no pass
            errors.append(error)

    workers = [threading.Thread(target=work) for _ in range(depth)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if errors:
        raise errors[0]
    return took_s


@contextmanager
def busy_python() -> Iterator[Callable[[], float]]:
    """Another thread that runs Python without a pause. Gives what it has used of a core so far, in seconds."""
    stop, used_s = threading.Event(), [0.0]

    def spin() -> None:
        turns = 0
        while not stop.is_set():
            turns += 1
            if turns % 1000 == 0:
                used_s[0] = time.thread_time()

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        yield lambda: used_s[0]
    finally:
        stop.set()
        thread.join()


def _drop(paths: Sequence[str]) -> None:
    """Out of this system's cache, should anything be there: direct reads do not ask it, but would have to sync it."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
