"""What one root holds, as all processes that share it know it: who is allowed to write how much, and what is there.

A publication or a removal of blocks goes:

    reserve / intend  --> INTENT in the catalogue, for the whole batch at once
    files are renamed into place, or unlinked
    settle            --> HELD, WRITTEN or GONE: what the disk says then, looked at under the lock

Whoever changes a file settles afterwards, so the last word on a block was said after its last change. A writer that
dies in between leaves its intents; they stay counted until the next opening, or until somebody needs the room, and are
then settled by a look at the disk for each. So no crash leaves a file that nobody counts.

On any doubt the catalogue is made anew from the files. Without locks, or on a root that cannot be written to, it is
kept in memory, and then it knows only what the opening found and this process did.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import secrets
import stat
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from forebay.tiers.file import layout
from forebay.tiers.file.directio import Calls
from forebay.tiers.file.holdings import Holdings, Meter, Space, differences
from forebay.tiers.file.journal import MOMENT_S, Journal, NoFile, NoLocks
from forebay.tiers.file.rebuild import Progress, rebuild
from forebay.tiers.file.records import Doubtful, Limit, Operation, Record, Records, decode, encode
from forebay.types import BlockKey, Change, ChangeKind

log = logging.getLogger("forebay.tiers.file")

_MOST_CHANGES = 10_000
_OPENING_S = 120.0
"""The same when it is opened: another process may just be making it anew, which takes about 15 s a million blocks."""
_SPARE_RECORDS = 16_384
"""1 MiB: a file shorter than this is never worth replacing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueSettings:
    calls: Calls
    now_s: Callable[[], float]
    """Seconds since 1970."""
    boot: int
    """Tells this run of the machine from others: what a writer of another one did may not have reached the medium."""
    tenant: bytes
    """Digest of this process's tenant; zeros without one."""
    limits: Mapping[Limit, int]
    """What this process keeps to, for people who look at the pool."""
    progress: Progress
    """Told while the catalogue is made anew: the root and the blocks found so far."""
    patience_s: float
    """How long another process may hold the lock before what needs it fails."""


def boot_digest() -> int:
    """0 where the system does not say."""
    try:
        return xxhash.xxh3_64_intdigest(Path("/proc/sys/kernel/random/boot_id").read_bytes())
    except OSError:
        return 0


_Name = tuple[bytes, BlockKey]
"""Digest of the namespace, and the block's key."""


