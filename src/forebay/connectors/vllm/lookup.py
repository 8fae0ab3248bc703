"""How much of a prefix the pool holds, asked on threads so that the scheduler never waits.

Nothing is remembered: the file system below is the truth, other processes change it, and a look costs microseconds a
block. What is kept is only doubt, for a while, about blocks that were there and could not be loaded.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from queue import SimpleQueue

from forebay.errors import TierUnavailable
from forebay.keys import derived_key
from forebay.ports import Observed, Tier
from forebay.types import BlockKey, Happening

log = logging.getLogger("forebay.connectors.vllm")

_CHUNK_BLOCKS = 64
"""Blocks that are asked for at a time; after the first that is missing nothing more is."""
_ANSWER_KEEPS_NS = 1_000_000_000
_DOUBT_LASTS_NS = 30_000_000_000
_THREADS = 2
_CLOSE_WITHIN_S = 5.0
_MOST_LATE = 2 * _THREADS
"""Questions past their deadline that a hung pool may owe an answer to: with more, none is asked and none waits."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The tiers of one rank and the root of its keys. A block is held when in every shard some tier holds it."""

    root: BlockKey
    tiers: Mapping[str, Tier]


class Found(Enum):
    """How sure an answer is about the first block that is not in it."""

    ALL = "all"
    """There is none: everything that was asked for is held."""
    MISSING = "missing"
    """It is not in the pool."""
    UNKNOWN = "unknown"
    """It may be in the pool: the time was up, a tier did not answer, or the block is in doubt."""


@dataclass(frozen=True, slots=True)
class Answer:
    held_blocks: int
    found: Found


@dataclass(slots=True)
class _Question:
    prefix: tuple[bytes, ...]
    """Hashes of the blocks asked for."""
    deadline_ns: int
    held_blocks: int = 0
    """So far. Only the asking thread writes it."""
    found: Found | None = None
    """Set last, when there is nothing more to find out."""
    failed: bool = False
    """A tier could not answer."""
    answered_ns: int = 0
    """When its outcome was first given, and counted; 0: not yet."""
    heard_ns: int = 0
    """When somebody last asked for it."""
    renewal: _Question | None = None
    """The same question put anew, since the answer has grown old."""
    dropped: bool = False
    ended: bool = False
    """Its thread is through with it."""


@dataclass(slots=True)
class LookupCounts:
    """Questions by outcome, each counted once, when somebody hears it. None of these ever shrinks."""

    answered: int = 0
    timed_out: int = 0
    failed: int = 0
    """A tier could not be asked, and it showed before the deadline."""


