"""Suffixes before the prefixes that they need, and of two kinds of blocks that which is reused less, as measured.

A prompt uses its blocks as a whole, so blocks are ranked by prompts: all blocks of one lookup have the same last use,
and of them the last one goes first, in however many parts they arrive. Blocks are of two kinds: used *once* so far, or
*again*. In each kind the one that was used longest ago goes first; which kind gives a block, is measured.

The measure: for each kind, how often blocks were used again at which age, and for how long they waited in vain, from
what is held and from the keys of what has gone (ghosts). The clock is the count of inserted blocks, which is what room
costs. From these comes the *reuse rate* of a block: the most uses to be had for each unit of time that it is kept on,
over all ages up to which one may keep it. That is Gittins' index for a block that waits for its next use (J. C.
Gittins, "Bandit processes and dynamic allocation indices", J. R. Stat. Soc. B 41(2), 1979), with measured ages in place
of a model, as N. Beckmann, H. Chen, A. Cidon, "LHD: improving cache hit rate by maximizing hit density", NSDI 2018, do
it for hits and space. A block used again never ranks below one used once of the same age: of one prompt, the prefix was
used as often as the suffix, or more often.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import msgspec

from forebay.errors import ConfigError
from forebay.policies.recency import Group, Recency
from forebay.types import BlockKey

_ONCE, _AGAIN = 0, 1
_AGES = 48
"""Age classes, each twice as wide as the one before: up to 2**48 inserted blocks."""
_REFIT_EVENTS = 2000
"""So many ends of waiting are counted between two refits of the rates."""
_KEPT_SHARE = 0.98
"""What a count still weighs after a refit: half after 34 refits, so that the rates follow the load."""
_DOUBT = 0.5
"""Blocks taken to have waited in vain at every age, beside those counted: one lucky reuse is no rate yet."""
_GHOSTS_A_BLOCK = 4
"""Enough to see reuse that comes after several times the age at which blocks go."""


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    most_ghosts: int = 131_072
    """Keys of blocks that have gone, kept to learn from; at most 4 for each block held. About 240 bytes each."""


def build(options: Options) -> PrefixAware:
    if options.most_ghosts < 0:
        raise ConfigError(f"most_ghosts must be 0 or more, not {options.most_ghosts}")
    return PrefixAware(options.most_ghosts)


class _Waits:
    """How waiting for the next use has ended for one kind of blocks, by age; and the reuse rate that follows."""

    def __init__(self) -> None:
        self.used = [0.0] * _AGES
        self.ended = [0.0] * _AGES
        """Used again, or forgotten."""
        self.rates = [1.0] * _AGES

    def fit(self) -> None:
        waiting, uses, waits = 0.0, list(self.used), [0.0] * _AGES
        for age in reversed(range(_AGES)):
            width = float(2**age)
            waits[age] = width * (waiting + self.ended[age] / 2 + _DOUBT)
            waiting += self.ended[age]
        for start in range(_AGES):
            best = total_uses = total_waits = 0.0
            for age in range(start, _AGES):
                total_uses += uses[age]
                total_waits += waits[age]
                best = max(best, total_uses / total_waits)
            self.rates[start] = best
        self.used = [_KEPT_SHARE * count for count in self.used]
        self.ended = [_KEPT_SHARE * count for count in self.ended]


class PrefixAware:
    """Amortised O(1) a block, but for refits: 0.2 ms after every 2,000 reuses or forgotten ghosts.

    Memory: about 170 bytes a block beyond its key, 350 a group of blocks that were used together, and the ghosts. It
    implements `SeesLookups` and so knows which blocks belong together before they come.
    """

    def __init__(self, most_ghosts: int = 131_072) -> None:
        self._most_ghosts = most_ghosts
        self._clock = 0
        """Blocks inserted so far."""
        self._kinds = (Recency(), Recency())
        self._waits = (_Waits(), _Waits())
        self._events = 0
        self._expected: OrderedDict[BlockKey, tuple[int, Group]] = OrderedDict()
        """Looked up and not here: the kind and the group that each joins when it comes."""
        self._ghosts: OrderedDict[BlockKey, int] = OrderedDict()
        """2 * (clock at the last use) + kind."""

    def requested(self, keys: Sequence[BlockKey]) -> None:
        groups = (Group(self._clock), Group(self._clock))
        self._use(keys, groups[_AGAIN])
        missing: set[int] = set()
        for key in keys:
            if self._kind_of(key) is not None:
                continue
            kind = _AGAIN if self._returns(key) else _ONCE
            self._expected[key] = (kind, groups[kind])
            self._expected.move_to_end(key)
            missing.add(kind)
        for kind in sorted(missing):
            self._kinds[kind].await_blocks(groups[kind])
        while len(self._expected) > max(len(keys), self._most_expected()):
            self._expected.popitem(last=False)

    def accessed(self, keys: Sequence[BlockKey]) -> None:
        self._use(keys, Group(self._clock))

    def inserted(self, keys: Sequence[BlockKey]) -> None:
        if not (self._ghosts or self._expected or any(map(len, self._kinds))):
            self._kinds[_ONCE].add(keys, Group(self._clock))  # a restart adopts a million: nothing to look up
            self._clock += len(keys)
            return
        self._use(keys, Group(self._clock))
        groups = (Group(self._clock), Group(self._clock))
        arriving: list[BlockKey] = []
        for key in keys:
            if self._kind_of(key) is not None:
                continue
            expected = self._expected.pop(key, None)
            if expected is not None:
                kind, group = expected
                self._kinds[kind].add((key,), group)
            elif self._returns(key):
                self._kinds[_AGAIN].add((key,), groups[_AGAIN])
            else:
                arriving.append(key)
        self._kinds[_ONCE].add(arriving, groups[_ONCE])
        self._clock += len(keys)

    def removed(self, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            kind = self._kind_of(key)
            if kind is None:
                continue
            self._ghosts[key] = 2 * self._kinds[kind].used_at(key) + kind
            self._kinds[kind].discard(key)
        most_ghosts = min(self._most_ghosts, _GHOSTS_A_BLOCK * sum(map(len, self._kinds)))
        while len(self._ghosts) > most_ghosts:
            _, ghost = self._ghosts.popitem(last=False)
            self._count(ghost % 2, ghost // 2, used=0)

    def victims(self, count: int, evictable: Callable[[BlockKey], bool]) -> Sequence[BlockKey]:
        """Of the coldest of either kind, the one with the lower reuse rate; the older one of equals; else the once."""
        coldest = [(kind, filter(evictable, blocks.coldest())) for kind, blocks in enumerate(self._kinds)]
        heads = [(self._rank(key, kind), key, rest) for kind, rest in coldest if (key := next(rest, None)) is not None]
        found: list[BlockKey] = []
        while heads and len(found) < count:
            head = min(heads)
            heads.remove(head)
            (_, _, kind), key, rest = head
            found.append(key)
            if (following := next(rest, None)) is not None:
                heads.append((self._rank(following, kind), following, rest))
        return found

    def _rank(self, key: BlockKey, kind: int) -> tuple[float, int, int]:
        used_at = self._kinds[kind].used_at(key)
        age = _age_class(self._clock - used_at)
        rate = self._waits[_ONCE].rates[age]
        if kind == _AGAIN:
            rate = max(rate, self._waits[_AGAIN].rates[age])
        return rate, used_at, kind

    def _kind_of(self, key: BlockKey) -> int | None:
        for kind, blocks in enumerate(self._kinds):
            if key in blocks:
                return kind
        return None

    def _use(self, keys: Sequence[BlockKey], group: Group) -> None:
        """Move those that are here, in their order, to a group of blocks used again."""
        held: list[BlockKey] = []
        for key in keys:
            kind = self._kind_of(key)
            if kind is not None:
                self._count(kind, self._kinds[kind].used_at(key), used=1)
                self._kinds[kind].discard(key)
                held.append(key)
        self._kinds[_AGAIN].add(held, group)

    def _returns(self, key: BlockKey) -> bool:
        """Whether it was here not long ago. Its waiting has ended with a use."""
        ghost = self._ghosts.pop(key, None)
        if ghost is None:
            return False
        self._count(ghost % 2, ghost // 2, used=1)
        return True

    def _count(self, kind: int, used_at: int, *, used: int) -> None:
        """A block's waiting has ended with a use (1), or is watched no longer (0)."""
        waits, age = self._waits[kind], _age_class(self._clock - used_at)
        waits.ended[age] += 1
        waits.used[age] += used
        self._events += 1
        if self._events % _REFIT_EVENTS == 0:
            for each in self._waits:
                each.fit()

    def _most_expected(self) -> int:
        return max(1024, sum(map(len, self._kinds)) // 4)


def _age_class(age: int) -> int:
    return min(_AGES, (age + 1).bit_length()) - 1
