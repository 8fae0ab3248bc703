"""Pins on keys: what eviction passes over, how much of a place they may take, and that they can be given back."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_world import PROMPT, World, make_world
from forebay.engine import EngineOptions
from forebay.errors import ConfigError
from forebay.events import Reason, Totals
from forebay.keys import block_keys
from forebay.pins import Pins
from forebay.testing.schedule import NAMESPACE
from forebay.types import HOST, BlockKey, JobKind


def other_prompt(number: int, blocks: int) -> tuple[BlockKey, ...]:
    return block_keys(NAMESPACE, [1000 + number] * (blocks * NAMESPACE.block_tokens))


def flood(world: World, prompts: int = 10, first: int = 0) -> None:
    """Store so many blocks that everything unpinned has to go, from the pool and from the tier."""
    for number in range(first, first + prompts):
        world.store(other_prompt(number, 10))


def held(world: World, keys: tuple[BlockKey, ...], place: str) -> int:
    return sum(world.engine._index.is_ready(key, place) for key in keys)


def test_eviction_passes_over_pinned_blocks_in_the_pool_and_in_the_tier() -> None:
    world = make_world(slots=40, tiers={"disk": 40})
    pinned = world.engine.pin(PROMPT[:6])
    assert (pinned.keys, pinned.refused_blocks, pinned.kept) == (PROMPT[:6], 0, ((HOST, 6), ("disk", 6)))
    world.store(PROMPT[:12])
    flood(world)
    assert held(world, PROMPT[:12], HOST) == held(world, PROMPT[:12], "disk") == 6
    assert world.load("again", PROMPT[:12]) == 6
    assert world.count(JobKind.READ, "disk") == 0
    world.engine.unpin(pinned.keys)
    flood(world, first=10)
    assert held(world, PROMPT[:12], HOST) == held(world, PROMPT[:12], "disk") == 0
    world.engine.check_idle()


def test_a_block_may_be_pinned_while_it_is_evicted_and_comes_back() -> None:
    """It has been passed over once (and is out of the policy), is damaged, stored anew, and is evictable in the end."""
    world = make_world(slots=40, tiers={"disk": 40})
    world.store(PROMPT[:2])
    pinned = world.engine.pin(PROMPT[:2])
    flood(world)
    world.engine.drop_host_copies()
    world.tiers["disk"].delete(PROMPT[:1])
    assert world.load("lost", PROMPT[:2]) == 0
    world.store(PROMPT[:2])
    flood(world, first=10)
    assert held(world, PROMPT[:2], "disk") == 2
    world.engine.unpin(pinned.keys)
    flood(world, first=20)
    assert held(world, PROMPT[:2], "disk") == 0


def test_pins_beyond_the_share_of_every_place_are_refused_and_counted() -> None:
    totals = Totals()
    world = make_world(slots=40, tiers={"disk": 80}, options=EngineOptions(pin_share=0.25))
    world.engine._stage.emit = totals.add
    pinned = world.engine.pin(PROMPT)
    assert pinned.keys == PROMPT[:20]  # a quarter of 80
    assert pinned.kept == ((HOST, 7), ("disk", 20))  # a quarter of the 30 slots that are not reserved
    assert pinned.refused_blocks == 20
    assert totals.refused[HOST, Reason.PINS_FULL] == 20
    assert world.engine.pin(PROMPT[:20]).refused_blocks == 0, "a second pin on the same blocks takes no more room"
    world.engine.unpin(pinned.keys)
    assert world.engine.pin(other_prompt(0, 1)).refused_blocks == 1, "they are pinned once more"
    world.engine.unpin(pinned.keys)
    assert world.engine.pin(other_prompt(0, 1)).refused_blocks == 0


@pytest.mark.parametrize("slots", [2, 3, 5, 9])
def test_a_prefix_longer_than_the_pool_still_streams_through_what_pins_leave(slots: int) -> None:
    world = make_world(slots=slots, options=EngineOptions(pin_share=0.5, batch_blocks=4))
    world.engine.pin(PROMPT)
    world.store(PROMPT)
    assert world.load("long", PROMPT) == 40
    world.store(other_prompt(1, 10))
    world.engine.check_idle()


def test_a_pin_share_has_its_bounds() -> None:
    with pytest.raises(ConfigError, match=r"pin_share must be 0 to 0\.5"):
        make_world(options=EngineOptions(pin_share=0.6))


@given(st.integers(0, 5), st.integers(0, 5), st.integers(0, 2**32))
def test_pins_count_and_never_exceed_their_bounds(host: int, disk: int, seed: int) -> None:
    rng, pins = random.Random(seed), Pins({HOST: host, "disk": disk})
    answers: list[tuple[BlockKey, ...]] = []
    for _ in range(40):
        if answers and rng.random() < 0.5:
            pins.unpin(answers.pop(rng.randrange(len(answers))))
        else:
            keys = tuple(rng.sample(PROMPT[:8], rng.randrange(1, 5)))
            answer = pins.pin(keys)
            assert answer.keys + keys[len(answer.keys) :] == keys
            assert answer.refused_blocks == len(keys) - len(answer.keys)
            answers.append(answer.keys)
        pinned = Counter(key for keys in answers for key in keys)
        assert len(pins) == len(pinned)
        for place, most in ((HOST, host), ("disk", disk)):
            assert pins.blocks(place) == sum(pins.holds(key, place) for key in pinned) <= most
        assert all(pins.holds(key, HOST) or pins.holds(key, "disk") for key in pinned)
    for keys in answers:
        pins.unpin(keys)
    assert len(pins) == pins.blocks(HOST) == pins.blocks("disk") == 0
