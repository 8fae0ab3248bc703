"""Greedy generation with a tiered KV store behind it: hot, warm and cold in one process.

A prompt's longest held prefix is restored, the rest is computed in chunks, and every block that is finished, be it of
the prompt or of the answer, is kept for the next session that begins with the same tokens.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from forebay.assemble import StoreConfig, open_engine
from forebay.engine import Engine
from forebay.errors import ConfigError
from forebay.events import EventSink
from forebay.hints import HintOptions, Hints
from forebay.hostpool import HostPool
from forebay.keys import Tokens, block_keys, token_ids
from forebay.policies.lrfu import LRFU
from forebay.types import Extent, Happening, Namespace, Pinned, Request

from .device import BlockShape, PagedDeviceCache
from .facts import LoadedModel, cache_argument
from .session import SessionKV
from .store import Restored, SessionStore, StoreCounts, StoreLimits

log = logging.getLogger("forebay.connectors.transformers.runner")


class Reuse(Enum):
    """Whether a generation takes part in the store."""

    ON = "on"
    OFF = "off"
    """No lookup and nothing kept: the same code path, computed from the first token."""


class RunnerOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    device_bytes: int = 2**30
    """Device memory for hot blocks. A prompt that is larger still works: it passes through in windows."""
    chunk_tokens: int = 512
    """Tokens a prefill step computes, between boundaries at multiples of this; a multiple of the block's tokens."""
    window_bytes: int = 32 * 2**20
    """KV that one load brings at a time: one window is read while another is copied and gathered."""
    backlog_bytes: int = 2**30
    """Memory that finished sessions may go on holding for blocks that the store was too busy to take."""
    load_deadline_s: float = 30.0
    """How long one window's load may take. Past it the blocks are computed: a store that hangs is a miss."""
    extent: Extent = Extent.STORED
    """How much of a stored prefix is restored: all of it, or as much as brings the first token soonest."""
    half_life: float = 10_000.0
    """Of the device cache's LRFU, in block accesses."""
    hints_port: int = 0
    """TCP port on loopback for prefetch hints over HTTP; 0: none. Taken while the runner generates or rests."""


@dataclass(frozen=True, slots=True)
class Generation:
    """What came out, and what it cost. Times are seconds from the call of `generate`."""

    request_id: str
    tokens: tuple[int, ...]
    prompt_tokens: int
    hit_tokens: Mapping[str, int]
    """Restored tokens by source: `device`, `host`, or a tier's name. With `computed_tokens` they make the prompt."""
    computed_tokens: int
    """Prompt tokens that went through the model."""
    restored_bytes: int
    ttft_s: float
    """Until the first new token was known."""
    total_s: float
    restore_s: float
    """Looking up, loading and gathering; nothing else of the generation runs meanwhile."""
    plan_s: float
    load_s: float
    gather_s: float
    """Parts of `restore_s`."""
    prefill_s: float
    """Computing the rest of the prompt."""


