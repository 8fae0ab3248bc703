"""What a plan says. Bytes, seconds and tokens, with the unit in each name; JSON as it stands."""

from __future__ import annotations

import msgspec


class _Result(msgspec.Struct, frozen=True, kw_only=True):
    pass


class Volume(_Result, frozen=True, kw_only=True):
    """KV at rest and on its way."""

    model: str
    model_source: str
    kv_format: str
    token_bytes: int
    """Each element counted once."""
    session_bytes: int
    """Stored for a session, over all ranks of an instance; copies that ranks hold of the same are counted."""
    session_rank_bytes: int
    """Of it, by the rank that has most."""
    restored_bytes: int
    """Read to go on with a session: windows count only as far as they reach back."""
    copies: float
    """How often each element is held over an instance's ranks."""
    total_bytes: int
    """Of all sessions."""
    block_bytes: int


class Demand(_Result, frozen=True, kw_only=True):
    requests_per_s: float | None
    reuse: float
    mean_read_bytes_per_s: float | None
    peak_sessions: int
    peak_read_bytes_per_s: float
    """At which the largest storm's transfers take no longer than all that no bandwidth shortens."""
    held_staging_bytes: int
    """DRAM for a storm, where the engine keeps a session's KV there until all of it has come: all bytes in flight."""
    held_staging_rank_bytes: int
    """Of it, by the rank that has most, of the instance that has most sessions."""
    streamed_staging_bytes: int
    """DRAM over the fleet where blocks stream through: those being read, and as many being copied on."""
    streamed_staging_rank_bytes: int
    """Of it, by the rank that has most."""
    dram_bytes: int | None
    """The plan's own, over the fleet; None where it isn't given."""
    dram_rank_bytes: int | None


class Cell(_Result, frozen=True, kw_only=True):
    """One candidate at one concurrency."""

    candidate: str
    concurrency: int
    ttft_p50_s: float
    """Simulated, all sessions sharing the medium evenly, as engines without flow control do."""
    ttft_p99_s: float
    ordered_p50_s: float
    """Simulated with Forebay's flow: one after the other, in the order in which fair sharing would end them."""
    ordered_mean_s: float
    ordered_p99_s: float
    throughput_tok_s: float
    busy_share: float
    """Of the medium's ceiling, on average from the first request until the last one is restored."""
    measured_p50_s: float | None = None
    measured_throughput_tok_s: float | None = None
    measured_busy_share: float | None = None

    @property
    def best_p50_s(self) -> float:
        """Measured where there is a measurement."""
        return self.ttft_p50_s if self.measured_p50_s is None else self.measured_p50_s

    @property
    def best_throughput_tok_s(self) -> float:
        return self.throughput_tok_s if self.measured_throughput_tok_s is None else self.measured_throughput_tok_s

    @property
    def best_busy_share(self) -> float:
        return self.busy_share if self.measured_busy_share is None else self.measured_busy_share


class Recompute(_Result, frozen=True, kw_only=True):
    concurrency: int
    ttft_p50_s: float
    ttft_p90_s: float
    throughput_tok_s: float


class Gain(_Result, frozen=True, kw_only=True):
    """Throughput of a candidate over that of the baseline, less 1; measured where both are measured."""

    candidate: str
    concurrency: int
    simulated: float
    measured: float | None

    @property
    def best(self) -> float:
        return self.simulated if self.measured is None else self.measured


class Steady(_Result, frozen=True, kw_only=True):
    """At the mean rate, arrivals at random."""

    candidate: str
    load_share: float
    """Of the medium's ceiling. From 1 on, the queue grows without end."""
    restore_p50_s: float | None
    restore_p99_s: float | None


class HitRate(_Result, frozen=True, kw_only=True):
    capacity_bytes: int
    token_hit_rate: float
    written_share: float
    """Of the tokens asked for."""


class Wear(_Result, frozen=True, kw_only=True):
    candidate: str
    written_bytes_per_day: float
    years: float | None
    """Until the rated endurance of all drives is written; None where it isn't given."""


class Cost(_Result, frozen=True, kw_only=True):
    candidate: str
    per_year: float
    per_million_tokens: float | None
    """Output tokens at the mean rate."""
    with_fleet_per_million_tokens: float | None


class Finding(_Result, frozen=True, kw_only=True):
    """A rule that applies here."""

    rule: str
    text: str
    source: str


class Plan(_Result, frozen=True, kw_only=True):
    version: str
    name: str
    source: str
    currency: str
    baseline: str
    volume: Volume
    demand: Demand
    cells: tuple[Cell, ...]
    recompute: tuple[Recompute, ...]
    gains: tuple[Gain, ...]
    saturation: dict[str, int | None]
    """By candidate, simulated: the first concurrency that keeps it busy; None: none of those asked for."""
    measured_saturation: dict[str, int | None]
    tie_context_tokens: dict[int, int]
    """By concurrency: contexts up to this length demand no more than the baseline delivers."""
    best_concurrency: dict[str, int | None]
    """By candidate, simulated: the first concurrency that gives all but 5 % of the throughput it ever gives."""
    measured_best_concurrency: dict[str, int | None]
    steady: tuple[Steady, ...]
    hit_rates: tuple[HitRate, ...]
    hit_rate_basis: str
    wear: tuple[Wear, ...]
    costs: tuple[Cost, ...]
    findings: tuple[Finding, ...]
    recommended: str
    reasons: tuple[str, ...]

    def cell(self, candidate: str, concurrency: int) -> Cell:
        return next(c for c in self.cells if c.candidate == candidate and c.concurrency == concurrency)

    def gain(self, candidate: str, concurrency: int) -> Gain:
        return next(g for g in self.gains if g.candidate == candidate and g.concurrency == concurrency)
