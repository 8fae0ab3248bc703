"""What to measure, checked before anything is written."""

from __future__ import annotations

import os
import shutil
from enum import Enum
from pathlib import Path

import msgspec

from forebay.bench.units import bytes_text
from forebay.errors import ConfigError
from forebay.tiers.file import Io

MIB = 2**20
_LARGEST_DEPTH = 256


class Direction(Enum):
    READS = "reads"
    WRITES = "writes"


class Load(Enum):
    """What else this process does meanwhile."""

    IDLE = "idle"
    BUSY = "busy"
    """Another thread runs Python without a pause, as an engine's scheduler may."""


class IoOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    roots: tuple[Path, ...]
    """Existing directories. Each gets a directory of its own for the run, which is removed at the end."""
    block_bytes: tuple[int, ...] = (MIB // 2, 2 * MIB, 8 * MIB, 16 * MIB)
    depths: tuple[int, ...] = (1, 4, 16, 32)
    """Blocks in flight."""
    rounds: int = 5
    pass_bytes: int = 512 * MIB
    """Moved by one contestant in one round, at one size and depth."""
    directions: tuple[Direction, ...] = (Direction.READS, Direction.WRITES)
    loads: tuple[Load, ...] = (Load.IDLE,)
    io: Io = Io.AUTO
    """Who reads in the tier."""
    out: Path = Path()
    """Where bench-io.json and bench-io.svg go."""
    export: Path | None = None
    """A file for the measured curve of the device."""
    seed: int = 0


def blocks_a_pass(options: IoOptions, block_bytes: int) -> int:
    """Enough to fill the deepest queue twice."""
    return max(-(-options.pass_bytes // block_bytes), 2 * max(options.depths))


def check_options(options: IoOptions) -> None:
    """Raises ConfigError for what cannot be measured, or not here."""
    if not options.roots:
        raise ConfigError("bench io: name at least one directory")
    for name in ("block_bytes", "depths", "directions", "loads"):
        values = getattr(options, name)
        if not values or len(set(values)) < len(values):
            raise ConfigError(f"bench io: {name} must name at least one value, each once")
    if any(each < 4096 or each % 4096 for each in options.block_bytes):
        raise ConfigError("bench io: block sizes must be multiples of 4096 bytes, such as 2MiB")
    if not all(1 <= depth <= _LARGEST_DEPTH for depth in options.depths):
        raise ConfigError(f"bench io: depths must be between 1 and {_LARGEST_DEPTH}")
    if options.rounds < 1 or options.pass_bytes < 4096:
        raise ConfigError("bench io: rounds must be 1 or more, and a pass must move 4096 bytes or more")
    if Load.IDLE not in options.loads:
        raise ConfigError("bench io: the busy thread is compared with an idle process, which must be measured too")
    for path in (options.out, *([options.export.parent] if options.export else [])):
        if not path.is_dir():
            raise ConfigError(f"{path} is not a directory: make it first")
    for root in options.roots:
        if not root.is_dir() or not os.access(root, os.W_OK | os.X_OK):
            raise ConfigError(f"{root} is not a directory that can be written to: name one on the disk to measure")
    _check_space(options)


def _check_space(options: IoOptions) -> None:
    """The tier's blocks, the control's file, and the blocks of one pass of writes."""
    most_bytes = max(blocks_a_pass(options, each) * each for each in options.block_bytes)
    wanted_bytes = 3 * most_bytes + 64 * MIB
    for root in options.roots:
        free_bytes = shutil.disk_usage(root).free
        if free_bytes < wanted_bytes:
            raise ConfigError(
                f"{root} has {bytes_text(free_bytes)} free, the run needs {bytes_text(wanted_bytes)}: "
                "free some, or give --bytes less"
            )
