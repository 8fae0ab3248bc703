"""Whether reads were physical: what lies under a path, and how many bytes the kernel read there.

A restore is called cold only if the bytes came through the block layer. Two counters have to say so, the process's own
(`read_bytes` of /proc/self/io) and the device's (sectors read, /sys/dev/block/MAJ:MIN/stat); where either is missing,
nothing is claimed. Beneath a virtual machine's block device there may be further caches, which no counter here sees.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import msgspec

from forebay.bench.hardware import disk_facts

SECTOR_BYTES = 512
"""The unit of the block layer's counters, whatever the device's own sector is."""
_SECTORS_READ, _SECTORS_WRITTEN = 2, 6
"""Fields of a block device's `stat`; Documentation/block/stat.rst."""
ENOUGH_SHARE = 0.95
"""Share of the wanted bytes that both counters have to show. Below 1 only for blocks that are read by others too."""

_IN_MEMORY = {"tmpfs", "ramfs", "devtmpfs", "hugetlbfs", "rootfs"}
_OVER_A_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "9p", "virtiofs", "beegfs", "glusterfs"}
_MEMORY_DEVICE = re.compile(r"(ram|zram)\d+")
_DEEPEST = 8
"""Devices upon devices that are followed before giving up."""


class Validity(Enum):
    VALID = "valid"
    INVALID = "invalid"


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a measurement is what it says it is. INVALID exactly when there is a reason."""

    validity: Validity
    reasons: tuple[str, ...] = ()

    @classmethod
    def of(cls, reasons: Sequence[str]) -> Verdict:
        return cls(validity=Validity.INVALID if reasons else Validity.VALID, reasons=tuple(reasons))


class Medium(msgspec.Struct, frozen=True, kw_only=True):
    """What lies under a path."""

    path: str
    filesystem: str
    source: str
    """What the mount table names as mounted there."""
    device: str = ""
    """Kernel name of the block device, such as `nvme0n1p2`; empty without one."""
    device_number: str = ""
    """`MAJ:MIN`."""
    mount_options: str = ""
    """Of the mount and of the file system."""
    hardware: dict[str, str] = {}
    """What the device is and how it is attached, for people."""
    doubt: str = ""
    """Why physical reads cannot be shown here; empty where they can."""


class ReadCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes read so far, or between two such counts. None where the kernel does not say."""

    process_bytes: int | None
    """At the block layer, on behalf of this process."""
    device_bytes: int | None
    """From the device, by anybody."""

    def since(self, earlier: ReadCounts) -> ReadCounts:
        return ReadCounts(
            process_bytes=_difference(self.process_bytes, earlier.process_bytes),
            device_bytes=_difference(self.device_bytes, earlier.device_bytes),
        )

    def plus(self, other: ReadCounts) -> ReadCounts:
        return ReadCounts(
            process_bytes=_sum(self.process_bytes, other.process_bytes),
            device_bytes=_sum(self.device_bytes, other.device_bytes),
        )


