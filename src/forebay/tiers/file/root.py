"""One root directory: what became of a block there, and whether the root itself is well."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from forebay.errors import ConfigError
from forebay.tiers.file import layout
from forebay.tiers.file.blockfile import Claim, Verify, read_block, read_header, read_start, write_block
from forebay.tiers.file.breaker import Call
from forebay.tiers.file.catalogue import Catalogue, CatalogueSettings
from forebay.tiers.file.directio import (
    Access,
    Calls,
    DirectMode,
    IoPath,
    Locks,
    Scratch,
    create_temp,
    remove_if_there,
    try_buffered,
    try_direct,
)
from forebay.tiers.file.format import Damage, Damaged, NewerFormat, Shape, check_claim
from forebay.tiers.file.freespace import FreeSpace
from forebay.tiers.file.health import NO_ROOM, Health, HealthLimits
from forebay.types import BlockKey, Namespace, Outcome

log = logging.getLogger("forebay.tiers.file")

_NOT_THERE = (FileNotFoundError, NotADirectoryError)


class Durability(Enum):
    """What a write waits for before it publishes a block."""

    NONE = "none"
    """Nothing: after a power loss a block may be absent or damaged, and its checksums turn that into a miss."""
    BLOCK = "block"
    """The block and its name are on the medium."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RootSettings:
    """What all roots of a tier have in common."""

    shape: Shape
    namespace: Namespace
    direct: DirectMode
    verify: Verify
    durability: Durability
    calls: Calls
    limits: HealthLimits
    clock_ns: Callable[[], int]
    """Monotonic."""
    catalogue: CatalogueSettings
    free_floor_bytes: int
    ttl_s: float


@dataclass(frozen=True, slots=True)
class Reserved:
    """What came of asking for room. The blocks in none of these may be written."""

    full: frozenset[BlockKey] = frozenset()
    """There is no room in the whole pool."""
    at_floor: frozenset[BlockKey] = frozenset()
    """This root's disk has too little free space; another one may have more."""
    failed: frozenset[BlockKey] = frozenset()

    @property
    def refused(self) -> frozenset[BlockKey]:
        return self.full | self.at_floor | self.failed


class Removal:
    """A context in which blocks are removed from a root."""

    def __init__(self, catalogue: Catalogue | None, digest: bytes, keys: Sequence[BlockKey]) -> None:
        self._catalogue = catalogue
        self._names = {key: {digest, *(catalogue.namespaces_of(key) if catalogue is not None else ())} for key in keys}

    def namespaces_of(self, key: BlockKey) -> list[str]:
        """Those from which it is to be removed, in hex."""
        return [digest.hex() for digest in self._names[key]]

    def _by_namespace(self) -> dict[bytes, list[BlockKey]]:
        grouped: dict[bytes, list[BlockKey]] = {}
        for key, digests in self._names.items():
            for digest in digests:
                grouped.setdefault(digest, []).append(key)
        return grouped

    def __enter__(self) -> None:
        if self._catalogue is not None:
            for digest, keys in self._by_namespace().items():
                with contextlib.suppress(OSError):  # a full disk: removing is what helps, and is written down then
                    self._catalogue.intend(digest, keys)

    def __exit__(self, *_: object) -> None:
        if self._catalogue is not None:
            for digest, keys in self._by_namespace().items():
                self._catalogue.settle(digest, keys)


