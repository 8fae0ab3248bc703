"""The published storms as specifications for the simulator, and the parameters that were fitted for them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import msgspec

from forebay.bench.calibration.published import KI_GB, Published, Quantity
from forebay.fairness import Order
from forebay.sim.host import Hosting
from forebay.sim.media import PORT_EFFICIENCY, Medium, medium_named
from forebay.sim.profiles import profile_named
from forebay.sim.storm import Placement, StormSpec

TP8, TP4, TP1 = (
    profile_named(name)
    for name in ("qwen3-coder-480b-fp8/8xmi308x", "qwen3-coder-480b-fp8/4xmi308x", "qwen2.5-32b/1xmi308x")
)

DRAM_TIER_BYTES = 4 * 10**9
"""Of each rank, as the reports configure it."""
SETUP_S = 0.65
KEPT_SHARE = 0.65
FAR_SPEED = 0.58
STREAM_BYTES_PER_S = 0.98 * KI_GB
PROCESS_BYTES_PER_S = 5.23 * KI_GB

NEW_TOKENS = 128
"""After the stored prefix: on average half of a chunk of 256 tokens, since only whole chunks are stored."""
OUTPUT_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Parameter:
    """One that was fitted."""

    name: str
    value: float
    unit: str
    meaning: str
    fitted_on: str


PARAMETERS = (
    Parameter(
        "port efficiency", PORT_EFFICIENCY, "share",
        "of a 100 GbE port's bit rate that arrives as blocks over NVMe-oF", "TTFT p50 of R2 fx100 at 8, 16 and 32",
    ),
    Parameter(
        "kept share", KEPT_SHARE, "share",
        "of the DRAM tier of 4 GB a rank that a wave finds as the one before left it", "the same three cells",
    ),
    Parameter(
        "set-up", SETUP_S, "s", "from a wave's requests to their lookups: HTTP, tokens, the first step",
        "the same three cells",
    ),
    Parameter(
        "prefill, 8 ranks", TP8.token_s, "s a token", "without context", "TTFT p50 and throughput of R2 recompute",
    ),
    Parameter(
        "prefill, 4 ranks", TP4.token_s, "s a token", "without context, first instance",
        "TTFT p50 and throughput of R3 recompute",
    ),
    Parameter(
        "far speed", FAR_SPEED, "share", "prefill and reads in flight of the second instance, to those of the first",
        "TTFT p50 and throughput of R3 recompute",
    ),
    Parameter(
        "decode step", TP8.step_s, "s", "of a step without context", "throughput and TTFT p50 of R2 fx100 at 8 and 32",
    ),
    Parameter(
        "KV rate", TP8.kv_bytes_per_s, "B/s", "at which a rank reads KV in a decode step", "the same cells",
    ),
    Parameter(
        "stream", STREAM_BYTES_PER_S, "B/s", "what one read at a time gets on R1's machine", "read rate of R1 serial",
    ),
    Parameter(
        "process", PROCESS_BYTES_PER_S, "B/s", "what one process gets there with 32 reads at a time",
        "read rate of R1 parallel",
    ),
)  # fmt: skip


class Role(Enum):
    FITTED = "fitted"
    """A parameter was chosen so that this figure comes out."""
    EXPLAINED = "explained"
    """It takes an assumption that holds for this row alone."""
    PREDICTED = "predicted"


def role(row: Published, quantity: Quantity) -> Role:
    if row.report == "R3" and row.group == "shared_own" and row.sessions == 16:
        return Role.EXPLAINED
    is_fx100 = row.report == "R2" and row.medium == "fx100"
    match quantity:
        case Quantity.TTFT_P50:
            is_fitted = is_fx100 or row.group == "recompute"
        case Quantity.THROUGHPUT:
            is_fitted = (is_fx100 and row.sessions != 16) or row.group == "recompute"
        case Quantity.READ_BUSY:
            is_fitted = row.report == "R1"
        case _:
            is_fitted = False
    return Role.FITTED if is_fitted else Role.PREDICTED


class Assumptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the model holds to be so, beside its parameters: each can be doubted, and changed to see what it does."""

    dram_bytes_per_rank: int = round(KEPT_SHARE * DRAM_TIER_BYTES)
    """Pool of which a wave finds the contents."""
    is_tail_found: bool = True
    """A wave of N has the first N sessions of one list, so that those of the wave before come back in it."""
    order: Order = Order.INTERLEAVED
    hosting: Hosting = Hosting.BLOCKING
    far_speed: float = FAR_SPEED
    stored_tokens: int = 30_208
    repeats_a_pool: bool = True
    """Of R3 shared_own at 16: what fits in the staging pool of an instance when it runs dry is loaded once more, after
    the rest."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Where the figures of a row come from: a wave of a storm. Rows may share the storm."""

    storm: StormSpec
    wave: int