class Catalogue:
    """Thread-safe. Opened when made; `close` once it is not used any more."""

    def __init__(
        self, root: Path, settings: CatalogueSettings, noticed: Callable[[str], None] = lambda kind: None
    ) -> None:
        """`noticed` is told the name of each error that kept something from being written down."""
        self._root, self._settings, self._noticed = str(root), settings, noticed
        self._writer = 1 + secrets.randbits(62)
        self._mutex = threading.Lock()
        self._changes: deque[Change] = deque()
        self._is_watched = False
        self._busy: dict[_Name, list[int]] = {}
        """Blocks that threads of this process are publishing or removing, with the bytes that each has reserved."""
        self._owed: dict[_Name, Operation] = {}
        """Blocks whose settlement could not be written down."""
        self._holdings = Holdings(self._settings.tenant)
        self.trouble = ""
        """Why it is not kept on the disk; empty when it is."""
        self._journal: Journal | None = None
        with self._mutex:
            self._open()

    def close(self) -> None:
        """All is settled, and what is written down is on the medium. A thread may still wait for the root: it fails."""
        with self._mutex:
            if self._journal is None:
                return
            try:
                with self._locked(self._settings.patience_s) as journal:
                    if journal is not None:
                        self._catch_up(journal)
                        self._pay()
                        self._shorten(spare=1.25)
                        self._append([Record(Operation.CLOSED, time_s=self._now_s(), writer=self._writer)])
                        journal.sync()
            except OSError as error:
                log.warning("root %s: its catalogue could not be closed: %s", self._root, error)
            finally:
                last, self._journal = self._journal, None  # not always the one that it began with
                if last is not None:
                    last.close()

    # --- what is held; any thread, without waiting ----------------------------------------------

    @property
    def is_kept(self) -> bool:
        """Whether it is on the disk, for all processes."""
        return self._journal is not None

    @property
    def used_bytes(self) -> int:
        return self._holdings.used_bytes

    @property
    def reserved_bytes(self) -> int:
        """Of the used ones: for blocks that are about to be written, over all processes."""
        return sum(space.reserved_bytes for space in self._holdings.spaces)

    @property
    def blocks(self) -> int:
        return self._holdings.blocks

    @property
    def meter(self) -> Meter:
        return self._holdings.meter

    @property
    def limits(self) -> Mapping[Limit, int]:
        """What the stores that opened it last were told to keep to."""
        return self._holdings.limits

    def tenant_bytes(self, tenant: bytes) -> int:
        return self._holdings.tenant_bytes(tenant)

    def spaces(self) -> Sequence[Space]:
        return self._holdings.spaces

    def claims(self, digest: bytes, key: BlockKey) -> bool:
        space = self._holdings.space(digest)
        return space is not None and key in space.held

    def namespaces_of(self, key: BlockKey) -> list[bytes]:
        """Digests of the namespaces that hold the block."""
        return [space.digest for space in self._holdings.spaces if key in space.held]

    def take_changes(self) -> list[Change]:
        """What others added and removed since the last call, as far as it was noticed; also what `removing` removed.

        So many at a time. Watching begins with the first call: nothing is kept for those who never ask.
        """
        self._is_watched = True
        taken: list[Change] = []
        while self._changes and len(taken) < _MOST_CHANGES:
            taken.append(self._changes.popleft())
        return taken

    def tell_held(self) -> None:
        """The root is back: what it holds comes as added, since who gave it up may have forgotten that."""
        with self._mutex:
            for space in self._holdings.spaces:
                self._notice(
                    Change(key, space.length_bytes(key) or 0, ChangeKind.ADDED, space.tenant == self._settings.tenant)
                    for key in space.held
                )

    # --- what changes --------------------------------------------------------------------------

    def catch_up(self) -> None:
        """Read what others have written, unless somebody is at it. Takes no lock that another process may hold."""
        if self._journal is None or not self._mutex.acquire(blocking=False):
            return
        try:
            if self._journal is not None and self._journal.is_open:
                self._follow(self._journal.read_on())
                if self._holdings.successor is not None:
                    self._succeed(self._journal)
        except (Doubtful, OSError):  # under the lock it is looked at closely
            if self._journal is not None:
                self._journal.drop_file()
        finally:
            self._mutex.release()

    def refresh(self) -> None:
        """As `catch_up`; what cannot be followed is read from its beginning, under the lock.

        Not for those who hold the lock of another root: two of them could wait for each other.
        """
        self.catch_up()
        journal = self._journal
        if journal is not None and not journal.is_open:
            with contextlib.suppress(OSError), self._session(MOMENT_S):
                pass

    def reserve(
        self, digest: bytes, keys: Sequence[BlockKey], stored_bytes: int, room_bytes: Callable[[], int]
    ) -> list[BlockKey]:
        """Reserve room for a write of each block, as far as there is any; returns those for which there is.

        A block that is held already needs none. `room_bytes` is asked while nobody else can reserve here. Settle those
        returned. Raises OSError when it cannot be written down; then nothing is reserved.
        """
        with self._session():
            space = self._holdings.space(digest)
            fresh = [key for key in dict.fromkeys(keys) if space is None or key not in space.held]
            fit = max(0, room_bytes()) // stored_bytes
            if fit < len(fresh) and self._settle_the_dead():
                fit = max(0, room_bytes()) // stored_bytes
            refused = set(fresh[fit:])
            taken = [key for key in keys if key not in refused]
            try:
                self._intend(digest, taken, dict.fromkeys(fresh, stored_bytes))
            except OSError as error:  # some of it may be written down
                names = [(digest, key) for key in taken]
                for name in names:
                    self._leave(name)
                self._owe(dict.fromkeys(names, Operation.HELD), error)
                raise
            return taken

    def correct(self, digest: bytes, keys: Iterable[BlockKey]) -> None:
        """Look at these blocks, which may not be what the catalogue says, and write down what they are.

        At the next occasion, if another process holds the lock: nobody shall wait for this.
        """
        wanted = {(digest, key): Operation.HELD for key in keys}
        try:
            with self._session(MOMENT_S):
                self._settle(wanted)
        except OSError as error:
            self._owe(wanted, error)

    def intend(self, digest: bytes, keys: Sequence[BlockKey]) -> None:
        """Before blocks are removed. Settle them afterwards, also after an OSError."""
        with self._session():
            self._intend(digest, keys, {})

    @contextlib.contextmanager
    def removing(self, digest: bytes, keys: Sequence[BlockKey]) -> Iterator[None]:
        """Around whatever takes files of blocks away unasked, such as a scrub: those that are gone come as changes."""
        with contextlib.suppress(OSError):  # a full disk: removing is what helps, and is written down then
            self.intend(digest, keys)
        lengths_bytes = {key: self._length_bytes(digest, key) for key in keys}
        try:
            yield
        finally:
            self.settle(digest, keys)
            self._notice(
                Change(key, length_bytes, ChangeKind.REMOVED, self._is_ours(digest))
                for key, length_bytes in lengths_bytes.items()
                if length_bytes is not None and not self.claims(digest, key)
            )

    def settle(self, digest: bytes, keys: Iterable[BlockKey], written: Collection[BlockKey] = ()) -> None:
        """Write down what the disk holds of these blocks now. What cannot be written down is, at the next occasion."""
        wanted = {(digest, key): Operation.WRITTEN if key in written else Operation.HELD for key in keys}
        if not wanted:
            return
        with self._mutex:
            for name in wanted:
                self._leave(name)
        try:
            with self._session():
                self._settle(wanted)
                self._shorten(spare=2.0)
        except OSError as error:
            self._owe(wanted, error)

    def _length_bytes(self, digest: bytes, key: BlockKey) -> int | None:
        space = self._holdings.space(digest)
        return None if space is None else space.length_bytes(key)

    def _is_ours(self, digest: bytes) -> bool:
        space = self._holdings.space(digest)
        return space is not None and space.tenant == self._settings.tenant

    # --- under the mutex and the lock ------------------------------------------------------------

    @contextlib.contextmanager
    def _session(self, patience_s: float | None = None) -> Iterator[None]:
        """All that anybody wrote is known, and nobody else writes. Raises OSError, also when that takes too long."""
        patience_s = self._settings.patience_s if patience_s is None else patience_s
        if not self._mutex.acquire(timeout=patience_s):
            raise OSError(errno.ETIMEDOUT, f"another thread has been at it for {patience_s:g} s", self._root)
        try:
            if self._journal is None:
                yield
                return
            with self._locked(patience_s) as journal:
                if journal is not None:
                    self._catch_up(journal)
                if self._owed:
                    self._pay()
                yield
        finally:
            self._mutex.release()

    @contextlib.contextmanager
    def _locked(self, patience_s: float) -> Iterator[Journal | None]:
        """The lock is that of the root as it is now: the root may have been away, or somebody tidied up.

        None if it has come back without locks: then it is kept in memory from now on.
        """
        while (journal := self._journal) is not None:
            with journal.locked(patience_s):
                if not journal.is_detached():
                    yield journal
                    return
            try:
                self._journal = Journal(self._settings.calls, self._root, self._writer)
            except NoLocks as error:
                self._keep_in_memory(error)
                log.warning(
                    "root %s: its catalogue is kept in memory (%s): the capacity holds for this process alone",
                    self._root, self.trouble,
                )  # fmt: skip
            else:
                journal.close()
        yield None

    def _pay(self) -> None:
        owed, self._owed = self._owed, {}
        try:
            self._settle(owed)
        except OSError:
            self._owed = owed

    def _intend(self, digest: bytes, keys: Sequence[BlockKey], reserved_bytes: Mapping[BlockKey, int]) -> None:
        for key in keys:
            self._busy.setdefault((digest, key), []).append(reserved_bytes.get(key, 0))
        number, now_s = self._number(digest), self._now_s()
        self._append(
            [Record(Operation.INTENT, number, now_s, reserved_bytes.get(key, 0), self._writer, key) for key in keys]
        )

    def _settle(self, wanted: Mapping[_Name, Operation], dead_writer: int | None = None) -> None:
        """Look at the disk, and end the intents of this writer, or of a dead one, with what it says."""
        records: list[Record] = []
        writer = self._writer if dead_writer is None else dead_writer
        for (digest, key), operation in wanted.items():
            number = self._number(digest)
            records.append(self._truth(number, (digest, key), operation, writer))
            if dead_writer is None and (digest, key) in self._busy:  # another thread is at it, and goes on meaning it
                reserved_bytes = max(self._busy[digest, key]) if records[-1].operation is Operation.GONE else 0
                records.append(Record(Operation.INTENT, number, self._now_s(), reserved_bytes, writer, key))
        self._append(records)

    def _truth(self, number: int, name: _Name, operation: Operation, writer: int) -> Record:
        digest, key = name
        try:
            found = self._settings.calls.lstat(layout.block_path(self._root, digest.hex(), key))
        except (FileNotFoundError, NotADirectoryError):
            found = None
        if found is None or not stat.S_ISREG(found.st_mode):
            return Record(Operation.GONE, number, self._now_s(), 0, writer, key)
        time_s = self._now_s() if operation is Operation.WRITTEN else int(found.st_mtime)
        return Record(operation, number, time_s, found.st_size, writer, key)

    def _settle_the_dead(self) -> bool:
        """Settle what writers that died have left; whether there was anything."""
        journal = self._journal
        if journal is None:
            return False
        dead = [writer for writer in self._holdings.writers if not journal.is_alive(writer)]
        for writer in dead:
            left = {
                (self._holdings.spaces[number].digest, key): Operation.WRITTEN
                if intent.reserved_bytes
                else Operation.HELD
                for number, key, intent in self._holdings.intents()
                if intent.writer == writer
            }
            self._settle(left, writer)
            self._append([Record(Operation.CLOSED, time_s=self._now_s(), writer=writer)])
        return bool(dead)

    def _leave(self, name: _Name) -> None:
        """One thread of this process is through with the block."""
        reserved = self._busy.get(name)
        if reserved:
            reserved.remove(min(reserved))
        if not reserved:
            self._busy.pop(name, None)

    def _owe(self, wanted: Mapping[_Name, Operation], error: OSError) -> None:
        if not self._owed:
            log.warning("root %s: its catalogue cannot be written to, which is tried again: %s", self._root, error)
        self._noticed(errno.errorcode.get(error.errno or 0, type(error).__name__))
        self._owed.update(wanted)

    def _number(self, digest: bytes) -> int:
        """The namespace's number in the records, given to it now if it has none."""
        number = self._holdings.numbers.get(digest)
        if number is not None:
            return number
        number, now_s = len(self._holdings.spaces), self._now_s()
        tenant = layout.tenant_of(Path(self._root), digest.hex())
        self._append(
            [
                Record(Operation.NAMESPACE, number, now_s, key=digest),
                Record(Operation.TENANT, number, now_s, key=tenant),
            ]
        )
        return number

    def _append(self, records: list[Record]) -> None:
        if not records:
            return
        if self._journal is None:
            self._follow(decode(encode(records, 0, 0), 0, 0))
        else:
            self._follow(self._journal.append(records))

    def _follow(self, records: Records) -> None:
        if len(records):
            self._notice(self._holdings.apply(records, self._writer))

    def _notice(self, changes: Iterable[Change]) -> None:
        if self._is_watched:
            self._changes.extend(changes)

    def _now_s(self) -> int:
        return int(self._settings.now_s())

    # --- opening, and following a file that was replaced -----------------------------------------

    def reopen(self) -> None:
        """The root has been away: go by what is there now. What it holds that was not known comes as changes."""
        if self._journal is None:
            with self._mutex:
                self._open()
            return
        with contextlib.suppress(OSError), self._session():
            pass

    def _open(self) -> None:
        self.trouble = ""
        try:
            self._journal = Journal(self._settings.calls, self._root, self._writer)
            with self._journal.locked(max(_OPENING_S, self._settings.patience_s)):
                self._load(self._journal)
        except (NoLocks, OSError) as error:
            self._keep_in_memory(error)

    def _keep_in_memory(self, error: Exception) -> None:
        self.trouble = str(error) or type(error).__name__
        journal, self._journal = self._journal, None
        if journal is not None:
            journal.close()
        self._holdings = Holdings(self._settings.tenant)
        self._holdings.take_over(rebuild(self._root, self._settings.progress))

    def _catch_up(self, journal: Journal) -> None:
        """Raises OSError."""
        try:
            if journal.is_open:
                self._follow(journal.read_on())
                if journal.is_replaced():
                    self._succeed(journal)
            if not journal.is_open:
                self._load(journal)
            journal.check_end()
        except Doubtful as doubt:
            self._start_anew(journal, doubt, self._holdings)

    def _succeed(self, journal: Journal) -> None:
        """Go over to the file that has replaced this one; not open afterwards if it must be read from its beginning."""
        successor = self._holdings.successor
        if successor is None:
            journal.drop_file()
            return
        journal.open_file()
        if journal.seed != successor:  # replaced twice
            journal.drop_file()
            return
        records = journal.read_on()
        known = int(records[0]["amount"])
        if len(records) < known:
            raise Doubtful("it ends in its beginning")
        self._holdings.successor = None
        self._follow(records[known:])

    def _load(self, journal: Journal) -> None:
        """Read the file from its beginning."""
        found = Holdings(self._settings.tenant)
        try:
            journal.open_file()
            found.adopt(journal.read_on())
            journal.check_end()
            self._examine(journal, found)
        except Doubtful as doubt:
            self._start_anew(journal, doubt, found)
            return
        self._take(found)
        self._settle_the_dead()
        self._sign_on()
        self._shorten(spare=1.25)

    def _start_anew(self, journal: Journal, doubt: Doubtful, sound: Holdings) -> None:
        """Make the file anew from the blocks' files; keep of the old one what these do not tell."""
        found = Holdings(self._settings.tenant)
        if not isinstance(doubt, NoFile) or layout.walk_namespaces(self._root):
            log.warning("root %s: its catalogue is made anew from the files: %s", self._root, doubt)
            found.take_over(rebuild(self._root, self._settings.progress))
        found.carry_over(sound, journal.is_alive, self._now_s())
        journal.drop_file()
        self._take(found)
        self._replace(journal)
        self._sign_on()
        log.info("root %s: %d blocks, %d bytes", self._root, found.blocks, found.used_bytes)

    def _examine(self, journal: Journal, found: Holdings) -> None:
        """Raises Doubtful where the directories, or the machine's past, contradict it."""
        if found.successor is not None:
            raise Doubtful("it was replaced, and its successor is gone")
        for writer, boot in found.writers.items():
            if boot != self._settings.boot and not journal.is_alive(writer):
                raise Doubtful("the machine went down, or was another one, while it was written to")
        there = set(layout.walk_namespaces(self._root))
        for space in found.spaces:
            if space.held and space.digest.hex() not in there:
                raise Doubtful(f"the directory of namespace {space.digest.hex()[:16]} is gone")
        for name in there - {space.digest.hex() for space in found.spaces}:
            if layout.walk_fans(self._root, name):
                raise Doubtful(f"it does not know namespace {name[:16]}")

    def _take(self, found: Holdings) -> None:
        """Go by these holdings from now on."""
        self._notice(differences(self._holdings, found))
        self._holdings = found

    def _sign_on(self) -> None:
        """Be one of the writers, with all that threads are at."""
        if self._writer in self._holdings.writers:
            return
        now_s = self._now_s()
        self._append([Record(Operation.OPENED, time_s=now_s, amount=self._settings.boot, writer=self._writer)])
        if not self._holdings.meter.since_s:
            self._append([Record(Operation.TOTAL, time_s=now_s)])
        for limit, amount in self._settings.limits.items():
            if self._holdings.limits.get(limit, 0) != amount:
                self._append([Record(Operation.LIMIT, limit, now_s, amount)])
        for (digest, key), reserved in self._busy.items():
            number = self._number(digest)
            self._append([Record(Operation.INTENT, number, now_s, max(reserved), self._writer, key)])

    def _shorten(self, spare: float) -> None:
        """Replace the file if it is much longer than what it says. Best effort."""
        journal = self._journal
        if journal is None or journal.records < spare * self._holdings.blocks + _SPARE_RECORDS:
            return
        try:
            self._replace(journal)
        except OSError as error:
            log.warning("root %s: its catalogue could not be shortened: %s", self._root, error)

    def _replace(self, journal: Journal) -> None:
        now_s, holdings = self._now_s(), self._holdings
        layout.make_tmp(self._settings.calls, self._root)
        journal.replace(f"{self._root}/{layout.TMP}", lambda seed, inode: holdings.snapshot(seed, inode, now_s))
        holdings.successor = None
