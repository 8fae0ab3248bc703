"""What is asked of the stability gate."""

from __future__ import annotations

import math
import shutil
from enum import Enum
from pathlib import Path

import msgspec

from forebay.bench.environment import available_memory_bytes
from forebay.bench.gates.gate import check_root
from forebay.bench.units import bytes_text
from forebay.errors import ConfigError
from forebay.hostpool import slot_bytes

BLOCK_TOKENS = 16
_HEADER_BYTES = 4096
_LEAST_SLOTS = 16


class FaultKind(Enum):
    KILL = "kill"
    """One worker is killed (SIGKILL) and started again: the first one once, and then the others in turn."""
    FULL = "full disk"
    """No room for any write, in every second worker."""
    SLOW = "slow device"
    """Each transfer takes `slow_s` longer, in every second worker."""
    LOST = "lost root"
    """One root's directory is gone, for all. The roots take turns."""
    PULLED = "pulled device"
    """Somebody pulls the device under a root, and puts it back: the gate says when. Only if a plan names it."""


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Of what is measured; everything that is wrong or left over has the limit 0."""

    rss_growth_bytes: int = 256 * 2**20
    """Of one worker, over what it had when it was warm."""
    descriptor_growth: int = 16
    """Of one worker at rest, over what it had at rest when it was warm."""
    p99_drift: float = 1.5
    """p99 of loads from disk in the last window, over that in the first."""
    least_loads: int = 1000
    """That brought something from disk, over all workers."""


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    roots: tuple[str, ...]
    """Existing directories, one a device. The pool is made in them, and removed when the gate is through."""
    duration_s: float = 72 * 3600.0
    """Of load; time in which the gate does not run does not count."""
    workers: int = 2
    """Processes with an engine each, over one pool. Every second one has a seam for faults beneath its tier."""
    block_bytes: int = 2 * 2**20
    capacity_bytes: int = 64 * 2**30
    """Of the pool. Half of what is asked for fits, so that eviction never ends."""
    host_bytes: int = 2**30
    """Of each worker."""
    prompt_blocks: int = 16
    requests_per_s: float = 4.0
    """Of each worker."""
    in_flight: int = 4
    """Loads at a time, of each worker."""
    faults: tuple[FaultKind, ...] = (FaultKind.KILL, FaultKind.FULL, FaultKind.SLOW, FaultKind.LOST)
    """They take turns. Between the first and the last window."""
    fault_every_s: float = 1800.0
    fault_for_s: float = 60.0
    settle_s: float = 60.0
    """After a fault, until latencies count again, and until a pool whose lost root is back has room for its blocks."""
    slow_s: float = 0.2
    warmup_s: float = 600.0
    """After a worker's start, until its memory and descriptors are what later ones are compared with."""
    window_s: float = 3600.0
    """At the beginning, after the warm-up, and at the end: p99 of one is compared with p99 of the other."""
    rest_s: float = 10.0
    """Between two times at which a worker lets all work end and proves that nothing is left over."""
    look_s: float = 10.0
    """Between two looks at what the pool occupies."""
    seed: int = 0
    limits: Limits = Limits()


def stored_bytes(options: Options) -> int:
    """What one block takes on disk."""
    return _HEADER_BYTES + slot_bytes(options.block_bytes)


def session_count(options: Options) -> int:
    """Twice as many as the pool can hold."""
    return max(2, 2 * options.capacity_bytes // (stored_bytes(options) * options.prompt_blocks))


def check_options(options: Options) -> None:
    """Raises ConfigError for what cannot be measured."""
    if not options.roots:
        raise ConfigError("roots: name at least one directory")
    for root in options.roots:
        check_root(Path(root))
    if len({Path(root).resolve() for root in options.roots}) < len(options.roots):
        raise ConfigError("roots: a directory is named twice")
    for name in ("duration_s", "requests_per_s", "fault_every_s", "warmup_s", "window_s", "rest_s", "look_s"):
        if not (math.isfinite(value := getattr(options, name)) and value > 0):
            raise ConfigError(f"{name} must be a number above 0, not {value}")
    for name in ("fault_for_s", "settle_s", "slow_s"):
        if not (math.isfinite(value := getattr(options, name)) and value >= 0):
            raise ConfigError(f"{name} must be a number, 0 or more, not {value}")
    for name in ("in_flight", "prompt_blocks"):
        if getattr(options, name) < 1:
            raise ConfigError(f"{name} must be 1 or more, not {getattr(options, name)}")
    if options.workers < 2:
        raise ConfigError("workers must be 2 or more: one is struck by faults, one is not")
    if options.block_bytes < 4096 or options.block_bytes % 8:
        raise ConfigError(f"block_bytes must be 4096 or more, and a multiple of 8, not {options.block_bytes}")
    _check_room(options)


def _check_room(options: Options) -> None:
    slots = options.host_bytes // slot_bytes(options.block_bytes)
    least_slots = max(_LEAST_SLOTS, 2 * options.prompt_blocks)
    if slots < least_slots:
        raise ConfigError(f"host_bytes {options.host_bytes} holds {slots} blocks: give it room for {least_slots}")
    if options.capacity_bytes < 4 * options.prompt_blocks * stored_bytes(options):
        raise ConfigError(f"capacity_bytes {options.capacity_bytes} holds less than 4 prompts: give more")
    if options.duration_s < options.warmup_s + 2 * options.window_s:
        raise ConfigError(
            f"duration_s {options.duration_s:g} has no room for the warm-up and two windows: "
            f"make it {options.warmup_s + 2 * options.window_s:g} or more, or those shorter"
        )


def check_machine(options: Options) -> None:
    """Before the pool is made. Raises ConfigError when memory or disk cannot hold it: that would look like a fault."""
    wanted_bytes, available_bytes = options.workers * options.host_bytes, available_memory_bytes()
    if available_bytes is not None and wanted_bytes > available_bytes:
        raise ConfigError(
            f"{options.workers} workers with host_bytes {bytes_text(options.host_bytes)} each need more than the "
            f"{bytes_text(available_bytes)} of memory that are free"
        )
    free_bytes = sum({Path(root).stat().st_dev: shutil.disk_usage(root).free for root in options.roots}.values())
    if options.capacity_bytes > free_bytes:
        raise ConfigError(
            f"capacity_bytes {bytes_text(options.capacity_bytes)} is more than the {bytes_text(free_bytes)} that are "
            "free in the roots"
        )
