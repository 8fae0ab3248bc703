"""Eviction in a tier where each tenant has a quota: whose block goes. Owned by the engine's thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum

from forebay.ports import EvictionPolicy, SeesLookups
from forebay.types import BlockKey


class Whose(Enum):
    """Among whose blocks a victim is looked for."""

    ANYBODYS = "anybody's"
    OURS = "ours"
    """The engine's own tenant's."""


class ByTenant:
    """An `EvictionPolicy` over all blocks of a tier, with a second one that ranks this tenant's alone.

    So a tenant at its quota finds its own coldest block at once, however many colder ones of others there are.
    """

    def __init__(self, everybody: EvictionPolicy, ours: EvictionPolicy, is_foreign: Callable[[BlockKey], bool]) -> None:
        self._everybody, self._ours, self._is_foreign = everybody, ours, is_foreign

    def inserted(self, keys: Sequence[BlockKey]) -> None:
        self._everybody.inserted(keys)
        self._ours.inserted(self._own(keys))

    def accessed(self, keys: Sequence[BlockKey]) -> None:
        self._everybody.accessed(keys)
        self._ours.accessed(self._own(keys))

    def removed(self, keys: Sequence[BlockKey]) -> None:
        self._everybody.removed(keys)
        self._ours.removed(self._own(keys))

    def victims(self, count: int, evictable: Callable[[BlockKey], bool]) -> Sequence[BlockKey]:
        return self._everybody.victims(count, evictable)

    def own_victims(self, count: int, evictable: Callable[[BlockKey], bool]) -> Sequence[BlockKey]:
        """As `victims`, of this tenant's blocks."""
        return self._ours.victims(count, evictable)

    def _own(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        return [key for key in keys if not self._is_foreign(key)]


class ByTenantSeeingLookups(ByTenant):
    """Where the policies rank by what was looked up."""

    def requested(self, keys: Sequence[BlockKey]) -> None:
        for policy in (self._everybody, self._ours):
            if isinstance(policy, SeesLookups):
                policy.requested(keys)


def by_tenant(everybody: EvictionPolicy, ours: EvictionPolicy, is_foreign: Callable[[BlockKey], bool]) -> ByTenant:
    """Both policies are of one kind."""
    kind = ByTenantSeeingLookups if isinstance(everybody, SeesLookups) else ByTenant
    return kind(everybody, ours, is_foreign)
