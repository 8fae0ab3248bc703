"""A plan's file with its sizes worked out: what every other part of the planner starts from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from forebay.assemble import open_workload
from forebay.bench.policy.replay import Prompts, prompts_of
from forebay.bench.units import parse_rate
from forebay.errors import ConfigError
from forebay.planning.options import (
    CandidatePart,
    PlanFile,
    bytes_or_none,
    format_of,
    layout_of,
    model_of,
    rate_or_none,
)  # fmt: skip
from forebay.planning.results import Volume
from forebay.planning.storms import Medium, Restores
from forebay.sim.media import curve_medium, medium_named
from forebay.sim.profiles import EngineProfile, profile_named
from forebay.sim.sizing import KvFormat, KvModel, stored_shares

_NS = 1e9


@dataclass(frozen=True, slots=True)
class Traffic:
    """The workload's figures, given or taken from the trace."""

    context_tokens: int
    requests_per_s: float | None
    reuse: float
    """Most that can be restored, of the tokens asked for."""
    prompts: Prompts | None


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """What one instance takes at the plan's context: given, or a profile's."""

    profile: EngineProfile
    prefill_tokens_per_s: float
    """Over the plan's context."""
    first_step_s: float
    """One decode step with one session."""
    further_step_s: float
    """More with each further one."""
    setup_s: float

    def step_s(self, sessions: int) -> float:
        """One decode step of an instance with so many sessions."""
        return self.first_step_s + self.further_step_s * (sessions - 1)


