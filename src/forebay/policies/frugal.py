"""A write has to be worth it: only blocks that were asked for before, of prompts that are long enough.

How often a block was asked for is estimated by a count-min sketch (G. Cormode, S. Muthukrishnan, "An improved data
stream summary", J. Algorithms 55(1), 2005): four rows of counters, of which a key owns one in each; the smallest is the
estimate, and it is never too low. Only the smallest are raised, which keeps keys that collide apart for longer. All
counters are halved now and then, as G. Einziger, R. Friedman, B. Manes, "TinyLFU", ACM Trans. Storage 13(4), 2017,
have it, so that what was popular once does not stay so for ever. Keys are SHA-256: their own bytes are the hash
functions.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from forebay.errors import ConfigError
from forebay.types import BlockKey, TierSpec

_ROWS = 4
_WORDS = struct.Struct("<4Q")
"""A key as one word a row."""
_MOST_COUNT = 255
_MOST_RECENT = 65_536
"""Blocks whose prompt's length is remembered: from a lookup to the offers that follow it."""


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    min_uses: int = 2
    """How often a block has to have been asked for, this time included. 1: at once."""
    min_prompt_blocks: int = 1
    """Blocks of prompts with fewer full blocks are not written."""
    sketch_bytes: int = 4 * 2**20
    """Memory of the sketch: a power of two. Counters are halved after a quarter as many block lookups."""


def build(options: Options) -> Frugal:
    if not 1 <= options.min_uses <= _MOST_COUNT:
        raise ConfigError(f"min_uses must be from 1 to {_MOST_COUNT}, not {options.min_uses}")
    if options.min_prompt_blocks < 1:
        raise ConfigError(f"min_prompt_blocks must be 1 or more, not {options.min_prompt_blocks}")
    if not 1024 <= options.sketch_bytes <= 2**34 or options.sketch_bytes & (options.sketch_bytes - 1):
        raise ConfigError(f"sketch_bytes must be a power of two from 1024 to 2**34, not {options.sketch_bytes}")
    return Frugal(options)


class Frugal:
    """O(1) a block. Memory: the sketch, and about 200 bytes for each of at most 65,536 blocks looked up last."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._width = options.sketch_bytes // _ROWS
        self._counters: npt.NDArray[np.uint8] = np.zeros(options.sketch_bytes, dtype=np.uint8)
        """[_ROWS * width], row after row."""
        self._flat: memoryview[int] = self._counters.data
        """The same, for one key at a time: NumPy costs ten times as much there."""
        self._row_starts = np.arange(_ROWS, dtype=np.int64) * self._width
        self._since_halving = 0
        self._recent: OrderedDict[BlockKey, int] = OrderedDict()
        """Full blocks of the longest prompt that asked for the block lately."""

    def requested(self, keys: Sequence[BlockKey]) -> None:
        if not keys:
            return
        places = self._places(keys)
        counts = self._counters[places]
        lowest = counts.min(axis=1, keepdims=True)
        raised = np.where((counts == lowest) & (lowest < _MOST_COUNT), counts + 1, counts)
        np.maximum.at(self._counters, places, raised)
        self._since_halving += len(keys)
        if self._since_halving >= self._width:
            self._since_halving = 0
            self._counters >>= 1
        if self._options.min_prompt_blocks > 1:
            self._remember(keys)

    def admit(self, key: BlockKey, tier: TierSpec, used_bytes: int) -> bool:
        if self._recent.get(key, self._options.min_prompt_blocks) < self._options.min_prompt_blocks:
            return False
        return self._options.min_uses == 1 or self.estimated_uses(key) >= self._options.min_uses

    def estimated_uses(self, key: BlockKey) -> int:
        """Lookups of the block, halved with age; never too low before the first halving."""
        uses = _MOST_COUNT
        for row, word in enumerate(_WORDS.unpack(key)):
            uses = min(uses, self._flat[row * self._width + (word & (self._width - 1))])
        return uses

    def _places(self, keys: Sequence[BlockKey]) -> npt.NDArray[np.int64]:
        """[keys, _ROWS]: the counters of each key."""
        words = np.frombuffer(b"".join(keys), dtype="<u8").reshape(len(keys), _ROWS)
        places: npt.NDArray[np.int64] = (words & np.uint64(self._width - 1)).astype(np.int64) + self._row_starts
        return places

    def _remember(self, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            self._recent[key] = max(len(keys), self._recent.get(key, 0))
            self._recent.move_to_end(key)
        while len(self._recent) > max(_MOST_RECENT, len(keys)):
            self._recent.popitem(last=False)
