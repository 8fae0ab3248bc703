"""The gate's place in each root: made, taken away and brought back, looked at.

In each root: <the gate's directory>/disk/pool. `disk` is what is renamed away when a root is lost: so the pool's parent
is gone too, as with a disk that is not mounted, and nobody makes a new pool in its place.

A device may really go while the gate runs. Then looks see what is there, and renames that fail are noted. One that no
longer answers holds up a thread, and not the gate: what it was asked is noted as hung, and it is left alone.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TypeVar

from forebay.bench.files import CannotWrite

_LOOKS_AGAIN = 3
_ANSWERS_WITHIN_S = 30.0
"""A look at some million files takes seconds."""

T = TypeVar("T")


class Aside:
    """Asks one device, in a thread of its own: it may never answer."""

    def __init__(self, patience_s: float = _ANSWERS_WITHIN_S) -> None:
        self._patience_s = patience_s
        self._last: Future[object] | None = None

    @property
    def hangs(self) -> bool:
        """Whether what was done last has not ended yet."""
        return self._last is not None and not self._last.done()

    def do(self, work: Callable[[], T]) -> T:
        """Raises what `work` raises, and TimeoutError when it takes too long, or something before it hangs still."""
        if self.hangs:
            raise TimeoutError("the device does not answer")
        found: Future[T] = Future()

        def run() -> None:
            try:
                found.set_result(work())
            except BaseException as error:
                found.set_exception(error)

        self._last = found  # type: ignore[assignment]
        threading.Thread(target=run, name="forebay-gate-disks", daemon=True).start()
        return found.result(self._patience_s)


class Disks:
    """Of one gate, a place for each root."""

    def __init__(
        self, scratches: Sequence[Path], note: Callable[[str], None], patience_s: float = _ANSWERS_WITHIN_S
    ) -> None:
        """`note` hears of each kind of error once for each place."""
        self._scratches, self._note = tuple(scratches), note
        self._asides = tuple(Aside(patience_s) for _ in scratches)
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
        for aside, place in zip(self._asides, self._places, strict=True):
            try:
                aside.do(partial(place.mkdir, parents=True, exist_ok=True))
            except OSError as error:
                raise CannotWrite(
                    f"{place} cannot be used ({error.strerror or error}): bring its device back, and give the command "
                    "again"
                ) from None

    def take_away(self, number: int) -> None:
        self._rename(number, self._places[number], _away(self._places[number]))

    def bring_back(self, number: int) -> None:
        """If it is away."""
        place = self._places[number]
        if self._is_away(number) and not self._rename(number, _away(place), place):
            self._late.add(number)
        else:
            self._late.discard(number)

    def bring_back_all(self) -> None:
        for number in range(len(self._places)):
            self.bring_back(number)

    def bring_back_late(self) -> None:
        for number in tuple(self._late):
            self.bring_back(number)

    def _is_away(self, number: int) -> bool:
        try:
            return self._asides[number].do(partial(_is_there, _away(self._places[number])))
        except TimeoutError:
            return True

    def _rename(self, number: int, place: Path, to: Path) -> bool:
        try:
            self._asides[number].do(partial(place.rename, to))
        except OSError as error:
            kind = errno.errorcode.get(error.errno or 0, "hung" if self._asides[number].hangs else "failed")
            if (place, kind) not in self._noted:
                self._noted.add((place, kind))
                self._note(f"rename {kind}")
            return False
        return True

    def look(self, capacity_bytes: int) -> int | None:
        """Bytes in the pool; None when a device does not say. A look takes a while: a block that goes meanwhile and the
        one that comes in its place may both be counted, so what is above the capacity is looked at again."""
        if any(aside.hangs for aside in self._asides):
            return None
        try:
            looks = [self.pool_bytes()]
            while looks[-1] > capacity_bytes and len(looks) < _LOOKS_AGAIN:
                looks.append(self.pool_bytes())
        except TimeoutError:
            self._note("look hung")
            return None
        return min(looks)

    def pool_bytes(self) -> int:
        """Of the roots that are there. Raises TimeoutError when one does not answer."""
        return sum(aside.do(partial(file_bytes, pool)) for aside, pool in zip(self._asides, self.pools, strict=True))

    def check_there(self) -> None:
        """Raises OSError when one of them is gone, so that nothing can be said of what is left in it."""
        for aside, place in zip(self._asides, self._places, strict=True):
            aside.do(partial(os.listdir, place))

    def temporary_files(self) -> int:
        """Raises TimeoutError when a device does not answer."""
        return sum(
            aside.do(partial(_count, pool / "tmp")) for aside, pool in zip(self._asides, self.pools, strict=True)
        )

    def remove(self) -> None:
        """What a device that does not answer holds is left there."""
        for aside, scratch in zip(self._asides, self._scratches, strict=True):
            with contextlib.suppress(TimeoutError):
                aside.do(partial(shutil.rmtree, scratch, ignore_errors=True))


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
