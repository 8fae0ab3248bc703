"""The gate's place in each root: made, taken away and brought back, looked at.

In each root: <the gate's directory>/disk/pool. `disk` is what is renamed away when a root is lost: so the pool's parent
is gone too, as with a disk that is not mounted, and nobody makes a new pool in its place.

A device may really go while the gate runs. Then looks see what is there, and renames that fail are noted.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from forebay.bench.files import CannotWrite

_LOOKS_AGAIN = 3


class Disks:
    """Of one gate, a place for each root."""

    def __init__(self, scratches: Sequence[Path], note: Callable[[str], None]) -> None:
        """`note` hears of each kind of error once for each place."""
        self._scratches, self._note = tuple(scratches), note
        self._places = tuple(scratch / "disk" for scratch in scratches)
        self._noted: set[tuple[Path, str]] = set()
        self._late: set[int] = set()
        """Should be back, and could not be brought back."""

    @property
    def pools(self) -> tuple[Path, ...]:
        return tuple(place / "pool" for place in self._places)

    def make(self) -> None:
        """For a new gate, and without what is left from before. Raises OSError."""
        for scratch, place in zip(self._scratches, self._places, strict=True):
            shutil.rmtree(scratch, ignore_errors=True)
            place.mkdir(parents=True)

    def find(self) -> None:
        """As they were left. Raises CannotWrite for a device that is not back yet."""
        self.bring_back_all()
        for place in self._places:
            try:
                place.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise CannotWrite(
                    f"{place} cannot be used ({error.strerror}): bring its device back, and give the command again"
                ) from None

    def take_away(self, number: int) -> None:
        place = self._places[number]
        self._rename(place, _away(place))

    def bring_back(self, number: int) -> None:
        """If it is away."""
        place = self._places[number]
        if _is_there(_away(place)) and not self._rename(_away(place), place):
            self._late.add(number)
        else:
            self._late.discard(number)

    def bring_back_all(self) -> None:
        for number in range(len(self._places)):
            self.bring_back(number)

    def bring_back_late(self) -> None:
        for number in tuple(self._late):
            self.bring_back(number)

    def _rename(self, place: Path, to: Path) -> bool:
        try:
            place.rename(to)
        except OSError as error:
            kind = errno.errorcode.get(error.errno or 0, "failed")
            if (place, kind) not in self._noted:
                self._noted.add((place, kind))
                self._note(f"rename {kind}")
            return False
        return True

    def look(self, capacity_bytes: int) -> int:
        """Bytes in the pool. A look takes a while: a block that goes meanwhile and the one that comes in its place may
        both be counted, so what is above the capacity is looked at again."""
        looks = [self.pool_bytes()]
        while looks[-1] > capacity_bytes and len(looks) < _LOOKS_AGAIN:
            looks.append(self.pool_bytes())
        return min(looks)

    def pool_bytes(self) -> int:
        """Of the roots that are there: a lost one has left the pool with its blocks."""
        return sum(file_bytes(pool) for pool in self.pools)

    def check_there(self) -> None:
        """Raises OSError when one of them is gone, so that nothing can be said of what is left in it."""
        for place in self._places:
            os.listdir(place)

    def temporary_files(self) -> int:
        return sum(_count(pool / "tmp") for pool in self.pools)

    def remove(self) -> None:
        for scratch in self._scratches:
            shutil.rmtree(scratch, ignore_errors=True)


def _away(place: Path) -> Path:
    return place.with_name("disk.away")


def _is_there(path: Path) -> bool:
    """Also where its device answers with an error: what that was, a rename says."""
    try:
        path.lstat()
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return True


def _count(directory: Path) -> int:
    try:
        return len(os.listdir(directory))
    except FileNotFoundError:
        return 0


def file_bytes(pool: Path) -> int:
    """Of the files under blocks' names in one root, that can be seen."""
    total_bytes = 0
    for folder, _, names in os.walk(pool):
        for name in names:
            if name.endswith(".kv"):
                with contextlib.suppress(OSError):  # it has gone, or its device has
                    total_bytes += os.lstat(f"{folder}/{name}").st_size
    return total_bytes
