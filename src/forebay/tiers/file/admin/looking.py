"""What is in a pool: roots and namespaces, counted from the disk, whether or not a store knows of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from forebay.errors import ConfigError
from forebay.tiers.file import layout
from forebay.tiers.file.format import Shape
from forebay.tiers.file.holdings import DAY_S
from forebay.tiers.file.records import Limit
from forebay.tiers.file.upkeep import Upkeep
from forebay.types import Namespace

Progress = Callable[[int, int], None]
"""Blocks and bytes so far."""

_FIRST_HOUR_S = 3600.0
_TELL_BLOCKS = 5_000
"""Between two calls of the progress callback, while blocks are counted."""


def nobody(blocks: int, read_bytes: int) -> None:
    """The `Progress` that nobody watches."""


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
    """What files under blocks' names take, whether or not any store still claims them."""
    odd_files: int
    """Of these: those whose length is not their namespace's, of a newer format or damaged. `verify` tells which."""
    odd_bytes: int
    unfinished_files: int
    """In tmp/: being written, or left by writers that died since the pool was last opened."""
    unfinished_bytes: int
    set_aside_files: int
    set_aside_bytes: int
    free_bytes: int
    """Of the file system, for this user."""
    file_system_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Wear:
    """What all stores together have written to the roots given, and what they were told to keep to."""

    written_bytes: int
    since_unix_s: float
    """Since when it is counted."""
    today_bytes: int
    """Since midnight (UTC)."""
    budget_bytes_per_day: int | None
    """None without a budget."""
    budget_left_bytes: int | None
    endurance_bytes: int | None
    """What the drives are rated to take; None where nobody has said so."""
    days_to_rated_wear: float | None
    """At the rate of all the time since it is counted. None without a rating, and in the first hour."""


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


def stat(roots: Sequence[Path], progress: Progress = nobody) -> tuple[RootStat, ...]:
    """What is in each root. `progress` is told the blocks counted so far, and their bytes."""
    counter = _Counter(progress)
    return tuple(_root_stat(root, marker, counter) for root, marker in marked(roots))


def wear(roots: Sequence[Path], now_unix_s: float) -> Wear:
    """From the catalogues of the roots."""
    written_bytes = today_bytes = 0
    since_s: list[int] = []
    limits: dict[Limit, int] = {}
    for root, _ in marked(roots):
        with Upkeep(root) as upkeep:
            meter = upkeep.catalogue.meter
            written_bytes += meter.written_bytes
            today_bytes += meter.today(now_unix_s)
            since_s.append(meter.since_s or int(now_unix_s))
            for limit, amount in upkeep.catalogue.limits.items():
                limits[limit] = max(amount, limits.get(limit, 0))
    elapsed_s = now_unix_s - min(since_s)
    budget_bytes = limits.get(Limit.BUDGET_BYTES_PER_DAY) or None
    endurance_bytes = limits.get(Limit.ENDURANCE_BYTES) or None
    days: float | None = None
    if endurance_bytes is not None and written_bytes and elapsed_s >= _FIRST_HOUR_S:
        days = max(0, endurance_bytes - written_bytes) / written_bytes * elapsed_s / DAY_S
    return Wear(
        written_bytes=written_bytes,
        since_unix_s=min(since_s),
        today_bytes=today_bytes,
        budget_bytes_per_day=budget_bytes,
        budget_left_bytes=None if budget_bytes is None else max(0, budget_bytes - today_bytes),
        endurance_bytes=endurance_bytes,
        days_to_rated_wear=days,
    )


def ls(roots: Sequence[Path], progress: Progress = nobody) -> tuple[NamespaceListing, ...]:
    """Every namespace with what it stands for, in the order of the digests. `progress`: as for `stat`."""
    counter = _Counter(progress)
    usage: dict[str, list[Usage]] = {}
    known: dict[str, Namespace] = {}
    for root, _ in marked(roots):
        for namespace_hex in layout.walk_namespaces(str(root)):
            usage.setdefault(namespace_hex, []).append(counter.usage(root, [namespace_hex]))
            namespace = layout.read_namespace(root, namespace_hex)
            if namespace is not None:
                known[namespace_hex] = namespace
    return tuple(NamespaceListing(name, known.get(name), tuple(found)) for name, found in sorted(usage.items()))


# --- roots -------------------------------------------------------------------------------------


def marked(roots: Sequence[Path]) -> list[tuple[Path, layout.Marker]]:
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


def _root_stat(root: Path, marker: layout.Marker, counter: _Counter) -> RootStat:
    namespaces = layout.walk_namespaces(str(root))
    odd: list[int] = []
    usage = counter.usage(root, namespaces, odd)
    unfinished, quarantined = layout.temp_files(str(root)), layout.set_aside_files(str(root))
    space = os.statvfs(root)
    return RootStat(
        root=str(root),
        root_id=marker.root_id,
        format_version=marker.format_version,
        namespaces=len(namespaces),
        blocks=usage.blocks,
        stored_bytes=usage.stored_bytes,
        odd_files=len(odd),
        odd_bytes=sum(odd),
        unfinished_files=len(unfinished),
        unfinished_bytes=lengths(unfinished),
        set_aside_files=len(quarantined),
        set_aside_bytes=lengths(quarantined),
        free_bytes=space.f_bavail * space.f_frsize,
        file_system_bytes=space.f_blocks * space.f_frsize,
    )


class _Counter:
    """Counts blocks, and tells of it."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._blocks = self._bytes = 0

    def usage(self, root: Path, namespaces: Sequence[str], odd: list[int] | None = None) -> Usage:
        """The lengths of files whose length is not their namespace's are added to `odd`."""
        blocks = stored_bytes = 0
        for namespace_hex in namespaces:
            expected_bytes = _expected_bytes(root, namespace_hex)
            for file in self._files(root, namespace_hex):
                blocks += 1
                stored_bytes += file.length_bytes
                if odd is not None and expected_bytes not in (None, file.length_bytes):
                    odd.append(file.length_bytes)
        return Usage(str(root), blocks, stored_bytes)

    def _files(self, root: Path, namespace_hex: str) -> Iterator[layout.BlockFile]:
        for file in layout.walk_blocks(str(root), namespace_hex):
            if file.is_regular:
                yield file
                self._blocks, self._bytes = self._blocks + 1, self._bytes + file.length_bytes
                if self._blocks % _TELL_BLOCKS == 0:
                    self._progress(self._blocks, self._bytes)


def _expected_bytes(root: Path, namespace_hex: str) -> int | None:
    """How long a block's file of this namespace is; None where nothing says it."""
    namespace = layout.read_namespace(root, namespace_hex)
    return None if namespace is None else Shape(bytes.fromhex(namespace_hex), namespace.block_bytes).stored_bytes


def lengths(paths: Sequence[str]) -> int:
    """Bytes in these files, without those that are gone by now."""
    total_bytes = 0
    for path in paths:
        try:
            total_bytes += os.lstat(path).st_size
        except OSError:
            continue
    return total_bytes
