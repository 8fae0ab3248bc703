"""Whether a device gives back what was written, byte by byte, at one block size."""

from __future__ import annotations

import errno
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from forebay.bench.storm.device import Stamp
from forebay.hostpool import HostPool
from forebay.types import BlockKey, Slot

_MOST_BLOCKS = 100_000


@dataclass(frozen=True, slots=True)
class Integrity:
    block_bytes: int
    compared_bytes: int
    wrong_bytes: int


def prove_integrity(folder: Path, block_bytes: int, whole_bytes: int) -> Integrity:
    """Write a file of unique blocks past the page cache, read it back from the device and compare. Removes the file.

    Raises OSError for a device that refuses or fails.
    """
    blocks = max(1, min(_MOST_BLOCKS, whole_bytes // block_bytes))
    pool = HostPool(2, block_bytes)
    view, truth = pool.view(_taken(pool))[:block_bytes], pool.view(_taken(pool))[:block_bytes]
    stamp, path = Stamp(block_bytes), folder / "integrity"
    try:
        descriptor = _open(path)
        try:
            for number in range(blocks):
                stamp.fill(view, _key(number))
                _whole(os.pwritev(descriptor, [view], number * block_bytes), block_bytes, path)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)  # where direct I/O was refused
            wrong_bytes = 0
            for number in reversed(range(blocks)):
                _whole(os.preadv(descriptor, [view], number * block_bytes), block_bytes, path)
                stamp.fill(truth, _key(number))
                if view != truth:
                    wrong_bytes += int(
                        np.count_nonzero(np.frombuffer(view, np.uint8) != np.frombuffer(truth, np.uint8))
                    )
        finally:
            os.close(descriptor)
    finally:
        path.unlink(missing_ok=True)
    return Integrity(block_bytes, blocks * block_bytes, wrong_bytes)


def _taken(pool: HostPool) -> Slot:
    slot = pool.take()
    assert slot is not None
    return slot


def _key(number: int) -> BlockKey:
    return BlockKey(hashlib.sha256(b"integrity %d" % number).digest())


def _open(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags, 0o600)


def _whole(moved_bytes: int, wanted_bytes: int, path: Path) -> None:
    if moved_bytes != wanted_bytes:
        raise OSError(errno.EIO, f"{moved_bytes} bytes were moved where {wanted_bytes} were asked for", str(path))
