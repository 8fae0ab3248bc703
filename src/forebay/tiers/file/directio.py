"""What direct I/O needs: aligned buffers, the system calls as a seam, and a trial of what a file system allows."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import secrets
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from forebay.tiers.file.format import PAGE_BYTES


def _lock_bytes(descriptor: int, command: int, range_: bytes) -> bytes:
    return fcntl.fcntl(descriptor, command, range_)


@dataclass(frozen=True, slots=True)
class Calls:
    """The system calls of block I/O: the seam at which tests put errors, short transfers, full disks and sudden death.

    Everything that a read, write, delete or eviction does to a root goes through here.
    """

    open: Callable[[str, int, int], int] = os.open
    close: Callable[[int], None] = os.close
    preadv: Callable[[int, Sequence[memoryview], int], int] = os.preadv
    pwritev: Callable[[int, Sequence[memoryview], int], int] = os.pwritev
    pread: Callable[[int, int, int], bytes] = os.pread
    pwrite: Callable[[int, bytes, int], int] = os.pwrite
    truncate: Callable[[int, int], None] = os.ftruncate
    sync: Callable[[int], None] = os.fdatasync
    fstat: Callable[[int], os.stat_result] = os.fstat
    lstat: Callable[[str], os.stat_result] = os.lstat
    statvfs: Callable[[str], os.statvfs_result] = os.statvfs
    rename: Callable[[str, str], None] = os.rename
    link: Callable[[str, str], None] = os.link
    unlink: Callable[[str], None] = os.unlink
    mkdir: Callable[[str, int], None] = os.mkdir
    flock: Callable[[int, int], None] = fcntl.flock
    lock: Callable[[int, int, bytes], bytes] = _lock_bytes
    """fcntl with one of the commands for locks of open files (OFD)."""


REAL_CALLS = Calls()


class Access(Enum):
    """How the files of a root are opened."""

    DIRECT = "direct"
    BUFFERED = "buffered"

    @property
    def open_flags(self) -> int:
        return os.O_DIRECT if self is Access.DIRECT else 0


class DirectMode(Enum):
    """What the operator asks for."""

    AUTO = "auto"
    """Direct where the file system allows it, else buffered, and say so."""
    ALWAYS = "always"
    """Refuse to open a root that does not allow it."""
    NEVER = "never"


class Locks(Enum):
    """Whether the file system has flock; without it, files of dead writers cannot be told from those of live ones."""

    HELD = "held"
    UNSUPPORTED = "unsupported"


@dataclass(frozen=True, slots=True)
class IoPath:
    """How a directory's files are really read and written."""

    access: Access
    reason: str
    """Why, in words."""
    alignment_bytes: int | None
    """What the file system itself asks for (statx DIOALIGN); None where it does not say. Always given PAGE_BYTES."""
    locks: Locks
    has_unnamed: bool = False
    """Files can be made without a name and be given one when they are whole (O_TMPFILE, and a link through /proc)."""


class Scratch:
    """The page-aligned buffers of one I/O thread, touched by no other."""

    def __init__(self) -> None:
        self.header = aligned_buffer(PAGE_BYTES)
        self.tail = aligned_buffer(PAGE_BYTES)
        """The last page of a payload that does not fill it."""
        self._bounce = aligned_buffer(PAGE_BYTES)

    def bounce(self, length_bytes: int) -> memoryview:
        """A buffer for blocks whose own memory is not aligned. Valid until the next call."""
        if len(self._bounce) < length_bytes:
            self._bounce = aligned_buffer(length_bytes)
        return self._bounce[:length_bytes]


def aligned_buffer(length_bytes: int) -> memoryview:
    """Fresh anonymous memory that starts on a page."""
    return memoryview(mmap.mmap(-1, length_bytes))


def address_of(view: memoryview) -> int:
    """Where the view starts in memory; valid as long as somebody keeps the view."""
    address: int = np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0]
    return address


def is_aligned(view: memoryview) -> bool:
    """Whether the view starts where direct I/O can reach it."""
    return address_of(view) % PAGE_BYTES == 0


@dataclass(frozen=True, slots=True)
class Temp:
    """A new file that its writer holds an exclusive flock on, until `descriptor` is closed."""

    path: str
    descriptor: int
    locks: Locks


UNNAMED = os.O_TMPFILE | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
"""Opened with these, a directory gives a new file without a name, which is gone with its last descriptor."""

NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
_NO_DIRECT = {errno.EINVAL, errno.EOPNOTSUPP}
_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def create_temp(calls: Calls, directory: str, stem: str, access: Access) -> Temp:
    """A new file `<stem>.<16 hex digits>.tmp`, locked by this process as long as it is open.

    A sweeper may find the file between its creation and its lock; then it is gone, and another one is made.
    """
    while True:
        path = f"{directory}/{stem}.{secrets.token_hex(8)}.tmp"
        descriptor = calls.open(path, _CREATE | access.open_flags, 0o600)
        try:
            locks = _lock(calls, descriptor)
            if locks is not None and calls.fstat(descriptor).st_nlink:
                return Temp(path, descriptor, locks)
        except BaseException:
            calls.close(descriptor)
            remove_if_there(path, calls)
            raise
        calls.close(descriptor)


def _lock(calls: Calls, descriptor: int) -> Locks | None:
    """None when somebody else holds it."""
    try:
        calls.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    except OSError as error:
        if error.errno in NO_LOCKS:
            return Locks.UNSUPPORTED
        raise
    return Locks.HELD


def remove_if_its_writer_died(path: str, calls: Calls = REAL_CALLS) -> bool:
    """Remove a file of `create_temp` unless a live process holds its lock. Where there are no locks, keep it."""
    return _if_its_writer_died(path, calls, calls.unlink)


def its_writer_died(path: str) -> bool:
    """Whether `remove_if_its_writer_died` would remove it now."""
    return _if_its_writer_died(path, REAL_CALLS, lambda path: None)


def _if_its_writer_died(path: str, calls: Calls, then: Callable[[str], None]) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        if _lock(calls, descriptor) is not Locks.HELD:
            return False
        then(path)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def remove_if_there(path: str, calls: Calls = REAL_CALLS) -> None:
    """Best effort: what cannot be removed now is swept when the pool is next opened."""
    with contextlib.suppress(OSError):
        calls.unlink(path)


def try_direct(calls: Calls, directory: str) -> IoPath:
    """Write and read one page of a temporary file directly, as blocks will be. OSError when neither way works."""
    try:
        return _try_access(calls, directory, Access.DIRECT, "a direct write and read of one page worked")
    except OSError as error:
        if error.errno not in _NO_DIRECT:
            raise
        refusal = f"the file system refuses O_DIRECT ({os.strerror(error.errno)}, errno {error.errno})"
    return _try_access(calls, directory, Access.BUFFERED, refusal)


def try_buffered(calls: Calls, directory: str) -> IoPath:
    return _try_access(calls, directory, Access.BUFFERED, "buffered I/O was asked for")


def _try_access(calls: Calls, directory: str, access: Access, reason: str) -> IoPath:
    page, back = aligned_buffer(PAGE_BYTES), aligned_buffer(PAGE_BYTES)
    page[:] = secrets.token_bytes(PAGE_BYTES)
    temp = create_temp(calls, directory, "trial", access)
    try:
        written = calls.pwritev(temp.descriptor, [page], 0)
        got = calls.preadv(temp.descriptor, [back], 0)
        alignment_bytes = _dio_alignment_bytes(temp.descriptor)
    finally:
        remove_if_there(temp.path)
        os.close(temp.descriptor)
    if written != PAGE_BYTES or got != PAGE_BYTES or page != back:
        raise OSError(errno.EIO, "a page did not read back as it was written", directory)
    return IoPath(access, reason, alignment_bytes, temp.locks, _has_unnamed(directory, access))


def _has_unnamed(directory: str, access: Access) -> bool:
    """Whether a file without a name can be made here, and given one, as the compiled kernel does with blocks."""
    path = f"{directory}/trial.{secrets.token_hex(8)}.tmp"
    try:
        descriptor = os.open(directory, UNNAMED | access.open_flags, 0o600)
    except OSError:
        return False
    try:
        # a directory that is not used, since the path is absolute: only with one is the link in /proc followed
        os.link(f"/proc/self/fd/{descriptor}", path, src_dir_fd=descriptor, follow_symlinks=True)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    remove_if_there(path)
    return True


_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000
_STATX_BYTES = 256
_STX_MASK_AT = 0
_STX_DIO_AT = 152  # u32 memory alignment, u32 file offset alignment


def _dio_alignment_bytes(descriptor: int) -> int | None:
    """The coarser of the two alignments that statx reports (Linux 6.1 and later), or None."""
    statx = getattr(ctypes.CDLL(None, use_errno=True), "statx", None)
    if statx is None:
        return None
    answer = ctypes.create_string_buffer(_STATX_BYTES)
    if statx(descriptor, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, answer) != 0:
        return None
    mask: int = struct.unpack_from("=I", answer, _STX_MASK_AT)[0]
    memory_bytes, offset_bytes = struct.unpack_from("=II", answer, _STX_DIO_AT)
    return max(memory_bytes, offset_bytes) or None if mask & _STATX_DIOALIGN else None
