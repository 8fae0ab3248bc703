"""How much of a prefix the pool holds: asked on threads, bounded in time, never wrong about what it says."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from forebay.assemble import StoreConfig, open_tiers
from forebay.connectors.vllm.lookup import Answer, Found, Lookup, Shard
from forebay.errors import TierUnavailable
from forebay.keys import derived_key
from forebay.testing.schedule import NAMESPACE
from forebay.tiers import memory
from forebay.types import BlockKey, Happening

BLOCK_BYTES = 64
PREFIX = [bytes([i]) * 32 for i in range(200)]
ROOTS = [BlockKey(bytes([200 + i]) * 32) for i in range(2)]


class Tier(memory.MemoryTier):
    """Counts what it is asked, and can be held up or broken."""

    def __init__(self) -> None:
        super().__init__(memory.Options(name="file", capacity_bytes=2**20), BLOCK_BYTES)
        self.asked = 0
        self.entered, self.open = threading.Event(), threading.Event()
        self.open.set()
        self.error: Exception | None = None

    def contains(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        self.entered.set()
        self.open.wait()
        self.asked += len(keys)
        if self.error is not None:
            raise self.error
        return super().contains(keys)


class World:
    def __init__(self, shards: int = 1, deadline_s: float = 60.0) -> None:
        self.now_ns = 1
        self.tiers = [Tier() for _ in range(shards)]
        found = [Shard(root, {"file": tier}) for root, tier in zip(ROOTS, self.tiers, strict=False)]
        self.lookup = Lookup(found, deadline_s, lambda: self.now_ns)

    def hold(self, shard: int, prefix: Sequence[bytes]) -> None:
        keys = [derived_key(ROOTS[shard], name) for name in prefix]
        self.tiers[shard].write(keys, [memoryview(bytearray(BLOCK_BYTES))] * len(keys))

    def ask(self, prefix: Sequence[bytes], request_id: str = "r") -> Answer:
        """Ask until there is an answer."""
        while (answer := self.lookup.ask(request_id, prefix)) is None:
            threading.Event().wait(0.001)  # let its threads run
        return answer


def test_the_longest_unbroken_prefix_counts() -> None:
    world = World()
    world.hold(0, [*PREFIX[:70], *PREFIX[71:]])
    assert world.ask(PREFIX) == Answer(70, Found.MISSING)
    assert world.ask(PREFIX[:70], "other") == Answer(70, Found.ALL)
    assert world.ask(PREFIX[70:], "third") == Answer(0, Found.MISSING)


def test_a_block_counts_when_every_shard_holds_it() -> None:
    world = World(shards=2)
    world.hold(0, PREFIX)
    world.hold(1, PREFIX[:5])
    assert world.ask(PREFIX) == Answer(5, Found.MISSING)


def test_nothing_is_asked_for_past_the_first_hole() -> None:
    world = World()
    world.hold(0, PREFIX[:3])
    world.ask(PREFIX)
    assert world.tiers[0].asked < len(PREFIX)


def test_an_answer_is_given_again_for_a_while_and_then_sought_anew() -> None:
    world = World()
    world.hold(0, PREFIX[:3])
    assert world.ask(PREFIX).held_blocks == 3
    asked = world.tiers[0].asked
    world.hold(0, PREFIX[3:6])
    assert world.ask(PREFIX).held_blocks == 3
    assert world.tiers[0].asked == asked
    world.now_ns += 2_000_000_000
    assert world.ask(PREFIX).held_blocks == 6
    world.lookup.drop("r")
    world.hold(0, PREFIX[6:8])
    assert world.ask(PREFIX).held_blocks == 8
    assert world.ask(PREFIX[2:]).held_blocks == 6, "another question of the same request"


def test_a_request_that_asks_on_and_on_never_loses_its_answer_to_a_newer_question() -> None:
    world = World()
    world.hold(0, PREFIX[:3])
    assert world.ask(PREFIX).held_blocks == 3
    world.hold(0, PREFIX[3:6])
    world.tiers[0].open.clear()
    for _ in range(30):
        world.now_ns += 100_000_000
        assert world.lookup.ask("r", PREFIX) == Answer(3, Found.MISSING)
    world.tiers[0].open.set()
    while (answer := world.lookup.ask("r", PREFIX)) == Answer(3, Found.MISSING):
        threading.Event().wait(0.001)
    assert answer == Answer(6, Found.MISSING)
    assert world.lookup.counts.answered == 2
    world.lookup.close()


def test_past_the_deadline_what_is_known_counts_and_the_rest_is_unknown() -> None:
    world = World(deadline_s=1.0)
    world.hold(0, PREFIX)
    world.tiers[0].open.clear()
    assert world.lookup.ask("r", PREFIX) is None
    world.now_ns += 999_999_998
    assert world.lookup.ask("r", PREFIX) is None
    world.now_ns += 2
    assert world.lookup.ask("r", PREFIX) == Answer(0, Found.UNKNOWN)
    assert world.lookup.counts.timed_out == 1
    world.tiers[0].open.set()
    world.lookup.close()


def test_a_hung_pool_is_soon_not_waited_for_and_counts_again_when_it_answers() -> None:
    world = World(deadline_s=1.0)
    world.hold(0, PREFIX)
    world.tiers[0].open.clear()
    for i in range(4):
        assert world.lookup.ask(f"{i}", PREFIX) is None
    world.now_ns += 2_000_000_000
    assert {world.lookup.ask(f"{i}", PREFIX) for i in range(4)} == {Answer(0, Found.UNKNOWN)}
    assert world.lookup.ask("next", PREFIX) == Answer(0, Found.UNKNOWN), "at once"
    assert world.lookup.counts.timed_out == 5
    world.tiers[0].open.set()
    while (answer := world.lookup.ask("later", PREFIX)) is None or answer.found is not Found.ALL:
        world.now_ns += 2_000_000_000 if answer is not None else 0
        threading.Event().wait(0.001)
    world.lookup.close()


@pytest.mark.parametrize("error", [TierUnavailable("gone"), OSError("gone"), RuntimeError("a bug")], ids=repr)
def test_a_tier_that_cannot_be_asked_gives_no_hit_and_no_certainty(error: Exception) -> None:
    world = World()
    world.hold(0, PREFIX)
    world.tiers[0].error = error
    assert world.ask(PREFIX) == Answer(0, Found.UNKNOWN)
    assert world.lookup.counts.failed == 1
    world.tiers[0].error = None
    assert world.ask(PREFIX, "next") == Answer(len(PREFIX), Found.ALL)


def test_a_block_in_doubt_ends_the_prefix_for_a_while() -> None:
    world = World()
    world.hold(0, PREFIX)
    world.lookup.doubt(PREFIX[4])
    assert world.ask(PREFIX) == Answer(4, Found.UNKNOWN)
    world.now_ns += 31_000_000_000
    assert world.ask(PREFIX) == Answer(len(PREFIX), Found.ALL)


def test_closing_gives_up_open_questions() -> None:
    world = World()
    world.tiers[0].open.clear()
    assert world.lookup.ask("r", PREFIX) is None
    closing = threading.Thread(target=world.lookup.close)
    closing.start()
    world.tiers[0].open.set()
    closing.join(timeout=30)
    assert not closing.is_alive()
    assert world.tiers[0].asked <= 64


def test_closing_does_not_wait_for_a_pool_that_hangs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("forebay.connectors.vllm.lookup._CLOSE_WITHIN_S", 0.05)
    world = World()
    world.tiers[0].open.clear()
    assert world.lookup.ask("r", PREFIX) is None
    assert world.tiers[0].entered.wait(60)
    world.lookup.close()
    assert ["1 lookups still hang" in record.getMessage() for record in caplog.records] == [True]
    world.tiers[0].open.set()


def test_files_that_looking_finds_cut_are_counted_over_all_shards(tmp_path: Path) -> None:
    shards: list[Shard] = []
    for at, root in enumerate(ROOTS):
        pool = tmp_path / f"pool-{at}"
        store = StoreConfig.embedded([str(pool)], host_bytes=0, capacity_bytes=2**20, shared=True)
        tiers = open_tiers(store, NAMESPACE)
        keys = [derived_key(root, name) for name in PREFIX[:3]]
        tiers["file"].write(keys, [memoryview(bytearray(NAMESPACE.block_bytes))] * len(keys))
        (file,) = pool.glob(f"*/??/{keys[1].hex()}.kv")
        os.truncate(file, 100)
        shards.append(Shard(root, tiers))
    world = World()
    world.lookup = Lookup(shards, deadline_s=60.0)
    assert world.ask(PREFIX[:3]) == Answer(1, Found.MISSING)
    assert world.lookup.happened() == {Happening("file", "0", "wrong-length"): 2}
    world.lookup.close()
