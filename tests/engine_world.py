"""A small world around the real engine in virtual time: memory tiers, a device that is a list of bytes, a clock."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from forebay.engine import Engine, EngineOptions
from forebay.events import Event, JobEnded
from forebay.hostpool import HostPool
from forebay.keys import block_keys
from forebay.policies.admit_all import AdmitAll
from forebay.policies.lru import LRU
from forebay.ports import Tier
from forebay.sim.executor import SimExecutor
from forebay.stage import Policies
from forebay.testing.schedule import BLOCK_BYTES, NAMESPACE, Chances, ModelDevice, truth
from forebay.tiers import memory
from forebay.types import HOST, BlockKey, DeviceBlock, JobKind, Loaded, LoadPlan, Request

SECOND_NS = 1_000_000_000
PROMPT = block_keys(NAMESPACE, list(range(40 * NAMESPACE.block_tokens)))
"""40 blocks."""


@dataclass
class World:
    engine: Engine
    device: ModelDevice
    executor: SimExecutor
    tiers: dict[str, memory.MemoryTier]
    events: list[Event] = field(default_factory=list)
    ended: list[Loaded] = field(default_factory=list)

    def settle(self) -> list[Loaded]:
        """Run until nothing is under way; returns the loads that ended, since the last call."""
        for _ in range(10_000):
            self.ended += self.engine.poll()
            self.engine.check()
            if self.engine.idle:
                ended, self.ended = self.ended, []
                return ended
            self.engine.wait(self.executor.now_ns() + SECOND_NS)
        raise AssertionError("the engine does not come to rest")

    def run_until(self, until_ns: int) -> None:
        """Let this much time pass; the loads that end are in `ended`."""
        while self.executor.now_ns() < until_ns:
            self.ended += self.engine.poll()
            self.engine.check()
            self.engine.wait(until_ns)
        self.ended += self.engine.poll()

    def store(self, keys: Sequence[BlockKey]) -> None:
        """Offer blocks from device blocks 100 and up until all are taken and written."""
        blocks = self.lend(100, len(keys))
        for key, block in zip(keys, blocks, strict=True):
            self.device.memory[block] = truth(key)
        offered = 0
        while offered < len(keys):
            offered += self.engine.offer(keys[offered:], blocks[offered:])
            self.settle()

    def lend(self, start: int, count: int) -> list[DeviceBlock]:
        blocks = [DeviceBlock(start + i) for i in range(count)]
        self.device.lent.update(blocks)
        for block in blocks:
            self.device.memory[block] = bytes(BLOCK_BYTES)
        return blocks

    def plan(self, name: str, keys: Sequence[BlockKey]) -> LoadPlan:
        plan = self.engine.plan_load(Request(name, tuple(keys)))
        assert plan is not None
        return plan

    def load(self, name: str, keys: Sequence[BlockKey]) -> int:
        """Blocks that a load brings, each checked on the device."""
        plan = self.plan(name, keys)
        blocks = self.lend(0, plan.hit_blocks)
        self.engine.start_load(plan, blocks)
        (loaded,) = self.settle()
        assert loaded.request_id == name
        for key, block in zip(keys[: loaded.blocks], blocks, strict=False):
            assert self.device.memory[block] == truth(key)
        return loaded.blocks

    def count(self, kind: JobKind, tier: str) -> int:
        jobs = [event.job for event in self.events if isinstance(event, JobEnded)]
        return sum(len(job.keys) for job in jobs if job.kind is kind and job.tier == tier)


def make_world(
    *,
    slots: int = 64,
    tiers: dict[str, int] | None = None,
    wrap: Callable[[Tier], Tier] = lambda tier: tier,
    shared: tuple[str, ...] = (),
    options: EngineOptions | None = None,
) -> World:
    """`tiers`: capacity in blocks by name, from fast to slow."""
    held: dict[str, memory.MemoryTier] = {}
    for position, (name, blocks) in enumerate((tiers or {"disk": 1000}).items()):
        capacity_bytes, latency_ns = blocks * BLOCK_BYTES, 100_000 * (position + 1)
        tier_options = memory.Options(name=name, capacity_bytes=capacity_bytes, read_latency_ns=latency_ns)
        held[name] = memory.MemoryTier(tier_options, BLOCK_BYTES)
        held[name].spec = dataclasses.replace(held[name].spec, shared=name in shared)
    pool = HostPool(slots, BLOCK_BYTES)
    device = ModelDevice(pool, 200, Chances(late_copy=0.0, failed_copy=0.0), random.Random(0))
    executor = SimExecutor(lambda job: 100_000 + len(job.keys) * 10_000)
    events: list[Event] = []
    engine = Engine(
        pool,
        {name: wrap(tier) for name, tier in held.items()},
        Policies({place: LRU() for place in (HOST, *held)}, AdmitAll()),
        device,
        executor,
        events.append,
        options or EngineOptions(batch_blocks=4),
    )
    return World(engine, device, executor, held, events)
