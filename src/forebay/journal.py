"""Events as JSON lines in a file, one a line, and back.

Encoding and writing happen on a thread of their own, behind a bounded queue: a disk that is slow, full or gone costs
events, which are counted, and never holds up the engine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import queue
import threading
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from forebay.errors import ConfigError
from forebay.events import Chosen, Event
from forebay.types import Job, Traffic

log = logging.getLogger("forebay.journal")

_MOST_WAITING = 10_000
_MOST_LINE_BYTES = 2**20
_CLOSE_WITHIN_S = 5.0


class JournalOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    path: str
    """File that events are appended to; `{pid}` in it is filled in. One file a process."""
    most_bytes: int = 256 * 2**20
    """A file that has grown to this is renamed to `PATH.1`, in place of an older one."""


class Journal:
    """An event sink. Any thread; `close` writes what waits."""

    def __init__(self, options: JournalOptions) -> None:
        """Raises ConfigError for a path that cannot be written."""
        if options.most_bytes < _MOST_LINE_BYTES:
            raise ConfigError(f"events: most_bytes must be {_MOST_LINE_BYTES} or more, not {options.most_bytes}")
        self._path = Path(options.path.replace("{pid}", str(os.getpid())))
        self._most_bytes = options.most_bytes
        self._file = self._open()
        self._waiting: queue.Queue[Event | None] = queue.Queue(_MOST_WAITING)
        self.lost_events = 0
        self._thread = threading.Thread(target=self._serve, name="forebay-journal", daemon=True)
        self._thread.start()

    def add(self, event: Event) -> None:
        try:
            self._waiting.put_nowait(event)
        except queue.Full:
            self._lose("the disk does not keep up")

    def close(self) -> None:
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=_CLOSE_WITHIN_S)
        self._thread.join(_CLOSE_WITHIN_S)
        if self.lost_events:
            log.warning("%s: %d events were lost", self._path, self.lost_events)

    def _open(self) -> BinaryIO:
        try:
            return self._path.open("ab")
        except OSError as error:
            raise ConfigError(f"events: cannot write {self._path}: {error.strerror}") from None

    def _serve(self) -> None:
        while (event := self._waiting.get()) is not None:
            self._write(event)
        try:
            self._file.close()
        except OSError as error:  # what was buffered has no room
            self._lose(str(error))

    def _write(self, event: Event) -> None:
        try:
            self._file.write(encode(event) + b"\n")
            if self._waiting.empty():
                self._file.flush()
            if self._file.tell() >= self._most_bytes:
                self._file.close()
                self._path.replace(f"{self._path}.1")
                self._file = self._open()
        except (OSError, ValueError, ConfigError) as error:
            self._lose(str(error))

    def _lose(self, why: str) -> None:
        if not self.lost_events:
            log.warning("%s: events are lost: %s", self._path, why)
        self.lost_events += 1


def encode(event: Event) -> bytes:
    """One JSON object on one line: the event's name, and its fields."""
    fields = {field.name: _plain(getattr(event, field.name)) for field in dataclasses.fields(event)}
    return msgspec.json.encode({"event": type(event).__name__, **fields})


def _plain(value: Any) -> Any:
    match value:
        case Job():
            return {
                "job_id": value.job_id, "kind": value.kind.value, "tier": value.tier, "route": value.route,
                "traffic": value.traffic.name.lower(), "blocks": len(value.keys), "moved_bytes": value.moved_bytes,
            }  # fmt: skip
        case Traffic():
            return value.name.lower()
        case Enum():
            return value.value
        case bytes():
            return value.hex()
        case str():
            return value.encode("utf-8", "backslashreplace").decode()
        case tuple() | list():
            return [_plain(item) for item in value]
        case _ if dataclasses.is_dataclass(value):
            return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        case _:
            return value


class _Named(msgspec.Struct):
    event: str


def read_choices(path: Path) -> Iterator[Chosen]:
    """The decisions in a file of events, in order. Other events are passed over.

    Raises ConfigError, with the line's number, for what is no such file. A last line that was cut off by the end of its
    process is left out.
    """
    try:
        with path.open("rb") as lines:
            number = 0
            while line := lines.readline(_MOST_LINE_BYTES + 1):
                number += 1
                if not line.endswith(b"\n") and len(line) <= _MOST_LINE_BYTES:
                    log.warning("%s: line %d was cut off, and is left out", path, number)
                    return
                try:
                    if len(line) > _MOST_LINE_BYTES:
                        raise msgspec.ValidationError("too long")
                    if msgspec.json.decode(line, type=_Named).event == Chosen.__name__:
                        yield _decode(line)
                except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                    raise ConfigError(f"{path}: line {number} is no event: {error}") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None


def _decode(line: bytes) -> Chosen:
    chosen = msgspec.json.decode(line, type=Chosen)
    if not 0 <= chosen.chosen_blocks <= chosen.stored_blocks <= chosen.wanted_blocks:
        raise msgspec.ValidationError("its numbers of blocks contradict each other")
    return chosen
