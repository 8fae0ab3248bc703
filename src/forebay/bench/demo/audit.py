"""Whether each way really was the way it is called, and what a reader should know besides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from forebay.bench.demo.results import Damage, Measurement, Pool, Way
from forebay.types import HOST

Sources = dict[Way, set[str]]


def broken_claims(
    measurements: Sequence[Measurement], *, tier: str, restorable_tokens: int, damage: Damage
) -> tuple[str, ...]:
    """Reasons why the measurement is not what it says.

    A way may restore from its own source only. It has to restore all full blocks of the document, unless the store
    found damage: then it is honest about less.
    """
    own: Sources = {Way.RECOMPUTE: set(), Way.DISK: {tier}, Way.DRAM: {HOST}}
    reasons = []
    for found in measurements:
        where = f"session {found.session}, {found.way.phrase}"
        others = sorted(set(found.hit_tokens) - own[found.way])
        if others:
            reasons.append(f"{where}: tokens came from {', '.join(others)}")
        if found.restored_tokens + found.computed_tokens != found.prompt_tokens:
            reasons.append(f"{where}: restored and computed tokens do not make the prompt")
        short = own[found.way] and found.restored_tokens < restorable_tokens
        if short and not (damage.lost_blocks and found.restored_tokens):
            reasons.append(f"{where}: restored {found.restored_tokens:,} of {restorable_tokens:,} tokens")
    return tuple(reasons)


def differences(measurements: Sequence[Measurement]) -> dict[int, str]:
    """For each session whose ways did not all give the same answer: which way left the recomputed one, and where."""
    found: dict[int, str] = {}
    for session, group in groupby(sorted(measurements, key=lambda each: each.session), key=lambda each: each.session):
        ways = {each.way: each.tokens for each in group}
        base = ways[Way.RECOMPUTE]
        for way, tokens in ways.items():
            if tokens != base and session not in found:
                at = next((i for i, pair in enumerate(zip(base, tokens, strict=False)) if pair[0] != pair[1]), None)
                place = f"from token {(min(len(base), len(tokens)) if at is None else at) + 1} on"
                found[session] = f"session {session}: the answer {way.phrase} differs {place}"
    return found


def notes(
    measurements: Sequence[Measurement],
    *,
    recomputed_tokens: int,
    restorable_tokens: int,
    damage: Damage,
    pool: Pool,
    virtual_machine: bool,
) -> Iterator[str]:
    """What a reader might not see. `recomputed_tokens` were computed again while populating a pool that had blocks."""
    if pool.found_blocks:
        yield (
            f"The pool held {pool.found_blocks:,} of the {pool.document_blocks:,} document blocks from an earlier run: "
            f"they were reused, and {recomputed_tokens:,} document tokens had to be computed while populating."
        )
    if damage.lost_blocks or damage.set_aside:
        yield (
            f"Damage: {len(damage.set_aside)} files were set aside in the pool's quarantine. Of the blocks that were "
            f"read, {damage.corrupt_blocks} were not what they claimed to be, {damage.missing_blocks} were gone and "
            f"{damage.failed_reads} could not be read. What was lost was recomputed."
        )
    if damage.unstored_blocks:
        yield f"{damage.unstored_blocks} blocks could not be stored."
    for found in measurements:
        if found.way is not Way.RECOMPUTE and found.restored_tokens < restorable_tokens:
            yield (
                f"Session {found.session}, {found.way.phrase}: only {found.restored_tokens:,} of "
                f"{restorable_tokens:,} tokens were restored."
            )
    if virtual_machine:
        yield (
            "This is a virtual machine: reads were physical as far as its own kernel goes; the host beneath may have "
            "caches of its own."
        )
    if pool.access != "direct":
        yield f"The pool was read with buffered I/O, since {pool.access_reason}."
