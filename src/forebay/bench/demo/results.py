"""What a demo found, as values: they go into demo.json as they are, and every figure that is shown is one of them."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from enum import Enum

import msgspec

from forebay.bench.environment import Environment
from forebay.bench.evidence import Evidence, Verdict
from forebay.bench.units import factor_text

SCHEMA = "forebay.demo/1"


class Way(Enum):
    """How a prompt's context came to the model."""

    RECOMPUTE = "recompute"
    DISK = "disk"
    DRAM = "dram"

    @property
    def label(self) -> str:
        """For the head of a column."""
        return self.phrase.capitalize() if self is not Way.DRAM else "From DRAM"

    @property
    def phrase(self) -> str:
        """Within a sentence."""
        return {Way.RECOMPUTE: "recompute", Way.DISK: "from cold disk", Way.DRAM: "from DRAM"}[self]


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt, served in one way."""

    session: int
    """From 1."""
    way: Way
    prompt_tokens: int
    hit_tokens: dict[str, int]
    """Restored tokens by source."""
    computed_tokens: int
    tokens: tuple[int, ...]
    """Of the answer."""
    ttft_s: float
    total_s: float
    restore_s: float
    prefill_s: float
    restored_bytes: int

    @property
    def restored_tokens(self) -> int:
        return sum(self.hit_tokens.values())


class Session(msgspec.Struct, frozen=True, kw_only=True):
    number: int
    title: str
    """Of its document."""
    question: str
    answer: str
    """Written by the model: hostile until escaped."""
    document_tokens: int
    prompt_tokens: int
    found_tokens: int
    """Of the document, restored from the pool in the populating pass: an earlier run left them there."""
    populate_s: float
    tokens_equal: bool
    """Whether all ways gave the same answer, token for token."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """One way, over all sessions. None: there is no such figure for this way."""

    way: Way
    sessions: int
    ttft_p50_s: float
    ttft_p99_s: float
    speedup: float
    """TTFT p50 of recompute over that of this way."""
    restore_p50_s: float | None
    """The part of TTFT that is lookup, reads and copies."""
    answer_tokens_per_s: float | None
    """After the first token."""
    total_tokens_per_s: float
    """Answer tokens over the whole time, from the prompt to the last token."""
    restored_bytes: int
    restore_gb_per_s: float | None
    hit_tokens: dict[str, int]
    computed_tokens: int


class Damage(msgspec.Struct, frozen=True, kw_only=True):
    """What the store found wrong with the pool while the demo ran, in blocks, and what that cost."""

    corrupt_blocks: int = 0
    missing_blocks: int = 0
    failed_reads: int = 0
    unstored_blocks: int = 0
    set_aside: tuple[str, ...] = ()
    """Files, relative to the pool."""

    @property
    def lost_blocks(self) -> int:
        """Blocks that were thought to be held and could not be had."""
        return self.corrupt_blocks + self.missing_blocks + self.failed_reads


class Model(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    architecture: str
    parameters: int
    kv_dtype: str
    token_bytes: int
    """KV of one token."""
    weights_digest: str


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    kept: bool
    """False: a temporary one, removed at the end."""
    found_blocks: int
    """Of this demo's blocks, held by the pool at the start."""
    document_blocks: int
    block_bytes: int
    access: str
    """`direct` or `buffered`."""
    access_reason: str


class Resources(msgspec.Struct, frozen=True, kw_only=True):
    host_pool_bytes: int
    device_cache_bytes: int
    huge_page_bytes: int
    """Of all the process's memory, with the host pool in place."""
    compute_threads: int
    """Of the model."""


class Durations(msgspec.Struct, frozen=True, kw_only=True):
    load_model_s: float
    populate_s: float
    measure_s: float
    whole_s: float


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Everything there is to say about one demo."""

    schema: str = SCHEMA
    created: str
    """UTC, ISO 8601."""
    headline: str
    verdict: Verdict
    tokens_equal: bool
    notes: tuple[str, ...]
    """What a reader should know and might not see."""
    summaries: tuple[Summary, ...]
    sessions: tuple[Session, ...]
    measurements: tuple[Measurement, ...]
    evidence: Evidence
    damage: Damage
    model: Model
    pool: Pool
    resources: Resources
    durations: Durations
    environment: Environment
    command: tuple[str, ...]
    options: dict[str, str | bool | int | None]

    def summary(self, way: Way) -> Summary:
        return next(summary for summary in self.summaries if summary.way is way)

    def of(self, way: Way) -> tuple[Measurement, ...]:
        return tuple(found for found in self.measurements if found.way is way)


def summarise(measurements: Sequence[Measurement]) -> tuple[Summary, ...]:
    """One summary a way, in the order of `Way`. Every way has to have been measured at least once."""
    base_s = statistics.median(found.ttft_s for found in measurements if found.way is Way.RECOMPUTE)
    return tuple(_summary(way, [found for found in measurements if found.way is way], base_s) for way in Way)


def _summary(way: Way, found: Sequence[Measurement], base_s: float) -> Summary:
    ttft_p50_s = statistics.median(each.ttft_s for each in found)
    restored_bytes = sum(each.restored_bytes for each in found)
    restore_s = sum(each.restore_s for each in found)
    hits: Counter[str] = Counter()
    for each in found:
        hits.update(each.hit_tokens)
    return Summary(
        way=way,
        sessions=len(found),
        ttft_p50_s=ttft_p50_s,
        ttft_p99_s=nearest_rank((each.ttft_s for each in found), 0.99),
        speedup=base_s / ttft_p50_s,
        restore_p50_s=statistics.median(each.restore_s for each in found) if restored_bytes else None,
        answer_tokens_per_s=_over(
            sum(len(each.tokens) - 1 for each in found), sum(each.total_s - each.ttft_s for each in found)
        ),
        total_tokens_per_s=sum(len(each.tokens) for each in found) / sum(each.total_s for each in found),
        restored_bytes=restored_bytes,
        restore_gb_per_s=_over(restored_bytes / 1e9, restore_s),
        hit_tokens=dict(hits),
        computed_tokens=sum(each.computed_tokens for each in found),
    )


def nearest_rank(values: Iterable[float], share: float) -> float:
    """The smallest value that at least this share of all values do not exceed: of few values, p99 is the largest."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def headline(summaries: Sequence[Summary], document_tokens: int, *, verdict: Verdict, tokens_equal: bool) -> str:
    """The finding in one sentence, which says so where it is none."""
    disk = next(summary for summary in summaries if summary.way is Way.DISK)
    tokens = "the tokens are equal" if tokens_equal else "THE TOKENS DIFFER"
    if disk.speedup >= 1:
        gain = f"gave the first token {factor_text(disk.speedup)} sooner than recomputing them"
    else:
        gain = f"took {factor_text(1 / disk.speedup)} as long to the first token as recomputing them"
    found = f"Restoring {document_tokens:,} tokens from cold disk {gain}; {tokens}."
    return found if not verdict.reasons else f"INVALID, not to be relied on: {found[0].lower()}{found[1:]}"


def _over(amount: float, time_s: float) -> float | None:
    return amount / time_s if amount and time_s > 0 else None
