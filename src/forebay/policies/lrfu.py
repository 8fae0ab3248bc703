"""Frequency and recency in one number: LRFU.

Source: D. Lee et al., "LRFU: a spectrum of policies that subsumes the least recently used and least frequently used
policies", IEEE Transactions on Computers 50(12), 2001. Each access adds 1 to a block's value, and a value halves every
`half_life` accesses to the cache. Halving keeps the order of two values, so it is enough to store log2 of what a value
would have been at time 0: value(t) = 2**(rank - t / half_life), and `rank` changes only when its block is used.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence

import msgspec

from forebay.errors import ConfigError
from forebay.types import BlockKey


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    half_life: float = 10_000.0
    """Accesses (of any block) after which one access counts half. Near 0: LRU. Very large: LFU."""


def build(options: Options) -> LRFU:
    if not options.half_life > 0:
        raise ConfigError(f"half_life must be above 0 accesses, not {options.half_life}")
    return LRFU(options.half_life)


class LRFU:
    """A heap of (rank, key) with stale entries skipped: a key's true rank is in `_rank`."""

    def __init__(self, half_life: float = 10_000.0) -> None:
        self._half_life = half_life
        self._clock = 0
        self._rank: dict[BlockKey, float] = {}
        self._heap: list[tuple[float, BlockKey]] = []

    def inserted(self, keys: Sequence[BlockKey]) -> None:
        for key in reversed(keys):  # the head is touched last, and ranks highest
            self._clock += 1
            now = self._clock / self._half_life
            old = self._rank.get(key)
            rank = now if old is None else now + math.log2(1.0 + 2.0 ** (old - now))
            self._rank[key] = rank
            heapq.heappush(self._heap, (rank, key))
        if len(self._heap) > 2 * len(self._rank) + 64:
            self._heap = [(rank, key) for key, rank in self._rank.items()]
            heapq.heapify(self._heap)

    def accessed(self, keys: Sequence[BlockKey]) -> None:
        self.inserted([key for key in keys if key in self._rank])

    def removed(self, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            self._rank.pop(key, None)

    def victims(self, count: int, evictable: Callable[[BlockKey], bool]) -> Sequence[BlockKey]:
        found: list[BlockKey] = []
        seen: list[tuple[float, BlockKey]] = []
        while self._heap and len(found) < count:
            entry = heapq.heappop(self._heap)
            rank, key = entry
            if self._rank.get(key) != rank:
                continue
            seen.append(entry)
            if evictable(key):
                found.append(key)
        for entry in seen:
            heapq.heappush(self._heap, entry)
        return found
