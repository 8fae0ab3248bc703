"""Names and places inside a root directory. See docs/format.md.

    ROOT/forebay-pool.json                                   marker: format version, identity of the root
    ROOT/<namespace digest>/namespace.json                   what the digest stands for, for people
    ROOT/<namespace digest>/<2 hex digits>/<key>.kv          one block
    ROOT/tmp/                                                files being written
    ROOT/quarantine/<key>.<namespace digest>.<reason>        files set aside; `.named` behind it once a check named them

A name from a directory listing becomes a path only if it has exactly the form of what it stands for.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from forebay.errors import ConfigError
from forebay.tiers.file.directio import (
    Access,
    Calls,
    create_temp,
    remove_if_its_writer_died,
    remove_if_there,
)
from forebay.tiers.file.format import VERSION, Damage
from forebay.types import BlockKey, Namespace

log = logging.getLogger("forebay.tiers.file")

MARKER = "forebay-pool.json"
NAMESPACE_FILE = "namespace.json"
TMP = "tmp"
QUARANTINE = "quarantine"
KEY_BYTES = 32
_SMALL_FILE_BYTES = 64 * 1024
QUARANTINE_FILES = 64
"""Files kept in a root's quarantine for inspection. Past that, damaged files are removed, or they fill the disk."""

_DIGEST = re.compile(r"[0-9a-f]{64}")
_FAN = re.compile(r"[0-9a-f]{2}")
_BLOCK = re.compile(r"[0-9a-f]{64}\.kv")
_TEMP = re.compile(r"[0-9a-z]+\.[0-9a-f]{16}\.tmp")
_SET_ASIDE = re.compile(
    r"(?P<key>[0-9a-f]{64})\.(?P<namespace>[0-9a-f]{64})\.(?P<reason>[a-z-]+)(?:\.[0-9]+)?(?P<named>\.named)?"
)
_NAMED = ".named"
_MAY_BE_IN_A_NEW_ROOT = {TMP, QUARANTINE, "lost+found"}


class Marker(msgspec.Struct, frozen=True, kw_only=True):
    """Content of forebay-pool.json."""

    format_version: int
    root_id: str
    """32 hex digits, random, made with the root. Placement goes by it, so a root keeps its blocks wherever mounted."""


class NamespaceFile(msgspec.Struct, frozen=True, kw_only=True):
    """Content of namespace.json."""

    format_version: int
    namespace_digest: str
    namespace: Namespace


@dataclass(frozen=True, slots=True)
class BlockFile:
    """A directory entry with a block's name; whether it is a sound block only reading it tells."""

    path: str
    namespace_hex: str
    key: BlockKey
    length_bytes: int
    mtime_ns: int
    is_regular: bool


def block_path(root: str, namespace_hex: str, key: BlockKey) -> str:
    if len(key) != KEY_BYTES:
        raise ValueError(f"a block key has {KEY_BYTES} bytes, not {len(key)}")
    name = key.hex()
    return f"{root}/{namespace_hex}/{name[:2]}/{name}.kv"


def read_marker(root: Path) -> Marker | None:
    """The root's marker; None without one. Raises ConfigError for a marker that this version cannot go by."""
    path = root / MARKER
    try:
        marker = msgspec.json.decode(_read_small(path), type=Marker)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged ({error}): restore it, or move the directory away") from None
    if marker.format_version != VERSION:
        raise ConfigError(
            f"{root} holds format version {marker.format_version}, this Forebay knows {VERSION}: "
            "use the Forebay that made it, or another directory"
        )
    if not re.fullmatch(r"[0-9a-f]{32}", marker.root_id):
        raise ConfigError(f"{path} is damaged (root_id): restore it, or move the directory away")
    return marker


def make_root(calls: Calls, root: Path) -> Marker:
    """Make `root` a pool, or join the process that is just doing so.

    Raises ConfigError for a directory with anything else in it, OSError when it cannot be made.
    """
    root.mkdir(mode=0o700, exist_ok=True)
    foreign = sorted(set(os.listdir(root)) - _MAY_BE_IN_A_NEW_ROOT)
    if foreign and MARKER not in foreign:
        raise ConfigError(
            f"{root} has no {MARKER} but holds {foreign[0]!r}: name an empty or a new directory as the root"
        )
    (root / TMP).mkdir(mode=0o700, exist_ok=True)
    (root / QUARANTINE).mkdir(mode=0o700, exist_ok=True)
    mine = Marker(format_version=VERSION, root_id=secrets.token_hex(16))
    _publish_json(calls, root, root / MARKER, mine)
    marker = read_marker(root)
    if marker is None:
        raise FileNotFoundError(errno.ENOENT, "the pool marker vanished", str(root / MARKER))
    return marker


