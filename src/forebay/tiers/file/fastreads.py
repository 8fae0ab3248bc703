"""Reads by the compiled kernel, as far as they can be: what is left is read, and judged, by Python.

    all blocks --kernel--> proven sound: done
                     \\---> anything else --Python--> OK, MISSING, CORRUPT, FAILED

So what damage is, where it goes, and what is said about it exists once, in `root.py`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from forebay.errors import ConfigError
from forebay.ports import View
from forebay.tiers.file.blockfile import Verify, read_flags
from forebay.tiers.file.directio import REAL_CALLS, Access, Calls, is_aligned
from forebay.tiers.file.format import Shape, header_start
from forebay.tiers.file.native import Expected, Kernel, NativeLanes, Reading, ReadJob, Wanted, find_kernel
from forebay.tiers.file.root import Root
from forebay.types import BlockKey

log = logging.getLogger("forebay.tiers.file")


_LOOK_NS = 250_000_000
"""How often a batch that takes long is looked at: far more often than a hang lasts."""


class Io(Enum):
    """Who reads blocks."""

    AUTO = "auto"
    """The compiled kernel if it is there, else Python, and say so."""
    NATIVE = "native"
    """Refuse to open without the kernel."""
    PYTHON = "python"


@dataclass(frozen=True, slots=True)
class ReadsReport:
    """Who reads blocks, and how many blocks so far."""

    by: Io
    """NATIVE or PYTHON."""
    reason: str
    native_blocks: int = 0
    python_blocks: int = 0
    """With a kernel: those that it did not prove sound, or could not reach, and that Python read after it."""


@dataclass(frozen=True, slots=True)
class Chosen:
    kernel: Kernel | None
    reason: str


def choose(io: Io, calls: Calls) -> Chosen:
    """Raises ConfigError when the kernel is demanded and is not there."""
    if calls != REAL_CALLS:
        return Chosen(None, "other system calls than the real ones were given")
    if io is Io.PYTHON:
        return Chosen(None, "Python was asked for")
    found = find_kernel()
    if found.kernel is None and io is Io.NATIVE:
        raise ConfigError(f"file tier: io = 'native', but {found.words}; or use io = 'auto'")
    if found.kernel is None:
        log.warning("file tier: reads go through Python and slow down when it is busy, since %s", found.words)
    return Chosen(found.kernel, found.words)


class FastReads:
    """The kernel over the roots of one tier. Thread-safe."""

    def __init__(self, kernel: Kernel, roots: Sequence[Root], shape: Shape, verify: Verify, threads: int) -> None:
        self._kernel = kernel
        self._roots = tuple(roots)
        self._lanes = tuple(NativeLanes(kernel, threads) for _ in roots)
        self._expected = {access: _expected(shape, access, verify) for access in Access}
        self._lock = threading.Lock()
        self._native_blocks = 0
        self._python_blocks = 0

    def read(self, homes: Sequence[int], keys: Sequence[BlockKey], into: Sequence[View]) -> list[int]:
        """Read each block from the root at its place in `homes`; returns which are now in their views, and sound."""
        by_home: dict[int, list[int]] = {}
        for i, home in enumerate(homes):
            if self._reaches(self._roots[home], into[i]):
                by_home.setdefault(home, []).append(i)
        with contextlib.ExitStack() as glances:
            parts = []
            for home, items in by_home.items():
                glance = glances.enter_context(_Glance(self._roots[home]))
                if not glance.refused:
                    parts.append(_Part(home, items, glance))
            proven = self._run(parts, keys, into) if parts else []
        with self._lock:
            self._native_blocks += len(proven)
            self._python_blocks += len(keys) - len(proven)
        return proven

    def _run(self, parts: Sequence[_Part], keys: Sequence[BlockKey], into: Sequence[View]) -> list[int]:
        proven: list[int] = []
        jobs = [self._job(part.home, [keys[i] for i in part.items], [into[i] for i in part.items]) for part in parts]
        with Reading(self._kernel, jobs) as reading:
            while not reading.wait(_LOOK_NS):
                for part, done_blocks in zip(parts, reading.done_blocks, strict=True):
                    part.glance.has_done(done_blocks)
            for at, part in enumerate(parts):
                sound = [i for i, is_sound in zip(part.items, reading.sound(at), strict=True) if is_sound]
                if sound:
                    part.glance.worked()
                    self._roots[part.home].proved([keys[i] for i in sound])
                proven += sound
        return proven

    def report(self, reason: str) -> ReadsReport:
        return ReadsReport(Io.NATIVE, reason, self._native_blocks, self._python_blocks)

    def close(self, home: int) -> list[threading.Thread]:
        """Have the threads of this root end after what is queued; returns the one that sees to it."""
        return [self._lanes[home].close()]

    def _job(self, home: int, keys: Sequence[BlockKey], views: Sequence[View]) -> ReadJob:
        root = self._roots[home]
        wanted = Wanted([root.block_path(key) for key in keys], keys, views)
        return ReadJob(self._lanes[home], self._expected[root.io.access], wanted)

    def _reaches(self, root: Root, view: View) -> bool:
        """Whether the block can be read straight into its view: else it needs a buffer in between, which Python has."""
        access = root.io.access
        fits = len(view) >= self._expected[access].target_bytes
        return fits and (access is Access.BUFFERED or is_aligned(view))


class _Glance:
    """What the breaker of a root is told of a batch that its kernel reads: a context around it.

    The breaker takes a call that has not ended for long as hung. A batch may well take longer, so it tells of itself as
    one call after another, as long as blocks keep coming.
    """

    def __init__(self, root: Root) -> None:
        self._breaker = root.health.reads
        self._call = self._breaker.glance()
        self._done_blocks = 0
        self.refused = self._call.refused or not root.health.is_present
        """Python shall see to it: what is stopped or absent is asked block by block."""

    def __enter__(self) -> _Glance:
        return self

    def __exit__(self, *_: object) -> None:
        self._call.__exit__(None, None, None)

    def has_done(self, done_blocks: int) -> None:
        """So many blocks of the batch are done by now."""
        if done_blocks > self._done_blocks:
            self._done_blocks = done_blocks
            self._call.__exit__(None, None, None)
            self._call = self._breaker.glance()  # refused while another one hangs: then the rest is waited for unseen

    def worked(self) -> None:
        """A block has been read and is sound: so the device works. Without one, Python will say what is the matter."""
        self._call.is_glance = False


@dataclass(frozen=True, slots=True)
class _Part:
    """What is read from one root."""

    home: int
    items: Sequence[int]
    glance: _Glance


def _expected(shape: Shape, access: Access, verify: Verify) -> Expected:
    return Expected(
        header_start=header_start(shape),
        file_bytes=shape.stored_bytes,
        payload_bytes=shape.payload_bytes,
        target_bytes=shape.padded_bytes if access is Access.DIRECT else shape.payload_bytes,
        open_flags=read_flags(access),
        verify_payload=int(verify is Verify.PAYLOAD),
    )
