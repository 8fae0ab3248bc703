"""The scheduler's side: which prefix a request can have from the pool, and which of its blocks go there.

A request, as far as the pool is concerned:

    asked (None until the pool has answered) --hit, blocks allocated--> loading --ended--> computed
                       |                                                   |                  |
                       +--no hit ------------------------------------------|------------------+--> its full blocks are
                                                                           |                       stored as they come
                       a failed block: vLLM recomputes from there on <-----+

Device blocks that are to be stored are held, as vLLM's own prefix cache would hold them, until every part of them
has been copied out. So neither preemption nor the end of a request overwrites a block that is still being read.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from typing import Any

from forebay.connectors.vllm.adapters import Adapters
from forebay.connectors.vllm.choosers import Choice, Chooser, Loaded
from forebay.connectors.vllm.lookup import Found, Lookup
from forebay.connectors.vllm.options import ConnectorOptions, StoredTokens
from forebay.connectors.vllm.wire import Load, StepPlan, Store, WorkerReport

log = logging.getLogger("forebay.connectors.vllm")

_FREE_SHARE = 0.05
"""With fewer of its blocks free, vLLM gets back at once what is held for stores alone."""
_HELD_NS = 5_000_000_000
"""How long a block is held for a store alone, when the pool does not keep up."""
_ADAPTER_WAIT_NS = 10_000_000_000
"""How long a request waits for its adapter to be read."""
_REVOKED_BLOCKS = 2**16
"""Revoked blocks that are remembered."""


@dataclass(slots=True)
class _Tracked:
    """A request from its first lookup to its end. Positions are blocks from the start of the request."""

    request: Any
    asked_from: int = 0
    """Where the last lookup began: blocks before it are on the device."""
    offered: int = 0
    """Blocks before this one came from the pool or were given to it."""
    absent_from: int | None = None
    """Blocks from here on were looked for in the pool and not found; None when that is not known."""
    load: Load | None = None
    may_load: bool = True
    may_store: bool = True
    announced: bool = False
    """The workers were told of it."""
    salt: bytes = b""
    """What its blocks are named by besides vLLM's hash; empty for nothing."""
    adapter: Future[bytes | None] | None = None
    """The digest of its LoRA adapter."""
    adapter_asked_ns: int = 0


@dataclass(slots=True)
class _Held:
    """Device blocks of a store, each with one reference of ours, until `open_parts` is 0."""

    names: tuple[bytes, ...]
    blocks: tuple[Any, ...]
    open_parts: int
    since_ns: int
    revoked: bool = False


class _Named(Enum):
    """Whether a request's blocks have names."""

    NOW = "now"
    LATER = "later"
    NEVER = "never"


@dataclass(slots=True)
class SchedulerCounts:
    """Blocks that lookups were about."""

    hit_blocks: int = 0
    missed_blocks: int = 0
    failed_blocks: int = 0
    """Hits that could not be loaded, and were computed."""


@dataclass(slots=True)
class _UnderWay:
    load: Load
    began_ns: int
    ahead_tokens: int
    """Of the loads that had not ended when this one began."""
    failed: bool = False


