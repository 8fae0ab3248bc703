"""What a replay can be asked for: one machine, and the variants of it to compare."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import msgspec

from forebay.assemble import Named, open_policy
from forebay.bench.units import bytes_text, parse_bytes
from forebay.choice import LoadOrCompute
from forebay.errors import ConfigError
from forebay.fairness import Order
from forebay.sim.media import Medium, curve_medium, medium_named
from forebay.sim.profiles import EngineProfile, profile_named

_MOST_POOL_SLOTS = 2_000_000
"""Each takes 4 KiB of this process, whatever it stands for."""
_LEAST_POOL_SLOTS = 64


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """One store to replay the trace on."""

    dram_bytes: int
    disk_bytes: int
    medium: str
    """A name, or the path of a measured curve."""
    eviction: str
    admission: str

    @property
    def name(self) -> str:
        return (
            f"{bytes_text(self.dram_bytes)} DRAM, {bytes_text(self.disk_bytes)} on {self.medium}, {self.eviction}, "
            f"{self.admission}"
        )


class ReplayOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    trace: Path | None = None
    """None: the seeded workload instead."""
    trace_block_tokens: int = 512
    workload: str = "chat"
    seed: int = 0
    """Of the seeded workload: a trace has nothing that is drawn."""
    requests: int | None = None
    """No more than these of a trace."""
    profile: str = "qwen2.5-32b/1xmi308x"
    accelerators: int = 48
    """Instances of the profile that share the store: as one that is so many times as fast at prefill."""
    pace: float = 1.0
    """Requests come so many times as fast as recorded."""
    dram_bytes: tuple[int, ...] = (256 * 10**9,)
    disk_bytes: tuple[int, ...] = (8 * 10**12,)
    media: tuple[str, ...] = ("4*nvme-gen4",)
    evictions: tuple[str, ...] = ("prefix_aware",)
    admissions: tuple[str, ...] = ("admit_all",)
    order: Order = Order.FAIR_SOJOURN
    load_or_compute: LoadOrCompute = LoadOrCompute.ON
    bin_s: float = 60.0
    """Of the figures over time."""
    processes: int = 1
    out: Path = Path()

    def variants(self) -> tuple[Variant, ...]:
        return tuple(
            Variant(dram_bytes=dram, disk_bytes=disk, medium=medium, eviction=eviction, admission=admission)
            for medium, disk, dram, eviction, admission in itertools.product(
                self.media, self.disk_bytes, self.dram_bytes, self.evictions, self.admissions
            )
        )

    def engine_profile(self) -> EngineProfile:
        return profile_named(self.profile)

    def workload_named(self) -> Named:
        if self.trace is None:
            return Named(kind=self.workload, options={"seed": self.seed})
        options = {"path": str(self.trace), "block_tokens": self.trace_block_tokens}
        return Named(
            kind="trace", options=options | ({} if self.requests is None else {"most_requests": self.requests})
        )


def open_medium(name: str, block_bytes: int) -> Medium:
    return curve_medium(Path(name), block_bytes) if name.endswith(".json") else medium_named(name)


def parse_sizes(text: str) -> tuple[int, ...]:
    """`64GB,256GB`. Raises ConfigError."""
    return tuple(parse_bytes(part) for part in text.split(","))


def check_options(options: ReplayOptions) -> None:
    """Raises ConfigError for the first thing that cannot work, before anything is simulated."""
    block_bytes = options.engine_profile().kv_bytes_per_token * max(1, options.trace_block_tokens)
    for name in ("trace_block_tokens", "accelerators", "processes"):
        if not 1 <= getattr(options, name) <= 100_000:
            raise ConfigError(f"--{name.replace('_', '-')} must be from 1 to 100000, not {getattr(options, name)}")
    for name in ("pace", "bin_s"):
        if not (math.isfinite(getattr(options, name)) and getattr(options, name) > 0):
            raise ConfigError(f"--{name.replace('_', '-')} must be above 0, not {getattr(options, name)}")
    for name in ("dram_bytes", "disk_bytes", "media", "evictions", "admissions"):
        if not getattr(options, name):
            raise ConfigError(f"nothing to replay on: give one of {name.replace('_', ' ')} or more")
    for dram_bytes in options.dram_bytes:
        if not _LEAST_POOL_SLOTS * block_bytes <= dram_bytes <= _MOST_POOL_SLOTS * block_bytes:
            raise ConfigError(
                f"--dram must be from {bytes_text(_LEAST_POOL_SLOTS * block_bytes)} to "
                f"{bytes_text(_MOST_POOL_SLOTS * block_bytes)} with blocks of {bytes_text(block_bytes)}, "
                f"not {bytes_text(dram_bytes)}"
            )
    for disk_bytes in options.disk_bytes:
        if disk_bytes < block_bytes:
            raise ConfigError(f"--disk holds less than a block of {bytes_text(block_bytes)}: {bytes_text(disk_bytes)}")
    for medium in options.media:
        open_medium(medium, block_bytes)
    for policy in (*options.evictions, *options.admissions):
        open_policy(Named(kind=policy))
    if not options.out.is_dir():
        raise ConfigError(f"--out: {options.out} is not a directory: make it first, or name another one")
