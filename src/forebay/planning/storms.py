"""What sessions wait for their restores: the real engine and flow, under virtual time, over a modelled medium.

A block of the model stands for many of the real ones, so that a storm of hundreds of gigabytes takes a fraction of a
second; what a real block costs beside its bytes is in the rate that the medium reaches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forebay.bench.storm.simulate import ModelStorm, model_keys, model_world
from forebay.engine import Engine, EngineOptions
from forebay.events import Totals
from forebay.fairness import Order
from forebay.flow import FlowOptions
from forebay.types import BlockKey, DeviceBlock, Request

_BATCH_BLOCKS = 2
"""Small against a session, so that sharing is as fine as with real blocks."""
_PATIENCE_NS = 3_600_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Medium:
    """What a candidate comes to."""

    name: str
    bytes_per_s: float
    """Its ceiling: drives or link, whichever is less."""
    latency_s: float
    in_flight_blocks: int

    def reached_bytes_per_s(self, block_bytes: float) -> float:
        """With so many blocks in flight and no more, by Little's law."""
        one_s = self.latency_s + block_bytes / self.bytes_per_s
        return min(self.bytes_per_s, self.in_flight_blocks * block_bytes / one_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class StormSpec:
    medium: Medium
    session_bytes: int
    block_bytes: float
    sessions: int
    order: Order
    arrivals_s: tuple[float, ...] = ()
    """Of each session, in order. Empty: all at once."""


@dataclass(frozen=True, slots=True)
class StormResult:
    restored_s: tuple[float, ...]
    """Of each session: from its arrival until its KV is on the device."""


def run_storm(spec: StormSpec) -> StormResult:
    """Deterministic: the same storm gives the same times."""
    blocks = _session_blocks(spec.sessions)
    flow = FlowOptions(order=spec.order, first_depth_blocks=8, most_depth_blocks=64)
    options = EngineOptions(batch_blocks=_BATCH_BLOCKS, load_deadline_s=1e9, read_deadline_s=1e9, flow=flow)
    model = ModelStorm(
        block_bytes=max(1, spec.session_bytes // blocks),
        bytes_per_s=spec.medium.reached_bytes_per_s(spec.block_bytes),
        latency_ns=round(spec.medium.latency_s * 1e9),
        host_blocks=4 * flow.most_depth_blocks,
        engine=options,
    )
    keys = model_keys(spec.sessions, blocks)
    world = model_world(model, keys, Totals().add)
    arrivals_ns = [round(at_s * 1e9) for at_s in spec.arrivals_s] or [0] * spec.sessions
    result = _restore(world.engine, keys, arrivals_ns)
    world.engine.check_idle()
    return result


def _session_blocks(sessions: int) -> int:
    """Fine where there are few sessions, coarse where there are many."""
    return next(blocks for most, blocks in ((8, 48), (32, 24), (1 << 30, 12)) if sessions <= most)


def _restore(engine: Engine, keys: Sequence[Sequence[BlockKey]], arrivals_ns: Sequence[int]) -> StormResult:
    """Start each session when it arrives, and wait for the last one to be restored."""
    ended_ns: dict[int, int] = {}
    next_one = 0
    while len(ended_ns) < len(keys):
        while next_one < len(keys) and arrivals_ns[next_one] <= engine.now_ns():
            _start(engine, next_one, keys[next_one])
            next_one += 1
        for loaded in engine.poll():
            ended_ns[int(loaded.request_id)] = engine.now_ns()
        until_ns = arrivals_ns[next_one] if next_one < len(keys) else engine.now_ns() + _PATIENCE_NS
        if len(ended_ns) < len(keys):
            engine.wait(until_ns)
    return StormResult(tuple((ended_ns[at] - arrivals_ns[at]) / 1e9 for at in range(len(keys))))


def _start(engine: Engine, number: int, keys: Sequence[BlockKey]) -> None:
    plan = engine.plan_load(Request(str(number), tuple(keys)))
    assert plan is not None, "an unshared tier is never asked"
    engine.start_load(plan, [DeviceBlock(number * len(keys) + at) for at in range(plan.hit_blocks)])
