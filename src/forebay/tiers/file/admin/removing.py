"""Taking things out of a pool: blocks by choice (`purge`), and what nobody needs any more (`gc`)."""

from __future__ import annotations

import contextlib
import os
import re
import stat as modes
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from forebay.errors import ConfigError
from forebay.tiers.file import layout
from forebay.tiers.file.admin.looking import Progress, marked, nobody
from forebay.tiers.file.directio import REAL_CALLS, its_writer_died, remove_if_its_writer_died, remove_if_there
from forebay.tiers.file.upkeep import Upkeep


class Effect(Enum):
    REMOVE = "remove"
    DRY_RUN = "dry run"
    """Count what would be removed, and leave it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which blocks: those for which all that is given holds."""

    namespace: str | None = None
    """Its digest, or 4 or more leading digits of it; exactly one namespace must be meant."""
    tenant: str | None = None
    """The same of a tenant's digest. Blocks of no tenant have none."""
    model: str | None = None
    """The model's name, exactly."""
    older_than_s: float | None = None
    """Written longer ago than this."""

    @property
    def is_everything(self) -> bool:
        return self == Selection()


@dataclass(frozen=True, slots=True)
class PurgeReport:
    namespaces: tuple[str, ...]
    """Digests of what was purged, in whole or in part."""
    removed_blocks: int
    removed_bytes: int
    kept: tuple[str, ...]
    """Directories that stay because there is something in them again, or still: blocks that a store has written
    meanwhile, or what Forebay did not make."""
    effect: Effect


