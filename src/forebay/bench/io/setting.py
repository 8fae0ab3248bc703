"""What all contestants share: blocks in memory, the same blocks on disk, and the tier over them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from forebay.bench.io.options import IoOptions, blocks_a_pass
from forebay.hostpool import HostPool
from forebay.tiers.file import FileTier, Io, Options, RootOptions, build
from forebay.tiers.file.layout import walk_blocks, walk_namespaces
from forebay.types import BlockKey, Namespace

_NO_LIMIT_BYTES = 2**60


@dataclass(frozen=True, slots=True)
class Setting:
    """For one block size. `directories` are the run's own, one in each root."""

    block_bytes: int
    directories: tuple[Path, ...]
    views: tuple[memoryview, ...]
    """Slots of a host pool, in huge pages where the system has them, full of bytes that repeat nowhere."""
    keys: tuple[BlockKey, ...]
    """Of the blocks that are read."""

    @property
    def moved_bytes(self) -> int:
        return self.block_bytes * len(self.keys)

    @property
    def pools(self) -> tuple[Path, ...]:
        """The tier's roots."""
        return tuple(directory / "pool" for directory in self.directories)

    @property
    def control_files(self) -> tuple[Path, ...]:
        """For fio to read; together as long as a pass."""
        return tuple(directory / "control" for directory in self.directories)

    def other_keys(self, salt: str) -> tuple[BlockKey, ...]:
        """As many keys that nothing is stored under yet."""
        return keys_of(f"{self.block_bytes} {salt}", len(self.keys))

    def open_tier(self, depth: int, io: Io) -> FileTier:
        namespace = Namespace(
            model="bench", weights_digest="bench", kv_dtype="uint8", rope="none", layers=1, kv_heads=1, head_dim=1,
            block_tokens=1, block_bytes=self.block_bytes, layout="bytes",
        )  # fmt: skip
        options = Options(
            roots=tuple(RootOptions(path=str(pool)) for pool in self.pools),
            capacity_bytes=_NO_LIMIT_BYTES,
            reads_in_flight=-(-depth // len(self.pools)),
            writes_in_flight=-(-depth // len(self.pools)),
            io=io,
        )
        return build(options, namespace, hashlib.sha256(b"%d" % self.block_bytes).digest())

    def block_paths(self) -> list[str]:
        """Files of the blocks that are read, in the order of the keys."""
        found = {
            block.key: block.path
            for pool in map(str, self.pools)
            for namespace_hex in walk_namespaces(pool)
            for block in walk_blocks(pool, namespace_hex)
        }
        return [found[key] for key in self.keys]

    def write_control_files(self) -> None:
        share = -(-len(self.views) // len(self.directories))
        for at, path in enumerate(self.control_files):
            with path.open("wb", buffering=0) as file:
                for view in self.views[at * share : (at + 1) * share]:
                    file.write(view[: self.block_bytes])
                os.fsync(file.fileno())


def keys_of(salt: str, count: int) -> tuple[BlockKey, ...]:
    return tuple(BlockKey(hashlib.sha256(f"{salt} {i}".encode()).digest()) for i in range(count))


@contextlib.contextmanager
def open_setting(options: IoOptions, block_bytes: int) -> Iterator[Setting]:
    """Directories of the run's own, which are removed at the end, however it ends."""
    name = f"forebay-bench-io-{secrets.token_hex(4)}"
    directories = tuple(root / name for root in options.roots)
    blocks = blocks_a_pass(options, block_bytes)
    try:
        for directory in directories:
            directory.mkdir(mode=0o700)
        views = _filled_views(blocks, block_bytes, options.seed)
        yield Setting(block_bytes, directories, views, keys_of(f"{block_bytes} read", blocks))
    finally:
        for directory in directories:
            shutil.rmtree(directory, ignore_errors=True)


def _filled_views(blocks: int, block_bytes: int, seed: int) -> tuple[memoryview, ...]:
    pool = HostPool(blocks, block_bytes)
    slots = [slot for slot in (pool.take() for _ in range(blocks)) if slot is not None]
    views = tuple(pool.view(slot) for slot in slots)
    chance = np.random.default_rng(seed)
    for view in views:
        view[:block_bytes] = chance.bytes(block_bytes)  # random, so no page of 4 KiB is like another, or compressible
    return views


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-round(share * 1000) * len(ordered) // 1000) - 1)]
