"""Whether a run is what it says it is. Pure: from the record's parts to the reasons why it is not.

A run is VALID only if nothing here objects: there are samples and repeats, every request succeeded with as many tokens
as in the other groups, every restore came from cold storage and in full, and nobody disturbed the measurement. Where
something cannot be told, that is a reason too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby

from forebay.bench.evidence import Evidence
from forebay.bench.restore.metrics import round_p50s
from forebay.bench.restore.options import Limits, relaxed
from forebay.bench.restore.results import Group, RequestRecord, Role, WaveRecord
from forebay.bench.units import bytes_text

COLD_SOURCE = "file"
"""What a target calls the tier that is cold storage."""
_CONTROLS = (Role.RECOMPUTE, Role.BASELINE)
_ENOUGH_HITS = 0.95
"""Of the stored tokens of a prompt: engines recompute the last block, or round down to blocks of their own."""

_ENOUGH_FOR_P99 = 100


def broken_claims(
    groups: Sequence[Group],
    requests: Sequence[RequestRecord],
    waves: Sequence[WaveRecord],
    concurrency: Sequence[int],
    limits: Limits,
) -> tuple[str, ...]:
    """Each kind of reason once a group, with how often it was seen."""
    found: list[str] = []
    for group in groups:
        mine = [each for each in requests if each.group == group.name]
        its_waves = [each for each in waves if each.group == group.name]
        complaints = [
            *_samples(mine, its_waves, concurrency, limits),
            *_failures(mine),
            *_contents(group, limits),
            *_disturbances(group, its_waves, limits),
        ]
        if group.role is Role.RECOMPUTE:
            complaints += _recomputed(mine)
        else:
            complaints += [*_sources(mine), *_coldness(group, its_waves, limits)]
        if group.role in _CONTROLS:
            complaints += _drift(mine, limits)
        found += [f"{group.name}: {complaint}" for complaint in complaints]
    return (*found, *_token_counts(requests))


def _samples(
    requests: Sequence[RequestRecord], waves: Sequence[WaveRecord], concurrency: Sequence[int], limits: Limits
) -> Iterator[str]:
    for wanted in concurrency:
        rounds = {wave.round for wave in waves if wave.concurrency == wanted}
        timed = {each.round for each in requests if each.concurrency == wanted and each.ttft_s is not None}
        if not timed:
            yield f"there is no sample at concurrency {wanted}"
        elif len(timed) < limits.rounds:
            yield f"{len(timed)} of {limits.rounds} rounds at concurrency {wanted}: too few to say how well they repeat"
        for number in sorted(rounds):
            asked = [each.session for each in requests if each.concurrency == wanted and each.round == number]
            if len(asked) != wanted:
                yield f"round {number} at concurrency {wanted} has {len(asked)} requests"
            if len(set(asked)) < len(asked):
                yield f"round {number} at concurrency {wanted} read a session more than once"


def _failures(requests: Sequence[RequestRecord]) -> Iterator[str]:
    failed = [each for each in requests if each.error]
    if failed:
        yield f"{len(failed)} of {len(requests)} requests failed, the first with: {failed[0].error}"
    mute = sum(not each.error and (each.ttft_s is None or each.output_tokens < 1) for each in requests)
    if mute:
        yield f"{mute} of {len(requests)} requests gave no token"
    impossible = sum(
        each.ttft_s is not None and not 0 < each.ttft_s <= each.end_to_end_s + 1e-9 for each in requests
    )  # fmt: skip
    if impossible:
        yield f"{impossible} of {len(requests)} requests have times that cannot be"


def _token_counts(requests: Sequence[RequestRecord]) -> Iterator[str]:
    """Of each session, in all groups and rounds; prompts too, since a group that was asked less had less to do."""
    for what in ("output_tokens", "prompt_tokens"):
        counts: dict[int, set[int]] = {}
        for each in requests:
            if not each.error:
                counts.setdefault(each.session, set()).add(getattr(each, what))
        unequal = [session for session, found in sorted(counts.items()) if len(found) > 1]
        if unequal:
            first = ", ".join(str(count) for count in sorted(counts[unequal[0]]))
            name = what.replace("_", " ")
            yield f"{name} differ in {len(unequal)} of {len(counts)} sessions, such as {unequal[0]}: {first}"


def _recomputed(requests: Sequence[RequestRecord]) -> Iterator[str]:
    restored = sum(bool(each.hit_tokens) for each in requests)
    if restored:
        yield f"{restored} of {len(requests)} requests found tokens, where all were to be computed"
    unknown = sum(each.hit_tokens is None for each in requests if not each.error)
    if unknown:
        yield f"of {unknown} requests it cannot be told whether all was computed"


def _sources(requests: Sequence[RequestRecord]) -> Iterator[str]:
    """Everything that was stored came back, and from cold storage, or in shared prefixes from another's read of it.

    That such prefixes were read at least once, the counters of the block layer have to show.
    """
    good = [each for each in requests if not each.error]
    others = [
        each for each in good
        if each.hit_tokens and not each.shared_tokens and each.hit_source not in (COLD_SOURCE, None)
    ]  # fmt: skip
    if others:
        names = ", ".join(sorted({str(each.hit_source) for each in others}))
        yield f"{len(others)} of {len(requests)} requests were restored from elsewhere than cold storage: {names}"
    silent = sum(bool(each.hit_tokens) and each.hit_source is None for each in good)
    if silent:
        yield f"of {silent} requests it cannot be told which tier they were restored from"
    unknown = sum(each.hit_tokens is None for each in good)
    if unknown:
        yield f"of {unknown} requests it cannot be told how much was restored"
    idle = sum(each.stored_tokens == 0 for each in good)
    if idle:
        yield f"{idle} of {len(requests)} requests had nothing to restore"
    short = [
        each for each in good if each.hit_tokens is not None and each.hit_tokens < _ENOUGH_HITS * each.stored_tokens
    ]
    if short:
        yield (
            f"{len(short)} of {len(requests)} requests were not restored in full, such as session {short[0].session}: "
            f"{short[0].hit_tokens:,} of {short[0].stored_tokens:,} tokens"
        )


def _coldness(group: Group, waves: Sequence[WaveRecord], limits: Limits) -> Iterator[str]:
    if group.medium is None:
        yield "physical reads cannot be shown: what is restored does not lie on this machine"
        return
    complaints = [
        reason
        for wave in waves
        for reason in Evidence(medium=group.medium, wanted_bytes=wave.wanted_bytes, read=wave.read).reasons
    ]
    yield from _counted(complaints, len(waves))
    resident = [
        wave for wave in waves
        if wave.resident_bytes is not None and wave.resident_bytes > limits.resident_share * wave.wanted_bytes
    ]  # fmt: skip
    if resident:
        worst = max(wave.resident_bytes or 0 for wave in resident)
        yield (
            f"{len(resident)} of {len(waves)} waves began with a warm page cache: up to {bytes_text(worst)} of what "
            "was to be read lay in memory"
        )
    unknown = sum(wave.resident_bytes is None for wave in waves)
    if unknown:
        yield f"of {unknown} waves it cannot be told whether the page cache was warm"


def _contents(group: Group, limits: Limits) -> Iterator[str]:
    contents = group.contents
    if contents is None:
        if group.role is not Role.RECOMPUTE and group.medium is not None:
            yield "nothing that is stored was found to look at"
        return
    if contents.duplicate_files > limits.duplicate_share * contents.sampled_files:
        yield (
            f"{contents.duplicate_files} of {contents.sampled_files} stored blocks that were looked at have the bytes "
            "of another: a device may keep such bytes once"
        )
    if contents.compressed_share < limits.compressed_share:
        yield (
            f"what is stored compresses to {contents.compressed_share:.0%}: a device may keep and read less than it "
            "seems to"
        )


def _disturbances(group: Group, waves: Sequence[WaveRecord], limits: Limits) -> Iterator[str]:
    jumped = [wave for wave in waves if abs(wave.clock_step_s) > limits.clock_step_s]
    if jumped:
        worst = max((wave.clock_step_s for wave in jumped), key=abs)
        yield f"the clock jumped during {len(jumped)} of {len(waves)} waves, by up to {worst:+.3f} s"
    backwards = sum(wave.whole_s <= 0 for wave in waves)
    if backwards:
        yield f"{backwards} waves took no time"
    if group.role is Role.RECOMPUTE or group.medium is None or group.medium.doubt:
        return
    busy = [
        wave for wave in waves
        if wave.foreign_bytes is not None and wave.foreign_bytes > limits.foreign_share * wave.wanted_bytes
    ]  # fmt: skip
    if busy:
        worst = max(wave.foreign_bytes or 0 for wave in busy)
        yield (
            f"others used the device during {len(busy)} of {len(waves)} waves, and moved up to "
            f"{bytes_text(worst)}"
        )  # fmt: skip
    unknown = sum(wave.foreign_bytes is None for wave in waves)
    if unknown:
        yield f"of {unknown} waves it cannot be told whether others used the device"


def _drift(requests: Sequence[RequestRecord], limits: Limits) -> Iterator[str]:
    ordered = sorted(requests, key=lambda each: each.concurrency)
    for concurrency, group in groupby(ordered, key=lambda each: each.concurrency):
        p50s = round_p50s([each for each in group if not each.error])
        if len(p50s) > 1 and max(p50s) > (1 + limits.control_drift) * min(p50s):
            drift = max(p50s) / min(p50s) - 1 if min(p50s) > 0 else float("inf")
            yield (
                f"this control drifted by {drift:.1%} at concurrency {concurrency}, where {limits.control_drift:.0%} "
                "is allowed"
            )


def _few_for_a_tail(requests: Sequence[RequestRecord]) -> Iterator[str]:
    samples = Counter((each.group, each.concurrency) for each in requests if each.ttft_s is not None and not each.error)
    few = {where: count for where, count in samples.items() if count < _ENOUGH_FOR_P99}
    if few:
        steps = ", ".join(str(step) for step in sorted({step for _, step in few}))
        yield (
            f"At {steps} at once p99 stands on {min(few.values())} requests or little more: below {_ENOUGH_FOR_P99} it "
            "is hardly another figure than the longest of them."
        )


def _counted(reasons: Sequence[str], waves: int) -> Iterator[str]:
    """The first of the reasons, for all of them: they differ in figures only."""
    if len(reasons) > 1:
        yield f"{reasons[0]} (and {len(reasons) - 1} more like it in {waves} waves)"
    else:
        yield from reasons


def notes(
    groups: Sequence[Group],
    requests: Sequence[RequestRecord],
    tokens_differ: Sequence[str],
    limits: Limits,
    *,
    virtual_machine: bool,
) -> Iterator[str]:
    """What a reader might not see."""
    yield from _few_for_a_tail(requests)
    reads = Counter((each.group, each.session) for each in requests if each.stored_tokens)
    if (times := max(reads.values(), default=0)) > 1:
        yield f"A session was read up to {times} times: a device with a cache of its own may have had it from there."
    for pair in tokens_differ:
        yield f"Outputs differ between {pair}."
    for group in groups:
        if "throttled" in group.facts:
            yield f"{group.name}: {group.facts['throttled']}."
    for name, value in relaxed(limits).items():
        yield f"The limit {name} was laxer than usual: {value:g}, and not {getattr(Limits(), name):g}."
    if virtual_machine:
        yield (
            "This is a virtual machine: reads were physical as far as its own kernel goes; the host beneath may have "
            "caches of its own."
        )
