"""Cold restore: sessions of one length, each stored once and asked about once more when it has long left memory.

The published workload of that name has a prefix of about 30 thousand tokens a session and 64 tokens of output.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgspec

from forebay.workloads.arrival import Arrival, Prompt, Prompts, Workload, check_from_one, check_positive, in_order


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    seed: int = 0
    """Of the order in which sessions come back."""
    sessions: int = 32
    prefix_tokens: int = 30_208
    """Of each session. Those of whole blocks come back."""
    question_tokens: int = 64
    """After the prefix, when the session comes back."""
    output_tokens: int = 64
    duration_s: float = 3600.0
    """Sessions come evenly in its first half, and come back in its second."""
    block_tokens: int = 256


def build(options: Options) -> Workload:
    check_from_one(
        sessions=options.sessions, prefix_tokens=options.prefix_tokens, question_tokens=options.question_tokens,
        output_tokens=options.output_tokens, block_tokens=options.block_tokens,
    )  # fmt: skip
    check_positive(duration_s=options.duration_s)
    return in_order("cold restore", options.block_tokens, _arrivals(options))


def _arrivals(options: Options) -> Iterator[Arrival]:
    prompts = Prompts(options.block_tokens)
    turn_s = options.duration_s / (2 * options.sessions)
    order = random.Random(options.seed).sample(range(options.sessions), options.sessions)
    for session in range(options.sessions):
        prompt = Prompt(prompts)
        prompt.add(f"prefix {session}", options.prefix_tokens)
        yield prompt.arrival(session * turn_s, session, 1)
        prompt.add(f"question {session}", options.question_tokens)
        yield prompt.arrival((options.sessions + order[session]) * turn_s, session, options.output_tokens)
