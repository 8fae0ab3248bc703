"""Replays: each variant by itself, in one process or in several."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence

import forebay
from forebay.assemble import Named, open_policy, open_workload
from forebay.bench.policy.replay import prompts_of
from forebay.bench.progress import Progress
from forebay.bench.replay.options import ReplayOptions, Variant, check_options, open_medium
from forebay.bench.replay.record import Recorder
from forebay.bench.replay.results import Outcome, ReplayRecord
from forebay.choice import ChoiceOptions
from forebay.engine import Engine, EngineOptions
from forebay.errors import ConfigError
from forebay.flow import FlowOptions
from forebay.hostpool import HostPool
from forebay.sim.executor import SimExecutor
from forebay.sim.ghosts import BLOCK_BYTES, GhostMemory, GhostTier
from forebay.sim.host import FAR_NS, Session, SimHost, Storing
from forebay.sim.profiles import EngineProfile
from forebay.sim.shared import SharedClock
from forebay.stage import Policies
from forebay.types import HOST, BlockKey
from forebay.workloads import Workload

DISK = "disk"
_PATIENT_S = 1e6


def steps(options: ReplayOptions) -> int:
    return len(options.variants())


def run_replays(options: ReplayOptions, *, command: tuple[str, ...], progress: Progress) -> ReplayRecord:
    """Raises ConfigError for bad options, an unknown name, or a broken trace."""
    check_options(options)
    workload = open_workload(options.workload_named())
    variants = options.variants()
    found = dict(_outcomes(options, variants, progress))
    return ReplayRecord(
        version=forebay.__version__,
        command=command,
        workload=workload.name,
        requests=len(workload.arrivals),
        block_tokens=workload.block_tokens,
        distinct_blocks=len({block for each in workload.arrivals for block in workload.full_blocks(each)}),
        profile=options.profile,
        accelerators=options.accelerators,
        pace=options.pace,
        seed=options.seed,
        outcomes=tuple(found[variant] for variant in variants),
    )


def _outcomes(
    options: ReplayOptions, variants: Sequence[Variant], progress: Progress
) -> Iterator[tuple[Variant, Outcome]]:
    tasks = [(options, variant) for variant in variants]
    if options.processes == 1 or len(tasks) == 1:
        for task in tasks:
            progress.begins(task[1].name)
            outcome = replay(*task)
            progress.ended(_line(outcome))
            yield task[1], outcome
        return
    progress.begins(f"{options.processes} processes")
    with multiprocessing.get_context("spawn").Pool(min(options.processes, len(tasks))) as pool:
        for outcome in pool.imap_unordered(_replay_task, tasks):  # leaving ends them, also by an exception
            progress.ended(_line(outcome))
            yield outcome.variant, outcome


def _replay_task(task: tuple[ReplayOptions, Variant]) -> Outcome:
    return replay(*task)


def _line(outcome: Outcome) -> str:
    return f"{outcome.variant.name}: hits {outcome.hit_share:.1%}, TTFT p50 {outcome.ttft_p50_s:.2f} s"


def replay(options: ReplayOptions, variant: Variant) -> Outcome:
    """One variant, from the first request to the last first token. Deterministic."""
    workload, profile = open_workload(options.workload_named()), options.engine_profile()
    if not any(workload.full_blocks(arrival) for arrival in workload.arrivals):
        raise ConfigError(f"{workload.name}: no prompt has a full block of {workload.block_tokens} tokens to store")
    return _Replay(options, variant, workload, profile).run()


class _Replay:
    def __init__(self, options: ReplayOptions, variant: Variant, workload: Workload, profile: EngineProfile) -> None:
        self._options, self._variant, self._workload = options, variant, workload
        self._chains = prompts_of(workload).chains
        self._block_bytes = workload.block_tokens * profile.kv_bytes_per_token
        self._recorder = Recorder(options.bin_s, self._block_bytes, DISK)
        medium = open_medium(variant.medium, self._block_bytes)
        model = medium.model(self._block_bytes, BLOCK_BYTES)
        self._clock = SharedClock(SimExecutor(lambda job: 0, {DISK: model}))
        self._engine = self._open_engine(model.read_bytes_per_s, medium.latency_ns)
        self._host = SimHost(
            self._engine, profile, workload.block_tokens, speed=options.accelerators, storing=Storing.OFFERED
        )

    def _open_engine(self, read_bytes_per_s: float, latency_ns: int) -> Engine:
        options, variant, seat = self._options, self._variant, self._clock.seat()
        tier = GhostTier(DISK, variant.disk_bytes // self._block_bytes, latency_ns)
        return Engine(
            HostPool(variant.dram_bytes // self._block_bytes, BLOCK_BYTES),
            {DISK: tier},
            Policies(
                {place: open_policy(Named(kind=variant.eviction)) for place in (HOST, DISK)},
                open_policy(Named(kind=variant.admission)),
            ),
            GhostMemory(seat.now_ns),
            seat,
            self._recorder.add,
            EngineOptions(
                read_deadline_s=_PATIENT_S,
                load_deadline_s=_PATIENT_S,
                flow=FlowOptions(order=options.order),
                load_or_compute=ChoiceOptions(mode=options.load_or_compute, read_bytes_per_s={DISK: read_bytes_per_s}),
            ),
            block_tokens=self._workload.block_tokens,
        )

    def run(self) -> Outcome:
        arrivals = [
            self._session(number, arrival.at_ns, arrival.prompt_tokens, chain)
            for number, (arrival, chain) in enumerate(zip(self._workload.arrivals, self._chains, strict=True))
        ]
        at = 0
        while True:
            now_ns = self._clock.now_ns()
            began = at
            while at < len(arrivals) and arrivals[at].arrived_ns <= now_ns:
                at += 1
            self._host.arrive(arrivals[began:at])
            self._host.advance(now_ns)
            for session in self._host.ended:
                self._recorder.ended(session, self._workload.block_tokens)
            self._host.ended.clear()
            if at == len(arrivals) and self._host.idle and self._engine.idle:
                break
            self._engine.wait(FAR_NS)
            self._clock.advance(min(self._host.wakes_ns, arrivals[at].arrived_ns if at < len(arrivals) else FAR_NS))
        self._engine.check_idle()
        return self._recorder.outcome(self._variant, self._clock.now_ns(), self._host.unstored_blocks)

    def _session(self, number: int, at_ns: int, prompt_tokens: int, chain: tuple[BlockKey, ...]) -> Session:
        """Without decode: a session is over with its first token."""
        return Session(f"{number}", chain, max(1, prompt_tokens), 1, round(at_ns / self._options.pace))
