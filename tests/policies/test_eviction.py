"""What every eviction policy owes the engine, and what LRU and LRFU promise beyond it."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import forebay.policies
from forebay.errors import ConfigError
from forebay.policies import lrfu
from forebay.policies.lrfu import LRFU
from forebay.policies.lru import LRU
from forebay.ports import EvictionPolicy
from forebay.types import BlockKey

MODULES = [
    importlib.import_module(f"forebay.policies.{m.name}") for m in pkgutil.iter_modules(forebay.policies.__path__)
]
MAKERS: list[Callable[[], EvictionPolicy]] = [
    lambda module=module: module.build(module.Options())
    for module in MODULES
    if hasattr(module.build(module.Options()), "victims")
]


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(32, "big"))


def keys(*numbers: int) -> list[BlockKey]:
    return [key(number) for number in numbers]


def everything(_: BlockKey) -> bool:
    return True


def test_both_policies_were_found() -> None:
    assert len(MAKERS) == 2


@pytest.mark.parametrize("make", MAKERS)
class TestEveryPolicy:
    def test_victims_are_known_distinct_evictable_and_as_many_as_asked(
        self, make: Callable[[], EvictionPolicy]
    ) -> None:
        policy = make()
        policy.inserted(keys(*range(10)))
        found = policy.victims(4, lambda k: k != key(9))
        assert len(found) == len(set(found)) == 4
        assert key(9) not in found
        assert set(policy.victims(99, everything)) == set(keys(*range(10)))
        assert policy.victims(0, everything) == []

    def test_asking_changes_nothing(self, make: Callable[[], EvictionPolicy]) -> None:
        policy = make()
        policy.inserted(keys(1, 2, 3))
        policy.accessed(keys(2))
        assert policy.victims(3, everything) == policy.victims(3, everything)

    def test_tails_go_before_heads(self, make: Callable[[], EvictionPolicy]) -> None:
        policy = make()
        policy.inserted(keys(1, 2, 3, 4))
        assert list(policy.victims(4, everything)) == keys(4, 3, 2, 1)

    def test_unknown_keys_are_ignored(self, make: Callable[[], EvictionPolicy]) -> None:
        policy = make()
        policy.accessed(keys(1))
        policy.removed(keys(2))
        assert policy.victims(5, everything) == []

    def test_what_was_removed_is_no_victim_and_may_return(self, make: Callable[[], EvictionPolicy]) -> None:
        policy = make()
        policy.inserted(keys(1, 2))
        policy.removed(keys(1))
        assert list(policy.victims(5, everything)) == keys(2)
        policy.inserted(keys(1))
        assert set(policy.victims(5, everything)) == set(keys(1, 2))


class Machine(RuleBasedStateMachine):
    """Both policies know exactly the keys that a set knows."""

    def __init__(self) -> None:
        super().__init__()
        self.policies = [make() for make in MAKERS]
        self.known: set[BlockKey] = set()

    @rule(numbers=st.lists(st.integers(0, 9), unique=True))
    def insert(self, numbers: list[int]) -> None:
        self.known.update(keys(*numbers))
        for policy in self.policies:
            policy.inserted(keys(*numbers))

    @rule(numbers=st.lists(st.integers(0, 9), unique=True))
    def access(self, numbers: list[int]) -> None:
        for policy in self.policies:
            policy.accessed(keys(*numbers))

    @rule(numbers=st.lists(st.integers(0, 9), unique=True))
    def remove(self, numbers: list[int]) -> None:
        self.known.difference_update(keys(*numbers))
        for policy in self.policies:
            policy.removed(keys(*numbers))

    @invariant()
    def same_keys(self) -> None:
        for policy in self.policies:
            assert set(policy.victims(99, everything)) == self.known


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_lru_goes_by_the_last_use() -> None:
    policy = LRU()
    for number in (1, 2, 3):
        policy.inserted(keys(number))
    policy.accessed(keys(1))
    assert list(policy.victims(3, everything)) == keys(2, 3, 1)


def test_lrfu_lets_a_frequent_block_outlive_a_recent_one_until_it_has_cooled() -> None:
    policy = LRFU(half_life=100.0)
    policy.inserted(keys(1))
    for _ in range(7):
        policy.accessed(keys(1))
    policy.inserted(keys(2))
    assert list(policy.victims(1, everything)) == keys(2)
    for number in range(1000, 1400):  # four half-lives: 8 uses count 0.5
        policy.inserted(keys(number))
        policy.removed(keys(number))
    policy.accessed(keys(2))
    assert list(policy.victims(1, everything)) == keys(1)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 8)), max_size=80))
def test_lrfu_at_its_ends_is_lru_and_lfu(uses: list[tuple[bool, int]]) -> None:
    nearly_lru, nearly_lfu, lru = LRFU(half_life=0.01), LRFU(half_life=1e12), LRU()
    counts: dict[BlockKey, int] = {}
    for _, number in uses:
        for policy in (nearly_lru, nearly_lfu, lru):
            policy.inserted(keys(number))
        counts[key(number)] = counts.get(key(number), 0) + 1
    assert list(nearly_lru.victims(99, everything)) == list(lru.victims(99, everything))
    ranked = [counts[k] for k in nearly_lfu.victims(99, everything)]
    assert ranked == sorted(ranked)


def test_the_heap_of_lrfu_does_not_grow_with_uses() -> None:
    policy = LRFU()
    policy.inserted(keys(1, 2, 3))
    for _ in range(10_000):
        policy.accessed(keys(2))
    assert len(policy._heap) < 200


def test_a_half_life_has_to_be_positive() -> None:
    with pytest.raises(ConfigError, match="half_life must be above 0"):
        lrfu.build(lrfu.Options(half_life=0.0))
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        msgspec.convert({"half_live": 1.0}, lrfu.Options)
