"""One tier below memory that the host engine owns.

An engine with a host tier of its own decides what is in its DRAM and moves it to and from its device. It asks the tier
below to store blocks from that DRAM, to load blocks into it, and whether it has a block. The engine's DRAM stands where
Forebay's host pool would: a block is in the pool while a task of the engine works on it, and no longer.

    store:   keys, slots -> room (eviction) -> tier writes from the engine's memory -> published -> Ended
    load:    keys, slots -> tier reads into the engine's memory and verifies there -> Ended, with the keys that failed
    look up: index -> for what another process may have stored, a question to the tier, with a deadline
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

import msgspec

from forebay.connectors.vllm.region import RegionPool
from forebay.errors import InvariantBroken
from forebay.events import EventSink
from forebay.flow import FlowOptions
from forebay.policies.lru import LRU
from forebay.ports import AdmissionPolicy, EvictionPolicy, Executor, SeesLookups, Tier
from forebay.stage import DISPROVED, Policies, Stage
from forebay.stores import StoreLimits, Stores
from forebay.types import (
    HOST,
    BlockKey,
    Channel,
    DeviceBlock,
    Happening,
    Job,
    JobId,
    JobKind,
    JobResult,
    Outcome,
    Slot,
    Traffic,
)

log = logging.getLogger("forebay.connectors.vllm.tier")

_SAY_AGAIN_NS = 10_000_000_000
"""Between two lines about jobs that do not end."""


class ShelfOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    write_batch_blocks: int = 32
    """Blocks a write job carries at most. A load is one job, whatever its length: the tier reads it in parallel."""
    lookup_deadline_s: float = 0.25
    """How long a lookup waits for a shared tier's answer before it takes the index's word."""
    recheck_s: float = 1.0
    """How long a shared tier's "not here" is believed."""
    distrust_s: float = 10.0
    """How long a block that could not be loaded is not offered again, so that a bad one costs one recompute, and not
    one after the other."""
    full_backoff_s: float = 10.0
    """How long a tier whose medium had no room, below its own limit, is held to what it holds."""


class Presence(Enum):
    HELD = "held"
    ABSENT = "absent"
    ASKING = "asking"
    """The tier is being asked: look up again, at most until the deadline."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A task is over, and its slots are the engine's again."""

    task: int
    failed: frozenset[BlockKey]
    """Not loaded, or not stored. What their slots hold after a load is anything."""
    busy_ns: int
    """Time that its jobs took, added up."""


@dataclass(slots=True)
class _Task:
    """A store or load of the engine until its last block is through."""

    task: int
    keys: Sequence[BlockKey]
    open_blocks: int = 0
    failed: set[BlockKey] = field(default_factory=set)
    busy_ns: int = 0


@dataclass(frozen=True, slots=True)
class _Read:
    task: _Task
    pinned: frozenset[BlockKey]
    """Blocks of the job whose copy in the tier it pins."""


class _NoDevice:
    """Copies to and from the device are the engine's own business."""

    def submit(self, job: Job, blocks: Sequence[DeviceBlock]) -> None:
        raise AssertionError("a shelf copies nothing to or from a device")

    def poll(self) -> Sequence[JobResult]:
        return ()


class _Recent:
    """Keys noted within the last `keep_ns`, oldest first."""

    def __init__(self, keep_ns: int) -> None:
        self._keep_ns = keep_ns
        self._until_ns: dict[BlockKey, int] = {}

    def note(self, key: BlockKey, now_ns: int) -> None:
        self._until_ns.pop(key, None)
        self._until_ns[key] = now_ns + self._keep_ns

    def has(self, key: BlockKey, now_ns: int) -> bool:
        return self._until_ns.get(key, now_ns) > now_ns

    def forget(self, key: BlockKey) -> None:
        self._until_ns.pop(key, None)

    def prune(self, now_ns: int) -> None:
        while self._until_ns and self._until_ns[next(iter(self._until_ns))] <= now_ns:
            del self._until_ns[next(iter(self._until_ns))]


