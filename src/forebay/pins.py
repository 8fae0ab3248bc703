"""Blocks that eviction passes over, because somebody asked for it. Pure bookkeeping; owned by the engine's thread.

Such a pin is about a key, not about a copy: it holds wherever the block is or comes to be. It is bounded by a share of
each place, since a place full of pinned blocks could take no other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from forebay.types import BlockKey, Pinned


@dataclass(slots=True)
class _Pin:
    holders: int
    places: tuple[str, ...]
    """Where room was set aside for it, settled when the first holder came."""


class Pins:
    def __init__(self, most_blocks: Mapping[str, int]) -> None:
        """`most_blocks`: how many pinned blocks each place may have to keep, from the fastest place to the slowest."""
        self._most_blocks = dict(most_blocks)
        self._blocks = dict.fromkeys(most_blocks, 0)
        self._pins: dict[BlockKey, _Pin] = {}
        self._set_aside: dict[str, set[BlockKey]] = {place: set() for place in most_blocks}
        """Blocks that were taken out of a place's eviction policy, so that it need not pass over them each time."""

    def __len__(self) -> int:
        return len(self._pins)

    def blocks(self, place: str) -> int:
        """Pinned blocks that have their room in this place, there now or not."""
        return self._blocks[place]

    def holds(self, key: BlockKey, place: str) -> bool:
        """Whether the copy of this block in this place must stay."""
        pin = self._pins.get(key)
        return pin is not None and place in pin.places

    def pin(self, keys: Sequence[BlockKey]) -> Pinned:
        """Pin the leading blocks for which some place has room left; each counts as often as it is pinned."""
        pinned: list[BlockKey] = []
        kept = dict.fromkeys(self._blocks, 0)
        for key in keys:
            pin = self._pins.get(key)
            if pin is None:
                places = tuple(place for place, most in self._most_blocks.items() if self._blocks[place] < most)
                if not places:
                    break
                pin = self._pins[key] = _Pin(0, places)
                for place in places:
                    self._blocks[place] += 1
            pin.holders += 1
            pinned.append(key)
            for place in pin.places:
                kept[place] += 1
        return Pinned(tuple(pinned), len(keys) - len(pinned), tuple(kept.items()))

    def unpin(self, keys: Sequence[BlockKey]) -> list[tuple[str, BlockKey]]:
        """Give back one pin on each of `keys`; keys without one are ignored.

        Returns what has to be told to eviction policies: blocks set aside that are theirs again, by place.
        """
        back: list[tuple[str, BlockKey]] = []
        for key in keys:
            pin = self._pins.get(key)
            if pin is None:
                continue
            pin.holders -= 1
            if pin.holders:
                continue
            del self._pins[key]
            for place in pin.places:
                self._blocks[place] -= 1
                if key in self._set_aside[place]:
                    self._set_aside[place].remove(key)
                    back.append((place, key))
        return back

    def set_aside(self, keys: Sequence[BlockKey], place: str) -> None:
        """These pinned blocks have been removed from the place's eviction policy."""
        self._set_aside[place].update(keys)