class Lookup:
    """Called on the scheduler's thread."""

    def __init__(
        self, shards: Sequence[Shard], deadline_s: float, clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._shards, self._deadline_ns, self._clock = tuple(shards), int(deadline_s * 1e9), clock
        self._questions: dict[str, _Question] = {}
        self._late: list[_Question] = []
        self._doubts: dict[bytes, int] = {}
        self._asked: SimpleQueue[tuple[_Question, int] | None] = SimpleQueue()
        # daemons: a tier that hangs must not keep the host from ending
        self._threads = [
            threading.Thread(target=self._serve, name="forebay-lookup", daemon=True) for _ in range(_THREADS)
        ]
        for thread in self._threads:
            thread.start()
        self.counts = LookupCounts()

    def ask(self, request_id: str, prefix: Sequence[bytes]) -> Answer | None:
        """How many leading blocks of `prefix` the pool holds. None: it is being asked; ask again soon.

        The answer comes within the deadline. It is given again for about a second, and, to a request that asks on and
        on, until there is a newer one: a request that waits for its turn is not to lose it over a question.
        """
        question = self._questions.get(request_id)
        now_ns = self._clock()
        if question is None or not _fits(question, prefix, now_ns):
            self.drop(request_id)
            question = self._start(tuple(prefix), now_ns)
        elif question.answered_ns and now_ns >= question.answered_ns + _ANSWER_KEEPS_NS:
            question = self._renewed(question, now_ns)
        question.heard_ns = now_ns
        self._questions[request_id] = question
        return self._answer(question, request_id, now_ns)

    def _renewed(self, question: _Question, now_ns: int) -> _Question:
        """The newer question once it is answered; else this one."""
        if question.renewal is None:
            question.renewal = self._start(question.prefix, now_ns)
        is_over = question.renewal.found is not None or now_ns >= question.renewal.deadline_ns
        return question.renewal if is_over else question

    def _answer(self, question: _Question, request_id: str, now_ns: int) -> Answer | None:
        if question.found is None and now_ns < question.deadline_ns:
            return None
        if question.found is None:
            log.warning("the pool did not say in time what it holds of request %s: the rest is computed", request_id)
            question.found = Found.UNKNOWN
            self._late.append(question)
            self._count_late(question, now_ns)
        elif not question.answered_ns:
            question.answered_ns = now_ns
            self.counts.failed += question.failed
            self.counts.answered += not question.failed
        return Answer(question.held_blocks, question.found)

    def drop(self, request_id: str) -> None:
        """The request has no more questions. Unknown ids are fine."""
        question = self._questions.pop(request_id, None)
        if question is not None:
            _drop(question)

    def doubt(self, prefix_hash: bytes) -> None:
        """A block that was found could not be loaded: for a while it counts as not there."""
        now_ns = self._clock()
        self._doubts = {known: until_ns for known, until_ns in self._doubts.items() if until_ns > now_ns}
        self._doubts[prefix_hash] = now_ns + _DOUBT_LASTS_NS

    def happened(self) -> Mapping[Happening, int]:
        """What looking has met at the places of all shards, how often since the start: cut files, a vanished root."""
        counted: Counter[Happening] = Counter()
        for shard in self._shards:
            for tier in shard.tiers.values():
                if isinstance(tier, Observed):
                    counted.update(tier.happened())
        return counted

    def close(self) -> None:
        for question in self._questions.values():
            _drop(question)
        for _ in self._threads:
            self._asked.put(None)
        until_s = time.monotonic() + _CLOSE_WITHIN_S
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        if hanging := sum(thread.is_alive() for thread in self._threads):
            log.error("%d lookups still hang in the pool: they are left behind", hanging)
        for shard in self._shards:
            for tier in shard.tiers.values():
                tier.close()

    def _start(self, prefix: tuple[bytes, ...], now_ns: int) -> _Question:
        trusted = next((i for i, known in enumerate(prefix) if self._doubts.get(known, 0) > now_ns), len(prefix))
        question = _Question(prefix, now_ns + self._deadline_ns)
        self._late = [late for late in self._late if not late.ended]
        if len(self._late) >= _MOST_LATE:
            question.found = Found.UNKNOWN
            self._count_late(question, now_ns)
        else:
            self._asked.put((question, trusted))
        return question

    def _count_late(self, question: _Question, now_ns: int) -> None:
        question.answered_ns = now_ns
        self.counts.timed_out += 1

    # --- on a thread of its own

    def _serve(self) -> None:
        while (asked := self._asked.get()) is not None:
            question, trusted = asked
            self._look(question, trusted)
            question.ended = True

    def _look(self, question: _Question, trusted: int) -> None:
        """`trusted`: blocks before the first that is in doubt."""
        found = Found.ALL if trusted == len(question.prefix) else Found.UNKNOWN
        try:
            for at in range(0, trusted, _CHUNK_BLOCKS):
                if question.dropped:
                    return
                chunk = question.prefix[at : min(at + _CHUNK_BLOCKS, trusted)]
                held = min(_leading(shard, chunk) for shard in self._shards)
                question.held_blocks = at + held
                if held < len(chunk):
                    found = Found.MISSING
                    break
        except (TierUnavailable, OSError) as error:
            log.warning("the pool cannot be asked what it holds: %s", error)
            question.failed, found = True, Found.UNKNOWN
        except Exception:  # a broken tier costs a recompute, not the host engine
            log.exception("the pool cannot be asked what it holds")
            question.failed, found = True, Found.UNKNOWN
        question.found = found


def _fits(question: _Question, prefix: Sequence[bytes], now_ns: int) -> bool:
    """Whether it is this question, and its answer new, or asked for all the time."""
    fresh = not question.answered_ns or now_ns < max(question.answered_ns, question.heard_ns) + _ANSWER_KEEPS_NS
    return fresh and len(question.prefix) == len(prefix) and question.prefix[0] == prefix[0]


def _drop(question: _Question) -> None:
    question.dropped = True
    if question.renewal is not None:
        question.renewal.dropped = True


def _leading(shard: Shard, chunk: Sequence[bytes]) -> int:
    """Leading blocks that some tier of the shard holds."""
    keys = [derived_key(shard.root, prefix_hash) for prefix_hash in chunk]
    held = [False] * len(keys)
    for tier in shard.tiers.values():
        unknown = [i for i, known in enumerate(held) if not known]
        for i, is_there in zip(unknown, tier.contains([keys[i] for i in unknown]), strict=True):
            held[i] = is_there
    return held.index(False) if False in held else len(held)
