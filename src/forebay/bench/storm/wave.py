"""The two halves of a storm, over any engine and any clock: blocks go in, and all sessions come back at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forebay.engine import Engine
from forebay.errors import ConfigError
from forebay.types import BlockKey, DeviceBlock, Request

_PATIENCE_NS = 50_000_000
_OFFER_BLOCKS = 64
_SILENCE_LIMIT_NS = 120_000_000_000
"""Past it nothing has moved for so long that the disk must be gone."""


@dataclass(frozen=True, slots=True)
class Restored:
    ttft_s: tuple[float, ...]
    """Of each session: from the beginning until it was restored."""
    blocks: int
    """Restored, over all sessions."""


def restore(engine: Engine, sessions: Sequence[Sequence[BlockKey]]) -> Restored:
    """Want all sessions at once, and wait for the last. Raises ConfigError when nothing moves for two minutes."""
    began_ns = last_ns = engine.now_ns()
    start_all(engine, {str(number): keys for number, keys in enumerate(sessions)})
    ended_ns: dict[str, int] = {}
    blocks = 0
    while len(ended_ns) < len(sessions):
        for loaded in engine.poll():
            ended_ns[loaded.request_id] = last_ns = engine.now_ns()
            blocks += loaded.blocks
        if engine.now_ns() - last_ns > _SILENCE_LIMIT_NS:
            raise ConfigError("no session was restored for two minutes: ask for shorter ones, or look at the disk")
        if len(ended_ns) < len(sessions):
            engine.wait(engine.now_ns() + _PATIENCE_NS)
    return Restored(tuple((ended_ns[str(number)] - began_ns) / 1e9 for number in range(len(sessions))), blocks)


def start_all(engine: Engine, sessions: dict[str, Sequence[BlockKey]]) -> None:
    """Plan and start a load for each session, all planned before the first is started. For tiers of one process."""
    plans = [engine.plan_load(Request(name, tuple(keys))) for name, keys in sessions.items()]
    first_block = 0
    for plan in plans:
        assert plan is not None, "an unshared tier is never asked"
        engine.start_load(plan, [DeviceBlock(first_block + i) for i in range(plan.hit_blocks)])
        first_block += plan.hit_blocks


def store(engine: Engine, keys: Sequence[BlockKey]) -> None:
    """Offer blocks until all are written. Raises ConfigError when they are not taken for two minutes."""
    offered, moved_ns = 0, engine.now_ns()
    while offered < len(keys) or not engine.idle:
        engine.poll()
        if offered < len(keys):
            taken = engine.offer(
                keys[offered : offered + _OFFER_BLOCKS], [DeviceBlock(i) for i in range(_OFFER_BLOCKS)]
            )
            offered += taken
            moved_ns = engine.now_ns() if taken else moved_ns
        if engine.now_ns() - moved_ns > _SILENCE_LIMIT_NS:
            raise ConfigError("the pool has taken no block for two minutes: is the disk full?")
        engine.wait(engine.now_ns() + _PATIENCE_NS)
