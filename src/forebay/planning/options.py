"""The file that `forebay plan` reads. Sizes and rates carry their unit: `64GB` is not `64GiB`."""

from __future__ import annotations

import tomllib
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import msgspec

from forebay.assemble import Named
from forebay.bench.units import parse_bytes, parse_rate
from forebay.errors import ConfigError
from forebay.sim.files import read_small
from forebay.sim.hfconfig import read_model
from forebay.sim.models import find_model
from forebay.sim.sizing import FORMATS, KvFormat, KvModel, Layout

_MOST_FILE_BYTES = 1 << 20
Count = Annotated[int, msgspec.Meta(ge=1, le=1_000_000_000)]
Few = Annotated[int, msgspec.Meta(ge=1, le=4096)]
Amount = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
Positive = Annotated[float, msgspec.Meta(ge=1e-6, le=1e15)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table of the file: an unknown key is refused by its name."""


class ModelPart(_Part, frozen=True, kw_only=True):
    name: str = ""
    """Of a built-in model; or"""
    config: str = ""
    """a Hugging Face config.json, or its folder; relative to the plan's file."""
    kv_format: str = ""
    """One of `sizing.FORMATS`; the model's own if empty."""


class EnginePart(_Part, frozen=True, kw_only=True):
    """What one instance of the engine takes. Measure it on yours: no figure here is a constant of nature."""

    profile: str = ""
    """One of `forebay.sim.profiles`, or a .toml file with the fields of one, in place of the next three; or"""
    prefill_tokens_per_s: Positive | None = None
    decode_step_ms: Amount | None = None
    """Of an output token, with one session under way."""
    decode_step_ms_per_session: Amount = 0.0
    """More with each further session of the same instance."""
    restore_setup_ms: Amount = 0.0
    """Part of a restored session's TTFT that no bandwidth shortens: look-up, scheduling, the first step."""
    source: str = ""


class FleetPart(_Part, frozen=True, kw_only=True):
    gpus: Few
    instances: Few = 1
    """Independent copies of the model that share the storage."""
    tensor_parallel: Few = 1
    pipeline_parallel: Few = 1
    kept_dram: str = ""
    """DRAM of an instance, over its ranks, in which a storm finds what the one before left (`workload.in_a_row`)."""
    cost_per_year: Amount | None = None
    """Of all but the candidates, in the plan's currency."""

    @property
    def ranks(self) -> int:
        """Of all instances."""
        return self.instances * self.tensor_parallel * self.pipeline_parallel


class WorkloadPart(_Part, frozen=True, kw_only=True):
    sessions: Count
    """Whose KV is to be kept."""
    context_tokens: Count | None = None
    """Of a session that comes back. None: the mean of `trace`."""
    followup_tokens: Count = 16
    """New in each request: computed even if all else is restored."""
    output_tokens: Count = 64
    concurrency: tuple[Few, ...] = (1, 4, 8, 16, 32)
    """Sessions restored at once, over the whole fleet. The largest is the storm to plan for."""
    in_a_row: tuple[Few, ...] = ()
    """Those of them that come one after the other, in this order, each with the first sessions of one list: what
    `fleet.kept_dram` still holds is not read again. The others come cold."""
    requests_per_s: Positive | None = None
    """On average, over the fleet. None: that of `trace`."""
    reuse: Share = 1.0
    """Share of requests whose session was seen before. With a trace, the trace says it."""
    trace: Named | None = None
    """A workload by its module: {kind = "trace", options = {path = "..."}}, or a seeded one."""


class MeasuredPart(_Part, frozen=True, kw_only=True):
    """A measurement of this candidate under this workload: it stands beside what is simulated, and above it."""

    concurrency: Few
    ttft_p50_s: Positive
    throughput_tok_s: Positive
    busy_mean: str = ""
    """What the medium delivered while it was busy."""


class MediumKind(Enum):
    NVME = "nvme"
    SATA = "sata"
    NETWORK = "network"
    OBJECT = "object"


class CandidatePart(_Part, frozen=True, kw_only=True):
    name: str
    kind: MediumKind = MediumKind.NVME
    medium: str = ""
    """Drives and links by name, such as 4*nvme-gen4@100gbe (`forebay.sim.media`); or"""
    curve: str = ""
    """a curve of `forebay bench io --export`, relative to the plan's file; or"""
    read: str = ""
    """what all its drives deliver together, such as 6.9GB/s, with `latency_us` and `in_flight_blocks`."""
    link: str = ""
    """What the network between it and the machine lets through, where there is one."""
    latency_us: Amount = 100.0
    in_flight_blocks: Few = 256
    """Reads under way at a time."""
    drives: Few = 1
    capacity: str = ""
    """Of all drives."""
    endurance: str = ""
    """Bytes that one drive is rated to take in its life."""
    price: Amount | None = None
    """Of all of it, in the plan's currency."""
    together: tuple[str, ...] = ()
    """In place of all above but the name: blocks are spread over these candidates, by their bandwidth."""
    measured: tuple[MeasuredPart, ...] = ()

    @property
    def is_sata(self) -> bool:
        """By its kind, or by the name of its medium."""
        return self.kind is MediumKind.SATA or "sata" in self.medium.partition("@")[0]

    @property
    def is_remote(self) -> bool:
        """There is a network before it: by its kind, its link, or the name of its medium."""
        said = self.kind in (MediumKind.NETWORK, MediumKind.OBJECT) or bool(self.link)
        return said or "gbe" in self.medium or "s3" in self.medium.partition("@")[0]


class BudgetPart(_Part, frozen=True, kw_only=True):
    dram: str = ""
    """For KV on its way and the DRAM tier, over the fleet."""
    ttft_p50_s: Positive | None = None
    """At the largest concurrency."""
    price: Amount | None = None
    """Most that a candidate may cost."""
    life_years: Positive = 5.0
    """Over which a price is spread."""


class PlanFile(_Part, frozen=True, kw_only=True):
    name: str
    currency: str = ""
    source: str = ""
    """Where the measurements and prices come from."""
    model: ModelPart
    engine: EnginePart
    fleet: FleetPart
    workload: WorkloadPart
    budget: BudgetPart = BudgetPart()
    baseline: str
    """The candidate that the others are compared with."""
    block_tokens: Few = 256
    tie_context_tokens: Count | None = None
    """A shorter context, to show whether the media tie there."""
    candidates: Annotated[tuple[CandidatePart, ...], msgspec.Meta(min_length=1, max_length=32)]


def read_plan(path: Path) -> PlanFile:
    """Raises ConfigError with the file and what in it is wrong."""
    content = read_small(path, _MOST_FILE_BYTES, "a plan")
    try:
        found: Any = tomllib.loads(content.decode())
        plan = msgspec.convert(found, PlanFile)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError, RecursionError) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from None
    check_plan(plan)
    return plan


