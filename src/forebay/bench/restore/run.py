"""A restore benchmark: groups populated, let leave memory, and asked in waves that are interleaved and repeated.

    populate: each group, its own sessions
    rounds:   for each round, for each concurrency, each group in turn, another one first in each round:
              forget, drop the page cache, a wave of so many sessions at once

What is seen is written down by wave and by request; figures and verdict are folds over that.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypeAlias

import msgspec

from forebay.assemble import Named, open_target, open_workload
from forebay.bench.environment import describe_environment
from forebay.bench.evidence import ReadCounts, Verdict
from forebay.bench.progress import Progress, Silence
from forebay.bench.restore import audit
from forebay.bench.restore.contents import sample_contents
from forebay.bench.restore.host import Host, Reading
from forebay.bench.restore.metrics import cell_of, comparisons
from forebay.bench.restore.options import GroupOptions, RestoreOptions, check_options
from forebay.bench.restore.results import Group, RequestRecord, RestoreRecord, Role, WaveRecord
from forebay.bench.restore.sampler import Sampler
from forebay.bench.restore.sessions import Pair, Question, Sessions, returning, sessions_for, shared_tokens, wave_of
from forebay.bench.restore.target import Answer, Target
from forebay.bench.units import bytes_text, seconds_text
from forebay.workloads import Workload

LostCause: TypeAlias = Callable[[Sequence[Group], Sequence[RequestRecord], Sequence[WaveRecord]], str]
"""From what was seen so far, in all groups, to why nothing can come of it any more; empty as long as something can."""


def steps(options: RestoreOptions) -> int:
    """How many steps a progress will hear of."""
    return len(options.group) + wave_count(options)


def wave_count(options: RestoreOptions) -> int:
    return len(options.group) * options.rounds * len(options.concurrency)


def run_restore(
    options: RestoreOptions,
    *,
    command: Sequence[str] = (),
    progress: Progress | None = None,
    host: Host | None = None,
    lost_cause: LostCause = lambda groups, requests, waves: "",
) -> RestoreRecord:
    """Populate all groups, measure, and remove what was made. Raises ConfigError for what cannot work.

    `lost_cause` is asked after each wave; once it says anything, the run ends with what it has.
    """
    check_options(options)
    workload = open_workload(options.workload)
    pairs = returning(workload, options.populated_sessions)
    with contextlib.ExitStack() as stack:
        contestants = []
        for group in options.group:
            target = target_of(group, options.seed)
            stack.callback(target.close)
            contestants.append(_Contestant(group, target, _sessions_of(group, workload, pairs, options.seed)))
        bench = _Bench(options, contestants, progress or Silence(), host or Host(), lost_cause)
        return bench.run(workload, command)


def target_of(group: GroupOptions, seed: int) -> Target:
    """Raises ConfigError for an unknown name and for options that make no sense."""
    target: Target = open_target(Named(kind=group.target, options=group.options), group, seed)
    return target


def _sessions_of(group: GroupOptions, workload: Workload, pairs: Sequence[Pair], seed: int) -> Sessions:
    return sessions_for(
        workload, pairs, instances=group.instances, seed=seed, is_shared=group.role is Role.SHARED
    )  # fmt: skip


@dataclass(slots=True)
class _Contestant:
    group: GroupOptions
    target: Target
    sessions: Sessions
    record: Group | None = None
    """Known once it is populated."""
    devices: tuple[str, ...] = ()


class _Bench:
    def __init__(
        self,
        options: RestoreOptions,
        contestants: Sequence[_Contestant],
        progress: Progress,
        host: Host,
        lost_cause: LostCause,
    ) -> None:
        self._lost_cause = lost_cause
        self._options, self._contestants, self._progress, self._host = options, contestants, progress, host
        self._epoch_ns = time.monotonic_ns()
        self._requests: list[RequestRecord] = []
        self._waves: list[WaveRecord] = []

    def run(self, workload: Workload, command: Sequence[str]) -> RestoreRecord:
        for contestant in self._contestants:
            self._populate(contestant)
        self._measure()
        return self._record(workload, command)

    def _measure(self) -> None:
        for number in range(1, self._options.rounds + 1):
            first = (number - 1) % len(self._contestants)
            order = (*self._contestants[first:], *self._contestants[:first])
            for concurrency in self._options.concurrency:
                for contestant in order:
                    self._wave(contestant, concurrency, number)
                    if self._lost_cause(self._groups, self._requests, self._waves):
                        return

    @property
    def _groups(self) -> tuple[Group, ...]:
        return tuple(each.record for each in self._contestants if each.record is not None)

    def _populate(self, contestant: _Contestant) -> None:
        group, prompts = contestant.group, contestant.sessions.populated
        self._progress.begins(f"{group.name}: populating")
        began_ns = time.monotonic_ns()
        contestant.target.populate(prompts)
        taken_s = (time.monotonic_ns() - began_ns) / 1e9
        description = contestant.target.describe()
        contestant.devices = self._host.devices_of(description.roots)
        contestant.record = Group(
            name=group.name,
            role=group.role,
            instances=group.instances,
            target=group.target,
            media=self._host.media_of(description.roots),
            facts=description.facts,
            contents=sample_contents(description.pools or description.roots, self._options.seed),
        )
        contestant.target.rest()
        self._progress.ended(f"{group.name}: populated with {len(prompts)} prompts in {seconds_text(taken_s)}")

    def _wave(self, contestant: _Contestant, concurrency: int, number: int) -> None:
        name = contestant.group.name
        self._progress.begins(f"{name}, {concurrency} at once, round {number}")
        questions = wave_of(contestant.sessions.questions, self._options.concurrency, concurrency, number)
        contestant.target.forget()
        description = contestant.target.describe()
        self._host.drop_page_cache(description.roots)
        resident_bytes = self._host.resident_bytes(description.roots)
        before = self._host.read(description.processes, contestant.devices)
        with Sampler(lambda: self._read_bytes(contestant), self._options.sample_s, self._epoch_ns) as sampler:
            wave = contestant.target.wave(questions)
        after = self._host.read(description.processes, contestant.devices)
        contestant.target.rest()
        seen = self._wave_record(contestant, concurrency, number, before, after)
        self._waves.append(
            msgspec.structs.replace(
                seen,
                wanted_bytes=wave.wanted_bytes,
                resident_bytes=None if resident_bytes is None else min(resident_bytes, wave.wanted_bytes),
                bandwidth=sampler.samples if contestant.devices else (),
            )
        )
        self._requests += [
            msgspec.structs.replace(
                self._request(contestant.group, question, answer, concurrency, number),
                shared_tokens=shared_tokens(question, questions),
            )
            for question, answer in zip(questions, wave.answers, strict=True)
        ]
        self._progress.ended(self._said(name, concurrency, number))

    def _read_bytes(self, contestant: _Contestant) -> int | None:
        moved = self._host.moved_on(contestant.devices)
        return None if moved is None else moved.read_bytes

    def _wave_record(
        self, contestant: _Contestant, concurrency: int, number: int, before: Reading, after: Reading
    ) -> WaveRecord:
        own = after.processes.since(before.processes) if after.processes and before.processes else None
        all_ = after.devices.since(before.devices) if after.devices and before.devices else None
        lasted_ns = after.monotonic_ns - before.monotonic_ns
        return WaveRecord(
            group=contestant.group.name,
            concurrency=concurrency,
            round=number,
            began_s=self._since(before.monotonic_ns),
            ended_s=self._since(after.monotonic_ns),
            wanted_bytes=0,
            read=ReadCounts(
                process_bytes=own.read_bytes if own else None, device_bytes=all_.read_bytes if all_ else None
            ),
            resident_bytes=None,
            foreign_bytes=max(0, all_.whole_bytes - own.whole_bytes) if own and all_ else None,
            bandwidth=(),
            core_s=None if after.core_s is None or before.core_s is None else max(0.0, after.core_s - before.core_s),
            clock_step_s=(after.wall_ns - before.wall_ns - lasted_ns) / 1e9,
        )

    def _request(
        self, group: GroupOptions, question: Question, answer: Answer, concurrency: int, number: int
    ) -> RequestRecord:
        first_ns = answer.first_token_ns
        return RequestRecord(
            group=group.name,
            instance=question.instance,
            concurrency=concurrency,
            round=number,
            session=question.session,
            written_by=question.written_by,
            sent_s=self._since(answer.sent_ns),
            ttft_s=None if first_ns is None else (first_ns - answer.sent_ns) / 1e9,
            ended_s=self._since(answer.ended_ns),
            prompt_tokens=answer.prompt_tokens,
            output_tokens=answer.output_tokens,
            stored_tokens=answer.stored_tokens,
            hit_tokens=answer.hit_tokens,
            hit_source=answer.hit_source,
            output_digest=answer.output_digest,
            error=answer.error,
        )

    def _since(self, at_ns: int) -> float:
        return (at_ns - self._epoch_ns) / 1e9

    def _said(self, name: str, concurrency: int, number: int) -> str:
        wave = self._waves[-1]
        requests = self._requests[-concurrency:]
        failed = sum(bool(each.error) for each in requests)
        ttft_s = sorted(each.ttft_s for each in requests if each.ttft_s is not None)
        middle = seconds_text(ttft_s[len(ttft_s) // 2]) if ttft_s else "none"
        said = f"{name}, {concurrency} at once, round {number}: TTFT {middle}, all after {seconds_text(wave.whole_s)}"
        if wave.read.process_bytes:
            said += f", {bytes_text(wave.read.process_bytes)} read"
        return f"{said}, {failed} failed" if failed else said

    def _record(self, workload: Workload, command: Sequence[str]) -> RestoreRecord:
        options = self._options
        groups = self._groups
        found = comparisons(groups, self._requests, options.seed)
        environment = describe_environment()
        differ = [
            f"{each.group} and {each.against} at {each.concurrency}" for each in found if not each.tokens_equal
        ]  # fmt: skip
        plain: dict[str, object] = msgspec.to_builtins(options, enc_hook=str)
        return RestoreRecord(
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            title=options.title,
            verdict=Verdict.of(
                audit.broken_claims(groups, self._requests, self._waves, options.concurrency, options.limits)
            ),
            notes=tuple(
                audit.notes(groups, self._requests, differ, options.limits, virtual_machine=environment.virtual_machine)
            ),
            workload=workload.name,
            groups=groups,
            cells=tuple(
                cell_of(
                    group,
                    concurrency,
                    [e for e in self._requests if e.group == group.name and e.concurrency == concurrency],
                    [e for e in self._waves if e.group == group.name and e.concurrency == concurrency],
                    options.seed,
                )
                for concurrency in options.concurrency
                for group in groups
            ),
            comparisons=found,
            waves=tuple(self._waves),
            requests=tuple(self._requests),
            environment=environment,
            options=plain,
            command=tuple(command),
        )
