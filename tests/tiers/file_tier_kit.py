"""Shared by the tests of the file tier: making one, and reaching beneath it."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from forebay.testing.tier_contract import filled, key_of, namespace_of, payload_of
from forebay.tiers.file import FileTier, Io, Options, RootOptions
from forebay.tiers.file.directio import REAL_CALLS, Calls
from forebay.types import BlockKey, Namespace

IO = Io.AUTO
"""Who reads in tiers that are opened without saying; the fixture `io` sets it."""
BLOCK_BYTES = 5000
STORED_BYTES = 4096 + 8192


def digest_of(namespace: Namespace) -> bytes:
    """Any digest that tells namespaces apart will do for the tier."""
    return hashlib.sha256(repr(namespace).encode()).digest()


def open_tier(
    *roots: Path | RootOptions,
    block_bytes: int = BLOCK_BYTES,
    calls: Calls = REAL_CALLS,
    clock_ns: Callable[[], int] = time.monotonic_ns,
    **options: object,
) -> FileTier:
    chosen = tuple(root if isinstance(root, RootOptions) else RootOptions(path=str(root)) for root in roots)
    namespace = namespace_of(block_bytes)
    usual = {"capacity_bytes": 2**30, "reads_in_flight": 2, "writes_in_flight": 2, "io": IO}
    wanted = Options(roots=chosen, **{**usual, **options})
    return FileTier(wanted, namespace, digest_of(namespace), calls, clock_ns)


def namespace_dir(root: Path, block_bytes: int = BLOCK_BYTES) -> Path:
    return root / digest_of(namespace_of(block_bytes)).hex()


def block_file(root: Path, key: BlockKey, block_bytes: int = BLOCK_BYTES) -> Path:
    return namespace_dir(root, block_bytes) / key.hex()[:2] / f"{key.hex()}.kv"


def flip(path: Path, offset: int, mask: int = 0xFF) -> None:
    """Change one byte of a file in place."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        [old] = os.pread(descriptor, 1, offset)
        os.pwrite(descriptor, bytes([old ^ mask]), offset)
    finally:
        os.close(descriptor)


def set_aside(root: Path) -> list[str]:
    """The reasons recorded in a root's quarantine."""
    return sorted(path.name.split(".")[2] for path in (root / "quarantine").iterdir())


def unfinished(root: Path) -> list[str]:
    return sorted(os.listdir(root / "tmp"))


def write_all(tier: FileTier, numbers: Sequence[int], block_bytes: int = BLOCK_BYTES) -> list[object]:
    views = [filled(payload_of(number, block_bytes)) for number in numbers]
    return list(tier.write([key_of(number) for number in numbers], views))


def failing(call: Callable[..., object], when: Callable[..., bool], error_number: int) -> Callable[..., object]:
    """`call`, but an OSError whenever `when` holds for its arguments."""

    def guarded(*args: object) -> object:
        if when(*args):
            raise OSError(error_number, os.strerror(error_number))
        return call(*args)

    return guarded
