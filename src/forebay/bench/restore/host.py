"""What the machine says while a wave runs: bytes and processor time of processes, bytes of devices, the page cache.

Everything a verdict stands on comes from here, so that a test can put another machine in its place.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from forebay.bench.evidence import SECTOR_BYTES, Kernel, Medium
from forebay.bench.restore.pagecache import drop_page_cache, resident_bytes

_CLOCK_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes so far, or between two such counts."""

    read_bytes: int
    written_bytes: int

    @property
    def whole_bytes(self) -> int:
        return self.read_bytes + self.written_bytes

    def since(self, earlier: Moved) -> Moved:
        return Moved(self.read_bytes - earlier.read_bytes, self.written_bytes - earlier.written_bytes)


@dataclass(frozen=True, slots=True)
class Reading:
    """All counters at one moment. None where the kernel does not say."""

    processes: Moved | None
    """At the block layer, by the processes that serve the target."""
    devices: Moved | None
    """By anybody."""
    core_s: float | None
    monotonic_ns: int
    wall_ns: int


@dataclass(frozen=True, slots=True)
class Host:
    """This machine."""

    kernel: Kernel = field(default_factory=Kernel)

    def media_of(self, roots: Sequence[Path]) -> tuple[Medium, ...]:
        """Under each root."""
        return tuple(self.kernel.medium_of(root) for root in roots)

    def devices_of(self, roots: Sequence[Path]) -> tuple[str, ...]:
        """`MAJ:MIN` of the block devices under the roots, each once."""
        numbers = (self.kernel.medium_of(root).device_number for root in roots)
        return tuple(dict.fromkeys(number for number in numbers if number))

    def read(self, processes: Sequence[int], devices: Sequence[str]) -> Reading:
        tree = self._tree(processes)
        return Reading(
            self._moved_by(tree), self.moved_on(devices), self._core_s(tree), time.monotonic_ns(), time.time_ns()
        )

    def moved_on(self, devices: Sequence[str]) -> Moved | None:
        found = [self._moved_on(device) for device in devices]
        known = [moved for moved in found if moved is not None]
        if not known or len(known) < len(found):
            return None
        return Moved(sum(moved.read_bytes for moved in known), sum(moved.written_bytes for moved in known))

    def resident_bytes(self, roots: Sequence[Path]) -> int | None:
        return resident_bytes(roots)

    def drop_page_cache(self, roots: Sequence[Path]) -> None:
        drop_page_cache(roots)

    def _moved_on(self, device: str) -> Moved | None:
        """Of a block device, from its `stat`: the third figure is sectors read, the seventh sectors written."""
        try:
            fields = (self.kernel.sys / "dev/block" / device / "stat").read_text().split()
            return Moved(int(fields[2]) * SECTOR_BYTES, int(fields[6]) * SECTOR_BYTES)
        except (OSError, ValueError, IndexError):
            return None

    def _tree(self, processes: Sequence[int]) -> frozenset[int]:
        """This process and those named, with all their descendants."""
        children: dict[int, list[int]] = {}
        for pid, parent in self._parents():
            children.setdefault(parent, []).append(pid)
        found: set[int] = set()
        waiting = [os.getpid(), *processes]
        while waiting:
            pid = waiting.pop()
            if pid not in found:
                found.add(pid)
                waiting.extend(children.get(pid, ()))
        return frozenset(found)

    def _parents(self) -> Iterator[tuple[int, int]]:
        for place in self.kernel.proc.iterdir():
            if place.name.isdecimal() and (fields := self._stat(int(place.name))):
                yield int(place.name), int(fields[1])

    def _stat(self, pid: int) -> list[str]:
        """Fields of /proc/PID/stat after the name, which may hold blanks and brackets; empty once it has ended."""
        try:
            return (self.kernel.proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            return []

    def _moved_by(self, tree: frozenset[int]) -> Moved | None:
        read_bytes = written_bytes = 0
        for pid in tree:
            try:
                lines = (self.kernel.proc / str(pid) / "io").read_text().splitlines()
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has ended
            except OSError:
                return None
            counts = dict(line.split(": ") for line in lines)
            read_bytes += int(counts["read_bytes"])
            written_bytes += int(counts["write_bytes"])
        return Moved(read_bytes, written_bytes)

    def _core_s(self, tree: frozenset[int]) -> float | None:
        """User and system time, the 12th and 13th field after the name."""
        ticks = [int(fields[11]) + int(fields[12]) for pid in tree if len(fields := self._stat(pid)) > 12]
        return sum(ticks) / _CLOCK_TICKS_PER_S if ticks else None
