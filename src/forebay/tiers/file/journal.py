"""The file that a root's catalogue is kept in: locked, appended to, followed and replaced. Knows no blocks.

    ROOT/catalogue        records, appended under the lock
    ROOT/catalogue.lock   empty; byte 0 is locked by whoever appends, and byte W, for as long as it lives, by writer W

Both locks are of open files (OFD): unlike flock, one file has many of them, and whether a writer lives can be seen
without touching its lock. Threads of one process share an open file, so the caller keeps them apart.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import time
from collections.abc import Callable, Iterator

from forebay.tiers.file.directio import NO_LOCKS, Access, Calls, create_temp, remove_if_there
from forebay.tiers.file.records import RECORD_BYTES, Doubtful, Operation, Record, Records, decode, encode, seed_of

FILE = "catalogue"
LOCK_FILE = "catalogue.lock"
_FLOCK = "@hhqqi0q"  # type, whence, start, length, pid
MOMENT_S = 0.05
"""Longer than anybody holds the lock who only appends."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 50e-6, 0.005
"""Between two tries for the lock. The system's own wait for it has no end that could be chosen."""
_OPEN = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


class NoLocks(Exception):
    """The file system has no such locks. Internal to the file tier: the catalogue is kept in memory only."""


class NoFile(Doubtful):
    """There is no catalogue."""


