"""What every tier owes the engine, as tests. A new tier adopts them in a few lines:

    class TestMyTier(TierContract):
        @pytest.fixture
        def subject(self, tmp_path):
            return Subject(
                make=lambda block_bytes: my_tier.build(options_for(tmp_path), namespace(block_bytes), digest),
                survives_close=True,
                damage=lambda key: flip_a_stored_byte(tmp_path, key),
            )

    class MyMachine(TierMachine):
        def make_tier(self): ...
    TestMyMachine = MyMachine.TestCase

`pytest.register_assert_rewrite("forebay.testing.tier_contract")` in a conftest.py gives readable failures.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from forebay.errors import TierUnavailable
from forebay.ports import Tier
from forebay.types import BlockKey, Namespace, Outcome

PAGE_BYTES = 4096
ALL_BLOCK_BYTES = (1, 4095, 4096, 4097, 3 * 4096, 20_000)


@dataclass(frozen=True, slots=True)
class Subject:
    """The tier under test. Room for 64 blocks of 20,000 bytes is enough."""

    make: Callable[[int], Tier]
    """block_bytes -> an open tier over this test's own storage; called again, the same storage once more."""
    survives_close: bool = False
    """Blocks are still there when the storage is opened again."""
    damage: Callable[[BlockKey], None] | None = None
    """Change a stored block beneath the tier; None where nothing can."""


def key_of(number: int) -> BlockKey:
    """A key as good as any: the bytes are spread like a digest's."""
    return BlockKey(random.Random(number).randbytes(32))


def payload_of(number: int, block_bytes: int) -> bytes:
    return random.Random(~number).randbytes(block_bytes)


def namespace_of(block_bytes: int) -> Namespace:
    """A namespace of which only the block's length matters."""
    return Namespace(
        model="contract", weights_digest="0" * 64, kv_dtype="uint8", rope="none", layers=1, kv_heads=1, head_dim=1,
        block_tokens=1, block_bytes=block_bytes, layout="bytes",
    )  # fmt: skip


