"""A restore record in pictures: times and rates by concurrency, bandwidth over time, every request's first token."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from forebay.bench.report import texts
from forebay.bench.report.charts import (
    MOST_POINTS,
    Line,
    Panel,
    Pen,
    Scale,
    Tick,
    figure,
    is_drawable,
    legend,
    staircase,
    thinned,
    ticks_of,
)
from forebay.bench.report.texts import Text, Voice
from forebay.bench.report.values import (
    byte_rate_text,
    cell_of,
    concurrencies,
    group_label,
    group_names,
    interval_text,
    token_rate_text,
)
from forebay.bench.restore.results import BandwidthSample, Cell, RequestRecord, RestoreRecord, Role, Spread, WaveRecord
from forebay.bench.units import seconds_text

_GB = 1e9
_PERCENT = tuple(Tick(quarter / 4, str(25 * quarter)) for quarter in range(5))


def pictures(voice: Voice, record: RestoreRecord, prefix: str) -> str:
    """All figures of a record. `prefix` makes their names unique on the page."""
    pens = _pens(record)
    panels = [
        *_by_concurrency(voice, record, pens, prefix),
        *(
            panel
            for concurrency in concurrencies(record)
            for panel in (
                _distribution(voice, record, pens, concurrency, prefix),
                _bandwidth(voice, record, pens, concurrency, prefix),
            )
            if panel is not None
        ),
    ]
    if not panels:
        return f"<p>{voice(texts.NOTHING_MEASURED)}</p>"
    names = [(group_label(voice, record, name), pen) for name, pen in pens.items()]
    return f'{legend(names)}<div class="panels">{"".join(figure(panel) for panel in panels)}</div>'


def _pens(record: RestoreRecord) -> dict[str, Pen]:
    """A role looks alike in all records; a second group of a role gets a look of its own."""
    taken: dict[str, Pen] = {}
    order = list(Role)
    spare = len(order)
    roles = {group.name: group.role for group in record.groups}
    for name in group_names(record):
        pen = Pen.number(order.index(roles[name])) if name in roles else None
        if pen is None or pen in taken.values():
            pen, spare = Pen.number(spare), spare + 1
        taken[name] = pen
    return taken


# ---- by concurrency


def _by_concurrency(voice: Voice, record: RestoreRecord, pens: dict[str, Pen], prefix: str) -> list[Panel]:
    found = (
        _spreads(
            voice, record, pens, lambda cell: cell.ttft_p50_s, seconds_text,
            (texts.TTFT_PICTURE, texts.SECONDS_AXIS), f"{prefix}-ttft",
        ),
        _spreads(
            voice, record, pens, lambda cell: cell.output_tokens_per_s, token_rate_text,
            (texts.RATE_PICTURE, texts.TOKENS_AXIS), f"{prefix}-rate",
        ),
    )  # fmt: skip
    return [panel for panel in found if panel is not None]


def _spreads(
    voice: Voice,
    record: RestoreRecord,
    pens: dict[str, Pen],
    choose: Callable[[Cell], Spread | None],
    show: Callable[[float], str],
    said: tuple[Text, Text],
    identity: str,
) -> Panel | None:
    """A line a group, concurrencies at even distances. `said`: the title, and the unit upwards."""
    steps = concurrencies(record)
    spreads = {
        (name, step): spread
        for name in pens
        for step in steps
        if (cell := cell_of(record, name, step)) is not None and (spread := choose(cell)) is not None
        if all(map(is_drawable, (spread.value, spread.low, spread.high)))
    }
    if not spreads:
        return None
    scale = Scale.of([value for each in spreads.values() for value in (each.value, each.low, each.high)])
    places = {step: (number + 0.5) / len(steps) for number, step in enumerate(steps)}
    lines, words = [], []
    for name, pen in pens.items():
        of = {step: spreads[name, step] for step in steps if (name, step) in spreads}
        if not of:
            continue
        points = tuple((places[step], scale.place(each.value)) for step, each in of.items())
        bars = tuple((places[step], scale.place(each.low), scale.place(each.high)) for step, each in of.items())
        lines.append(Line(pen, points, bars, has_dots=True))
        values = "; ".join(
            voice.plain(texts.AT_CONCURRENCY, concurrency=step, value=f"{show(each.value)} {interval_text(each, show)}")
            for step, each in of.items()
        )
        words.append(voice.plain(texts.SERIES, group=group_label(voice, record, name), values=values))
    return Panel(
        identity=identity,
        title=voice.plain(said[0]),
        words=voice.sentences(*words),
        caption=voice.sentences(voice.plain(texts.INTERVALS), *_axis_note(voice, scale)),
        upwards=ticks_of(scale),
        upwards_unit=voice.plain(said[1]),
        across=tuple(Tick(place, str(step)) for step, place in places.items()),
        across_unit=voice.plain(texts.AT_ONCE),
        lines=tuple(lines),
    )


def _axis_note(voice: Voice, scale: Scale) -> list[str]:
    return [voice.plain(texts.LOGARITHMIC)] if scale.is_logarithmic else []


def _length_note(voice: Voice, lines: Iterable[Sequence[object]]) -> list[str]:
    is_long = any(len(line) > MOST_POINTS for line in lines)
    return [voice.plain(texts.THINNED, points=MOST_POINTS)] if is_long else []


# ---- the distribution


def _distribution(
    voice: Voice, record: RestoreRecord, pens: dict[str, Pen], concurrency: int, prefix: str
) -> Panel | None:
    """For each group, the share of its requests that had their first token by then: one that failed never had."""
    asked = {
        name: [each for each in record.requests if (each.group, each.concurrency) == (name, concurrency)]
        for name in pens
    }
    waits = {name: sorted(_waits(requests)) for name, requests in asked.items() if requests}
    if not any(waits.values()):
        return None
    scale = Scale.of([wait for found in waits.values() for wait in found])
    lines, words = list[Line](), list[str]()
    for name, pen in pens.items():
        if name in waits:
            points = [(scale.place(wait), number / len(asked[name])) for number, wait in enumerate(waits[name], 1)]
            lines.append(Line(pen, staircase(thinned(points))))
            words += _distribution_words(voice, group_label(voice, record, name), asked[name])
    return Panel(
        identity=f"{prefix}-requests-{concurrency}",
        title=voice.plain(texts.DISTRIBUTION_PICTURE, concurrency=concurrency),
        words=voice.sentences(*words),
        caption=voice.sentences(*words, *_axis_note(voice, scale), *_length_note(voice, waits.values())),
        upwards=_PERCENT,
        upwards_unit=voice.plain(texts.SHARE_AXIS),
        across=ticks_of(scale),
        across_unit=voice.plain(texts.SECONDS_AXIS),
        lines=tuple(lines),
    )


def _waits(requests: Sequence[RequestRecord]) -> list[float]:
    """Times to the first token, of those that had one."""
    return [each.ttft_s for each in requests if each.ttft_s is not None and is_drawable(each.ttft_s)]


def _distribution_words(voice: Voice, label: str, requests: Sequence[RequestRecord]) -> Iterator[str]:
    found = _waits(requests)
    fastest, slowest = seconds_text(min(found, default=None)), seconds_text(max(found, default=None))
    yield voice.plain(texts.DISTRIBUTION_OF, group=label, fastest=fastest, slowest=slowest, requests=len(requests))
    if len(found) < len(requests):
        yield voice.plain(texts.WITHOUT_TOKEN, failed=len(requests) - len(found))
    others = _waits([each for each in requests if each.written_by != each.instance])
    if others:
        fastest, slowest = seconds_text(min(others)), seconds_text(max(others))
        yield voice.plain(texts.OF_OTHERS, count=len(others), fastest=fastest, slowest=slowest)


# ---- bandwidth over time


def _bandwidth(
    voice: Voice, record: RestoreRecord, pens: dict[str, Pen], concurrency: int, prefix: str
) -> Panel | None:
    """A line a wave, from the wave's beginning."""
    reads = [
        (wave, samples)
        for wave in record.waves
        if wave.concurrency == concurrency and wave.group in pens and (samples := _samples(wave))
    ]
    if not reads:
        return None
    across = Scale.from_zero([sample.at_s for _, samples in reads for sample in samples])
    upwards = Scale.from_zero([sample.bytes_per_s / _GB for _, samples in reads for sample in samples])
    rounds = sorted({wave.round for wave, _ in reads})
    lines = []
    for wave, samples in reads:
        points = [(across.place(each.at_s), upwards.place(each.bytes_per_s / _GB)) for each in samples]
        lines.append(Line(pens[wave.group], thinned(points), is_faint=wave.round != rounds[len(rounds) // 2]))
    words = []
    for name in pens:
        of = [samples for wave, samples in reads if wave.group == name]
        if of:
            peak = byte_rate_text(max(sample.bytes_per_s for samples in of for sample in samples))
            label = group_label(voice, record, name)
            words.append(voice.plain(texts.BANDWIDTH_OF, group=label, peak=peak, waves=len(of)))
    notes = (voice.plain(texts.BANDWIDTH_NOTE), *_length_note(voice, (samples for _, samples in reads)))
    return Panel(
        identity=f"{prefix}-bandwidth-{concurrency}",
        title=voice.plain(texts.BANDWIDTH_PICTURE, concurrency=concurrency),
        words=voice.sentences(*words),
        caption=voice.sentences(*words, *notes),
        upwards=ticks_of(upwards),
        upwards_unit=voice.plain(texts.BANDWIDTH_AXIS),
        across=ticks_of(across),
        across_unit=voice.plain(texts.TIME_AXIS),
        lines=tuple(lines),
    )


def _samples(wave: WaveRecord) -> list[BandwidthSample]:
    """Counted from the wave's beginning; none if nothing was read."""
    found = [
        BandwidthSample(each.at_s - wave.began_s, each.bytes_per_s)
        for each in wave.bandwidth
        if is_drawable(each.at_s) and is_drawable(each.bytes_per_s)
    ]
    return found if any(each.bytes_per_s > 0 for each in found) else []
