"""The compiled kernel, if there is one: batches that need the interpreter lock once, not once a block.

`kernel.c` says what it does and what it leaves to Python. Here are its face in Python and the way to it. The library is
called through ctypes, which releases the lock for the time of a call; so it depends on no version of Python.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from forebay.errors import TierUnavailable
from forebay.tiers.file.native.compile import LIBRARY, is_current
from forebay.types import BlockKey


class _Job(ctypes.Structure):
    """`struct job` of kernel.c, field by field."""

    _fields_ = (
        ("pool", ctypes.c_void_p),
        ("paths", ctypes.POINTER(ctypes.c_char_p)),
        ("keys", ctypes.c_char_p),
        ("views", ctypes.POINTER(ctypes.c_void_p)),
        ("results", ctypes.c_char_p),
        ("expected", ctypes.c_char_p),
        ("blocks", ctypes.c_uint64),
        ("file_bytes", ctypes.c_uint64),
        ("payload_bytes", ctypes.c_uint64),
        ("view_bytes", ctypes.c_uint64),
        ("open_flags", ctypes.c_int32),
        ("task", ctypes.c_int32),
    )


class Task(IntEnum):
    """`enum task` of kernel.c: what is done with each block."""

    PROVE_HEADER = 0
    PROVE_PAYLOAD = 1
    """Both: read it into its view, and prove that it is what it has to be, as far as this."""
    PUBLISH = 2
    """Write it from its view, and give it its name if that is free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What the files of one root have to be, and how they are opened."""

    task: Task
    header_start: bytes
    """How every header of the namespace begins, with any key (`format.header_start`)."""
    file_bytes: int
    payload_bytes: int
    view_bytes: int
    """Read after the header page: the payload, padded to a page for direct I/O. Every view is as long, or longer."""
    open_flags: int
    """PUBLISH: of the directory that the file gets its name in, so with O_TMPFILE."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Of one root, in parallel."""

    paths: Sequence[str]
    keys: Sequence[BlockKey]
    addresses: Sequence[int]
    """Of the views, which the caller keeps."""


@dataclass(frozen=True, slots=True)
class NativeJob:
    """At least one block."""

    lanes: NativeLanes
    recipe: Recipe
    blocks: Blocks

    def fill(self, results: ctypes.Array[ctypes.c_char]) -> _Job:
        """For C to read. The structure keeps alive what it points to."""
        recipe, blocks = self.recipe, self.blocks
        count = len(blocks.keys)
        return _Job(
            pool=self.lanes.pool,
            paths=(ctypes.c_char_p * count)(*map(os.fsencode, blocks.paths)),
            keys=b"".join(blocks.keys),
            views=(ctypes.c_void_p * count)(*blocks.addresses),
            results=ctypes.cast(results, ctypes.c_char_p),
            expected=recipe.header_start,
            blocks=count,
            file_bytes=recipe.file_bytes,
            payload_bytes=recipe.payload_bytes,
            view_bytes=recipe.view_bytes,
            open_flags=recipe.open_flags,
            task=recipe.task,
        )


class Transfer:
    """Blocks on their way. A context, which ends only when no thread touches their views any more.

    An exception that comes at any moment from outside, such as KeyboardInterrupt, changes nothing in that: it is raised
    when the blocks are through.
    """

    def __init__(self, kernel: Kernel, jobs: Sequence[NativeJob]) -> None:
        self._transfer = ctypes.c_void_p()
        """Set by C before it begins: between its return and an assignment here we might be interrupted."""
        self._kernel = kernel
        self._results = [ctypes.create_string_buffer(len(job.blocks.keys)) for job in jobs]
        filled = [job.fill(results) for job, results in zip(jobs, self._results, strict=True)]
        self._jobs = (_Job * len(jobs))(*filled)
        self._keep = filled, jobs
        self._done = (ctypes.c_uint64 * len(jobs))()

    def __enter__(self) -> Transfer:
        try:
            _IN_FLIGHT.add(self)
            trouble = self._kernel.start(self._jobs, len(self._jobs), self._transfer)
            if trouble:
                raise TierUnavailable(f"the file tier's threads are gone: {os.strerror(trouble)}")
        except BaseException:
            self._finish()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._finish()

    def wait(self, timeout_ns: int) -> bool:
        """Whether all blocks are done by then. Does not hold the interpreter lock meanwhile."""
        return not self._transfer or bool(
            self._kernel.wait(self._transfer, time.monotonic_ns() + timeout_ns, self._done)
        )

    @property
    def done_blocks(self) -> Sequence[int]:
        """Of each job, when `wait` was last called."""
        return list(self._done)

    def succeeded(self, job: int) -> list[bool]:
        """Which blocks of a job are now in their views, proven sound, or in their files; of the others nothing is said,
        and the views of a read hold anything."""
        return [result == _DONE for result in self._results[job].raw]

    def _finish(self) -> None:
        interrupt: BaseException | None = None
        is_through = False
        while not is_through:
            try:
                is_through = self.wait(_LONG_NS)
            except BaseException as come:
                interrupt = come
        self._kernel.end(self._transfer)
        _IN_FLIGHT.discard(self)
        if interrupt is not None:
            raise interrupt