class Shelf:
    """Single-threaded: called on the engine's scheduler thread, never blocks but in `drain` and `close`."""

    def __init__(
        self,
        pool: RegionPool,
        tier: Tier,
        make_eviction: Callable[[], EvictionPolicy],
        admission: AdmissionPolicy,
        executor: Executor,
        emit: EventSink,
        options: ShelfOptions | None = None,
    ) -> None:
        """Takes the tier over, with all that it holds."""
        options = options or ShelfOptions()
        self._name, self._shared = tier.spec.name, tier.spec.shared
        eviction, ours = make_eviction(), dict[str, EvictionPolicy]()
        if tier.spec.quota_bytes is not None:
            ours[self._name] = make_eviction()
        policies = Policies({HOST: LRU(), self._name: eviction}, admission, ours)
        self._stage = Stage(pool, {self._name: tier}, policies, _NoDevice(), executor, emit, 0.0, FlowOptions())
        limits = StoreLimits(
            batch_blocks=options.write_batch_blocks,
            pool_share=1.0,
            full_backoff_ns=int(options.full_backoff_s * 1e9),
        )
        self._stores = Stores(self._stage, limits)
        self._pool, self._eviction, self._index = pool, self._stage.eviction[self._name], self._stage.index
        self._writing: dict[BlockKey, _Task] = {}
        self._reads: dict[JobId, _Read] = {}
        self._ended: list[Ended] = []
        self._deadline_ns = int(options.lookup_deadline_s * 1e9)
        self._asked: dict[BlockKey, int] = {}
        """Blocks that the tier was or will be asked about, and when its answer comes too late."""
        self._questions: list[BlockKey] = []
        """Those of them that wait for the next `ask`."""
        self._absent = _Recent(int(options.recheck_s * 1e9))
        self._distrusted = _Recent(int(options.distrust_s * 1e9))

    # --- what the engine asks for

    def look_up(self, key: BlockKey) -> Presence:
        now_ns = self._stage.now_ns()
        if self._distrusted.has(key, now_ns):
            return Presence.ABSENT
        if self._index.get(key, self._name) is not None:  # on its way in or out it is not to be had
            return Presence.HELD if self._index.is_ready(key, self._name) else Presence.ABSENT
        if not self._shared or self._absent.has(key, now_ns):
            return Presence.ABSENT
        deadline_ns = self._asked.get(key)
        if deadline_ns is None:
            self._asked[key] = now_ns + self._deadline_ns
            self._questions.append(key)
            return Presence.ASKING
        return Presence.ASKING if now_ns < deadline_ns else Presence.ABSENT

    def ask(self) -> None:
        """Put the open questions of all lookups since the last call to the tier, in one job."""
        if self._questions:
            self._stage.probe(self._name, self._questions)
            self._questions = []

    def store(self, task: int, keys: Sequence[BlockKey], slots: Sequence[Slot]) -> None:
        """Store what is in these slots. They must stay as they are until the task has ended."""
        opened = _Task(task, keys)
        fresh: list[BlockKey] = []
        for key, slot in zip(keys, slots, strict=True):
            if not (self._index.get(key, self._name) or self._index.get(key, HOST)):
                self._enter(key, slot)
                self._index.commit(key, HOST)
                fresh.append(key)
        taken = self._stores.write(self._name, fresh)
        opened.open_blocks = len(fresh)
        self._writing.update(dict.fromkeys(fresh, opened))
        self._give_up(set(fresh) - set(taken))  # an event has said why
        if not fresh:
            self._settle(opened)
        self._give_up(self._stores.advance())

    def load(self, task: int, keys: Sequence[BlockKey], slots: Sequence[Slot]) -> None:
        """Fill these slots. They are the shelf's until the task has ended."""
        opened = _Task(task, keys)
        wanted: list[BlockKey] = []
        for key, slot in zip(keys, slots, strict=True):
            if self._index.get(key, HOST):  # another task works on this block in another slot
                opened.failed.add(key)
            else:
                self._enter(key, slot)
                wanted.append(key)
        pinned = frozenset(key for key in wanted if self._index.is_ready(key, self._name))
        for key in pinned:
            self._index.pin(key, self._name)
        if wanted:
            opened.open_blocks = len(wanted)
            routes: defaultdict[int, list[BlockKey]] = defaultdict(list)
            for key in wanted:
                routes[self._stage.route(self._name, key)].append(key)
            for route, there in routes.items():
                job = self._stage.read(Channel(self._name, route), there, Traffic.DEMAND)
                self._reads[job.job_id] = _Read(opened, pinned.intersection(there))
        self._settle(opened)

    def accessed(self, keys: Iterable[BlockKey]) -> None:
        """The engine used these blocks, in token order, wherever it had them."""
        if not isinstance(self._eviction, SeesLookups):  # that hears of the whole prompt
            self._eviction.accessed(tuple(keys))

    def requested(self, prompt: Iterable[BlockKey]) -> None:
        """A request has ended that used these blocks, all of its full ones in token order."""
        keys = tuple(prompt)
        if isinstance(self._eviction, SeesLookups):
            self._eviction.requested(keys)
        else:
            self._eviction.accessed(keys)

    def happened(self) -> Mapping[Happening, int]:
        """What has happened to the tier's places, how often."""
        return self._stage.happened()

    # --- progress

    def poll(self) -> list[Ended]:
        """Apply every job that has ended; returns the tasks that are over, each once."""
        for result in self._stage.ended_jobs():
            match result.job.kind:
                case JobKind.READ:
                    self._on_read(result)
                case JobKind.WRITE:
                    self._on_written(result)
                case JobKind.PROBE if self._stores.asked(result.job.job_id):
                    self._stores.on_probed(result)
                case _:
                    self._on_answered(result)
        self._stage.apply_changes()
        self._give_up(self._stores.advance())
        now_ns = self._stage.now_ns()
        self._absent.prune(now_ns)
        self._distrusted.prune(now_ns)
        ended, self._ended = self._ended, []
        return ended

    def drain(self) -> None:
        """Block until no job is in flight. What ended meanwhile is for the next `poll`.

        However long it takes, with a line now and then: the engine reuses its memory afterwards, and a read that ends
        late would write into other blocks.
        """
        ended: list[Ended] = []
        began_ns = said_ns = self._stage.now_ns()
        while self._stage.jobs or self._stores.queued:
            self._stage.wait(self._stage.now_ns() + 1_000_000_000)
            ended += self.poll()
            now_ns = self._stage.now_ns()
            if self._stage.jobs and now_ns >= said_ns + _SAY_AGAIN_NS:
                said_ns = now_ns
                log.error(
                    "%s: %d jobs have not ended after %d s, and the engine waits for them: does its disk hang?",
                    self._name, len(self._stage.jobs), (now_ns - began_ns) // 1_000_000_000,
                )  # fmt: skip
        self._ended = ended + self._ended

    def close(self) -> None:
        """Let what was submitted end, and close the tier. Then nothing touches the engine's memory any more."""
        self._stage.close()

    @property
    def used_bytes(self) -> int:
        return self._index.used_bytes(self._name)

    @property
    def open_jobs(self) -> int:
        return len(self._stage.jobs)

    def _on_read(self, result: JobResult) -> None:
        read = self._reads.pop(result.job.job_id)
        task, now_ns = read.task, self._stage.now_ns()
        task.busy_ns += result.finished_ns - result.started_ns
        for key in result.job.keys:
            outcome = result.outcomes[key]
            self._leave(self._index.abandon(key, HOST).slot)
            if key in read.pinned:
                self._index.unpin(key, self._name)
            if outcome is not Outcome.OK:
                task.failed.add(key)
                self._distrusted.note(key, now_ns)
            if outcome in DISPROVED and self._index.is_ready(key, self._name):
                self._stage.withdraw(key, self._name, DISPROVED[outcome])
        task.open_blocks -= len(result.job.keys)
        self._settle(task)

    def _on_written(self, result: JobResult) -> None:
        self._stores.on_written(result)
        tasks = {id(task): task for task in map(self._writing.__getitem__, result.job.keys)}
        for task in tasks.values():
            task.busy_ns += result.finished_ns - result.started_ns
        for key in result.job.keys:
            if result.outcomes[key] is Outcome.OK:
                self._distrusted.forget(key)
                self._absent.forget(key)
            else:
                self._writing[key].failed.add(key)
            self._end_write(key)

    def _give_up(self, keys: Iterable[BlockKey]) -> None:
        """These blocks will not be written."""
        for key in keys:
            self._writing[key].failed.add(key)
            self._end_write(key)

    def _end_write(self, key: BlockKey) -> None:
        """The engine's slot is its own again."""
        task = self._writing.pop(key)
        self._leave(self._index.forget(key, HOST).slot)
        task.open_blocks -= 1
        self._settle(task)

    def _on_answered(self, result: JobResult) -> None:
        found: list[BlockKey] = []
        for key in result.job.keys:
            del self._asked[key]
            if self._index.get(key, self._name) is not None:  # stored meanwhile
                continue
            if result.outcomes[key] is Outcome.OK:
                self._index.adopt(key, self._name, self._stage.specs[self._name].stored_bytes)
                found.append(key)
            else:
                self._absent.note(key, self._stage.now_ns())
        self._eviction.inserted(found)

    def _settle(self, task: _Task) -> None:
        if not task.open_blocks:
            self._eviction.accessed(task.keys)  # of one order, although its jobs ended one by one
            self._ended.append(Ended(task.task, frozenset(task.failed), task.busy_ns))

    def _enter(self, key: BlockKey, slot: Slot) -> None:
        self._pool.lend(slot)
        self._stage.reserve_host(key, slot)

    def _leave(self, slot: Slot | None) -> None:
        assert slot is not None
        self._pool.give(slot)

    # --- the promises, for tests

    def check(self) -> None:
        """Raises InvariantBroken unless slots, bytes and pins add up."""
        self._index.check(self._pool.slots, self._pool.free_slots)

    def check_idle(self) -> None:
        """At rest: no slot lent, nothing pinned or half filled."""
        self.check()
        if self._stage.jobs or self._writing or self._reads or self._pool.free_slots != self._pool.slots:
            raise InvariantBroken("something is still under way")
        for key, copy in self._index.copies(self._name):
            if not self._index.is_evictable(key, self._name):
                raise InvariantBroken(f"{self._name}: {copy} left behind")
