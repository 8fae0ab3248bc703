"""One workload through one cache, driven as the engine drives it.

A lookup finds the longest unbroken prefix: a block is a hit only if all blocks before it are held. Then the blocks that
are missing are computed and offered, in token order; each that is admitted takes the room of the policy's first victim,
but never that of a block of the same prompt, which is pinned meanwhile. Writes end in jobs of `_JOB_BLOCKS`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from forebay.ports import AdmissionPolicy, EvictionPolicy, SeesLookups
from forebay.types import BlockKey, TierSpec
from forebay.workloads import Workload

_JOB_BLOCKS = 32
"""Blocks a write job of the engine carries by default."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """A workload as keys."""

    name: str
    block_tokens: int
    chains: tuple[tuple[BlockKey, ...], ...]
    """Full blocks of each request."""
    prompt_tokens: int
    """Of all requests, partial blocks included."""

    @property
    def wanted_blocks(self) -> int:
        return sum(map(len, self.chains))

    @property
    def distinct_blocks(self) -> int:
        return len({key for chain in self.chains for key in chain})


@dataclass(frozen=True, slots=True)
class Score:
    hit_blocks: int
    written_blocks: int


def prompts_of(workload: Workload) -> Prompts:
    keys: dict[int, BlockKey] = {}
    chains: list[tuple[BlockKey, ...]] = []
    for arrival in workload.arrivals:
        for block in workload.full_blocks(arrival):
            if block not in keys:
                keys[block] = BlockKey(hashlib.sha256(block.to_bytes(8, "little")).digest())
        chains.append(tuple(keys[block] for block in workload.full_blocks(arrival)))
    tokens = sum(arrival.prompt_tokens for arrival in workload.arrivals)
    return Prompts(workload.name, workload.block_tokens, tuple(chains), tokens)


def replay(prompts: Prompts, cache_blocks: int, eviction: EvictionPolicy, admission: AdmissionPolicy) -> Score:
    cache = _Cache(cache_blocks, eviction, admission)
    for chain in prompts.chains:
        cache.serve(chain)
    return Score(cache.hit_blocks, cache.written_blocks)


class _Cache:
    def __init__(self, cache_blocks: int, eviction: EvictionPolicy, admission: AdmissionPolicy) -> None:
        self._eviction, self._admission = eviction, admission
        self._spec = TierSpec(name="cache", capacity_bytes=cache_blocks, stored_bytes=1, read_latency_ns=0)
        self._held: set[BlockKey] = set()
        self.hit_blocks = self.written_blocks = 0

    def serve(self, chain: Sequence[BlockKey]) -> None:
        hits = next((at for at, key in enumerate(chain) if key not in self._held), len(chain))
        self.hit_blocks += hits
        self._admission.requested(chain)
        if isinstance(self._eviction, SeesLookups):
            self._eviction.requested(chain)
        elif hits:
            self._eviction.accessed(chain[:hits])
        pinned = set(chain)
        written: list[BlockKey] = []
        for key in chain[hits:]:
            if key in self._held or not self._admission.admit(key, self._spec, len(self._held)):
                continue
            if not self._make_room(pinned):
                break
            self._held.add(key)
            written.append(key)
            if len(written) == _JOB_BLOCKS:
                self._end_job(written)
                written = []
        self._end_job(written)

    def _make_room(self, pinned: set[BlockKey]) -> bool:
        if len(self._held) < self._spec.capacity_bytes:
            return True
        victims = self._eviction.victims(1, lambda key: key not in pinned)
        self._held.difference_update(victims)
        self._eviction.removed(victims)
        return bool(victims)

    def _end_job(self, written: Sequence[BlockKey]) -> None:
        self.written_blocks += len(written)
        if written:
            self._eviction.inserted(written)
