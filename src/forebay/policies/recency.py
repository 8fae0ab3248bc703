"""The order of last use, kept by groups: not a policy, but what policies are made of.

The blocks of one use form a group, and a block costs two dict entries however often it is used. Deleting the first
entry of a plain dict of a million again and again makes every later look at its first entry walk over the holes; here
entries leave at the end of a group's dict (a tail goes before its head), and groups leave an OrderedDict, which has no
holes.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence

from forebay.types import BlockKey

_MOST_AWAITED = 1024
"""Groups that keep their place while none of their blocks has come."""


class Group:
    """Blocks of one use, in token order."""

    __slots__ = ("keys", "used_at")

    def __init__(self, used_at: int) -> None:
        self.keys: dict[BlockKey, None] = {}
        self.used_at = used_at
        """The policy's own count at the use."""


class Recency:
    """Each call O(1) a block. Memory: two dict entries a block, about 170 bytes beyond the key, and 350 a group."""

    def __init__(self) -> None:
        self._groups: OrderedDict[Group, None] = OrderedDict()
        """Those with blocks, and some whose blocks may come, from coldest to hottest."""
        self._awaited: deque[Group] = deque()
        self._group_of: dict[BlockKey, Group] = {}

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._group_of

    def __len__(self) -> int:
        return len(self._group_of)

    def used_at(self, key: BlockKey) -> int:
        return self._group_of[key].used_at

    def add(self, keys: Sequence[BlockKey], group: Group) -> None:
        """Put blocks at the end of a group, and a group that has no place at the hot end. No block may be here yet."""
        if not keys:
            return
        self._groups.setdefault(group)
        group.keys.update(dict.fromkeys(keys))
        self._group_of.update(dict.fromkeys(keys, group))

    def await_blocks(self, group: Group) -> None:
        """Give a group its place at the hot end before its blocks come; not for ever."""
        self._groups.setdefault(group)
        self._awaited.append(group)
        if len(self._awaited) > _MOST_AWAITED:
            late = self._awaited.popleft()
            if not late.keys:
                self._groups.pop(late, None)

    def discard(self, key: BlockKey) -> None:
        group = self._group_of.pop(key, None)
        if group is None:
            return
        last, _ = group.keys.popitem()  # nearly always the one, and `del` would leave a hole at the end
        if last != key:
            group.keys[last] = None
            del group.keys[key]
        if not group.keys:
            del self._groups[group]

    def coldest(self) -> Iterator[BlockKey]:
        """From the coldest group to the hottest, in each from its last block to its first. For use without changes."""
        for group in self._groups:
            if group.keys:  # a small place has a thousand awaited groups before its coldest block
                yield from reversed(group.keys)
