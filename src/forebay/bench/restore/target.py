"""A target: what one group asks. One machine, of one or several instances of an engine.

A target is one module with a frozen `Options` and `build(options, group, seed)`, found by its name in
`forebay.bench.restore.targets` or by a dotted path. All is called on one thread, in this order:

    populate, rest, then for each wave: forget, wave, rest; and close at the end
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from forebay.bench.restore.sessions import Populated, Question


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What is measured, and where evidence about it is found."""

    facts: dict[str, str]
    """For people: model, engine version, options."""
    roots: tuple[Path, ...] = ()
    """Directories of this machine that hold what was stored, and nothing else. Empty: nothing is, or not here."""
    pools: tuple[Path, ...] = ()
    """Directories below the roots: each holds what one instance stores, or several that share a pool, and a block once
    only. Empty: each root is one."""
    processes: tuple[int, ...] = field(default=())
    """Process ids on this machine that serve it, besides this process and its children; theirs are counted too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came of one question. Times are of `time.monotonic_ns`."""

    session: int
    sent_ns: int
    first_token_ns: int | None
    ended_ns: int
    prompt_tokens: int
    output_tokens: int
    stored_tokens: int
    """Of the prompt: what a restore can bring, in whole blocks of the engine."""
    hit_tokens: int | None
    """Of the prompt, not computed. None where the target does not say."""
    hit_source: str | None
    """`file` for cold storage; another name, or several joined by `+`, for what came from elsewhere."""
    output_digest: str
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wave:
    answers: tuple[Answer, ...]
    """One for each question, in their order."""
    wanted_bytes: int
    """Of KV on cold storage, that these questions had to have read: each stored block once, however many want it."""


class Target(Protocol):
    def describe(self) -> Description:
        """At any time after `populate`. Processes may differ from one call to the next."""
        ...

    def populate(self, prompts: Sequence[Populated]) -> None:
        """Have these prompts computed and stored, and return once they are. Raises ConfigError when that fails."""
        ...

    def forget(self) -> None:
        """Have all that was stored leave memory, and only memory: the device's, DRAM tiers. The page cache of the
        roots is dropped by the caller, after this."""
        ...

    def wave(self, questions: Sequence[Question]) -> Wave:
        """Ask all at once, and return when the last has ended. A request that fails is an answer with an error."""
        ...

    def rest(self) -> None:
        """The other groups' turn: give back what they may need of the machine, such as accelerators and memory."""
        ...

    def close(self) -> None:
        """End what was started and remove what was made. After an error, too."""
        ...
