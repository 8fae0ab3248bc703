"""What a storm can be asked for, and everything that can be wrong with it before a byte is written."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec

from forebay.bench.environment import available_memory_bytes
from forebay.bench.units import bytes_text
from forebay.errors import ConfigError
from forebay.hostpool import slot_bytes

JSON_NAME, PLOT_NAME = "storm.json", "storm.svg"
_MOST_SESSIONS = 10_000


class StormOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    roots: tuple[Path, ...]
    """Existing directories, one a device. The pool is made in them and removed afterwards."""
    sessions: tuple[int, ...] = (16, 32)
    """One storm for each of these numbers."""
    bytes_per_session: int = 192 * 10**6
    """Of the long ones, rounded up to whole blocks."""
    short_share: float = 1.0
    """Length of every second session, as a share of the others'. 1: all have the same length."""
    rounds: int = 3
    """Each has every order once, in turns."""
    block_bytes: int = 2 * 2**20
    host_bytes: int = 2**30
    """Host pool: what may be in flight, and less than a storm."""
    seed: int = 0
    out: Path = Path()
    """Directory for storm.json and storm.svg."""


def session_blocks(options: StormOptions, sessions: int) -> tuple[int, ...]:
    """Length of each session of a storm, in blocks. Every second one is short."""
    long_blocks = -(-options.bytes_per_session // options.block_bytes)
    short_blocks = max(1, round(long_blocks * options.short_share))
    return tuple(short_blocks if number % 2 else long_blocks for number in range(sessions))


def parse_mix(text: str) -> float:
    """`1:10` -> 0.1, the length of the short sessions as a share of the long ones'. Raises ConfigError."""
    parts = text.split(":")
    if len(parts) == 2 and all(part.isascii() and part.isdecimal() and len(part) <= 6 for part in parts):
        short, long = (int(part) for part in parts)
        if 0 < short <= long:
            return short / long
    raise ConfigError(f"{text!r} is no mix of lengths: give short:long, such as 1:10")


def check_options(options: StormOptions) -> None:
    """Raises ConfigError for the first thing that cannot work, and changes nothing."""
    if not options.roots:
        raise ConfigError("a storm needs a directory on the device to measure: name one")
    if not options.sessions or not all(2 <= sessions <= _MOST_SESSIONS for sessions in options.sessions):
        raise ConfigError(
            f"--sessions must be from 2 to {_MOST_SESSIONS}, not {','.join(map(str, options.sessions)) or 'nothing'}"
        )
    for name in ("bytes_per_session", "rounds", "block_bytes"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be 1 or more, not {getattr(options, name)}")
    if options.block_bytes < 4096:
        raise ConfigError(f"--block-bytes must be 4096 or more, not {options.block_bytes}")
    if not 0 < options.short_share <= 1:
        raise ConfigError(f"--mix: short sessions are no longer than long ones, not {options.short_share} times")
    for root in options.roots:
        if not root.is_dir():
            raise ConfigError(f"{root} is not a directory: make it first, or name another one")
    if not options.out.is_dir():
        raise ConfigError(f"--out: {options.out} is not a directory: make it first, or name another one")
    _check_memory(options)
    _check_disk(options)


def _check_memory(options: StormOptions) -> None:
    least_bytes = 16 * slot_bytes(options.block_bytes)
    if options.host_bytes < least_bytes:
        raise ConfigError(
            f"--host-bytes {bytes_text(options.host_bytes)} holds less than 16 blocks: "
            f"give {bytes_text(least_bytes)} or more, or smaller blocks"
        )
    available_bytes = available_memory_bytes()
    if available_bytes is not None and options.host_bytes > available_bytes:
        raise ConfigError(
            f"--host-bytes asks for {bytes_text(options.host_bytes)} "
            f"where {bytes_text(available_bytes)} are free: ask for less"
        )


def stored_bytes(options: StormOptions) -> int:
    """What the blocks of the largest storm take on disk, with their headers."""
    return sum(session_blocks(options, max(options.sessions))) * (slot_bytes(options.block_bytes) + 4096)


def _check_disk(options: StormOptions) -> None:
    free_bytes = sum({root.stat().st_dev: shutil.disk_usage(root).free for root in options.roots}.values())
    if stored_bytes(options) > free_bytes:
        raise ConfigError(
            f"the storm needs {bytes_text(stored_bytes(options))} and there are {bytes_text(free_bytes)} free: "
            "make room, or ask for fewer --sessions or --bytes-per-session"
        )
