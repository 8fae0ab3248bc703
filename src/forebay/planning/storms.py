"""What sessions wait for: storms of the simulator (`sim.storm`), the real engine and flow under virtual time.

A block of the model stands for many of the real ones, so that a storm of hundreds of gigabytes takes a fraction of a
second; what a real block costs beside its bytes is in the rate that the medium reaches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from forebay.fairness import Order
from forebay.sim import media
from forebay.sim.host import Hosting
from forebay.sim.profiles import EngineProfile
from forebay.sim.storm import StormResult, StormSpec, run_storm

_READS_IN_FLIGHT = 8
"""Of an instance, coarse blocks: few against a session, as in life."""
_LEAST_POOL_BLOCKS = 4 * _READS_IN_FLIGHT


@dataclass(frozen=True, slots=True, kw_only=True)
class Medium:
    """What a candidate comes to."""

    name: str
    bytes_per_s: float
    """Its ceiling: drives or link, whichever is less."""
    latency_s: float
    in_flight_blocks: int
    """Most that it takes at a time."""
    parts: tuple[Medium, ...] = ()
    """Media that are used together: each reaches what it reaches alone."""
    source: str = ""

    def reached_bytes_per_s(self, block_bytes: float) -> float:
        """With so many blocks in flight and no more, by Little's law."""
        if self.parts:
            return sum(part.reached_bytes_per_s(block_bytes) for part in self.parts)
        return min(self.bytes_per_s, self.in_flight_blocks * block_bytes / self._one_s(block_bytes))

    def busy_blocks(self, block_bytes: float) -> int:
        """Blocks in flight while it delivers what it reaches, by the same law."""
        if self.parts:
            return sum(part.busy_blocks(block_bytes) for part in self.parts)
        busy = math.ceil(self.reached_bytes_per_s(block_bytes) * self._one_s(block_bytes) / block_bytes)
        return min(busy, self.in_flight_blocks)

    def _one_s(self, block_bytes: float) -> float:
        return self.latency_s + block_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Restores:
    """What is restored, from where, and what the engine computes besides."""

    medium: Medium
    profile: EngineProfile
    """KV of a token is taken from `session_bytes`, not from here."""
    session_bytes: int
    block_bytes: float
    context_tokens: int
    new_tokens: int
    instances: int = 1
    setup_s: float = 0.0
    kept_bytes: int = 0
    """Of an instance's DRAM: in it, a wave finds what the one before left there."""


def storm(restores: Restores, waves: Sequence[int], order: Order, arrivals_s: Sequence[float] = ()) -> StormResult:
    """Waves of so many sessions, one after the other, up to each session's first token. Deterministic.

    In order, an engine goes on with what has arrived. Where all share the device evenly its steps wait for all that
    was admitted to them, as those of the engines that share it so do. The medium's latency is in the rate that it
    reaches, for all blocks that others hide; the first has it to itself, once.
    """
    blocks = _session_blocks(max(waves), restores.context_tokens)
    block_tokens = restores.context_tokens // blocks
    token_bytes = max(1, round(restores.session_bytes / (blocks * block_tokens)))
    reached = restores.medium.reached_bytes_per_s(restores.block_bytes)
    medium = media.Medium(
        name=restores.medium.name, read_bytes_per_s=reached, write_bytes_per_s=reached, stream_bytes_per_s=reached,
        latency_ns=0, source="the plan's candidate",
    )  # fmt: skip
    return run_storm(
        StormSpec(
            profile=replace(restores.profile, kv_bytes_per_token=token_bytes),
            media=(medium,),
            waves=tuple(waves),
            instances=restores.instances,
            stored_tokens=blocks * block_tokens,
            new_tokens=restores.new_tokens,
            output_tokens=1,
            block_tokens=block_tokens,
            host_bytes=max(restores.kept_bytes, _LEAST_POOL_BLOCKS * block_tokens * token_bytes),
            reads_in_flight=_READS_IN_FLIGHT,
            order=order,
            hosting=Hosting.BLOCKING if order is Order.INTERLEAVED else Hosting.OVERLAPPED,
            setup_s=restores.setup_s + restores.medium.latency_s,
            arrivals_s=tuple(arrivals_s),
        )
    )


def _session_blocks(sessions: int, context_tokens: int) -> int:
    """Fine where there are few sessions, coarse where there are many."""
    blocks = next(blocks for most, blocks in ((8, 48), (32, 24), (1 << 30, 12)) if sessions <= most)
    return min(blocks, context_tokens)


def computing_nothing(profile: EngineProfile) -> EngineProfile:
    """The same engine, if its prefills took no time: what is waited for is then the restore alone."""
    return replace(profile, token_s=0.0, chunk_s=0.0)
