"""Blocks through the compiled kernel, as far as it goes: what it leaves is done, and judged, by Python.

    blocks --kernel--> read and proven sound, or written and given their names: done
                 \\---> anything else --Python--> OK, MISSING, CORRUPT, FULL, FAILED

So what damage is, where it goes, what may stand in a block's place, and what is said of it all exists once: `root.py`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from forebay.errors import ConfigError
from forebay.ports import View
from forebay.tiers.file.blockfile import Verify, read_flags
from forebay.tiers.file.breaker import Breaker
from forebay.tiers.file.directio import REAL_CALLS, UNNAMED, Access, Calls, address_of
from forebay.tiers.file.format import PAGE_BYTES, Shape, header_start
from forebay.tiers.file.native import Blocks, Found, Kernel, NativeJob, NativeLanes, Recipe, Task, Transfer, find_kernel
from forebay.tiers.file.root import Durability, Root
from forebay.types import BlockKey

log = logging.getLogger("forebay.tiers.file")


_LOOK_NS = 250_000_000
"""How often a batch that takes long is looked at: far more often than a hang lasts."""


class Io(Enum):
    """Who reads and writes blocks."""

    AUTO = "auto"
    """The compiled kernel if it is there, else Python, and say so."""
    NATIVE = "native"
    """Refuse to open without the kernel."""
    PYTHON = "python"


@dataclass(frozen=True, slots=True)
class PathReport:
    """Who reads blocks, or writes them, and how many blocks so far."""

    by: Io
    """NATIVE or PYTHON."""
    reason: str
    native_blocks: int = 0
    python_blocks: int = 0
    """With a kernel: those that it did not do, or could not reach, and that Python did after it."""


@dataclass(frozen=True, slots=True)
class Chosen:
    kernel: Kernel | None
    reason: str


@dataclass(frozen=True, slots=True)
class Choice:
    reads: Chosen
    writes: Chosen


def choose(io: Io, calls: Calls, durability: Durability) -> Choice:
    """Raises ConfigError when the kernel is demanded and is not there."""
    if io is Io.PYTHON:
        python = Chosen(None, "Python was asked for")
        return Choice(python, python)
    found = find_kernel()
    if found.kernel is None and io is Io.NATIVE and calls == REAL_CALLS:
        raise ConfigError(f"file tier: io = 'native', but {found.words}; or use io = 'auto'")
    if found.kernel is None and calls == REAL_CALLS:
        log.warning("file tier: I/O goes through Python and slows down when that is busy, since %s", found.words)
    reads, writes = _chosen(found), _chosen(found)
    if durability is not Durability.NONE:
        writes = Chosen(None, f"durability = '{durability.value}' is waited for by Python")
    others = Chosen(None, "other system calls than the real ones were given")
    if (calls.open, calls.preadv) != (REAL_CALLS.open, REAL_CALLS.preadv):
        reads = others
    return Choice(reads, writes if calls == REAL_CALLS else others)


def _chosen(found: Found) -> Chosen:
    return Chosen(found.kernel, found.words)


@dataclass(frozen=True, slots=True)
class Way:
    """What reads and writes differ in."""

    recipes: Mapping[Access, Recipe]
    breaker_of: Callable[[Root], Breaker]
    takes: Callable[[Root, BlockKey], bool]
    """Whether the kernel may try the block."""
    moved: Callable[[Root, Sequence[BlockKey]], None]
    """Told what it has done."""


def reading(shape: Shape, verify: Verify) -> Way:
    task = Task.PROVE_PAYLOAD if verify is Verify.PAYLOAD else Task.PROVE_HEADER
    return Way(
        recipes={access: _recipe(task, shape, access, read_flags(access)) for access in Access},
        breaker_of=lambda root: root.health.reads,
        takes=lambda root, key: True,
        moved=Root.proved,
    )


def writing(shape: Shape) -> Way:
    return Way(
        recipes={access: _recipe(Task.PUBLISH, shape, access, UNNAMED | access.open_flags) for access in Access},
        breaker_of=lambda root: root.health.writes,
        takes=Root.is_ready_for,
        moved=Root.published,
    )


def _recipe(task: Task, shape: Shape, access: Access, open_flags: int) -> Recipe:
    is_padded = access is Access.DIRECT and task is not Task.PUBLISH
    return Recipe(
        task=task,
        header_start=header_start(shape),
        file_bytes=shape.stored_bytes,
        payload_bytes=shape.payload_bytes,
        view_bytes=shape.padded_bytes if is_padded else shape.payload_bytes,
        open_flags=open_flags,
    )


class FastPath:
    """The kernel over the roots of one tier, with up to `in_flight` transfers at each. Thread-safe."""

    def __init__(self, kernel: Kernel, roots: Sequence[Root], in_flight: int, way: Way) -> None:
        self._kernel = kernel
        self._roots = tuple(roots)
        self._lanes = tuple(NativeLanes(kernel, in_flight) for _ in roots)
        self._way = way
        self._lock = threading.Lock()
        self._native_blocks = 0
        self._python_blocks = 0

    def move(self, homes: Sequence[int], keys: Sequence[BlockKey], views: Sequence[View]) -> list[int]:
        """Read or write each block at the root at its place in `homes`; returns the places of those that it has done.

        A block read is in its view, and sound; a block written is in its file, under its name.
        """
        by_home: dict[int, list[int]] = {}
        for i, home in enumerate(homes):
            by_home.setdefault(home, []).append(i)
        addresses = [address_of(view) for view in views]
        with contextlib.ExitStack() as glances:
            parts = []
            for home, items in by_home.items():
                root = self._roots[home]
                glance = glances.enter_context(_Glance(root, self._way.breaker_of(root)))
                if glance.refused:
                    continue
                recipe = self._way.recipes[root.io.access]
                taken = [
                    i for i in items if _reaches(recipe, len(views[i]), addresses[i]) and self._way.takes(root, keys[i])
                ]
                if taken:
                    parts.append(_Part(home, recipe, taken, glance))
            done = self._run(parts, keys, addresses) if parts else []
        with self._lock:
            self._native_blocks += len(done)
            self._python_blocks += len(keys) - len(done)
        return done

    def _run(self, parts: Sequence[_Part], keys: Sequence[BlockKey], addresses: Sequence[int]) -> list[int]:
        done: list[int] = []
        jobs = [self._job(part, keys, addresses) for part in parts]
        with Transfer(self._kernel, jobs) as transfer:
            while not transfer.wait(_LOOK_NS):
                for part, done_blocks in zip(parts, transfer.done_blocks, strict=True):
                    part.glance.has_done(done_blocks)
            for at, part in enumerate(parts):
                moved = [i for i, is_done in zip(part.items, transfer.succeeded(at), strict=True) if is_done]
                if moved:
                    part.glance.worked()
                    self._way.moved(self._roots[part.home], [keys[i] for i in moved])
                done += moved
        return done

    def report(self, reason: str) -> PathReport:
        return PathReport(Io.NATIVE, reason, self._native_blocks, self._python_blocks)

    def close(self, home: int) -> list[threading.Thread]:
        """Have the threads of this root end after what is queued; returns the one that sees to it."""
        return [self._lanes[home].close()]

    def _job(self, part: _Part, keys: Sequence[BlockKey], addresses: Sequence[int]) -> NativeJob:
        root, chosen = self._roots[part.home], [keys[i] for i in part.items]
        blocks = Blocks([root.block_path(key) for key in chosen], chosen, [addresses[i] for i in part.items])
        return NativeJob(self._lanes[part.home], part.recipe, blocks)


def _reaches(recipe: Recipe, view_bytes: int, address: int) -> bool:
    """Whether a block can be moved straight from or to its view: else it needs a buffer, which Python has."""
    is_direct = recipe.open_flags & Access.DIRECT.open_flags
    return view_bytes >= recipe.view_bytes and not (is_direct and address % PAGE_BYTES)


class _Glance:
    """What a breaker of a root is told of a batch that the kernel moves there: a context around it.

    The breaker takes a call that has not ended for long as hung. A batch may well take longer, so it tells of itself as
    one call after another, as long as blocks keep coming.
    """

    def __init__(self, root: Root, breaker: Breaker) -> None:
        self._breaker = breaker
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
        """A block has been read and is sound, or written: so the device works. Without one, Python will say what is
        the matter."""
        self._call.is_glance = False


@dataclass(frozen=True, slots=True)
class _Part:
    """What is moved at one root."""

    home: int
    recipe: Recipe
    items: Sequence[int]
    glance: _Glance
