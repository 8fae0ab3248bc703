"""Ways out of the interpreter lock: what reads lose beside a busy Python thread, each way against itself when idle.

    python bench/ways_out_of_the_lock.py DIRECTORY [--block-bytes N] [--depth N] [--rounds N] [--bytes N] [--json]

The ways: the file tier read by Python threads, the same with a shorter switch interval, read by the compiled kernel,
and by worker processes that read into shared slots. All read the same blocks, with checksums, in turns.
"""

from __future__ import annotations

import argparse
import json
import mmap
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from forebay.bench.io.contestants import ENGINE_BATCH_BLOCKS, ENGINE_JOBS, busy_python
from forebay.bench.io.options import IoOptions
from forebay.bench.io.setting import Setting, open_setting
from forebay.tiers.file import FileTier, Io
from forebay.tiers.file.blockfile import Claim, Verify, read_block
from forebay.tiers.file.directio import REAL_CALLS, Access, Scratch
from forebay.tiers.file.format import Shape
from forebay.types import BlockKey, Outcome

SHORT_INTERVAL_S = 1e-4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, help="an existing directory on the disk to measure")
    parser.add_argument("--block-bytes", type=int, default=2 * 2**20)
    parser.add_argument("--depth", type=int, default=16, help="blocks in flight")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--bytes", type=int, default=256 * 2**20, help="moved in each pass")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    chosen = parser.parse_args()
    options = IoOptions(roots=(chosen.directory,), pass_bytes=chosen.bytes, depths=(chosen.depth,))
    with open_setting(options, chosen.block_bytes) as setting:
        rates = measure(setting, chosen.depth, chosen.rounds)
    report = {
        way: {
            "idle_gb_per_s": statistics.median(idle),
            "busy_gb_per_s": statistics.median(busy),
            "busy_to_idle": statistics.median(b / i for b, i in zip(busy, idle, strict=True)),
        }
        for way, (idle, busy) in rates.items()
    }
    if chosen.json:
        print(json.dumps({"block_bytes": chosen.block_bytes, "depth": chosen.depth, "ways": report}, indent=1))
        return
    print(f"{chosen.block_bytes} bytes a block, {chosen.depth} in flight, {chosen.rounds} rounds; GB/s, medians")
    for way, found in report.items():
        print(f"{way:32} idle {found['idle_gb_per_s']:.2f}  busy {found['busy_gb_per_s']:.2f}  "
              f"ratio {found['busy_to_idle']:.2f}")  # fmt: skip


def measure(setting: Setting, depth: int, rounds: int) -> dict[str, tuple[list[float], list[float]]]:
    workers = Workers(setting, depth)
    tiers = {io: setting.open_tier(depth, io) for io in (Io.PYTHON, Io.NATIVE)}
    outcomes = tiers[Io.PYTHON].write(setting.keys, setting.views)
    assert all(outcome is Outcome.OK for outcome in outcomes)
    workers.find(setting.block_paths())
    ways: dict[str, Callable[[], None]] = {
        "Python threads": lambda: as_the_engine(tiers[Io.PYTHON], setting),
        "Python threads, short interval": lambda: with_interval(tiers[Io.PYTHON], setting),
        "compiled kernel": lambda: as_the_engine(tiers[Io.NATIVE], setting),
        "worker processes": workers.read,
    }
    rates: dict[str, tuple[list[float], list[float]]] = {way: ([], []) for way in ways}
    names = list(ways)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            tiers[Io.PYTHON].drop_page_cache()
            rates[name][0].append(setting.moved_bytes / 1e9 / timed(ways[name]))
            tiers[Io.PYTHON].drop_page_cache()
            with busy_python():
                rates[name][1].append(setting.moved_bytes / 1e9 / timed(ways[name]))
    workers.close()
    for tier in tiers.values():
        tier.close()
    return rates


def timed(work: Callable[[], None]) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


def as_the_engine(tier: FileTier, setting: Setting) -> None:
    at = range(0, len(setting.keys), ENGINE_BATCH_BLOCKS)
    batches = [slice(first, first + ENGINE_BATCH_BLOCKS) for first in at]
    with ThreadPoolExecutor(ENGINE_JOBS) as executor:
        jobs = [executor.submit(tier.read, setting.keys[batch], setting.views[batch]) for batch in batches]
        assert all(outcome is Outcome.OK for job in jobs for outcome in job.result())


def with_interval(tier: FileTier, setting: Setting) -> None:
    with short_interval():
        as_the_engine(tier, setting)


@contextmanager
def short_interval() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(SHORT_INTERVAL_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


class Workers:
    """`depth` processes that read into shared slots: a batch costs its caller a message to each, and one back."""

    def __init__(self, setting: Setting, depth: int) -> None:
        self._setting = setting
        self._slots = mmap.mmap(-1, setting.moved_bytes)  # shared with the children; huge only where tmpfs is
        self._slots.madvise(mmap.MADV_HUGEPAGE)
        view = memoryview(self._slots)
        for at in range(0, setting.moved_bytes, 4096):
            view[at] = 0
        context = multiprocessing.get_context("fork")
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(depth):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, view, setting.block_bytes), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def find(self, paths: list[str]) -> None:
        self._paths = paths

    def read(self) -> None:
        """Batches of the engine's size, two on their way, as for the others."""
        at = range(0, len(self._paths), ENGINE_BATCH_BLOCKS)
        halves = [self._pipes[::2], self._pipes[1::2]] if len(self._pipes) > 1 else [self._pipes]
        with ThreadPoolExecutor(len(halves)) as executor:
            jobs = [executor.submit(self._batches, at[i :: len(halves)], pipes) for i, pipes in enumerate(halves)]
            for job in jobs:
                job.result()

    def _batches(self, firsts: range, pipes: list[Connection]) -> None:
        for first in firsts:
            blocks = range(first, min(first + ENGINE_BATCH_BLOCKS, len(self._paths)))
            shares = [blocks[i :: len(pipes)] for i in range(len(pipes))]
            for pipe, share in zip(pipes, shares, strict=True):
                pipe.send([(self._paths[i], self._setting.keys[i], i) for i in share])
            assert all(pipe.recv() for pipe in pipes)

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join()


def serve(pipe: Connection, slots: memoryview, block_bytes: int) -> None:
    scratch = Scratch()
    while (blocks := pipe.recv()) is not None:
        for path, key, i in blocks:
            digest = bytes.fromhex(Path(path).parent.parent.name)
            claim = Claim(Shape(digest, block_bytes), BlockKey(key))
            slot = slots[i * block_bytes : (i + 1) * block_bytes]
            read_block(REAL_CALLS, path, Access.DIRECT, claim, slot, scratch, Verify.PAYLOAD)
        pipe.send(True)
    os._exit(0)


if __name__ == "__main__":
    main()
