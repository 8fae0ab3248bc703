"""What a directory offers to the file tier, found by trying it. `forebay doctor` shows it."""

from __future__ import annotations

import os
import re
import resource
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from forebay.errors import ConfigError
from forebay.tiers.file.directio import REAL_CALLS, Access, Calls, IoPath, Locks, try_direct
from forebay.tiers.file.format import PAGE_BYTES
from forebay.tiers.file.native import find_kernel

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_MOUNTS = Path("/proc/self/mountinfo")
_LOW_FREE_SHARE = 0.05
_IN_MEMORY = {"tmpfs", "ramfs"}
_ON_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "glusterfs", "fuse.juicefs", "9p", "virtiofs"}


class Verdict(Enum):
    OK = "ok"
    WARN = "warn"
    """Works, but slower or with less safety than it could."""
    BAD = "bad"
    """The file tier cannot work here."""


@dataclass(frozen=True, slots=True)
class ProbeItem:
    name: str
    verdict: Verdict
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReport:
    path: str
    """What was asked for."""
    tried: str
    """The directory that was tried: `path`, or its parent where it does not exist yet."""
    items: tuple[ProbeItem, ...]
    io: IoPath | None
    """None when nothing could be written and read there."""
    file_system: str
    """Type, such as ext4; empty where unknown."""
    device: str
    """Device of the mount; empty where unknown."""
    free_bytes: int
    huge_pages: str
    """always, madvise or never; empty where unknown."""
    memlock_bytes: int | None
    """Memory that this process may lock; None for no limit."""

    @property
    def verdict(self) -> Verdict:
        """The worst of the items."""
        verdicts = {item.verdict for item in self.items}
        return next(verdict for verdict in (Verdict.BAD, Verdict.WARN, Verdict.OK) if verdict in verdicts)


@dataclass(frozen=True, slots=True)
class _Mount:
    file_system: str
    device: str


@dataclass(frozen=True, slots=True)
class _Trial:
    """Either how I/O goes, or why it does not."""

    io: IoPath | None
    trouble: str


def probe(path: Path, calls: Calls = REAL_CALLS) -> ProbeReport:
    """Really write and read a page in a temporary file there, and look at what surrounds it.

    Raises ConfigError for a path that cannot even be looked at.
    """
    asked = Path(os.path.abspath(path))  # noqa: PTH100
    directory = asked if _is_there(asked) else asked.parent
    trial = _try(calls, directory)
    space = os.statvfs(directory) if directory.is_dir() else None
    mount = _mount(directory)
    huge_pages = _huge_pages()
    memlock_bytes: int | None = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if memlock_bytes == resource.RLIM_INFINITY:
        memlock_bytes = None
    items = [_there_item(asked, directory), _writable_item(directory, trial), _medium_item(mount)]
    if trial.io is not None:
        items += [_direct_item(trial.io), _locks_item(trial.io)]
    if space is not None:
        items.append(_space_item(space))
    items += [_kernel_item(trial.io), _huge_pages_item(huge_pages), _memlock_item(memlock_bytes)]
    return ProbeReport(
        path=str(asked),
        tried=str(directory),
        items=tuple(items),
        io=trial.io,
        file_system=mount.file_system,
        device=mount.device,
        free_bytes=space.f_bavail * space.f_frsize if space is not None else 0,
        huge_pages=huge_pages,
        memlock_bytes=memlock_bytes,
    )


def _try(calls: Calls, directory: Path) -> _Trial:
    try:
        return _Trial(try_direct(calls, str(directory)), "")
    except OSError as error:
        return _Trial(None, error.strerror or str(error))


def _is_there(path: Path) -> bool:
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise ConfigError(f"cannot look at {path}: {error.strerror}") from None
    return True


def _there_item(asked: Path, tried: Path) -> ProbeItem:
    if tried == asked:
        return ProbeItem("directory", Verdict.OK, "is there")
    if not os.path.isdir(tried):  # noqa: PTH112
        return ProbeItem("directory", Verdict.BAD, f"is not there, nor is {tried}: make that first, or mount it")
    return ProbeItem(
        "directory", Verdict.WARN, f"is not there; a store would make it in {tried}, which was tried instead"
    )


