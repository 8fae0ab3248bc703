"""The file tier: a block a file, in one or several root directories on local disks, NVMe-oF mounts or shared file
systems. Roots share the blocks by weight; each has its own I/O threads."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from forebay.errors import TierUnavailable
from forebay.ports import View
from forebay.tiers.file import layout
from forebay.tiers.file.catalogue import CatalogueSettings, boot_digest
from forebay.tiers.file.directio import REAL_CALLS, Calls, IoPath, Scratch
from forebay.tiers.file.fastpath import FastPath, Io, PathReport, choose
from forebay.tiers.file.format import Shape
from forebay.tiers.file.health import RootState
from forebay.tiers.file.inventory import inventory
from forebay.tiers.file.lanes import Batch, Lanes, Patience, Work, carry_out
from forebay.tiers.file.ledger import Ledger
from forebay.tiers.file.neighbours import say_differences
from forebay.tiers.file.opening import close_roots, fast_reads, fast_writes, open_roots
from forebay.tiers.file.options import Options, check_options, limits
from forebay.tiers.file.placement import Home, order
from forebay.tiers.file.rebuild import log_progress
from forebay.tiers.file.records import Limit
from forebay.tiers.file.root import Root, RootSettings
from forebay.tiers.file.scrub import BackgroundScrub, ScrubLimits
from forebay.types import BlockKey, Change, Happening, Namespace, Outcome, Stored, StoredRun, TierSpec

log = logging.getLogger("forebay.tiers.file")

_MOMENT_NS = 50_000_000


@dataclass(frozen=True, slots=True)
class RootReport:
    """What a root really is, for `forebay doctor`."""

    path: str
    root_id: str
    """Hex; empty for a root that was never seen."""
    weight: float
    state: RootState
    why: str
    """Why it is stopped; empty when it is not."""
    io: IoPath
    events: Mapping[str, int]
    """What has happened there since the tier was opened, by kind: `EIO`, `ENOSPC`, `hung`, `vanished`, ..."""


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


@dataclass(frozen=True, slots=True)
class _Survey:
    """What a write finds out first."""

    held_elsewhere: Set[int]
    """Blocks, by their place in the call, that another root than their home holds."""
    silent: Set[int]
    """Positions of the roots that did not answer."""


def build(options: Options, namespace: Namespace, namespace_digest: bytes) -> FileTier:
    """Raises ConfigError for options that make no sense and when no root can be used."""
    return FileTier(options, namespace, namespace_digest)


class FileTier:
    """A `Tier`. `calls` is the seam at which tests put faults beneath it.

    `clock_ns` is monotonic, `now_s` gives seconds since 1970.
    """

    def __init__(
        self,
        options: Options,
        namespace: Namespace,
        namespace_digest: bytes,
        calls: Calls = REAL_CALLS,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        check_options(options)
        shape = Shape(namespace_digest, namespace.block_bytes)
        self.spec = TierSpec(
            name=options.name,
            capacity_bytes=options.capacity_bytes,
            stored_bytes=shape.stored_bytes,
            read_latency_ns=options.read_latency_ns,
            shared=options.shared,
            quota_bytes=options.tenant_quota_bytes or None,
        )
        self._digest = namespace_digest
        self._namespace_hex = namespace_digest.hex()
        settings = RootSettings(
            shape=shape, namespace=namespace, direct=options.direct, verify=options.verify,
            durability=options.durability, calls=calls, limits=limits(options), clock_ns=clock_ns,
            catalogue=_catalogue_settings(options, namespace, calls, now_s), free_floor_bytes=options.free_floor_bytes,
            ttl_s=options.ttl_s,
        )  # fmt: skip
        choice = choose(options.io, calls, options.durability)
        roots = [Root(Path(os.path.abspath(chosen.path)), settings) for chosen in options.roots]  # noqa: PTH100
        self._closed = False
        self._has_ttl = options.ttl_s > 0
        self._io = choice
        self._fast_reads = fast_reads(choice, roots, options, shape)
        self._fast_writes = fast_writes(choice, roots, options, shape)
        self._clock_ns, self._hang_ns = clock_ns, settings.limits.hang_ns
        try:
            open_roots(roots)
            say_differences((root.path for root in roots), self._namespace_hex, namespace)
            self._begin(roots, options)
        except BaseException:
            close_roots(roots, Patience(options.hang_s))
            raise
        self._ledger = Ledger(
            roots,
            tenant=settings.catalogue.tenant,
            capacity_bytes=options.capacity_bytes,
            quota_bytes=self.spec.quota_bytes,
            budget_bytes=options.write_budget_bytes_per_day or None,
            now_s=now_s,
        )

    def _begin(self, roots: Sequence[Root], options: Options) -> None:
        """Start the threads."""
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
        self._looks: dict[int, Batch] = {}
        """The last look for each root that was never seen, by its position."""
        self._scrub = self._start_scrub(options)

    # --- the port ------------------------------------------------------------------------------

    def contains(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        """One lstat a key, on the caller's thread: it must not queue behind reads."""
        self._check_open()
        self._try_stopped()
        self._ledger.catch_up()
        held = [any(member.root.holds(key) for member in self._in_order(key)) for key in keys]
        self._correct([key for key, is_held in zip(keys, held, strict=True) if not is_held])
        return held

    def read(self, keys: Sequence[BlockKey], into: Sequence[View]) -> Sequence[Outcome]:
        self._check_open()
        self._look_for_new_roots()
        outcomes = [Outcome.MISSING] * len(keys)
        orders = [self._in_order(key) for key in keys]
        if self._has_ttl:
            self._remove_expired(keys, orders)
        homes = {i: members[0].position for i, members in enumerate(orders) if members}
        for i in _move(self._fast_reads, homes, keys, into):
            outcomes[i] = Outcome.OK
            orders[i] = []

        def read_one(i: int, member: _Member, scratch: Scratch) -> bool:
            outcome = member.root.read(keys[i], into[i], scratch)
            if outcome is not Outcome.MISSING:
                outcomes[i] = outcome  # FAILED stands if the roots after this one do no better
            return outcome in (Outcome.OK, Outcome.CORRUPT)

        def stopped(i: int, member: _Member) -> bool:
            if member.root.health.takes_reads():
                return False
            outcomes[i] = Outcome.FAILED
            return True

        # past the home only for blocks written before a root was added, or while their home was away
        self._in_turn(orders, lambda member: member.readers, read_one, stopped)
        self._correct([key for key, outcome in zip(keys, outcomes, strict=True) if outcome is Outcome.MISSING])
        return outcomes

    def write(self, keys: Sequence[BlockKey], views: Sequence[View]) -> Sequence[Outcome]:
        self._check_open()
        self._look_for_new_roots()
        self._try_stopped()
        outcomes = [Outcome.FAILED] * len(keys)
        orders = [self._in_order(key) for key in keys]
        survey = self._survey(keys, orders)
        for i in survey.held_elsewhere:
            outcomes[i] = Outcome.OK
            orders[i] = []
        takers = {member.position for member in self._members if member.root.health.takes_writes()} - survey.silent

        def write_one(i: int, member: _Member, scratch: Scratch) -> bool:
            outcome = member.root.write(keys[i], views[i], scratch)
            if outcome is not Outcome.FAILED:
                outcomes[i] = outcome  # FULL stands if the roots after this one do no better
            return outcome is Outcome.OK

        def stopped(i: int, member: _Member) -> bool:
            return i in full or member.position not in takers

        full: set[int] = set()
        """Blocks for which there is no room in the whole pool."""

        @contextlib.contextmanager
        def with_room(at_root: Mapping[int, Sequence[int]]) -> Iterator[Mapping[int, Sequence[int]]]:
            with contextlib.ExitStack() as settled:
                granted: dict[int, Sequence[int]] = {}
                for at, items in at_root.items():
                    root, wanted = self._members[at].root, [keys[i] for i in items]
                    reserved = self._ledger.reserve(root, wanted)
                    settled.callback(root.settle, [key for key in wanted if key not in reserved.refused])
                    full.update(i for i in items if keys[i] in reserved.full)
                    for i in items:
                        outcomes[i] = Outcome.FULL if keys[i] in reserved.at_floor else outcomes[i]
                    granted[at] = [i for i in items if keys[i] not in reserved.refused]
                homes = {i: at for at, items in granted.items() for i in items}
                for i in _move(self._fast_writes, homes, keys, views):
                    outcomes[i] = Outcome.OK
                    orders[i] = []
                yield {at: [i for i in items if orders[i]] for at, items in granted.items()}

        self._in_turn(orders, lambda member: member.writers, write_one, stopped, with_room)
        return [Outcome.FULL if i in full else outcome for i, outcome in enumerate(outcomes)]

    def delete(self, keys: Sequence[BlockKey]) -> Sequence[Outcome]:
        """Blocks of other namespaces too, if they have the key."""
        self._check_open()
        self._ledger.catch_up()
        outcomes = [Outcome.OK] * len(keys)
        everywhere = {m.position: m.root for m in self._placement.members if m.root.health.takes_deletes()}
        removals = {at: root.removal(keys) for at, root in everywhere.items()}

        def delete_one(i: int, member: _Member, scratch: Scratch) -> None:
            for namespace_hex in removals[member.position].namespaces_of(keys[i]):
                if member.root.delete(namespace_hex, keys[i]) is not Outcome.OK:
                    outcomes[i] = Outcome.FAILED

        with contextlib.ExitStack() as settled:
            for removal in removals.values():
                settled.enter_context(removal)
            self._run(dict.fromkeys(everywhere, range(len(keys))), lambda member: member.writers, delete_one)
        return outcomes

    def scan(self) -> Iterator[Stored]:
        for run in self.inventory():
            for key in run.keys:
                yield Stored(key, run.stored_bytes)

    def inventory(self) -> Iterator[StoredRun]:
        """A `Catalogued` tier."""
        self._check_open()
        self._ledger.catch_up()
        return inventory(self._ledger.spaces(), self._ledger.tenant)

    def changes(self) -> Sequence[Change]:
        """A `Watched` tier: noticed by every lookup, write and delete, and when a block is missing."""
        return self._ledger.take_changes()

    def write_budget_bytes(self) -> int | None:
        """A `Metered` tier."""
        return self._ledger.budget_left_bytes()

    def close(self) -> None:
        """Finish what is queued and end the I/O threads; none that hangs is waited for longer than `hang_s`.

        The catalogue of a root in which something hangs stays open, until the process ends: it says what may yet happen
        there. Safe to call twice.
        """
        self._closed = True
        patience = Patience(self._hang_ns / 1e9)
        hanging = self._scrub.close() if self._scrub is not None else []
        at_root = {
            member: [*member.readers.close(), *member.writers.close(), *self._end_fast(member)]
            for member in self._members
        }
        hanging = patience.outlast(hanging)
        for member, threads in at_root.items():
            left = [*hanging, *patience.outlast(threads)]
            left = left or patience.outlast([member.root.close()])
            if left:
                log.error(
                    "root %s: %d threads still hang, %s among them: they are left behind",
                    member.root.path, len(left), left[0].name,
                )  # fmt: skip

    def _end_fast(self, member: _Member) -> list[threading.Thread]:
        paths = [path for path in (self._fast_reads, self._fast_writes) if path is not None]
        return [thread for path in paths for thread in path.close(member.position)]

    def route(self, key: BlockKey) -> int:
        """A `Routed` tier: the position of the block's home among the roots."""
        return self._in_order(key)[0].position

    # --- beyond the port -----------------------------------------------------------------------

    @property
    def used_bytes(self) -> int:
        """Bytes that blocks occupy, or for which room is reserved, in all namespaces and over all processes."""
        self._ledger.catch_up()
        return self._ledger.used_bytes

    def describe(self) -> tuple[RootReport, ...]:
        """The path that each root really got, in the order of the options."""
        return tuple(_report(member) for member in self._members)

    def happened(self) -> Mapping[Happening, int]:
        """An `Observed` tier."""
        return {
            Happening(self.spec.name, str(member.position), kind): times
            for member in self._members
            for kind, times in member.root.health.events.items()
        }

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

    def reads(self) -> PathReport:
        """Who reads blocks here, and how many so far."""
        return _path_report(self._fast_reads, self._io.reads.reason)

    def writes(self) -> PathReport:
        """Who writes blocks here, and how many so far."""
        return _path_report(self._fast_writes, self._io.writes.reason)

    def stand_aside(self, demand_waits: bool) -> None:
        """A `Scrubbing` tier."""
        if self._scrub is not None:
            self._scrub.demand_waits = demand_waits

    def limit_scrub(self, bytes_per_s: float | None) -> None:
        """A `Scrubbing` tier."""
        if self._scrub is not None:
            self._scrub.pace.bytes_per_s = bytes_per_s or self._scrub.limits.bytes_per_s

    def scrub_bytes_per_s(self) -> float:
        """A `Scrubbing` tier."""
        return self._scrub.pace.bytes_per_s if self._scrub is not None else 0.0

    def scrubbed_bytes(self) -> int:
        """A `Scrubbing` tier."""
        return self._scrub.read_bytes if self._scrub is not None else 0

    def _start_scrub(self, options: Options) -> BackgroundScrub | None:
        if not options.scrub_bytes_per_s:
            return None
        roots = {member.root.path: member.root for member in self._members}
        health = {path: root.health for path, root in roots.items()}

        def well() -> list[Path]:
            return [path for path in health if health[path].state is RootState.ONLINE]

        limits = ScrubLimits(bytes_per_s=options.scrub_bytes_per_s, ttl_s=options.ttl_s)
        return BackgroundScrub(
            well,
            limits,
            noticed=lambda path, kind: health[path].count(kind),
            removing=lambda path, file: roots[path].scrubbing(file),
        )

    # --- placement -----------------------------------------------------------------------------

    def _in_order(self, key: BlockKey) -> list[_Member]:
        """The key's home, then the other roots in the order in which they stand in for it."""
        placement = self._placement
        return [placement.members[i] for i in order(placement.homes, key)]

    def _look_for_new_roots(self) -> None:
        """Roots that were never seen yet have no place in the placement: see whether they have come.

        In their own threads, and a moment is waited for each look: a mount that hangs must not hold up the others.
        """
        if len(self._placement.members) == len(self._members):
            return
        for member in self._members:
            last = self._looks.get(member.position)
            if member.root.root_id is None and (last is None or last.is_through):
                look = member.readers.start(lambda _, __, root=member.root: root.check(), [0])  # type: ignore[misc]
                self._looks[member.position] = look
                look.wait_until(time.monotonic_ns() + _MOMENT_NS, time.monotonic_ns)
        self._placement = _placement(self._members)

    def _try_stopped(self) -> None:
        """Have stopped roots tried when it is time, in their own threads: maybe nobody reads there any more."""
        for member in self._members:
            if member.root.health.reads.is_due():
                root = member.root
                member.readers.start(lambda _, scratch, root=root: root.try_again(scratch), [0])  # type: ignore[misc]

    def _survey(self, keys: Sequence[BlockKey], orders: Sequence[Sequence[_Member]]) -> _Survey:
        """Before a write: see whether the roots are there, and hold the blocks of others.

        Each in its own threads, and none is waited for longer than a hang: one root must not hold up the others.
        """
        held: set[int] = set()
        alone = len(self._placement.members) == 1

        def look(position: int) -> None:
            root = self._members[position].root
            root.check()
            if alone:
                return
            for i, members in enumerate(orders):
                if members[0].position != position and root.holds(keys[i]):
                    held.add(i)

        if alone:
            look(self._placement.members[0].position)
            return _Survey(held, frozenset())
        batches = {
            member.position: member.readers.start(lambda at, _: look(at), [member.position])
            for member in self._placement.members
            if member.root.health.takes_reads()
        }
        deadline_ns = self._clock_ns() + self._hang_ns
        silent = {at for at, batch in batches.items() if not batch.wait_until(deadline_ns, self._clock_ns)}
        for at in silent:
            log.warning("root %s has not answered a lookup: this write passes it by", self._members[at].root.path)
        return _Survey(held, frozenset(silent))

    def _remove_expired(self, keys: Sequence[BlockKey], orders: list[list[_Member]]) -> None:
        """Take roots in which a block is too old out of its order, and the block out of them: its room is needed."""
        at_root: dict[int, list[int]] = {}
        for i, members in enumerate(orders):
            expired = [member.position for member in members if member.root.has_expired(keys[i])]
            orders[i] = [member for member in members if member.position not in expired]
            for at in expired:
                at_root.setdefault(at, []).append(i)

        def remove_one(i: int, member: _Member, scratch: Scratch) -> None:
            if member.root.has_expired(keys[i]):  # still: it may just have been written anew
                member.root.delete(self._namespace_hex, keys[i])

        with contextlib.ExitStack() as settled:
            for at, items in at_root.items():
                settled.enter_context(self._members[at].root.removal([keys[i] for i in items]))
            self._run(at_root, lambda member: member.writers, remove_one)

    def _in_turn(
        self,
        orders: Sequence[Sequence[_Member]],
        lanes_of: Callable[[_Member], Lanes],
        work: Callable[[int, _Member, Scratch], bool],
        passes_by: Callable[[int, _Member], bool],
        around: Callable[
            [Mapping[int, Sequence[int]]], contextlib.AbstractContextManager[Mapping[int, Sequence[int]]]
        ] = contextlib.nullcontext,
    ) -> None:
        """Do item i at the first root of its order, and if that does not settle it, at the next; return when all are.

        Every root works in its own threads, so what hangs there holds up no other root. `passes_by` is asked before an
        item is queued: a root that would refuse it must not make it wait. `around` takes the items by the positions of
        their roots before they are begun, and gives those that may be.
        """
        settled = [False] * len(orders)

        def work_one(i: int, member: _Member, scratch: Scratch) -> None:
            settled[i] = work(i, member, scratch)

        for turn in range(len(self._placement.members)):
            at_root: dict[int, list[int]] = {}
            for i, members in enumerate(orders):
                if not settled[i] and turn < len(members) and not passes_by(i, members[turn]):
                    at_root.setdefault(members[turn].position, []).append(i)
            if at_root:
                with around(at_root) as admitted:
                    self._run(admitted, lanes_of, work_one)

    def _correct(self, missing: Sequence[BlockKey]) -> None:
        """Have those looked at that the catalogues claim nevertheless."""
        for member in self._placement.members:
            if missing and member.root.health.state is RootState.ONLINE:
                member.root.correct(missing)

    def _run(
        self,
        at_root: Mapping[int, Sequence[int]],
        lanes_of: Callable[[_Member], Lanes],
        work: Callable[[int, _Member, Scratch], None],
    ) -> None:
        """Do these items in the lanes of these roots, all roots at once; return when all are done."""
        members = {at: self._members[at] for at in at_root}
        carry_out([(lanes_of(member), Batch(_at(member, work), at_root[at])) for at, member in members.items()])

    def _check_open(self) -> None:
        if self._closed:
            raise TierUnavailable("the file tier is closed")


