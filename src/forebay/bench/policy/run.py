"""All workloads through all policies at all sizes, in one process or in several."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

import forebay
from forebay.assemble import Named, open_policy, open_workload
from forebay.bench.policy.bound import most_hits
from forebay.bench.policy.options import PolicyOptions, check_options
from forebay.bench.policy.record import BOUND, PolicyRecord, Row, Subject
from forebay.bench.policy.replay import Prompts, Score, prompts_of, replay
from forebay.bench.progress import Progress
from forebay.workloads import Workload

_WRITE_ALL = "admit_all"


@dataclass(frozen=True, slots=True)
class Task:
    """One policy over one workload at every size; complete in itself, so that another process can do it."""

    workload: Named
    policy: str
    admission: str
    shares: tuple[float, ...]
    cache_blocks: tuple[int, ...]


def steps(options: PolicyOptions) -> int:
    """How many steps of progress a run has."""
    return len(_tasks(options))


def run_bench(options: PolicyOptions, *, command: tuple[str, ...], progress: Progress) -> PolicyRecord:
    """Raises ConfigError for bad options, an unknown policy, or a broken trace."""
    check_options(options)
    for name in (*options.policies, options.admission):
        open_policy(Named(kind=name))  # an unknown name, before minutes of work
    subjects = tuple(_subject(options, open_workload(named)) for named in _workloads(options))
    rows: list[Row] = []
    for done in _results(_tasks(options), options.processes, progress):
        rows += done
    names = [subject.workload for subject in subjects]
    order = [*options.policies, BOUND]
    rows.sort(key=lambda row: (names.index(row.workload), row.cache_blocks, row.admission, order.index(row.policy)))
    return PolicyRecord(
        version=forebay.__version__, command=command, seed=options.seed, subjects=subjects, rows=tuple(rows)
    )


def _workloads(options: PolicyOptions) -> list[Named]:
    named = [Named(kind=name, options={"seed": options.seed}) for name in options.workloads]
    if options.trace is None:
        return named
    trace = {"path": str(options.trace), "block_tokens": options.trace_block_tokens}
    return [Named(kind="trace", options=trace), *named]


def _tasks(options: PolicyOptions) -> list[Task]:
    kinds = [(policy, _WRITE_ALL) for policy in (*options.policies, BOUND)]
    kinds.append((options.policies[-1], options.admission))
    return [
        Task(workload, policy, admission, options.shares, options.cache_blocks)
        for workload in _workloads(options)
        for policy, admission in kinds
    ]


def _results(tasks: Sequence[Task], processes: int, progress: Progress) -> Iterator[list[Row]]:
    if processes == 1:
        for task in tasks:
            progress.begins(f"{task.workload.kind}: {task.policy}")
            rows = run_task(task)
            progress.ended(_line(rows))
            yield rows
        return
    progress.begins(f"{processes} processes")
    with multiprocessing.get_context("spawn").Pool(processes) as pool:  # whose exit ends them, also by an exception
        for rows in pool.imap_unordered(run_task, tasks):
            progress.ended(_line(rows))
            yield rows


def _line(rows: Sequence[Row]) -> str:
    rates = ", ".join(f"{row.block_hit_rate:.1%} of {row.cache_blocks:,}" for row in rows)
    kept = "" if rows[0].admission == _WRITE_ALL else f" + {rows[0].admission}"
    return f"{rows[0].workload}: {rows[0].policy}{kept}: hits {rates}"


def run_task(task: Task) -> list[Row]:
    prompts = prompts_of(open_workload(task.workload))
    return [_row(task, prompts, blocks) for blocks in _sizes(task.shares, task.cache_blocks, prompts.distinct_blocks)]


def _row(task: Task, prompts: Prompts, cache_blocks: int) -> Row:
    if task.policy == BOUND:
        score = Score(most_hits(prompts, cache_blocks), 0)
    else:
        eviction: Any = open_policy(Named(kind=task.policy))
        score = replay(prompts, cache_blocks, eviction, open_policy(Named(kind=task.admission)))
    return Row(
        workload=prompts.name,
        policy=task.policy,
        admission=task.admission,
        cache_blocks=cache_blocks,
        hit_blocks=score.hit_blocks,
        wanted_blocks=prompts.wanted_blocks,
        hit_tokens=score.hit_blocks * prompts.block_tokens,
        prompt_tokens=prompts.prompt_tokens,
        written_blocks=score.written_blocks,
    )


def _sizes(shares: Sequence[float], cache_blocks: Sequence[int], distinct_blocks: int) -> tuple[int, ...]:
    return tuple(sorted(set(cache_blocks or (max(1, round(share * distinct_blocks)) for share in shares))))


def _subject(options: PolicyOptions, workload: Workload) -> Subject:
    prompts = prompts_of(workload)
    return Subject(
        workload=workload.name,
        requests=len(workload.arrivals),
        block_tokens=workload.block_tokens,
        wanted_blocks=prompts.wanted_blocks,
        distinct_blocks=prompts.distinct_blocks,
        cache_blocks=_sizes(options.shares, options.cache_blocks, prompts.distinct_blocks),
    )


def encode_json(record: PolicyRecord) -> str:
    return msgspec.json.format(msgspec.json.encode(record), indent=2).decode() + "\n"
