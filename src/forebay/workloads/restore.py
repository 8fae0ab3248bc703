"""Long sessions that come back once, much later: the case that a disk tier is for."""

from __future__ import annotations

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
)  # fmt: skip


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    seed: int = 0
    sessions: int = 600
    duration_s: float = 3600.0
    prompt_tokens: int = 16_000
    """On average."""
    returning_share: float = 0.6
    """Of the sessions; the others are never seen again."""
    return_s: float = 900.0
    """After the first request, on average."""
    followup_tokens: int = 200
    output_tokens: int = 300
    block_tokens: int = 256


def build(options: Options) -> Workload:
    check_from_one(
        sessions=options.sessions, prompt_tokens=options.prompt_tokens, followup_tokens=options.followup_tokens,
        output_tokens=options.output_tokens, block_tokens=options.block_tokens,
    )  # fmt: skip
    check_positive(duration_s=options.duration_s, return_s=options.return_s)
    if not 0 <= options.returning_share <= 1:
        raise ConfigError(f"returning_share must be from 0 to 1, not {options.returning_share}")
    return in_order("restore", options.block_tokens, _arrivals(options))


def _arrivals(options: Options) -> Iterator[Arrival]:
    rng, prompts = random.Random(options.seed), Prompts(options.block_tokens)
    for session, at_s in enumerate(starts(rng, options.sessions, options.duration_s)):
        prompt, output_tokens = Prompt(prompts), about(rng, options.output_tokens)
        prompt.add(f"prompt {session}", about(rng, options.prompt_tokens))
        yield prompt.arrival(at_s, session, output_tokens)
        if rng.random() < options.returning_share:
            prompt.add(f"answer {session}", output_tokens)
            prompt.add(f"follow-up {session}", about(rng, options.followup_tokens))
            later_s = at_s + rng.expovariate(1 / options.return_s)
            yield prompt.arrival(later_s, session, about(rng, options.output_tokens))
