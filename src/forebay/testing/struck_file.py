"""The file tier with faults beneath it: system calls that take long, and a device without room, when a control says so.

A tier by name, for a store's configuration:

    kind = "forebay.testing.struck_file"
    options = {control = "/path/of/control", file = {roots = [...], capacity_bytes = ...}}

The control is a small file that any process may change at any time (`Control`): what it says holds for the next call.
Python reads the blocks then, since the compiled kernel makes its system calls where nobody can strike them.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from forebay.errors import ConfigError
from forebay.tiers.file import FileTier
from forebay.tiers.file import Options as FileOptions
from forebay.tiers.file.directio import REAL_CALLS, Calls
from forebay.types import Namespace

_FIELDS = struct.Struct("<dd")


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    control: str
    """File of a `Control`; made if it is not there."""
    file: dict[str, Any]
    """Options of the file tier."""


def build(options: Options, namespace: Namespace, namespace_digest: bytes) -> FileTier:
    try:
        file = msgspec.convert(options.file, FileOptions)
    except msgspec.ValidationError as error:
        raise ConfigError(f"options of the file tier: {error}") from None
    return FileTier(file, namespace, namespace_digest, struck_calls(Control(Path(options.control))))


class Control:
    """What strikes now, in a file that processes share. Eight bytes are written at once: nobody sees half a value."""

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(descriptor).st_size < _FIELDS.size:
                os.ftruncate(descriptor, _FIELDS.size)
            self._fields = mmap.mmap(descriptor, _FIELDS.size)
        finally:
            os.close(descriptor)

    @property
    def delay_s(self) -> float:
        """By which each transfer of a block takes longer."""
        delay_s: float = _FIELDS.unpack_from(self._fields)[0]
        return delay_s

    @property
    def is_full(self) -> bool:
        """There is no room: every write of bytes ends with ENOSPC."""
        return bool(_FIELDS.unpack_from(self._fields)[1])

    def set_delay(self, delay_s: float) -> None:
        struct.pack_into("<d", self._fields, 0, delay_s)

    def fill_disk(self) -> None:
        struct.pack_into("<d", self._fields, 8, 1.0)

    def free_disk(self) -> None:
        struct.pack_into("<d", self._fields, 8, 0.0)


def struck_calls(control: Control) -> Calls:
    def preadv(descriptor: int, parts: Sequence[memoryview], at: int) -> int:
        _wait(control)
        return os.preadv(descriptor, parts, at)

    def pwritev(descriptor: int, parts: Sequence[memoryview], at: int) -> int:
        _wait(control)
        _take_room(control)
        return os.pwritev(descriptor, parts, at)

    def pwrite(descriptor: int, content: bytes, at: int) -> int:
        _take_room(control)
        return os.pwrite(descriptor, content, at)

    return replace(REAL_CALLS, preadv=preadv, pwritev=pwritev, pwrite=pwrite)


def _wait(control: Control) -> None:
    delay_s = control.delay_s
    if delay_s > 0:
        time.sleep(delay_s)


def _take_room(control: Control) -> None:
    if control.is_full:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
