"""Every block is worth a write."""

from __future__ import annotations

import msgspec

from forebay.types import BlockKey, TierSpec


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Nothing to set."""


def build(options: Options) -> AdmitAll:
    return AdmitAll()


class AdmitAll:
    def admit(self, key: BlockKey, tier: TierSpec, used_bytes: int) -> bool:
        return True
