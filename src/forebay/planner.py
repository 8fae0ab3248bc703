"""Pure decisions: who holds what, in; where each block of a prefix comes from, out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from forebay.index import BlockIndex
from forebay.types import HOST, BlockKey, Read, TierSpec


def by_speed(specs: Iterable[TierSpec]) -> tuple[str, ...]:
    """Names of the tiers from fast to slow."""
    return tuple(spec.name for spec in sorted(specs, key=lambda spec: (spec.read_latency_ns, spec.name)))


IsOpen = Callable[[str, BlockKey], bool]
"""Whether a tier can be asked for a block now: the place that holds it is not known to hang."""


def source_of(
    key: BlockKey,
    index: BlockIndex,
    tiers: Sequence[str],
    tried: Collection[str] = (),
    is_open: IsOpen = lambda tier, key: True,
) -> str | None:
    """The fastest place that holds the block, or will once a fill that is under way has ended. None: nobody does.

    `tiers` run from fast to slow; those in `tried` have failed and are passed over. A host copy is READY or FILLING,
    never DROPPING, since a slot is freed at once.
    """
    if index.get(key, HOST) is not None:
        return HOST
    for tier in tiers:
        if tier not in tried and index.is_ready(key, tier) and is_open(tier, key):
            return tier
    return None


def known_prefix(
    keys: Sequence[BlockKey], index: BlockIndex, tiers: Sequence[str], is_open: IsOpen = lambda tier, key: True
) -> tuple[Read, ...]:
    """The longest unbroken run of blocks from the start of `keys` of which each is held somewhere."""
    prefix: list[Read] = []
    for key in keys:
        source = source_of(key, index, tiers, (), is_open)
        if source is None:
            break
        prefix.append(Read(key, source))
    return tuple(prefix)
