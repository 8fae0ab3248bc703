"""What no policy can exceed: the block hits of Belady's MIN.

MIN drops the block whose next use lies farthest ahead, and does not keep a block at all whose next use lies beyond
those of all that are held (L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM
Systems Journal 5(2), 1966). It counts a hit for every block that is held, whether or not those before it are. With the
unbroken prefixes that an engine needs, a policy can only have fewer: the bound may be out of reach.
"""

from __future__ import annotations

import heapq
from itertools import chain

from forebay.bench.policy.replay import Prompts
from forebay.types import BlockKey


def most_hits(prompts: Prompts, cache_blocks: int) -> int:
    uses = list(chain.from_iterable(prompts.chains))
    following = _following(uses)
    held: dict[BlockKey, int] = {}
    """With the position of the next use."""
    farthest: list[tuple[int, BlockKey]] = []
    """Heap of (- next use, block), stale entries among them."""
    hits = 0
    for key, next_use in zip(uses, following, strict=True):
        hits += key in held
        held[key] = next_use
        heapq.heappush(farthest, (-next_use, key))
        while len(held) > cache_blocks:
            negative, victim = heapq.heappop(farthest)
            if held.get(victim) == -negative:
                del held[victim]
    return hits


def _following(uses: list[BlockKey]) -> list[int]:
    """For each use, the position of the block's next one; past the end for the last."""
    following = [len(uses)] * len(uses)
    last: dict[BlockKey, int] = {}
    for at in range(len(uses) - 1, -1, -1):
        following[at] = last.get(uses[at], len(uses))
        last[uses[at]] = at
    return following
