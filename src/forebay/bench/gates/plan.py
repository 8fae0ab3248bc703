"""A plan: which gates, with which options and limits. Written down before anything is measured, and part of the record.

```toml
title = "Acceptance of the machine in rack 7"
after_failure = "stop"

[[gate]]
kind = "g4_stability"
[gate.options]
roots = ["/mnt/a/pool", "/mnt/b/pool"]
[gate.options.limits]
wrong_bytes = 0
```
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import msgspec

from forebay.assemble import Named, open_gate
from forebay.bench.gates.gate import Gate
from forebay.errors import ConfigError

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,39}", re.ASCII)
_MOST_PLAN_BYTES = 2**20


class AfterFailure(Enum):
    """What becomes of the other gates when one does not pass."""

    GO_ON = "go on"
    STOP = "stop"
    """They are not run, and INVALID: stop-loss for what takes days."""


class GateEntry(Named, frozen=True, forbid_unknown_fields=True, kw_only=True):
    name: str = ""
    """In records; as a default the part of `kind` before the first `_`, such as `g1`."""

    @property
    def label(self) -> str:
        return self.name or self.kind.rpartition(".")[2].partition("_")[0]


class PlanFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    title: str
    after_failure: AfterFailure = AfterFailure.GO_ON
    gate: tuple[GateEntry, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    title: str
    after_failure: AfterFailure
    gates: Mapping[str, Gate]
    """By name, in their order. Their options are checked."""
    text: str
    sha256: str


def read_plan(path: Path) -> Plan:
    """Raises ConfigError with what is wrong: the file, a gate's name, its options."""
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_PLAN_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read the plan {path}: {error.strerror}") from None
    if len(content) > _MOST_PLAN_BYTES:
        raise ConfigError(f"{path} is too large for a plan: it has more than {_MOST_PLAN_BYTES} bytes")
    try:
        text = content.decode()
        plan = msgspec.convert(tomllib.loads(text), PlanFile)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}") from None
    return Plan(
        title=plan.title,
        after_failure=plan.after_failure,
        gates=_open_gates(path, plan),
        text=text,
        sha256=hashlib.sha256(content).hexdigest(),
    )


def _open_gates(path: Path, plan: PlanFile) -> dict[str, Gate]:
    if not plan.gate:
        raise ConfigError(f"{path} has no gate: nothing could pass; add a [[gate]]")
    gates: dict[str, Gate] = {}
    for entry in plan.gate:
        if not _NAME.fullmatch(entry.label):
            raise ConfigError(f"{path}: {entry.label!a} is no name for a gate: use a-z, 0-9, - and _")
        if entry.label in gates:
            raise ConfigError(f"{path}: two gates are named {entry.label!r}: give one another name")
        try:
            gates[entry.label] = open_gate(entry)
        except ConfigError as error:
            raise ConfigError(f"{path}, gate {entry.label}: {error}") from None
    return gates