def _at(member: _Member, work: Callable[[int, _Member, Scratch], None]) -> Work:
    return lambda i, scratch: work(i, member, scratch)


def _placement(members: Sequence[_Member]) -> _Placement:
    known = [(member, member.root.root_id) for member in members if member.root.root_id is not None]
    homes = tuple(Home(root_id, member.weight) for member, root_id in known)
    return _Placement(tuple(member for member, _ in known), homes)


def _report(member: _Member) -> RootReport:
    root = member.root
    health = root.health
    return RootReport(
        path=str(root.path),
        root_id=(root.root_id or b"").hex(),
        weight=member.weight,
        state=health.state,
        why=health.why,
        io=root.io,
        events=health.events,
    )


def _catalogue_settings(
    options: Options, namespace: Namespace, calls: Calls, now_s: Callable[[], float]
) -> CatalogueSettings:
    return CatalogueSettings(
        calls=calls,
        now_s=now_s,
        boot=boot_digest(),
        tenant=layout.tenant_bytes(namespace),
        limits={
            Limit.CAPACITY_BYTES: options.capacity_bytes,
            Limit.BUDGET_BYTES_PER_DAY: options.write_budget_bytes_per_day,
            Limit.ENDURANCE_BYTES: options.endurance_bytes,
        },
        progress=log_progress,
        patience_s=options.hang_s,
    )


def _move(
    path: FastPath | None, homes: Mapping[int, int], keys: Sequence[BlockKey], views: Sequence[View]
) -> Sequence[int]:
    """What the compiled kernel, if there is one, has done of the blocks that have a home."""
    items = list(homes)
    if path is None or not items:
        return ()
    return [items[at] for at in path.move(list(homes.values()), [keys[i] for i in items], [views[i] for i in items])]


def _path_report(path: FastPath | None, reason: str) -> PathReport:
    return path.report(reason) if path is not None else PathReport(Io.PYTHON, reason)
