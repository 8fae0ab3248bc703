"""What a workload is: prompts by the identity of their blocks, not by their text.

A block id stands for a block's tokens and all tokens before it, as a block key does. Who needs real tokens derives them
from the id; who counts hits needs the ids alone.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, field

from forebay.errors import ConfigError

SECOND_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request."""

    at_ns: int
    """Since the workload's start."""
    session: int | None
    """Requests of one session are turns of one conversation, or steps of one agent. None: a trace does not say."""
    chain: tuple[int, ...]
    """An id for each block of the prompt, in token order; the last block may be partial. An id occurs in two prompts
    only if these are equal up to the end of that block, and is never negative."""
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    block_tokens: int
    """Tokens of every block but the last of a prompt."""
    arrivals: tuple[Arrival, ...]
    """In the order of their times."""

    def full_blocks(self, arrival: Arrival) -> tuple[int, ...]:
        """The leading ids of blocks that are full, and can be stored."""
        return arrival.chain[: arrival.prompt_tokens // self.block_tokens]


@dataclass(slots=True)
class Prompts:
    """Gives out block ids, equal ones for equal prefixes."""

    block_tokens: int
    _ids: dict[tuple[int, tuple[tuple[str, int, int], ...]], int] = field(default_factory=dict)

    def block_id(self, parent: int, pieces: tuple[tuple[str, int, int], ...]) -> int:
        """`parent`: id of the block before, -1 for none. A piece is (text, from, to): tokens of a text by its name."""
        return self._ids.setdefault((parent, pieces), len(self._ids))


class Prompt:
    """A prompt as it grows: texts by name, each a run of tokens of which equal names are equal tokens."""

    def __init__(self, prompts: Prompts) -> None:
        self._prompts = prompts
        self._full: list[int] = []
        self._pieces: list[tuple[str, int, int]] = []
        """Of the last, partial block."""
        self._partial_tokens = 0

    @property
    def tokens(self) -> int:
        return len(self._full) * self._prompts.block_tokens + self._partial_tokens

    def add(self, text: str, tokens: int) -> None:
        at = 0
        while at < tokens:
            taken = min(tokens - at, self._prompts.block_tokens - self._partial_tokens)
            self._pieces.append((text, at, at + taken))
            self._partial_tokens += taken
            at += taken
            if self._partial_tokens == self._prompts.block_tokens:
                self._full.append(self._last_id())
                self._pieces, self._partial_tokens = [], 0

    def arrival(self, at_s: float, session: int, output_tokens: int) -> Arrival:
        """A request of the prompt as it is now."""
        chain = (*self._full, self._last_id()) if self._pieces else tuple(self._full)
        return Arrival(int(at_s * SECOND_NS), session, chain, self.tokens, output_tokens)

    def copy(self) -> Prompt:
        """Another prompt that begins as this one does."""
        other = Prompt(self._prompts)
        other._full, other._pieces = self._full.copy(), self._pieces.copy()
        other._partial_tokens = self._partial_tokens
        return other

    def _last_id(self) -> int:
        return self._prompts.block_id(self._full[-1] if self._full else -1, tuple(self._pieces))


def in_order(name: str, block_tokens: int, arrivals: Iterable[Arrival]) -> Workload:
    """Arrivals of many sessions, each in its order, as one workload."""
    return Workload(name, block_tokens, tuple(sorted(arrivals, key=lambda arrival: arrival.at_ns)))


def about(rng: random.Random, mean_tokens: int) -> int:
    """A length of this mean: log-normal, as measured lengths of prompts and answers are, with a sigma of 0.8."""
    sigma = 0.8
    return max(1, round(mean_tokens * math.exp(rng.gauss(0.0, sigma) - sigma * sigma / 2)))


def turns(rng: random.Random, mean_turns: float) -> int:
    """A number of turns, 1 or more: geometric, so that each turn is the last with the same probability."""
    count = 1
    while rng.random() > 1 / mean_turns:
        count += 1
    return count


def starts(rng: random.Random, sessions: int, duration_s: float) -> list[float]:
    """When sessions begin: so many, independently, anywhere in the duration; in order."""
    return sorted(rng.uniform(0.0, duration_s) for _ in range(sessions))


def check_positive(**options: float) -> None:
    """Raises ConfigError for what must be above 0 and finite, and is not."""
    for name, value in options.items():
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(f"{name} must be above 0, not {value}")


def check_from_one(**options: float) -> None:
    """Raises ConfigError for what must be 1 or more and finite, and is not."""
    for name, value in options.items():
        if not (math.isfinite(value) and value >= 1):
            raise ConfigError(f"{name} must be 1 or more, not {value}")
