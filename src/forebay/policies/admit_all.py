"""Every block is worth a write."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from forebay.types import BlockKey, TierSpec


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Nothing to set."""


def build(options: Options) -> AdmitAll:
    return AdmitAll()


class AdmitAll:
    def requested(self, keys: Sequence[BlockKey]) -> None:
        """Nothing to learn from it."""

    def admit(self, key: BlockKey, tier: TierSpec, used_bytes: int) -> bool:
        return True