class Root:
    """Thread-safe. A lock guards only the state that is logged; block I/O never holds it."""

    def __init__(self, path: Path, settings: RootSettings) -> None:
        self.path = path
        self.root_id: bytes | None = None
        """None until the marker was seen once: such a root has no place in the placement yet."""
        self.health = Health(path, settings.limits, settings.clock_ns, self._works_again)
        self.trouble = ""
        """Why `open` left the root ABSENT."""
        access = Access.BUFFERED if settings.direct is DirectMode.NEVER else Access.DIRECT
        self.io = IoPath(access, "not tried yet", None, Locks.UNSUPPORTED)
        self._settings = settings
        self._shape = settings.shape
        self._calls = settings.calls
        self._namespace_hex = settings.shape.namespace_digest.hex()
        self.catalogue: Catalogue | None = None
        """None until the root was there once."""
        self._space = FreeSpace(str(path), settings.free_floor_bytes, settings.calls)
        self._digest = settings.shape.namespace_digest
        self._on_medium: set[str] = set()
        """Directories of blocks whose own names have been synced."""
        self._published: set[BlockKey] = set()
        """Blocks whose bytes were written here and that are not settled yet."""
        self._lock = threading.RLock()
        self._said: set[str] = set()
        self._unreadable: set[BlockKey] = set()
        """Blocks whose last read failed with an I/O error: a write replaces them although their length is right."""
        self._newer: set[BlockKey] = set()
        """Blocks found to be of a newer format: not held, as far as this program goes."""

    # --- whether the root is there -------------------------------------------------------------

    def open(self) -> None:
        """Make or join the pool here. An I/O error leaves the root ABSENT; a wrong directory raises ConfigError."""
        try:
            marker = layout.make_root(self._calls, self.path)
        except OSError as error:
            self.trouble = f"{error.filename or self.path}: {error.strerror or error}"
            log.warning("root %s is absent: %s", self.path, error)
            return
        self._adopt(marker)
        log.info("root %s: %s I/O, since %s", self.path, self.io.access.value, self.io.reason)

    def check(self) -> None:
        """Look for the marker; one warning line when the root went and one when it came back. Cheap: one small file."""
        trouble, marker = "its marker is gone", None
        with self.health.reads.glance() as call:
            if call.refused:
                return
            try:
                marker = layout.read_marker(self.path)
            except OSError as error:
                self.health.blame(call, error)
                trouble = str(error)
            except ConfigError as error:
                trouble = str(error)
            if marker is None and self.health.is_present and self.catalogue is not None:
                self.catalogue.catch_up()  # while it is away, what the others have written there counts as well
        with self._lock:
            if marker is not None and self.root_id in (None, bytes.fromhex(marker.root_id)):
                if not self.health.is_present:
                    self.health.count("returned")
                    log.warning("root %s is back", self.path)
                    self._adopt(marker)
            elif self.health.is_present:
                self.health.is_present = False
                self.health.count("vanished")
                log.warning("root %s went (%s): its blocks are missing, writes go to the next root", self.path, trouble)

    def try_again(self, scratch: Scratch) -> None:
        """Try a stopped root if it is time: read a page of it past the system's cache. For when nobody else reads."""
        with self.health.reads.call() as call:
            if call.refused or not call.is_trial:
                return
            try:
                read_start(self._calls, str(self.path / layout.MARKER), self.io.access, scratch)
            except _NOT_THERE:
                pass  # then it is absent, which `check` finds
            except OSError as error:
                self.health.blame(call, error)

    def _adopt(self, marker: layout.Marker) -> None:
        first_time = self.root_id is None
        self.root_id = bytes.fromhex(marker.root_id)
        self.health.is_present = True
        if not first_time:
            if self.catalogue is not None:
                self.catalogue.reopen()
            self._works_again()
            return
        try:
            self.io = self._try_io()
            layout.sweep(str(self.path))
            self.catalogue = Catalogue(self.path, self._settings.catalogue, self.health.count)
            layout.make_namespace(self._calls, self.path, self._namespace_hex, self._settings.namespace)
        except OSError as error:  # read-only or full: what is stored here can still be read
            self.health.writes.trip(error.strerror or str(error))
        if self.catalogue is None:
            self.catalogue = Catalogue(self.path, self._settings.catalogue, self.health.count)
        if self.catalogue.trouble and self.io.locks is Locks.HELD and not self.health.writes.why:
            log.warning(
                "root %s: its catalogue is kept in memory (%s): the capacity holds for this process alone",
                self.path, self.catalogue.trouble,
            )  # fmt: skip

    def _works_again(self) -> None:
        """Blocks that were deleted meanwhile are still here: whoever counts on their room has to know."""
        if self.catalogue is not None:
            self.catalogue.tell_held()

    def close(self) -> threading.Thread:
        """Have the catalogue closed, which may hang; returns the thread that does it."""
        closing = threading.Thread(target=self._close, name="forebay-catalogue-close", daemon=True)
        closing.start()
        return closing

    def _close(self) -> None:
        if self.catalogue is not None:
            self.catalogue.close()

    def _try_io(self) -> IoPath:
        mode, tmp = self._settings.direct, str(self.path / layout.TMP)
        io = try_buffered(self._calls, tmp) if mode is DirectMode.NEVER else try_direct(self._calls, tmp)
        if io.access is Access.BUFFERED and mode is DirectMode.ALWAYS:
            raise ConfigError(f"root {self.path}: {io.reason}; use direct = 'auto', or another file system")
        if io.access is Access.BUFFERED and mode is DirectMode.AUTO:
            log.warning("root %s: buffered I/O, since %s", self.path, io.reason)
        if io.locks is Locks.UNSUPPORTED:
            log.warning(
                "root %s: no file locks here: files of writers that died stay in tmp/, and the capacity holds for each "
                "process alone",
                self.path,
            )
        return io

    # --- the catalogue -------------------------------------------------------------------------

    def reserve(self, keys: Sequence[BlockKey], room_bytes: Callable[[], int]) -> Reserved:
        """Room for a write of each block, as far as there is any. Settle those that are not refused afterwards."""
        catalogue, wanted, is_at_floor = self.catalogue, frozenset(keys), False
        if catalogue is None:
            return Reserved(failed=wanted)

        def both_bytes() -> int:
            nonlocal is_at_floor
            left_bytes, spare_bytes = room_bytes(), self._space.spare_bytes(catalogue.reserved_bytes)
            is_at_floor = spare_bytes is not None and spare_bytes < left_bytes
            return left_bytes if spare_bytes is None else min(left_bytes, spare_bytes)

        with self.health.writes.glance() as call:
            if call.refused and self.health.writes.refuses():  # else one of these writes is about to be tried
                return Reserved(failed=wanted)
            try:
                granted = catalogue.reserve(self._digest, keys, self._shape.stored_bytes, both_bytes)
            except OSError as error:
                self.health.blame(call, error)
                self._say_once("catalogue", "root %s: its catalogue cannot be written to: %s", self.path, error)
                return Reserved(full=wanted) if error.errno in NO_ROOM else Reserved(failed=wanted)
        refused = wanted.difference(granted)
        if not refused or not is_at_floor:
            return Reserved(full=refused)
        self.health.count("free floor")
        self._say_once("floor", "root %s: too little free space is left to write there", self.path)
        return Reserved(at_floor=refused)

    def settle(self, keys: Collection[BlockKey]) -> None:
        """What `reserve` or `intend` was called for has been done."""
        if self.catalogue is None:
            return
        written = self._published.intersection(keys)
        self._published -= written
        self.catalogue.settle(self._digest, keys, written)

    def removal(self, keys: Sequence[BlockKey]) -> Removal:
        """What to do around a removal of these blocks from here."""
        return Removal(self.catalogue, self._digest, keys)

    def correct(self, keys: Iterable[BlockKey]) -> None:
        """These blocks turned out not to be here: have those looked at that the catalogue claims."""
        if self.catalogue is not None:
            wrong = [key for key in keys if self.catalogue.claims(self._digest, key)]
            if wrong:
                self.catalogue.correct(self._digest, wrong)

    def scrubbing(self, file: layout.BlockFile) -> contextlib.AbstractContextManager[None]:
        """Around whatever the scrub does to the file of a block, of any namespace."""
        if self.catalogue is None:
            return contextlib.nullcontext()
        return self.catalogue.removing(bytes.fromhex(file.namespace_hex), (file.key,))

    # --- blocks --------------------------------------------------------------------------------

    def block_path(self, key: BlockKey) -> str:
        return layout.block_path(str(self.path), self._namespace_hex, key)

    def holds(self, key: BlockKey) -> bool:
        """Whether a file of the right name, type and length is there. Anything else in its place is set aside.

        Else it would be counted nowhere and still take room.
        """
        path = self.block_path(key)
        with self.health.reads.glance() as call:
            if call.refused:
                return False
            try:
                found = self._calls.lstat(path)
                if self._is_old(found):
                    return False
                if not self._fits(found):
                    self._stands(path, key, found, Scratch())
            except _NOT_THERE:
                return False
            except OSError as error:
                self.health.blame(call, error)
                return False
        return self._fits(found) and key not in self._newer

    def has_expired(self, key: BlockKey) -> bool:
        """Whether a file is there that must not be served any more."""
        if not self._settings.ttl_s:
            return False
        with self.health.reads.glance() as call:
            found = None if call.refused else self._lstat(self.block_path(key))
        return found is not None and self._is_old(found)

    def read(self, key: BlockKey, view: memoryview, scratch: Scratch) -> Outcome:
        """FAILED at once while the root is stopped."""
        if not self.health.is_present:
            self.check()
        with self.health.reads.call() as call:
            outcome = Outcome.FAILED if call.refused else self._read(call, key, view, scratch)
        if outcome is Outcome.MISSING:
            self.check()
        return outcome

    def _read(self, call: Call, key: BlockKey, view: memoryview, scratch: Scratch) -> Outcome:
        path, access = self.block_path(key), self.io.access
        try:
            read_block(self._calls, path, access, Claim(self._shape, key), view, scratch, self._settings.verify)
        except _NOT_THERE:
            return Outcome.MISSING
        except NewerFormat as newer:
            self._found_newer(path, key, newer)
            return Outcome.MISSING
        except Damaged as damaged:
            self._set_aside(path, key, damaged.damage)
            return Outcome.CORRUPT
        except OSError as error:
            found = self._lstat(path)
            if found is not None and not stat.S_ISREG(found.st_mode):  # a link, a directory: open refused it
                self._set_aside(path, key, Damage.NOT_A_FILE)
                return Outcome.CORRUPT
            if self._falls_back(error, access):
                return self._read(call, key, view, scratch)
            self.health.blame(call, error)
            self._say_once(f"read {error.errno}", "root %s: reads fail: %s", self.path, error)
            self._unreadable.add(key)
            return Outcome.FAILED
        self.proved((key,))
        return Outcome.OK

    def proved(self, keys: Sequence[BlockKey]) -> None:
        """These blocks have just been read from here, and are sound."""
        if self._unreadable or self._newer:
            self._unreadable.difference_update(keys)
            self._newer.difference_update(keys)

    def write(self, key: BlockKey, view: memoryview, scratch: Scratch) -> Outcome:
        """Publish the block whole or not at all. One that is there with the right length stays as it is.

        The caller has just seen that the root takes writes. FAILED at once if they were stopped since.
        """
        with self.health.writes.call() as call:
            return Outcome.FAILED if call.refused else self._write(call, key, view, scratch)

    def _write(self, call: Call, key: BlockKey, view: memoryview, scratch: Scratch) -> Outcome:
        path, access = self.block_path(key), self.io.access
        try:
            found = self._lstat(path)
            if found is not None and key not in self._unreadable and not self._is_old(found):
                if self._stands(path, key, found, scratch):
                    return Outcome.OK
                if key in self._newer:
                    return Outcome.FAILED
            self._publish(path, access, Claim(self._shape, key), view, scratch)
        except OSError as error:
            if self._falls_back(error, access):
                return self._write(call, key, view, scratch)
            self.health.blame(call, error)
            if error.errno in NO_ROOM:
                self._say_once("full", "root %s is full: %s", self.path, error)
                return Outcome.FULL
            self._say_once(
                f"write {error.errno}", "root %s: a write failed and goes to the next root: %s", self.path, error
            )
            return Outcome.FAILED
        self.published((key,))
        return Outcome.OK

    def is_ready_for(self, key: BlockKey) -> bool:
        """Whether the block can be written without a further look: as far as the catalogue knows, its place is free.

        Else `write` is what to call.
        """
        if self.catalogue is None or self.catalogue.claims(self._digest, key):
            return False
        if not self.io.has_unnamed:
            self._say_once("unnamed", "root %s: no files without names here: Python writes the blocks", self.path)
            return False
        return True

    def published(self, keys: Sequence[BlockKey]) -> None:
        """These blocks have just been written here. They are to be settled."""
        self._published.update(keys)
        if self._unreadable or self._newer:
            self._unreadable.difference_update(keys)
            self._newer.difference_update(keys)

    def delete(self, namespace_hex: str, key: BlockKey) -> Outcome:
        """A root that is absent or stopped has left the pool together with its blocks: deleting them there is OK."""
        if not self.health.takes_deletes():
            return Outcome.OK
        writes = self.health.writes
        # a delete may be the call that is tried: in a full pool no write comes before one
        with writes.call() if writes.is_due() else writes.glance() as call:
            return Outcome.FAILED if call.refused else self._delete(call, namespace_hex, key)

    def _delete(self, call: Call, namespace_hex: str, key: BlockKey) -> Outcome:
        path = layout.block_path(str(self.path), namespace_hex, key)
        try:
            self._calls.unlink(path)
        except _NOT_THERE:
            return Outcome.OK
        except OSError as error:
            found = self._lstat(path)
            if found is None:
                return Outcome.OK
            if stat.S_ISDIR(found.st_mode):
                with contextlib.suppress(FileNotFoundError):  # another one was faster
                    layout.set_aside(self._calls, str(self.path), path, namespace_hex, key, Damage.NOT_A_FILE)
                return Outcome.OK if self._lstat(path) is None else Outcome.FAILED
            self.health.blame(call, error)
            self._say_once(f"delete {error.errno}", "root %s: deletes fail: %s", self.path, error)
            return Outcome.FAILED
        return Outcome.OK

    def _publish(self, path: str, access: Access, claim: Claim, view: memoryview, scratch: Scratch) -> None:
        """Write under a temporary name, then rename. On any error nothing is left under either name."""
        tmp = self.path / layout.TMP
        try:
            temp = create_temp(self._calls, str(tmp), claim.key.hex(), access)
        except FileNotFoundError:  # somebody tidied up; if the root itself is gone, this fails
            layout.make_tmp(self._calls, str(self.path))
            temp = create_temp(self._calls, str(tmp), claim.key.hex(), access)
        try:
            write_block(self._calls, temp.descriptor, access, claim, view, scratch)
            if access is Access.BUFFERED:
                # closing any descriptor of a file makes a network file system send it and report its errors; the lock
                # must be held until the rename, so a duplicate is closed
                self._calls.close(os.dup(temp.descriptor))
            if self._settings.durability is Durability.BLOCK:
                self._calls.sync(temp.descriptor)
            self._rename(temp.path, path)
        except BaseException:
            remove_if_there(temp.path, self._calls)
            raise
        finally:
            self._calls.close(temp.descriptor)

    def _rename(self, temp: str, path: str) -> None:
        directory = os.path.dirname(path)  # noqa: PTH120
        try:
            self._calls.rename(temp, path)
        except FileNotFoundError:  # the first block of this directory, or the namespace was purged meanwhile
            self._on_medium.discard(directory)
            layout.make_namespace(self._calls, self.path, self._namespace_hex, self._settings.namespace)
            with contextlib.suppress(FileExistsError):
                self._calls.mkdir(directory, 0o700)
            self._calls.rename(temp, path)
        if self._settings.durability is Durability.BLOCK:
            self._sync_names(directory)

    def _sync_names(self, directory: str) -> None:
        """The name in this directory is on the medium, and so is the way to it."""
        parents = [] if directory in self._on_medium else [os.path.dirname(directory), str(self.path)]  # noqa: PTH120
        for path in (directory, *parents):
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        self._on_medium.add(directory)

    def _stands(self, path: str, key: BlockKey, found: os.stat_result, scratch: Scratch) -> bool:
        """Whether a file of this format is in the block's place already. Sets aside what is no block, nor a newer one.

        Only the header is looked at: the payload is proved by whoever reads it.
        """
        try:
            if not stat.S_ISREG(found.st_mode):
                raise Damaged(Damage.NOT_A_FILE)
            header = read_header(self._calls, path, scratch)
            if not self._fits(found):
                raise Damaged(Damage.WRONG_LENGTH)
            check_claim(header, self._shape, key)
        except _NOT_THERE:
            return False
        except NewerFormat as newer:
            self._found_newer(path, key, newer)
            return False
        except Damaged as damaged:
            self._set_aside(path, key, damaged.damage)
            return False
        self._newer.discard(key)
        return True

    # --- saying it once ------------------------------------------------------------------------

    def _falls_back(self, error: OSError, access: Access) -> bool:
        """Whether the call is worth another try, with buffered I/O from now on."""
        if error.errno != errno.EINVAL or access is Access.BUFFERED or self._settings.direct is DirectMode.ALWAYS:
            return False
        with self._lock:
            if self.io.access is Access.DIRECT:
                reason = f"the file system refuses O_DIRECT (errno {error.errno})"
                log.warning("root %s: buffered I/O from now on, since %s", self.path, reason)
                self.io = replace(self.io, access=Access.BUFFERED, reason=reason)
        return True

    def _say_once(self, topic: str, message: str, *args: object) -> None:
        with self._lock:
            if topic in self._said:
                return
            self._said.add(topic)
        log.warning(message, *args)

    def _found_newer(self, path: str, key: BlockKey, newer: NewerFormat) -> None:
        if key not in self._newer:
            self._newer.add(key)
            self.health.count("newer format")
        self._say_once("newer", "%s is of format version %s, newer than this Forebay: left alone", path, newer)

    def _set_aside(self, path: str, key: BlockKey, damage: Damage) -> None:
        self.health.count(damage.value)
        # whoever dies here leaves a block that is looked at, and not one that never was; another reader may be faster
        with self.removal((key,)), contextlib.suppress(FileNotFoundError):
            layout.set_aside(self._calls, str(self.path), path, self._namespace_hex, key, damage)

    def _is_old(self, found: os.stat_result) -> bool:
        ttl_s = self._settings.ttl_s
        return bool(ttl_s) and found.st_mtime + ttl_s <= self._settings.catalogue.now_s()

    def _fits(self, found: os.stat_result) -> bool:
        return stat.S_ISREG(found.st_mode) and found.st_size == self._shape.stored_bytes

    def _lstat(self, path: str) -> os.stat_result | None:
        """None when there is nothing, or nothing can be learned."""
        try:
            return self._calls.lstat(path)
        except OSError:
            return None
