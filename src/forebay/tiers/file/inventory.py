"""Everything that the roots of a tier hold, in order of age, for an engine that has just been opened. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np

from forebay.tiers.file.holdings import Space
from forebay.types import BlockKey, StoredRun

_RUN_BLOCKS = 8192
"""Within so many neighbours in age, blocks that are alike are put together."""


def inventory(spaces: Sequence[Space], tenant: bytes) -> Iterator[StoredRun]:
    """Each key once, oldest first; one that is there several times (in several roots or namespaces) with all its bytes.

    `tenant`: whose blocks are ours.
    """
    spaces = [space for space in spaces if space.held]
    if not spaces:
        return
    keys: Sequence[BlockKey] = list(chain.from_iterable(space.held for space in spaces))
    lengths_bytes = np.concatenate([space.lengths_bytes() for space in spaces])
    ours = np.repeat([space.tenant == tenant for space in spaces], [len(space.held) for space in spaces])
    order = np.arange(len(keys))
    if len(spaces) > 1:
        order = np.argsort(np.concatenate([space.times_s() for space in spaces]), kind="stable")
        keys = [keys[i] for i in order.tolist()]
        copies = Counter(keys) if len(set(keys)) < len(keys) else Counter[BlockKey]()
        repeated = {key for key, count in copies.items() if count > 1}
        if repeated:
            yield from _repeated(repeated, spaces, tenant)
            first = [at for at, key in enumerate(keys) if key not in repeated]
            keys, order = [keys[at] for at in first], order[first]
    if len(keys) and (lengths_bytes == lengths_bytes[0]).all() and (ours == ours[0]).all():
        yield StoredRun(keys, int(lengths_bytes[0]), bool(ours[0]))
    else:
        yield from _runs(keys, lengths_bytes[order], ours[order])


def _repeated(keys: set[BlockKey], spaces: Sequence[Space], tenant: bytes) -> Iterator[StoredRun]:
    for key in sorted(keys):
        holders = [space for space in spaces if key in space.held]
        stored_bytes = sum(space.length_bytes(key) or 0 for space in holders)
        yield StoredRun((key,), stored_bytes, any(space.tenant == tenant for space in holders))


def _runs(keys: Sequence[BlockKey], lengths_bytes: np.ndarray, ours: np.ndarray) -> Iterator[StoredRun]:
    for begin in range(0, len(keys), _RUN_BLOCKS):
        end = min(begin + _RUN_BLOCKS, len(keys))
        kinds = np.stack([lengths_bytes[begin:end], ours[begin:end]])
        for length_bytes, is_ours in np.unique(kinds, axis=1).T.tolist():
            alike = np.flatnonzero((kinds[0] == length_bytes) & (kinds[1] == is_ours)) + begin
            chosen = keys[begin:end] if len(alike) == end - begin else [keys[at] for at in alike.tolist()]
            yield StoredRun(chosen, int(length_bytes), bool(is_ours))
