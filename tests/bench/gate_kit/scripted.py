"""A gate that measures what its options say, and keeps a diary."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from forebay.bench.gates.gate import Found, Workplace
from forebay.bench.gates.verdicts import Bound, check
from forebay.errors import ConfigError


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    measured: float | None = 1.0
    limit: float = 1.0
    samples: bool = True
    steps: int = 2
    raises: str = ""
    diary: str = ""


@dataclass(frozen=True)
class Scripted:
    options: Options

    @property
    def steps(self) -> int:
        return self.options.steps

    def run(self, work: Workplace) -> Found:
        for step in range(self.steps):
            work.progress.begins(f"step {step}")
            if self.options.diary:
                with Path(self.options.diary).open("a") as diary:
                    diary.write(f"{work.directory.name} {step} {work.run_name}\n")
            work.progress.ended(f"step {step}")
        if self.options.raises:
            raise OSError(5, self.options.raises)
        (work.directory / "found.txt").write_text("evidence\n")
        value = check("value", self.options.measured, Bound.AT_MOST, self.options.limit, "count")
        return Found(checks=(value,) if self.options.samples else (), files=("found.txt",))


def build(options: Options) -> Scripted:
    if options.steps < 0:
        raise ConfigError(f"steps must be 0 or more, not {options.steps}")
    return Scripted(options)
