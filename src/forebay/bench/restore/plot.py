"""A restore benchmark as one SVG: TTFT by group and concurrency, and reads over time. No script, no font but the
reader's own."""

from __future__ import annotations

from collections.abc import Sequence

from forebay.bench.markup import axis_end, escaped
from forebay.bench.restore.results import Cell, Group, RestoreRecord, Role, WaveRecord

_COLOURS = {Role.RECOMPUTE: "#8a8a8a", Role.BASELINE: "#b5502b", Role.CANDIDATE: "#1f6f8b", Role.SHARED: "#3b8f5a"}
_WIDTH, _LEFT, _RIGHT = 720, 64, 24
_BAR, _GAP, _HEAD = 18, 6, 34
_MOST_CHARACTERS = 18
"""Of a name in the picture."""
_CHART = 190
"""Height of the panel of reads, with its margins."""


def render_plot(record: RestoreRecord) -> str:
    concurrencies = sorted({cell.concurrency for cell in record.cells})
    panels, top = [], 56
    for concurrency in concurrencies:
        cells = [cell for cell in record.cells if cell.concurrency == concurrency]
        panels.append(_bars(cells, concurrency, top))
        top += _HEAD + len(cells) * (_BAR + _GAP) + 16
    waves = _middle_waves(record)
    if waves:
        panels.append(_reads(record, waves, top))
        top += _CHART
    height = top + 8
    title = f"{record.title}: time to the first token"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'role="img" font-family="system-ui, sans-serif" font-size="13" fill="#1d2730">\n'
        f"<title>{escaped(title)}</title>\n<desc>{escaped(_described(record.cells))}</desc>\n"
        f'<rect width="{_WIDTH}" height="{height}" fill="#fff" />\n'
        f'<text x="16" y="26" font-size="16" font-weight="600">{escaped(title)}</text>\n'
        f'<text x="16" y="44" fill="#55636f">{escaped(_verdict(record))}</text>\n' + "\n".join(panels) + "\n</svg>\n"
    )


def _verdict(record: RestoreRecord) -> str:
    reasons = record.verdict.reasons
    return f"{record.verdict.validity.name}{f': {len(reasons)} reasons' if reasons else ''}; bar: p50, line: p50 to p99"


def _described(cells: Sequence[Cell]) -> str:
    return "; ".join(
        f"{cell.group} at {cell.concurrency}: p50 "
        + (f"{cell.ttft_p50_s.value:.3f} s" if cell.ttft_p50_s is not None else "no sample")
        for cell in cells
    )


def _short(name: str) -> str:
    return name if len(name) <= _MOST_CHARACTERS else name[: _MOST_CHARACTERS - 1] + "…"


def _bars(cells: Sequence[Cell], concurrency: int, top: int) -> str:
    """A bar a group, all on one scale."""
    left = 190
    end_s = axis_end(max((cell.ttft_p99_s.value for cell in cells if cell.ttft_p99_s is not None), default=1.0))
    parts = [f'<text x="16" y="{top + 18}" font-weight="600">{concurrency} at once</text>']
    for at, cell in enumerate(cells):
        y = top + _HEAD + at * (_BAR + _GAP)
        parts.append(f'<text x="{left - 8}" y="{y + 14}" text-anchor="end">{escaped(_short(cell.group))}</text>')
        if cell.ttft_p50_s is None:
            parts.append(f'<text x="{left}" y="{y + 14}" fill="#b3261e">no sample</text>')
            continue
        width = _across(cell.ttft_p50_s.value, end_s, left)
        parts.append(
            f'<rect x="{left}" y="{y}" width="{width}" height="{_BAR}" fill="{_COLOURS[cell.role]}" />'
        )  # fmt: skip
        far = width
        if cell.ttft_p99_s is not None:
            far = _across(cell.ttft_p99_s.value, end_s, left)
            middle = y + _BAR / 2
            parts.append(
                f'<line x1="{left + width}" x2="{left + far}" y1="{middle}" y2="{middle}" stroke="#1d2730" '
                'stroke-width="2" />'
            )
        parts.append(f'<text x="{left + far + 8:.1f}" y="{y + 14}">{cell.ttft_p50_s.value:.2f} s</text>')
    return "\n".join(parts)


def _across(value_s: float, end_s: float, left: int) -> float:
    return round((_WIDTH - left - _RIGHT - 64) * value_s / end_s, 1)


def _middle_waves(record: RestoreRecord) -> list[WaveRecord]:
    """One wave a group, with samples: the middle round of the largest concurrency."""
    chosen: list[WaveRecord] = []
    for group in record.groups:
        waves = [wave for wave in record.waves if wave.group == group.name and wave.bandwidth]
        most = [wave for wave in waves if wave.concurrency == max(each.concurrency for each in waves)]
        if most:
            chosen.append(most[len(most) // 2])
    return chosen


def _reads(record: RestoreRecord, waves: Sequence[WaveRecord], top: int) -> str:
    """Reads of the device, each wave from its own beginning."""
    groups: dict[str, Group] = {group.name: group for group in record.groups}
    end_s = axis_end(max(wave.whole_s for wave in waves))
    end_rate = axis_end(max(sample.bytes_per_s for wave in waves for sample in wave.bandwidth) / 1e9)
    high, low = top + 44, top + _CHART - 24
    parts = [
        f'<text x="16" y="{top + 18}" font-weight="600">Reads at the block layer, GB/s, '
        f"{waves[0].concurrency} at once</text>"
    ]
    for quarter in range(5):
        x = _LEFT + (_WIDTH - _LEFT - _RIGHT) * quarter / 4
        y = low - (low - high) * quarter / 4
        seconds = f"{end_s * quarter / 4:g}{' s' if quarter == 4 else ''}"
        parts += [
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e3e8ec" />',
            f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="#55636f">{end_rate * quarter / 4:g}</text>',
            f'<text x="{x:.1f}" y="{low + 18}" text-anchor="middle" fill="#55636f">{seconds}</text>',
        ]
    for at, wave in enumerate(waves):
        colour = _COLOURS[groups[wave.group].role]
        points = " ".join(
            f"{_LEFT + (_WIDTH - _LEFT - _RIGHT) * (sample.at_s - wave.began_s) / end_s:.1f},"
            f"{low - (low - high) * max(0.0, sample.bytes_per_s) / 1e9 / end_rate:.1f}"
            for sample in wave.bandwidth
        )
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2" />')
        x = _LEFT + 150 * at
        parts.append(
            f'<rect x="{x}" y="{top + 26}" width="10" height="10" fill="{colour}" />'
            f'<text x="{x + 16}" y="{top + 35}">{escaped(_short(wave.group))}</text>'
        )
    return "\n".join(parts)
