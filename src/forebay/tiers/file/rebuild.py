"""What a root holds, by its directories alone: the way to a catalogue when there is none that can be trusted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from forebay.tiers.file import layout
from forebay.tiers.file.holdings import Space, packed

log = logging.getLogger("forebay.tiers.file")

Progress = Callable[[str, int], None]
"""Told the root and the blocks found so far, on the thread that waits for it."""

_TELL_BLOCKS = 200_000
"""About three seconds' worth on an NVMe drive whose directories are not cached."""
_THREADS = 8
"""Looking up what the system has not cached waits for the device; this many wait at once."""


def log_progress(root: str, blocks: int) -> None:
    """A line of the log, and a warning at that: a start that takes so long must not look like one that hangs."""
    log.warning("root %s: its catalogue is being made anew: %d blocks found so far", root, blocks)


def rebuild(root: str, progress: Progress) -> list[Space]:
    """Every regular file that has a block's name in its right place, oldest first. No file is opened."""
    spaces: list[Space] = []
    blocks = told = 0
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="forebay-rebuild") as threads:
        for namespace_hex in layout.walk_namespaces(root):
            aged: list[layout.BlockFile] = []
            look = partial(_look, root, namespace_hex)
            for found in threads.map(look, layout.walk_fans(root, namespace_hex)):
                aged.extend(found)
                if blocks + len(aged) >= told + _TELL_BLOCKS:
                    told = blocks + len(aged)
                    progress(root, told)
            blocks += len(aged)
            spaces.append(_space(root, namespace_hex, aged))
    return spaces


def _look(root: str, namespace_hex: str, fan: str) -> list[layout.BlockFile]:
    return [file for file in layout.walk_fan(root, namespace_hex, fan) if file.is_regular]


def _space(root: str, namespace_hex: str, files: Sequence[layout.BlockFile]) -> Space:
    space = Space(bytes.fromhex(namespace_hex), layout.tenant_of(Path(root), namespace_hex))
    for file in sorted(files, key=lambda file: file.mtime_ns):
        space.held[file.key] = packed(file.length_bytes, file.mtime_ns // 10**9)
        space.held_bytes += file.length_bytes
    return space
