"""The record of a restore benchmark: every request, every wave, and what they come to.

A *group* is one of the things compared, such as a medium; it has one or several *instances*, which are started together
and reported as one machine. A *wave* is a number of sessions that are wanted at once: the concurrency. A *cell* is one
group at one concurrency, over all rounds. Times of a run are seconds since it began.

Definitions, as in the field: TTFT, from sending a request to its first token; TPOT, from the first token to the last,
over the tokens after the first; end to end, from sending to the last token; output tokens a second of the whole
machine, by the instance that ended last.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from forebay.bench.environment import Environment
from forebay.bench.evidence import Medium, ReadCounts, Verdict


class Role(Enum):
    """What a group stands for."""

    RECOMPUTE = "recompute"
    """Nothing is stored: every prompt is computed."""
    BASELINE = "baseline"
    CANDIDATE = "candidate"
    SHARED = "shared"
    """The candidate as one pool of several instances: each reads its own sessions and the others'."""


class Contents(msgspec.Struct, frozen=True, kw_only=True):
    """What a sample of the stored bytes looks like: a device or a file system may keep equal or dull ones for free."""

    sampled_files: int
    duplicate_files: int
    """Of those, with the same bytes in their middle as another."""
    compressed_share: float
    """Of the sampled bytes, that zlib leaves of them at level 1."""


class Group(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    role: Role
    instances: int
    target: str
    """What answers: `emulated`, `builtin` or `openai`."""
    media: tuple[Medium, ...]
    """Under each root; none for a group without one, and for what is not stored on this machine."""
    facts: dict[str, str] = {}
    """Of the target, such as its model, engine version and options."""
    contents: Contents | None = None
    """Of its roots, once populated. None where nothing is stored, or not on this machine."""

    @property
    def medium(self) -> Medium | None:
        """That evidence has to stand up to: one about which there is a doubt, else the first."""
        return next((each for each in self.media if each.doubt), self.media[0] if self.media else None)


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a measured wave."""

    group: str
    instance: int
    concurrency: int
    round: int
    session: int
    written_by: int
    """Instance that stored the session; another than `instance` where a pool is shared."""
    sent_s: float
    ttft_s: float | None
    """None when no token came."""
    ended_s: float
    prompt_tokens: int
    output_tokens: int
    stored_tokens: int = 0
    """Of the prompt, that a restore can bring: whole blocks of the engine that were stored before."""
    shared_tokens: int = 0
    """Of those, with which another request of the wave at the same instance begins too: one may read for both."""
    hit_tokens: int | None
    """Of the prompt, not computed. None where the target does not say."""
    hit_source: str | None
    """Tier from which they came, where the target says: `file`, or one that is none of cold storage."""
    output_digest: str
    """Of the output's tokens, or of its text where a target gives no tokens; empty when the request failed."""
    error: str = ""

    @property
    def end_to_end_s(self) -> float:
        return self.ended_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        if self.ttft_s is None or self.output_tokens < 2:
            return None
        return (self.end_to_end_s - self.ttft_s) / (self.output_tokens - 1)


class BandwidthSample(msgspec.Struct, frozen=True, array_like=True):
    at_s: float
    """End of the interval."""
    bytes_per_s: float


class WaveRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One measured wave of one group."""

    group: str
    concurrency: int
    round: int
    began_s: float
    ended_s: float
    wanted_bytes: int
    """Of KV on cold storage, that the restores of this wave had to read. 0 where nothing is restored."""
    read: ReadCounts
    """At the block layer, during the wave."""
    resident_bytes: int | None
    """Of the wanted bytes, in the page cache when the wave began. None where it cannot be told."""
    foreign_bytes: int | None
    """Moved on the device during the wave by others than this benchmark's processes. None where it cannot be told."""
    bandwidth: tuple[BandwidthSample, ...]
    """Of the device's reads."""
    core_s: float | None
    """Processor time of the benchmark's and the engine's processes."""
    clock_step_s: float
    """By how much the wall clock left the monotonic one during the wave: a jump."""

    @property
    def whole_s(self) -> float:
        return self.ended_s - self.began_s


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """A figure and its bootstrap confidence interval (95 %, over requests, or over rounds for figures of a wave)."""

    value: float
    low: float
    high: float


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One group at one concurrency. None: no request gave the figure."""

    group: str
    role: Role
    concurrency: int
    rounds: int
    requests: int
    failed: int
    ttft_mean_s: Spread | None
    ttft_p50_s: Spread | None
    ttft_p90_s: Spread | None
    ttft_p99_s: Spread | None
    ttft_p50_of_rounds_s: tuple[float, ...]
    """p50 of each round: what repeats are judged by."""
    tpot_p50_s: Spread | None
    end_to_end_p50_s: Spread | None
    output_tokens_per_s: Spread | None
    """Of the whole machine."""
    hit_tokens: int | None
    peak_bytes_per_s: float | None
    busy_mean_bytes_per_s: float | None
    """Of the block layer's reads, over the part of the waves in which there were any."""
    core_s_per_gb: float | None
    core_s_per_request: float | None
    """By which groups that restore and those that compute can be compared."""
    own_ttft_p50_s: Spread | None = None
    """Of a shared pool: of requests for sessions that the asked instance stored itself."""
    others_ttft_p50_s: Spread | None = None
    """Of a shared pool: of requests for sessions that another instance stored."""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """One group against another at one concurrency. Ratios are those of the cells' figures."""

    group: str
    against: str
    concurrency: int
    ttft_p50_change: Spread | None
    """-0.25: a quarter less."""
    throughput_change: Spread | None
    """0.29: 29 % more output tokens a second."""
    tokens_equal: bool
    """Each session's output was the same in both."""


class RestoreRecord(msgspec.Struct, frozen=True, kw_only=True):
    created: str
    title: str
    verdict: Verdict
    notes: tuple[str, ...]
    workload: str
    groups: tuple[Group, ...]
    cells: tuple[Cell, ...]
    comparisons: tuple[Comparison, ...]
    waves: tuple[WaveRecord, ...]
    requests: tuple[RequestRecord, ...]
    """Also in a file of their own (JSONL) beside the record."""
    environment: Environment
    options: dict[str, object]
    command: tuple[str, ...]
