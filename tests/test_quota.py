"""A tenant at its quota makes room with its own blocks, and never with another's."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from forebay.assemble import StoreConfig, open_engine
from forebay.keys import block_keys, tenant_digest
from forebay.sim.executor import SimExecutor
from forebay.sim.ghosts import GhostMemory
from forebay.testing.schedule import NAMESPACE
from forebay.types import DeviceBlock

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