class SchedulerSide:
    """Called on the scheduler's thread. `request` is vLLM's Request, `pool` its BlockPool."""

    def __init__(
        self,
        options: ConnectorOptions,
        block_tokens: int,
        parts: int,
        lookup: Lookup,
        adapters: Adapters,
        clock: Callable[[], int] = time.monotonic_ns,
        chooser: Chooser | None = None,
    ) -> None:
        self._options, self._block_tokens, self._parts, self._clock = options, block_tokens, parts, clock
        self._chooser = chooser
        self._lookup, self._adapters = lookup, adapters
        self._pool: Any = None
        self._epoch = b""
        """Set by `forget`: from then on this engine's blocks are its own, under names that nobody else has."""
        self._last_number = 0
        self._tracked: dict[str, _Tracked] = {}
        self._loading: dict[str, _UnderWay] = {}
        """By request, also those whose request has gone."""
        self._held: dict[int, _Held] = {}
        self._revoked: dict[bytes, None] = {}
        """Blocks that were not stored for want of time, oldest first: a request that finds them on the device offers
        them again, or the pool would lack the head of what follows."""
        self._loads: list[Load] = []
        self._prompts: list[tuple[bytes, ...]] = []
        self._cancelled: list[int] = []
        self._forget = False
        self._forgetting = 0
        """Parts whose deletions are under way."""
        self._pressed = False
        self._broken = False
        self._waiting_for_answers = False
        self.counts = SchedulerCounts()

    def bind_pool(self, pool: Any) -> None:
        self._pool = pool

    # --- loads

    def matched_tokens(self, request: Any, computed_tokens: int) -> int | None:
        """Tokens past the computed ones that the pool holds, in whole blocks. None: ask again.

        That may be all there are: after an asynchronous load vLLM computes the last token of a request again.
        """
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            tracked = self._tracked[request.request_id] = _Tracked(request)
        start = tracked.asked_from = computed_tokens // self._block_tokens
        tracked.offered, tracked.absent_from, tracked.may_store = start, None, True
        named = self._name(tracked)
        if named is _Named.LATER:
            self._waiting_for_answers = True
            return None
        if named is _Named.NEVER:
            tracked.may_load = tracked.may_store = False
        end = len(request.block_hashes)
        if self._broken or not tracked.may_store:
            return 0
        tracked.offered = self._first_revoked(tracked, start)
        if not tracked.may_load or start >= end:
            return 0
        answer = self._lookup.ask(request.request_id, _names(tracked, start, end))
        if answer is None:
            self._waiting_for_answers = True
            return None
        if answer.found is Found.MISSING:
            tracked.absent_from = start + answer.held_blocks
        return self._chosen(request, start, answer.held_blocks)

    def _chosen(self, request: Any, start: int, held_blocks: int) -> int:
        """How many of the tokens in held blocks, which follow block `start`, are loaded."""
        tokens = held_blocks * self._block_tokens
        if tokens == 0 or tokens < self._options.min_load_tokens:
            return 0
        if self._chooser is None:
            return tokens
        choice = Choice(
            request.request_id, request.num_prompt_tokens, start * self._block_tokens, tokens, self._loading_tokens
        )
        try:
            chosen = self._chooser.choose(choice)
        except Exception:
            log.exception("load_or_compute has failed: everything is loaded from now on")
            self._chooser = None
            return tokens
        return min(max(chosen, 0), tokens) // self._block_tokens * self._block_tokens

    @property
    def _loading_tokens(self) -> int:
        return sum(len(each.load.blocks) for each in self._loading.values()) * self._block_tokens

    def allocated(self, request: Any, block_ids: Sequence[int], external_tokens: int) -> None:
        """vLLM has decided, and allocated blocks: what `matched_tokens` said is now loaded, or computed."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return
        self._announce(tracked)
        if external_tokens == 0:
            if tracked.load is None:
                self._lookup.drop(request.request_id)
            return
        start, count = tracked.asked_from, external_tokens // self._block_tokens
        self._last_number += 1
        names = _names(tracked, start, start + count)
        load = Load(self._last_number, request.request_id, names, tuple(block_ids[start : start + count]))
        tracked.load, tracked.offered = load, start + count
        self._loading[request.request_id] = _UnderWay(load, self._clock(), self._loading_tokens)
        self._loads.append(load)
        self._lookup.drop(request.request_id)
        self.counts.hit_blocks += count

    def _announce(self, tracked: _Tracked) -> None:
        """Once, however often it is preempted; not if its blocks have no names that anybody else could use."""
        if tracked.may_store and not tracked.announced and not self._broken:
            tracked.announced = True
            if names := _names(tracked, 0, len(tracked.request.block_hashes)):
                self._prompts.append(names)

    def finished(self, request: Any) -> None:
        """The request has ended or was aborted; what it still loads or stores goes on without it."""
        tracked = self._tracked.pop(request.request_id, None)
        self._lookup.drop(request.request_id)
        if tracked is not None and tracked.load is not None:
            self._cancelled.append(tracked.load.number)

    # --- a step

    def plan(self, scheduled: Mapping[str, int], block_ids_of: Callable[[str], Sequence[int] | None]) -> StepPlan:
        """`scheduled`: tokens that each request computes in this step."""
        stores = [
            store for request_id, tokens in scheduled.items() for store in self._store(request_id, tokens, block_ids_of)
        ]
        if self._forget:
            self._forgetting += self._parts
        under_way = self._waiting_for_answers or self._loading or self._held or self._forgetting
        idle = not scheduled and bool(under_way)
        plan = StepPlan(
            tuple(self._loads), tuple(stores), tuple(self._cancelled), self._revoke(), self._forget, idle,
            tuple(self._prompts),
        )  # fmt: skip
        self._loads, self._cancelled, self._prompts = [], [], []
        self._forget = self._waiting_for_answers = False
        return plan

    def apply(self, report: WorkerReport | None, invalid_blocks: Iterable[int], ended_loads: Iterable[str]) -> None:
        """What the workers said after a step."""
        if report is not None:
            self._release(report)
        invalid = set(invalid_blocks)
        for request_id, under_way in self._loading.items() if invalid else ():
            under_way.failed |= self._failed(request_id, under_way.load, invalid)
        for request_id in ended_loads:
            self._tell_chooser(self._loading.pop(request_id, None))
            if request_id in self._tracked:
                self._tracked[request_id].load = None

    @property
    def open_loads(self) -> int:
        return len(self._loading)

    @property
    def open_stores(self) -> int:
        return len(self._held)

    @property
    def needs_steps(self) -> bool:
        """Whether workers have to be heard although no request is left."""
        return bool(self._held or self._forget or self._forgetting)

    def has_blocks_to_give(self) -> bool:
        """vLLM is short of blocks: whether some that are held for stores alone will soon be free."""
        self._pressed = True
        return any(self._is_sole_owner(held) for held in self._held.values())

    def _store(
        self, request_id: str, tokens: int, block_ids_of: Callable[[str], Sequence[int] | None]
    ) -> Iterable[Store]:
        """The blocks of a request that will be full after this step and have not been offered."""
        tracked = self._tracked.get(request_id)
        if tracked is None or self._broken or not tracked.may_store:
            return
        request = tracked.request
        computed_tokens = request.num_computed_tokens + tokens  # vLLM advances the former only after this
        if self._options.stored_tokens is StoredTokens.PROMPT:
            computed_tokens = min(computed_tokens, request.num_prompt_tokens)
        start, end = tracked.offered, min(computed_tokens // self._block_tokens, len(request.block_hashes))
        if end <= start:
            return
        tracked.offered = end
        block_ids = block_ids_of(request_id) or ()
        blocks = tuple(self._pool.blocks[block_id] for block_id in block_ids[start:end])
        if len(blocks) < end - start or any(block.is_null for block in blocks):
            return  # a null block stands for tokens whose KV is not kept
        self._last_number += 1
        names = _names(tracked, start, end)
        for name in names if self._revoked else ():
            self._revoked.pop(name, None)
        self._pool.touch(blocks)
        self._held[self._last_number] = _Held(names, blocks, self._parts, self._clock())
        absent_from = end if tracked.absent_from is None else min(max(tracked.absent_from, start), end)
        self.counts.missed_blocks += end - absent_from
        yield Store(
            self._last_number,
            names,
            tuple(block.block_id for block in blocks),
            absent_from - start,
        )

    def _revoke(self) -> tuple[int, ...]:
        """Stores that vLLM shall not wait for: too many blocks are held for stores alone, or for too long."""
        sole = {number: held for number, held in self._held.items() if self._is_sole_owner(held)}
        held_blocks = sum(len(held.blocks) for held in sole.values())
        scarce = self._pool is not None and self._pool.get_num_free_blocks() < self._pool.num_gpu_blocks * _FREE_SHARE
        many = self._pool is not None and held_blocks > self._pool.num_gpu_blocks * self._options.held_share
        oldest_ns = self._clock() - _HELD_NS
        everything, self._pressed = self._pressed or scarce or many, False
        chosen = [
            number for number, held in sole.items() if not held.revoked and (everything or held.since_ns < oldest_ns)
        ]
        for number in chosen:
            self._held[number].revoked = True
            self._revoked.update(dict.fromkeys(self._held[number].names))
        while len(self._revoked) > _REVOKED_BLOCKS:
            del self._revoked[next(iter(self._revoked))]
        return tuple(chosen)

    def _name(self, tracked: _Tracked) -> _Named:
        """Find out what the request's blocks are named by besides vLLM's hash: their adapter, and the epoch."""
        adapter = b""
        lora = getattr(tracked.request, "lora_request", None)
        if lora is not None:
            now_ns = self._clock()
            if tracked.adapter is None:
                tracked.adapter, tracked.adapter_asked_ns = self._adapters.digest(lora), now_ns
            if not tracked.adapter.done():
                return _Named.LATER if now_ns < tracked.adapter_asked_ns + _ADAPTER_WAIT_NS else _Named.NEVER
            found = tracked.adapter.result()
            if found is None:
                return _Named.NEVER
            adapter = found
        tracked.salt = hashlib.sha256(bytes([len(self._epoch)]) + self._epoch + adapter).digest()
        if not self._epoch and not adapter:
            tracked.salt = b""
        return _Named.NOW

    def _first_revoked(self, tracked: _Tracked, end: int) -> int:
        """Position of the first block before `end` that was meant for the pool and has not gone there; else `end`."""
        if not self._revoked:
            return end
        names = _names(tracked, 0, end)
        return next((i for i, name in enumerate(names) if name in self._revoked), end)

    @staticmethod
    def _is_sole_owner(held: _Held) -> bool:
        return any(block.ref_cnt == 1 for block in held.blocks)

    def _release(self, report: WorkerReport) -> None:
        if report.broken and not self._broken:
            log.error("a worker of Forebay has stopped: from now on everything is computed")
            self._broken = True
        self._forgetting -= report.forgotten
        for number, parts in report.released.items():
            held = self._held[number]
            held.open_parts -= parts
            if held.open_parts == 0:
                del self._held[number]
                self._pool.free_blocks(reversed(held.blocks))  # tails go first, as everywhere

    def _tell_chooser(self, ended: _UnderWay | None) -> None:
        if self._chooser is None or ended is None or ended.failed or ended.load.request_id not in self._tracked:
            return  # a load that failed or was cancelled says nothing of how long loads take
        tokens, took_s = len(ended.load.blocks) * self._block_tokens, (self._clock() - ended.began_ns) / 1e9
        try:
            self._chooser.loaded(Loaded(tokens, ended.ahead_tokens, took_s))
        except Exception:
            log.exception("load_or_compute has failed: everything is loaded from now on")
            self._chooser = None

    def _failed(self, request_id: str, load: Load, invalid: set[int]) -> bool:
        """Whether a block of this load has. vLLM recomputes from the first failed one on: from there on the request's
        blocks are stored again."""
        position = next((i for i, block in enumerate(load.blocks) if block in invalid), None)
        if position is None:
            return False
        self.counts.failed_blocks += len(load.blocks) - position
        self._lookup.doubt(load.prefix[position])
        tracked = self._tracked.get(request_id)
        if tracked is not None:
            tracked.may_load = False
            tracked.offered = min(tracked.offered, tracked.asked_from + position)
        return True

    # --- the whole

    def forget(self) -> None:
        """Nothing that was stored so far is found again by this engine, nor what it stores from now on by another.

        vLLM asks for this when weights were changed in memory, too: then the weight files no longer say whose KV it is.
        Returns at once: under their new names blocks are apart from the old ones, which the workers delete meanwhile.
        """
        self._epoch = secrets.token_bytes(16)
        self._forget = True
        for request_id, tracked in self._tracked.items():
            self._lookup.drop(request_id)
            tracked.may_store = False  # what it has on the device was computed before

    def close(self) -> None:
        self._lookup.close()
        self._adapters.close()


def _names(tracked: _Tracked, start: int, end: int) -> tuple[bytes, ...]:
    """Of the request's blocks in this range."""
    hashes = tracked.request.block_hashes[start:end]
    if not tracked.salt:
        return tuple(bytes(block_hash) for block_hash in hashes)
    return tuple(hashlib.sha256(tracked.salt + block_hash).digest() for block_hash in hashes)
