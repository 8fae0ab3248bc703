"""A plan as one SVG: TTFT and throughput by concurrency, hit rate by capacity. No script, nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from forebay.bench.markup import axis_end, escaped
from forebay.bench.units import bytes_text
from forebay.planning.results import Cell, Plan

_COLOURS = ("#1f6f8b", "#b5502b", "#3b8f5a", "#7a4f9a", "#a88a1c", "#55636f")
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 400, 280, 52, 16, 40, 44
_LEGEND_ROW = 20


@dataclass(frozen=True, slots=True)
class _Line:
    colour: str
    points: tuple[tuple[float, float], ...]
    """Position across, from 0 to 1, and value."""
    is_dashed: bool = False
    is_dots: bool = False


def render_picture(plan: Plan) -> str:
    """Three panels beside each other, below a legend."""
    names = list(plan.saturation)
    colours = {name: _COLOURS[at % len(_COLOURS)] for at, name in enumerate(names)}
    legend_height = _LEGEND_ROW * (len(names) + 2)
    width, height = 3 * _WIDTH, legend_height + _HEIGHT
    panels = (
        _by_concurrency(plan, colours, "TTFT p50 of a storm, s", lambda cell: cell.ttft_p50_s, _ttft_extra),
        _by_concurrency(plan, colours, "throughput, tokens/s", lambda cell: cell.throughput_tok_s, _speed_extra),
        _hits(plan),
    )
    placed = (f'<g transform="translate({at * _WIDTH} {legend_height})">{panel}</g>' for at, panel in enumerate(panels))
    described = "; ".join(
        f"{cell.candidate}, {cell.concurrency} sessions: TTFT p50 {cell.best_p50_s:.2f} s" for cell in plan.cells
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'role="img" font-family="system-ui, sans-serif" font-size="12" fill="#1d2730">\n'
        f"<title>{escaped(plan.name)}</title>\n<desc>{escaped(described)}</desc>\n"
        f'<rect width="{width}" height="{height}" fill="#fff" />\n{_legend(colours)}\n'
        + "\n".join((*placed, "</svg>\n"))
    )


def _legend(colours: dict[str, str]) -> str:
    parts = []
    for at, (name, colour) in enumerate(colours.items()):
        y = _LEGEND_ROW * (at + 1)
        parts.append(f'<line x1="{_LEFT}" x2="{_LEFT + 24}" y1="{y}" y2="{y}" stroke="{colour}" stroke-width="3" />')
        parts.append(f'<text x="{_LEFT + 32}" y="{y + 4}">{escaped(name)}</text>')
    y = _LEGEND_ROW * (len(colours) + 1)
    said = "lines: simulated, shared evenly; dashed: in order; rings: measured"
    parts.append(f'<text x="{_LEFT}" y="{y + 4}" fill="#55636f">{said}</text>')
    return "".join(parts)


def _ttft_extra(cells: Sequence[Cell], across: Callable[[int], float], colour: str) -> list[_Line]:
    measured = [(across(c.concurrency), c.measured_p50_s) for c in cells if c.measured_p50_s is not None]
    ordered = tuple((across(cell.concurrency), cell.ordered_p50_s) for cell in cells)
    return [_Line(colour, ordered, is_dashed=True), _Line(colour, tuple(measured), is_dots=True)]


def _speed_extra(cells: Sequence[Cell], across: Callable[[int], float], colour: str) -> list[_Line]:
    known = [
        (across(cell.concurrency), cell.measured_throughput_tok_s)
        for cell in cells
        if cell.measured_throughput_tok_s is not None
    ]
    return [_Line(colour, tuple(known), is_dots=True)]


def _by_concurrency(
    plan: Plan,
    colours: dict[str, str],
    title: str,
    figure: Callable[[Cell], float],
    extra: Callable[[Sequence[Cell], Callable[[int], float], str], list[_Line]],
) -> str:
    """Concurrencies stand at even distances, whatever lies between them."""
    steps = sorted({cell.concurrency for cell in plan.cells})

    def across(concurrency: int) -> float:
        return (steps.index(concurrency) + 0.5) / len(steps)

    lines = []
    for name, colour in colours.items():
        cells = sorted((c for c in plan.cells if c.candidate == name), key=lambda cell: cell.concurrency)
        lines.append(_Line(colour, tuple((across(cell.concurrency), figure(cell)) for cell in cells)))
        lines += extra(cells, across, colour)
    ticks = [(across(step), str(step)) for step in steps]
    return _panel(title, lines, ticks, "sessions at once")


def _hits(plan: Plan) -> str:
    rates = plan.hit_rates
    if not rates:
        return ""
    places = [(at + 0.5) / len(rates) for at in range(len(rates))]
    points = tuple((place, 100 * each.token_hit_rate) for place, each in zip(places, rates, strict=True))
    shown = {0, len(rates) // 2, len(rates) - 1}
    ticks = [(places[at], bytes_text(rates[at].capacity_bytes)) for at in sorted(shown)]
    return _panel("tokens hit, %", [_Line(_COLOURS[0], points)], ticks, "capacity")


def _panel(title: str, lines: Sequence[_Line], ticks: Sequence[tuple[float, str]], below: str) -> str:
    top = axis_end(max((value for line in lines for _, value in line.points), default=1.0))
    inner_width, inner_height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    parts = [f'<text x="{_LEFT}" y="24" font-weight="600">{escaped(title)}</text>']
    for quarter in range(5):
        y = _TOP + inner_height * (1 - quarter / 4)
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e3e8ec" />')
        parts.append(
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" fill="#55636f">{top * quarter / 4:g}</text>'
        )
    for place, label in ticks:
        x = _LEFT + inner_width * place
        parts.append(
            f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle" fill="#55636f">'
            f"{escaped(label)}</text>"
        )
    middle = _LEFT + inner_width / 2
    parts.append(f'<text x="{middle:.0f}" y="{_HEIGHT - 8}" text-anchor="middle" fill="#55636f">{below}</text>')
    for line in lines:
        placed = [(_LEFT + inner_width * x, _TOP + inner_height * (1 - value / top)) for x, value in line.points]
        parts += _drawn(line, placed)
    return "".join(parts)


def _drawn(line: _Line, placed: Sequence[tuple[float, float]]) -> list[str]:
    if line.is_dots:
        return [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="none" stroke="{line.colour}" stroke-width="2" />'
            for x, y in placed
        ]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
    dashes = ' stroke-dasharray="4 4"' if line.is_dashed else ""
    dots = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{line.colour}" />' for x, y in placed]
    return [f'<polyline points="{path}" fill="none" stroke="{line.colour}" stroke-width="2"{dashes} />', *dots]