def make_namespace(calls: Calls, root: Path, namespace_hex: str, namespace: Namespace) -> None:
    """The namespace's directory, with the file that explains it. Raises ConfigError for symbolic links in its place."""
    directory = root / namespace_hex
    directory.mkdir(mode=0o700, exist_ok=True)
    with os.scandir(directory) as entries:
        links = [entry.path for entry in entries if entry.is_symlink()]
    if directory.is_symlink():
        links.append(str(directory))
    if links:
        raise ConfigError(f"{links[0]} is a symbolic link inside a pool, which Forebay does not follow: remove it")
    path = directory / NAMESPACE_FILE
    wanted = NamespaceFile(format_version=VERSION, namespace_digest=namespace_hex, namespace=namespace)
    if len(msgspec.json.encode(wanted)) > _SMALL_FILE_BYTES // 2:  # written with blanks, and read up to the limit
        raise ConfigError(
            f"the namespace takes more than {_SMALL_FILE_BYTES // 2} bytes to write down: shorten its texts, or give "
            "digests of them"
        )
    if path.exists() and read_namespace(root, namespace_hex) != namespace:
        log.warning("%s did not describe its namespace: writing it anew", path)
        path.unlink(missing_ok=True)
    _publish_json(calls, root, path, wanted)


def read_namespace(root: Path, namespace_hex: str) -> Namespace | None:
    """What a namespace's directory says of itself; None where it says nothing intelligible."""
    try:
        raw = _read_small(root / namespace_hex / NAMESPACE_FILE)
        found = msgspec.json.decode(raw, type=NamespaceFile)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return found.namespace if found.namespace_digest == namespace_hex else None


def tenant_of(root: Path, namespace_hex: str) -> bytes:
    """Digest of the tenant whose namespace this is; zeros for none, and where nothing says whose it is."""
    namespace = read_namespace(root, namespace_hex)
    return bytes(32) if namespace is None else tenant_bytes(namespace)


def tenant_bytes(namespace: Namespace) -> bytes:
    """The tenant's digest in 32 bytes."""
    text = namespace.tenant_digest
    if not text:
        return bytes(32)
    return bytes.fromhex(text) if _DIGEST.fullmatch(text) else hashlib.sha256(text.encode()).digest()


def make_tmp(calls: Calls, root: str) -> None:
    """Somebody may have tidied up. If the root itself is gone, this fails."""
    with contextlib.suppress(FileExistsError):
        calls.mkdir(f"{root}/{TMP}", 0o700)


def walk_namespaces(root: str) -> list[str]:
    """Hex digests of the namespaces that have a (real) directory."""
    return sorted(name for name in _directories(root) if _DIGEST.fullmatch(name))


def walk_fans(root: str, namespace_hex: str) -> list[str]:
    """Names of the (real) directories that blocks of a namespace are in."""
    return [name for name in _directories(f"{root}/{namespace_hex}") if _FAN.fullmatch(name)]


def walk_blocks(root: str, namespace_hex: str) -> Iterator[BlockFile]:
    """Every entry with a block's name in its right place. Others are no business of ours; vanishing ones are gone."""
    for fan in walk_fans(root, namespace_hex):
        yield from walk_fan(root, namespace_hex, fan)


def walk_fan(root: str, namespace_hex: str, fan: str) -> Iterator[BlockFile]:
    """As `walk_blocks`, in one of the directories."""
    yield from _blocks_in(root, namespace_hex, fan, _entries(f"{root}/{namespace_hex}/{fan}"))


def walk_blocks_after(root: str, namespace_hex: str, key_hex: str) -> Iterator[BlockFile]:
    """Those whose keys come after `key_hex`, in the order of their keys."""
    for fan in sorted(walk_fans(root, namespace_hex)):
        if fan >= key_hex[:2]:
            entries = [entry for entry in _entries(f"{root}/{namespace_hex}/{fan}") if entry.name[:-3] > key_hex]
            yield from _blocks_in(root, namespace_hex, fan, sorted(entries, key=lambda entry: entry.name))


def remove_block(file: BlockFile) -> bool:
    """False for one that is gone already: a store may have evicted it meanwhile. Raises other errors as they are."""
    try:
        os.unlink(file.path)  # noqa: PTH108
    except FileNotFoundError:
        return False
    return True


def _blocks_in(root: str, namespace_hex: str, fan: str, entries: Iterable[os.DirEntry[str]]) -> Iterator[BlockFile]:
    for entry in entries:
        if _BLOCK.fullmatch(entry.name) and entry.name.startswith(fan):
            try:
                found = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            yield BlockFile(
                entry.path, namespace_hex, BlockKey(bytes.fromhex(entry.name[:-3])),
                found.st_size, found.st_mtime_ns, stat.S_ISREG(found.st_mode),
            )  # fmt: skip