class Runner:
    """One model, one store, one session at a time. One thread; close it, or use it as a context manager."""

    def __init__(
        self,
        loaded: LoadedModel,
        namespace: Namespace,
        engine: Engine,
        device: PagedDeviceCache,
        options: RunnerOptions | None = None,
        hints: Hints | None = None,
    ) -> None:
        """Takes the engine, the device cache and the hints over."""
        self.options = options or RunnerOptions()
        _check_options(self.options, namespace)
        self.loaded, self.namespace = loaded, namespace
        limits = StoreLimits(
            window_blocks=self.options.window_bytes // namespace.block_bytes,
            backlog_bytes=self.options.backlog_bytes,
            load_deadline_ns=int(self.options.load_deadline_s * 1e9),
        )
        self.store = SessionStore(engine, device, limits, hints)
        self._shape, self._torch_device = device.shape, device.device
        self._block_tokens = namespace.block_tokens
        self._sessions: list[SessionKV] = []
        self._generations = 0
        self._closed = False
        accepted = inspect.signature(loaded.model.forward).parameters
        self._forward_options = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}

    @classmethod
    def open(
        cls,
        loaded: LoadedModel,
        namespace: Namespace,
        store: StoreConfig,
        options: RunnerOptions | None = None,
        *,
        emit: EventSink = lambda event: None,
    ) -> Runner:
        """Open the store for this namespace and a runner over it. Raises ConfigError for what cannot work."""
        options = options or RunnerOptions()
        _check_options(options, namespace)
        made: list[PagedDeviceCache] = []

        def make_device(pool: HostPool) -> PagedDeviceCache:
            made.append(device_cache(loaded, namespace, pool, options))
            return made[0]

        engine = open_engine(store, namespace, make_device, emit=emit)
        try:
            hints = Hints(HintOptions(port=options.hints_port), namespace) if options.hints_port else None
        except ConfigError:
            engine.close()
            raise
        return cls(loaded, namespace, engine, made[0], options, hints)

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def counts(self) -> StoreCounts:
        return self.store.counts

    def happened(self) -> Mapping[Happening, int]:
        """What has happened to the disks since the runner was opened, how often: failures, hangs, damage."""
        return self.store.engine.happened()

    def generate(
        self,
        tokens: Tokens,
        max_new_tokens: int,
        request_id: str | None = None,
        *,
        reuse: Reuse = Reuse.ON,
        stop_tokens: Collection[int] = (),
    ) -> Generation:
        """Continue a prompt of at least 1 token by 1 to `max_new_tokens`, each the most likely one.

        Ends early after a token in `stop_tokens`. Raises ValueError for an empty prompt, a number below 1, and what is
        no token id of this model; RuntimeError once the runner is closed. Nothing that a store does ends or changes a
        generation: what it cannot give is computed.
        """
        self._check_open()
        ids = self._checked(tokens)
        prompt_tokens = len(ids)
        if prompt_tokens < 1 or max_new_tokens < 1:
            raise ValueError(
                f"a prompt of {prompt_tokens} tokens and {max_new_tokens} new ones: both must be 1 or more"
            )
        self._generations += 1
        session = _Session(
            request_id or f"generation-{self._generations}",
            ids,
            max_new_tokens,
            self._borrow(prompt_tokens + max_new_tokens),
        )
        started_ns = self.store.engine.now_ns()
        with torch.inference_mode():
            restored = self._restore(session) if reuse is Reuse.ON else Restored((), 0, 0, 0)
            computed_tokens = prompt_tokens - session.kv.tokens
            restored_ns = self.store.engine.now_ns()
            context_tokens = session.kv.tokens
            session.append(self._prefill(session, reuse))
            first_ns = self.store.engine.now_ns()
            if reuse is Reuse.ON:
                self.store.computed(computed_tokens, context_tokens, first_ns - restored_ns)
            while session.new_tokens < max_new_tokens and session.last not in stop_tokens:
                session.append(self._forward(session, session.length - 1, session.length))
                self._keep(session, reuse)
        ended_ns = self.store.engine.now_ns()
        if reuse is Reuse.ON:
            self.store.retire()
        return Generation(
            request_id=session.request_id,
            tokens=tuple(session.ids[prompt_tokens : session.length].tolist()),
            prompt_tokens=prompt_tokens,
            hit_tokens=self._hit_tokens(restored, prompt_tokens),
            computed_tokens=computed_tokens,
            restored_bytes=len(restored.sources) * self.namespace.block_bytes,
            ttft_s=(first_ns - started_ns) / 1e9,
            total_s=(ended_ns - started_ns) / 1e9,
            restore_s=(restored_ns - started_ns) / 1e9,
            plan_s=restored.plan_ns / 1e9,
            load_s=restored.load_ns / 1e9,
            gather_s=restored.gather_ns / 1e9,
            prefill_s=(first_ns - restored_ns) / 1e9,
        )

    def reserve(self, session_tokens: int) -> None:
        """Make the buffer for sessions of up to this many tokens now, so that no generation pays for it."""
        self._check_open()
        self._borrow(session_tokens)

    def rest(self, for_s: float) -> None:
        """Let writes and prefetches go on between generations, and take hints, for so many seconds."""
        self._check_open()
        self.store.rest(self.store.engine.now_ns() + int(for_s * 1e9))

    def prefetch(self, tokens: Tokens, in_s: float, request_id: str) -> int:
        """A prompt that begins with these tokens will come, under this id, in so many seconds: have it in DRAM by then.

        Returns how many blocks of it are known. Goes on while the runner generates or rests. See `Engine.prefetch`.
        """
        self._check_open()
        engine = self.store.engine
        keys = block_keys(self.namespace, self._checked(tokens))
        return engine.prefetch(Request(request_id, keys), engine.now_ns() + int(in_s * 1e9))

    def flush(self) -> None:
        """Wait until everything kept so far is stored."""
        self._check_open()
        self.store.flush()

    def drop_device(self) -> int:
        """Forget the hot blocks, after the store has got what it lacks; returns how many there were."""
        self._check_open()
        return self.store.drop_device()

    def drop_host_copies(self) -> int:
        """Forget the DRAM copies that a tier holds too; returns how many. With `drop_device`: all is cold."""
        self._check_open()
        self.store.flush()
        return self.store.engine.drop_host_copies()

    def pin(self, tokens: Tokens) -> Pinned:
        """Keep the full blocks of a prompt, such as a system prompt, in DRAM and in the tiers until they are unpinned.

        They need not be stored yet. Bounded: the answer says how many blocks were refused. See `Engine.pin`.
        """
        self._check_open()
        return self.store.engine.pin(block_keys(self.namespace, self._checked(tokens)))

    def unpin(self, pinned: Pinned) -> None:
        """Let go of what `pin` answered, once for each such answer."""
        self._check_open()
        self.store.engine.unpin(pinned.keys)

    def close(self) -> None:
        """Store what waits, and close the engine and its tiers. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        try:
            self.store.flush()
        finally:
            self.store.close()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the runner is closed: open another one")

    def _checked(self, tokens: Tokens) -> npt.NDArray[np.uint32]:
        """The prompt as uint32 [tokens], each of them an id that the model has."""
        ids, vocabulary = token_ids(tokens), self.loaded.facts.vocabulary
        if len(ids) and int(ids.max()) >= vocabulary:
            raise ValueError(f"token id {int(ids.max())} is not one of the {vocabulary} of {self.loaded.name}")
        return ids

    # ---- the steps of a generation

    def _restore(self, session: _Session) -> Restored:
        """Restore all full blocks of the prompt. One token is left to compute, since its logits are needed: where
        the prompt ends with a block, the block is restored whole and its last token is computed again in place."""
        keys = block_keys(self.namespace, session.prompt)
        if session.length == 1:
            keys = ()
        restored = self.store.restore(session.request_id, keys, session.kv, session.length, self.options.extent)
        session.kv.tokens = min(len(restored.sources) * self._block_tokens, session.length - 1)
        session.kept_blocks = len(restored.sources)
        return restored

    def _prefill(self, session: _Session, reuse: Reuse) -> int:
        """Compute the rest of the prompt; returns the first new token.

        Chunks end at absolute multiples of `chunk_tokens` wherever they begin, so that a session that was restored
        and one that was not cut the tokens they both compute in the same places.
        """
        chunk_tokens, token = self.options.chunk_tokens, -1
        while (start := session.kv.tokens) < session.length:
            stop = min(session.length, (start // chunk_tokens + 1) * chunk_tokens)
            token = self._forward(session, start, stop)
            self._keep(session, reuse)
        return token

    def _forward(self, session: _Session, start: int, stop: int) -> int:
        """Run tokens [start, stop) through the model, their KV into the session; returns the likeliest next token."""
        ids = torch.from_numpy(session.ids[start:stop].astype(np.int64)).unsqueeze(0).to(self._torch_device)
        cache = {cache_argument(self.loaded.model): session.kv.cache}
        output = self.loaded.model(ids, use_cache=True, **cache, **self._forward_options)
        return int(output.logits[0, -1].argmax())

    def _keep(self, session: _Session, reuse: Reuse) -> None:
        """Hand the blocks that the last step finished to the store, and let it work on."""
        if reuse is Reuse.OFF:
            return
        finished = session.kv.tokens // self._block_tokens
        if finished > session.kept_blocks:
            keys = block_keys(self.namespace, session.ids[: finished * self._block_tokens])
            self.store.keep(keys[session.kept_blocks :], session.kv, session.kept_blocks)
            session.kept_blocks = finished
        self.store.pump()

    def _borrow(self, tokens: int) -> SessionKV:
        """A session buffer of enough tokens. The last one is used again, unless blocks in it wait for the store."""
        for kv in self._sessions:
            if kv.capacity_tokens >= tokens and not self.store.uses(kv):
                kv.tokens = 0
                return kv
        step = self.options.chunk_tokens
        capacity_blocks = -(-tokens // step) * step // self._block_tokens
        kv = SessionKV(self._shape, capacity_blocks, self._torch_device)
        self._sessions = [kv, *(old for old in self._sessions if self.store.uses(old))]
        return kv

    def _hit_tokens(self, restored: Restored, prompt_tokens: int) -> Mapping[str, int]:
        hits: Counter[str] = Counter()
        for position, source in enumerate(restored.sources):
            start = position * self._block_tokens
            hits[source] += min(start + self._block_tokens, prompt_tokens - 1) - start
        return dict(hits)


class _Session:
    """The tokens of one generation and where it stands."""

    def __init__(self, request_id: str, prompt: npt.NDArray[np.uint32], max_new_tokens: int, kv: SessionKV) -> None:
        self.request_id, self.kv = request_id, kv
        self.prompt_tokens = self.length = len(prompt)
        self.ids: npt.NDArray[np.uint32] = np.empty(self.length + max_new_tokens, dtype=np.uint32)
        """[prompt + max_new_tokens]; valid up to `length`."""
        self.ids[: self.length] = prompt
        self.kept_blocks = 0
        """Leading blocks that the store has, or has been handed."""

    @property
    def prompt(self) -> npt.NDArray[np.uint32]:
        return self.ids[: self.prompt_tokens]

    @property
    def new_tokens(self) -> int:
        return self.length - self.prompt_tokens

    @property
    def last(self) -> int:
        return int(self.ids[self.length - 1])

    def append(self, token: int) -> None:
        self.ids[self.length] = token
        self.length += 1


def device_cache(loaded: LoadedModel, namespace: Namespace, pool: HostPool, options: RunnerOptions) -> PagedDeviceCache:
    """A device cache of `options.device_bytes` next to the model. Raises ConfigError when not even one block fits."""
    parameter = next(loaded.model.parameters())
    shape = BlockShape(
        namespace.layers, namespace.kv_heads, namespace.block_tokens, namespace.head_dim,
        getattr(torch, namespace.kv_dtype),
    )  # fmt: skip
    return PagedDeviceCache(
        pool,
        shape,
        options.device_bytes // namespace.block_bytes,
        device=parameter.device,
        policy=LRFU(options.half_life),
    )


def _check_options(options: RunnerOptions, namespace: Namespace) -> None:
    if namespace.block_tokens < 1:
        raise ConfigError(f"a block must have 1 token or more, not {namespace.block_tokens}")
    if not (math.isfinite(options.half_life) and options.half_life > 0):
        raise ConfigError(f"half_life must be a number of accesses above 0, not {options.half_life}")
    if not (math.isfinite(options.load_deadline_s * 1e9) and options.load_deadline_s >= 0):
        raise ConfigError(f"load_deadline_s must be a number of seconds, 0 or more, not {options.load_deadline_s}")
    if options.window_bytes < 1 or options.backlog_bytes < 0:
        raise ConfigError(
            f"window_bytes must be 1 or more and backlog_bytes 0 or more, not {options.window_bytes} and "
            f"{options.backlog_bytes}"
        )
    if options.chunk_tokens < 1 or options.chunk_tokens % namespace.block_tokens:
        raise ConfigError(
            f"chunk_tokens must be a multiple of the {namespace.block_tokens} tokens of a block, "
            f"not {options.chunk_tokens}"
        )
