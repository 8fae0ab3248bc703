"""The hit rates as one SVG: a panel for each workload, a line for each policy. No script, nothing from elsewhere."""

from __future__ import annotations

import math

from forebay.bench.markup import escaped
from forebay.bench.policy.record import BOUND, PolicyRecord, Row, Subject

_PANEL_WIDTH, _PANEL_HEIGHT, _COLUMNS = 400, 270, 2
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 16, 44, 44
_LEGEND_HEIGHT = 36
_COLOURS = ("#55636f", "#b5502b", "#3b8f5a", "#1f6f8b", "#7a4f9a", "#a88a1c")
_BOUND_COLOUR = "#b8c0c7"
_WRITE_ALL = "admit_all"


def render_picture(record: PolicyRecord) -> str:
    rows_of_panels = max(1, -(-len(record.subjects) // _COLUMNS))
    width, height = _PANEL_WIDTH * _COLUMNS, _LEGEND_HEIGHT + _PANEL_HEIGHT * rows_of_panels
    policies = list(dict.fromkeys(row.policy for row in record.rows))
    colours = {name: _COLOURS[at % len(_COLOURS)] for at, name in enumerate(sorted(set(policies) - {BOUND}))}
    colours[BOUND] = _BOUND_COLOUR
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        'font-family="system-ui, sans-serif" font-size="12">',
        "<title>Block hit rate by cache size</title>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        *_legend(colours),
    ]
    for at, subject in enumerate(record.subjects):
        x, y = at % _COLUMNS * _PANEL_WIDTH, _LEGEND_HEIGHT + at // _COLUMNS * _PANEL_HEIGHT
        rows = [row for row in record.of(subject.workload) if row.admission == _WRITE_ALL]
        parts += [f'<g transform="translate({x} {y})">', *_panel(subject, rows, colours), "</g>"]
    return "\n".join((*parts, "</svg>\n"))


def _legend(colours: dict[str, str]) -> list[str]:
    parts, x = [], float(_LEFT)
    for name, colour in colours.items():
        parts.append(f'<line x1="{x:.0f}" x2="{x + 22:.0f}" y1="20" y2="20" stroke="{colour}" stroke-width="3"/>')
        parts.append(f'<text x="{x + 28:.0f}" y="24" fill="#1d2730">{escaped(name)}</text>')
        x += 48 + 7.2 * len(name)
    return parts


def _panel(subject: Subject, rows: list[Row], colours: dict[str, str]) -> list[str]:
    top_rate = max((row.block_hit_rate for row in rows), default=0.0)
    top = max(0.1, math.ceil(top_rate * 10) / 10)
    low, high = math.log(subject.cache_blocks[0]), math.log(subject.cache_blocks[-1])

    def across(blocks: int) -> float:
        share = (math.log(blocks) - low) / (high - low) if high > low else 0.5
        return _LEFT + share * (_PANEL_WIDTH - _LEFT - _RIGHT)

    def down(rate: float) -> float:
        return _TOP + (1 - rate / top) * (_PANEL_HEIGHT - _TOP - _BOTTOM)

    parts = [f'<text x="{_LEFT}" y="28" font-weight="600" fill="#1d2730">{escaped(subject.workload)}</text>']
    for tick in range(5):
        rate = top * tick / 4
        parts.append(
            f'<line x1="{_LEFT}" x2="{_PANEL_WIDTH - _RIGHT}" y1="{down(rate):.1f}" y2="{down(rate):.1f}" '
            'stroke="#e3e8ec"/>'
            f'<text x="{_LEFT - 6}" y="{down(rate) + 4:.1f}" text-anchor="end" fill="#55636f">{100 * rate:.0f} %</text>'
        )
    for blocks in subject.cache_blocks:
        parts.append(
            f'<text x="{across(blocks):.1f}" y="{_PANEL_HEIGHT - _BOTTOM + 18}" text-anchor="middle" fill="#55636f">'
            f"{_short(blocks)}</text>"
        )
    middle = (_LEFT + _PANEL_WIDTH - _RIGHT) / 2
    parts.append(
        f'<text x="{middle:.0f}" y="{_PANEL_HEIGHT - 8}" text-anchor="middle" fill="#55636f">blocks held</text>'
    )
    for policy in sorted({row.policy for row in rows}, key=lambda name: name != BOUND):
        points = [(across(row.cache_blocks), down(row.block_hit_rate)) for row in rows if row.policy == policy]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colours[policy]}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colours[policy]}"/>' for x, y in points]
    return parts


def _short(blocks: int) -> str:
    return f"{blocks / 1000:.3g}k" if blocks >= 1000 else str(blocks)