@dataclass(frozen=True, slots=True, kw_only=True)
class GcLimits:
    now_unix_s: float
    ttl_s: float | None = None
    """Blocks written longer ago than this go; None keeps them whatever their age."""
    quarantine_s: float
    """Files set aside longer ago than this go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GcReport:
    unfinished_files: int
    """Of writers that died."""
    unfinished_bytes: int
    expired_blocks: int
    expired_bytes: int
    set_aside_files: int
    set_aside_bytes: int
    empty_directories: int
    effect: Effect


def purge(
    roots: Sequence[Path],
    selection: Selection = Selection(),
    *,
    now_unix_s: float = 0.0,
    effect: Effect = Effect.REMOVE,
    progress: Progress = nobody,
) -> PurgeReport:
    """Remove the blocks that are meant, or all. `now_unix_s` is needed for `older_than_s` alone.

    Only what Forebay made is removed: blocks, namespace files, quarantine (when everything is purged), and directories
    that are empty then. The root stays a pool. A store that has it open goes on writing: its new blocks stay.
    """
    pools = [root for root, _ in marked(roots)]
    chosen = _choose(pools, selection)
    blocks = moved_bytes = 0
    touched: set[str] = set()
    kept: list[str] = []
    for root in pools:
        for namespace_hex in chosen:
            with Upkeep(root) as upkeep:
                for file in layout.walk_blocks(str(root), namespace_hex):
                    is_meant = file.is_regular and _is_old(file, selection.older_than_s, now_unix_s)
                    if is_meant and _remove(upkeep, file, effect):
                        touched.add(namespace_hex)
                        blocks += 1
                        moved_bytes += file.length_bytes
                        progress(blocks, moved_bytes)
            if effect is Effect.REMOVE and selection.older_than_s is None:
                kept.extend(_remove_namespace_directory(root, namespace_hex))
        if effect is Effect.REMOVE and selection.is_everything:
            for path in layout.set_aside_files(str(root)):
                remove_if_there(path)
            layout.sweep(str(root))
    purged = [name for name in chosen if name in touched or selection.older_than_s is None]
    return PurgeReport(tuple(purged), blocks, moved_bytes, tuple(kept), effect)


def gc(
    roots: Sequence[Path], limits: GcLimits, *, effect: Effect = Effect.REMOVE, progress: Progress = nobody
) -> GcReport:
    """Remove what nobody needs: files of writers that died, expired blocks, old quarantine, empty directories.

    `progress` is told the blocks looked at, and their bytes.
    """
    unfinished, expired, aside = _Heap(), _Heap(), _Heap()
    directories = seen = seen_bytes = 0
    for root, _ in marked(roots):
        for path in layout.temp_files(str(root)):
            length_bytes = _length_of(path)
            if remove_if_its_writer_died(path) if effect is Effect.REMOVE else its_writer_died(path):
                unfinished.add(length_bytes)
        for path in layout.set_aside_files(str(root)):
            found = _stat_of(path)
            # the time of the last change of its name or mode: when it was moved, and not when the block was written
            if found is not None and limits.now_unix_s - found.st_ctime > limits.quarantine_s:
                length_bytes = found.st_size
                if effect is Effect.DRY_RUN or _remove_set_aside(path):
                    aside.add(length_bytes)
        for namespace_hex in layout.walk_namespaces(str(root)):
            with Upkeep(root) as upkeep:
                for file in layout.walk_blocks(str(root), namespace_hex):
                    seen, seen_bytes = seen + 1, seen_bytes + file.length_bytes
                    progress(seen, seen_bytes)
                    if limits.ttl_s is None or not file.is_regular:
                        continue
                    if _is_old(file, limits.ttl_s, limits.now_unix_s) and _remove(upkeep, file, effect):
                        expired.add(file.length_bytes)
            directories += _empty_directories(root, namespace_hex, effect)
    return GcReport(
        unfinished_files=unfinished.files,
        unfinished_bytes=unfinished.bytes,
        expired_blocks=expired.files,
        expired_bytes=expired.bytes,
        set_aside_files=aside.files,
        set_aside_bytes=aside.bytes,
        empty_directories=directories,
        effect=effect,
    )


class _Heap:
    """What has been removed of one kind."""

    def __init__(self) -> None:
        self.files = self.bytes = 0

    def add(self, length_bytes: int) -> None:
        self.files += 1
        self.bytes += length_bytes


def _choose(roots: Sequence[Path], selection: Selection) -> list[str]:
    """Digests of the namespaces that are meant."""
    found = sorted({name for root in roots for name in layout.walk_namespaces(str(root))})
    if selection.namespace is not None:
        found = [_only_one(found, selection.namespace)]
    if selection.tenant is None and selection.model is None:
        return found
    fields = {name: next(filter(None, (layout.read_namespace(root, name) for root in roots)), None) for name in found}
    if selection.tenant is not None:
        _check_digits(selection.tenant, "a tenant")
        tenants = {known.tenant_digest for known in fields.values() if known is not None and known.tenant_digest}
        meant = _only_one(sorted(tenants), selection.tenant, "tenants")
        found = [name for name in found if (known := fields[name]) is not None and known.tenant_digest == meant]
    if selection.model is not None:
        models = {known.model for known in fields.values() if known is not None}
        if selection.model not in models:
            raise ConfigError(f"no namespace of a model named {selection.model!a}: 'forebay pool ls' lists the names")
        found = [name for name in found if (known := fields[name]) is not None and known.model == selection.model]
    return found


def _only_one(digests: Sequence[str], beginning: str, what: str = "namespaces") -> str:
    _check_digits(beginning, "a namespace" if what == "namespaces" else "a tenant")
    matching = [name for name in digests if name.startswith(beginning)]
    if len(matching) != 1:
        raise ConfigError(f"{len(matching)} {what} begin with {beginning}: list them, and give more digits")
    return matching[0]


def _check_digits(beginning: str, what: str) -> None:
    if not re.fullmatch(r"[0-9a-f]{4,64}", beginning):
        raise ConfigError(f"{beginning[:80]!a} does not name {what}: give 4 or more hex digits of its digest")


def _is_old(file: layout.BlockFile, age_s: float | None, now_unix_s: float) -> bool:
    return age_s is None or now_unix_s - file.mtime_ns / 1e9 > age_s


def _remove(upkeep: Upkeep, file: layout.BlockFile, effect: Effect) -> bool:
    """Whether it was there to be removed."""
    if effect is Effect.DRY_RUN:
        return True
    try:
        return upkeep.remove(file)
    except OSError as error:
        raise ConfigError(f"cannot remove {file.path}: {error.strerror}") from None


def _stat_of(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except OSError:
        return None


def _length_of(path: str) -> int:
    found = _stat_of(path)
    return found.st_size if found is not None else 0


def _remove_set_aside(path: str) -> bool:
    """Files, links and empty directories; a directory with something in it stays for its owner."""
    try:
        if modes.S_ISDIR(os.lstat(path).st_mode):
            os.rmdir(path)  # noqa: PTH106
        else:
            os.unlink(path)  # noqa: PTH108
    except OSError:
        return False
    return True


def _empty_directories(root: Path, namespace_hex: str, effect: Effect) -> int:
    """Those of a namespace that hold no block, itself included; a store that still needs them makes them again."""
    directory = root / namespace_hex
    fans = layout.walk_fans(str(root), namespace_hex)
    empty = [fan for fan in fans if not os.listdir(directory / fan)]
    if effect is Effect.REMOVE:
        empty = [fan for fan in empty if _remove_if_empty(directory / fan)]
    is_empty = len(empty) == len(fans) and set(os.listdir(directory)) <= {layout.NAMESPACE_FILE, *empty}
    if effect is Effect.REMOVE:
        is_empty = is_empty and not _remove_namespace_directory(root, namespace_hex)
    return len(empty) + is_empty


def _remove_namespace_directory(root: Path, namespace_hex: str) -> list[str]:
    """Returns the directory if it has to stay."""
    directory = root / namespace_hex
    if not directory.is_dir() or directory.is_symlink():
        return []
    for fan in layout.walk_fans(str(root), namespace_hex):
        _remove_if_empty(directory / fan)
    namespace = layout.read_namespace(root, namespace_hex)
    if os.listdir(directory) == [layout.NAMESPACE_FILE]:
        remove_if_there(str(directory / layout.NAMESPACE_FILE))
    if _remove_if_empty(directory):
        return []
    if namespace is not None:  # a store has made a directory for its next block meanwhile
        with contextlib.suppress(OSError):
            layout.make_namespace(REAL_CALLS, root, namespace_hex, namespace)
    return [str(directory)]


def _remove_if_empty(directory: Path) -> bool:
    try:
        directory.rmdir()
    except OSError:
        return False
    return True
