"""The file tier: a block a file, in one or several root directories on local disks, NVMe-oF mounts or shared file
systems. Roots share the blocks by weight; each has its own I/O threads."""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from forebay.errors import ConfigError, TierUnavailable
from forebay.ports import View
from forebay.tiers.file import layout
from forebay.tiers.file.blockfile import Verify
from forebay.tiers.file.directio import REAL_CALLS, Calls, DirectMode, IoPath, Scratch
from forebay.tiers.file.format import Shape
from forebay.tiers.file.lanes import Batch, Lanes
from forebay.tiers.file.placement import Home, order
from forebay.tiers.file.root import Durability, Root, RootSettings, RootState
from forebay.types import BlockKey, Namespace, Outcome, Stored, TierSpec

log = logging.getLogger("forebay.tiers.file")


class RootOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One directory that holds blocks."""

    path: str
    """Made if its parent exists. On a mount, name a directory two levels below the mount point: then a disk that is
    not mounted is an absent root, and not a new one on the disk beneath."""
    weight: float = 1.0
    """Share of the blocks, relative to the other roots."""


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    roots: tuple[RootOptions, ...]
    capacity_bytes: int
    """Over all roots, headers and padding included. The engine keeps to it; the tier reports it."""
    name: str = "file"
    reads_in_flight: int = 8
    """I/O threads for reads, a root."""
    writes_in_flight: int = 4
    """I/O threads for writes and deletes, a root."""
    verify: Verify = Verify.PAYLOAD
    direct: DirectMode = DirectMode.AUTO
    durability: Durability = Durability.NONE
    read_latency_ns: int = 150_000
    """Typical time to the first byte; orders the tiers."""
    shared: bool = False
    """Other processes add and remove blocks in the same roots."""


@dataclass(frozen=True, slots=True)
class RootReport:
    """What a root really is, for `forebay doctor`."""

    path: str
    root_id: str
    """Hex; empty for a root that was never seen."""
    weight: float
    state: RootState
    io: IoPath


@dataclass(frozen=True, slots=True)
class _Member:
    position: int
    """In the order of the options."""
    root: Root
    weight: float
    readers: Lanes
    writers: Lanes


@dataclass(frozen=True, slots=True)
class _Placement:
    """The roots whose identity is known, whether or not they are there right now."""

    members: tuple[_Member, ...]
    homes: tuple[Home, ...]
    """In parallel with `members`."""


def build(options: Options, namespace: Namespace, namespace_digest: bytes) -> FileTier:
    """Raises ConfigError for options that make no sense and when no root can be used."""
    return FileTier(options, namespace, namespace_digest)


class FileTier:
    """A `Tier`. `calls` is the seam at which tests put faults beneath it."""

    def __init__(
        self, options: Options, namespace: Namespace, namespace_digest: bytes, calls: Calls = REAL_CALLS
    ) -> None:
        _check_options(options)
        shape = Shape(namespace_digest, namespace.block_bytes)
        self.spec = TierSpec(
            name=options.name,
            capacity_bytes=options.capacity_bytes,
            stored_bytes=shape.stored_bytes,
            read_latency_ns=options.read_latency_ns,
            shared=options.shared,
        )
        self._namespace_hex = namespace_digest.hex()
        self._elsewhere: dict[BlockKey, tuple[str, ...]] = {}
        """Blocks that `scan` found in other namespaces, and in which."""
        settings = RootSettings(
            shape=shape, namespace=namespace, direct=options.direct, verify=options.verify,
            durability=options.durability, calls=calls,
        )  # fmt: skip
        roots = _open_roots(options, settings)
        self._closed = False
        self._members = tuple(
            _Member(
                i,
                root,
                chosen.weight,
                Lanes(f"forebay-{options.name}-{i}-read", options.reads_in_flight),
                Lanes(f"forebay-{options.name}-{i}-write", options.writes_in_flight),
            )
            for i, (root, chosen) in enumerate(zip(roots, options.roots, strict=True))
        )
        self._placement = _placement(self._members)

    # --- the port ------------------------------------------------------------------------------

    def contains(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        """One lstat a key, on the caller's thread: it must not queue behind reads."""
        self._check_open()
        return [any(member.root.holds(key) for member in self._in_order(key)) for key in keys]

    def read(self, keys: Sequence[BlockKey], into: Sequence[View]) -> Sequence[Outcome]:
        self._check_open()
        outcomes = [Outcome.FAILED] * len(keys)
        if any(member.root.state is RootState.ABSENT for member in self._members):
            self._check_roots()
        orders = [self._in_order(key) for key in keys]

        def read_one(i: int, scratch: Scratch) -> None:
            outcome = Outcome.MISSING
            for member in orders[i]:  # past the home only for blocks written before a root was added
                outcome = member.root.read(keys[i], into[i], scratch)
                if outcome is not Outcome.MISSING:
                    break
            outcomes[i] = outcome

        self._run(orders, lambda member: member.readers, read_one)
        if Outcome.MISSING in outcomes:
            self._check_roots()
        return outcomes

    def write(self, keys: Sequence[BlockKey], views: Sequence[View]) -> Sequence[Outcome]:
        self._check_open()
        outcomes = [Outcome.FAILED] * len(keys)
        self._check_roots()
        orders = [self._in_order(key) for key in keys]

        def write_one(i: int, scratch: Scratch) -> None:
            if any(member.root.holds(keys[i]) for member in orders[i][1:]):
                outcomes[i] = Outcome.OK
                return
            for member in orders[i]:
                if member.root.state is RootState.ABSENT:
                    continue
                outcome = member.root.write(keys[i], views[i], scratch)
                if outcome is not Outcome.FAILED:
                    outcomes[i] = outcome  # FULL stands if the roots after this one do no better
                if outcome is Outcome.OK:
                    break

        self._run(orders, lambda member: member.writers, write_one)
        return outcomes

    def delete(self, keys: Sequence[BlockKey]) -> Sequence[Outcome]:
        """Blocks of other namespaces too, if `scan` found them."""
        self._check_open()
        outcomes = [Outcome.OK] * len(keys)
        orders = [self._in_order(key) for key in keys]

        def delete_one(i: int, scratch: Scratch) -> None:
            namespaces = {self._namespace_hex, *self._elsewhere.get(keys[i], ())}
            for member in orders[i]:
                for namespace_hex in namespaces:
                    if member.root.delete(namespace_hex, keys[i]) is not Outcome.OK:
                        outcomes[i] = Outcome.FAILED

        self._run(orders, lambda member: member.writers, delete_one)
        for key, outcome in zip(keys, outcomes, strict=True):
            if outcome is Outcome.OK:
                self._elsewhere.pop(key, None)
        return outcomes

    def scan(self) -> Iterator[Stored]:
        self._check_open()
        seen: set[BlockKey] = set()
        more_bytes: Counter[BlockKey] = Counter()  # one key in several roots or namespaces: all of it takes room
        aged: list[tuple[int, Stored]] = []
        for root in [str(member.root.path) for member in self._members]:
            for namespace_hex in layout.walk_namespaces(root):
                for block in layout.walk_blocks(root, namespace_hex):
                    if not block.is_regular:
                        continue
                    if namespace_hex != self._namespace_hex:
                        self._elsewhere[block.key] = (*self._elsewhere.get(block.key, ()), namespace_hex)
                    if block.key in seen:
                        more_bytes[block.key] += block.length_bytes
                    else:
                        seen.add(block.key)
                        aged.append((block.mtime_ns, Stored(block.key, block.length_bytes)))
        aged.sort(key=lambda entry: entry[0])
        for _, stored in aged:
            more = more_bytes.get(stored.key)
            yield Stored(stored.key, stored.stored_bytes + more) if more else stored

    def close(self) -> None:
        """Finish what is queued and end the I/O threads. Safe to call twice."""
        self._closed = True
        for member in self._members:
            member.readers.close()
            member.writers.close()

    def route(self, key: BlockKey) -> int:
        """A `Routed` tier: the position of the block's home among the roots."""
        return self._in_order(key)[0].position

    # --- beyond the port -----------------------------------------------------------------------

    def describe(self) -> tuple[RootReport, ...]:
        """The path that each root really got, in the order of the options."""
        return tuple(_report(member) for member in self._members)

    def drop_page_cache(self) -> None:
        """Make the next read of every block of this namespace a cold one, as far as this system's cache goes."""
        os.sync()
        for member in self._members:
            for block in layout.walk_blocks(str(member.root.path), self._namespace_hex):
                try:
                    descriptor = os.open(block.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
                except OSError:
                    continue  # deleted meanwhile
                try:
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                finally:
                    os.close(descriptor)

    # --- placement -----------------------------------------------------------------------------

    def _in_order(self, key: BlockKey) -> list[_Member]:
        """The key's home, then the other roots in the order in which they stand in for it."""
        placement = self._placement
        return [placement.members[i] for i in order(placement.homes, key)]

    def _check_roots(self) -> None:
        for member in self._members:
            member.root.check()
        if len(self._placement.members) < len(self._members):
            self._placement = _placement(self._members)

    def _run(
        self,
        orders: Sequence[Sequence[_Member]],
        lanes_of: Callable[[_Member], Lanes],
        work: Callable[[int, Scratch], None],
    ) -> None:
        """Do item i in the lanes of its home, all roots at once; return when all are done."""
        by_home: dict[int, list[int]] = {}
        for i, members in enumerate(orders):
            by_home.setdefault(members[0].position, []).append(i)
        batches: list[Batch] = []
        try:
            for at, items in by_home.items():
                batches.append(lanes_of(self._members[at]).start(work, items))
        finally:
            with contextlib.ExitStack() as all_ended:  # the views are the caller's again, also after an exception
                for batch in batches:
                    all_ended.callback(batch.wait)

    def _check_open(self) -> None:
        if self._closed:
            raise TierUnavailable("the file tier is closed")


def _placement(members: Sequence[_Member]) -> _Placement:
    known = [(member, member.root.root_id) for member in members if member.root.root_id is not None]
    homes = tuple(Home(root_id, member.weight) for member, root_id in known)
    return _Placement(tuple(member for member, _ in known), homes)


def _report(member: _Member) -> RootReport:
    root = member.root
    return RootReport(str(root.path), (root.root_id or b"").hex(), member.weight, root.state, root.io)


def _open_roots(options: Options, settings: RootSettings) -> list[Root]:
    roots = [Root(Path(os.path.abspath(chosen.path)), settings) for chosen in options.roots]  # noqa: PTH100
    for root in roots:
        root.open()
    if all(root.state is RootState.ABSENT for root in roots):
        reasons = "; ".join(_trouble(root) for root in roots)
        raise ConfigError(
            f"no root of the file tier can be used ({reasons}): make the parent directory, mount the disk, or name "
            "another directory"
        )
    known = [root.root_id for root in roots if root.root_id is not None]
    if len(set(known)) < len(known):
        raise ConfigError("two roots of the file tier have the same identity: one is a copy, name only one of them")
    return roots


def _trouble(root: Root) -> str:
    """Why a root could not be opened, its path included."""
    marker = root.path / layout.MARKER
    return f"{marker} is a link to nothing" if marker.is_symlink() and not marker.exists() else root.trouble


def _check_options(options: Options) -> None:
    if not options.roots:
        raise ConfigError("the file tier has no roots: name at least one directory")
    for root in options.roots:
        if not root.path or "\0" in root.path:
            raise ConfigError(f"the file tier cannot use {root.path!r} as a root: name a directory")
    paths = [os.path.realpath(root.path) for root in options.roots]
    if len(set(paths)) < len(paths):
        raise ConfigError("the file tier names the same root twice: name each directory once")
    for root in options.roots:
        if not (root.weight > 0 and math.isfinite(root.weight)):
            raise ConfigError(f"root {root.path}: weight {root.weight} must be a positive number")
    for name in ("capacity_bytes", "reads_in_flight", "writes_in_flight"):
        if getattr(options, name) < 1:
            raise ConfigError(f"file tier: {name} must be 1 or more, not {getattr(options, name)}")
