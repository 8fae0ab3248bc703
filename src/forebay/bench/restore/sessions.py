"""What is populated and what is asked, from a workload: prompts that begin as one that was there before.

Any workload will do. What is asked is the last request of a session that begins with blocks of an earlier request;
what is populated is, for each, the earlier request that it shares most with. So a cold restore populates prefixes, a
chat or an agent its last turn but one, questions about documents an earlier question about the same ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from forebay.errors import ConfigError
from forebay.workloads import Arrival, Workload


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens by the identity of their blocks: equal ids are equal tokens after equal tokens."""

    chain: tuple[int, ...]
    block_tokens: int
    tokens: int
    seed: int

    def token_ids(self, vocabulary: range) -> npt.NDArray[np.uint32]:
        """uint32 [tokens], drawn from a vocabulary by block: the same prompt gives the same ids everywhere."""
        if not self.chain:
            return np.empty(0, dtype=np.uint32)
        blocks = [
            np.random.Generator(np.random.PCG64((self.seed, block))).integers(
                vocabulary.start, vocabulary.stop, self.block_tokens, dtype=np.uint32
            )
            for block in self.chain
        ]
        return np.concatenate(blocks)[: self.tokens]


@dataclass(frozen=True, slots=True)
class Question:
    """One request of a wave."""

    session: int
    """From 0."""
    instance: int
    """That is asked."""
    written_by: int
    """Instance that was given what it begins with."""
    prompt: Prompt
    output_tokens: int
    stored_tokens: int
    """Leading tokens of the prompt that are in a prompt which the instance could have in its storage."""


@dataclass(frozen=True, slots=True)
class Populated:
    """One prompt that an instance is given beforehand."""

    instance: int
    prompt: Prompt


@dataclass(frozen=True, slots=True)
class Sessions:
    """Of one group: by session, from 0."""

    populated: tuple[Populated, ...]
    questions: tuple[Question, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """A request that comes back, and the one before it that shares most with it."""

    asked: Arrival
    before: Arrival


def returning(workload: Workload, sessions: int) -> tuple[Pair, ...]:
    """Of the requests that are the last of their session, those that share most with an earlier one, in their order.

    Raises ConfigError when the workload has fewer.
    """
    last_of = {arrival.session: at for at, arrival in enumerate(workload.arrivals) if arrival.session is not None}
    latest: dict[int, int] = {}
    """By block id, the last request so far that has it."""
    shared: list[tuple[int, int, Pair]] = []
    """Negative number of blocks that a pair shares, its place in the workload, and the pair."""
    for at, arrival in enumerate(workload.arrivals):
        full = workload.full_blocks(arrival)
        if arrival.session is None or last_of[arrival.session] == at:
            blocks = next((count for count in range(len(full), 0, -1) if full[count - 1] in latest), 0)
            if blocks:
                pair = Pair(arrival, workload.arrivals[latest[full[blocks - 1]]])
                shared.append((-blocks, at, pair))
        latest.update(dict.fromkeys(full, at))
    if len(shared) < sessions:
        raise ConfigError(
            f"the workload {workload.name} has {len(shared)} requests that come back where {sessions} sessions are "
            "wanted: give it more, or lower the concurrency"
        )
    most = sorted(shared, key=lambda each: each[:2])[:sessions]
    return tuple(pair for _, _, pair in sorted(most, key=lambda each: each[1]))


def sessions_for(workload: Workload, pairs: Sequence[Pair], *, instances: int, seed: int, is_shared: bool) -> Sessions:
    """Who writes what, and who is asked: its own sessions, or in a shared pool its own and others' in turns."""

    def prompt_of(arrival: Arrival) -> Prompt:
        return Prompt(arrival.chain, workload.block_tokens, arrival.prompt_tokens, seed)

    held: list[set[int]] = [set() for _ in range(instances)]
    populated: dict[tuple[int, tuple[int, ...]], Populated] = {}
    for session, pair in enumerate(pairs):
        writer = session % instances
        held[writer].update(workload.full_blocks(pair.before))
        populated.setdefault((writer, pair.before.chain), Populated(writer, prompt_of(pair.before)))
    everywhere = set().union(*held)
    questions = []
    for session, pair in enumerate(pairs):
        writer = session % instances
        reader = (session + session // instances) % instances if is_shared else writer
        known = everywhere if is_shared else held[reader]
        full = workload.full_blocks(pair.asked)
        stored = next((at for at, block in enumerate(full) if block not in known), len(full))
        questions.append(
            Question(
                session, reader, writer, prompt_of(pair.asked), pair.asked.output_tokens,
                stored * workload.block_tokens,
            )
        )  # fmt: skip
    return Sessions(tuple(populated.values()), tuple(questions))


def shared_tokens(question: Question, wave: Sequence[Question]) -> int:
    """Leading stored tokens that another question of the wave, to the same instance, begins with too."""
    others = {
        block for each in wave if each is not question and each.instance == question.instance
        for block in each.prompt.chain
    }  # fmt: skip
    chain, block_tokens = question.prompt.chain, question.prompt.block_tokens
    shared = next((at for at, block in enumerate(chain) if block not in others), len(chain))
    return min(shared * block_tokens, question.stored_tokens)


def wave_of(
    questions: Sequence[Question], steps: Sequence[int], concurrency: int, round_number: int
) -> tuple[Question, ...]:
    """Which sessions a wave wants: the next so many, so that all have their turn. Rounds count from 1.

    `steps`: the concurrencies of a round, in order. Sessions that are not alike are the same ones in every round of a
    concurrency: else rounds would differ by what they ask, and nobody could tell whether the machine drifted.
    """
    rounds = round_number - 1 if _alike(questions) else 0
    first = rounds * sum(steps) + sum(steps[: steps.index(concurrency)])
    return tuple(questions[(first + at) % len(questions)] for at in range(concurrency))


def _alike(questions: Sequence[Question]) -> bool:
    """As long as each other, and with nothing in common that one of them could read for another."""
    lengths = {(each.prompt.tokens, each.stored_tokens, each.output_tokens) for each in questions}
    return len(lengths) == 1 and len({each.prompt.chain[0] for each in questions}) == len(questions)