def sweep(root: str) -> int:
    """Remove what writers that died left in tmp/; returns how many files. Live writers keep theirs (their flock)."""
    swept = 0
    for path in temp_files(root):
        swept += remove_if_its_writer_died(path)
    if swept:
        log.info("%s: removed %d unfinished files of writers that died", root, swept)
    return swept


def temp_files(root: str) -> list[str]:
    return _named_files(f"{root}/{TMP}", _TEMP)


def set_aside_files(root: str) -> list[str]:
    """Paths of the files in quarantine."""
    return _named_files(f"{root}/{QUARANTINE}", _SET_ASIDE)


@dataclass(frozen=True, slots=True)
class SetAsideFile:
    """A file in quarantine that no check has named yet."""

    path: str
    came_from: str
    reason: str


def unnamed_set_aside(root: str) -> list[SetAsideFile]:
    """What reads have set aside since the last check."""
    found: list[SetAsideFile] = []
    for path in set_aside_files(root):
        parts = _SET_ASIDE.fullmatch(os.path.basename(path))  # noqa: PTH119
        if parts is not None and parts["named"] is None:
            came_from = block_path(root, parts["namespace"], BlockKey(bytes.fromhex(parts["key"])))
            found.append(SetAsideFile(path, came_from, parts["reason"]))
    return found


def mark_named(calls: Calls, path: str) -> str:
    """A check has named this file in quarantine: the next one does not. Returns its new path."""
    try:
        calls.rename(path, path + _NAMED)
    except OSError as error:
        log.warning("%s: cannot be marked as named: %s", path, error)
        return path
    return path + _NAMED


def set_aside(calls: Calls, root: str, file: str, namespace_hex: str, key: BlockKey, damage: Damage) -> str | None:
    """Take a file that is not its block out of the way, with the reason in its new name; one warning line.

    Returns where it is now: None when it was removed (quarantine is full), `file` when it cannot be moved. Raises
    FileNotFoundError when another reader was faster.
    """
    place = _free_name(f"{root}/{QUARANTINE}/{key.hex()}.{namespace_hex}.{damage.value}")
    try:
        os.makedirs(f"{root}/{QUARANTINE}", mode=0o700, exist_ok=True)  # noqa: PTH103
        if len(set_aside_files(root)) >= QUARANTINE_FILES and not os.path.isdir(file):  # noqa: PTH112
            os.unlink(file)  # noqa: PTH108
            log.warning("%s: %s; removed, since quarantine holds %d files", file, damage.value, QUARANTINE_FILES)
            return None
        calls.rename(file, place)
    except FileNotFoundError:
        raise
    except OSError as error:
        log.warning("%s: %s; cannot be set aside: %s", file, damage.value, error.strerror)
        return file
    log.warning("%s: %s; set aside as %s", file, damage.value, place)
    return place


def _free_name(place: str) -> str:
    """`place`, with a number behind it if that one is taken: what is set aside must not replace what was."""
    taken, number = place, 1
    while os.path.lexists(taken) or os.path.lexists(taken + _NAMED):
        number += 1
        taken = f"{place}.{number}"
    return taken


def _read_small(path: Path) -> bytes:
    """The beginning of a small file; never waits for a named pipe that stands in its place."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "is not a regular file", str(path))
        return os.read(descriptor, _SMALL_FILE_BYTES)
    finally:
        os.close(descriptor)


def _named_files(directory: str, name: re.Pattern[str]) -> list[str]:
    return sorted(entry.path for entry in _entries(directory) if name.fullmatch(entry.name))


def _directories(path: str) -> list[str]:
    return [entry.name for entry in _entries(path) if entry.is_dir(follow_symlinks=False)]


def _entries(directory: str) -> list[os.DirEntry[str]]:
    """Empty for what is not there; what cannot be listed is said and left out."""
    try:
        with os.scandir(directory) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        log.warning("cannot list %s: %s", directory, error.strerror)
        return []


def _publish_json(calls: Calls, root: Path, path: Path, content: msgspec.Struct) -> None:
    """Write a small file whole or not at all; one that is already there stays."""
    if path.exists():
        return
    temp = create_temp(calls, str(root / TMP), "json", Access.BUFFERED)
    try:
        os.write(temp.descriptor, msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")
        os.fsync(temp.descriptor)
        _link(calls, temp.path, path)
    finally:
        remove_if_there(temp.path)
        os.close(temp.descriptor)


def _link(calls: Calls, temp: str, path: Path) -> None:
    """Unlike rename, a link does not replace what another process put there meanwhile."""
    try:
        path.hardlink_to(temp)
    except FileExistsError:
        return
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        calls.rename(temp, str(path))  # a file system without hard links
