"""The demo: several long sessions leave device memory and DRAM, and are brought back in three ways.

```
populate:  each document through the model, its blocks into the pool; then the store is closed, as in a restart
measure:   for each session, the same prompt: recompute, restore from cold disk, restore from DRAM
```
The ways take turns within each session, so that a machine that drifts does so under all of them.
"""

from __future__ import annotations

import contextlib
import gc
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from forebay.bench.demo import audit, setting
from forebay.bench.demo.options import DemoOptions, check_options
from forebay.bench.demo.results import (
    Damage,
    Durations,
    Measurement,
    Model,
    Pool,
    Record,
    Resources,
    Session,
    Way,
    headline,
    summarise,
)
from forebay.bench.demo.setting import TIER, RunnerOpener, Setting
from forebay.bench.environment import describe_environment, huge_page_bytes
from forebay.bench.evidence import NO_READS, Evidence, Kernel, ReadCounts, Verdict
from forebay.bench.progress import Progress, Silence
from forebay.bench.units import seconds_text
from forebay.errors import ConfigError
from forebay.events import Totals
from forebay.tiers.file import layout
from forebay.types import JobKind, Outcome

if TYPE_CHECKING:
    from forebay.connectors.transformers import Generation, LoadedModel, Runner


def steps(options: DemoOptions) -> int:
    """How many steps a progress will hear of."""
    return 1 + options.sessions * (1 + len(Way))


def run_demo(
    options: DemoOptions,
    *,
    command: Sequence[str] = (),
    progress: Progress | None = None,
    opener: RunnerOpener = setting.open_runner,
    kernel: Kernel | None = None,
) -> Record:
    """Run it all, and say what came of it. Writes nothing but the pool.

    Raises ConfigError for what cannot work, as early as it can be known.
    """
    check_options(options)
    with contextlib.ExitStack() as stack:
        root = stack.enter_context(_temporary_pool()) if options.pool is None else options.pool.absolute()
        return _Demo(options, progress or Silence(), opener, kernel or Kernel()).run(root, command)