def with_profile(plan: PlanFile, profile: str) -> PlanFile:
    """The same plan with another engine: a profile's name or file. Its set-up stays."""
    engine = EnginePart(profile=profile, restore_setup_ms=plan.engine.restore_setup_ms, source=profile)
    return msgspec.structs.replace(plan, engine=engine)


def check_plan(plan: PlanFile) -> None:
    """Raises ConfigError for the first thing that cannot work."""
    names = [candidate.name for candidate in plan.candidates]
    if len(set(names)) < len(names):
        raise ConfigError("two candidates have one name: give each its own")
    if plan.baseline not in names:
        raise ConfigError(f"baseline {plan.baseline[:40]!a} is none of the candidates")
    for candidate in plan.candidates:
        _check_candidate(candidate, {each.name: each for each in plan.candidates})
    fleet = plan.fleet
    if fleet.ranks > fleet.gpus:
        raise ConfigError(f"{fleet.ranks} ranks do not fit on {fleet.gpus} GPUs: fewer instances, or less parallelism")
    if plan.workload.trace is None and plan.workload.context_tokens is None:
        raise ConfigError("workload: give context_tokens, or a trace to take them from")
    engine = plan.engine
    if bool(engine.profile) == (engine.prefill_tokens_per_s is not None or engine.decode_step_ms is not None):
        raise ConfigError("engine: give either a profile, or prefill_tokens_per_s and decode_step_ms")
    if not plan.workload.concurrency:
        raise ConfigError("workload: give at least one concurrency")
    row = plan.workload.in_a_row
    if len(set(row)) < len(row) or not set(row) <= set(plan.workload.concurrency):
        raise ConfigError("workload: in_a_row must name each of its storms once, and all of them in concurrency")
    bytes_or_none(fleet.kept_dram)


def _check_candidate(candidate: CandidatePart, others: dict[str, CandidatePart]) -> None:
    if candidate.together:
        if len(set(candidate.together)) < len(candidate.together):
            raise ConfigError(f"{candidate.name[:40]!a}: together names a candidate twice")
        for name in candidate.together:
            if name not in others or others[name].together:
                raise ConfigError(f"{candidate.name}: {name[:40]!a} is no candidate with a bandwidth of its own")
        return
    if sum(map(bool, (candidate.read, candidate.medium, candidate.curve))) != 1:
        raise ConfigError(
            f"candidate {candidate.name[:40]!a}: give what it reads, such as read = '6.9GB/s', or a medium, or a curve"
        )
    rate_or_none(candidate.read)
    for measured in candidate.measured:
        rate_or_none(measured.busy_mean)
    rate_or_none(candidate.link)
    bytes_or_none(candidate.capacity)
    bytes_or_none(candidate.endurance)


def model_of(plan: PlanFile, folder: Path) -> KvModel:
    """Raises ConfigError for a model that is not known, or a config.json that is not understood."""
    part = plan.model
    if bool(part.name) == bool(part.config):
        raise ConfigError("model: give either the name of a built-in model, or a config.json")
    return find_model(part.name) if part.name else read_model(folder / part.config)


def format_of(plan: PlanFile, model: KvModel) -> KvFormat:
    name = plan.model.kv_format
    if name and name not in FORMATS:
        raise ConfigError(f"model: kv_format {name[:40]!a} is none of {', '.join(FORMATS)}")
    return FORMATS[name] if name else model.native


def layout_of(plan: PlanFile) -> Layout:
    return Layout(tensor_parallel=plan.fleet.tensor_parallel, pipeline_parallel=plan.fleet.pipeline_parallel)


def rate_or_none(text: str) -> float | None:
    return parse_rate(text) if text else None


def bytes_or_none(text: str) -> int | None:
    return parse_bytes(text) if text else None
