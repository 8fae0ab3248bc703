"""Blocks on their way between sessions, the device cache and the engine: restore, keep, demote.

```
restore:  hot blocks and the engine's loads -> device blocks -> session
keep:     session -> computed (waits for a device block) -> hot -> unstored (waits for a host slot) -> engine
```
One thread. The model never waits for the store: what the store cannot take yet stays in its queue until the next step.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from forebay.engine import Engine
from forebay.hints import Hints
from forebay.types import BlockKey, DeviceBlock, Extent, JobId, LoadPlan, Request

from .device import PagedDeviceCache
from .session import SessionKV

log = logging.getLogger("forebay.connectors.transformers.store")

DEVICE = "device"
"""The name of the device cache wherever a hit's source is named."""

_STALL_NS = 60 * 10**9
_PATIENCE_NS = 20_000_000
"""How long one wait may last before everything is looked at again."""
_OFFER_BLOCKS = 64
_WINDOWS = 2
"""Windows of one load under way: one is read while the other is copied and gathered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLimits:
    window_blocks: int
    """Blocks that one load brings; at most half the device cache, so that two can be under way."""
    backlog_bytes: int
    """Buffers that finished sessions may go on holding for blocks that have not found a device block."""
    load_deadline_ns: int
    """How long one load may take before its blocks are computed instead."""


@dataclass(frozen=True, slots=True)
class Restored:
    """What a session got back: its first `len(sources)` blocks, and where each came from."""

    sources: tuple[str, ...]
    plan_ns: int
    load_ns: int
    """Waiting for reads and copying into device blocks."""
    gather_ns: int
    """From device blocks into the session (on a GPU: queueing that)."""


@dataclass(frozen=True, slots=True)
class StoreCounts:
    """Since the store was opened, in blocks."""

    restored_blocks: int
    computed_blocks: int
    """Offered by sessions because nobody had them."""
    demoted_blocks: int
    """Offered because they had to leave the device and nobody else held them."""
    lost_blocks: int
    """Forgotten because the store could not take them. They cost a recompute if they are wanted again."""


@dataclass(frozen=True, slots=True)
class _Computed:
    """A finished block that lies in a session only."""

    key: BlockKey
    kv: SessionKV
    position: int


@dataclass(frozen=True, slots=True)
class _Window:
    """A part of a prefix on its way to device blocks of its own."""

    plan: LoadPlan
    start: int
    blocks: tuple[DeviceBlock, ...]


@dataclass(slots=True)
class _Clocks:
    plan_ns: int = 0
    load_ns: int = 0
    gather_ns: int = 0


class SessionStore:
    """Owns the device cache's contents and the engine's loads. `close` closes both."""

    def __init__(
        self, engine: Engine, device: PagedDeviceCache, limits: StoreLimits, hints: Hints | None = None
    ) -> None:
        self.engine, self.device, self.hints, self._limits = engine, device, hints, limits
        self._window_blocks = max(1, min(limits.window_blocks, device.num_blocks // _WINDOWS))
        self._computed: deque[_Computed] = deque()
        self._unstored: deque[BlockKey] = deque()
        """Hot blocks that the engine has not taken yet; may name blocks that have left the device since."""
        self._ended: dict[str, int] = {}
        """Loads that are over: request id -> blocks on the device."""
        self._late: dict[str, tuple[DeviceBlock, ...]] = {}
        """Loads that nobody waits for any more. Their device blocks are the engine's until they have ended."""
        self._opened = 0
        self._choice = ""
        """The name under which the engine was last asked how much to load."""
        self._restored = self._kept = self._demoted = self._lost = 0

    @property
    def counts(self) -> StoreCounts:
        return StoreCounts(self._restored, self._kept, self._demoted, self._lost)

    # ---- restore

    def restore(
        self,
        request_id: str,
        keys: Sequence[BlockKey],
        kv: SessionKV,
        prompt_tokens: int = 0,
        extent: Extent = Extent.STORED,
    ) -> Restored:
        """Bring the longest held prefix of `keys` to the session's first blocks; every restored block becomes hot.

        With `Extent.BEST`, less than that where computing the rest of the `prompt_tokens` looks faster.

        A prefix longer than the device cache comes through it in windows. Never raises for what a tier does.
        """
        clocks = _Clocks()
        sources: list[str | None] = [None] * len(keys)
        self.engine.announce(keys)
        self._gather_hot(keys, kv, sources, clocks)
        end = len(keys)
        if extent is Extent.BEST:
            end = self._chosen_end(request_id, keys, sources, prompt_tokens)
        for start, stop in _gaps(sources[:end]):
            self._load(request_id, keys, range(start, stop), kv, sources, clocks)
            if None in sources[start:stop]:
                break
        self.engine.end_prefetch(request_id)  # its windows have names of their own
        leading = tuple(_until_none(sources))
        self._restored += len(leading)
        return Restored(leading, clocks.plan_ns, clocks.load_ns, clocks.gather_ns)

    def _chosen_end(
        self, request_id: str, keys: Sequence[BlockKey], sources: Sequence[str | None], prompt_tokens: int
    ) -> int:
        """Where loading should end and computing begin, as the engine sees it."""
        hot = len(tuple(_until_none(sources)))
        if hot == len(keys) or any(sources[hot:]):
            return len(keys)  # nothing to decide; or hot blocks further on would be lost with what lies before them
        self._opened += 1
        self._choice = f"{request_id}/{self._opened}"
        context_tokens = hot * self.device.shape.block_tokens
        request = Request(
            self._choice, tuple(keys[hot:]), announced=True, tokens=max(0, prompt_tokens - context_tokens),
            context_tokens=context_tokens,
        )  # fmt: skip
        while (blocks := self.engine.choose(request)) is None:
            self._step()
        return hot + blocks

    def computed(self, tokens: int, context_tokens: int, elapsed_ns: int) -> None:
        """The prefill that followed the last restore has ended."""
        self.engine.computed(self._choice, tokens, context_tokens, elapsed_ns)

    def _gather_hot(self, keys: Sequence[BlockKey], kv: SessionKV, sources: list[str | None], clocks: _Clocks) -> None:
        """Everything hot goes into the session at once, so that loads may take its device blocks afterwards."""
        started_ns = self.engine.now_ns()
        sources[:] = [DEVICE if key in self.device else None for key in keys]
        for start, stop in _gaps([None if source else DEVICE for source in sources]):
            hot = keys[start:stop]
            kv.gather(start, self.device.blocks, [self.device.block(key) for key in hot])
            self.device.accessed(hot)
        clocks.gather_ns += self.engine.now_ns() - started_ns

    def _load(
        self,
        request_id: str,
        keys: Sequence[BlockKey],
        gap: range,
        kv: SessionKV,
        sources: list[str | None],
        clocks: _Clocks,
    ) -> None:
        """Load a run of blocks that are not hot, two windows at a time: one is read while the other is gathered."""
        windows: deque[_Window] = deque()
        at, stop = gap.start, gap.stop
        deadline_ns = self.engine.now_ns() + self._limits.load_deadline_ns
        try:
            while windows or at < stop:
                while at < stop and len(windows) < _WINDOWS:
                    blocks = self._room(min(stop - at, self._window_blocks))
                    if not blocks and windows:
                        break  # the window under way will make room
                    if not blocks and (self._late or self.engine.now_ns() > deadline_ns):
                        log.warning("no device block is free for %d blocks to load: they are computed", stop - at)
                        return
                    if not blocks:
                        self._step()
                        continue
                    window = self._open_window(request_id, keys, at, blocks, clocks)
                    at += window.plan.hit_blocks
                    if window.plan.compute_blocks:
                        stop = at  # nobody holds the next block
                    if window.blocks:
                        windows.append(window)
                if windows:
                    loaded = self._close_window(windows[0], clocks)
                    if loaded is None:
                        log.warning("a load of %d blocks is late: they are computed", len(windows[0].blocks))
                        return
                    self._arrive(windows.popleft(), loaded, kv, sources, clocks)
        finally:
            for window in windows:  # it is late, or an exception is on its way
                self._abandon(window)

    def _open_window(
        self, request_id: str, keys: Sequence[BlockKey], start: int, blocks: Sequence[DeviceBlock], clocks: _Clocks
    ) -> _Window:
        """Plan the load of the blocks from `start` into these device blocks, and start it if anybody holds any."""
        started_ns = self.engine.now_ns()
        self._opened += 1  # a number of our own, since callers may use an id twice
        request = Request(
            f"{request_id}/{self._opened}",
            tuple(keys[start : start + len(blocks)]),
            announced=True,
            extent=Extent.STORED,
        )
        while (plan := self.engine.plan_load(request)) is None:
            self._step()
        window = _Window(plan, start, tuple(blocks[: plan.hit_blocks]))
        self.device.give(blocks[plan.hit_blocks :])
        planned_ns = self.engine.now_ns()
        clocks.plan_ns += planned_ns - started_ns
        if window.blocks:
            self.engine.start_load(plan, window.blocks)
            clocks.load_ns += self.engine.now_ns() - planned_ns
        return window

    def _close_window(self, window: _Window, clocks: _Clocks) -> int | None:
        """Wait for a load's end; returns how many leading blocks are on the device, or None past the deadline."""
        started_ns = self.engine.now_ns()
        deadline_ns = started_ns + self._limits.load_deadline_ns
        while window.plan.request_id not in self._ended and self.engine.now_ns() < deadline_ns:
            self._step()
        clocks.load_ns += self.engine.now_ns() - started_ns
        return self._ended.pop(window.plan.request_id, None)

    def _abandon(self, window: _Window) -> None:
        """Wait for a load no longer. Its device blocks come back when it has ended, which `_poll` sees."""
        if self._ended.pop(window.plan.request_id, None) is not None:
            self.device.give(window.blocks)
            return
        self.engine.cancel_load(window.plan.request_id)
        self._late[window.plan.request_id] = window.blocks

    def _arrive(self, window: _Window, loaded: int, kv: SessionKV, sources: list[str | None], clocks: _Clocks) -> None:
        """The first `loaded` blocks of a window are on the device: into the session, and hot from now on."""
        started_ns = self.engine.now_ns()
        arrived = window.plan.reads[:loaded]
        if arrived:
            kv.gather(window.start, self.device.blocks, window.blocks[:loaded])
        sources[window.start : window.start + loaded] = [read.source for read in arrived]
        self.device.insert([read.key for read in arrived], window.blocks[:loaded])
        self.device.give(window.blocks[loaded:])
        clocks.gather_ns += self.engine.now_ns() - started_ns

    # ---- keep

    def keep(self, keys: Sequence[BlockKey], kv: SessionKV, start: int) -> None:
        """Blocks `start` and up of the session are finished. They are stored from here on, a bit at every `pump`."""
        for position, key in enumerate(keys, start):
            if key in self.device:
                self.device.accessed((key,))
            else:
                self._computed.append(_Computed(key, kv, position))

    def uses(self, kv: SessionKV) -> bool:
        """Whether blocks of this session still wait for a device block: its buffer must stay as it is."""
        return any(entry.kv is kv for entry in self._computed)

    def pump(self) -> None:
        """Apply what has ended and move what can move, without waiting for any of it."""
        self._poll()
        while self._place():
            self._offer()
            self._poll()
        self._offer()

    def retire(self) -> None:
        """A session has ended. Its blocks may wait on in its buffer while such buffers stay within the backlog."""
        while self._computed:
            waiting = {id(entry.kv): entry.kv.held_bytes for entry in self._computed}
            if sum(waiting.values()) <= self._limits.backlog_bytes:
                return
            oldest = self._computed[0].kv
            late = [entry for entry in self._computed if entry.kv is oldest]
            self._computed = deque(entry for entry in self._computed if entry.kv is not oldest)
            self._lose(len(late), "the backlog of finished sessions is full")

    def flush(self) -> None:
        """Wait until everything kept so far is stored, or has been refused by a store that has nothing left to do.

        A store in which nothing moves for a minute hangs, and is not waited for.
        """
        left, moved_ns = self._left(), self.engine.now_ns()
        while True:
            self.pump()
            if self._left() != left:
                left, moved_ns = self._left(), self.engine.now_ns()
            elif self.engine.now_ns() - moved_ns > _STALL_NS:
                log.error("nothing has moved for %.0f s: blocks that are not stored yet may be lost", _STALL_NS / 1e9)
                return
            stuck = bool(self._computed or self._unstored)
            if self.engine.idle and not self.device.copies_in_flight:
                if not stuck:
                    return
                self._give_up()
            else:
                self.engine.wait(self.engine.now_ns() + _PATIENCE_NS)

    def _left(self) -> tuple[int, int, frozenset[JobId]]:
        """What there is still to do, to see whether it moves."""
        return len(self._computed), len(self._unstored), self.engine.jobs()

    def drop_device(self) -> int:
        """Forget every hot block, after the store has got what it lacks; returns how many were hot."""
        self.flush()
        hot_blocks = self.device.hot_blocks
        while self.device.hot_blocks:
            if not self._evict(self.device.hot_blocks):
                self._step()
        return hot_blocks

    def rest(self, until_ns: int) -> None:
        """Between sessions: let writes and prefetches go on, and take hints, until then."""
        self.pump()
        while self.engine.now_ns() < until_ns:
            self.engine.wait(min(until_ns, self.engine.now_ns() + _PATIENCE_NS))
            self.pump()

    def close(self) -> None:
        if self.hints is not None:
            self.hints.close()
        self.engine.close()
        self.device.close()

    def _place(self) -> int:
        """Move computed blocks into device blocks as far as there is room; returns how many left the queue."""
        placed = 0
        while self._computed and self._computed[0].key in self.device:
            self._computed.popleft()
            placed += 1
        run = list(islice(_leading_run(self._computed, self.device), self.device.num_blocks))
        blocks = self._room(len(run)) if run else []
        if blocks:
            run = run[: len(blocks)]
            run[0].kv.scatter(run[0].position, self.device.blocks, blocks)
            keys = [entry.key for entry in run]
            self.device.insert(keys, blocks)
            self._unstored.extend(keys)
            self._kept += len(keys)
            for _ in run:
                self._computed.popleft()
        return placed + len(blocks)

    def _offer(self) -> None:
        """Offer hot blocks that the store lacks, until it refuses one."""
        while self._unstored:
            first = [self._unstored[i] for i in range(min(_OFFER_BLOCKS, len(self._unstored)))]
            hot = [key for key in first if key in self.device]  # the others were demoted, or lost, when they left
            taken = self._offer_hot(hot)
            done = len(first) if taken == len(hot) else first.index(hot[taken])
            for _ in range(done):
                self._unstored.popleft()
            if taken < len(hot):
                return

    def _offer_hot(self, keys: Sequence[BlockKey]) -> int:
        return self.engine.offer(keys, [self.device.block(key) for key in keys]) if keys else 0

    def _give_up(self) -> None:
        """The store refuses and will go on refusing: nothing in it is under way. Forget what waits for it."""
        lost = [
            key for key, held in zip(self._unstored, self.engine.holds(list(self._unstored)), strict=True) if not held
        ]
        self._lose(len(lost) + len(self._computed), "the store takes nothing")
        self._unstored.clear()
        self._computed.clear()

    def _lose(self, blocks: int, why: str) -> None:
        self._lost += blocks
        if blocks:
            log.warning("%d blocks are not stored: %s", blocks, why)

    # ---- room on the device

    def _room(self, wanted: int) -> list[DeviceBlock]:
        """Up to `wanted` free device blocks, now the caller's. Empty only while the engine is at work."""
        while self.device.free_blocks < wanted:
            if not self._evict(wanted - self.device.free_blocks):
                break
        return self.device.take(wanted)

    def _evict(self, count: int) -> int:
        """Drop up to `count` hot blocks; returns how many went.

        A block that only the device holds is offered to the store before it goes. While the store is too busy to take
        it, blocks that are held elsewhere go in its place; it is lost only when the store has nothing under way.
        """
        orphans = self._orphans(self.device.victims(count))
        if orphans:
            taken = self._demote(orphans)
            if (
                not taken and self.engine.idle
            ):  # what kept the store busy has just ended: ask again, and then believe it
                self._demote(orphans)
            orphans = self._orphans(orphans)
        leaving = self.device.victims(count, lambda key: self.engine.holds((key,))[0])
        if not leaving and orphans and self.engine.idle:
            self._lose(len(orphans), "the store takes nothing and the device needs the room")
            leaving = orphans
        self.device.drop(leaving)
        return len(leaving)

    def _demote(self, keys: Sequence[BlockKey]) -> int:
        taken = self._offer_hot(keys)
        self._demoted += taken
        self._poll()
        return taken

    def _orphans(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        return [key for key, held in zip(keys, self.engine.holds(keys), strict=True) if not held]

    # ---- the engine's clockwork

    def _poll(self) -> None:
        if self.hints is not None:
            self.hints.drain(self.engine)
        for loaded in self.engine.poll():
            if loaded.request_id in self._late:
                self.device.give(self._late.pop(loaded.request_id))
            else:
                self._ended[loaded.request_id] = loaded.blocks

    def _step(self) -> None:
        self.engine.wait(self.engine.now_ns() + _PATIENCE_NS)
        self._poll()


def _gaps(sources: Sequence[str | None]) -> Iterator[tuple[int, int]]:
    """The unbroken runs of None, as (start, stop)."""
    start: int | None = None
    for position, source in enumerate([*sources, DEVICE]):
        if source is None and start is None:
            start = position
        elif source is not None and start is not None:
            yield start, position
            start = None


def _until_none(sources: Sequence[str | None]) -> Iterator[str]:
    for source in sources:
        if source is None:
            return
        yield source


def _leading_run(computed: Sequence[_Computed], device: PagedDeviceCache) -> Iterator[_Computed]:
    """The first entries that lie side by side in one session and are not hot."""
    first: _Computed | None = None
    for offset, entry in enumerate(computed):
        first = first or entry
        if entry.kv is not first.kv or entry.position != first.position + offset or entry.key in device:
            return
        yield entry
