"""Where every block is. In memory, single-threaded, no I/O. The only owner of copy states, pins and byte counts.

A resting copy in a tier is one shared value, so that a block known to one tier costs its key and one dict entry.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from forebay.errors import InvariantBroken
from forebay.types import HOST, BlockKey, CopyState, Slot


class Copy(NamedTuple):
    """One copy of one block in one place. Replaced, never changed."""

    state: CopyState
    stored_bytes: int
    slot: Slot | None = None
    """Set for copies in the host pool, and only there."""
    pins: int = 0


class BlockIndex:
    """(key, place) -> Copy, where a place is `HOST` or a tier's name."""

    def __init__(self, places: tuple[str, ...]) -> None:
        self._copies: dict[str, dict[BlockKey, Copy]] = {place: {} for place in places}
        self._used_bytes = dict.fromkeys(places, 0)
        self._foreign: dict[str, set[BlockKey]] = {place: set() for place in places}
        """Blocks of other tenants, wherever somebody cares. A block's tenant never changes, so it stays in here."""
        self._foreign_bytes = dict.fromkeys(places, 0)
        self._resting: dict[int, Copy] = {}

    # --- queries

    def get(self, key: BlockKey, place: str) -> Copy | None:
        return self._copies[place].get(key)

    def is_ready(self, key: BlockKey, place: str) -> bool:
        copy = self._copies[place].get(key)
        return copy is not None and copy.state is CopyState.READY

    def is_evictable(self, key: BlockKey, place: str) -> bool:
        copy = self._copies[place].get(key)
        return copy is not None and copy.state is CopyState.READY and copy.pins == 0

    def copies(self, place: str) -> Iterator[tuple[BlockKey, Copy]]:
        yield from self._copies[place].items()

    def count(self, place: str) -> int:
        return len(self._copies[place])

    def used_bytes(self, place: str) -> int:
        """Bytes of FILLING and READY copies. DROPPING ones give their room to the write that evicts them."""
        return self._used_bytes[place]

    def our_bytes(self, place: str) -> int:
        """As `used_bytes`, of blocks that are not marked as foreign."""
        return self._used_bytes[place] - self._foreign_bytes[place]

    def is_foreign(self, key: BlockKey, place: str) -> bool:
        return key in self._foreign[place]

    def mark_foreign(self, keys: Iterable[BlockKey], place: str) -> None:
        """These blocks, none of which is in the place, belong to another tenant than the engine's."""
        self._foreign[place].update(keys)

    # --- transitions: see CopyState for the picture

    def reserve(self, key: BlockKey, place: str, stored_bytes: int, slot: Slot | None = None) -> None:
        """(absent) -> FILLING, one pin held by the filler."""
        held = self._copies[place]
        assert key not in held, f"{place} has this block already"
        held[key] = Copy(CopyState.FILLING, stored_bytes, slot, pins=1)
        self._count(key, place, stored_bytes)

    def commit(self, key: BlockKey, place: str) -> None:
        """FILLING -> READY, and the filler's pin is given back."""
        copy = self._copies[place][key]
        assert copy.state is CopyState.FILLING
        self._put(key, place, copy._replace(state=CopyState.READY, pins=copy.pins - 1))

    def abandon(self, key: BlockKey, place: str) -> Copy:
        """FILLING -> (absent): the fill failed. Only the filler may still hold a pin."""
        copy = self._copies[place].pop(key)
        assert copy.state is CopyState.FILLING
        assert copy.pins == 1, "somebody still waits for this fill"
        self._count(key, place, -copy.stored_bytes)
        return copy

    def adopt(self, key: BlockKey, place: str, stored_bytes: int) -> None:
        """(absent) -> READY: the place says that it holds the block."""
        held = self._copies[place]
        if key not in held:
            held[key] = self._at_rest(stored_bytes)
            self._count(key, place, stored_bytes)

    def adopt_many(self, keys: Sequence[BlockKey], place: str, stored_bytes: int) -> None:
        """As `adopt`, for blocks of one length."""
        held = self._copies[place]
        fresh = [key for key in keys if key not in held] if held else keys
        if held:
            held.update(dict.fromkeys(fresh, self._at_rest(stored_bytes)))
        else:  # a second dict would double the time of a start
            self._copies[place] = dict.fromkeys(fresh, self._at_rest(stored_bytes))
        self._used_bytes[place] += len(fresh) * stored_bytes
        foreign = self._foreign[place]
        if foreign:
            self._foreign_bytes[place] += stored_bytes * sum(key in foreign for key in fresh)

    def forget(self, key: BlockKey, place: str) -> Copy:
        """READY -> (absent): the copy is not wanted any more."""
        copy = self._copies[place].pop(key)
        assert copy.state is CopyState.READY
        assert copy.pins == 0, "somebody still reads this copy"
        self._count(key, place, -copy.stored_bytes)
        return copy

    def move(self, key: BlockKey, place: str, slot: Slot) -> Slot:
        """A FILLING copy is filled in another slot than was planned; returns the old one."""
        copy = self._copies[place][key]
        assert copy.state is CopyState.FILLING
        assert copy.slot is not None
        self._copies[place][key] = copy._replace(slot=slot)
        return copy.slot

    def withdraw(self, key: BlockKey, place: str) -> None:
        """READY -> (absent), or LOST until the last pin is gone: the place does not hold what the index said."""
        copy = self._copies[place][key]
        assert copy.state is CopyState.READY
        self._count(key, place, -copy.stored_bytes)
        if copy.pins:
            self._copies[place][key] = copy._replace(state=CopyState.LOST)
        else:
            del self._copies[place][key]

    def begin_drop(self, key: BlockKey, place: str) -> None:
        """READY -> DROPPING"""
        assert self.is_evictable(key, place)
        copy = self._copies[place][key]
        self._copies[place][key] = copy._replace(state=CopyState.DROPPING)
        self._count(key, place, -copy.stored_bytes)

    def keep(self, key: BlockKey, place: str) -> None:
        """DROPPING -> READY: the delete failed."""
        copy = self._copies[place][key]
        assert copy.state is CopyState.DROPPING
        self._put(key, place, copy._replace(state=CopyState.READY))
        self._count(key, place, copy.stored_bytes)

    def drop(self, key: BlockKey, place: str) -> None:
        """DROPPING -> (absent): the delete has landed."""
        copy = self._copies[place].pop(key)
        assert copy.state is CopyState.DROPPING

    def pin(self, key: BlockKey, place: str) -> None:
        copy = self._copies[place][key]
        assert copy.state in (CopyState.FILLING, CopyState.READY)
        self._copies[place][key] = Copy(copy.state, copy.stored_bytes, copy.slot, copy.pins + 1)

    def unpin(self, key: BlockKey, place: str) -> None:
        copy = self._copies[place][key]
        assert copy.pins > 0
        if copy.pins == 1 and copy.state is CopyState.LOST:
            del self._copies[place][key]
        else:
            self._put(key, place, Copy(copy.state, copy.stored_bytes, copy.slot, copy.pins - 1))

    def _count(self, key: BlockKey, place: str, more_bytes: int) -> None:
        self._used_bytes[place] += more_bytes
        if key in self._foreign[place]:
            self._foreign_bytes[place] += more_bytes

    def _put(self, key: BlockKey, place: str, copy: Copy) -> None:
        at_rest = copy.state is CopyState.READY and copy.pins == 0 and copy.slot is None
        self._copies[place][key] = self._at_rest(copy.stored_bytes) if at_rest else copy

    def _at_rest(self, stored_bytes: int) -> Copy:
        copy = self._resting.get(stored_bytes)
        if copy is None:
            copy = self._resting[stored_bytes] = Copy(CopyState.READY, stored_bytes)
        return copy

    # --- the promises

    def check(self, slots: int, free_slots: int) -> None:
        """Raises InvariantBroken unless every slot is free or in exactly one host copy and the byte counts are true."""
        used = [copy.slot for copy in self._copies[HOST].values()]
        if None in used or len(set(used)) != len(used):
            raise InvariantBroken("two host copies share a slot, or one has none")
        if len(used) + free_slots != slots:
            raise InvariantBroken(f"slots leak: {len(used)} used and {free_slots} free of {slots}")
        for place, held in self._copies.items():
            counts = (CopyState.FILLING, CopyState.READY)
            counted = sum(copy.stored_bytes for copy in held.values() if copy.state in counts)
            if counted != self._used_bytes[place]:
                raise InvariantBroken(f"{place}: counted {counted} bytes, the index says {self._used_bytes[place]}")
            theirs = sum(
                held[key].stored_bytes for key in self._foreign[place] & held.keys() if held[key].state in counts
            )
            if theirs != self._foreign_bytes[place]:
                raise InvariantBroken(f"{place}: counted {theirs} foreign bytes, not {self._foreign_bytes[place]}")
            for copy in held.values():
                if copy.state is CopyState.FILLING and copy.pins < 1:
                    raise InvariantBroken(f"{place}: a block is being filled by nobody")
                if (copy.slot is None) == (place == HOST):
                    raise InvariantBroken(f"{place}: slot {copy.slot} where it does not belong")
