"""Blocks that go by a scrub, a command or a read: the count stays true, and every engine on the pool learns of it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from file_tier_kit import BLOCK_BYTES, block_file, flip, open_tier

from forebay.assemble import StoreConfig, open_engine
from forebay.engine import Engine
from forebay.keys import block_keys, namespace_key
from forebay.sim.executor import SimExecutor
from forebay.sim.ghosts import GhostMemory
from forebay.testing.schedule import NAMESPACE
from forebay.testing.tier_contract import get, key_of, put
from forebay.tiers.file import FileTier, admin
from forebay.types import BlockKey, ChangeKind, DeviceBlock, Outcome, Request

STORED_BYTES = 8192
CAPACITY_BLOCKS = 8
KEYS = block_keys(NAMESPACE, list(range(20 * NAMESPACE.block_tokens)))
DAMAGED, OLD = KEYS[0], KEYS[1]


class Store:
    """An engine over one root, of 8 blocks at most, with so few host slots that blocks do not stay there."""

    def __init__(self, root: Path, **options: object) -> None:
        config = StoreConfig.embedded(
            [root], host_bytes=4 * 4096, capacity_bytes=CAPACITY_BLOCKS * STORED_BYTES, **options
        )
        self.root = root
        executor = SimExecutor(lambda job: 1000)
        self.engine: Engine = open_engine(
            config, NAMESPACE, lambda pool: GhostMemory(executor.now_ns), executor=executor
        )
        tier = self.engine._stage.tiers["file"]
        assert isinstance(tier, FileTier)
        self.tier = tier

    def settle(self) -> None:
        while True:
            self.engine.poll()
            self.engine.check()
            if self.engine.idle:
                return
            self.engine.wait(self.engine.now_ns() + 1_000_000)

    def store(self, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            assert self.engine.offer([key], [DeviceBlock(0)]) == 1
            self.settle()
        self.engine.drop_host_copies()

    def load(self, keys: Sequence[BlockKey]) -> int:
        while (plan := self.engine.plan_load(Request("request", tuple(keys)))) is None:
            self.settle()
        self.engine.start_load(plan, [DeviceBlock(i) for i in range(plan.hit_blocks)])
        ended = []
        while not ended:
            ended = self.engine.poll()
            self.engine.wait(self.engine.now_ns() + 1_000_000)
        self.settle()
        self.engine.drop_host_copies()
        return ended[0].blocks

    def files(self) -> set[bytes]:
        return {bytes.fromhex(path.stem) for path in self.root.rglob("*.kv")}

    def check(self) -> None:
        """Files, catalogue and index agree."""
        files = self.files()
        assert {key for key in KEYS if self.engine.holds([key])[0]} == files
        assert self.tier.used_bytes == self.engine._index.used_bytes("file") == len(files) * STORED_BYTES
        self.engine.check_idle()


def path_of(root: Path, key: BlockKey) -> Path:
    return root / namespace_key(NAMESPACE).hex() / key.hex()[:2] / f"{key.hex()}.kv"


def scrub(root: Path) -> None:
    admin.scrub([root], admin.ScrubLimits(bytes_per_s=1e12, ttl_s=1e6), afresh=True)


def verify(root: Path) -> None:
    admin.verify([root])


def gc(root: Path) -> None:
    admin.gc([root], admin.GcLimits(now_unix_s=1e9, ttl_s=1e6, quarantine_s=1e9))


def purge(root: Path) -> None:
    admin.purge([root])


COMMANDS: dict[Callable[[Path], None], set[BlockKey]] = {
    scrub: {DAMAGED, OLD},
    verify: {DAMAGED},
    gc: {OLD},
    purge: set(KEYS[:CAPACITY_BLOCKS]),
}
"""What each takes out of the pool."""


def here(command: Callable[[Path], None], root: Path) -> None:
    command(root)


def elsewhere(command: Callable[[Path], None], root: Path) -> None:
    child = os.fork()
    if child == 0:
        try:
            command(root)
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("where", [here, elsewhere])
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("shared", [False, True])
def test_an_open_store_learns_what_a_command_removed(
    tmp_path: Path, shared: bool, command: Callable[[Path], None], where: Callable[..., None]
) -> None:
    store = Store(tmp_path / "a", shared=shared)
    store.store(KEYS[:CAPACITY_BLOCKS])
    store.check()
    flip(path_of(store.root, DAMAGED), 4096)
    os.utime(path_of(store.root, OLD), (1, 1))
    where(command, store.root)
    left = set(KEYS[:CAPACITY_BLOCKS]) - COMMANDS[command]
    assert store.files() == left
    assert store.tier.used_bytes == len(left) * STORED_BYTES
    store.settle()
    store.check()
    fresh = KEYS[CAPACITY_BLOCKS : CAPACITY_BLOCKS + len(COMMANDS[command])]
    store.store(fresh)
    assert store.files() == left | set(fresh), "the room is used, and nothing else had to go for it"
    store.check()
    store.engine.close()


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_on_a_pool_that_nobody_has_open(tmp_path: Path, command: Callable[[Path], None]) -> None:
    store = Store(tmp_path / "a")
    store.store(KEYS[:CAPACITY_BLOCKS])
    store.engine.close()
    flip(path_of(store.root, DAMAGED), 4096)
    os.utime(path_of(store.root, OLD), (1, 1))
    command(store.root)
    store = Store(tmp_path / "a")
    assert store.files() == set(KEYS[:CAPACITY_BLOCKS]) - COMMANDS[command]
    store.check()
    store.engine.close()


@pytest.mark.parametrize("command", [gc, purge])
def test_a_read_is_enough_to_notice_all_that_went(tmp_path: Path, command: Callable[[Path], None]) -> None:
    """An engine that writes nothing does not look at the catalogue, until a block is missing."""
    store = Store(tmp_path / "a")
    store.store(KEYS[:CAPACITY_BLOCKS])
    os.utime(path_of(store.root, OLD), (1, 1))
    elsewhere(command, store.root)
    assert store.load(KEYS[:CAPACITY_BLOCKS]) == (1 if command is gc else 0)
    store.check()
    store.engine.close()


@pytest.mark.parametrize("damage", ["flipped", "old"])
def test_what_a_read_finds_gives_its_room_back(tmp_path: Path, damage: str) -> None:
    store = Store(tmp_path / "a", ttl_s=1e6)
    other = Store(tmp_path / "a", shared=True)
    store.store(KEYS[:CAPACITY_BLOCKS])
    if damage == "flipped":
        flip(path_of(store.root, KEYS[3]), 4096)
    else:
        os.utime(path_of(store.root, KEYS[3]), (1, 1))
    assert store.load(KEYS[:CAPACITY_BLOCKS]) == 3
    assert store.files() == set(KEYS[:CAPACITY_BLOCKS]) - {KEYS[3]}
    assert other.load([KEYS[3]]) == 0
    for each in (store, other):
        each.settle()
        each.check()
        each.engine.close()


def test_two_stores_with_the_scrub_on_keep_one_count(tmp_path: Path) -> None:
    filling = Store(tmp_path / "a")
    filling.store(KEYS[:CAPACITY_BLOCKS])
    filling.engine.close()
    flip(path_of(filling.root, DAMAGED), 4096)
    os.utime(path_of(filling.root, OLD), (1, 1))
    options = {"shared": True, "scrub_bytes_per_s": 1e12, "ttl_s": 1e6}
    stores = [Store(tmp_path / "a", **options) for _ in range(2)]
    left = set(KEYS[2:CAPACITY_BLOCKS])
    _wait_for(lambda: stores[0].files() == left)
    for store in stores:
        _wait_for(
            lambda store=store: (store.tier.contains([KEYS[19]]), store.settle(), not store.engine.holds([OLD])[0])[2]
        )
        store.check()
    stores[0].store([DAMAGED])
    stores[1].store([OLD])
    stores[0].store([DAMAGED])
    for store in stores:
        store.tier.contains([KEYS[19]])
        store.settle()
        assert store.files() == left | {DAMAGED, OLD}
        store.check()
        store.engine.close()


def test_a_block_that_was_set_aside_and_written_again_is_not_told_as_gone(tmp_path: Path) -> None:
    tier, other = open_tier(tmp_path / "a", shared=True), open_tier(tmp_path / "a", shared=True)
    assert tier.changes() == other.changes() == []  # from now on
    put(tier, [1, 2], BLOCK_BYTES)
    other.contains([key_of(9)])
    flip(block_file(tmp_path / "a", key_of(1)), 4096)
    assert get(tier, 1, BLOCK_BYTES) is Outcome.CORRUPT
    put(tier, [1], BLOCK_BYTES)
    tier.delete([key_of(2)])
    other.contains([key_of(9)])
    told = {(change.key, change.kind) for change in other.changes()}
    assert told == {(key_of(1), ChangeKind.ADDED), (key_of(2), ChangeKind.REMOVED)}
    assert tier.changes() == []
    tier.close()
    other.close()


def _wait_for(holds: Callable[[], bool]) -> None:
    """Let other threads run until it holds."""
    turn = threading.Event()
    for _ in range(6000):
        if holds():
            return
        turn.wait(0.01)
    raise AssertionError("it never came to hold")
