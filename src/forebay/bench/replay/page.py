"""A replay as one HTML page: no script, no network. All that goes in is escaped: names of traces are foreign text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from forebay.bench.markup import axis_end, document, escaped
from forebay.bench.replay.results import Bin, Outcome, ReplayRecord
from forebay.bench.units import bytes_text, seconds_text

_COLOURS = ("#1f6f8b", "#b5502b", "#3b8f5a", "#7a5ba6", "#b08a1e", "#4a6fb5", "#a6456f", "#5f6b73")
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 880, 240, 70, 12, 34
_STYLE = """
body { margin: 0 auto; max-width: 60rem; padding: 1.5rem 1rem 3rem; background: #fff; color: #1d2730;
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin: 1.8rem 0 .4rem; }
svg { display: block; width: 100%; } svg text { font-size: 12px; fill: #55636f; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { padding: .3rem .5rem; border-bottom: 1px solid #e3e8ec; text-align: right; }
th:first-child, td:first-child { text-align: left; }
.key { display: inline-block; width: .8rem; height: .8rem; margin-right: .4rem; }
"""

Figure = Callable[[Bin], float | None]


def render_page(record: ReplayRecord) -> str:
    parts = [
        f"<h1>{escaped(record.workload)} through the engine under virtual time</h1>",
        f"<p>{record.requests:,} requests, {record.distinct_blocks:,} distinct blocks of {record.block_tokens} "
        f"tokens, on {record.accelerators} x {escaped(record.profile)}, {record.pace:g} times as fast as recorded. The "
        "engine, its flow and its policies are the real ones; devices, accelerators and the clock are models, and "
        f"decode is left out. {escaped(record.fleet_text)}</p>",
        _table(record.outcomes),
        *_plot(record, "Hits, share of the full blocks asked for", _hits, lambda value: f"{value:.0%}", 1.0),
        *_plot(record, "Time to first token, p50", lambda each: each.ttft_p50_s, seconds_text),
        *_plot(record, "Time to first token, p99", lambda each: each.ttft_p99_s, seconds_text),
        *_plot(record, "Read from disk", lambda each: each.read_bytes_per_s, _rate_text),
        *_plot(record, "Written to disk", lambda each: each.write_bytes_per_s, _rate_text),
    ]
    return document(f"{record.workload}, replayed", _STYLE, parts)


def _hits(each: Bin) -> float | None:
    return (each.dram_blocks + each.disk_blocks) / each.wanted_blocks if each.wanted_blocks else None


def _rate_text(bytes_per_s: float) -> str:
    return f"{bytes_text(bytes_per_s)}/s"


def _colour(number: int) -> str:
    return _COLOURS[number % len(_COLOURS)]


def _table(outcomes: Sequence[Outcome]) -> str:
    heads = ("store", "hits", "of DRAM", "loaded", "TTFT p50", "p90", "p99", "read, peak", "read", "written")
    rows = [
        "<tr>" + "".join(f"<td>{cell}</td>" for cell in _row(number, each)) + "</tr>"
        for number, each in enumerate(outcomes)
    ]
    head = "".join(f"<th>{name}</th>" for name in heads)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _row(number: int, each: Outcome) -> tuple[str, ...]:
    return (
        f'<span class="key" style="background:{_colour(number)}"></span>{escaped(each.variant.name)}',
        f"{each.hit_share:.1%}",
        f"{each.dram_blocks / max(1, each.wanted_blocks):.1%}",
        f"{each.loaded_share:.1%}",
        *(seconds_text(value) for value in (each.ttft_p50_s, each.ttft_p90_s, each.ttft_p99_s)),
        _rate_text(each.read_peak_bytes_per_s),
        bytes_text(each.read_bytes),
        bytes_text(each.written_bytes),
    )


def _plot(
    record: ReplayRecord, title: str, figure: Figure, label: Callable[[float], str], top: float | None = None
) -> list[str]:
    """One line a variant over time; a stretch without a figure is a gap."""
    end_s = max(each.at_s for outcome in record.outcomes for each in outcome.bins) or 1.0
    if top is None:
        top = axis_end(max(figure(each) or 0.0 for outcome in record.outcomes for each in outcome.bins) or 1.0)
    lines = [f"<h2>{title}</h2>", f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img"><title>{title}</title>']
    for quarter in range(5):
        y, x = _y(top * quarter / 4, top), _x(end_s * quarter / 4, end_s)
        lines.append(f'<line x1="{_LEFT}" x2="{_WIDTH}" y1="{y}" y2="{y}" stroke="#e3e8ec" />')
        lines.append(f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{label(top * quarter / 4)}</text>')
        lines.append(
            f'<text x="{x}" y="{_HEIGHT - 12}" text-anchor="{"end" if quarter == 4 else "middle"}">'
            f"{end_s * quarter / 4:.0f} s</text>"
        )
    for number, outcome in enumerate(record.outcomes):
        path, is_open = "", False
        for each in outcome.bins:
            value = figure(each)
            if value is not None:
                path += f"{'L' if is_open else 'M'}{_x(each.at_s, end_s)},{_y(value, top)}"
            is_open = value is not None
        lines.append(f'<path d="{path}" fill="none" stroke="{_colour(number)}" stroke-width="1.8" />')
    return [*lines, "</svg>"]


def _x(at_s: float, end_s: float) -> float:
    return round(_LEFT + (_WIDTH - _LEFT - 8) * at_s / end_s, 1)


def _y(value: float, top: float) -> float:
    return round(_HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * min(1.0, value / top), 1)