NO_READS = ReadCounts(process_bytes=0, device_bytes=0)


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """What the cold reads of a measurement had to be, and what the counters say they were."""

    medium: Medium
    wanted_bytes: int
    """The working set: bytes that the cold restores delivered."""
    read: ReadCounts
    """Over those restores, and nothing else."""

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the reads cannot be called physical; empty if they can."""
        if self.medium.doubt:
            return (f"physical reads cannot be shown: {self.medium.doubt}",)
        found = []
        if self.wanted_bytes == 0:
            found.append("nothing was read from cold disk")
        for who, read_bytes in (("this process", self.read.process_bytes), ("the device", self.read.device_bytes)):
            if read_bytes is None:
                found.append(f"physical reads cannot be shown: the kernel does not say what {who} read")
            elif read_bytes < ENOUGH_SHARE * self.wanted_bytes:
                share = read_bytes / self.wanted_bytes
                found.append(f"the cold reads were not physical: {who} read {share:.0%} of the working set from disk")
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Kernel:
    """Where the kernel's accounts are read. Other roots than the real ones are for tests."""

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")

    def read_counts(self, medium: Medium) -> ReadCounts:
        return ReadCounts(
            process_bytes=self._process_bytes(), device_bytes=self._device_bytes(medium.device_number, _SECTORS_READ)
        )

    def written_bytes(self, medium: Medium) -> int | None:
        """To the device, by anybody, so far. None where the kernel does not say."""
        return self._device_bytes(medium.device_number, _SECTORS_WRITTEN)

    def medium_of(self, path: Path) -> Medium:
        """The file system and block device under an existing path."""
        return self._medium(path, 0)

    def _medium(self, path: Path, depth: int) -> Medium:
        mount = self._mount_of(path)
        if mount is None:
            return Medium(path=str(path), filesystem="unknown", source="", doubt="the mount table cannot be read")
        medium = Medium(
            path=str(path), filesystem=mount.filesystem, source=mount.source, mount_options=mount.all_options
        )
        if mount.filesystem in _IN_MEMORY:
            return _doubtful(medium, f"{path} is on {mount.filesystem}, which keeps files in memory")
        if mount.filesystem in _OVER_A_NETWORK:
            return _doubtful(medium, f"{path} is on {mount.filesystem}, which has no local block device")
        if mount.filesystem == "overlay":
            return self._under_overlay(medium, mount, depth)
        number = self._device_number(mount)
        if not number:
            return _doubtful(medium, f"no block device is known under {path} ({mount.filesystem} on {mount.source})")
        place = self.sys / "dev/block" / number
        medium = msgspec.structs.replace(
            medium, device=place.resolve().name, device_number=number, hardware=disk_facts(place)
        )
        return _doubtful(medium, self._memory_beneath(place, depth))

    def _under_overlay(self, medium: Medium, mount: _Mount, depth: int) -> Medium:
        """New files of an overlay lie in its upper directory, if that can be seen from here."""
        upper = next((option[9:] for option in mount.options if option.startswith("upperdir=")), "")
        if not upper or not Path(upper).is_dir() or depth >= _DEEPEST:
            return _doubtful(
                medium, f"{medium.path} is on an overlay whose disk is not visible from here; use a volume"
            )
        below = self._medium(Path(upper), depth + 1)
        return msgspec.structs.replace(below, path=medium.path, filesystem=f"overlay on {below.filesystem}")

    def _device_number(self, mount: _Mount) -> str:
        """MAJ:MIN of the device under a mount; from its source where the file system has a number of its own."""
        if (self.sys / "dev/block" / mount.device_number).exists():
            return mount.device_number
        name = Path(os.path.realpath(mount.source)).name if mount.source.startswith("/dev/") else ""
        return _text_of(self.sys / "class/block" / name / "dev") if name else ""

    def _memory_beneath(self, device: Path, depth: int) -> str:
        """Why a block device is no disk, or empty: RAM disks, and stacks (dm, md, loop) that end in memory."""
        name = device.resolve().name
        if depth >= _DEEPEST:
            return f"the devices under {name} are stacked too deep to follow"
        if _MEMORY_DEVICE.fullmatch(name):
            return f"the block device {name} is memory"
        backing = _text_of(device / "loop/backing_file")
        if backing:
            return self._medium(Path(backing), depth + 1).doubt
        try:
            parts = sorted((device / "slaves").iterdir())
        except OSError:
            return ""  # a partition, or a disk
        return next((doubt for part in parts if (doubt := self._memory_beneath(part, depth + 1))), "")

    def _mount_of(self, path: Path) -> _Mount | None:
        """The last mount with the longest mount point above the path."""
        try:
            lines = (self.proc / "self/mountinfo").read_text(errors="surrogateescape").splitlines()
            real = path.resolve()
        except OSError:
            return None
        above = [mount for line in lines if (mount := _parse_mount(line)) and real.is_relative_to(mount.point)]
        deepest = max((len(mount.point.parts) for mount in above), default=0)
        return next((mount for mount in reversed(above) if len(mount.point.parts) == deepest), None)

    def _process_bytes(self) -> int | None:
        for line in _text_of(self.proc / "self/io").splitlines():
            if line.startswith("read_bytes:"):
                return int(line.split()[1])
        return None

    def _device_bytes(self, device_number: str, field: int) -> int | None:
        fields = _text_of(self.sys / "dev/block" / device_number / "stat").split() if device_number else []
        return int(fields[field]) * SECTOR_BYTES if len(fields) > field else None


@dataclass(frozen=True, slots=True)
class _Mount:
    device_number: str
    point: Path
    filesystem: str
    source: str
    options: tuple[str, ...]
    """Of the file system itself (the super block)."""
    point_options: tuple[str, ...] = ()
    """Of this mount of it."""

    @property
    def all_options(self) -> str:
        return ",".join(dict.fromkeys((*self.point_options, *self.options)))


def _parse_mount(line: str) -> _Mount | None:
    """A line of mountinfo: id parent MAJ:MIN root point options [tags] - filesystem source super-options."""
    left, _, right = line.partition(" - ")
    mount, filesystem = left.split(" "), right.split(" ")
    if len(mount) < 5 or len(filesystem) < 3:
        return None
    options = tuple(_unescape(option) for option in filesystem[2].split(","))
    point_options = tuple(mount[5].split(",")) if len(mount) > 5 else ()
    return _Mount(mount[2], Path(_unescape(mount[4])), filesystem[0], _unescape(filesystem[1]), options, point_options)


def _unescape(text: str) -> str:
    """Blanks and backslashes are octal in mountinfo."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _text_of(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _doubtful(medium: Medium, doubt: str) -> Medium:
    return msgspec.structs.replace(medium, doubt=doubt)


def _difference(later: int | None, earlier: int | None) -> int | None:
    return None if later is None or earlier is None else later - earlier


def _sum(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other
