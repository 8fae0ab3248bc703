"""Least recently used, tails before heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

import msgspec

from forebay.policies.recency import Group, Recency
from forebay.types import BlockKey


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """LRU has nothing to set."""


def build(options: Options) -> LRU:
    return LRU()


class LRU:
    """The last block of a call ranks coldest of them: the others do not need it."""

    def __init__(self) -> None:
        self._blocks = Recency()

    def inserted(self, keys: Sequence[BlockKey]) -> None:
        self.removed(keys)
        self._blocks.add(keys, Group(0))

    def accessed(self, keys: Sequence[BlockKey]) -> None:
        self.inserted([key for key in keys if key in self._blocks])

    def removed(self, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            self._blocks.discard(key)

    def victims(self, count: int, evictable: Callable[[BlockKey], bool]) -> Sequence[BlockKey]:
        return list(islice(filter(evictable, self._blocks.coldest()), count))
