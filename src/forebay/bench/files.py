"""Reports as files: whole, or not at all, also after a crash of the machine."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from forebay.errors import ConfigError


class CannotWrite(ConfigError):
    """What was found out cannot be kept here. It says nothing about what was measured."""


def write_whole(path: Path, content: bytes) -> Path:
    """Raises CannotWrite when it cannot be written. What was there before stays until the new one is complete."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, content)
    except OSError as error:
        raise CannotWrite(f"{path} cannot be written ({error.strerror}): name another --out") from None
    return path


def _replace(path: Path, content: bytes) -> None:
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # the name must not outlive a crash that the content does not
        umask = os.umask(0)
        os.umask(umask)
        Path(temporary).chmod(0o666 & ~umask)  # mkstemp makes files for their owner only
        Path(temporary).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(temporary).unlink()
        raise
