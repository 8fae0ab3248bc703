"""What every eviction policy owes the engine, and what each of them promises beyond it."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable, Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import forebay.policies
from forebay.errors import ConfigError
from forebay.policies import lrfu, prefix_aware, s3fifo
from forebay.policies.lrfu import LRFU
from forebay.policies.lru import LRU
from forebay.policies.prefix_aware import PrefixAware
from forebay.policies.s3fifo import S3FIFO
from forebay.ports import EvictionPolicy, SeesLookups
from forebay.types import BlockKey

MODULES = [
    module
    for found in pkgutil.iter_modules(forebay.policies.__path__)
    if hasattr(module := importlib.import_module(f"forebay.policies.{found.name}"), "build")
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


Step = tuple[str, list[int]]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(("inserted", "accessed", "removed", "requested")),
        st.lists(st.integers(0, 12), unique=True, max_size=5),
    ),
    max_size=60,
)


def apply(policy: EvictionPolicy, name: str, numbers: Sequence[int]) -> None:
    if name == "requested":
        ask(policy, keys(*numbers), keys(*numbers))
    else:
        getattr(policy, name)(keys(*numbers))


def turn_over(policy: EvictionPolicy, numbers: Sequence[int]) -> None:
    for number in numbers:
        policy.removed(policy.victims(1, everything))
        policy.inserted(keys(number))


def steps_of(work: Callable[[], None]) -> int:
    """Lines of Python that some work takes."""
    count = 0

    def trace(frame: object, event: str, argument: object) -> object:
        nonlocal count
        count += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def ask(policy: EvictionPolicy, keys: Sequence[BlockKey], held: Sequence[BlockKey]) -> None:
    """A lookup, as the engine tells it."""
    if isinstance(policy, SeesLookups):
        policy.requested(keys)
    else:
        policy.accessed(held)


def test_all_policies_were_found() -> None:
    assert len(MAKERS) == 4


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

    def test_a_use_saves_a_block_from_those_never_used(self, make: Callable[[], EvictionPolicy]) -> None:
        policy = make()
        policy.inserted(keys(1, 2, 3, 4))
        policy.accessed(keys(4))
        assert set(policy.victims(3, everything)) == set(keys(1, 2, 3))

    def test_what_cannot_go_is_passed_over_and_stays(self, make: Callable[[], EvictionPolicy]) -> None:
        policy = make()
        policy.inserted(keys(*range(6)))
        assert list(policy.victims(9, lambda k: k in keys(0, 3))) == keys(3, 0)
        assert len(policy.victims(9, everything)) == 6

    @given(steps=STEPS)
    @settings(max_examples=40, deadline=None)
    def test_questions_leave_no_trace(self, make: Callable[[], EvictionPolicy], steps: Sequence[Step]) -> None:
        """A policy that is asked all the time answers as its twin that is not."""
        asked, twin = make(), make()
        for name, numbers in steps:
            for policy in (asked, twin):
                apply(policy, name, numbers)
            asked.victims(3, lambda k: k[-1] % 2 == 0)
            asked.victims(99, everything)
        assert asked.victims(99, everything) == twin.victims(99, everything)

    @given(steps=STEPS)
    @settings(max_examples=40, deadline=None)
    def test_a_short_answer_begins_a_long_one(self, make: Callable[[], EvictionPolicy], steps: Sequence[Step]) -> None:
        policy = make()
        for name, numbers in steps:
            apply(policy, name, numbers)
        whole = policy.victims(99, everything)
        for count in range(len(whole)):
            assert policy.victims(count, everything) == whole[:count]

    def test_an_eviction_takes_few_steps_among_many_blocks(self, make: Callable[[], EvictionPolicy]) -> None:
        """In lines of Python, not in seconds: `bench/eviction_cost.py` has the seconds, with a million blocks."""
        policy = make()
        count = 100_000
        policy.inserted(keys(*range(count)))
        turn_over(policy, range(count, count + 30_000))
        assert steps_of(lambda: turn_over(policy, range(count + 30_000, count + 30_200))) < 200 * 300


class Machine(RuleBasedStateMachine):
    """All policies know exactly the keys that a set knows."""

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
    def look_up(self, numbers: list[int]) -> None:
        for policy in self.policies:
            ask(policy, keys(*numbers), keys(*numbers))

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


# --- S3-FIFO


def test_s3fifo_lets_what_is_used_once_pass_through_the_small_queue() -> None:
    policy = S3FIFO()
    policy.inserted(keys(*range(8)))
    policy.accessed(keys(*range(8)))
    policy.inserted(keys(100))
    policy.removed(keys(100))  # the hand takes the eight that were used to the main queue
    policy.inserted(keys(101, 102, 103))
    assert list(policy.victims(1, everything)) == keys(103)
    policy.removed(keys(103))
    policy.inserted(keys(103))  # a ghost: it enters the main queue
    assert list(policy.victims(1, everything)) == keys(102)
    assert set(policy._main) == set(keys(*range(8), 103))


def test_the_ghosts_of_s3fifo_are_bounded_by_its_main_queue() -> None:
    policy = S3FIFO()
    policy.inserted(keys(*range(20)))
    policy.accessed(keys(*range(10)))
    for number in range(100, 400):
        turn_over(policy, [number])
    assert 0 < len(policy._ghosts) <= len(policy._main)


def test_a_small_share_lies_between_0_and_1() -> None:
    for share in (0.0, 1.0, float("nan")):
        with pytest.raises(ConfigError, match="small_share must be between 0 and 1"):
            s3fifo.build(s3fifo.Options(small_share=share))


# --- prefix-aware


@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=6),
    st.data(),
)
def test_prefix_aware_lets_suffixes_go_first_in_however_many_parts_they_come(
    lengths: list[int], data: st.DataObject
) -> None:
    """Prompts that share prefixes, whose blocks arrive in several writes, interleaved with those of other prompts."""
    policy = PrefixAware()
    pieces: list[list[BlockKey]] = []
    prompts: list[list[BlockKey]] = []
    known: set[BlockKey] = set()
    for number, length in enumerate(lengths):
        shared = data.draw(st.integers(0, length)) if prompts else 0
        prompt = prompts[-1][:shared] if prompts else []
        prompt = prompt + [key(100 * number + position) for position in range(length - len(prompt))]
        policy.requested(prompt)
        prompts.append(prompt)
        fresh = [k for k in prompt if k not in known]
        known.update(fresh)
        while fresh:
            cut = data.draw(st.integers(1, len(fresh)))
            pieces.append(fresh[:cut])
            fresh = fresh[cut:]
    while pieces:  # each prompt's own parts in their order
        policy.inserted(pieces.pop(0))
    order = {k: at for at, k in enumerate(policy.victims(999, everything))}
    for prompt in prompts:
        places = [order[k] for k in prompt]
        assert places == sorted(places, reverse=True)


def test_prefix_aware_learns_which_kind_is_used_again() -> None:
    """Where blocks return just once, soon after they came, old blocks that were used again are the first to go."""
    policy = PrefixAware()
    policy.inserted(keys(*range(50)))
    for number in range(1_000, 9_000):
        fresh = keys(number)
        policy.requested(fresh)
        policy.inserted(fresh)
        if number >= 1_010:
            policy.requested(keys(number - 10))
            policy.removed(policy.victims(1, lambda k, number=number: k != key(number)))
    victim = policy.victims(1, everything)[0]
    assert policy._kind_of(victim) == 1
    assert all(policy._kind_of(key(number)) == 0 for number in range(8_990, 9_000)), "the ten that will return"


def test_what_prefix_aware_remembers_is_bounded() -> None:
    policy = PrefixAware(most_ghosts=100)
    policy.inserted(keys(*range(50)))
    for number in range(1_000, 5_000):
        policy.requested(keys(number, 10_000 + number))  # the second one never comes
        turn_over(policy, [number])
    assert len(policy._ghosts) == 100
    assert len(policy._expected) <= 1024
    with pytest.raises(ConfigError, match="most_ghosts must be 0 or more"):
        prefix_aware.build(prefix_aware.Options(most_ghosts=-1))