@dataclass(frozen=True, slots=True)
class Setting:
    file: PlanFile
    engine: EngineFigures
    model: KvModel
    form: KvFormat
    volume: Volume
    traffic: Traffic
    media: dict[str, Medium]

    @property
    def storm_sessions(self) -> int:
        return max(self.file.workload.concurrency)

    def reached_bytes_per_s(self, candidate: str) -> float:
        """What a medium delivers of this plan's blocks: its ceiling, or less if too few can be in flight."""
        return self.media[candidate].reached_bytes_per_s(self.volume.block_bytes)

    def restores(self, candidate: str) -> Restores:
        """What a storm on this candidate has to do."""
        kept_bytes = bytes_or_none(self.file.fleet.kept_dram)
        return Restores(
            medium=self.media[candidate],
            profile=self.engine.profile,
            session_bytes=self.volume.restored_bytes,
            block_bytes=self.volume.block_bytes,
            context_tokens=self.traffic.context_tokens,
            new_tokens=self.file.workload.followup_tokens,
            instances=self.file.fleet.instances,
            setup_s=self.engine.setup_s,
            kept_bytes=kept_bytes or 0,
        )

    def restored_bytes(self, context_tokens: int) -> int:
        return round(self.model.restored_bytes(context_tokens, self.form) * self.volume.copies)

    def unshortened_s(self, concurrency: int) -> float:
        """Of a storm: all that no bandwidth shortens, up to the last token."""
        engine, workload = self.engine, self.file.workload
        instance_sessions = -(-concurrency // self.file.fleet.instances)
        followup_s = instance_sessions * workload.followup_tokens / engine.prefill_tokens_per_s
        return engine.setup_s + followup_s + workload.output_tokens * engine.step_s(instance_sessions)


def read_setting(file: PlanFile, folder: Path) -> Setting:
    """Raises ConfigError for a model, format, layout, trace or medium that cannot be."""
    model = model_of(file, folder)
    form, traffic = format_of(file, model), _traffic(file, folder)
    shares = stored_shares(model, traffic.context_tokens, layout_of(file), form)
    volume = Volume(
        model=model.name,
        model_source=model.source,
        kv_format=form.name,
        token_bytes=model.token_bytes(form),
        session_bytes=shares.total_bytes,
        session_rank_bytes=shares.largest_rank_bytes,
        restored_bytes=round(model.restored_bytes(traffic.context_tokens, form) * shares.copies),
        copies=shares.copies,
        total_bytes=file.workload.sessions * shares.total_bytes,
        block_bytes=stored_shares(model, file.block_tokens, layout_of(file), form).total_bytes,
    )
    if volume.restored_bytes == 0:
        raise ConfigError(f"{model.name} has no KV that could be restored")
    return Setting(
        file, _engine(file, folder, traffic.context_tokens), model, form, volume, traffic,
        _media(file, folder, volume.block_bytes),
    )  # fmt: skip


def _engine(file: PlanFile, folder: Path, context_tokens: int) -> EngineFigures:
    part, setup_s = file.engine, file.engine.restore_setup_ms / 1e3
    if part.profile:
        profile = profile_named(part.profile, folder)
        one_s = profile.decode_s(1, context_tokens)
        prefill_s = profile.prefill_s(context_tokens, 0)
        return EngineFigures(
            profile, context_tokens / prefill_s, one_s, profile.decode_s(2, context_tokens) - one_s, setup_s
        )  # fmt: skip
    if part.prefill_tokens_per_s is None or part.decode_step_ms is None:
        raise ConfigError("engine: give prefill_tokens_per_s and decode_step_ms, or a profile")
    further_s = part.decode_step_ms_per_session / 1e3
    profile = EngineProfile(
        name="given", ranks=1, kv_bytes_per_token=1, token_s=1 / part.prefill_tokens_per_s,
        half_speed_tokens=math.inf, step_s=part.decode_step_ms / 1e3, kv_bytes_per_s=math.inf, source=part.source,
    )  # fmt: skip
    return EngineFigures(profile, part.prefill_tokens_per_s, part.decode_step_ms / 1e3, further_s, setup_s)


def _media(file: PlanFile, folder: Path, block_bytes: int) -> dict[str, Medium]:
    by_name = {each.name: each for each in file.candidates}
    alone = {each.name: _medium(each, folder, block_bytes) for each in file.candidates if not each.together}
    return {name: _spread(each, alone) if each.together else alone[name] for name, each in by_name.items()}


def _medium(candidate: CandidatePart, folder: Path, block_bytes: int) -> Medium:
    link = rate_or_none(candidate.link)
    if candidate.medium or candidate.curve:
        curve = folder / candidate.curve
        found = medium_named(candidate.medium) if candidate.medium else curve_medium(curve, block_bytes)
        alone_s = block_bytes / min(found.stream_bytes_per_s, found.read_bytes_per_s)
        alone_s -= block_bytes / found.read_bytes_per_s
        return Medium(
            name=candidate.name,
            bytes_per_s=min(found.read_bytes_per_s, link) if link is not None else found.read_bytes_per_s,
            latency_s=found.latency_ns / 1e9 + alone_s,
            in_flight_blocks=found.queue_depth,
            source=found.source,
        )
    read = parse_rate(candidate.read)
    return Medium(
        name=candidate.name,
        bytes_per_s=min(read, link) if link is not None else read,
        latency_s=candidate.latency_us / 1e6,
        in_flight_blocks=candidate.in_flight_blocks,
    )


def _spread(candidate: CandidatePart, alone: dict[str, Medium]) -> Medium:
    """Blocks placed in proportion to bandwidth keep all media busy until the end; the slowest answer counts."""
    parts = [alone[name] for name in candidate.together]
    return Medium(
        name=candidate.name,
        bytes_per_s=sum(part.bytes_per_s for part in parts),
        latency_s=max(part.latency_s for part in parts),
        in_flight_blocks=sum(part.in_flight_blocks for part in parts),
        parts=tuple(parts),
    )


def capacity_bytes(file: PlanFile, candidate: CandidatePart) -> int | None:
    """Of all its drives, or of all that are used together; None where it isn't known."""
    if not candidate.together:
        return bytes_or_none(candidate.capacity)
    parts = [bytes_or_none(each.capacity) for each in file.candidates if each.name in candidate.together]
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None


def _traffic(file: PlanFile, folder: Path) -> Traffic:
    workload = file.workload
    if workload.trace is None:
        assert workload.context_tokens is not None, "checked when it was read"
        return Traffic(workload.context_tokens, workload.requests_per_s, workload.reuse, None)
    options = dict(workload.trace.options)
    if isinstance(options.get("path"), str):
        options["path"] = str(folder / options["path"])
    found = open_workload(type(workload.trace)(kind=workload.trace.kind, options=options))
    prompts = prompts_of(found)
    if prompts.wanted_blocks == 0:
        raise ConfigError(f"no prompt of {found.name} is as long as a block of {found.block_tokens} tokens")
    span_s = (found.arrivals[-1].at_ns - found.arrivals[0].at_ns) / _NS
    rate = len(found.arrivals) / span_s if span_s > 0 else None
    mean_tokens = max(1, round(prompts.prompt_tokens / len(found.arrivals)))
    reuse = 1 - prompts.distinct_blocks / prompts.wanted_blocks
    return Traffic(workload.context_tokens or mean_tokens, workload.requests_per_s or rate, reuse, prompts)
