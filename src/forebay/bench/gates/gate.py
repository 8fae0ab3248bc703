"""What a gate is: one module with an `Options` struct and `build(options)`, which returns a `Gate`.

`build` raises ConfigError for options that cannot work, and changes nothing. A gate's limits are among its options.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from forebay.bench.evidence import Kernel
from forebay.bench.gates.verdicts import Check
from forebay.bench.progress import Progress
from forebay.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a gate found out. Its outcome is that of its worst check; without a check it is INVALID."""

    checks: tuple[Check, ...]
    reasons: tuple[str, ...] = ()
    stopped_early: str = ""
    """By stop-loss: why it could not pass any more."""
    files: tuple[str, ...] = ()
    """Evidence, by its path within the workplace's directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workplace:
    """Where one gate works. A gate that was killed finds the same one again."""

    directory: Path
    """For evidence, and for what a resumed gate has to know."""
    run_name: str
    """Unlike those of other runs; the same after a resumption."""
    progress: Progress
    kernel: Kernel

    def scratch_path(self, root: Path) -> Path:
        """This gate's own directory in a root, which may be left from before."""
        return root / f".forebay-gate-{self.run_name}"

    @contextlib.contextmanager
    def scratch(self, root: Path) -> Iterator[Path]:
        """A new directory in a root, removed at the end; also one that a killed attempt has left."""
        path = self.scratch_path(root)
        try:
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir(mode=0o700)
        except OSError as error:
            raise ConfigError(f"no directory can be made in {root} ({error.strerror}): name another root") from None
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


class Gate(Protocol):
    @property
    def steps(self) -> int:
        """How many steps its progress tells of."""
        ...

    def run(self, work: Workplace) -> Found:
        """Measure and judge.

        OSError and ForebayError mean that nothing can be said: the gate is INVALID.
        """
        ...


def check_root(root: Path) -> None:
    """Raises ConfigError for what is no directory that can be written to."""
    if not root.is_dir():
        raise ConfigError(f"{root} is not a directory: make it first, or name another one")
