"""The files of a pool that is in use, and damage to them. An eviction or a quarantine may take any of them away."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from forebay.keys import derived_key
from forebay.types import BlockKey


def block_files(pool: Path) -> list[Path]:
    """Oldest first; without those that go while they are listed."""
    return [path for path, _ in _looked_at(pool)]


def stored_bytes(pool: Path) -> int:
    """Of all block files, headers included."""
    return sum(status.st_size for _, status in _looked_at(pool))


def block_hash(tokens: list[int], block_tokens: int, position: int) -> bytes:
    """vLLM's own name of a block of a prompt: its hash of the prefix."""
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256_cbor
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.request import Request

    hasher = get_request_block_hasher(block_tokens, sha256_cbor)
    request = Request("any", tokens, SamplingParams(max_tokens=1), None, block_hasher=hasher)
    return bytes(request.block_hashes[position])


def file_of(pool: Path, root: BlockKey, name: bytes) -> Path:
    """Where the block of this name is stored; `root` is the key of its namespace."""
    key = derived_key(root, name).hex()
    return pool / root.hex() / key[:2] / f"{key}.kv"


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
