"""Conversations: a shared system prompt, and turns that come back with all that was said before."""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgspec

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
    sessions: int = 1000
    duration_s: float = 3600.0
    """Sessions begin in this time; their turns may come later."""
    mean_turns: float = 5.0
    system_tokens: int = 1024
    user_tokens: int = 600
    """Of each message, on average."""
    output_tokens: int = 300
    think_s: float = 90.0
    """Between an answer's request and the next one, on average."""
    block_tokens: int = 256


def build(options: Options) -> Workload:
    check_from_one(
        sessions=options.sessions, mean_turns=options.mean_turns, system_tokens=options.system_tokens,
        user_tokens=options.user_tokens, output_tokens=options.output_tokens, block_tokens=options.block_tokens,
    )  # fmt: skip
    check_positive(duration_s=options.duration_s, think_s=options.think_s)
    return in_order("chat", options.block_tokens, _arrivals(options))


def _arrivals(options: Options) -> Iterator[Arrival]:
    rng, prompts = random.Random(options.seed), Prompts(options.block_tokens)
    for session, begin_s in enumerate(starts(rng, options.sessions, options.duration_s)):
        prompt, at_s = Prompt(prompts), begin_s
        prompt.add("system", options.system_tokens)
        for turn in range(turns(rng, options.mean_turns)):
            prompt.add(f"user {session} {turn}", about(rng, options.user_tokens))
            output_tokens = about(rng, options.output_tokens)
            yield prompt.arrival(at_s, session, output_tokens)
            prompt.add(f"answer {session} {turn}", output_tokens)
            at_s += rng.expovariate(1 / options.think_s)
