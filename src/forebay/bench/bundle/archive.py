"""A zip archive in one form only: the names, lengths and checksums of its members determine every other byte.

    member, member, ..., directory, end        members are stored, not compressed, in the order of the directory

So a reader recomputes all of it and compares: nothing can hide between members, in a comment, an extra field, a date
or a second directory, a member cannot be a link, and what is stored cannot grow when unpacked. Any zip tool opens it.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import stat
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from forebay.errors import ConfigError, ForebayError

_LOCAL = struct.Struct("<IHHHHHIIIHH")
_CENTRAL = struct.Struct("<IHHHHHHIIIHHHHHII")
_END = struct.Struct("<IHHHHIIH")
_LOCAL_MAGIC, _CENTRAL_MAGIC, _END_MAGIC = 0x04034B50, 0x02014B50, 0x06054B50
_VERSION = 20
_MADE_BY = 3 << 8 | _VERSION
"""On Unix: else the file mode would mean nothing."""
_UTF8_NAMES = 1 << 11
_MIDNIGHT, _NEW_YEAR_1980 = 0, 0x21
"""The first date that a zip archive can name; when the run was is in its records."""
_REGULAR_FILE = (stat.S_IFREG | 0o644) << 16

MOST_MEMBERS = 10_000
MOST_BYTES = 2**32 - 1
"""Of a whole archive, and what its 32-bit offsets reach."""
_PIECE_BYTES = 2**20
_NAME_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@+=-]{0,99}", re.ASCII)
_MOST_PARTS = 8


class BundleUnsound(ForebayError):
    """The file is not what its writer wrote, or was never a bundle. One line that says where."""


@dataclass(frozen=True, slots=True)
class Member:
    name: str
    content_bytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class _Headers:
    """All bytes of an archive but its contents."""

    local: tuple[bytes, ...]
    starts: tuple[int, ...]
    """Offset of each member's local header."""
    directory: bytes
    """With the end record."""
    whole_bytes: int


def check_names(names: Sequence[str]) -> None:
    """Raises BundleUnsound for one that is no plain relative path, or that would be another's file or folder."""
    seen: dict[str, str] = {}
    for name in names:
        parts = name.split("/")
        if len(parts) > _MOST_PARTS or not all(_NAME_PART.fullmatch(part) for part in parts):
            raise BundleUnsound(f"{name[:100]!a} is no name for a member: it could lead out of the folder")
        if name.lower() in seen:  # on some systems these are one file
            raise BundleUnsound(f"{name!r} is in it twice")
        seen[name.lower()] = name
    for name in names:
        for folder in _folders(name.lower()):
            if folder in seen:
                raise BundleUnsound(f"{seen[folder]!r} is both a file and a folder")


def _folders(name: str) -> Iterator[str]:
    parts = name.split("/")
    return ("/".join(parts[:count]) for count in range(1, len(parts)))


def _headers(members: Sequence[Member]) -> _Headers:
    local, starts, directory, at = [], [], [], 0
    for member in members:
        name = member.name.encode()
        common = (_UTF8_NAMES, 0, _MIDNIGHT, _NEW_YEAR_1980, member.crc32, member.content_bytes, member.content_bytes)
        local.append(_LOCAL.pack(_LOCAL_MAGIC, _VERSION, *common, len(name), 0) + name)
        directory.append(
            _CENTRAL.pack(_CENTRAL_MAGIC, _MADE_BY, _VERSION, *common, len(name), 0, 0, 0, 0, _REGULAR_FILE, at) + name
        )
        starts.append(at)
        at += len(local[-1]) + member.content_bytes
    listing = b"".join(directory)
    end = _END.pack(_END_MAGIC, 0, 0, len(members), len(members), len(listing), at, 0)
    return _Headers(tuple(local), tuple(starts), listing + end, at + len(listing) + len(end))


def check_fits(members: Sequence[Member]) -> None:
    """Raises ConfigError. An archive of nothing but small files never gets there."""
    whole_bytes = sum(_LOCAL.size + _CENTRAL.size + 2 * len(each.name) + each.content_bytes for each in members)
    if len(members) > MOST_MEMBERS or whole_bytes + _END.size > MOST_BYTES:
        raise ConfigError(
            f"a bundle holds at most {MOST_MEMBERS:,} files and {MOST_BYTES:,} bytes, "
            f"not {len(members):,} and {whole_bytes:,}"
        )


def measure(name: str, content: BinaryIO) -> Member:
    """Reads it to its end."""
    content_bytes = crc32 = 0
    while piece := content.read(_PIECE_BYTES):
        content_bytes, crc32 = content_bytes + len(piece), zlib.crc32(piece, crc32)
    return Member(name, content_bytes, crc32)