@contextlib.contextmanager
def _temporary_pool() -> Iterator[Path]:
    """A place for a new pool in the current directory, and so on its disk. Gone afterwards, however this ends."""
    try:
        parent = Path(tempfile.mkdtemp(prefix=".forebay-demo-", dir=Path.cwd()))
    except OSError as error:
        raise ConfigError(f"no pool can be made in {Path.cwd()} ({error.strerror}): name one with --pool") from None
    try:
        yield parent / "pool"
    finally:
        shutil.rmtree(parent, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class _Populated:
    """One document's way into the pool."""

    found_tokens: int
    """Read from the pool."""
    restored_tokens: int
    """With those that an earlier document of this run begins with, too."""
    taken_s: float


@dataclass(frozen=True, slots=True)
class _Observed:
    """What the phases saw."""

    populated: tuple[_Populated, ...]
    measurements: tuple[Measurement, ...]
    evidence: Evidence
    damage: Damage
    pool: Pool
    resources: Resources
    durations: Durations


class _Demo:
    """One run: what its phases share. Owns no resource beyond the call of `run`."""

    def __init__(self, options: DemoOptions, progress: Progress, opener: RunnerOpener, kernel: Kernel) -> None:
        self._options, self._progress = options, progress
        self._opener, self._kernel = opener, kernel
        self._totals = Totals()
        self._unstored_blocks = 0
        self._cold_reads = NO_READS
        self._huge_page_bytes = 0

    def run(self, root: Path, command: Sequence[str]) -> Record:
        started_s = time.monotonic()
        self._progress.begins("Loading the model")
        loaded = setting.load(self._options)
        loaded_s = time.monotonic()
        self._progress.ended(f"{loaded.name} loaded in {seconds_text(loaded_s - started_s)}")
        set_aside = set(layout.set_aside_files(str(root)))  # first: whoever looks for a block sets aside what is none
        stage = setting.prepare(self._options, loaded, root)
        try:
            found_blocks = stage.found_blocks()
            populated = self._populate(stage)
            populated_s = time.monotonic()
            measurements = self._measure(stage)
            ended_s = time.monotonic()
            observed = _Observed(
                populated=populated,
                measurements=measurements,
                evidence=self._evidence(stage, measurements),
                damage=self._damage(sorted(set(layout.set_aside_files(str(root))) - set_aside), root),
                pool=self._pool(stage, found_blocks),
                resources=self._resources(stage),
                durations=Durations(
                    load_model_s=loaded_s - started_s,
                    populate_s=populated_s - loaded_s,
                    measure_s=ended_s - populated_s,
                    whole_s=ended_s - started_s,
                ),
            )
        finally:
            stage.tier.close()
        return self._record(stage, observed, command)

    # ---- the phases

    def _populate(self, stage: Setting) -> tuple[_Populated, ...]:
        """Every document's blocks into the pool, or out of it where an earlier run left them."""
        done = []
        with self._open(stage) as runner:
            for number, prompt in enumerate(stage.prompts, 1):
                self._progress.begins(f"Session {number}: reading {prompt.document_tokens:,} tokens into the pool")
                taken = runner.generate(prompt.document_ids, 1, f"populate-{number}")
                found_tokens = taken.hit_tokens.get(TIER, 0)
                done.append(_Populated(found_tokens, sum(taken.hit_tokens.values()), taken.total_s))
                origin = f", {found_tokens:,} of them found in the pool" if found_tokens else ""
                self._progress.ended(
                    f"session {number}, {prompt.document.title}: {prompt.document_tokens:,} tokens{origin}, "
                    f"in {seconds_text(taken.total_s)}"
                )
        return tuple(done)

    def _measure(self, stage: Setting) -> tuple[Measurement, ...]:
        """With a new store, as after a restart: nothing in device memory or DRAM to begin with."""
        measurements = []
        with self._open(stage) as runner:
            self._huge_page_bytes = huge_page_bytes()
            for number in range(1, len(stage.prompts) + 1):
                for way in Way:
                    self._progress.begins(f"Session {number}: {way.phrase}")
                    found = self._measure_one(stage, runner, number, way)
                    measurements.append(found)
                    self._progress.ended(
                        f"session {number}, {way.phrase}: first token after {seconds_text(found.ttft_s)}, "
                        f"{found.restored_tokens:,} of {found.prompt_tokens:,} tokens restored"
                    )
        return tuple(measurements)

    def _measure_one(self, stage: Setting, runner: Runner, number: int, way: Way) -> Measurement:
        match way:
            case Way.RECOMPUTE:
                taken = self._answer(stage, runner, number, way)
            case Way.DISK:
                runner.drop_device()
                runner.drop_host_copies()
                stage.tier.drop_page_cache()
                before = self._read_counts(stage)
                taken = self._answer(stage, runner, number, way)
                self._cold_reads = self._cold_reads.plus(self._read_counts(stage).since(before))
            case Way.DRAM:
                runner.drop_device()  # the disk way has just left a copy of every block in DRAM
                taken = self._answer(stage, runner, number, way)
        return Measurement(
            session=number,
            way=way,
            prompt_tokens=taken.prompt_tokens,
            hit_tokens=dict(taken.hit_tokens),
            computed_tokens=taken.computed_tokens,
            tokens=taken.tokens,
            ttft_s=taken.ttft_s,
            total_s=taken.total_s,
            restore_s=taken.restore_s,
            prefill_s=taken.prefill_s,
            restored_bytes=taken.restored_bytes,
        )

    def _answer(self, stage: Setting, runner: Runner, number: int, way: Way) -> Generation:
        from forebay.connectors.transformers import Reuse  # late, as in `setting`: it brings torch

        return runner.generate(
            stage.prompts[number - 1].ids,
            self._options.answer_tokens,
            f"{way.value}-{number}",
            reuse=Reuse.OFF if way is Way.RECOMPUTE else Reuse.ON,
            stop_tokens=stage.chat.stop_tokens,
        )

    @contextlib.contextmanager
    def _open(self, stage: Setting) -> Iterator[Runner]:
        with self._opener(stage, self._totals.add) as runner:
            yield runner
            runner.flush()
            self._unstored_blocks += runner.counts.lost_blocks
        gc.collect()  # its memory is to be free before the next one asks for as much

    # ---- what was observed

    def _read_counts(self, stage: Setting) -> ReadCounts:
        return self._kernel.read_counts(self._kernel.medium_of(stage.root))

    def _evidence(self, stage: Setting, measurements: Sequence[Measurement]) -> Evidence:
        return Evidence(
            medium=self._kernel.medium_of(stage.root),
            wanted_bytes=sum(found.restored_bytes for found in measurements if found.way is Way.DISK),
            read=self._cold_reads,
        )

    def _damage(self, set_aside: Sequence[str], root: Path) -> Damage:
        failures = self._totals.failures
        return Damage(
            corrupt_blocks=failures[TIER, JobKind.READ, Outcome.CORRUPT],
            missing_blocks=failures[TIER, JobKind.READ, Outcome.MISSING],
            failed_reads=failures[TIER, JobKind.READ, Outcome.FAILED],
            unstored_blocks=self._unstored_blocks,
            set_aside=tuple(str(Path(path).relative_to(root)) for path in set_aside),
        )

    def _pool(self, stage: Setting, found_blocks: int) -> Pool:
        io = stage.tier.describe()[0].io
        return Pool(
            path=str(stage.root),
            kept=self._options.pool is not None,
            found_blocks=found_blocks,
            document_blocks=stage.document_blocks,
            block_bytes=stage.namespace.block_bytes,
            access=io.access.value,
            access_reason=io.reason,
        )

    def _resources(self, stage: Setting) -> Resources:
        return Resources(
            host_pool_bytes=stage.store.host_bytes,
            device_cache_bytes=stage.runner_options.device_bytes,
            huge_page_bytes=self._huge_page_bytes,
            compute_threads=setting.compute_threads(),
        )

    def _record(self, stage: Setting, seen: _Observed, command: Sequence[str]) -> Record:
        environment = describe_environment()
        differing = audit.differences(seen.measurements)
        claims = audit.broken_claims(
            seen.measurements, tier=TIER, restorable_tokens=stage.restorable_tokens, damage=seen.damage
        )
        verdict = Verdict.of((*seen.evidence.reasons, *claims))
        summaries = summarise(seen.measurements)
        notes = audit.notes(
            seen.measurements,
            recomputed_tokens=_recomputed_tokens(stage, seen.populated),
            restorable_tokens=stage.restorable_tokens,
            damage=seen.damage,
            pool=seen.pool,
            virtual_machine=environment.virtual_machine,
        )
        return Record(
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            headline=headline(summaries, stage.restorable_tokens, verdict=verdict, tokens_equal=not differing),
            verdict=verdict,
            tokens_equal=not differing,
            notes=(*differing.values(), *notes),
            summaries=summaries,
            sessions=_sessions(stage, seen, differing),
            measurements=seen.measurements,
            evidence=seen.evidence,
            damage=seen.damage,
            model=_model(stage.loaded),
            pool=seen.pool,
            resources=seen.resources,
            durations=seen.durations,
            environment=environment,
            command=tuple(command),
            options=_options(self._options),
        )


def _sessions(stage: Setting, seen: _Observed, differing: dict[int, str]) -> tuple[Session, ...]:
    answers = {found.session: found.tokens for found in seen.measurements if found.way is Way.RECOMPUTE}
    return tuple(
        Session(
            number=number,
            title=prompt.document.title,
            question=prompt.document.question,
            answer=stage.chat.decode(answers[number]),
            document_tokens=prompt.document_tokens,
            prompt_tokens=len(prompt.ids),
            found_tokens=populated.found_tokens,
            populate_s=populated.taken_s,
            tokens_equal=number not in differing,
        )
        for number, (prompt, populated) in enumerate(zip(stage.prompts, seen.populated, strict=True), 1)
    )


def _recomputed_tokens(stage: Setting, populated: Sequence[_Populated]) -> int:
    """Document tokens whose blocks were not restored. Of a block that ends its prompt, one token is always computed."""
    block_tokens = stage.namespace.block_tokens
    restored_blocks = sum(-(-each.restored_tokens // block_tokens) for each in populated)
    return (stage.document_blocks - restored_blocks) * block_tokens


def _model(loaded: LoadedModel) -> Model:
    return Model(
        name=loaded.name,
        architecture=loaded.facts.architecture,
        parameters=loaded.facts.parameters,
        kv_dtype=loaded.facts.dtype,
        token_bytes=loaded.facts.token_bytes,
        weights_digest=loaded.weights_digest,
    )


def _options(options: DemoOptions) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(options, enc_hook=str)
    return plain