_IN_FLIGHT: set[Transfer] = set()
"""The memory that C uses is theirs: it must stay until they have ended, whatever becomes of those who wait for that."""
_DONE = 1
_LONG_NS = 3600 * 10**9


class Kernel:
    """The library. It is called with the interpreter lock where it returns at once, and without where it waits."""

    def __init__(self, path: Path) -> None:
        """Raises OSError when it cannot be loaded."""
        holding, releasing = ctypes.PyDLL(str(path), use_errno=True), ctypes.CDLL(str(path), use_errno=True)
        transfer, pool = ctypes.c_void_p, ctypes.c_void_p
        self.open = _function(releasing.forebay_open, pool, ctypes.c_uint)
        self.close = _function(releasing.forebay_close, None, pool)
        self.free = _function(releasing.forebay_free, None, pool)
        self.start = _function(
            holding.forebay_start, ctypes.c_int, ctypes.POINTER(_Job), ctypes.c_uint, ctypes.POINTER(transfer)
        )
        self.wait = _function(
            releasing.forebay_wait, ctypes.c_int, transfer, ctypes.c_uint64, ctypes.POINTER(ctypes.c_uint64)
        )
        self.end = _function(holding.forebay_end, None, ctypes.POINTER(transfer))


def _function(function: Any, result: Any, *arguments: Any) -> Any:
    function.restype, function.argtypes = result, arguments
    return function


class NativeLanes:
    """The kernel's own threads for one root. Thread-safe."""

    def __init__(self, kernel: Kernel, in_flight: int) -> None:
        """`in_flight`: how many transfers at a time. A few threads more compute checksums meanwhile."""
        self._kernel = kernel
        self.pool: int | None = kernel.open(in_flight)
        if self.pool is None:
            raise OSError(ctypes.get_errno(), f"cannot start threads for {in_flight} transfers")
        self._gate = threading.Lock()
        self._closer: threading.Thread | None = None
        # the memory goes when nobody can call any more; a host that forgot to close must still be able to exit
        weakref.finalize(self, kernel.free, self.pool).atexit = False

    def close(self) -> threading.Thread:
        """Have the threads end after what is queued; returns the one that sees to it. Safe to call twice.

        That one keeps this object, and so the memory that the threads use, for as long as they hang.
        """
        with self._gate:
            if self._closer is None:
                self._closer = threading.Thread(target=self._end, name="forebay-native-close", daemon=True)
                self._closer.start()
        return self._closer

    def _end(self) -> None:
        self._kernel.close(self.pool)


@dataclass(frozen=True, slots=True)
class Found:
    kernel: Kernel | None
    words: str
    """Where it is, or why there is none."""


def find_kernel(directory: Path = Path(__file__).parent) -> Found:
    """The kernel that was compiled from exactly the sources beside it, if it is there and can be loaded."""
    path = directory / LIBRARY
    if not path.exists():
        return Found(None, "no compiled kernel is installed; install Forebay again where there is a C compiler")
    if not is_current(path):
        return Found(None, f"{path} was compiled from other sources; install Forebay again")
    try:
        return Found(Kernel(path), f"compiled kernel {path}")
    except OSError as error:
        return Found(None, f"{path} cannot be loaded ({error}); install Forebay again")
