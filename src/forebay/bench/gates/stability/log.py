"""What happened, one line of JSON each, in the order in which it did. `elapsed_s`: seconds of load since the beginning.

The log is the whole state of the gate: after a crash it is read again, but for a last line that is not whole.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import msgspec

from forebay.bench.evidence import Medium
from forebay.bench.files import CannotWrite
from forebay.bench.gates.stability.options import FaultKind
from forebay.errors import ConfigError

_SYNC_EVERY_S = 5.0
"""What a crash of the machine may lose."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker did since its last report, and what it is like at rest."""

    age_s: float
    """Since its start."""
    covers_s: float
    """Since its last report."""
    loads: int
    disk_loads: int
    """That brought something from the file tier."""
    loaded_blocks: int
    disk_blocks: int
    offered_blocks: int
    wrong_blocks: int
    wrong_bytes: int
    unsound: tuple[str, ...]
    """What did not add up at rest: slots, pins, counts; or that there was no rest."""
    rss_bytes: int
    descriptors: int
    threads: int
    shm_segments: tuple[str, ...]
    """Files in /dev/shm that it has mapped or open."""
    errors: dict[str, int]
    """By kind."""
    disk_load_s: tuple[float, ...]
    """Of each of the disk loads, from its start to its end."""


class Resumed(msgspec.Struct, frozen=True, kw_only=True, tag="resumed"):
    """The first line of each attempt."""

    elapsed_s: float
    at: str
    """ISO 8601, UTC."""
    media: tuple[Medium, ...] = ()
    """Under each root."""


class Sample(msgspec.Struct, frozen=True, kw_only=True, tag="sample"):
    elapsed_s: float
    worker: int
    incarnation: int
    """Each start of a worker has a number of its own."""
    report: Report


class Look(msgspec.Struct, frozen=True, kw_only=True, tag="look"):
    elapsed_s: float
    pool_bytes: int
    """Of all files under blocks' names, over all roots."""


class Strike(msgspec.Struct, frozen=True, kw_only=True, tag="strike"):
    """A fault begins."""

    elapsed_s: float
    number: int
    kind: FaultKind
    target: int


class GateError(msgspec.Struct, frozen=True, kw_only=True, tag="error"):
    """The gate itself could not do something, as when a device is gone."""

    elapsed_s: float
    kind: str


class WorkerEnded(msgspec.Struct, frozen=True, kw_only=True, tag="ended"):
    elapsed_s: float
    worker: int
    incarnation: int
    exit_code: int
    """Negative: the number of the signal."""
    was_asked: bool
    """To end, or killed by the gate."""


class WorkerStuck(msgspec.Struct, frozen=True, kw_only=True, tag="stuck"):
    """It was killed, and has not ended."""

    elapsed_s: float
    worker: int
    incarnation: int


class Closing(msgspec.Struct, frozen=True, kw_only=True, tag="closing"):
    """All workers have ended, and the pool was opened once more."""

    elapsed_s: float
    files_bytes: int
    counted_bytes: int
    """By the pool's own catalogue."""
    temporary_files: int
    shm_segments: int
    """That a worker once had, and that are still there."""


Line: TypeAlias = Resumed | Sample | Look | Strike | GateError | WorkerEnded | WorkerStuck | Closing


class Log:
    """Appends. Owned by the supervisor's thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("ab", buffering=0)
        self._encoder = msgspec.json.Encoder()
        self._synced_s = 0.0

    def add(self, line: Line) -> None:
        """Raises CannotWrite, such as when the disk of the evidence is full."""
        try:
            self._add(line)
        except OSError as error:
            raise CannotWrite(
                f"{self._path} cannot be written ({error.strerror}): make room, and give the command again"
            ) from None

    def _add(self, line: Line) -> None:
        text = self._encoder.encode(line) + b"\n"
        while text:
            text = text[self._file.write(text) :]
        if line.elapsed_s - self._synced_s >= _SYNC_EVERY_S:
            os.fsync(self._file.fileno())
            self._synced_s = line.elapsed_s

    def close(self) -> None:
        with self._file, contextlib.suppress(OSError):
            os.fsync(self._file.fileno())


def read_log(path: Path) -> Iterator[Line]:
    """The whole lines so far; a line that was cut short is cut off, so that the next one begins anew.

    Raises ConfigError for a line that cannot be read.
    """
    decoder = msgspec.json.Decoder(Line)
    try:
        file = path.open("r+b")
    except FileNotFoundError:
        return
    with file:
        whole_bytes = 0
        for number, text in enumerate(file, 1):
            if not text.endswith(b"\n"):
                break
            try:
                yield decoder.decode(text)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise ConfigError(
                    f"{path}, line {number} cannot be read ({error}): begin anew in another --out"
                ) from None
            whole_bytes += len(text)
        file.truncate(whole_bytes)
