"""A host engine with an accelerator, under virtual time, over the real engine: what decisions are tried on.

The host computes one prefill at a time, and of those whose prefix has arrived the one that came first. A place of a
tier reads one job at a time. Nothing is stored: blocks have no bytes here, only a time that reading them takes.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from forebay.engine import Engine, EngineOptions
from forebay.events import Event
from forebay.hostpool import HostPool
from forebay.keys import block_keys
from forebay.policies.admit_all import AdmitAll
from forebay.policies.lru import LRU
from forebay.sim.executor import SimExecutor
from forebay.sim.ghosts import GhostMemory
from forebay.stage import Policies
from forebay.types import (
    HOST,
    BlockKey,
    DeviceBlock,
    Extent,
    Job,
    Namespace,
    Outcome,
    Request,
    Stored,
    TierSpec,
)

_BLOCK_BYTES = 64
_FAR_NS = 10**15
_PATIENT = EngineOptions(read_deadline_s=1e6, load_deadline_s=1e6)
"""A block here stands for many, so that a read of one takes longer than any real one would be waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """What computing takes, in truth."""

    tokens_per_s: float
    """Without context."""
    half_speed_tokens: float
    """After so much context, a token takes twice as long."""
    overhead_s: float = 0.005

    def takes_ns(self, tokens: int, context_tokens: int) -> int:
        token_s = 1.0 / self.tokens_per_s
        pairs = tokens * (context_tokens + tokens / 2.0)
        return round((self.overhead_s + token_s * tokens + token_s / self.half_speed_tokens * pairs) * 1e9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A tier, and how many blocks of each session it holds. They come in the order of the sources."""

    name: str
    blocks: int
    block_s: float
    """Reading one block takes so long, with others or alone."""
    latency_s: float = 0.0002
    """A read job takes this besides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Storm:
    """Sessions that want their first token at the same instant. All are alike, and share no block."""

    sessions: int
    block_tokens: int
    sources: tuple[Source, ...]
    host_blocks: int = 0
    """Blocks of each session, before those of the sources, that are in the host pool."""
    new_tokens: int
    """Of each prompt, after what is stored."""
    prefill: Prefill

    @property
    def stored_blocks(self) -> int:
        return self.host_blocks + sum(source.blocks for source in self.sources)

    @property
    def tokens(self) -> int:
        return self.stored_blocks * self.block_tokens + self.new_tokens


class _Catalogue:
    """A tier of which only the contents matter: every read of what it holds succeeds."""

    def __init__(self, source: Source, keys: Sequence[BlockKey]) -> None:
        self._keys = dict.fromkeys(keys)
        self.spec = TierSpec(
            name=source.name, capacity_bytes=2**50, stored_bytes=_BLOCK_BYTES, read_latency_ns=int(source.block_s * 1e9)
        )

    def scan(self) -> Iterator[Stored]:
        return (Stored(key, _BLOCK_BYTES) for key in self._keys)

    def contains(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        return [key in self._keys for key in keys]

    def read(self, keys: Sequence[BlockKey], into: Sequence[memoryview]) -> Sequence[Outcome]:
        return [Outcome.OK if key in self._keys else Outcome.MISSING for key in keys]

    def write(self, keys: Sequence[BlockKey], views: Sequence[memoryview]) -> Sequence[Outcome]:
        return [Outcome.FULL] * len(keys)

    def delete(self, keys: Sequence[BlockKey]) -> Sequence[Outcome]:
        return [Outcome.FAILED] * len(keys)

    def close(self) -> None:
        """Nothing to release."""


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Seconds until each session's first token, in the order of the requests."""

    first_token_s: tuple[float, ...]

    @property
    def mean_s(self) -> float:
        return sum(self.first_token_s) / len(self.first_token_s)


@dataclass(slots=True)
class _Session:
    request: Request
    ready: bool = False
    loaded_blocks: int = 0
    first_token_ns: int = 0


Limit = Callable[[int], int | None]
"""For a session's number: how many leading blocks it is made to load; None: the engine decides."""


def engines_choice(number: int) -> int | None:
    return None


class Host:
    """One engine over a storm's sources, and the accelerator that computes what is not loaded."""

    def __init__(
        self, storm: Storm, options: EngineOptions = _PATIENT, emit: Callable[[Event], None] = lambda event: None
    ) -> None:
        self._storm = storm
        namespace = Namespace(
            model="storm", weights_digest="none", kv_dtype="none", rope="none", layers=1, kv_heads=1, head_dim=1,
            block_tokens=1, block_bytes=_BLOCK_BYTES, layout="none",
        )  # fmt: skip
        blocks = storm.stored_blocks
        self._keys = [
            block_keys(namespace, range(number * blocks, (number + 1) * blocks)) for number in range(storm.sessions + 3)
        ]
        costs = {source.name: source for source in storm.sources}
        self._executor = SimExecutor(lambda job: _read_ns(costs[job.tier], job))
        pool = HostPool(len(self._keys) * blocks + 2, _BLOCK_BYTES)
        self.engine = Engine(
            pool,
            self._tiers(),
            Policies({name: LRU() for name in (HOST, *costs)}, AdmitAll()),
            GhostMemory(self._executor.now_ns),
            self._executor,
            emit,
            options,
            block_tokens=storm.block_tokens,
        )

    def _tiers(self) -> Mapping[str, _Catalogue]:
        tiers: dict[str, _Catalogue] = {}
        at = self._storm.host_blocks
        for number, source in enumerate(self._storm.sources):
            first = 0 if number == 0 else at  # what is to be in the host pool lies in the first tier, too
            at += source.blocks
            tiers[source.name] = _Catalogue(source, [key for keys in self._keys for key in keys[first:at]])
        return tiers

    def learn(self) -> None:
        """Read some prefixes alone and report some prefills, so that the engine knows what things take."""
        storm = self._storm
        for number in range(3):
            keys = self._keys[storm.sessions + number]
            self._bring(Request(f"learn-{number}", keys[: len(keys) - number * len(keys) // 3], extent=Extent.STORED))
            for tokens, context_tokens in (
                (storm.tokens // (number + 1), 0),
                (storm.new_tokens * (number + 1), storm.tokens // (number + 1)),
            ):
                elapsed_ns = storm.prefill.takes_ns(tokens, context_tokens)
                self.engine.computed("learn", tokens, context_tokens, elapsed_ns)

    def warm(self) -> None:
        """Bring what the storm finds in the host pool there."""
        for number in range(self._storm.sessions if self._storm.host_blocks else 0):
            keys = self._keys[number][: self._storm.host_blocks]
            self._bring(Request(f"warm-{number}", keys, extent=Extent.STORED))

    def _bring(self, request: Request) -> None:
        plan = self.engine.plan_load(request)
        assert plan is not None, "no tier here is shared"
        self.engine.start_load(plan, [DeviceBlock(0)] * plan.hit_blocks)
        while not self.engine.poll():
            self.engine.wait(_FAR_NS)

    def run(self, limit: Limit = engines_choice) -> Outcomes:
        """The storm, from its first request to its last first token."""
        began_ns = self.engine.now_ns()
        sessions = {f"storm-{number}": self._begin(number, limit(number)) for number in range(self._storm.sessions)}
        ready = [number for number, session in enumerate(sessions.values()) if session.ready]
        names = list(sessions)
        computing: tuple[int, int] | None = None
        left = len(sessions)
        while left:
            for loaded in self.engine.poll():
                sessions[loaded.request_id].loaded_blocks = loaded.blocks
                heapq.heappush(ready, names.index(loaded.request_id))
            now_ns = self.engine.now_ns()
            if computing is not None and computing[0] <= now_ns:
                session = sessions[names[computing[1]]]
                session.first_token_ns = now_ns
                self._report(session)
                computing, left = None, left - 1
            if computing is None and ready:
                number = heapq.heappop(ready)
                computing = (now_ns + self._takes_ns(sessions[names[number]]), number)
            if left:
                self.engine.wait(computing[0] if computing is not None else _FAR_NS)
        return Outcomes(tuple((session.first_token_ns - began_ns) / 1e9 for session in sessions.values()))

    def _begin(self, number: int, limit: int | None) -> _Session:
        keys = self._keys[number] if limit is None else self._keys[number][:limit]
        extent = Extent.BEST if limit is None else Extent.STORED
        request = Request(f"storm-{number}", keys, tokens=self._storm.tokens, extent=extent)
        plan = self.engine.plan_load(request)
        assert plan is not None, "no tier here is shared"
        if plan.hit_blocks:
            self.engine.start_load(plan, [DeviceBlock(0)] * plan.hit_blocks)
        return _Session(request, ready=not plan.hit_blocks)

    def _left(self, session: _Session) -> tuple[int, int]:
        loaded_tokens = session.loaded_blocks * self._storm.block_tokens
        return self._storm.tokens - loaded_tokens, loaded_tokens

    def _takes_ns(self, session: _Session) -> int:
        return self._storm.prefill.takes_ns(*self._left(session))

    def _report(self, session: _Session) -> None:
        self.engine.computed(session.request.request_id, *self._left(session), self._takes_ns(session))


def _read_ns(source: Source, job: Job) -> int:
    return round((source.latency_s + len(job.keys) * source.block_s) * 1e9)
