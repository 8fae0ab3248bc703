"""What the connector's tests share: tiny models, engines over tiers made by hand, tiers that misbehave."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from forebay.assemble import StoreConfig
from forebay.connectors.transformers import (
    Generation,
    LoadedModel,
    RandomWeights,
    Reuse,
    Runner,
    RunnerOptions,
    load_model,
    namespace_of,
)
from forebay.connectors.transformers.runner import device_cache
from forebay.engine import Engine, Policies
from forebay.errors import TierUnavailable
from forebay.executor import ThreadExecutor
from forebay.hostpool import HostPool
from forebay.policies.admit_all import AdmitAll
from forebay.policies.lru import LRU
from forebay.ports import Tier, View
from forebay.tiers.memory import MemoryTier
from forebay.tiers.memory import Options as MemoryOptions
from forebay.types import HOST, BlockKey, Namespace, Outcome, Stored, TierSpec

BLOCK_TOKENS = 8
CHUNK_TOKENS = 32
TINY = RandomWeights(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, vocabulary=256)
TINY_LLAMA = RandomWeights(family="llama", layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, vocabulary=256)
_loaded: dict[RandomWeights, LoadedModel] = {}


def tiny_model(source: RandomWeights = TINY) -> LoadedModel:
    """Built once a process: models are only read."""
    torch.set_num_threads(1)  # so small that a second thread only waits for the first
    if source not in _loaded:
        _loaded[source] = load_model(source)
    return _loaded[source]


def prompt(tokens: int, seed: int = 0) -> list[int]:
    """A prompt of a seed: shorter ones are prefixes of longer ones."""
    return np.random.default_rng(seed).integers(0, 256, 4096)[:tokens].tolist()


def options(device_blocks: int, namespace: Namespace, window_blocks: int = 16, **more: object) -> RunnerOptions:
    return RunnerOptions(
        device_bytes=device_blocks * namespace.block_bytes,
        chunk_tokens=CHUNK_TOKENS,
        window_bytes=window_blocks * namespace.block_bytes,
        **more,
    )


def file_runner(
    root: Path,
    loaded: LoadedModel | None = None,
    *,
    block_tokens: int = BLOCK_TOKENS,
    device_blocks: int = 64,
    host_slots: int = 64,
    capacity_blocks: int = 1000,
    hints_port: int = 0,
) -> Runner:
    """Over one file tier, as `forebay` is meant to be embedded."""
    loaded = loaded or tiny_model()
    namespace = namespace_of(loaded, block_tokens)
    slot_bytes = -(-namespace.block_bytes // 4096) * 4096
    config = StoreConfig.embedded(
        [root], host_bytes=host_slots * slot_bytes, capacity_bytes=capacity_blocks * (slot_bytes + 4096)
    )
    chunk_tokens = max(CHUNK_TOKENS, block_tokens)
    return Runner.open(
        loaded,
        namespace,
        config,
        RunnerOptions(
            device_bytes=device_blocks * namespace.block_bytes, chunk_tokens=chunk_tokens, hints_port=hints_port
        ),
    )


def runner_over(
    tiers: Sequence[Tier],
    *,
    loaded: LoadedModel | None = None,
    device_blocks: int = 64,
    host_slots: int = 64,
    **more: object,
) -> Runner:
    """Over tiers made by the test."""
    loaded = loaded or tiny_model()
    namespace = namespace_of(loaded, BLOCK_TOKENS)
    pool = HostPool(host_slots, namespace.block_bytes)
    settings = options(device_blocks, namespace, **more)
    device = device_cache(loaded, namespace, pool, settings)
    by_name = {tier.spec.name: tier for tier in tiers}
    engine = Engine(
        pool=pool,
        tiers=by_name,
        policies=Policies({name: LRU() for name in (HOST, *by_name)}, AdmitAll()),
        device=device,
        executor=ThreadExecutor(),
        emit=lambda event: None,
    )
    return Runner(loaded, namespace, engine, device, settings)


def memory_tier(blocks: int = 1000) -> MemoryTier:
    block_bytes = namespace_of(tiny_model(), BLOCK_TOKENS).block_bytes
    return MemoryTier(MemoryOptions(capacity_bytes=blocks * block_bytes), block_bytes)


def recomputed(runner: Runner, tokens: Sequence[int], new_tokens: int) -> tuple[int, ...]:
    return runner.generate(tokens, new_tokens, reuse=Reuse.OFF).tokens


def hits(generation: Generation) -> dict[str, int]:
    assert sum(generation.hit_tokens.values()) + generation.computed_tokens == generation.prompt_tokens
    return dict(generation.hit_tokens)


def make_cold(runner: Runner) -> None:
    runner.drop_device()
    runner.drop_host_copies()


def settle(runner: Runner) -> None:
    """Flush, and hold the engine to its promises at rest."""
    runner.flush()
    runner.store.engine.check_idle()


class WrappedTier:
    """A memory tier with gates before its reads and writes, and a switch that takes it away."""

    def __init__(self, tier: MemoryTier) -> None:
        self._tier = tier
        self.may_read, self.may_write = threading.Event(), threading.Event()
        self.may_read.set()
        self.may_write.set()
        self.refuses_writes = self.gone = False

    @property
    def spec(self) -> TierSpec:
        return self._tier.spec

    def contains(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        return self._tier.contains(keys)

    def read(self, keys: Sequence[BlockKey], into: Sequence[View]) -> Sequence[Outcome]:
        assert self.may_read.wait(20)
        self._check()
        return self._tier.read(keys, into)

    def write(self, keys: Sequence[BlockKey], views: Sequence[View]) -> Sequence[Outcome]:
        assert self.may_write.wait(20)
        self._check()
        if self.refuses_writes:
            return [Outcome.FAILED] * len(keys)
        return self._tier.write(keys, views)

    def delete(self, keys: Sequence[BlockKey]) -> Sequence[Outcome]:
        self._check()
        return self._tier.delete(keys)

    def scan(self) -> Iterator[Stored]:
        return self._tier.scan()

    def close(self) -> None:
        self._tier.close()

    def _check(self) -> None:
        if self.gone:
            raise TierUnavailable("unplugged")
