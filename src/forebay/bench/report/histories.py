"""The stability gate in pictures: loads from disk, memory and the pool over time, with the faults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from forebay.bench.report import texts
from forebay.bench.report.charts import Line, Panel, Pen, Scale, figure, is_drawable, ticks_of
from forebay.bench.report.history import History, Interval
from forebay.bench.report.texts import Text, Voice
from forebay.bench.units import bytes_text, seconds_text

_GB = 1e9
_P99, _P50 = Pen("#b5502b", ""), Pen("#1f6f8b", "7 3")
_TIMES = ((7200.0, 3600.0, texts.HOURS_AXIS), (300.0, 60.0, texts.MINUTES_AXIS), (0.0, 1.0, texts.LOAD_SECONDS_AXIS))
"""From how many seconds on, the unit, and what it is called."""


@dataclass(frozen=True, slots=True)
class _Curve:
    pen: Pen
    name: Text
    of: Callable[[Interval], float | None]


def history_pictures(voice: Voice, history: History, prefix: str) -> str:
    """`prefix` makes the names of the figures unique on the page."""
    panels = (
        _panel(
            voice, history, f"{prefix}-loads", (texts.LOADS_PICTURE, texts.LOAD_AXIS), seconds_text,
            (
                _Curve(_P99, texts.P99_CURVE, lambda each: each.p99_s),
                _Curve(_P50, texts.P50_CURVE, lambda each: each.p50_s),
            ),
        ),
        _panel(
            voice, history, f"{prefix}-memory", (texts.MEMORY_PICTURE, texts.BYTES_AXIS), _size_text,
            (_Curve(_P99, texts.LARGEST_WORKER, lambda each: _gigabytes(each.rss_bytes)),),
        ),
        _panel(
            voice, history, f"{prefix}-pool", (texts.POOL_PICTURE, texts.BYTES_AXIS), _size_text,
            (_Curve(_P50, texts.POOL_CURVE, lambda each: _gigabytes(each.pool_bytes)),),
        ),
    )  # fmt: skip
    return f'<div class="panels">{"".join(figure(panel) for panel in panels if panel is not None)}</div>'


def _panel(
    voice: Voice,
    history: History,
    identity: str,
    said: tuple[Text, Text],
    show: Callable[[float], str],
    curves: Sequence[_Curve],
) -> Panel | None:
    """`said`: the title, and the unit upwards. None if there is nothing to draw."""
    points = {
        curve.name: [
            (each.ends_s, value)
            for each in history.intervals
            if (value := curve.of(each)) is not None and is_drawable(value)
        ]
        for curve in curves
    }
    if not any(points.values()):
        return None
    end_s = history.intervals[-1].ends_s
    unit_s, across_unit = next((unit, name) for least, unit, name in _TIMES if end_s >= least)
    across, upwards = Scale.from_zero([end_s / unit_s]), Scale.of([y for line in points.values() for _, y in line])
    words = [
        voice.plain(texts.CURVE, name=voice.plain(name), least=show(min(heights)), most=show(max(heights)))
        for name, line in points.items()
        if (heights := [y for _, y in line])
    ]
    strikes = ", ".join(f"{voice.plain(texts.FAULTS[kind])} {count}" for kind, count in history.strikes.items())
    notes = [voice.plain(texts.STRIKES, strikes=strikes)] if strikes else []
    if upwards.is_logarithmic:
        notes.append(voice.plain(texts.LOGARITHMIC))
    return Panel(
        identity=identity,
        title=voice.plain(said[0]),
        words=voice.sentences(*words),
        caption=voice.sentences(*words, *notes),
        upwards=ticks_of(upwards),
        upwards_unit=voice.plain(said[1]),
        across=ticks_of(across),
        across_unit=voice.plain(across_unit),
        lines=tuple(
            Line(curve.pen, tuple((across.place(at_s / unit_s), upwards.place(y)) for at_s, y in points[curve.name]))
            for curve in curves
        ),
        marks=tuple(across.place(at_s / unit_s) for at_s in history.strikes_s),
    )


def _gigabytes(quantity_bytes: int | None) -> float | None:
    return None if quantity_bytes is None else quantity_bytes / _GB


def _size_text(gigabytes: float) -> str:
    return bytes_text(gigabytes * _GB)
