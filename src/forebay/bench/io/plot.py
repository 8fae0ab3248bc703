"""A record as one SVG: a panel for each direction and block size, blocks in flight across, GB/s upwards from 0."""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

from forebay.bench.io.options import Load
from forebay.bench.io.results import TIER, Record, Summary, block_text

_PANEL_WIDTH, _PANEL_HEIGHT = 250, 200
_LEFT, _TOP, _GAP_X, _GAP_Y, _LEGEND = 46, 66, 34, 66, 26
_TIER_COLOUR, _THREADS_COLOUR, _FIO_COLOUR = "#0b6e99", "#8a5a00", "#6b7680"


def draw(record: Record) -> str:
    """A complete document. Nothing in it comes from outside but numbers and the names of contestants."""
    options = record.options
    columns, rows = len(options.block_bytes), len(options.directions)
    width = _LEFT + columns * (_PANEL_WIDTH + _GAP_X)
    height = _TOP + rows * (_PANEL_HEIGHT + _GAP_Y) + _LEGEND
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="system-ui, sans-serif" font-size="12" fill="#1d2730">',
        "<title>The file tier against plain controls on the same device</title>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="{_LEFT}" y="22" font-size="15" font-weight="600">GB/s by blocks in flight, medians of '
        f"{options.rounds} rounds ({escape(record.verdict.validity.value)})</text>",
        *_legend(record),
    ]
    for row, direction in enumerate(options.directions):
        shown = [each for each in record.summaries if each.cell.direction is direction]
        top_rate = _axis_end(max(each.gb_per_s for each in shown))
        for column, block_bytes in enumerate(options.block_bytes):
            x = _LEFT + column * (_PANEL_WIDTH + _GAP_X)
            y = _TOP + row * (_PANEL_HEIGHT + _GAP_Y)
            panel = [each for each in shown if each.cell.block_bytes == block_bytes]
            parts += [
                f'<g transform="translate({x} {y})">',
                f'<text y="-6" font-weight="600">{direction.value}, {block_text(block_bytes)}</text>',
                *_grid(options.depths, top_rate),
                *_lines(panel, options.depths, top_rate),
                "</g>",
            ]
    return "\n".join((*parts, "</svg>", ""))


def _series(each: Summary) -> str:
    name = "fio, its best" if each.contestant.startswith("fio") else each.contestant
    return f"{name}, beside a busy Python thread" if each.load is Load.BUSY else name


def _style(series: str) -> str:
    colour = _TIER_COLOUR if series.startswith(TIER) else _FIO_COLOUR if series.startswith("fio") else _THREADS_COLOUR
    dashes = ' stroke-dasharray="5 4"' if series.endswith("thread") else ""
    return f'stroke="{colour}" fill="none" stroke-width="2"{dashes}'


def _legend(record: Record) -> list[str]:
    parts, x = [], _LEFT
    for series in dict.fromkeys(_series(each) for each in record.summaries):
        parts.append(f'<path d="M{x} 38h24" {_style(series)}/><text x="{x + 30}" y="42">{escape(series)}</text>')
        x += 50 + 7 * len(series)
    return parts


def _grid(depths: Sequence[int], top_rate: float) -> list[str]:
    parts = []
    for quarter in range(5):
        y = _PANEL_HEIGHT * (4 - quarter) / 4
        parts.append(f'<path d="M0 {y:g}h{_PANEL_WIDTH}" stroke="#e3e8ec"/>')
        parts.append(f'<text x="-6" y="{y + 4:g}" text-anchor="end" fill="#55636f">{top_rate * quarter / 4:g}</text>')
    for at, depth in enumerate(depths):
        x = _x(at, len(depths))
        parts.append(f'<text x="{x:g}" y="{_PANEL_HEIGHT + 18}" text-anchor="middle" fill="#55636f">{depth}</text>')
    return parts


def _lines(panel: Sequence[Summary], depths: Sequence[int], top_rate: float) -> list[str]:
    parts = []
    for series in dict.fromkeys(_series(each) for each in panel):
        points = {each.cell.depth: each for each in panel if _series(each) == series}
        places = [
            (_x(at, len(depths)), _PANEL_HEIGHT * (1 - points[depth].gb_per_s / top_rate), points[depth])
            for at, depth in enumerate(depths)
            if depth in points
        ]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y, _ in places)
        parts.append(f'<path d="M{path}" {_style(series)}/>')
        for x, y, each in places:
            said = f"{each.contestant}, {each.load.value}, {each.cell.depth} in flight: {each.gb_per_s:.2f} GB/s"
            parts.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" {_style(series)}><title>{escape(said)}</title></circle>'
            )
    return parts


def _x(at: int, count: int) -> float:
    return _PANEL_WIDTH * (at + 0.5) / count


def _axis_end(largest: float) -> float:
    """The smallest of 1, 2, 4, 6, 8, 10 times a power of ten that is not below `largest`."""
    power = 10.0 ** math.floor(math.log10(largest)) if largest > 0 else 1.0
    return next(step * power for step in (1.0, 2.0, 4.0, 6.0, 8.0, 10.0) if step * power >= largest)
