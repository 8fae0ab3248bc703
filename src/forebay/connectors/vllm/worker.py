"""A worker's side of one part: its engine, over its own pages and its own share of the pool.

    load:    asked (the engine looks where the blocks are) --> started --> ended, and vLLM hears which blocks failed
    store:   waiting (no host slot yet) --> being copied out --> released: its device blocks are vLLM's again

Called on the worker's thread, several times a step. A bug of ours must not reach vLLM: after one, every open load has
failed, every store is released, and from then on nothing is loaded or stored.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from forebay.connectors.vllm.wire import Load, StepPlan, Store, WorkerReport
from forebay.engine import Engine
from forebay.keys import derived_key
from forebay.types import BlockKey, DeviceBlock, Extent, Request

log = logging.getLogger("forebay.connectors.vllm")

_OFFER_BLOCKS = 32
_LINGER_NS = 1_000_000


class CopyingOut(Protocol):
    """What this side needs of the device port, beyond what the engine does."""

    def is_copying_out(self, block: DeviceBlock) -> bool: ...

    def drain(self) -> None: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class _OpenLoad:
    load: Load
    keys: tuple[BlockKey, ...]
    started: bool = False
    cancelled: bool = False
    since_ns: int = 0


@dataclass(slots=True)
class _OpenStore:
    store: Store
    keys: tuple[BlockKey, ...]
    blocks: tuple[DeviceBlock, ...]
    offered: int = 0


@dataclass(frozen=True, slots=True)
class EndedLoads:
    request_ids: frozenset[str]
    failed_blocks: frozenset[int]
    """Device blocks that hold anything: vLLM has to compute them."""


class WorkerSide:
    def __init__(
        self,
        engine: Engine,
        device: CopyingOut,
        root: BlockKey,
        forget_stored: Callable[[], None],
        drain_s: float,
    ) -> None:
        """Takes engine and device over. `forget_stored` deletes what the pool holds of this namespace; it is called on
        a thread of its own."""
        self._engine, self._device, self._root = engine, device, root
        self._forget_stored, self._drain_s = forget_stored, drain_s
        self._loads: dict[str, _OpenLoad] = {}
        """By number, which is the engine's request id."""
        self._waiting: deque[_OpenStore] = deque()
        self._copying: list[_OpenStore] = []
        self._released: dict[int, int] = {}
        self._asked_to_forget, self._forgetting, self._forgotten = 0, 0, 0
        """How often: not begun, under way, and done but not reported."""
        self._forget_by_ns = 0
        self._deleting: threading.Thread | None = None
        self._ended_requests: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._broken = False
        self.loads, self.loads_cut_short = 0, 0
        self._load_seconds: list[float] = []

    # --- a step, in this order

    def begin(self, plan: StepPlan) -> None:
        """Start what the scheduler's side has planned; called when the model's own work has been queued."""
        if not self._guarded(lambda: self._begin(plan)):
            self._refuse(plan)

    def offer_stores(self) -> None:
        """Give the engine what it takes of the blocks that wait for it."""
        self._guarded(self._offer)

    def poll(self) -> None:
        self._guarded(self._poll)

    def linger(self) -> None:
        """Wait a moment for something to happen, in a step in which the model has nothing to do."""
        self._guarded(lambda: self._engine.wait(self._engine.now_ns() + _LINGER_NS))

    def take_ended_loads(self) -> EndedLoads:
        ended = EndedLoads(frozenset(self._ended_requests), frozenset(self._failed_blocks))
        self._ended_requests.clear()
        self._failed_blocks.clear()
        return ended

    def take_report(self) -> WorkerReport | None:
        if not (self._released or self._forgotten or self._broken):
            return None
        report = WorkerReport(self._released, self._forgotten, self._broken)
        self._released, self._forgotten = {}, 0
        return report

    def take_load_seconds(self) -> list[float]:
        seconds, self._load_seconds = self._load_seconds, []
        return seconds

    @property
    def is_broken(self) -> bool:
        return self._broken

    @property
    def open_loads(self) -> int:
        return len(self._loads)

    @property
    def open_stores(self) -> int:
        return len(self._waiting) + len(self._copying)

    @property
    def forgets(self) -> bool:
        """Whether what the pool holds is about to be deleted, or being deleted: until then nothing is stored."""
        return bool(self._asked_to_forget or self._forgetting)

    def close(self) -> None:
        """Wait a while for blocks on their way to the pool, and close the engine."""
        try:
            if not self._broken:
                self._settle(self._drain_s)
        except Exception:
            log.exception("what was on its way to the pool is lost")
        self._device.close()
        self._engine.close()

    # --- how

    def _begin(self, plan: StepPlan) -> None:
        if plan.forget:
            self._forget()
        for number in plan.revoked:
            self._revoke(number)
        for prompt in plan.prompts:
            self._engine.announce(self._keys(prompt))
        for load in plan.loads:
            keys = self._keys(load.prefix)
            self._loads[str(load.number)] = _OpenLoad(load, keys, since_ns=self._engine.now_ns())
        for number in plan.cancelled:
            self._cancel(str(number))
        for store in plan.stores:
            self._waiting.append(self._open_store(store))
        self._start_loads()

    def _open_store(self, store: Store) -> _OpenStore:
        """Of a store, what is worth offering: what is not held, and what somebody looked for and did not find."""
        keys = self._keys(store.prefix)
        self._engine.distrust(keys[store.absent_from :])
        held = self._engine.holds(keys)
        wanted = [i for i in range(len(keys)) if i >= store.absent_from or not held[i]]
        return _OpenStore(store, tuple(keys[i] for i in wanted), tuple(DeviceBlock(store.blocks[i]) for i in wanted))

    def _start_loads(self) -> None:
        for number, open_load in list(self._loads.items()):
            if open_load.started:
                continue
            request = Request(number, open_load.keys, announced=True, extent=Extent.STORED)  # vLLM has settled it
            plan = self._engine.plan_load(request)
            if plan is None:
                continue  # the tiers are being asked
            if plan.hit_blocks == 0:
                self._end_load(number, 0)
                continue
            open_load.started = True
            self._engine.start_load(plan, [DeviceBlock(block) for block in open_load.load.blocks])

    def _cancel(self, number: str) -> None:
        open_load = self._loads.get(number)
        if open_load is None:
            return  # it has ended meanwhile
        open_load.cancelled = True
        self._engine.cancel_load(number)
        if not open_load.started:
            self._end_load(number, 0)

    def _end_load(self, number: str, loaded_blocks: int) -> None:
        open_load = self._loads.pop(number)
        load = open_load.load
        self._ended_requests.add(load.request_id)
        if open_load.cancelled:
            return
        self.loads += 1
        self._load_seconds.append((self._engine.now_ns() - open_load.since_ns) / 1e9)
        if loaded_blocks < len(load.blocks):
            self.loads_cut_short += 1
            self._failed_blocks.update(load.blocks[loaded_blocks:])
            log.warning(
                "request %s: %d of %d blocks were loaded, the rest is computed",
                load.request_id, loaded_blocks, len(load.blocks),
            )  # fmt: skip

    def _offer(self) -> None:
        while self._waiting and not self.forgets:
            store = self._waiting[0]
            while store.offered < len(store.keys):
                batch = slice(store.offered, store.offered + _OFFER_BLOCKS)
                taken = self._engine.offer(store.keys[batch], store.blocks[batch], again=True)
                store.offered += taken
                if taken < len(store.keys[batch]):
                    return  # no slot is free: again in the next step
            self._copying.append(self._waiting.popleft())

    def _revoke(self, number: int) -> None:
        for store in self._waiting:
            if store.store.number == number:
                self._waiting.remove(store)
                self._drop_rest(store)
                return

    def _drop_rest(self, store: _OpenStore) -> None:
        """Of a store that waits only what is being copied goes on."""
        self._engine.give_up(len(store.keys) - store.offered)
        self._copying.append(store)

    def _forget(self) -> None:
        """Store no more of what was computed before, and delete what was stored, once nothing is on its way there."""
        while self._waiting:
            self._drop_rest(self._waiting.popleft())
        self._asked_to_forget += 1
        self._forget_by_ns = self._engine.now_ns() + int(self._drain_s * 1e9)

    def _advance_forgetting(self) -> None:
        if self._deleting is not None and not self._deleting.is_alive():
            self._forgotten += self._forgetting
            self._forgetting, self._deleting = 0, None
        if self._deleting is not None or not self._asked_to_forget:
            return
        if self._engine.idle or self._engine.now_ns() >= self._forget_by_ns:
            self._start_deleting()

    def _start_deleting(self) -> None:
        self._forgetting, self._asked_to_forget = self._forgetting + self._asked_to_forget, 0
        self._deleting = threading.Thread(target=self._forget_stored, name="forebay-forget", daemon=True)
        self._deleting.start()

    def _poll(self) -> None:
        for loaded in self._engine.poll():
            self._end_load(loaded.request_id, loaded.blocks)
        self._start_loads()
        still: list[_OpenStore] = []
        for store in self._copying:
            if any(self._device.is_copying_out(block) for block in store.blocks[: store.offered]):
                still.append(store)
            else:
                self._release(store.store.number)
        self._copying = still
        self._advance_forgetting()

    def _release(self, number: int) -> None:
        self._released[number] = 1

    def _settle(self, seconds: float) -> None:
        """Finish what is under way, at most for so long."""
        until_ns = self._engine.now_ns() + int(seconds * 1e9)
        while self._engine.now_ns() < until_ns:
            self._offer()
            self._poll()
            if self._engine.idle and not (self._waiting or self._copying or self._loads or self.forgets):
                return
            self._engine.wait(min(until_ns, self._engine.now_ns() + 10 * _LINGER_NS))
        if self.forgets:
            log.warning("what was to be forgotten is not all deleted after %.0f s: other engines may find it", seconds)
        else:
            log.warning("blocks are still on their way to the pool after %.0f s: they may be lost", seconds)

    def _keys(self, prefix: Sequence[bytes]) -> tuple[BlockKey, ...]:
        return tuple(derived_key(self._root, prefix_hash) for prefix_hash in prefix)

    # --- bugs

    def _guarded(self, action: Callable[[], None]) -> bool:
        """Whether all is well after it."""
        if self._broken:
            return False
        try:
            action()
        except Exception:
            log.exception("Forebay has a bug: it stops, and everything is computed from now on")
            self._break()
        return not self._broken

    def _break(self) -> None:
        """Once no copy is in flight, every device block of ours is vLLM's again."""
        self._broken = True
        try:
            self._device.drain()
        except Exception:
            log.exception("the device does not say whether copies are in flight")
        for open_load in self._loads.values():
            self._fail(open_load.load, cancelled=open_load.cancelled)
        self._loads.clear()
        for store in (*self._waiting, *self._copying):
            self._release(store.store.number)
        self._waiting.clear()
        self._copying.clear()
        if self.forgets:
            self._forget_at_once()

    def _forget_at_once(self) -> None:
        """Nothing is stored any more: delete, and have nobody wait for it."""
        self._start_deleting()
        self._forgotten += self._forgetting
        self._forgetting = 0

    def _refuse(self, plan: StepPlan) -> None:
        """What a broken worker answers: no load succeeds, every store is done with."""
        for load in plan.loads:
            self._fail(load, cancelled=load.number in plan.cancelled)
        for store in plan.stores:
            self._release(store.number)
        if plan.forget:
            self._asked_to_forget += 1
            self._forget_at_once()

    def _fail(self, load: Load, *, cancelled: bool) -> None:
        self._ended_requests.add(load.request_id)
        if not cancelled:
            self._failed_blocks.update(load.blocks)
