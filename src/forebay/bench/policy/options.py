"""What `forebay bench policy` can be asked for."""

from __future__ import annotations

from pathlib import Path

import msgspec

from forebay.errors import ConfigError

EVICTION = ("lru", "lrfu", "s3fifo", "prefix_aware")
SEEDED = ("chat", "rag", "restore", "agents")


class PolicyOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    trace: Path | None = None
    trace_block_tokens: int = 512
    workloads: tuple[str, ...] = SEEDED
    policies: tuple[str, ...] = EVICTION
    shares: tuple[float, ...] = (0.005, 0.02, 0.06, 0.2, 0.5)
    """Cache sizes, as shares of the distinct blocks of a workload."""
    cache_blocks: tuple[int, ...] = ()
    """Cache sizes in blocks; in place of the shares if there are any."""
    admission: str = "frugal"
    """Replayed with the last of the policies, beside writing everything."""
    seed: int = 0
    processes: int = 1
    out: Path = Path()


def check_options(options: PolicyOptions) -> None:
    """Raises ConfigError for the first thing that cannot work."""
    if options.trace is None and not options.workloads:
        raise ConfigError("nothing to replay: give a trace, or a workload")
    if not options.policies:
        raise ConfigError("no policy to replay: give one")
    for share in options.shares:
        if not 0 < share <= 1:
            raise ConfigError(f"a cache size must be above 0 and at most 1 of the distinct blocks, not {share}")
    if not options.cache_blocks and not options.shares:
        raise ConfigError("no cache size: give one")
    for blocks in options.cache_blocks:
        if blocks < 1:
            raise ConfigError(f"a cache must have 1 block or more, not {blocks}")
    if not 1 <= options.processes <= 256:
        raise ConfigError(f"processes must be from 1 to 256, not {options.processes}")
    if not options.out.is_dir():
        raise ConfigError(f"{options.out} is no directory: make it, or give another one for the results")
