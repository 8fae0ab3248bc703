"""A host engine with timed compute, over the real engine: it plans and loads prefixes, prefills in chunks, and decodes.

It knows no clock: under virtual time it is a simulation, under the real one an emulated accelerator.

    arrived --admitted to a step--> loading --Loaded--> ready --chunks of prefill--> first token --decode--> done

One step after the other. A step computes up to `chunk_tokens` of prefill, first come first served, and one token for
each session that decodes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from forebay.engine import Engine
from forebay.sim.profiles import EngineProfile
from forebay.types import BlockKey, DeviceBlock, Request

FAR_NS = 2**62
_MOST_UNSTORED = 16
"""Sessions that are over and whose blocks stay on the device until the engine takes them."""


class Hosting(Enum):
    """What a step of the host does while prefixes are loading."""

    OVERLAPPED = "overlapped"
    """It goes on with what is ready."""
    BLOCKING = "blocking"
    """It waits for all that were admitted to it, and so does every decode."""


class Storing(Enum):
    """What becomes of the blocks that a prefill has computed."""

    NOTHING = "nothing"
    OFFERED = "offered"
    """They are offered to the engine until it has taken them, or others have to be offered."""


@dataclass(slots=True)
class Session:
    """One request, from its arrival to its last token."""

    name: str
    keys: tuple[BlockKey, ...]
    prompt_tokens: int
    output_tokens: int
    arrived_ns: int
    computed_tokens: int = 0
    """Leading tokens of the prompt whose KV is on the device, loaded or computed."""
    loaded_blocks: int = 0
    prefill_from_tokens: int = 0
    prefill_ns: int = 0
    """Time of the steps that had some of its prefill."""
    emitted_tokens: int = 0
    first_token_ns: int = 0
    ended_ns: int = 0

    @property
    def left_tokens(self) -> int:
        return self.prompt_tokens - self.computed_tokens

    @property
    def tpot_s(self) -> float | None:
        """Mean time of a token after the first; None for a session of one token."""
        if self.output_tokens < 2:
            return None
        return (self.ended_ns - self.first_token_ns) / 1e9 / (self.output_tokens - 1)


@dataclass(frozen=True, slots=True)
class _Chunk:
    session: Session
    tokens: int


class SimHost:
    """Owns its sessions; the engine is lent. Whoever owns the clock calls `advance`, and again when `wakes_ns` is."""

    def __init__(
        self,
        engine: Engine,
        profile: EngineProfile,
        block_tokens: int,
        hosting: Hosting = Hosting.OVERLAPPED,
        loads_at_once: int | None = None,
        speed: float = 1.0,
        storing: Storing = Storing.NOTHING,
    ) -> None:
        """`speed`: of its prefill, to the profile's. `loads_at_once`: prefixes admitted to a step; None: all."""
        self._engine, self._profile, self._block_tokens = engine, profile, block_tokens
        self._hosting, self._loads_at_once, self._speed = hosting, loads_at_once, speed
        self._storing = storing
        self._unstored: deque[tuple[BlockKey, ...]] = deque()
        """Blocks that the engine has not taken yet, by session."""
        self.unstored_blocks = 0
        """Given up: the engine did not take them before their device memory was needed."""
        self._arrived: deque[Session] = deque()
        self._loading: dict[str, Session] = {}
        self._ready: deque[Session] = deque()
        self._decoding: list[Session] = []
        self._chunks: tuple[_Chunk, ...] = ()
        self._step_ends_ns: int | None = None
        self._step_ns = 0
        self.ended: list[Session] = []
        """Sessions that are done; for the owner to take."""

    @property
    def idle(self) -> bool:
        return not (self._arrived or self._loading or self._ready or self._decoding or self._unstored)

    @property
    def wakes_ns(self) -> int:
        return FAR_NS if self._step_ends_ns is None else self._step_ends_ns

    def arrive(self, sessions: Sequence[Session]) -> None:
        self._arrived.extend(sessions)

    def advance(self, now_ns: int) -> None:
        """Apply what has ended by now, and begin what can begin."""
        self._poll()
        self._offer()
        if self._step_ends_ns is not None:
            if now_ns < self._step_ends_ns:
                if self._hosting is Hosting.OVERLAPPED:
                    self._admit()
                return
            self._end_step(now_ns)
            self._offer()  # now: nothing else may ever happen after the last step
        self._admit()
        if not (self._hosting is Hosting.BLOCKING and self._loading):
            self._begin_step(now_ns)

    def _poll(self) -> None:
        for loaded in self._engine.poll():
            session = self._loading.pop(loaded.request_id)
            session.loaded_blocks = loaded.blocks
            loaded_tokens = min(loaded.blocks * self._block_tokens, session.prompt_tokens - 1)
            session.computed_tokens = session.prefill_from_tokens = loaded_tokens
            self._ready.append(session)

    def _admit(self) -> None:
        """Plan all that are admitted before the first load starts: what is in DRAM for one is pinned by then."""
        if self._hosting is Hosting.BLOCKING and (self._loading or self._ready):
            return
        plans = []
        while self._arrived and (self._loads_at_once is None or len(self._loading) < self._loads_at_once):
            session = self._arrived[0]
            plan = self._engine.plan_load(Request(session.name, session.keys, tokens=session.prompt_tokens))
            if plan is None:
                break  # a shared tier is being asked
            self._arrived.popleft()
            if plan.hit_blocks:
                self._loading[session.name] = session
                plans.append(plan)
            else:
                self._ready.append(session)
        for plan in plans:
            self._engine.start_load(plan, [DeviceBlock(0)] * plan.hit_blocks)

    def _offer(self) -> None:
        while len(self._unstored) > _MOST_UNSTORED:
            self.unstored_blocks += len(self._unstored.popleft())
        while self._unstored:
            keys = self._unstored[0]
            taken = self._engine.offer(keys, [DeviceBlock(0)] * len(keys))
            if taken < len(keys):
                self._unstored[0] = keys[taken:]
                return
            self._unstored.popleft()

    def _begin_step(self, now_ns: int) -> None:
        chunks: list[_Chunk] = []
        budget_tokens = self._profile.chunk_tokens
        for session in self._ready:
            tokens = min(budget_tokens, session.left_tokens)
            if not tokens:
                break
            chunks.append(_Chunk(session, tokens))
            budget_tokens -= tokens
        if chunks or self._decoding:
            self._chunks = tuple(chunks)
            self._step_ns = max(1, round(self._step_s() * 1e9))
            self._step_ends_ns = now_ns + self._step_ns

    def _step_s(self) -> float:
        batch = len(self._decoding)
        contexts = [session.prompt_tokens + session.emitted_tokens for session in self._decoding]
        context_tokens = sum(contexts) / batch if batch else 0.0
        if not self._chunks:
            return self._profile.decode_s(batch, context_tokens)
        prefills = [
            self._profile.prefill_s(chunk.tokens, chunk.session.computed_tokens) / self._speed for chunk in self._chunks
        ]
        return sum(prefills) + self._profile.mixed_s(0, 0, batch, context_tokens)

    def _end_step(self, now_ns: int) -> None:
        self._step_ends_ns = None
        for session in tuple(self._decoding):
            self._emit(session, now_ns)
        for chunk in self._chunks:
            session = chunk.session
            session.computed_tokens += chunk.tokens
            session.prefill_ns += self._step_ns
            if not session.left_tokens:
                self._ready.popleft()
                self._engine.computed(
                    session.name, session.prompt_tokens - session.prefill_from_tokens, session.prefill_from_tokens,
                    session.prefill_ns,
                )  # fmt: skip
                session.first_token_ns = now_ns
                if self._storing is Storing.OFFERED and len(session.keys) > session.loaded_blocks:
                    self._unstored.append(session.keys[session.loaded_blocks :])
                self._decoding.append(session)
                self._emit(session, now_ns)

    def _emit(self, session: Session, now_ns: int) -> None:
        session.emitted_tokens += 1
        if session.emitted_tokens >= session.output_tokens:
            session.ended_ns = now_ns
            self._decoding.remove(session)
            self.ended.append(session)
