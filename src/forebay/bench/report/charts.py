"""Pictures of one panel each, as SVG in a `figure`: named, described, with a caption below.

A panel is 440 units wide and is shown at about that many pixels, so that its text stays readable on a phone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from forebay.bench.markup import axis_end, escaped

MOST_POINTS = 400
"""Of one line; of a longer one, a part is drawn."""

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 440, 280, 54, 12, 28, 44
_ACROSS, _UPWARDS = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
_GRID, _COLOURS = "#e3e8ec", ("#b5502b", "#6b6f76", "#1f6f8b", "#7a4f9a", "#3b8f5a", "#a88a1c", "#a6456f", "#4a6fb5")
_DASHES = ("2 3", "7 3", "", "9 3 2 3")
_LEAST, _MOST = 1e-9, 1e15
_LOGARITHMIC_FROM = 8.0
"""Largest over smallest: above, a linear axis would press the small ones together."""


@dataclass(frozen=True, slots=True)
class Pen:
    """How one group is drawn everywhere: told apart by colour, and on grey paper by its dashes."""

    colour: str
    dashes: str

    @classmethod
    def number(cls, place: int) -> Pen:
        return cls(_COLOURS[place % len(_COLOURS)], _DASHES[place % len(_DASHES)])

    def stroke(self, width: float = 2.2) -> str:
        dashes = f' stroke-dasharray="{self.dashes}"' if self.dashes else ""
        return f'fill="none" stroke="{self.colour}" stroke-width="{width:g}"{dashes}'


@dataclass(frozen=True, slots=True)
class Scale:
    """Values along an axis, to a place between 0 and 1."""

    low: float
    top: float
    is_logarithmic: bool

    @classmethod
    def from_zero(cls, values: Sequence[float]) -> Scale:
        return cls(0.0, axis_end(max(values, default=1.0)), False)

    @classmethod
    def of(cls, values: Sequence[float]) -> Scale:
        """From 0, or logarithmic where values are far apart and none is next to nothing."""
        low, top = min(values, default=1.0), max(values, default=1.0)
        if low < _LEAST or top / low < _LOGARITHMIC_FROM:
            return cls.from_zero(values)
        return cls(_step_below(low), _step_above(top), True)

    def place(self, value: float) -> float:
        if self.is_logarithmic:
            return math.log(max(value, self.low) / self.low) / math.log(self.top / self.low)
        return value / self.top

    @property
    def ticks(self) -> list[float]:
        if not self.is_logarithmic:
            return [self.top * quarter / 4 for quarter in range(5)]
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.top))
        steps = (1, 2, 5) if last - first <= 3 else (1,)
        found = [step * 10.0**power for power in range(first, last + 1) for step in steps]
        return [tick for tick in found if self.low * 0.999 <= tick <= self.top * 1.001]


@dataclass(frozen=True, slots=True)
class Line:
    pen: Pen
    points: tuple[tuple[float, float], ...]
    """Across and up, each from 0 to 1."""
    bars: tuple[tuple[float, float, float], ...] = ()
    """Across, and from where to where upwards."""
    is_faint: bool = False
    has_dots: bool = False


@dataclass(frozen=True, slots=True)
class Tick:
    place: float
    label: str


@dataclass(frozen=True, slots=True)
class Panel:
    """All texts are plain here, and are escaped when drawn."""

    identity: str
    """Unique on the page, of letters, digits and dashes."""
    title: str
    words: str
    """What the picture shows, for those who do not see it."""
    caption: str
    """Below it, for everybody, after the title."""
    upwards: tuple[Tick, ...]
    upwards_unit: str
    across: tuple[Tick, ...]
    across_unit: str
    lines: tuple[Line, ...]
    marks: tuple[float, ...] = ()
    """Places across at which something happened."""


def is_drawable(value: float) -> bool:
    """A record may say anything; no figure of a benchmark is larger than this."""
    return math.isfinite(value) and abs(value) <= _MOST


def ticks_of(scale: Scale, show: Callable[[float], str] = "{:g}".format) -> tuple[Tick, ...]:
    return tuple(Tick(scale.place(value), show(value)) for value in scale.ticks)


def thinned(points: Sequence[tuple[float, float]], most: int = MOST_POINTS) -> tuple[tuple[float, float], ...]:
    """The highest of each of `most` stretches: peaks stay, and so does the end of a line that only rises."""
    if len(points) <= most:
        return tuple(points)
    edges = [number * len(points) // most for number in range(most + 1)]
    stretches = (points[first:end] for first, end in pairwise(edges))
    return tuple(max(stretch, key=lambda point: point[1]) for stretch in stretches)


def staircase(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """A corner before each point: across first, then up."""
    found: list[tuple[float, float]] = []
    height = 0.0
    for across, upwards in points:
        found += [(across, height), (across, upwards)]
        height = upwards
    return tuple(found)


def figure(panel: Panel) -> str:
    parts = [
        f'<figure><svg role="img" viewBox="0 0 {_WIDTH} {_HEIGHT}" aria-labelledby="{panel.identity}-title '
        f'{panel.identity}-words">',
        f'<title id="{panel.identity}-title">{escaped(panel.title)}</title>',
        f'<desc id="{panel.identity}-words">{escaped(panel.words)}</desc>',
        *_grid(panel),
        *(
            f'<path d="M{_x(each)} {_TOP}V{_HEIGHT - _BOTTOM}" stroke="#c9b37a" stroke-width="0.8" />'
            for each in panel.marks
        ),
        *(part for line in sorted(panel.lines, key=lambda line: not line.is_faint) for part in _drawn(line)),
        f"</svg><figcaption><strong>{escaped(panel.title)}</strong> {escaped(panel.caption)}</figcaption></figure>",
    ]
    return "\n".join(parts)


def legend(names: Sequence[tuple[str, Pen]]) -> str:
    """A sample of each pen beside its name."""
    found = "".join(
        f'<li><svg viewBox="0 0 34 12" aria-hidden="true"><path d="M1 6H33" {pen.stroke(3)} /></svg>'
        f"{escaped(name)}</li>"
        for name, pen in names
    )
    return f'<ul class="legend">{found}</ul>'


def _grid(panel: Panel) -> list[str]:
    bottom = _HEIGHT - _BOTTOM
    parts = [f'<text class="tick" x="{_LEFT}" y="16">{escaped(panel.upwards_unit)}</text>']
    for tick in panel.upwards:
        y = _y(tick.place)
        parts.append(f'<path d="M{_LEFT} {y}H{_WIDTH - _RIGHT}" stroke="{_GRID}" />')
        parts.append(f'<text class="tick" x="{_LEFT - 6}" y="{y + 4:g}" text-anchor="end">{escaped(tick.label)}</text>')
    for tick in panel.across:
        x = _x(tick.place)
        parts.append(f'<path d="M{x} {bottom}v4" stroke="#8a959e" />')
        parts.append(f'<text class="tick" x="{x}" y="{bottom + 18}" text-anchor="middle">{escaped(tick.label)}</text>')
    middle = _LEFT + _ACROSS / 2
    parts.append(
        f'<text class="tick" x="{middle:g}" y="{_HEIGHT - 8}" text-anchor="middle">{escaped(panel.across_unit)}</text>'
    )
    return parts


def _drawn(line: Line) -> list[str]:
    faint = ' stroke-opacity="0.3"' if line.is_faint else ""
    parts = [
        f'<path d="M{_x(across)} {_y(low)}V{_y(high)}" fill="none" stroke="{line.pen.colour}" stroke-width="1.6" />'
        for across, low, high in line.bars
    ]
    if len(line.points) > 1:
        path = "L".join(f"{_x(across)} {_y(upwards)}" for across, upwards in line.points)
        parts.append(f'<path d="M{path}" {line.pen.stroke(1.2 if line.is_faint else 2.2)}{faint} />')
    if line.has_dots or len(line.points) == 1:
        parts += [
            f'<circle cx="{_x(across)}" cy="{_y(upwards)}" r="3.6" fill="{line.pen.colour}" />'
            for across, upwards in line.points
        ]
    return parts


def _x(place: float) -> float:
    return round(_LEFT + _ACROSS * min(1.0, max(0.0, place)), 1)


def _y(place: float) -> float:
    return round(_TOP + _UPWARDS * (1 - min(1.0, max(0.0, place))), 1)


def _step_below(value: float) -> float:
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (5.0, 2.0, 1.0, 0.5) if step * power <= value * (1 + 1e-12))


def _step_above(value: float) -> float:
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1.0, 2.0, 5.0, 10.0) if step * power >= value * (1 - 1e-12))
