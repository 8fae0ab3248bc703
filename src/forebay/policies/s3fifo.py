"""S3-FIFO: three queues, first in first out. A block used once passes through the small one and is gone.

Source: J. Yang, Y. Zhang, Z. Qiu, Y. Yue, K. V. Rashmi, "FIFO queues are all you need for cache eviction", SOSP 2023.
What is new enters the small queue, a tenth of the cache. At its end, a block that was used meanwhile moves to the main
queue; one that was not goes, and its key is remembered as a ghost; a ghost that comes again enters the main queue at
once. The main queue gives a block another round for each of its uses, three at most.

One thing differs from the paper: there the hand moves when room is needed. Here asking for victims changes nothing, so
the hand moves on when a block has gone, up to the next one that may go.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import msgspec

from forebay.errors import ConfigError
from forebay.types import BlockKey

_MOST_USES = 3
"""Rounds that a block of the main queue can have in hand, as in the paper."""


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    small_share: float = 0.1
    """Share of the blocks that the small queue may hold; the paper's value."""


def build(options: Options) -> S3FIFO:
    if not 0 < options.small_share < 1:
        raise ConfigError(f"small_share must be between 0 and 1, not {options.small_share}")
    return S3FIFO(options.small_share)


class S3FIFO:
    """Amortised O(1) a block. Memory: about 170 bytes a block beyond its key, and a ghost with its key 240.

    There are never more ghosts than blocks in the main queue.
    """

    def __init__(self, small_share: float = 0.1) -> None:
        self._small_share = small_share
        self._small: OrderedDict[BlockKey, int] = OrderedDict()
        """Oldest first, with the uses since it came."""
        self._main: OrderedDict[BlockKey, int] = OrderedDict()
        """The hand stands before the first one; with the rounds that each has in hand."""
        self._ghosts: OrderedDict[BlockKey, None] = OrderedDict()

    def inserted(self, keys: Sequence[BlockKey]) -> None:
        for key in reversed(keys):  # the tail enters first, and leaves first
            if key in self._small or key in self._main:
                self._use(key)
            elif key in self._ghosts:
                del self._ghosts[key]
                self._main[key] = 0
            else:
                self._small[key] = 0

    def accessed(self, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            self._use(key)

    def _use(self, key: BlockKey) -> None:
        queue = self._small if key in self._small else self._main
        uses = queue.get(key)
        if uses is not None and uses < _MOST_USES:
            queue[key] = uses + 1

    def removed(self, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            if self._small.pop(key, None) is not None:
                self._ghosts[key] = None
            elif self._main.pop(key, None) is None:
                continue
            self._move_hand()
        while len(self._ghosts) > len(self._main):
            self._ghosts.popitem(last=False)

    def victims(self, count: int, evictable: Callable[[BlockKey], bool]) -> Sequence[BlockKey]:
        return list(islice(filter(evictable, self._in_order()), count))

    def _small_is_next(self, small_blocks: int, main_blocks: int) -> bool:
        return small_blocks > 0 and (not main_blocks or small_blocks > self._small_share * (small_blocks + main_blocks))

    def _move_hand(self) -> None:
        """Move to the main queue, or around in it, what was used, until a block without a use is next to go."""
        while self._small or self._main:
            if self._small_is_next(len(self._small), len(self._main)):
                key, uses = next(iter(self._small.items()))
                if not uses:
                    return
                del self._small[key]
                self._main[key] = 0
            else:
                key, uses = next(iter(self._main.items()))
                if not uses:
                    return
                self._main[key] = uses - 1
                self._main.move_to_end(key)

    def _in_order(self) -> Iterator[BlockKey]:
        """All blocks in the order in which they would go if nothing else happened. Changes nothing."""
        small, main = iter(self._small.items()), iter(self._main.items())
        small_blocks, main_blocks = len(self._small), len(self._main)
        again: deque[tuple[BlockKey, int]] = deque()
        """What has moved to the end of the main queue."""
        while small_blocks or main_blocks:
            if self._small_is_next(small_blocks, main_blocks):
                key, uses = next(small)
                small_blocks -= 1
                if uses:
                    again.append((key, 0))
                    main_blocks += 1
                    continue
            else:
                key, uses = next(main, None) or again.popleft()
                if uses:
                    again.append((key, uses - 1))
                    continue
                main_blocks -= 1
            yield key
