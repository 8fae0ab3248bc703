"""Write admission: the frugal policy by itself, and in the engine, beside a write budget."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1]))

from engine_world import PROMPT, World, make_world
from forebay.bench.policy.replay import prompts_of, replay
from forebay.errors import ConfigError
from forebay.events import Dropped, Reason, Refused
from forebay.keys import namespace_key
from forebay.policies import frugal
from forebay.policies.admit_all import AdmitAll
from forebay.policies.frugal import Frugal, Options
from forebay.policies.lru import LRU
from forebay.ports import Tier
from forebay.testing.schedule import NAMESPACE
from forebay.tiers import file
from forebay.tiers.memory import MemoryTier
from forebay.types import HOST, BlockKey, JobKind, TierSpec
from forebay.workloads import rag

SPEC = TierSpec(name="disk", capacity_bytes=100, stored_bytes=1, read_latency_ns=0)


def key(number: int) -> BlockKey:
    return BlockKey(hashlib.sha256(number.to_bytes(8, "little")).digest())


def keys(*numbers: int) -> list[BlockKey]:
    return [key(number) for number in numbers]


def test_a_block_is_written_when_it_is_asked_for_again() -> None:
    policy = Frugal(Options())
    policy.requested(keys(1, 2))
    assert not policy.admit(key(1), SPEC, 0)
    policy.requested(keys(1, 3))
    assert [policy.admit(key(n), SPEC, 0) for n in (1, 2, 3, 4)] == [True, False, False, False]
    assert Frugal(Options(min_uses=1)).admit(key(9), SPEC, 0), "at once, if once is enough"


def test_short_prompts_are_not_written_but_what_they_share_with_long_ones_is() -> None:
    policy = Frugal(Options(min_uses=1, min_prompt_blocks=3))
    policy.requested(keys(1, 2))
    assert not policy.admit(key(2), SPEC, 0)
    policy.requested(keys(1, 2, 3))
    policy.requested(keys(1))
    assert [policy.admit(key(n), SPEC, 0) for n in (1, 2, 3)] == [True, True, True]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 40), unique=True, max_size=6), max_size=40))
def test_an_estimate_is_never_too_low(prompts: list[list[int]]) -> None:
    policy = Frugal(Options(sketch_bytes=1024))
    counts: dict[int, int] = {}
    for prompt in prompts:
        policy.requested(keys(*prompt))
        for number in prompt:
            counts[number] = counts.get(number, 0) + 1
    if sum(counts.values()) < 256:  # before the first halving
        assert all(policy.estimated_uses(key(number)) >= count for number, count in counts.items())


def test_few_of_the_blocks_that_come_once_are_taken_for_more() -> None:
    policy = Frugal(Options(sketch_bytes=2**14))
    taken = 0
    for start in range(0, 24_000, 20):  # six times what is told apart between halvings
        prompt = keys(*range(start, start + 20))
        policy.requested(prompt)
        taken += sum(policy.admit(k, SPEC, 0) for k in prompt)
    assert taken / 24_000 < 0.06


def test_old_uses_are_forgotten_and_counters_do_not_overflow() -> None:
    policy = Frugal(Options(sketch_bytes=1024))
    for _ in range(1000):
        policy.requested(keys(1))
    assert 128 <= policy.estimated_uses(key(1)) <= 255
    for start in range(0, 256 * 12, 8):
        policy.requested(keys(*range(10_000 + start, 10_008 + start)))
    assert policy.estimated_uses(key(1)) < 16
    assert policy._counters.dtype == np.uint8
    assert policy._counters.nbytes == 1024


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (Options(min_uses=0), "min_uses must be from 1 to 255"),
        (Options(min_prompt_blocks=0), "min_prompt_blocks must be 1 or more"),
        (Options(sketch_bytes=3000), "sketch_bytes must be a power of two"),
    ],
)
def test_bad_options_are_refused(options: Options, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        frugal.build(options)


def test_it_saves_more_writes_than_it_costs_hits() -> None:
    prompts = prompts_of(rag.build(rag.Options(requests=1500)))
    held = prompts.distinct_blocks // 2
    whole = replay(prompts, held, LRU(), AdmitAll())
    thrifty = replay(prompts, held, LRU(), Frugal(Options()))
    assert thrifty.written_blocks < 0.7 * whole.written_blocks
    assert thrifty.hit_blocks > 0.75 * whole.hit_blocks


# --- the write budget, in the engine


class BudgetTier:
    """Any tier, with so many bytes to write, and none back until the test gives some."""

    def __init__(self, tier: Tier) -> None:
        self._tier, self.budget_bytes = tier, 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._tier, name)

    def write(self, keys: Sequence[BlockKey], views: Sequence[memoryview]) -> object:
        self.budget_bytes -= len(keys) * self._tier.spec.stored_bytes
        return self._tier.write(keys, views)

    def write_budget_bytes(self) -> int | None:
        return self.budget_bytes


def budgeted(**more: object) -> tuple[World, BudgetTier]:
    made: list[BudgetTier] = []

    def wrap(tier: Tier) -> Tier:
        made.append(BudgetTier(tier))
        return made[-1]

    return make_world(wrap=wrap, **more), made[0]


def refused(world: World, reason: Reason) -> int:
    return sum(event.blocks for event in world.events if isinstance(event, Refused) and event.reason is reason)


def test_a_spent_budget_stops_writes_and_evicts_nothing_for_them(caplog: pytest.LogCaptureFixture) -> None:
    world, tier = budgeted(tiers={"disk": 10})
    block_bytes = tier.spec.stored_bytes
    tier.budget_bytes = 12 * block_bytes + 1
    with caplog.at_level(logging.WARNING, "forebay.stores"):
        world.store(PROMPT[:10])
        world.store(PROMPT[10:20])
    assert world.count(JobKind.WRITE, "disk") == 12
    assert tier.budget_bytes == 1
    assert refused(world, Reason.OVER_BUDGET) == 8
    dropped = [event for event in world.events if isinstance(event, Dropped) and event.place == "disk"]
    assert sum(event.blocks for event in dropped) == 2, "as much as was written, and no more"
    assert sum("write budget is spent" in line for line in caplog.messages) == 1
    assert all(world.engine._index.is_ready(k, HOST) for k in PROMPT[:20]), "they are served from the pool meanwhile"
    tier.budget_bytes += 8 * block_bytes
    world.store(PROMPT[12:20])
    assert world.count(JobKind.WRITE, "disk") == 20
    world.engine.check_idle()


def test_blocks_on_their_way_count_against_the_budget() -> None:
    world, tier = budgeted(tiers={"disk": 100})
    tier.budget_bytes = 5 * tier.spec.stored_bytes
    blocks = world.lend(100, 8)
    for start in range(0, 8, 2):  # four offers before anything is written
        world.engine.offer(PROMPT[start : start + 2], blocks[start : start + 2])
    world.settle()
    assert world.count(JobKind.WRITE, "disk") == 5
    assert tier.budget_bytes == 0


def test_a_tier_without_a_budget_is_written_as_before() -> None:
    assert not hasattr(MemoryTier, "write_budget_bytes")
    world = make_world()
    world.store(PROMPT)
    assert world.count(JobKind.WRITE, "disk") == len(PROMPT)


def test_frugal_and_the_file_tiers_own_budget_together(tmp_path: Path) -> None:
    """Prompts that come once cost no budget; what comes again is written until the day's bytes are spent, over a
    restart too, and goes on at midnight."""
    day_s, now_s, stored_bytes = 86_400, [86_400.0 * 20_000 + 60], 2 * 4096
    options = file.Options(
        roots=(file.RootOptions(path=str(tmp_path / "a")),), capacity_bytes=100 * stored_bytes,
        write_budget_bytes_per_day=10 * stored_bytes,
    )  # fmt: skip

    def opened() -> World:
        tier = file.FileTier(options, NAMESPACE, bytes(namespace_key(NAMESPACE)), now_s=lambda: now_s[0])
        assert tier.spec.stored_bytes == stored_bytes
        world = make_world(tiers={"file": 1}, wrap=lambda _: tier)
        world.engine._stage.policies = dataclasses.replace(world.engine._stage.policies, admission=Frugal(Options()))
        return world

    def ask(world: World, prompt: Sequence[BlockKey]) -> None:
        plan = world.plan("r", prompt)
        world.engine.cancel_load("r")
        world.store(prompt[plan.hit_blocks :])
        world.engine._loads.advance()

    def on_disk() -> int:
        return len(list(tmp_path.rglob("*.kv")))

    world = opened()
    for start in range(0, 40, 8):
        ask(world, PROMPT[start : start + 8])
    assert on_disk() == 0
    assert refused(world, Reason.NOT_ADMITTED) == 40
    world.engine.announce(PROMPT[:16])
    world.store(PROMPT[:16])
    assert on_disk() == 10
    assert refused(world, Reason.OVER_BUDGET) == 6
    world.engine.close()
    world = opened()
    for _ in range(2):
        world.engine.announce(PROMPT[:16])
    world.store(PROMPT[:16])
    assert on_disk() == 10, "the budget is the pool's, not the process's"
    now_s[0] += day_s
    world.engine.drop_host_copies()
    world.store(PROMPT[10:16])
    assert on_disk() == 16
    world.engine.check_idle()
    world.engine.close()
