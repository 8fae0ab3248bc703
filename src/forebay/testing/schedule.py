"""Seeded random schedules: the real engine in virtual time over any tiers, checked against a model at every step.

The model is one function: a block's bytes follow from its key (`truth`). Whatever the schedule does (loads, cancelled
loads, stores, pins, late and failing copies, time, damage and other writers beneath the tiers), a block that a `Loaded`
counts must hold its truth on the device, no device block may be touched that is not the engine's, and the engine's own
promises (`check`, at rest `check_idle`) must hold. All is drawn from one seed, so that a failing seed is a test case.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from forebay.engine import Engine, EngineOptions
from forebay.events import Event
from forebay.hostpool import HostPool
from forebay.keys import block_keys
from forebay.policies.admit_all import AdmitAll
from forebay.policies.lrfu import LRFU
from forebay.policies.lru import LRU
from forebay.policies.prefix_aware import PrefixAware
from forebay.policies.s3fifo import S3FIFO
from forebay.ports import EvictionPolicy, Tier
from forebay.sim.executor import SimExecutor
from forebay.stage import Policies
from forebay.types import (
    HOST,
    BlockKey,
    DeviceBlock,
    Job,
    JobKind,
    JobResult,
    Loaded,
    LoadPlan,
    Namespace,
    Outcome,
    Pinned,
    Request,
)

BLOCK_BYTES = 64
NAMESPACE = Namespace(
    model="schedule",
    weights_digest="none",
    kv_dtype="uint8",
    rope="none",
    layers=1,
    kv_heads=1,
    head_dim=1,
    block_tokens=4,
    block_bytes=BLOCK_BYTES,
    layout="bytes",
)


def truth(key: BlockKey) -> bytes:
    """The bytes of a block, as if a model had computed them from its tokens."""
    return hashlib.blake2b(key, digest_size=BLOCK_BYTES).digest()


@dataclass(frozen=True, slots=True)
class Chances:
    """Probabilities of what the schedule injects itself; tier faults come from the tiers given."""

    late_copy: float = 0.3
    """A device copy that has not ended by this poll."""
    failed_copy: float = 0.02
    cancel_plan: float = 0.1
    cancel_load: float = 0.1
    hung_read: float = 0.01
    """A read job that takes a minute."""
    hung_write: float = 0.005
    """A write job that does."""
    prefetch: float = 0.05
    """A step that prefetches, or gives a prefetch up."""
    beneath: float = 0.05
    """A call of `beneath`: damage, or another process at work on a tier."""


class ModelDevice:
    """Device memory as a list of bytes, with copies that are late or fail; only blocks that are lent may be touched."""

    def __init__(self, pool: HostPool, blocks: int, chances: Chances, rng: random.Random) -> None:
        self.memory = [bytes(BLOCK_BYTES)] * blocks
        self.lent: set[DeviceBlock] = set()
        self._pool, self._chances, self._rng = pool, chances, rng
        self._running: list[tuple[Job, Sequence[DeviceBlock]]] = []

    def submit(self, job: Job, blocks: Sequence[DeviceBlock]) -> None:
        assert len(blocks) == len(job.keys) == len(job.slots)
        self._running.append((job, blocks))

    def poll(self) -> Sequence[JobResult]:
        ended: list[JobResult] = []
        late: list[tuple[Job, Sequence[DeviceBlock]]] = []
        for job, blocks in self._running:
            if self._rng.random() < self._chances.late_copy:
                late.append((job, blocks))
            else:
                ended.append(JobResult(job, self._copy(job, blocks), 0, 0))
        self._running = late
        return ended

    def busy_blocks(self) -> set[DeviceBlock]:
        return {block for _, blocks in self._running for block in blocks}

    def _copy(self, job: Job, blocks: Sequence[DeviceBlock]) -> dict[BlockKey, Outcome]:
        outcomes: dict[BlockKey, Outcome] = {}
        for key, slot, block in zip(job.keys, job.slots, blocks, strict=True):
            assert block in self.lent, "the engine touches a device block that is not its own"
            if self._rng.random() < self._chances.failed_copy:
                outcomes[key] = Outcome.FAILED
                continue
            outcomes[key] = Outcome.OK
            if job.kind is JobKind.COPY_IN:
                self.memory[block] = bytes(self._pool.view(slot)[:BLOCK_BYTES])
            else:
                self._pool.view(slot)[:BLOCK_BYTES] = self.memory[block]
        return outcomes


@dataclass(slots=True)
class Record:
    """What a schedule did; two runs of one seed have equal records."""

    log: list[str] = field(default_factory=list)
    """Every event and every `Loaded`, in order."""
    planned_blocks: int = 0
    loaded_blocks: int = 0
    cancelled_loads: int = 0
    unanswered_lookups: int = 0
    prefetched_blocks: int = 0


@dataclass(slots=True)
class _Open:
    request: Request
    blocks: list[DeviceBlock]
    cancelled: bool = False


class Schedule:
    """One random run. `beneath(rng)` is called now and then to damage what tiers hold or to act as another process."""

    def __init__(
        self,
        seed: int,
        tiers: Mapping[str, Tier],
        *,
        host_slots: int = 6,
        chances: Chances | None = None,
        beneath: Callable[[random.Random, Sequence[BlockKey]], None] = lambda rng, keys: None,
        engine_options: EngineOptions | None = None,
    ) -> None:
        self._rng = random.Random(seed)
        self._chances = chances or Chances()
        self._beneath = beneath
        self.record = Record()
        latency_ns = {name: tier.spec.read_latency_ns for name, tier in tiers.items()}
        hangs = random.Random(seed + 1)

        hung = {JobKind.READ: self._chances.hung_read, JobKind.WRITE: self._chances.hung_write}

        def cost_ns(job: Job) -> int:
            if hangs.random() < hung.get(job.kind, 0.0):
                return 60_000_000_000
            return latency_ns.get(job.tier, 1_000) + len(job.keys) * 5_000

        self._executor = SimExecutor(cost_ns)
        pool = HostPool(host_slots, BLOCK_BYTES)
        self._device = ModelDevice(pool, 256, self._chances, self._rng)
        self.engine = Engine(
            pool,
            tiers,
            Policies({place: self._policy() for place in (HOST, *tiers)}, AdmitAll()),
            self._device,
            self._executor,
            self._note,
            engine_options
            or EngineOptions(batch_blocks=3, read_deadline_s=0.5, write_deadline_s=0.5, prefetch_linger_s=0.1),
        )
        self._prompts = [self._prompt(number) for number in range(12)]
        self._open: dict[str, _Open] = {}
        self._pinned: list[Pinned] = []
        self._last_request = 0

    def _policy(self) -> EvictionPolicy:
        return self._rng.choice((LRU(), LRFU(half_life=20.0), S3FIFO(), PrefixAware()))

    def _prompt(self, number: int) -> tuple[BlockKey, ...]:
        """1 to 7 blocks; the first is one of three, so that prompts share prefixes."""
        blocks = self._rng.randrange(0, 7)
        tokens = [number % 3] * NAMESPACE.block_tokens
        tokens += [self._rng.randrange(2) for _ in range(blocks * NAMESPACE.block_tokens)]
        return block_keys(NAMESPACE, tokens)

    def _note(self, event: Event) -> None:
        self.record.log.append(repr(event))

    # --- the run

    def run(self, steps: int) -> Record:
        """`steps` random steps, then rest; raises AssertionError or InvariantBroken at the first broken promise."""
        for _ in range(steps):
            self._step()
            self.engine.check()
        self.settle()
        assert not self._open, "a started load never ended"
        self.engine.check_idle()
        self._outlast_what_hangs()
        self.engine.close()
        return self.record

    def _outlast_what_hangs(self) -> None:
        """Past every deadline no credit is out, although jobs hang; once they have ended no slot is missing."""
        self._let_pass(10 * 10**9)
        for view in self.engine.channels():
            assert not view.in_flight_blocks, f"{view.channel}: a hung read holds {view.in_flight_blocks} credits"
        self._let_pass(10_000 * 10**9)
        self.engine.check_idle()
        assert not self.engine.stranded_slots, "a slot is lost"

    def _let_pass(self, elapsed_ns: int) -> None:
        until_ns = self._executor.now_ns() + elapsed_ns
        while self._executor.now_ns() < until_ns:
            self._poll()
            self.engine.check()
            self.engine.wait(until_ns)
        self._poll()

    def _step(self) -> None:
        draw = self._rng.random()
        if draw < self._chances.beneath:
            self._beneath(self._rng, [key for prompt in self._prompts for key in prompt])
        elif draw < 0.08:
            self.engine.drop_host_copies()
        elif draw < 0.1 and self._pinned:
            self.engine.unpin(self._pinned.pop().keys)
        elif draw < 0.12:
            self._pinned.append(self.engine.pin(self._rng.choice(self._prompts)))
        elif draw < 0.45:
            self._load(self._rng.choice(self._prompts))
        elif draw < 0.7:
            self._offer(self._rng.choice(self._prompts))
        elif draw < 0.8 and self._open:
            self._cancel(self._rng.choice(sorted(self._open)))
        elif draw < 0.9:
            self._executor.wait(self._executor.now_ns() + self._rng.choice((0, 40_000, 30_000_000)))
        elif draw < 0.93:
            self.settle()
        elif draw < 0.93 + self._chances.prefetch:
            self._prefetch(self._rng.choice(self._prompts))
        self._poll()

    def _load(self, keys: tuple[BlockKey, ...]) -> None:
        self._last_request += 1
        request = Request(f"r{self._last_request}", keys)
        plan = self._plan(request)
        if plan is None:
            self.record.unanswered_lookups += 1
            self.engine.cancel_load(request.request_id)
            return
        self.engine.check()
        self.record.planned_blocks += plan.hit_blocks
        if self._rng.random() < self._chances.cancel_plan:
            self.engine.cancel_load(request.request_id)
            return
        if self._rng.random() < 0.3:
            self._poll()  # the world moves between a plan and its start
        opened = _Open(request, self._lend(plan.hit_blocks))
        self._open[request.request_id] = opened
        self.engine.start_load(plan, opened.blocks)

    def _prefetch(self, keys: tuple[BlockKey, ...]) -> None:
        """For the request after the next few, or for none at all."""
        request_id = f"r{self._last_request + self._rng.randrange(1, 4)}"
        if self._rng.random() < 0.2:
            self.engine.cancel_prefetch(request_id)
        else:
            expected_ns = self._executor.now_ns() + self._rng.choice((0, 1_000_000, 100_000_000))
            self.record.prefetched_blocks += self.engine.prefetch(Request(request_id, keys), expected_ns)

    def _plan(self, request: Request) -> LoadPlan | None:
        """Ask until there is an answer, sometimes not for long enough."""
        for _ in range(self._rng.randrange(1, 60)):
            plan = self.engine.plan_load(request)
            if plan is not None:
                return plan
            self.engine.wait(self._executor.now_ns() + 5_000_000)
            self._poll()
        return None

    def _offer(self, keys: tuple[BlockKey, ...]) -> None:
        blocks = self._lend(len(keys))
        for key, block in zip(keys, blocks, strict=True):
            self._device.memory[block] = truth(key)
        taken = self.engine.offer(keys, blocks)
        assert 0 <= taken <= len(keys)
        self._give_back(blocks)

    def _cancel(self, request_id: str) -> None:
        if self._rng.random() < self._chances.cancel_load:
            self._open[request_id].cancelled = True
            self.record.cancelled_loads += 1
            self.engine.cancel_load(request_id)

    def _poll(self) -> None:
        for loaded in self.engine.poll():
            self._on_loaded(loaded)

    def _on_loaded(self, loaded: Loaded) -> None:
        opened = self._open.pop(loaded.request_id)
        self.record.log.append(repr(loaded))
        self.record.loaded_blocks += loaded.blocks
        assert loaded.blocks == 0 or not opened.cancelled, "a cancelled load counts blocks"
        for key, block in zip(opened.request.keys, opened.blocks[: loaded.blocks], strict=False):
            assert self._device.memory[block] == truth(key), f"wrong bytes on the device for {key.hex()}"
        assert not set(opened.blocks) & self._device.busy_blocks(), "the load has ended and still copies"
        self._device.lent.difference_update(opened.blocks)

    def settle(self) -> None:
        """Let everything that was started end."""
        for _ in range(10_000):
            self._poll()
            self.engine.check()
            if self.engine.idle:
                return
            self.engine.wait(self._executor.now_ns() + 1_000_000_000)
        raise AssertionError("the engine does not come to rest")

    # --- device blocks

    def _lend(self, count: int) -> list[DeviceBlock]:
        free = [DeviceBlock(i) for i in range(len(self._device.memory)) if i not in self._device.lent]
        blocks = self._rng.sample(free, count)
        self._device.lent.update(blocks)
        for block in blocks:
            self._device.memory[block] = bytes(BLOCK_BYTES)
        return blocks

    def _give_back(self, blocks: Sequence[DeviceBlock]) -> None:
        """Blocks of an offer return as soon as no copy reads them."""
        while set(blocks) & self._device.busy_blocks():
            self._poll()
        self._device.lent.difference_update(blocks)
