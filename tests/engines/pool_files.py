"""The files of a pool that is in use, and damage to them. An eviction or a quarantine may take any of them away."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def block_files(pool: Path) -> list[Path]:
    """Oldest first; without those that go while they are listed."""
    return [path for path, _ in _looked_at(pool)]


def stored_bytes(pool: Path) -> int:
    """Of all block files, headers included."""
    return sum(status.st_size for _, status in _looked_at(pool))


def _looked_at(pool: Path) -> list[tuple[Path, os.stat_result]]:
    found: list[tuple[Path, os.stat_result]] = []
    for path in pool.glob("*/??/*.kv"):
        with contextlib.suppress(FileNotFoundError):
            found.append((path, path.stat()))
    return sorted(found, key=lambda each: each[1].st_mtime_ns)


def flip_a_byte(file: Path) -> None:
    whole = bytearray(file.read_bytes())
    whole[len(whole) // 2] ^= 1
    file.write_bytes(whole)


def truncate(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size // 2)


def remove(file: Path) -> None:
    file.unlink()


DAMAGES = (flip_a_byte, truncate, remove)
