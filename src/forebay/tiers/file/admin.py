"""What an operator asks of a pool, whether or not a store has it open: `forebay pool` and `forebay doctor` call these.

Answers are frozen dataclasses. Roots are directories with a pool marker; anything else is refused with ConfigError.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from forebay.errors import ConfigError
from forebay.tiers.file import layout
from forebay.tiers.file.blockfile import Claim, Verify, read_block, read_header
from forebay.tiers.file.directio import (
    REAL_CALLS,
    Access,
    Scratch,
    aligned_buffer,
    remove_if_there,
    try_direct,
)
from forebay.tiers.file.format import PAGE_BYTES, Damage, Damaged, NewerFormat, Shape
from forebay.tiers.file.lanes import Lanes
from forebay.tiers.file.probe import ProbeItem, ProbeReport, Verdict, probe
from forebay.types import Namespace

__all__ = [
    "FoundBy", "NamespaceListing", "ProbeItem", "ProbeReport", "PurgeReport", "RootStat", "SetAside", "Usage",
    "Verdict", "VerifyReport", "ls", "probe", "purge", "stat", "verify",
]  # fmt: skip

_VERIFY_THREADS = 4
_BATCH_FILES = 256
"""Files between two calls of the progress callback."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Blocks in one root."""

    root: str
    blocks: int
    stored_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RootStat:
    root: str
    root_id: str
    format_version: int
    namespaces: int
    blocks: int
    stored_bytes: int
    unfinished_files: int
    """In tmp/: being written, or left by writers that died since the pool was last opened."""
    set_aside_files: int
    set_aside_bytes: int
    free_bytes: int
    """Of the file system, for this user."""
    file_system_bytes: int


@dataclass(frozen=True, slots=True)
class NamespaceListing:
    """One namespace over all the roots."""

    digest: str
    namespace: Namespace | None
    """None where no root says intelligibly what the digest stands for."""
    usage: tuple[Usage, ...]

    @property
    def blocks(self) -> int:
        return sum(usage.blocks for usage in self.usage)

    @property
    def stored_bytes(self) -> int:
        return sum(usage.stored_bytes for usage in self.usage)


class FoundBy(Enum):
    CHECK = "this check"
    READ = "a read since the last check"


@dataclass(frozen=True, slots=True)
class SetAside:
    path: str
    reason: str
    moved_to: str | None
    """None when quarantine was full and the file was removed; `path` when it could not be moved."""
    found_by: FoundBy


@dataclass(frozen=True, slots=True)
class VerifyReport:
    checked_blocks: int
    checked_bytes: int
    set_aside: tuple[SetAside, ...]
    newer: tuple[str, ...]
    """Paths of sound files of a later format version; they stay."""
    unreadable: tuple[str, ...]
    """Paths that an I/O error kept from being checked; they stay."""


@dataclass(frozen=True, slots=True)
class PurgeReport:
    namespaces: tuple[str, ...]
    """Digests of what was purged."""
    removed_blocks: int
    removed_bytes: int
    kept: tuple[str, ...]
    """Directories that stay because there is something in them again, or still: blocks that a store has written
    meanwhile, or what Forebay did not make."""


def stat(roots: Sequence[Path]) -> tuple[RootStat, ...]:
    """What is in each root."""
    return tuple(_root_stat(root, marker) for root, marker in _marked(roots))


def ls(roots: Sequence[Path]) -> tuple[NamespaceListing, ...]:
    """Every namespace with what it stands for, in the order of the digests."""
    usage: dict[str, list[Usage]] = {}
    known: dict[str, Namespace] = {}
    for root, _ in _marked(roots):
        for namespace_hex in layout.walk_namespaces(str(root)):
            usage.setdefault(namespace_hex, []).append(_usage(root, [namespace_hex]))
            namespace = layout.read_namespace(root, namespace_hex)
            if namespace is not None:
                known[namespace_hex] = namespace
    return tuple(NamespaceListing(name, known.get(name), tuple(found)) for name, found in sorted(usage.items()))


def verify(roots: Sequence[Path], progress: Callable[[int, int], None] = lambda blocks, bytes_: None) -> VerifyReport:
    """Read every block in full and prove it; set aside what is damaged or foreign.

    Names each damaged file once: those it finds itself, and those that reads have set aside since the last check.

    `progress(blocks, bytes)` is called on this thread with the totals so far. A store may have the pool open meanwhile.
    """
    checked = _Checked()
    lanes = Lanes("forebay-verify", _VERIFY_THREADS)
    try:
        for root, _ in _marked(roots):
            checked.set_aside.extend(_set_aside_by_reads(root))
            access = _best_access(root)
            for files in _batches(root):
                findings = _check_all(lanes, root, access, files)
                for file, finding in zip(files, findings, strict=True):
                    checked.add(file, finding)
                progress(checked.blocks, checked.read_bytes)
    finally:
        lanes.close()
    return checked.report()


