"""Least recently used, tails before heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from forebay.types import BlockKey


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """LRU has nothing to set."""


def build(options: Options) -> LRU:
    return LRU()


class LRU:
    """Keys from coldest to hottest. The last block of a call ranks coldest of them: the others do not need it."""

    def __init__(self) -> None:
        self._order: dict[BlockKey, None] = {}

    def inserted(self, keys: Sequence[BlockKey]) -> None:
        for key in reversed(keys):
            self._order.pop(key, None)
            self._order[key] = None

    def accessed(self, keys: Sequence[BlockKey]) -> None:
        self.inserted([key for key in keys if key in self._order])

    def removed(self, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            self._order.pop(key, None)

    def victims(self, count: int, evictable: Callable[[BlockKey], bool]) -> Sequence[BlockKey]:
        found: list[BlockKey] = []
        for key in self._order:
            if len(found) == count:
                break
            if evictable(key):
                found.append(key)
        return found
