"""The parts of the report that tell of one restore record: in words, as a comparison, in full, and its evidence."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from forebay.bench.evidence import ENOUGH_SHARE, Medium, Validity
from forebay.bench.markup import escaped
from forebay.bench.report import texts
from forebay.bench.report.sayings import said, said_items
from forebay.bench.report.tables import Row, facts, table
from forebay.bench.report.texts import Text, Voice
from forebay.bench.report.values import (
    Show,
    byte_rate_text,
    cell_of,
    change_text,
    comparison_of,
    concurrencies,
    group_label,
    group_names,
    group_of,
    group_said,
    interval_text,
    part_text,
    token_rate_text,
    value_text,
)
from forebay.bench.restore.results import Cell, Comparison, Contents, Group, RestoreRecord, Role, Spread, WaveRecord
from forebay.bench.units import NOTHING, bytes_text, seconds_text

_UNIT = re.compile(r"(?<=\d) (?=s\b|ms\b|%)")
"""The blank between a number and its unit, where no line shall end."""

# ---- the headline


def headline(voice: Voice, record: RestoreRecord) -> str:
    """The comparisons that count, in words, at the highest concurrency that both groups have."""
    if record.verdict.validity is Validity.INVALID:
        return f"<p>{voice(texts.NO_CLAIM)}</p>"
    said = [_compared(voice, record, pair) for pair in _pairs(record)]
    return "".join(said) or f"<p>{voice(texts.NO_HEADLINE)}</p>"


def _pairs(record: RestoreRecord) -> list[list[Comparison]]:
    """For each candidate its comparisons with the baseline; without either, those with what there is."""
    reference = group_of(record, Role.BASELINE)
    candidates = [group for group in record.groups if group.role in (Role.CANDIDATE, Role.SHARED)]
    if reference is None or not candidates:
        reference = group_of(record, Role.RECOMPUTE)
        candidates = [group for group in record.groups if group.role is not Role.RECOMPUTE]
    if reference is None:
        return []
    found = [_of_pair(record, group.name, reference.name) for group in candidates]
    return [each for each in found if each]


def _of_pair(record: RestoreRecord, group: str, against: str) -> list[Comparison]:
    of = (comparison_of(record, group, against, concurrency) for concurrency in concurrencies(record))
    return [each for each in of if each is not None]


def _compared(voice: Voice, record: RestoreRecord, pair: Sequence[Comparison]) -> str:
    most = pair[-1]
    sentences = [
        *_change_words(voice, record, most),
        *_recomputing(voice, record, most),
        voice(texts.TOKENS_EQUAL if most.tokens_equal else texts.TOKENS_DIFFER),
    ]
    changes = [each.ttft_p50_change.value for each in pair if each.ttft_p50_change is not None]
    if len(changes) > 1:
        sentences.append(
            voice(
                texts.OVER_ALL,
                lowest=pair[0].concurrency,
                highest=most.concurrency,
                least=change_text(min(changes)),
                most=change_text(max(changes)),
            )
        )
    return f"<p>{_UNIT.sub('&#160;', voice.sentences(*sentences))}</p>"


def _recomputing(voice: Voice, record: RestoreRecord, compared: Comparison) -> list[str]:
    """How long it takes without any store, unless that is what was compared with."""
    group = group_of(record, Role.RECOMPUTE)
    cell = None if group is None else cell_of(record, group.name, compared.concurrency)
    if cell is None or cell.ttft_p50_s is None or cell.group == compared.against:
        return []
    return [voice(texts.RECOMPUTING, value=value_text(cell.ttft_p50_s, seconds_text))]


def _change_words(voice: Voice, record: RestoreRecord, compared: Comparison) -> list[str]:
    mine = cell_of(record, compared.group, compared.concurrency)
    other = cell_of(record, compared.against, compared.concurrency)
    if mine is None or other is None:
        return []
    found = []
    ttft, rate = compared.ttft_p50_change, compared.throughput_change
    if ttft is not None:
        found.append(
            voice(
                texts.SOONER if ttft.value <= 0 else texts.LATER,
                concurrency=compared.concurrency,
                group=group_said(voice, record, compared.group),
                against=group_said(voice, record, compared.against),
                share=part_text(ttft.value),
                value=value_text(mine.ttft_p50_s, seconds_text),
                other=value_text(other.ttft_p50_s, seconds_text),
            )
        )
    if rate is not None:
        found.append(
            voice(
                texts.MORE_TOKENS if rate.value >= 0 else texts.FEWER_TOKENS,
                share=part_text(rate.value),
                value=value_text(mine.output_tokens_per_s, token_rate_text),
                other=value_text(other.output_tokens_per_s, token_rate_text),
            )
        )
    return found


# ---- the three-way tables


@dataclass(frozen=True, slots=True)
class _Compared:
    """A figure that groups are compared by."""

    title: Text
    of_cell: Callable[[Cell], Spread | None]
    of_comparison: Callable[[Comparison], Spread | None]
    show: Show


_COMPARED = (
    _Compared(texts.TTFT_TABLE, lambda cell: cell.ttft_p50_s, lambda each: each.ttft_p50_change, seconds_text),
    _Compared(
        texts.RATE_TABLE, lambda cell: cell.output_tokens_per_s, lambda each: each.throughput_change, token_rate_text
    ),
)


def comparison(voice: Voice, record: RestoreRecord) -> str:
    """Two tables, a row a concurrency: TTFT and tokens a second of each group, and what changed."""
    steps, names = concurrencies(record), group_names(record)
    if not steps:
        return f"<p>{voice(texts.NOTHING_MEASURED)}</p>"
    pairs = _pairs(record)
    found = "".join(_comparison_table(voice, record, each, names, pairs) for each in _COMPARED)
    if not pairs:
        return found
    against = group_said(voice, record, pairs[0][0].against)
    equal = "".join(f"<p>{_outputs(voice, record, pair)}</p>" for pair in pairs)
    return f'{found}{equal}<p class="small">{voice(texts.COMPARISON_NOTE, against=against)}</p>'


def _comparison_table(
    voice: Voice,
    record: RestoreRecord,
    compared: _Compared,
    names: Sequence[str],
    pairs: Sequence[Sequence[Comparison]],
) -> str:
    heads = [voice(texts.AT_ONCE), *(escaped(group_label(voice, record, name)) for name in names)]
    heads += [voice(texts.CHANGE, group=group_label(voice, record, pair[0].group)) for pair in pairs]
    rows = []
    for step in concurrencies(record):
        cells = [cell_of(record, name, step) for name in names]
        row = [_spread(None if cell is None else compared.of_cell(cell), compared.show) for cell in cells]
        for pair in pairs:
            at = next((each for each in pair if each.concurrency == step), None)
            row.append(_spread(None if at is None else compared.of_comparison(at), change_text))
        rows.append(Row(str(step), tuple(row)))
    return f"<h4>{voice(compared.title)}</h4>{table(heads, rows)}"


def _outputs(voice: Voice, record: RestoreRecord, pair: Sequence[Comparison]) -> str:
    """Whether the outputs were equal at every concurrency, and where they were not."""
    group, against = group_label(voice, record, pair[0].group), group_said(voice, record, pair[0].against)
    differ = ", ".join(str(each.concurrency) for each in pair if not each.tokens_equal)
    if not differ:
        return voice(texts.OUTPUTS_EQUAL, group=group, against=against)
    return f"<strong>{voice(texts.OUTPUTS_DIFFER, group=group, against=against, steps=differ)}</strong>"


def _spread(spread: Spread | None, show: Show) -> str:
    """A figure with its interval below, as markup."""
    interval = interval_text(spread, show)
    below = f'<span class="interval">{escaped(interval)}</span>' if interval else ""
    return f"{escaped(value_text(spread, show))}{below}"


# ---- every figure of every cell


def all_figures(voice: Voice, record: RestoreRecord) -> str:
    """A table for each concurrency: a row a figure that any group has, a column a group."""
    parts = []
    for step in concurrencies(record):
        cells = [cell for name in group_names(record) if (cell := cell_of(record, name, step)) is not None]
        heads = ["", *(escaped(group_label(voice, record, cell.group)) for cell in cells)]
        shown = [(name, tuple(show(cell) for cell in cells)) for name, show in _FIGURES]
        rows = [Row(voice(name), figures) for name, figures in shown if set(figures) != {NOTHING}]
        parts.append(f"<h4>{voice(texts.WITH_AT_ONCE, concurrency=step)}</h4>{table(heads, rows)}")
    return "".join(parts) or f"<p>{voice(texts.NOTHING_MEASURED)}</p>"


def _rounds_text(cell: Cell) -> str:
    return (
        ", ".join(f'<span class="whole">{seconds_text(each)}</span>' for each in cell.ttft_p50_of_rounds_s) or NOTHING
    )


_FIGURES: tuple[tuple[Text, Callable[[Cell], str]], ...] = (
    (texts.REQUESTS, lambda cell: f"{cell.requests:,} ({cell.failed:,})"),
    (texts.ROUNDS, lambda cell: f"{cell.rounds:,}"),
    (texts.TTFT_MEAN, lambda cell: _spread(cell.ttft_mean_s, seconds_text)),
    (texts.TTFT_P50, lambda cell: _spread(cell.ttft_p50_s, seconds_text)),
    (texts.TTFT_P50_OWN, lambda cell: _spread(cell.own_ttft_p50_s, seconds_text)),
    (texts.TTFT_P50_OTHERS, lambda cell: _spread(cell.others_ttft_p50_s, seconds_text)),
    (texts.TTFT_P90, lambda cell: _spread(cell.ttft_p90_s, seconds_text)),
    (texts.TTFT_P99, lambda cell: _spread(cell.ttft_p99_s, seconds_text)),
    (texts.TTFT_ROUNDS, lambda cell: f'<span class="wraps">{_rounds_text(cell)}</span>'),
    (texts.TPOT_P50, lambda cell: _spread(cell.tpot_p50_s, seconds_text)),
    (texts.END_TO_END_P50, lambda cell: _spread(cell.end_to_end_p50_s, seconds_text)),
    (texts.OUTPUT_RATE, lambda cell: _spread(cell.output_tokens_per_s, token_rate_text)),
    (texts.HIT_TOKENS, lambda cell: NOTHING if cell.hit_tokens is None else f"{cell.hit_tokens:,}"),
    (texts.PEAK_RATE, lambda cell: byte_rate_text(cell.peak_bytes_per_s)),
    (texts.BUSY_RATE, lambda cell: byte_rate_text(cell.busy_mean_bytes_per_s)),
    (texts.CORE_SECONDS, lambda cell: NOTHING if cell.core_s_per_gb is None else f"{cell.core_s_per_gb:.3g}"),
    (texts.REQUEST_CORE_SECONDS, lambda cell: seconds_text(cell.core_s_per_request)),
)
"""A name, and its markup in a cell."""


# ---- evidence


def evidence(voice: Voice, record: RestoreRecord) -> str:
    """The verdict with its reasons, notes, what was read, and what the groups were."""
    is_valid = record.verdict.validity is Validity.VALID
    said = voice(texts.RUN_IS_VALID if is_valid else texts.RUN_IS_INVALID)
    word = voice(texts.VALIDITIES[record.verdict.validity])
    notes = f"<h4>{voice(texts.RECORD_NOTES)}</h4>{said_items(voice, record.notes)}" if record.notes else ""
    return (
        f'<div class="verdict {record.verdict.validity.value}"><p><strong>{word}</strong> {said}</p>'
        f"{said_items(voice, record.verdict.reasons)}</div>"
        f"{_waves(voice, record)}<h4>{voice(texts.GROUPS)}</h4>{_groups(voice, record)}{notes}"
    )


def _waves(voice: Voice, record: RestoreRecord) -> str:
    if not record.waves:
        return ""
    columns = (
        texts.GROUP, texts.WAVE_COUNT, texts.WANTED, texts.PROCESS_READ, texts.DEVICE_READ, texts.RESIDENT,
        texts.FOREIGN, texts.CLOCK,
    )  # fmt: skip
    rows = []
    for step in sorted({wave.concurrency for wave in record.waves}):
        for name in dict.fromkeys(wave.group for wave in record.waves if wave.concurrency == step):
            waves = [wave for wave in record.waves if (wave.group, wave.concurrency) == (name, step)]
            rows.append(Row(str(step), (escaped(group_label(voice, record, name)), *_wave_figures(waves))))
    heads = [voice(texts.AT_ONCE), *(voice(each) for each in columns)]
    note = voice(texts.WAVES_NOTE, share=f"{ENOUGH_SHARE:.0%}")
    return f'<h4>{voice(texts.WAVES)}</h4>{table(heads, rows)}<p class="small">{note}</p>'


def _wave_figures(waves: Sequence[WaveRecord]) -> tuple[str, ...]:
    return (
        str(len(waves)),
        bytes_text(sum(wave.wanted_bytes for wave in waves)),
        bytes_text(_total(wave.read.process_bytes for wave in waves)),
        bytes_text(_total(wave.read.device_bytes for wave in waves)),
        bytes_text(_largest(wave.resident_bytes for wave in waves)),
        bytes_text(_largest(wave.foreign_bytes for wave in waves)),
        seconds_text(max(abs(wave.clock_step_s) for wave in waves)),
    )


def _total(counts: Iterable[int | None]) -> int | None:
    """None if any is unknown."""
    known = list(counts)
    return None if None in known else sum(each for each in known if each is not None)


def _largest(counts: Iterable[int | None]) -> int | None:
    known = list(counts)
    return None if None in known else max((each for each in known if each is not None), default=None)


def _groups(voice: Voice, record: RestoreRecord) -> str:
    parts = []
    for group in record.groups:
        rows = [
            Row(voice(texts.ROLE), (voice(texts.ROLES[group.role]),)),
            Row(voice(texts.TARGET), (_target(voice, group),)),
            Row(voice(texts.INSTANCES), (str(group.instances),)),
            *_media(voice, group.media),
            *_stored(voice, group.contents),
            *(Row(escaped(name), (f'<span lang="en">{escaped(fact)}</span>',)) for name, fact in group.facts.items()),
        ]
        parts.append(f"<h5>{escaped(group.name)}</h5>{facts(rows)}")
    return "".join(parts)


def _media(voice: Voice, media: Sequence[Medium]) -> Iterator[Row]:
    """Each, and how it is mounted and attached, as far as it is known."""
    if not media:
        yield Row(voice(texts.MEDIUM), (voice(texts.NO_MEDIUM),))
    for medium in media:
        yield Row(voice(texts.MEDIUM), (_medium(voice, medium),))
        yield from _device(voice, medium)


def _device(voice: Voice, medium: Medium) -> Iterator[Row]:
    hardware = "<br />".join(f"{escaped(name)}: {escaped(fact)}" for name, fact in medium.hardware.items())
    for name, fact in ((texts.MOUNT_OPTIONS, escaped(medium.mount_options)), (texts.DEVICE, hardware)):
        if fact:
            yield Row(voice(name), (fact,))


def _stored(voice: Voice, contents: Contents | None) -> Iterator[Row]:
    if contents is None:
        return
    share = f"{100 * contents.compressed_share:.0f} %"
    files, duplicates = f"{contents.sampled_files:,}", f"{contents.duplicate_files:,}"
    yield Row(voice(texts.STORED), (voice(texts.STORED_SAMPLE, files=files, duplicates=duplicates, share=share),))


def _target(voice: Voice, group: Group) -> str:
    known = texts.TARGETS.get(group.target)
    return escaped(group.target) if known is None else voice(known)


def _medium(voice: Voice, medium: Medium) -> str:
    device = f"{medium.device} {medium.device_number}".strip() or voice.plain(texts.UNKNOWN)
    found = voice(
        texts.MEDIUM_FOUND, path=medium.path, filesystem=medium.filesystem, source=medium.source, device=device
    )
    return f"{found}<br />{said(voice, medium.doubt)}" if medium.doubt else found