def purge(roots: Sequence[Path], namespace: str | None = None) -> PurgeReport:
    """Remove all blocks, or those of one namespace, named by its digest or an unambiguous beginning of it.

    Only what Forebay made is removed: blocks, namespace files, quarantine (when all is purged), and directories that
    are empty then. The root stays a pool. A store that has it open goes on writing: its new blocks stay.
    """
    marked = [root for root, _ in _marked(roots)]
    chosen = _choose(marked, namespace)
    removed_blocks = removed_bytes = 0
    kept: list[str] = []
    for root in marked:
        for namespace_hex in chosen:
            for file in layout.walk_blocks(str(root), namespace_hex):
                if file.is_regular and _remove_block(file.path):
                    removed_blocks += 1
                    removed_bytes += file.length_bytes
            kept.extend(_remove_namespace_directory(root, namespace_hex))
        if namespace is None:
            for path in layout.set_aside_files(str(root)):
                remove_if_there(path)
            layout.sweep(str(root))
    return PurgeReport(tuple(chosen), removed_blocks, removed_bytes, tuple(kept))


# --- roots -------------------------------------------------------------------------------------


def _marked(roots: Sequence[Path]) -> list[tuple[Path, layout.Marker]]:
    """The roots with their markers, each once. One that is no pool refuses the whole call."""
    found: list[tuple[Path, layout.Marker]] = []
    for absolute in dict.fromkeys(Path(os.path.realpath(root)) for root in roots):
        try:
            marker = layout.read_marker(absolute)
        except OSError as error:
            raise ConfigError(f"cannot read {error.filename or absolute}: {error.strerror}") from None
        if marker is None and (absolute / layout.MARKER).is_symlink():
            raise ConfigError(
                f"{absolute / layout.MARKER} is a link to nothing: restore the marker, or name another pool"
            )
        if marker is None:
            raise ConfigError(f"{absolute} has no {layout.MARKER}: it is not a pool of Forebay, name one that is")
        _check_listable(absolute)
        found.append((absolute, marker))
    return found


def _check_listable(root: Path) -> None:
    """What cannot be listed must not look like an empty pool."""
    directories = [root, root / layout.TMP, root / layout.QUARANTINE]
    for namespace_hex in layout.walk_namespaces(str(root)):
        directories.append(root / namespace_hex)
        directories.extend(root / namespace_hex / fan for fan in layout.walk_fans(str(root), namespace_hex))
    for directory in directories:
        if directory.is_dir() and not os.access(directory, os.R_OK | os.X_OK):
            raise ConfigError(f"cannot list {directory}: run this as the user who owns the pool")


def _root_stat(root: Path, marker: layout.Marker) -> RootStat:
    namespaces = layout.walk_namespaces(str(root))
    usage = _usage(root, namespaces)
    quarantined = layout.set_aside_files(str(root))
    space = os.statvfs(root)
    return RootStat(
        root=str(root),
        root_id=marker.root_id,
        format_version=marker.format_version,
        namespaces=len(namespaces),
        blocks=usage.blocks,
        stored_bytes=usage.stored_bytes,
        unfinished_files=len(layout.temp_files(str(root))),
        set_aside_files=len(quarantined),
        set_aside_bytes=sum(os.lstat(path).st_size for path in quarantined),
        free_bytes=space.f_bavail * space.f_frsize,
        file_system_bytes=space.f_blocks * space.f_frsize,
    )


def _usage(root: Path, namespaces: Sequence[str]) -> Usage:
    blocks = stored_bytes = 0
    for namespace_hex in namespaces:
        for file in layout.walk_blocks(str(root), namespace_hex):
            if file.is_regular:
                blocks += 1
                stored_bytes += file.length_bytes
    return Usage(str(root), blocks, stored_bytes)


# --- verify ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Finding:
    """What is wrong with one file. Exactly one of the fields is set."""

    set_aside: SetAside | None = None
    newer: str | None = None
    unreadable: str | None = None


class _Checked:
    """Totals of a verification."""

    def __init__(self) -> None:
        self.blocks = 0
        self.read_bytes = 0
        self.set_aside: list[SetAside] = []
        self.newer: list[str] = []
        self.unreadable: list[str] = []

    def add(self, file: layout.BlockFile, finding: _Finding | None) -> None:
        self.blocks += 1
        self.read_bytes += file.length_bytes
        if finding is None:
            return
        if finding.set_aside is not None:
            self.set_aside.append(finding.set_aside)
        if finding.newer is not None:
            self.newer.append(finding.newer)
        if finding.unreadable is not None:
            self.unreadable.append(finding.unreadable)

    def report(self) -> VerifyReport:
        return VerifyReport(
            self.blocks, self.read_bytes, tuple(self.set_aside), tuple(self.newer), tuple(self.unreadable)
        )


