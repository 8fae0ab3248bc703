"""Storms at the scale of published ones: the real engine under virtual time, over a modelled device.

A block of a few bytes stands for one of many megabytes, and the device's bandwidth is scaled alike: so all times are
those of the full size, and nothing has to hold terabytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from forebay.bench.progress import Progress, Silence
from forebay.bench.storm.device import Stamp, StampDevice
from forebay.bench.storm.published import CELLS, CHUNK_BYTES, SESSION_BYTES, Cell
from forebay.bench.storm.results import LABELS, Storm, Wave, storm_of
from forebay.bench.storm.wave import restore
from forebay.engine import Engine, EngineOptions
from forebay.events import EventSink, Totals
from forebay.fairness import Order
from forebay.hostpool import HostPool
from forebay.policies.admit_all import AdmitAll
from forebay.policies.lru import LRU
from forebay.sim.device import DeviceModel
from forebay.sim.executor import SimExecutor
from forebay.stage import Policies
from forebay.tiers.memory import MemoryTier, Options
from forebay.types import HOST, BlockKey

MODEL_BLOCK_BYTES = 64
"""What stands for a block of any length."""
TIER = "disk"
_LATENCY_NS = 200_000
"""Of one read of an NVMe device, with what the network adds."""


class ModelStorm(msgspec.Struct, frozen=True, kw_only=True):
    """What is simulated. Bytes and rates are those of the full size."""

    block_bytes: int
    bytes_per_s: float
    latency_ns: int = _LATENCY_NS
    queue_depth: int = 256
    host_blocks: int
    engine: EngineOptions = EngineOptions()

    @property
    def device(self) -> DeviceModel:
        """In the scale of the blocks that stand for the real ones."""
        scaled = self.bytes_per_s * MODEL_BLOCK_BYTES / self.block_bytes
        return DeviceModel(
            read_bytes_per_s=scaled,
            write_bytes_per_s=scaled,
            latency_ns=self.latency_ns,
            queue_depth=self.queue_depth,
        )


@dataclass(frozen=True, slots=True)
class ModelWorld:
    engine: Engine
    executor: SimExecutor
    device: StampDevice
    pool: HostPool


def model_world(storm: ModelStorm, held: Sequence[Sequence[BlockKey]], emit: EventSink) -> ModelWorld:
    """An engine at time 0 whose one tier holds these sessions."""
    blocks = sum(map(len, held))
    tier = MemoryTier(Options(capacity_bytes=(2 * blocks + 64) * MODEL_BLOCK_BYTES, name=TIER), MODEL_BLOCK_BYTES)
    pool = HostPool(storm.host_blocks, MODEL_BLOCK_BYTES)
    stamp, view = Stamp(pool.slot_bytes), memoryview(bytearray(pool.slot_bytes))
    for keys in held:
        for key in keys:
            stamp.fill(view, key)
            tier.write((key,), (view,))
    executor = SimExecutor(lambda job: 0, {TIER: storm.device})
    device = StampDevice(pool, executor.now_ns)
    policies = Policies({HOST: LRU(), TIER: LRU()}, AdmitAll())
    engine = Engine(pool, {TIER: tier}, policies, device, executor, emit, storm.engine)
    return ModelWorld(engine, executor, device, pool)


def model_keys(sessions: int, blocks: int) -> tuple[tuple[BlockKey, ...], ...]:
    """Distinct keys of sessions of so many blocks each."""
    return tuple(
        tuple(BlockKey(position.to_bytes(8) + number.to_bytes(24)) for position in range(blocks))
        for number in range(1, sessions + 1)
    )


def model_wave(storm: ModelStorm, order: Order, sessions: Sequence[Sequence[BlockKey]]) -> Wave:
    """One storm in one order. At its end the engine is at rest and every slot is free or evictable, or it raises."""
    engine = msgspec.structs.replace(
        storm.engine, flow=msgspec.structs.replace(storm.engine.flow, order=order), load_deadline_s=3600.0
    )
    world = model_world(msgspec.structs.replace(storm, engine=engine), sessions, Totals().add)
    restored = restore(world.engine, sessions)
    world.engine.check_idle()
    return Wave(
        order=order, round=1, restored_bytes=restored.blocks * storm.block_bytes, ttft_s=restored.ttft_s
    )  # fmt: skip


class Implied(msgspec.Struct, frozen=True, kw_only=True):
    """A published cell, the same storm simulated in both orders, and what that makes of the cell."""

    medium: str
    bytes_per_s: float
    sessions: int
    published_p50_s: float
    storm: Storm
    implied_p50_s: float
    """The published p50 times the ratio of the simulated ones. What is no transfer is taken to shrink alike."""
    implied_mean_s: float


def steps() -> int:
    return len(CELLS) * len(LABELS)


def simulate(host_bytes: int, progress: Progress | None = None) -> tuple[Implied, ...]:
    """The published cells, each in both orders, with a host pool of so many bytes."""
    return tuple(_simulate_cell(cell, host_bytes, progress or Silence()) for cell in CELLS)


def _simulate_cell(cell: Cell, host_bytes: int, progress: Progress) -> Implied:
    blocks = SESSION_BYTES // CHUNK_BYTES
    model = ModelStorm(
        block_bytes=CHUNK_BYTES, bytes_per_s=cell.medium.bytes_per_s, host_blocks=max(16, host_bytes // CHUNK_BYTES)
    )
    sessions = model_keys(cell.sessions, blocks)
    waves = []
    for order in LABELS:
        progress.begins(f"{cell.sessions} sessions, {cell.medium.name}, {LABELS[order]}")
        waves.append(model_wave(model, order, sessions))
        progress.ended(f"{cell.sessions} sessions, {cell.medium.name}, {LABELS[order]}: {waves[-1].whole_s:.2f} s")
    storm = storm_of([blocks] * cell.sessions, waves)
    return Implied(
        medium=cell.medium.name,
        bytes_per_s=cell.medium.bytes_per_s,
        sessions=cell.sessions,
        published_p50_s=cell.ttft_p50_s,
        storm=storm,
        implied_p50_s=cell.ttft_p50_s * storm.comparison.p50,
        implied_mean_s=cell.ttft_p50_s * storm.comparison.mean,
    )