class Journal:
    """One process's view of the file. Not thread-safe."""

    def __init__(self, calls: Calls, root: str, writer: int) -> None:
        """Raises NoLocks, and OSError when the root cannot be written to."""
        self._calls = calls
        self._root = root
        self._path = f"{root}/{FILE}"
        self.writer = writer
        self._file: int | None = None
        self._inode = 0
        self.seed = 0
        """Of the file that was read."""
        self.records = 0
        """How many records of the file were read."""
        self._is_contended = False
        """Whether somebody held the lock for longer than was waited for it, the last time."""
        self._lock_file: int | None = calls.open(f"{root}/{LOCK_FILE}", _OPEN, 0o600)
        try:
            self._set_lock(fcntl.F_OFD_SETLK, fcntl.F_WRLCK, writer)
        except OSError as error:
            self.close()
            if error.errno in NO_LOCKS:
                raise NoLocks(error.strerror) from None
            raise

    def close(self) -> None:
        """Ends this writer's life. Safe to call twice."""
        self.drop_file()
        descriptor, self._lock_file = self._lock_file, None
        if descriptor is not None:
            self._calls.close(descriptor)

    # --- locks

    @contextlib.contextmanager
    def locked(self, patience_s: float) -> Iterator[None]:
        """Nobody else appends meanwhile. Raises OSError (ETIMEDOUT) when another process does for longer than this.

        After that only a moment is waited, until it can be had again: one that hangs must not cost each caller so much.
        """
        self._lock(min(patience_s, MOMENT_S) if self._is_contended else patience_s)
        try:
            yield
        finally:
            self._set_lock(fcntl.F_OFD_SETLK, fcntl.F_UNLCK, 0)

    def _lock(self, patience_s: float) -> None:
        until_s, pause_s = time.monotonic() + patience_s, _FIRST_PAUSE_S
        while not self._try_lock():
            if time.monotonic() >= until_s:
                self._is_contended = self._is_contended or patience_s > MOMENT_S
                raise OSError(errno.ETIMEDOUT, f"another process has held its lock for {patience_s:g} s", self._path)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        self._is_contended = False

    def _try_lock(self) -> bool:
        try:
            self._set_lock(fcntl.F_OFD_SETLK, fcntl.F_WRLCK, 0)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            return False
        return True

    def is_alive(self, writer: int) -> bool:
        if writer == self.writer:
            return True
        answer = self._set_lock(fcntl.F_OFD_GETLK, fcntl.F_WRLCK, writer)
        return bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)

    def _set_lock(self, command: int, kind: int, at: int) -> bytes:
        assert self._lock_file is not None
        return self._calls.lock(self._lock_file, command, struct.pack(_FLOCK, kind, os.SEEK_SET, at, 1, 0))

    # --- records

    @property
    def is_open(self) -> bool:
        """Whether there is a file that is being read."""
        return self._file is not None

    def is_replaced(self) -> bool:
        """Whether there is another file in the place of the one that was read."""
        try:
            return self._calls.lstat(self._path).st_ino != self._inode
        except FileNotFoundError:
            return True

    def is_detached(self) -> bool:
        """Whether the lock is no longer that of the root: this one is of another mount, or somebody removed it."""
        assert self._lock_file is not None
        try:
            here, there = self._calls.fstat(self._lock_file), self._calls.lstat(f"{self._root}/{LOCK_FILE}")
        except OSError:
            return True
        return (here.st_dev, here.st_ino) != (there.st_dev, there.st_ino)

    def open_file(self) -> None:
        """Begin to read the file that is there now. Raises Doubtful when there is none, or it is a copy."""
        self.drop_file()
        try:
            self._file = self._calls.open(self._path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0)
        except FileNotFoundError:
            raise NoFile("there is none") from None
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                raise
            raise Doubtful("there is something else in its place") from None
        self._inode, self.records = self._calls.fstat(self._file).st_ino, 0
        head = self._calls.pread(self._file, RECORD_BYTES, 0)
        self.seed = seed_of(head)
        first = decode(head, self.seed, 0)
        if not len(first):
            raise Doubtful("its beginning is damaged")
        if int(first[0]["writer"]) != self._inode:
            raise Doubtful("it is a copy")

    def read_on(self) -> Records:
        """The records that follow those already read; what is not whole or not sound yet is left for the next time."""
        assert self._file is not None
        begin = self.records * RECORD_BYTES
        length_bytes = self._calls.fstat(self._file).st_size - begin
        raw = self._read(begin, length_bytes) if length_bytes >= RECORD_BYTES else b""
        found = decode(raw, self.seed, self.records)
        self.records += len(found)
        return found

    def check_end(self) -> None:
        """Under the lock, after `read_on`: what is left is part of a record that its writer died in, and is cut off.

        Raises Doubtful if it is more than that: then something else has written to the file.
        """
        assert self._file is not None
        left_bytes = self._calls.fstat(self._file).st_size - self.records * RECORD_BYTES
        if left_bytes < 0:
            raise Doubtful("it has become shorter")
        if left_bytes >= RECORD_BYTES:
            raise Doubtful(f"record {self.records} is damaged")
        self._cut()

    def _cut(self) -> None:
        """Remove the part of a record at the end, if there is one. Whole records stay: somebody may have read them."""
        assert self._file is not None
        length_bytes = self._calls.fstat(self._file).st_size
        if length_bytes % RECORD_BYTES:
            self._calls.truncate(self._file, length_bytes - length_bytes % RECORD_BYTES)

    def append(self, records: list[Record]) -> Records:
        """Under the lock, when all was read. Returns what was appended.

        After an error (a full disk) the next `read_on` gives as many as are whole: somebody may have read those.
        """
        assert self._file is not None
        raw, at = encode(records, self.seed, self.records), self.records * RECORD_BYTES
        try:
            self._write(self._file, raw, at)
        except OSError:
            self._cut()
            raise
        self.records += len(records)
        return decode(raw, self.seed, self.records - len(records))

    def sync(self) -> None:
        if self._file is not None:
            self._calls.sync(self._file)

    def replace(self, temp_directory: str, make: Callable[[int, int], Records]) -> None:
        """Under the lock: put a new file in the place of this one. `make(seed, inode)` gives its records.

        Whoever has read the old one to its seal knows what the new one begins with.
        """
        temp = create_temp(self._calls, temp_directory, "catalogue", Access.BUFFERED)
        try:
            inode = self._calls.fstat(temp.descriptor).st_ino
            seed = int.from_bytes(os.urandom(8))
            records = make(seed, inode)
            self._write(temp.descriptor, records.tobytes(), 0)
            self._calls.sync(temp.descriptor)
            self._calls.rename(temp.path, self._path)
        except BaseException:
            remove_if_there(temp.path, self._calls)
            self._calls.close(temp.descriptor)
            raise
        if self._file is not None:
            with contextlib.suppress(OSError):  # then the others read the new one from its beginning
                self.append([Record(Operation.SEALED, amount=seed, writer=self.writer)])
        self.drop_file()
        self._file, self._inode, self.seed, self.records = temp.descriptor, inode, seed, len(records)

    def _read(self, begin: int, length_bytes: int) -> bytes:
        assert self._file is not None
        parts: list[bytes] = []
        while length_bytes > 0:
            part = self._calls.pread(self._file, length_bytes, begin)
            if not part:
                break
            parts.append(part)
            begin, length_bytes = begin + len(part), length_bytes - len(part)
        return b"".join(parts)

    def _write(self, descriptor: int, raw: bytes, at: int) -> None:
        sent_bytes = 0
        while sent_bytes < len(raw):
            more_bytes = self._calls.pwrite(descriptor, raw[sent_bytes:], at + sent_bytes)
            if more_bytes == 0:
                raise OSError(errno.EIO, "a write made no progress", self._path)
            sent_bytes += more_bytes

    def drop_file(self) -> None:
        """Forget the file that was read."""
        descriptor, self._file = self._file, None
        if descriptor is not None:
            self._calls.close(descriptor)
