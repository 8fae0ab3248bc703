"""What a restore benchmark can be asked for, from TOML or from code, and what can be wrong with it beforehand."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from forebay.assemble import Named
from forebay.bench.restore.results import Role
from forebay.bench.units import parse_rate
from forebay.errors import ConfigError

JSON_NAME, PLOT_NAME = "restore.json", "restore.svg"
REQUESTS_NAME, PARQUET_NAME = "requests.jsonl", "requests.parquet"
_MOST_SESSIONS = 4096


class GroupOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One of the things compared."""

    name: str
    role: Role
    target: str = "emulated"
    """A module of `forebay.bench.restore.targets` by name, or any by its dotted path."""
    roots: tuple[Path, ...] = ()
    """Directories of this machine under which what is restored lies. Whether a read was cold is shown for these; a
    target that stores by itself makes its pool in them and removes it afterwards."""
    instances: int = 1
    """Started together and reported as one machine."""
    limit: str = ""
    """To which reads from the roots are throttled, over all instances, such as `800MB/s`: another medium, emulated."""
    options: dict[str, Any] = {}
    """In the target's own terms."""

    @property
    def limit_bytes_per_s(self) -> float | None:
        """Raises ConfigError for what is no rate."""
        return parse_rate(self.limit) if self.limit else None


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Past these a run is INVALID."""

    control_drift: float = 0.10
    """Of the p50s of a control's rounds (recompute, baseline): the largest over the smallest, less 1."""
    rounds: int = 3
    """Fewer say nothing about how well they repeat."""
    resident_share: float = 0.01
    """Of the wanted bytes, that may lie in the page cache when a wave begins."""
    foreign_share: float = 0.05
    """Of the wanted bytes, that others may move on the device during a wave."""
    clock_step_s: float = 0.1
    """By which the wall clock may leave the monotonic one during a wave."""
    duplicate_share: float = 0.01
    """Of the sampled stored blocks, that may have the bytes of another."""
    compressed_share: float = 0.5
    """What a sample of the stored bytes must not compress below."""


class RestoreOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    group: tuple[GroupOptions, ...]
    title: str = "Cold restore"
    workload: Named = Named(kind="cold")
    concurrency: tuple[int, ...] = (4, 8, 16, 32)
    """A wave for each: so many sessions are wanted at once."""
    rounds: int = 3
    """Each has every group at every concurrency once, in turns."""
    sessions: int | None = None
    """That are populated, and of which waves take theirs in turns. None: the largest concurrency. With the sum of all
    concurrencies times the rounds, no session is read twice where all are alike."""
    seed: int = 0
    """Of tokens, and of the bootstrap."""
    sample_s: float = 0.1
    """Between two samples of the devices' bandwidth."""
    limits: Limits = Limits()

    @property
    def populated_sessions(self) -> int:
        return self.sessions if self.sessions is not None else max(self.concurrency, default=0)


def read_plan(path: Path) -> bytes:
    """Its bytes, once: what is bundled is what was run. Raises ConfigError."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None


def parse_options(path: Path, plan: bytes) -> RestoreOptions:
    """From TOML that was read from `path`. Raises ConfigError with the file, the field and what is wrong with it."""
    try:
        return convert_options(tomllib.loads(plan.decode()))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, ConfigError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}") from None


def convert_options(plain: Mapping[str, Any]) -> RestoreOptions:
    """From what TOML gives. Raises ConfigError with the field and what is wrong with it."""
    try:
        return msgspec.convert(plain, RestoreOptions, dec_hook=_decode)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error)) from None


def _decode(kind: type, value: Any) -> Any:
    if kind is Path and isinstance(value, str) and "\0" not in value:
        return Path(value)
    raise ValueError(f"a path is wanted, not {value!a}")


def check_options(options: RestoreOptions) -> None:
    """Raises ConfigError for the first thing that cannot work, and changes nothing."""
    if not options.group:
        raise ConfigError("there is nothing to compare: give one or more [[group]]")
    if not options.concurrency or not all(1 <= each <= _MOST_SESSIONS for each in options.concurrency):
        raise ConfigError(f"concurrency must be numbers from 1 to {_MOST_SESSIONS}: give one or more, such as [4, 8]")
    if len(set(options.concurrency)) < len(options.concurrency):
        raise ConfigError("a concurrency is given twice: name each once, and raise the rounds")
    if options.rounds < 1:
        raise ConfigError(f"rounds must be 1 or more, not {options.rounds}")
    if not 0 <= options.seed < 2**63:
        raise ConfigError(f"seed must be from 0 to 2**63 - 1, not {options.seed}")
    if not max(options.concurrency) <= options.populated_sessions <= _MOST_SESSIONS:
        raise ConfigError(
            f"sessions must be from the largest concurrency, {max(options.concurrency)}, to {_MOST_SESSIONS}, "
            f"not {options.populated_sessions}"
        )
    if not 0.01 <= options.sample_s <= 10:
        raise ConfigError(f"sample_s must be from 0.01 to 10, not {options.sample_s}")
    _check_limits(options.limits)
    for group in options.group:
        _check_group(group)
    names = [group.name for group in options.group]
    if len(set(names)) < len(names):
        raise ConfigError("two groups have one name: give each its own")


def _check_limits(limits: Limits) -> None:
    """What is no number would be a limit that nothing exceeds."""
    for name in limits.__struct_fields__:
        value = getattr(limits, name)
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"limits: {name} must be a number, 0 or more, not {value}")
    if limits.rounds < 1:
        raise ConfigError(f"limits: rounds must be 1 or more, not {limits.rounds}")


def relaxed(limits: Limits) -> dict[str, float]:
    """Those that allow more than the usual ones do, which are the defaults."""
    usual, lower_is_laxer = Limits(), ("rounds", "compressed_share")
    return {
        name: value
        for name in limits.__struct_fields__
        for value in (getattr(limits, name),)
        if (value < getattr(usual, name) if name in lower_is_laxer else value > getattr(usual, name))
    }


def _check_group(group: GroupOptions) -> None:
    if not group.name.strip() or len(group.name) > 64 or not group.name.isprintable():
        raise ConfigError(f"{group.name[:80]!a} is no name of a group: give up to 64 printable characters")
    if not 1 <= group.instances <= 64:
        raise ConfigError(f"group {group.name}: instances must be from 1 to 64, not {group.instances}")
    if group.role is Role.SHARED and group.instances < 2:
        raise ConfigError(f"group {group.name}: a shared pool needs 2 instances or more")
    for root in group.roots:
        if not root.is_dir():
            raise ConfigError(f"group {group.name}: {root} is not a directory: make it first, or name another one")
    if group.limit_bytes_per_s is not None and not group.roots:
        raise ConfigError(f"group {group.name}: a limit needs roots to limit")
