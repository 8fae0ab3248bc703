"""Whether what is stored is unique and does not compress, by a sample: else a device may not have read it at all."""

from __future__ import annotations

import hashlib
import random
import zlib
from collections.abc import Sequence
from pathlib import Path

from forebay.bench.restore.pagecache import files_below
from forebay.bench.restore.results import Contents

_MOST_FILES = 2048
_COMPRESSED_FILES = 64
"""Of the sampled ones, that are compressed too, which is slow."""
_PIECE_BYTES = 64 * 2**10
_LEAST_BYTES = 8 * 2**10
"""Shorter files are none that hold blocks."""


def sample_contents(pools: Sequence[Path], seed: int) -> Contents | None:
    """None where there are no files. Reads through the page cache: drop it afterwards.

    What two instances store for themselves is there twice, and meant to be: only within a pool blocks are to differ.
    """
    paths = sorted(set(files_below(pools)))
    chosen = random.Random(seed).sample(paths, min(len(paths), _MOST_FILES))
    pieces = {path: piece for path in chosen if len(piece := _middle(path)) >= _LEAST_BYTES // 2}
    if not pieces:
        return None
    pool_of = {path: next(pool for pool in pools if path.is_relative_to(pool)) for path in pieces}
    distinct = {(pool_of[path], hashlib.blake2b(piece, digest_size=16).digest()) for path, piece in pieces.items()}
    compressed = list(pieces.values())[:_COMPRESSED_FILES]
    kept_bytes = sum(len(zlib.compress(piece, 1)) for piece in compressed)
    return Contents(
        sampled_files=len(pieces),
        duplicate_files=len(pieces) - len(distinct),
        compressed_share=kept_bytes / sum(map(len, compressed)),
    )


def _middle(path: Path) -> bytes:
    """Bytes from the middle of a file on: headers and names, which differ anyway, are at the beginning."""
    try:
        length_bytes = path.stat(follow_symlinks=False).st_size
        if length_bytes < _LEAST_BYTES:
            return b""
        with path.open("rb") as file:
            file.seek(length_bytes // 2)
            return file.read(_PIECE_BYTES)
    except OSError:
        return b""