def _writable_item(directory: Path, trial: _Trial) -> ProbeItem:
    if trial.io is None:
        return ProbeItem("writable", Verdict.BAD, f"cannot write and read a file in {directory}: {trial.trouble}")
    return ProbeItem("writable", Verdict.OK, f"wrote and read a page in {directory}")


def _medium_item(mount: _Mount) -> ProbeItem:
    where = f"{mount.file_system or 'unknown file system'} on {mount.device or 'unknown device'}"
    if mount.file_system in _IN_MEMORY:
        words = f"{where}: blocks would stay in memory and be gone after a reboot; name a directory on a disk"
        return ProbeItem("medium", Verdict.WARN, words)
    if mount.file_system in _ON_NETWORK:
        return ProbeItem("medium", Verdict.OK, f"{where}: a network file system; processes on other hosts may share it")
    return ProbeItem("medium", Verdict.OK, where)


def _direct_item(io: IoPath) -> ProbeItem:
    if io.access is Access.BUFFERED:
        return ProbeItem("direct I/O", Verdict.WARN, f"{io.reason}: reads go through the page cache, and are slower")
    asked = "does not say" if io.alignment_bytes is None else f"asks for {io.alignment_bytes}"
    return ProbeItem("direct I/O", Verdict.OK, f"works with {PAGE_BYTES}-byte alignment (the file system {asked})")


def _locks_item(io: IoPath) -> ProbeItem:
    if io.locks is Locks.UNSUPPORTED:
        return ProbeItem("file locks", Verdict.WARN, "none here: files of writers that died are not removed")
    return ProbeItem("file locks", Verdict.OK, "flock works: files of writers that died are removed")


def _space_item(space: os.statvfs_result) -> ProbeItem:
    free_bytes, all_bytes = space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize
    verdict = Verdict.WARN if free_bytes < _LOW_FREE_SHARE * all_bytes else Verdict.OK
    return ProbeItem("space", verdict, f"{free_bytes / 2**30:.1f} of {all_bytes / 2**30:.1f} GiB free")


def _kernel_item(io: IoPath | None) -> ProbeItem:
    found = find_kernel()
    if found.kernel is None:
        return ProbeItem("reads, writes", Verdict.WARN, f"by Python, slower while it is busy: {found.words}")
    if io is not None and not io.has_unnamed:
        words = f"reads by the {found.words}; writes by Python, slower while it is busy: no files without names here"
        return ProbeItem("reads, writes", Verdict.WARN, words)
    return ProbeItem("reads, writes", Verdict.OK, f"by the {found.words}")


def _huge_pages_item(huge_pages: str) -> ProbeItem:
    if huge_pages in ("always", "madvise"):
        return ProbeItem("huge pages", Verdict.OK, f"{huge_pages}: the host pool gets them")
    return ProbeItem("huge pages", Verdict.WARN, f"{huge_pages or 'unknown'}: set {_HUGE_PAGES} to madvise")


def _memlock_item(memlock_bytes: int | None) -> ProbeItem:
    if memlock_bytes is None:
        return ProbeItem("locked memory", Verdict.OK, "no limit")
    words = f"at most {memlock_bytes / 2**20:.0f} MiB; only pinning memory for a device needs more (ulimit -l)"
    return ProbeItem("locked memory", Verdict.OK, words)


def _huge_pages() -> str:
    """The bracketed word in the kernel's list."""
    try:
        chosen = re.search(r"\[(\w+)\]", _HUGE_PAGES.read_text())
    except OSError:
        return ""
    return chosen[1] if chosen else ""


def _mount(directory: Path) -> _Mount:
    """The mount that the directory is on: the longest mount point that it begins with; of equals, the last."""
    best, found = -1, _Mount("", "")
    real = os.path.realpath(directory)
    try:
        lines = _MOUNTS.read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        before, _, after = line.partition(" - ")
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), before.split()[4])
        if (real + "/").startswith(point.rstrip("/") + "/") and len(point) >= best:
            file_system, device = after.split()[:2]
            best, found = len(point), _Mount(file_system, device)
    return found
