"""Proving the block files of a pool, whatever their namespace: what `forebay pool verify` and the scrub do."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from forebay.tiers.file import layout
from forebay.tiers.file.blockfile import Claim, Verify, read_block, read_header
from forebay.tiers.file.directio import REAL_CALLS, Access, Scratch, aligned_buffer, try_direct
from forebay.tiers.file.format import PAGE_BYTES, Damage, Damaged, NewerFormat, Shape


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
class Finding:
    """What is wrong with one file. Exactly one of the fields is set."""

    set_aside: SetAside | None = None
    newer: str | None = None
    unreadable: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    checked_blocks: int
    checked_bytes: int
    set_aside: tuple[SetAside, ...]
    newer: tuple[str, ...]
    """Paths of sound files of a later format version; they stay."""
    newer_bytes: int
    """The room that these take."""
    unreadable: tuple[str, ...]
    """Paths that an I/O error kept from being checked, with the error; they stay."""
    expired_blocks: int = 0
    """Removed because of their age."""
    expired_bytes: int = 0
    miscounted_blocks: int = 0
    """Blocks that the catalogue did not know, or knew and that are not there; it knows better now."""


class Tally:
    """Totals of a check so far. Touched by one thread."""

    def __init__(self) -> None:
        self.blocks = self.read_bytes = 0
        self.expired_blocks = self.expired_bytes = 0
        self.miscounted_blocks = 0
        self.set_aside: list[SetAside] = []
        self._newer: list[str] = []
        self._newer_bytes = 0
        self._unreadable: list[str] = []

    def add(self, file: layout.BlockFile, finding: Finding | None) -> None:
        self.blocks += 1
        self.read_bytes += file.length_bytes
        if finding is None:
            return
        if finding.set_aside is not None:
            self.set_aside.append(finding.set_aside)
        if finding.newer is not None:
            self._newer.append(finding.newer)
            self._newer_bytes += file.length_bytes
        if finding.unreadable is not None:
            self._unreadable.append(finding.unreadable)

    def add_expired(self, file: layout.BlockFile) -> None:
        self.expired_blocks += 1
        self.expired_bytes += file.length_bytes

    def report(self) -> CheckReport:
        return CheckReport(
            checked_blocks=self.blocks,
            checked_bytes=self.read_bytes,
            set_aside=tuple(self.set_aside),
            newer=tuple(self._newer),
            newer_bytes=self._newer_bytes,
            unreadable=tuple(self._unreadable),
            expired_blocks=self.expired_blocks,
            expired_bytes=self.expired_bytes,
            miscounted_blocks=self.miscounted_blocks,
        )


def set_aside_by_reads(root: Path) -> list[SetAside]:
    """What reads have set aside and no check has named; it counts as named from now on."""
    return [
        SetAside(file.came_from, file.reason, layout.mark_named(REAL_CALLS, file.path), FoundBy.READ)
        for file in layout.unnamed_set_aside(str(root))
    ]


def best_access(root: Path) -> Access:
    """Direct where it works, so that the medium is read and not this system's cache of it."""
    try:
        return try_direct(REAL_CALLS, str(root / layout.TMP)).access
    except OSError:
        return Access.BUFFERED


Removing = Callable[[layout.BlockFile], AbstractContextManager[None]]
"""Makes the context around whatever moves or removes a block's file: there it is written down for all processes."""


def check_block(
    root: Path, access: Access, file: layout.BlockFile, scratch: Scratch, removing: Removing
) -> Finding | None:
    """Read it in full and prove it; set aside what is damaged. None for a sound block, and for one that is gone."""
    try:
        if not file.is_regular:
            raise Damaged(Damage.NOT_A_FILE)
        _prove(access, file, scratch)
    except FileNotFoundError:
        return None
    except NewerFormat:
        return Finding(newer=file.path)
    except Damaged as damaged:
        try:
            with removing(file):
                moved_to = layout.set_aside(
                    REAL_CALLS, str(root), file.path, file.namespace_hex, file.key, damaged.damage
                )
        except FileNotFoundError:  # a read was faster: it is named as one that a read has found
            return None
        if moved_to not in (None, file.path):
            moved_to = layout.mark_named(REAL_CALLS, moved_to)
        return Finding(set_aside=SetAside(file.path, damaged.damage.value, moved_to, FoundBy.CHECK))
    except OSError as error:
        return Finding(unreadable=f"{file.path}: {error.strerror}")
    return None


def _prove(access: Access, file: layout.BlockFile, scratch: Scratch) -> None:
    """Read it as a tier of its namespace would; the payload's length is the header's, which must match the file's."""
    shape = read_header(REAL_CALLS, file.path, scratch).shape
    if shape.stored_bytes != file.length_bytes:
        raise Damaged(Damage.WRONG_LENGTH)  # also keeps a lying header from asking for absurd memory
    claim = Claim(Shape(bytes.fromhex(file.namespace_hex), shape.payload_bytes), file.key)
    view = aligned_buffer(max(shape.padded_bytes, PAGE_BYTES))
    read_block(REAL_CALLS, file.path, access, claim, view, scratch, Verify.PAYLOAD)
