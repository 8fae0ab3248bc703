"""Processes write, read and evict one pool at once, with the same keys; every byte, count and descriptor is checked.

    python bench/pool_soak.py ROOT... [--processes 8] [--seconds 60] [--json]

The pool holds half of the keys, so that every process evicts all the time. Exits with 1 on a wrong byte, an
exception, a pool above its capacity by more than a block a process at any look, a leaked descriptor, slot, pin or
temporary file, or a count that is not what the files occupy. Each process is a whole engine with its host pool, over
the same roots. ROOT must be new or empty.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import multiprocessing
import os
import queue
import random
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing.queues import Queue
from pathlib import Path

from rich.console import Console

from forebay.assemble import StoreConfig, open_engine, open_tiers
from forebay.hostpool import HostPool
from forebay.keys import block_keys
from forebay.types import BlockKey, DeviceBlock, Job, JobKind, JobResult, Namespace, Outcome, Request

BLOCK_BYTES, STORED_BYTES, PROMPTS, PROMPT_BLOCKS = 20_000, 4096 + 20_480, 24, 6
CAPACITY_BLOCKS = PROMPTS * PROMPT_BLOCKS // 2
NAMESPACE = Namespace(
    model="soak", weights_digest="none", kv_dtype="uint8", rope="none", layers=1, kv_heads=1, head_dim=1,
    block_tokens=4, block_bytes=BLOCK_BYTES, layout="bytes",
)  # fmt: skip


def truth(key: BlockKey) -> bytes:
    return hashlib.shake_128(key).digest(BLOCK_BYTES)


class Device:
    """Device memory as a list of bytes; copies are done at once."""

    def __init__(self, pool: HostPool) -> None:
        self.memory = [b""] * PROMPT_BLOCKS
        self._pool = pool
        self._ended: list[JobResult] = []

    def submit(self, job: Job, blocks: Sequence[DeviceBlock]) -> None:
        for slot, block in zip(job.slots, blocks, strict=True):
            view = self._pool.view(slot)[:BLOCK_BYTES]
            if job.kind is JobKind.COPY_IN:
                self.memory[block] = bytes(view)
            else:
                view[:] = self.memory[block]
        self._ended.append(JobResult(job, dict.fromkeys(job.keys, Outcome.OK), 0, 0))

    def poll(self) -> Sequence[JobResult]:
        ended, self._ended = self._ended, []
        return ended


@dataclass(frozen=True, slots=True)
class Worked:
    """What one process did and found."""

    loads: int
    loaded_blocks: int
    offered_blocks: int
    faults: tuple[str, ...]


def config(roots: Sequence[str]) -> StoreConfig:
    return StoreConfig.embedded(
        roots, host_bytes=12 * 24_576, capacity_bytes=CAPACITY_BLOCKS * STORED_BYTES, shared=True,
        reads_in_flight=2, writes_in_flight=2,
    )  # fmt: skip


def work(roots: Sequence[str], seed: int, seconds: float, results: Queue[Worked]) -> None:
    try:
        results.put(_work(roots, seed, seconds))
    except BaseException as error:
        results.put(Worked(0, 0, 0, (f"process {seed}: {type(error).__name__}: {error}",)))


def _work(roots: Sequence[str], seed: int, seconds: float) -> Worked:
    chance, faults = random.Random(seed), list[str]()
    prompts = [block_keys(NAMESPACE, [n] * (4 * PROMPT_BLOCKS)) for n in range(PROMPTS)]
    blocks = [DeviceBlock(i) for i in range(PROMPT_BLOCKS)]
    loads = loaded_blocks = offered_blocks = 0
    devices: list[Device] = []

    def make_device(pool: HostPool) -> Device:
        devices.append(Device(pool))
        return devices[0]

    descriptors_before = len(os.listdir("/proc/self/fd"))
    engine = open_engine(config(roots), NAMESPACE, make_device)
    [device] = devices
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        keys = chance.choice(prompts)
        request = Request(f"r{loads}", keys)
        while (plan := engine.plan_load(request)) is None:
            engine.wait(engine.now_ns() + 10_000_000)
            engine.poll()
        device.memory = [b""] * PROMPT_BLOCKS
        engine.start_load(plan, blocks)
        while not (ended := engine.poll()):
            engine.wait(engine.now_ns() + 10_000_000)
        loads, loaded_blocks = loads + 1, loaded_blocks + ended[0].blocks
        for key, got in zip(keys[: ended[0].blocks], device.memory, strict=False):
            if got != truth(key):
                faults.append(f"process {seed}: wrong bytes of {key.hex()}")
        device.memory = [truth(key) for key in keys]
        offered_blocks += engine.offer(keys, blocks)
        if chance.random() < 0.3:
            engine.drop_host_copies()
    while not engine.idle:
        engine.wait(engine.now_ns() + 10_000_000)
        engine.poll()
    engine.check_idle()
    engine.close()
    if len(os.listdir("/proc/self/fd")) > descriptors_before:
        faults.append(f"process {seed}: descriptors leak")
    return Worked(loads, loaded_blocks, offered_blocks, tuple(faults))


def block_lengths(roots: Sequence[str]) -> int:
    """Bytes that files under blocks' names have now."""
    total_bytes = 0
    for root in roots:
        for path in Path(root).glob("*/*/*.kv"):
            try:
                total_bytes += path.stat().st_size
            except FileNotFoundError:
                continue
    return total_bytes


