"""What a file tier can be told, and what of it makes no sense."""

from __future__ import annotations

import math
import os

import msgspec

from forebay.errors import ConfigError
from forebay.tiers.file.blockfile import Verify
from forebay.tiers.file.directio import DirectMode
from forebay.tiers.file.fastpath import Io
from forebay.tiers.file.health import HealthLimits
from forebay.tiers.file.root import Durability

_NAME_CHARACTERS = 64


class RootOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One directory that holds blocks."""

    path: str
    """Made if its parent exists. On a mount, name a directory two levels below the mount point: then a disk that is
    not mounted is an absent root, and not a new one on the disk beneath."""
    weight: float = 1.0
    """Share of the blocks, relative to the other roots."""


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    roots: tuple[RootOptions, ...]
    capacity_bytes: int
    """Over all roots and all processes that share them, headers and padding included."""
    free_floor_bytes: int = 0
    """Free space that is left to others on each root's disk: below it nothing is written there."""
    tenant_quota_bytes: int = 0
    """What the blocks of this store's tenant may occupy of the capacity; 0: all of it."""
    write_budget_bytes_per_day: int = 0
    """Over all processes, a day from midnight to midnight (UTC); 0: none. The engine keeps to it."""
    endurance_bytes: int = 0
    """Bytes that the drives are rated to take in their life (all roots together), for the report; 0: not known."""
    name: str = "file"
    reads_in_flight: int = 8
    """Blocks that are read at a time, a root."""
    writes_in_flight: int = 4
    """Blocks that are written or deleted at a time, a root."""
    io: Io = Io.AUTO
    verify: Verify = Verify.PAYLOAD
    direct: DirectMode = DirectMode.AUTO
    durability: Durability = Durability.NONE
    read_latency_ns: int = 150_000
    """Typical time to the first byte; orders the tiers."""
    shared: bool = False
    """Other processes add and remove blocks in the same roots."""
    failures_in_a_row: int = 5
    """After so many failed reads a root is stopped, after so many failed writes its writes are."""
    hang_s: float = 10.0
    """So is a root with a call in flight for longer than this."""
    retry_s: float = 5.0
    """A stopped root is tried again after this time."""
    scrub_bytes_per_s: float = 0.0
    """Read every block about once a day in the background to find damage early, at most this fast; 0 does not."""
    ttl_s: float = 0.0
    """A block that was written longer ago is missing: a read or the scrub that comes by removes it; 0: none is ever too
    old."""


def check_options(options: Options) -> None:
    """Raises ConfigError."""
    if not options.roots:
        raise ConfigError("the file tier has no roots: name at least one directory")
    for root in options.roots:
        if not root.path or "\0" in root.path:
            raise ConfigError(f"the file tier cannot use {root.path!r} as a root: name a directory")
    paths = [os.path.realpath(root.path) for root in options.roots]
    if len(set(paths)) < len(paths):
        raise ConfigError("the file tier names the same root twice: name each directory once")
    if not (0 < len(options.name) <= _NAME_CHARACTERS and options.name.isprintable()):
        raise ConfigError(
            f"a tier cannot be named {options.name[:_NAME_CHARACTERS]!a}: give it 1 to {_NAME_CHARACTERS} printable "
            "characters"
        )
    for root in options.roots:
        if not (root.weight > 0 and math.isfinite(root.weight)):
            raise ConfigError(f"root {root.path}: weight {root.weight} must be a positive number")
    for name in ("scrub_bytes_per_s", "ttl_s"):
        if not (getattr(options, name) >= 0 and math.isfinite(getattr(options, name))):
            raise ConfigError(f"file tier: {name} must be 0 or more, not {getattr(options, name)}")
    for name in ("hang_s", "retry_s"):
        if not (getattr(options, name) > 0 and math.isfinite(getattr(options, name))):
            raise ConfigError(f"file tier: {name} must be a positive number of seconds, not {getattr(options, name)}")
    for name in ("free_floor_bytes", "tenant_quota_bytes", "write_budget_bytes_per_day", "endurance_bytes"):
        if getattr(options, name) < 0:
            raise ConfigError(f"file tier: {name} must be 0 or more, not {getattr(options, name)}")
    for name in ("capacity_bytes", "reads_in_flight", "writes_in_flight", "failures_in_a_row"):
        if getattr(options, name) < 1:
            raise ConfigError(f"file tier: {name} must be 1 or more, not {getattr(options, name)}")


def limits(options: Options) -> HealthLimits:
    return HealthLimits(
        failures_in_a_row=options.failures_in_a_row,
        hang_ns=round(options.hang_s * 1e9),
        retry_ns=round(options.retry_s * 1e9),
        read_threads=options.reads_in_flight,
        write_threads=options.writes_in_flight,
    )
