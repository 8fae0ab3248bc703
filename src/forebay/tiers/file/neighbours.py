"""Why a store finds nothing in a pool that seems to hold its model: the fields in which its namespace differs."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from forebay.tiers.file import layout
from forebay.types import Namespace

log = logging.getLogger("forebay.tiers.file")

_APART_BY_DESIGN = {"shard", "tenant_digest"}
"""Ranks of one engine and tenants of one pool have namespaces of their own: nothing to warn of."""


@dataclass(frozen=True, slots=True)
class Difference:
    field: str
    there: str
    here: str


def differences(there: Namespace, here: Namespace) -> tuple[Difference, ...]:
    """The fields in which two namespaces differ, in their order."""
    return tuple(
        Difference(field.name, repr(getattr(there, field.name)), repr(getattr(here, field.name)))
        for field in dataclasses.fields(here)
        if getattr(there, field.name) != getattr(here, field.name)
    )


def say_differences(roots: Iterable[Path], namespace_hex: str, namespace: Namespace) -> None:
    """One line if these roots hold blocks of the same model that this namespace cannot use; which fields part them.

    Of several such namespaces the one that differs least is named. A warning while this namespace has no blocks here
    itself, since somebody may wonder why nothing is found; else for the curious, as when they differ by design alone.
    """
    has_blocks = False
    others: dict[str, Sequence[Difference]] = {}
    for root in roots:
        for name in layout.walk_namespaces(str(root)):
            if name == namespace_hex:
                has_blocks = has_blocks or bool(layout.walk_fans(str(root), name))
            elif name not in others and layout.walk_fans(str(root), name):
                other = layout.read_namespace(root, name)
                if other is not None and other.model == namespace.model:
                    others[name] = differences(other, namespace)
    parted = {name: found for name, found in others.items() if {item.field for item in found} - _APART_BY_DESIGN}
    is_by_design = not parted
    parted = parted or ({} if has_blocks else others)
    if not parted:
        return
    nearest = min(parted, key=lambda name: (len(parted[name]), name))
    words = ", ".join(f"{item.field} ({item.there} there, {item.here} here)" for item in parted[nearest])
    log.log(
        logging.INFO if has_blocks or is_by_design else logging.WARNING,
        "the pool holds %d other namespaces of model %r whose blocks are not used; the nearest, %s, differs in: %s",
        len(parted), namespace.model, nearest[:16], words,
    )  # fmt: skip