@dataclass(frozen=True, slots=True)
class Verdict:
    processes: int
    seconds: float
    loads: int
    loaded_blocks: int
    offered_blocks: int
    capacity_bytes: int
    most_bytes: int
    """Of all looks at the directories. A look takes a while: a block that goes and one that comes can both be in it."""
    looks: int
    files_bytes: int
    counted_bytes: int
    faults: tuple[str, ...]


def soak(roots: Sequence[str], processes: int, seconds: float) -> Verdict:
    context = multiprocessing.get_context("spawn")
    results: Queue[Worked] = context.Queue()
    running = [
        context.Process(target=work, args=(roots, seed, seconds, results), daemon=True) for seed in range(processes)
    ]
    for process in running:
        process.start()
    most_bytes = looks = 0
    done: list[Worked] = []
    gives_up = time.monotonic() + seconds + 180
    with Console(stderr=True).status("soaking"):
        while len(done) < processes and time.monotonic() < gives_up:
            most_bytes, looks = max(most_bytes, block_lengths(roots)), looks + 1
            with contextlib.suppress(queue.Empty):
                done.append(results.get(timeout=0.05))
    for process in running:
        process.join(timeout=30)
    faults = [fault for worked in done for fault in worked.faults]
    faults += [f"exit code {process.exitcode}" for process in running if process.exitcode != 0]
    tiers = open_tiers(config(roots), NAMESPACE)
    counted_bytes = sum(stored.stored_bytes for stored in tiers["file"].scan())
    tiers["file"].close()
    files_bytes, capacity_bytes = block_lengths(roots), CAPACITY_BLOCKS * STORED_BYTES
    if most_bytes > capacity_bytes + processes * STORED_BYTES:
        faults.append(f"{most_bytes} bytes in a pool of {capacity_bytes}")
    if counted_bytes != files_bytes:
        faults.append(f"{counted_bytes} bytes are counted and the files have {files_bytes}")
    faults += [f"left over: {path}" for root in roots for path in (Path(root) / "tmp").iterdir()]
    return Verdict(
        processes, seconds, sum(w.loads for w in done), sum(w.loaded_blocks for w in done),
        sum(w.offered_blocks for w in done), capacity_bytes, most_bytes, looks, files_bytes, counted_bytes,
        tuple(faults),
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("roots", nargs="+", metavar="ROOT")
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if any(Path(root).exists() and os.listdir(root) for root in arguments.roots):
        print("pool_soak: a root is not empty: name new directories", file=sys.stderr)
        return 2
    verdict = soak(arguments.roots, arguments.processes, arguments.seconds)
    for root in arguments.roots:
        shutil.rmtree(root)
    if arguments.json:
        print(json.dumps(asdict(verdict)))
    else:
        print(
            f"{verdict.processes} processes, {verdict.seconds:g} s: {verdict.loads:,} loads of "
            f"{verdict.loaded_blocks:,} blocks, {verdict.offered_blocks:,} blocks offered; at most "
            f"{verdict.most_bytes:,} of {verdict.capacity_bytes:,} bytes in {verdict.looks} looks; "
            f"counted {verdict.counted_bytes:,}, "
            f"files {verdict.files_bytes:,}"
        )
        for fault in verdict.faults:
            print(f"FAULT  {fault}")
        print("sound" if not verdict.faults else "NOT SOUND")
    return 1 if verdict.faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
