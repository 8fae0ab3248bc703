"""How much of a directory lies in the page cache, and how to get it out of there."""

from __future__ import annotations

import ctypes
import mmap
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

_CACHESTAT = 451
"""Number of the system call, since Linux 6.5, on every architecture."""
_PAGE_BYTES = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Counts(ctypes.Structure):
    """Pages."""

    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")
    )


def drop_page_cache(roots: Sequence[Path]) -> None:
    """Make the next read of every file below the roots a cold one, as far as this system's own cache goes."""
    os.sync()  # dirty pages cannot be dropped
    for descriptor in _open_files(roots):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def resident_bytes(roots: Sequence[Path]) -> int | None:
    """Of all files below the roots, in the page cache. None where the kernel does not say."""
    total = 0
    for descriptor in _open_files(roots):
        found = _cachestat(descriptor)
        if found is None:
            found = _mincore(descriptor)
        if found is None:
            return None
        total += found
    return total


def files_below(roots: Sequence[Path]) -> Iterator[Path]:
    """Regular files, in no order; links are not followed."""
    for root in roots:
        for place, _, names in os.walk(root):
            yield from (Path(place, name) for name in names)


def _open_files(roots: Sequence[Path]) -> Iterator[int]:
    """A descriptor of each regular file, closed once the next is asked for."""
    for path in files_below(roots):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            continue  # removed meanwhile, a link or a socket
        try:
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                yield descriptor
        finally:
            os.close(descriptor)


def _cachestat(descriptor: int) -> int | None:
    counts = _Counts()
    whole = _Range(0, 0)  # a length of 0: to the end of the file
    if _libc.syscall(_CACHESTAT, descriptor, ctypes.byref(whole), ctypes.byref(counts), 0):
        return None
    return int(counts.cached) * _PAGE_BYTES


def _mincore(descriptor: int) -> int | None:
    """For older kernels. They answer for files that the caller owns or may write."""
    length_bytes = os.fstat(descriptor).st_size
    if not length_bytes:
        return 0
    pages = np.zeros(-(-length_bytes // _PAGE_BYTES), dtype=np.uint8)
    with mmap.mmap(descriptor, length_bytes, prot=mmap.PROT_READ) as region:
        view = np.frombuffer(region, dtype=np.uint8)
        failed = _libc.mincore(
            ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(length_bytes), ctypes.c_void_p(pages.ctypes.data)
        )
        del view
    return None if failed else int((pages & 1).sum()) * _PAGE_BYTES
