"""fio as a control: the widely used I/O tester, with buffers in huge pages where the C library can give them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec

from forebay.bench.io.options import Direction
from forebay.errors import ConfigError

_LONGEST_S = 300
_PASSES = 4
"""fio counts the time from the first to the last block of each thread, so that many threads with few blocks each look
faster together than they are: reads go on for longer than a pass."""


class FioEngine(Enum):
    PSYNC = "psync"
    """A thread a block in flight."""
    LIBAIO = "libaio"
    IO_URING = "io_uring"


class FioFailed(Exception):
    """One line of what fio said."""


@dataclass(frozen=True, slots=True)
class FioJob:
    engine: FioEngine
    direction: Direction
    places: Sequence[Path]
    """READS: files to read, one a root. WRITES: directories to make a new file a block in."""
    block_bytes: int
    depth: int
    blocks: int


@dataclass(frozen=True, slots=True)
class FioRun:
    moved_bytes: int
    wall_s: float
    core_s: float
    p50_s: float
    p99_s: float
    worst_s: float


@dataclass(frozen=True, slots=True)
class FioFound:
    path: str | None
    words: str
    """Its version, or why it is missing."""


def find_fio() -> FioFound:
    path = shutil.which("fio")
    if path is None:
        return FioFound(None, "fio is not installed; without it the best control is the plain threads")
    ran = subprocess.run([path, "--version"], capture_output=True, text=True, errors="replace", timeout=30)
    return FioFound(path, ran.stdout.strip() or "fio of unknown version")


def run_fio(path: str, job: FioJob) -> FioRun:
    """Raises FioFailed, for instance where the kernel has no io_uring."""
    try:
        ran = subprocess.run(
            [path, *arguments(job)], capture_output=True, text=True, errors="replace", timeout=_LONGEST_S,
            env={**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},  # malloc asks for huge pages (glibc 2.35)
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise FioFailed(str(error)) from None
    if ran.returncode != 0:
        raise FioFailed((ran.stderr.strip() or ran.stdout.strip() or f"exit code {ran.returncode}").splitlines()[0])
    return parse(ran.stdout, job)


def arguments(job: FioJob) -> list[str]:
    threads = job.depth if job.engine is FioEngine.PSYNC else 1
    common = [
        "--name=control", "--output-format=json", "--thread", "--direct=1", "--group_reporting",
        f"--bs={job.block_bytes}", f"--ioengine={job.engine.value}", f"--numjobs={threads}",
        f"--iodepth={job.depth // threads}", "--mem=malloc", "--iomem_align=2097152", "--invalidate=1",
    ]  # fmt: skip
    blocks_a_thread = -(-job.blocks // threads)
    if job.direction is Direction.READS:
        share_bytes = blocks_a_thread * job.block_bytes
        return [
            *common, "--rw=read", "--file_service_type=roundrobin", f"--io_size={_PASSES * share_bytes}",
            f"--filename={':'.join(_escape(place) for place in job.places)}",
            *([f"--offset_increment={share_bytes // len(job.places)}"] if threads > 1 else []),
        ]  # fmt: skip
    return [
        *common, "--rw=write", f"--directory={':'.join(_escape(place) for place in job.places)}", "--unlink=1",
        f"--nrfiles={blocks_a_thread}", f"--filesize={job.block_bytes}", "--file_service_type=sequential",
        f"--openfiles={max(1, min(blocks_a_thread, job.depth // threads))}", "--create_on_open=1", "--fallocate=none",
        "--refill_buffers=1",
    ]  # fmt: skip


def _escape(path: Path) -> str:
    """fio separates paths by colons."""
    return str(path).replace(":", "\\:")


def parse(output: str, job: FioJob) -> FioRun:
    try:
        found: Any = msgspec.json.decode(output[output.index("{") :])
        [group] = found["jobs"]
        side = group["read" if job.direction is Direction.READS else "write"]
        latency = side["clat_ns"]
        wall_s = side["io_bytes"] / side["bw_bytes"]
        threads = job.depth if job.engine is FioEngine.PSYNC else 1
        return FioRun(
            moved_bytes=side["io_bytes"],
            wall_s=wall_s,
            core_s=(group["usr_cpu"] + group["sys_cpu"]) / 100 * wall_s * threads,
            p50_s=latency["percentile"]["50.000000"] / 1e9,
            p99_s=latency["percentile"]["99.000000"] / 1e9,
            worst_s=latency["max"] / 1e9,
        )
    except (ValueError, KeyError, TypeError, ZeroDivisionError, msgspec.DecodeError) as error:
        raise FioFailed(f"fio's report cannot be read ({type(error).__name__}: {error})") from None


def check_places(roots: Sequence[Path]) -> None:
    """fio cannot be told of a path with a colon in a way that all its versions understand."""
    if any(":" in str(root) for root in roots):
        raise ConfigError("fio cannot use a directory with a colon in its name: name another one")
