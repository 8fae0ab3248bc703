"""A tenant at its quota makes room with its own blocks, and never with another's."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from forebay.assemble import StoreConfig, open_engine, open_tiers
from forebay.keys import block_keys, tenant_digest
from forebay.ports import Tier
from forebay.sim.executor import SimExecutor
from forebay.sim.ghosts import GhostMemory
from forebay.testing.schedule import NAMESPACE, truth
from forebay.types import DeviceBlock, Namespace, Outcome

STORED_BYTES = 8192


def store(root: Path, tenant: str, tokens: range, quota_blocks: int) -> set[bytes]:
    """Offer one prompt's blocks one by one as this tenant; returns what files the pool has then."""
    namespace = dataclasses.replace(NAMESPACE, tenant_digest=tenant_digest(tenant))
    keys = block_keys(namespace, list(tokens))
    config = StoreConfig.embedded(
        [root], host_bytes=8 * 4096, capacity_bytes=100 * STORED_BYTES, shared=True,
        tenant_quota_bytes=quota_blocks * STORED_BYTES,
    )  # fmt: skip
    executor = SimExecutor(lambda job: 1000)
    engine = open_engine(config, namespace, lambda pool: GhostMemory(executor.now_ns), executor=executor)
    for key in keys:
        assert engine.offer([key], [DeviceBlock(0)]) == 1
        while not engine.idle:
            engine.wait(engine.now_ns() + 1_000_000)
            engine.poll()
    engine.check_idle()
    engine.close()
    return {bytes.fromhex(path.stem) for path in root.rglob("*.kv") if bytes.fromhex(path.stem) in set(keys)}


def test_a_tenant_at_its_quota_pays_with_its_own_blocks(tmp_path: Path) -> None:
    root = tmp_path / "a"
    tokens = NAMESPACE.block_tokens
    theirs = store(root, "them", range(6 * tokens), 0)
    assert len(theirs) == 6
    ours = store(root, "us", range(12 * tokens), 4)
    assert len(ours) == 4
    assert len(list(root.rglob("*.kv"))) == 10, "the other tenant keeps all of its blocks"


def test_a_quota_is_kept_by_all_stores_of_a_tenant_together(tmp_path: Path) -> None:
    """Two at once: each sees what the other has written, and only the room that is left."""
    namespace = dataclasses.replace(NAMESPACE, tenant_digest=tenant_digest("us"))
    other = dataclasses.replace(NAMESPACE, tenant_digest=tenant_digest("them"))
    root = tmp_path / "a"

    def opened(of: Namespace, quota_blocks: int) -> Tier:
        config = StoreConfig.embedded(
            [root], host_bytes=8 * 4096, capacity_bytes=100 * STORED_BYTES, shared=True,
            tenant_quota_bytes=quota_blocks * STORED_BYTES,
        )  # fmt: skip
        [tier] = open_tiers(config, of).values()
        return tier

    def write(tier: Tier, of: Namespace, tokens: range) -> list[Outcome]:
        keys = block_keys(of, list(tokens))
        return list(tier.write(keys, [memoryview(bytearray(truth(key))) for key in keys]))

    step = NAMESPACE.block_tokens
    theirs, one, two = opened(other, 0), opened(namespace, 5), opened(namespace, 5)
    assert write(theirs, other, range(6 * step)) == [Outcome.OK] * 6
    assert write(one, namespace, range(3 * step)) == [Outcome.OK] * 3
    assert write(two, namespace, range(10_000, 10_000 + 4 * step)).count(Outcome.OK) == 2
    assert write(one, namespace, range(20_000, 20_000 + step)) == [Outcome.FULL]
    one.delete(block_keys(namespace, list(range(step))))
    assert write(two, namespace, range(20_000, 20_000 + 2 * step)).count(Outcome.OK) == 1
    assert len(list(root.rglob("*.kv"))) == 6 + 5
    for tier in (theirs, one, two):
        tier.close()
