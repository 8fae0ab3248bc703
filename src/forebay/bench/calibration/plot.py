"""Simulated against measured, as one SVG: what lies on the diagonal agrees."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence

from forebay.bench.calibration.model import Role
from forebay.bench.calibration.published import Quantity
from forebay.bench.calibration.validate import MOST_ERROR, Cell, Validation

_COLOURS = {Role.FITTED: "#8a97a3", Role.PREDICTED: "#1f6f8b", Role.EXPLAINED: "#b5502b"}
_SIDE, _LEFT, _TOP, _GAP = 380, 64, 56, 84
_PANELS = ((Quantity.TTFT_P50, "TTFT p50, s"), (Quantity.THROUGHPUT, "tokens a second"))


def render_plot(validation: Validation) -> str:
    width, height = 2 * _SIDE + 2 * _LEFT + _GAP - 20, _SIDE + _TOP + 56
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'role="img" font-family="system-ui, sans-serif" font-size="13" fill="#1d2730">',
        "<title>Simulated against measured</title>",
        f"<desc>Median error {validation.median_headline_error:.1%}, largest {validation.worst_headline_error:.1%}; "
        f"the band is {MOST_ERROR:.0%}.</desc>",
        f'<rect width="{width}" height="{height}" fill="#fff" />',
    ]
    for number, (quantity, label) in enumerate(_PANELS):
        cells = [cell for cell in validation.cells if cell.quantity is quantity]
        parts += _panel(cells, label, _LEFT + number * (_SIDE + _GAP))
    parts += [_legend(role, number) for number, role in enumerate(_COLOURS)]
    return "\n".join((*parts, "</svg>\n"))


def _panel(cells: Sequence[Cell], label: str, left: int) -> Iterable[str]:
    figures = [figure for cell in cells for figure in (cell.measured, cell.simulated)]
    low, high = math.log10(min(figures) / 1.3), math.log10(max(figures) * 1.3)

    def x(figure: float) -> float:
        return round(left + _SIDE * (math.log10(figure) - low) / (high - low), 1)

    def y(figure: float) -> float:
        return round(_TOP + _SIDE * (1 - (math.log10(figure) - low) / (high - low)), 1)

    first, last = 10**low, 10**high
    less, more = 1 - MOST_ERROR, 1 + MOST_ERROR
    corners = ((first, first * less), (first, first * more), (last / more, last), (last, last), (last, last * less))
    points = " ".join(f"{x(at)},{min(max(y(value), _TOP), _TOP + _SIDE)}" for at, value in corners)
    yield f'<polygon points="{points}" fill="#e9f1f4" />'
    yield f'<line x1="{x(first)}" y1="{y(first)}" x2="{x(last)}" y2="{y(last)}" stroke="#8a97a3" />'
    yield f'<rect x="{left}" y="{_TOP}" width="{_SIDE}" height="{_SIDE}" fill="none" stroke="#c9d2d9" />'
    for tick in (each * 10**power for power in range(-2, 6) for each in (1, 2, 5)):
        if first <= tick <= last:
            yield f'<text x="{x(tick)}" y="{_TOP + _SIDE + 18}" text-anchor="middle" fill="#55636f">{tick:g}</text>'
            yield f'<text x="{left - 8}" y="{y(tick) + 4}" text-anchor="end" fill="#55636f">{tick:g}</text>'
    yield f'<text x="{left}" y="{_TOP - 10}" font-weight="600">{label}</text>'
    yield (
        f'<text x="{left + _SIDE / 2}" y="{_TOP + _SIDE + 38}" text-anchor="middle" fill="#55636f">'
        "measured across, simulated up</text>"
    )
    for cell in cells:
        yield (
            f'<circle cx="{x(cell.measured)}" cy="{y(cell.simulated)}" r="5" fill="{_COLOURS[cell.role]}" '
            f'fill-opacity="0.8"><title>{html.escape(cell.row)}: {cell.measured:g} measured, {cell.simulated:.4g} '
            f"simulated, {cell.error:+.1%}</title></circle>"
        )


def _legend(role: Role, place: int) -> str:
    x = _LEFT + 110 * place
    return (
        f'<circle cx="{x + 6}" cy="20" r="5" fill="{_COLOURS[role]}" />'
        f'<text x="{x + 18}" y="24">{html.escape(role.value)}</text>'
    )
