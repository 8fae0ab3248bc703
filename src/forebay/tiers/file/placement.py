"""Which root a block calls home: weighted rendezvous hashing. Pure.

Every root scores every key; the highest score is the home, the next one takes over when the home is gone. Adding or
removing one root of n therefore moves only the blocks that it wins or loses, about 1/n of them.

Highest-random-weight hashing: Thaler and Ravishankar, "Using name-based mappings to increase hit rates", 1998. The
score -weight / ln(u), which gives every root exactly its share of weight: Schindelhauer and Schomaker, "Weighted
distributed hash tables", 2005 (the logarithmic method).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from forebay.types import BlockKey


@dataclass(frozen=True, slots=True)
class Home:
    """A root as placement sees it: its lasting identity, not its path, so that a root may be mounted elsewhere."""

    root_id: bytes
    weight: float
    """Share of the blocks, relative to the other roots; positive and finite."""


def order(homes: Sequence[Home], key: BlockKey) -> list[int]:
    """Indices into `homes`, the key's home first, then where to look or write when that one is not there."""
    if len(homes) == 1:
        return [0]
    return sorted(range(len(homes)), key=lambda i: _score(homes[i], key), reverse=True)


def _score(home: Home, key: BlockKey) -> float:
    # 52 bits and a half: exact in a double, and never 0 or 1, so the logarithm is finite and not zero
    uniform = ((xxhash.xxh3_64_intdigest(home.root_id + key) >> 12) + 0.5) / 2**52
    return -home.weight / math.log(uniform)