def write_archive(target: BinaryIO, members: Sequence[Member], contents: Iterable[BinaryIO]) -> None:
    """Raises ConfigError when a content has changed since it was measured."""
    check_fits(members)
    headers = _headers(members)
    for member, header, content in zip(members, headers.local, contents, strict=True):
        target.write(header)
        written = Member(member.name, 0, 0)
        while piece := content.read(_PIECE_BYTES):
            target.write(piece)
            written = Member(member.name, written.content_bytes + len(piece), zlib.crc32(piece, written.crc32))
        if written != member:
            raise ConfigError(f"{member.name} changed while it was bundled: bundle it again when nobody writes it")
    target.write(headers.directory)


class Archive:
    """An archive whose form has been proven. Contents are read through the one descriptor that was opened."""

    def __init__(self, file: BinaryIO, members: Sequence[Member], starts: Sequence[int]) -> None:
        self.members = tuple(members)
        self._file = file
        self._content_at = {
            member.name: start + _LOCAL.size + len(member.name.encode())
            for member, start in zip(members, starts, strict=True)
        }

    def pieces(self, member: Member) -> Iterator[bytes]:
        """The content. Raises BundleUnsound at its end unless it has the checksum that the archive says."""
        at, left_bytes, crc32 = self._content_at[member.name], member.content_bytes, 0
        while left_bytes:
            piece = _read_at(self._file, at, min(_PIECE_BYTES, left_bytes))
            at, left_bytes, crc32 = at + len(piece), left_bytes - len(piece), zlib.crc32(piece, crc32)
            yield piece
        if crc32 != member.crc32:
            raise BundleUnsound(f"{member.name} was changed: its checksum is another one")

    def content(self, member: Member, most_bytes: int) -> bytes:
        if member.content_bytes > most_bytes:
            raise BundleUnsound(f"{member.name} has {member.content_bytes:,} bytes, more than any such file needs")
        return b"".join(self.pieces(member))


@contextlib.contextmanager
def open_archive(path: Path) -> Iterator[Archive]:
    """Raises BundleUnsound unless it has the one form, ConfigError when it cannot be read."""
    with _regular_file(path) as file:
        try:
            members = _directory(file)
            yield Archive(file, members, _prove_form(file, members))
        except OSError as error:
            raise ConfigError(f"{path} cannot be read ({error.strerror})") from None


def _regular_file(path: Path) -> BinaryIO:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO must not make us wait
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): name a bundle") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ConfigError(f"{path} is no file: name a bundle")
    return os.fdopen(descriptor, "rb")


def _directory(file: BinaryIO) -> list[Member]:
    """As the end of the file tells it. Nothing of it is believed yet."""
    whole_bytes = file.seek(0, io.SEEK_END)
    if not _END.size <= whole_bytes <= MOST_BYTES:
        raise BundleUnsound("it is no zip archive, or one too large")
    end_at = whole_bytes - _END.size
    magic, _, _, _, count, listing_bytes, listing_at, _ = _END.unpack(_read_at(file, end_at, _END.size))
    if magic != _END_MAGIC or listing_at + listing_bytes != end_at:
        raise BundleUnsound("it is no zip archive, it was cut short, or something was appended to it")
    if count > MOST_MEMBERS:
        raise BundleUnsound(f"it has {count:,} members, more than a bundle may have")
    listing = _read_at(file, listing_at, listing_bytes)
    members, at = list[Member](), 0
    while at < len(listing) and len(members) < count:
        if len(listing) - at < _CENTRAL.size:
            raise BundleUnsound("its directory ends in the middle of an entry")
        fields = _CENTRAL.unpack_from(listing, at)
        name_at = at + _CENTRAL.size
        name = listing[name_at : name_at + fields[10]].decode("utf-8", "backslashreplace")
        _say_what_is_odd(name, fields)
        members.append(Member(name, fields[9], fields[7]))
        at = name_at + fields[10]
    return members


def _say_what_is_odd(name: str, fields: Sequence[int]) -> None:
    """The usual ways of meaning harm get words of their own; the comparison to come finds all others."""
    mode = fields[15] >> 16
    if stat.S_ISLNK(mode):
        raise BundleUnsound(f"{name[:100]!a} is a symbolic link")
    if fields[4] != 0 or fields[8] != fields[9]:
        raise BundleUnsound(f"{name[:100]!a} is compressed: what a bundle holds is stored as it is")


def _prove_form(file: BinaryIO, members: Sequence[Member]) -> tuple[int, ...]:
    """Where the members start. Compares every byte that is not content."""
    check_names([member.name for member in members])
    headers = _headers(members)
    if file.seek(0, io.SEEK_END) != headers.whole_bytes:
        raise BundleUnsound("it has more or fewer bytes than its members")
    expected = (
        *zip(headers.starts, headers.local, strict=True),
        (headers.whole_bytes - len(headers.directory), headers.directory),
    )
    for start, header in expected:
        if _read_at(file, start, len(header)) != header:
            raise BundleUnsound(f"its headers were changed, at byte {start:,} or soon after it")
    return headers.starts


def _read_at(file: BinaryIO, at: int, wanted_bytes: int) -> bytes:
    file.seek(at)
    found = file.read(wanted_bytes)
    if len(found) != wanted_bytes:
        raise OSError(errno.EIO, "it became shorter while it was read")
    return found
