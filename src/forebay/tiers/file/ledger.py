"""The catalogues of all roots of a tier together: one capacity, one quota, one write budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from forebay.tiers.file.catalogue import Catalogue
from forebay.tiers.file.holdings import Space
from forebay.tiers.file.root import Reserved, Root
from forebay.types import BlockKey, Change, ChangeKind


class Ledger:
    """Thread-safe. A root that went counts with what it held: it comes back with its blocks."""

    def __init__(
        self,
        roots: Sequence[Root],
        *,
        tenant: bytes,
        capacity_bytes: int,
        quota_bytes: int | None,
        budget_bytes: int | None,
        now_s: Callable[[], float],
    ) -> None:
        self.tenant = tenant
        self._roots = roots
        self._capacity_bytes, self._quota_bytes, self._budget_bytes = capacity_bytes, quota_bytes, budget_bytes
        self._now_s = now_s

    def _present(self) -> list[Catalogue]:
        return [root.catalogue for root in self._roots if root.catalogue is not None and root.health.is_present]

    def _known(self) -> list[Catalogue]:
        """Of roots that were there once: what a catalogue knows is in memory, so one that went can still be asked."""
        return [root.catalogue for root in self._roots if root.catalogue is not None]

    @property
    def used_bytes(self) -> int:
        """Bytes that blocks occupy or are about to, over all processes."""
        return sum(catalogue.used_bytes for catalogue in self._known())

    def room_bytes(self) -> int:
        """What this store may still write; negative when there is too much already."""
        room_bytes = self._capacity_bytes - self.used_bytes
        if self._quota_bytes is not None:
            used_bytes = sum(catalogue.tenant_bytes(self.tenant) for catalogue in self._known())
            room_bytes = min(room_bytes, self._quota_bytes - used_bytes)
        return room_bytes

    def reserve(self, root: Root, keys: Sequence[BlockKey]) -> Reserved:
        """Room in this root, which counts for all of them. Settle those that are not refused there afterwards.

        Each root has its own lock, so that a hung one cannot stop the others. Two processes that reserve in two roots
        at once may therefore both find the last room; both look again once they have reserved, and whoever then sees
        too much gives his own back. So what is written never exceeds the capacity.
        """

        def room_bytes() -> int:
            for catalogue in self._present():
                catalogue.catch_up()
            return self.room_bytes()

        reserved = root.reserve(keys, room_bytes)
        if len(self._known()) == 1 or room_bytes() >= 0:
            return reserved
        taken = frozenset(keys) - reserved.refused
        root.settle(taken)
        return replace(reserved, full=reserved.full | taken)

    def catch_up(self) -> None:
        """Read what other processes have written."""
        for catalogue in self._present():
            catalogue.refresh()

    def spaces(self) -> list[Space]:
        return [space for catalogue in self._present() for space in catalogue.spaces()]

    def take_changes(self) -> list[Change]:
        """What is no longer so is left out: it was written anew, or somebody else has told of it."""
        catalogues = self._present()
        changes = [change for catalogue in catalogues for change in catalogue.take_changes()]
        return [
            change
            for change in changes
            if any(catalogue.namespaces_of(change.key) for catalogue in catalogues) is (change.kind is ChangeKind.ADDED)
        ]

    def budget_left_bytes(self) -> int | None:
        """What may still be written today (UTC) by all processes together; None without a budget."""
        if self._budget_bytes is None:
            return None
        now_s = self._now_s()
        written_bytes = sum(catalogue.meter.today(now_s) for catalogue in self._known())
        return max(0, self._budget_bytes - written_bytes)