_FX100 = "4*nvme-gen4@100gbe"
_LOCAL = "nvme-gen4"


def plan(row: Published, assumed: Assumptions | None = None) -> Plan:
    """The storm that stands for a row, and which of its waves."""
    assumed = assumed or Assumptions()
    if row.report == "R1":
        return Plan(_one_gpu(row, assumed), 0)
    profile, instances = (TP8, 1) if row.form == "TP8x1" else (TP4, 2)
    pool_bytes = assumed.dram_bytes_per_rank * profile.ranks
    waves = _waves(row) if assumed.is_tail_found else (row.sessions,)
    storm = StormSpec(
        profile=profile,
        media=_media(row.medium),
        waves=waves,
        instances=instances,
        stored_tokens=assumed.stored_tokens,
        new_tokens=NEW_TOKENS,
        output_tokens=OUTPUT_TOKENS,
        host_bytes=pool_bytes,
        order=assumed.order,
        hosting=assumed.hosting,
        placement=Placement.CROSS if row.group == "shared_cross" else Placement.OWN,
        setup_s=SETUP_S,
        far_speed=assumed.far_speed,
    )
    if assumed.repeats_a_pool and role(row, Quantity.TTFT_P50) is Role.EXPLAINED:
        session_bytes = assumed.stored_tokens * profile.kv_bytes_per_token
        repeated = -(-DRAM_TIER_BYTES * profile.ranks // session_bytes)
        storm = msgspec.structs.replace(storm, loads_at_once=row.sessions // instances - repeated)
    return Plan(storm, waves.index(row.sessions))


def _waves(row: Published) -> tuple[int, ...]:
    """In the order in which the reports ran them, without the staged row's: it was run by itself."""
    if row.medium == "none" or role(row, Quantity.TTFT_P50) is Role.EXPLAINED:
        return (row.sessions,)
    if row.report == "R2":
        return (8, 16, 32)
    return (16, 32) if row.medium == "fx100" else (16,)


def _media(name: str) -> tuple[Medium, ...]:
    match name:
        case "fx100":
            return (medium_named(_FX100),)
        case "local_nvme":
            return (medium_named(_LOCAL),)
        case _:
            return ()


def _one_gpu(row: Published, assumed: Assumptions) -> StormSpec:
    """R1: 8k-token sessions of 2 GB, as the rates times the times to the first token say."""
    medium = Medium(
        name="fx100, one process",
        read_bytes_per_s=PROCESS_BYTES_PER_S,
        write_bytes_per_s=PROCESS_BYTES_PER_S,
        latency_ns=100_000,
        stream_bytes_per_s=STREAM_BYTES_PER_S,
        source="R1's read rates",
    )
    return StormSpec(
        profile=TP1,
        media=(medium,),
        waves=(row.sessions,),
        stored_tokens=8192,
        new_tokens=NEW_TOKENS,
        output_tokens=OUTPUT_TOKENS,
        host_bytes=DRAM_TIER_BYTES,
        reads_in_flight=1 if row.group == "serial" else 32,
        order=assumed.order,
        hosting=assumed.hosting,
        setup_s=SETUP_S,
    )
