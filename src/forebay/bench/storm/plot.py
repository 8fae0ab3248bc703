"""Finished sessions over time, both orders, as one SVG: no script, no font but the reader's own."""

from __future__ import annotations

import html
from collections.abc import Sequence

from forebay.bench.markup import axis_end
from forebay.bench.storm.results import LABELS, ORDERED, SHARED, Storm, Wave
from forebay.fairness import Order

_COLOURS = {ORDERED: "#1f6f8b", SHARED: "#b5502b"}
_WIDTH, _HEIGHT = 640, 260
"""Of one panel, with its margins."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 16, 44, 40


def render_plot(storms: Sequence[Storm], title: str) -> str:
    """A panel for each storm: the middle round in full colour, the others faint."""
    height = _HEIGHT * len(storms)
    panels = "\n".join(_panel(storm, number * _HEIGHT) for number, storm in enumerate(storms))
    described = "; ".join(_described(storm) for storm in storms)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'role="img" font-family="system-ui, sans-serif" font-size="13" fill="#1d2730">\n'
        f"<title>{html.escape(title)}</title>\n<desc>{html.escape(described)}</desc>\n"
        f'<rect width="{_WIDTH}" height="{height}" fill="#fff" />\n{panels}\n</svg>\n'
    )


def _described(storm: Storm) -> str:
    means = ", ".join(f"{LABELS[each.order]} mean {each.mean_s:.2f} s" for each in storm.summaries)
    return f"{storm.sessions} sessions: {means}"


def _panel(storm: Storm, top: int) -> str:
    end_s = axis_end(max(wave.whole_s for wave in storm.waves))
    bottom = top + _HEIGHT - _BOTTOM
    parts = [f'<text x="{_LEFT}" y="{top + 20}" font-weight="600">{storm.sessions} sessions restored at once</text>']
    for quarter in range(5):
        x = _x(end_s * quarter / 4, end_s)
        y = _y(storm.sessions * quarter / 4, storm.sessions, top)
        unit = " s" if quarter == 4 else ""
        parts += [
            f'<line x1="{x}" x2="{x}" y1="{top + _TOP}" y2="{bottom}" stroke="#e3e8ec" />',
            f'<text x="{x}" y="{bottom + 18}" text-anchor="middle" fill="#55636f">{end_s * quarter / 4:g}{unit}</text>',
            f'<text x="{_LEFT - 8}" y="{y + 4}" text-anchor="end" fill="#55636f">'
            f"{storm.sessions * quarter / 4:g}</text>",
        ]
    shown = sorted({wave.round for wave in storm.waves})
    middle = shown[len(shown) // 2]
    for wave in sorted(storm.waves, key=lambda wave: wave.round == middle):
        parts.append(_steps(wave, end_s, top, is_middle=wave.round == middle))
    parts += [_legend(order, place, top) for place, order in enumerate(LABELS)]
    return "\n".join(parts)


def _steps(wave: Wave, end_s: float, top: int, *, is_middle: bool) -> str:
    """A staircase: up by one at every session that is restored."""
    sessions = len(wave.ttft_s)
    path = f"M{_x(0, end_s)},{_y(0, sessions, top)}"
    for number, ended_s in enumerate(sorted(wave.ttft_s), 1):
        path += f"H{_x(ended_s, end_s)}V{_y(number, sessions, top)}"
    width, opacity = (2.5, 1) if is_middle else (1, 0.35)
    colour = _COLOURS[wave.order]
    return f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="{width}" stroke-opacity="{opacity}" />'


def _legend(order: Order, place: int, top: int) -> str:
    x = _WIDTH - _RIGHT - 230 + 110 * place
    return (
        f'<rect x="{x}" y="{top + 10}" width="12" height="12" fill="{_COLOURS[order]}" />'
        f'<text x="{x + 18}" y="{top + 20}">{LABELS[order]}</text>'
    )


def _x(at_s: float, end_s: float) -> float:
    return round(_LEFT + (_WIDTH - _LEFT - _RIGHT) * at_s / end_s, 1)


def _y(finished: float, sessions: int, top: int) -> float:
    return round(top + _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * finished / sessions, 1)