def slot(block_bytes: int, *, misaligned_by: int = 0, spare_bytes: int | None = None) -> memoryview:
    """A view like a host pool's slot: page-aligned, padded to a page, full of 0xEE."""
    padded_bytes = -(-block_bytes // PAGE_BYTES) * PAGE_BYTES
    usable_bytes = padded_bytes if spare_bytes is None else block_bytes + spare_bytes
    memory = np.full(padded_bytes + 2 * PAGE_BYTES, 0xEE, dtype=np.uint8)
    start = -memory.ctypes.data % PAGE_BYTES + misaligned_by
    return memory.data[start : start + usable_bytes]


def filled(payload: bytes) -> memoryview:
    view = slot(len(payload))
    view[: len(payload)] = payload
    return view


def put(tier: Tier, numbers: Sequence[int], block_bytes: int) -> None:
    """Store blocks that must be accepted."""
    views = [filled(payload_of(number, block_bytes)) for number in numbers]
    outcomes = tier.write([key_of(number) for number in numbers], views)
    assert list(outcomes) == [Outcome.OK] * len(numbers)


def get(tier: Tier, number: int, block_bytes: int) -> bytes | Outcome:
    """The block's bytes, or why there are none."""
    view = slot(block_bytes)
    [outcome] = tier.read([key_of(number)], [view])
    return bytes(view[:block_bytes]) if outcome is Outcome.OK else outcome


class TierContract:
    """Subclass it and define the fixture `subject`."""

    @pytest.mark.parametrize("block_bytes", ALL_BLOCK_BYTES)
    def test_reads_back_what_was_written(self, subject: Subject, block_bytes: int) -> None:
        tier = subject.make(block_bytes)
        put(tier, [1, 2], block_bytes)
        assert get(tier, 1, block_bytes) == payload_of(1, block_bytes)
        assert get(tier, 2, block_bytes) == payload_of(2, block_bytes)
        tier.close()

    @pytest.mark.parametrize("block_bytes", ALL_BLOCK_BYTES)
    @pytest.mark.parametrize("misaligned_by", [0, 1, 512])
    @pytest.mark.parametrize("spare_bytes", [0, 7])
    def test_any_view_will_do(self, subject: Subject, block_bytes: int, misaligned_by: int, spare_bytes: int) -> None:
        tier = subject.make(block_bytes)
        source = slot(block_bytes, misaligned_by=misaligned_by, spare_bytes=spare_bytes)
        source[:block_bytes] = payload_of(1, block_bytes)
        assert list(tier.write([key_of(1)], [source])) == [Outcome.OK]
        memory = slot(block_bytes + 64, misaligned_by=misaligned_by)
        target = memory[: block_bytes + spare_bytes]
        assert list(tier.read([key_of(1)], [target])) == [Outcome.OK]
        assert bytes(target[:block_bytes]) == payload_of(1, block_bytes)
        assert set(memory[block_bytes + spare_bytes :]) == {0xEE}, "wrote past the end of the view"
        tier.close()

    def test_what_was_never_written_is_missing(self, subject: Subject) -> None:
        tier = subject.make(4096)
        assert get(tier, 1, 4096) is Outcome.MISSING
        assert list(tier.contains([key_of(1)])) == [False]
        assert list(tier.scan()) == []
        tier.close()

    def test_no_keys_no_outcomes(self, subject: Subject) -> None:
        tier = subject.make(4096)
        calls = (tier.contains([]), tier.read([], []), tier.write([], []), tier.delete([]))
        assert [list(outcomes) for outcomes in calls] == [[], [], [], []]
        tier.close()

    def test_outcomes_are_in_the_order_of_the_keys(self, subject: Subject) -> None:
        tier = subject.make(5000)
        put(tier, range(0, 48, 2), 5000)
        views = [slot(5000) for _ in range(48)]
        outcomes = tier.read([key_of(i) for i in range(48)], views)
        assert list(outcomes) == [Outcome.OK, Outcome.MISSING] * 24
        assert list(tier.contains([key_of(i) for i in range(48)])) == [True, False] * 24
        for i in range(0, 48, 2):
            assert bytes(views[i][:5000]) == payload_of(i, 5000)
        tier.close()

    def test_a_key_twice_in_one_batch(self, subject: Subject) -> None:
        tier = subject.make(4096)
        view = filled(payload_of(1, 4096))
        assert list(tier.write([key_of(1)] * 4, [view] * 4)) == [Outcome.OK] * 4
        views = [slot(4096) for _ in range(4)]
        assert list(tier.read([key_of(1)] * 4, views)) == [Outcome.OK] * 4
        assert {bytes(view) for view in views} == {payload_of(1, 4096)}
        assert [stored.key for stored in tier.scan()] == [key_of(1)]
        assert list(tier.delete([key_of(1)] * 2)) == [Outcome.OK] * 2
        assert get(tier, 1, 4096) is Outcome.MISSING
        tier.close()

    def test_a_held_block_is_left_as_it_is(self, subject: Subject) -> None:
        tier = subject.make(4096)
        put(tier, [1], 4096)
        assert list(tier.write([key_of(1)], [filled(payload_of(2, 4096))])) == [Outcome.OK]
        assert get(tier, 1, 4096) == payload_of(1, 4096)
        tier.close()

    def test_the_source_may_change_after_the_write(self, subject: Subject) -> None:
        tier = subject.make(4096)
        view = filled(payload_of(1, 4096))
        assert list(tier.write([key_of(1)], [view])) == [Outcome.OK]
        view[:] = bytes(4096)
        assert get(tier, 1, 4096) == payload_of(1, 4096)
        tier.close()

    def test_a_deleted_block_is_gone_and_can_be_written_again(self, subject: Subject) -> None:
        tier = subject.make(4096)
        put(tier, [1, 2], 4096)
        assert list(tier.delete([key_of(1), key_of(3)])) == [Outcome.OK, Outcome.OK]
        assert list(tier.delete([key_of(1)])) == [Outcome.OK]
        assert get(tier, 1, 4096) is Outcome.MISSING
        assert list(tier.contains([key_of(1), key_of(2)])) == [False, True]
        put(tier, [1], 4096)
        assert get(tier, 1, 4096) == payload_of(1, 4096)
        tier.close()

    def test_scan_names_every_block_and_its_room(self, subject: Subject) -> None:
        tier = subject.make(5000)
        put(tier, range(10), 5000)
        found = list(tier.scan())
        assert {stored.key for stored in found} == {key_of(i) for i in range(10)}
        assert len(found) == 10
        assert {stored.stored_bytes for stored in found} == {tier.spec.stored_bytes}
        assert tier.spec.stored_bytes >= 5000
        tier.close()

    def test_blocks_outlive_the_tier(self, subject: Subject) -> None:
        if not subject.survives_close:
            pytest.skip("this tier keeps nothing")
        tier = subject.make(5000)
        put(tier, range(8), 5000)
        tier.close()
        again = subject.make(5000)
        assert {stored.key for stored in again.scan()} == {key_of(i) for i in range(8)}
        assert [get(again, i, 5000) for i in range(8)] == [payload_of(i, 5000) for i in range(8)]
        again.close()

    def test_a_damaged_block_is_corrupt_once_then_missing(self, subject: Subject) -> None:
        if subject.damage is None:
            pytest.skip("nothing can be damaged beneath this tier")
        tier = subject.make(5000)
        put(tier, [1, 2], 5000)
        subject.damage(key_of(1))
        assert get(tier, 1, 5000) is Outcome.CORRUPT
        assert get(tier, 1, 5000) is Outcome.MISSING
        assert get(tier, 2, 5000) == payload_of(2, 5000)
        put(tier, [1], 5000)
        assert get(tier, 1, 5000) == payload_of(1, 5000)
        tier.close()

    def test_threads_do_not_disturb_each_other(self, subject: Subject) -> None:
        """Writers, readers and deleters at once: every OK has the right bytes, and the end state is sound."""
        tier, failures = subject.make(5000), list[str]()
        start = threading.Barrier(6)

        def work(worker: int) -> None:
            chance = random.Random(worker)
            start.wait()
            for _ in range(15):
                numbers = chance.sample(range(12), 4)
                keys = [key_of(number) for number in numbers]
                deed = chance.choice(["read", "write", "delete"])
                if deed == "read":
                    views = [slot(5000) for _ in numbers]
                    for number, view, outcome in zip(numbers, views, tier.read(keys, views), strict=True):
                        if outcome is Outcome.OK and bytes(view[:5000]) != payload_of(number, 5000):
                            failures.append(f"wrong bytes in block {number}")
                        if outcome not in (Outcome.OK, Outcome.MISSING):
                            failures.append(f"read of block {number}: {outcome}")
                elif deed == "write":
                    put(tier, numbers, 5000)
                elif list(tier.delete(keys)) != [Outcome.OK] * 4:
                    failures.append("a delete failed")

        threads = [threading.Thread(target=work, args=(worker,)) for worker in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        held = {stored.key for stored in tier.scan()}
        for number in range(12):
            expected = payload_of(number, 5000) if key_of(number) in held else Outcome.MISSING
            assert get(tier, number, 5000) == expected
        tier.close()

    def test_a_closed_tier_says_so(self, subject: Subject) -> None:
        tier = subject.make(4096)
        put(tier, [1], 4096)
        tier.close()
        tier.close()
        with pytest.raises((TierUnavailable, OSError)):
            tier.read([key_of(1)], [slot(4096)])
        with pytest.raises((TierUnavailable, OSError)):
            tier.write([key_of(1)], [slot(4096)])


class TierMachine(RuleBasedStateMachine):
    """Any sequence of calls, against a dict. Subclass it, define `make_tier`, and take its `TestCase`."""

    block_bytes = 5000
    survives_close = False
    numbers = st.lists(st.integers(0, 5), max_size=5)

    def make_tier(self) -> Tier:
        """Open the storage of this run (an instance of the machine is one run) for `block_bytes`."""
        raise NotImplementedError

    @initialize()
    def open(self) -> None:
        self.tier = self.make_tier()
        self.model: dict[BlockKey, bytes] = {}

    @rule(numbers=numbers, variant=st.integers(0, 1))
    def write(self, numbers: list[int], variant: int) -> None:
        payloads = [payload_of(10 * variant + number, self.block_bytes) for number in numbers]
        outcomes = self.tier.write([key_of(number) for number in numbers], [filled(payload) for payload in payloads])
        assert list(outcomes) == [Outcome.OK] * len(numbers)
        for number, payload in zip(numbers, payloads, strict=True):
            self.model.setdefault(key_of(number), payload)

    @rule(numbers=numbers)
    def read(self, numbers: list[int]) -> None:
        keys, views = [key_of(number) for number in numbers], [slot(self.block_bytes) for _ in numbers]
        for key, view, outcome in zip(keys, views, self.tier.read(keys, views), strict=True):
            assert outcome is (Outcome.OK if key in self.model else Outcome.MISSING)
            assert outcome is Outcome.MISSING or bytes(view[: self.block_bytes]) == self.model[key]

    @rule(numbers=numbers)
    def delete(self, numbers: list[int]) -> None:
        keys = [key_of(number) for number in numbers]
        assert list(self.tier.delete(keys)) == [Outcome.OK] * len(keys)
        for key in keys:
            self.model.pop(key, None)

    @rule()
    def reopen(self) -> None:
        self.tier.close()
        self.tier = self.make_tier()
        if not self.survives_close:
            self.model.clear()

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        if not hasattr(self, "tier"):
            return
        keys = [key_of(number) for number in range(6)]
        assert list(self.tier.contains(keys)) == [key in self.model for key in keys]
        assert sorted(stored.key for stored in self.tier.scan()) == sorted(self.model)

    def teardown(self) -> None:
        if hasattr(self, "tier"):
            self.tier.close()