def _set_aside_by_reads(root: Path) -> list[SetAside]:
    return [
        SetAside(file.came_from, file.reason, layout.mark_named(REAL_CALLS, file.path), FoundBy.READ)
        for file in layout.unnamed_set_aside(str(root))
    ]


def _batches(root: Path) -> Iterator[list[layout.BlockFile]]:
    for namespace_hex in layout.walk_namespaces(str(root)):
        batch: list[layout.BlockFile] = []
        for file in layout.walk_blocks(str(root), namespace_hex):
            batch.append(file)
            if len(batch) == _BATCH_FILES:
                yield batch
                batch = []
        if batch:
            yield batch


def _check_all(lanes: Lanes, root: Path, access: Access, files: list[layout.BlockFile]) -> list[_Finding | None]:
    findings: list[_Finding | None] = [None] * len(files)

    def check_one(i: int, scratch: Scratch) -> None:
        findings[i] = _check(root, access, files[i], scratch)

    lanes.start(check_one, range(len(files))).wait()
    return findings


def _best_access(root: Path) -> Access:
    """Direct where it works, so that the medium is read and not this system's cache of it."""
    try:
        return try_direct(REAL_CALLS, str(root / layout.TMP)).access
    except OSError:
        return Access.BUFFERED


def _check(root: Path, access: Access, file: layout.BlockFile, scratch: Scratch) -> _Finding | None:
    """None for a sound block and for one that is gone by now."""
    try:
        if not file.is_regular:
            raise Damaged(Damage.NOT_A_FILE)
        _prove(access, file, scratch)
    except FileNotFoundError:
        return None
    except NewerFormat:
        return _Finding(newer=file.path)
    except Damaged as damaged:
        moved_to = layout.set_aside(REAL_CALLS, str(root), file.path, file.namespace_hex, file.key, damaged.damage)
        if moved_to not in (None, file.path):
            moved_to = layout.mark_named(REAL_CALLS, moved_to)
        return _Finding(set_aside=SetAside(file.path, damaged.damage.value, moved_to, FoundBy.CHECK))
    except OSError as error:
        return _Finding(unreadable=f"{file.path}: {error.strerror}")
    return None


def _prove(access: Access, file: layout.BlockFile, scratch: Scratch) -> None:
    """Read it as a tier of its namespace would; the payload's length is the header's, which must match the file's."""
    shape = read_header(REAL_CALLS, file.path, scratch).shape
    if shape.stored_bytes != file.length_bytes:
        raise Damaged(Damage.WRONG_LENGTH)  # also keeps a lying header from asking for absurd memory
    claim = Claim(Shape(bytes.fromhex(file.namespace_hex), shape.payload_bytes), file.key)
    view = aligned_buffer(max(shape.padded_bytes, PAGE_BYTES))
    read_block(REAL_CALLS, file.path, access, claim, view, scratch, Verify.PAYLOAD)


# --- purge -------------------------------------------------------------------------------------


def _choose(roots: Sequence[Path], namespace: str | None) -> list[str]:
    found = sorted({name for root in roots for name in layout.walk_namespaces(str(root))})
    if namespace is None:
        return found
    if not re.fullmatch(r"[0-9a-f]{4,64}", namespace):
        raise ConfigError(f"{namespace!r} does not name a namespace: give 4 or more hex digits of its digest")
    matching = [name for name in found if name.startswith(namespace)]
    if len(matching) != 1:
        raise ConfigError(f"{len(matching)} namespaces begin with {namespace}: list them, and give more digits")
    return matching


def _remove_block(path: str) -> bool:
    """False for one that is gone already: a store may have evicted it meanwhile."""
    try:
        os.unlink(path)  # noqa: PTH108
    except FileNotFoundError:
        return False
    except OSError as error:
        raise ConfigError(f"cannot remove {path}: {error.strerror}") from None
    return True


def _remove_namespace_directory(root: Path, namespace_hex: str) -> list[str]:
    """Returns the directory if it has to stay."""
    directory = root / namespace_hex
    if not directory.is_dir() or directory.is_symlink():
        return []
    for fan in layout.walk_fans(str(root), namespace_hex):
        _remove_if_empty(directory / fan)
    if os.listdir(directory) == [layout.NAMESPACE_FILE]:
        remove_if_there(str(directory / layout.NAMESPACE_FILE))
    return [] if _remove_if_empty(directory) else [str(directory)]


def _remove_if_empty(directory: Path) -> bool:
    try:
        directory.rmdir()
    except OSError:
        return False
    return True
