"""Homes: shares follow the weights, and a change of roots moves only what it must."""

from __future__ import annotations

import hashlib
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.tiers.file.placement import Home, order
from forebay.types import BlockKey

KEYS = [BlockKey(hashlib.sha256(b"%d" % i).digest()) for i in range(10_000)]


def homes(*weights: float) -> list[Home]:
    return [Home(hashlib.sha256(b"root %d" % i).digest()[:16], weight) for i, weight in enumerate(weights)]


@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.0, 2.0), (1.0, 1.0, 1.0, 1.0), (3.0, 1.0, 2.0)])
def test_shares_follow_the_weights(weights: tuple[float, ...]) -> None:
    placed = homes(*weights)
    shares = Counter(order(placed, key)[0] for key in KEYS)
    for i, weight in enumerate(weights):
        assert shares[i] == pytest.approx(len(KEYS) * weight / sum(weights), rel=0.05)


def test_an_added_root_only_takes() -> None:
    before, after = homes(1, 1, 1), homes(1, 1, 1, 1)
    moved = [key for key in KEYS if order(before, key)[0] != order(after, key)[0]]
    assert all(order(after, key)[0] == 3 for key in moved)
    assert len(moved) == pytest.approx(len(KEYS) / 4, rel=0.05)


def test_a_lost_root_leaves_the_others_alone_and_its_blocks_to_the_next() -> None:
    whole = homes(1, 2, 1)
    rest = [whole[0], whole[2]]
    for key in KEYS[:2000]:
        expected = [whole[i] for i in order(whole, key) if i != 1]
        assert [rest[i] for i in order(rest, key)] == expected


@given(st.binary(min_size=32, max_size=32), st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6), st.randoms())
def test_the_order_of_the_options_does_not_matter(raw: bytes, weights: list[float], chance: object) -> None:
    placed = homes(*weights)
    shuffled = list(placed)
    chance.shuffle(shuffled)  # type: ignore[attr-defined]
    key = BlockKey(raw)
    assert [placed[i] for i in order(placed, key)] == [shuffled[i] for i in order(shuffled, key)]
