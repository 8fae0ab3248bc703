"""Agents: a long shared tool prompt, many short steps that each add what a tool said, and branches.

A step comes soon after the one before it; when a task is done, nobody asks for its blocks again.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import msgspec

from forebay.errors import ConfigError
from forebay.workloads.arrival import (
    Arrival,
    Prompt,
    Prompts,
    Workload,
    about,
    check_from_one,
    check_positive,
    in_order,
    starts,
    turns,
)  # fmt: skip


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    seed: int = 0
    tasks: int = 250
    duration_s: float = 3600.0
    mean_steps: float = 16.0
    kinds: int = 4
    """Kinds of agents, each with a tool prompt of its own."""
    tool_prompt_tokens: int = 6000
    task_tokens: int = 800
    result_tokens: int = 700
    """What a tool adds in a step, on average."""
    output_tokens: int = 120
    step_s: float = 12.0
    """Between two steps, on average."""
    branch_share: float = 0.1
    """Of the steps: a helper begins with all that was said so far, and goes its own way."""
    block_tokens: int = 256


def build(options: Options) -> Workload:
    check_from_one(
        tasks=options.tasks, mean_steps=options.mean_steps, kinds=options.kinds,
        tool_prompt_tokens=options.tool_prompt_tokens, task_tokens=options.task_tokens,
        result_tokens=options.result_tokens, output_tokens=options.output_tokens, block_tokens=options.block_tokens,
    )  # fmt: skip
    check_positive(duration_s=options.duration_s, step_s=options.step_s)
    if not 0 <= options.branch_share <= 1:
        raise ConfigError(f"branch_share must be from 0 to 1, not {options.branch_share}")
    return in_order("agents", options.block_tokens, _arrivals(options))


def _arrivals(options: Options) -> Iterator[Arrival]:
    rng, prompts = random.Random(options.seed), Prompts(options.block_tokens)
    sessions = itertools.count()
    for task, at_s in enumerate(starts(rng, options.tasks, options.duration_s)):
        prompt, kind, session = Prompt(prompts), rng.randrange(options.kinds), next(sessions)
        prompt.add(f"tools {kind}", options.tool_prompt_tokens)
        prompt.add(f"task {task}", about(rng, options.task_tokens))
        for step in range(turns(rng, options.mean_steps)):
            if step and rng.random() < options.branch_share:
                helper_steps = turns(rng, options.mean_steps / 4 + 1)
                yield from _steps(options, rng, prompt.copy(), at_s, next(sessions), helper_steps)
            yield from _steps(options, rng, prompt, at_s, session, 1)
            at_s += rng.expovariate(1 / options.step_s)


def _steps(
    options: Options, rng: random.Random, prompt: Prompt, at_s: float, session: int, steps: int
) -> Iterator[Arrival]:
    for _ in range(steps):
        output_tokens = about(rng, options.output_tokens)
        yield prompt.arrival(at_s, session, output_tokens)
        said = f"{session} {prompt.tokens}"
        prompt.add(f"call {said}", output_tokens)
        prompt.add(f"result {said}", about(rng, options.result_tokens))
        at_s += rng.expovariate(1 / options.step_s)
