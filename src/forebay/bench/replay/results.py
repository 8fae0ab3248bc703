"""What a replay has shown."""

from __future__ import annotations

import msgspec

from forebay.bench.replay.options import Variant

SCHEMA = "forebay-sim-replay/1"


class Bin(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch of the trace. Requests count where they arrived, bytes where they moved."""

    at_s: float
    """Its beginning."""
    requests: int
    wanted_blocks: int
    dram_blocks: int
    disk_blocks: int
    ttft_p50_s: float | None
    """None without requests, here and below."""
    ttft_p99_s: float | None
    read_bytes_per_s: float
    write_bytes_per_s: float


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One variant."""

    variant: Variant
    requests: int
    wanted_blocks: int
    """Full blocks of all prompts."""
    dram_blocks: int
    """Of them, known to be in DRAM when the request was planned, and likewise on disk."""
    disk_blocks: int
    loaded_blocks: int
    """The engine may leave some to be computed, where that is faster."""
    prompt_tokens: int
    loaded_tokens: int
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    read_bytes: int
    written_bytes: int
    read_peak_bytes_per_s: float
    """Of a bin."""
    refused_blocks: int
    """Not written to disk: a policy said no, or too many writes waited."""
    unstored_blocks: int
    """Not even taken into DRAM: the pool was busy with what waited to be written."""
    whole_s: float
    bins: tuple[Bin, ...]

    @property
    def hit_share(self) -> float:
        """Of the full blocks."""
        return (self.dram_blocks + self.disk_blocks) / self.wanted_blocks if self.wanted_blocks else 0.0

    @property
    def loaded_share(self) -> float:
        """Of all prompt tokens, the share that was not computed."""
        return self.loaded_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class ReplayRecord(msgspec.Struct, frozen=True, kw_only=True):
    schema: str = SCHEMA
    version: str
    command: tuple[str, ...]
    workload: str
    requests: int
    block_tokens: int
    distinct_blocks: int
    profile: str
    accelerators: int
    pace: float
    seed: int
    outcomes: tuple[Outcome, ...]

    @property
    def fleet_text(self) -> str:
        """What is not true of a fleet's times here; empty for one instance."""
        if self.accelerators == 1:
            return ""
        return (
            f"The {self.accelerators} instances are one that prefills {self.accelerators} times as fast: where few "
            "requests are under way, a prompt is computed that much sooner than one instance could."
        )
