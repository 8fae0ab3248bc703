"""A record as one HTML page: no script, no network, nothing that is not in the record.

Everything that goes in passes `_text`: the answers are a model's, and so are hostile until escaped.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable

from forebay.bench.demo.report import FIGURES, evidence_text, pool_text, verdict_lines
from forebay.bench.demo.results import Record, Session, Way
from forebay.bench.evidence import Validity
from forebay.bench.units import bytes_text, harmless, seconds_text

_COLOURS = {Way.RECOMPUTE: "#b5502b", Way.DISK: "#1f6f8b", Way.DRAM: "#3b8f5a"}

_STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 60rem; padding: 1.5rem 1rem 3rem; background: #fff; color: #1d2730;
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.55rem; line-height: 1.25; margin: .25rem 0 1rem; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; border-bottom: 1px solid #d5dce2; padding-bottom: .25rem; }
p { margin: .5rem 0; }
.over { color: #55636f; margin: 0; font-size: .9rem; }
.verdict { border-left: .4rem solid; border-radius: .2rem; padding: .6rem .9rem; margin: 1rem 0; }
.valid { border-color: #3b8f5a; background: #eef7f1; }
.invalid { border-color: #b3261e; background: #fdeeec; }
.verdict ul { margin: .3rem 0 0; padding-left: 1.2rem; }
svg { display: block; width: 100%; overflow: visible; }
svg text { font-size: 14px; fill: #1d2730; }
svg .strong { font-weight: 600; }
svg .tick { font-size: 12px; fill: #55636f; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; overflow-wrap: normal; }
th, td { padding: .35rem .5rem; border-bottom: 1px solid #e3e8ec; vertical-align: top; }
th { text-align: left; font-weight: 600; }
.figures td, .figures thead th { text-align: right; font-variant-numeric: tabular-nums; }
.figures thead th:first-child { text-align: left; }
.facts th { width: 11rem; font-weight: 400; color: #55636f; }
.facts td { overflow-wrap: anywhere; }
blockquote { margin: .4rem 0 1.2rem; padding: .5rem .9rem; background: #f5f7f9; border-left: .25rem solid #c3ccd4; }
.question { font-weight: 600; margin: 1rem 0 0; }
@media (max-width: 34rem) {
  body { font-size: 15px; } h1 { font-size: 1.3rem; }
  table { font-size: .82rem; } th, td { padding: .3rem .3rem; } .facts th { width: 7.5rem; }
}
"""


def render_page(record: Record) -> str:
    """The whole page: well-formed XML as well as HTML."""
    body = (
        '<p class="over">Forebay demo</p>',
        f"<h1>{_text(record.headline)}</h1>",
        _verdict(record),
        "<h2>Time to the first token</h2>",
        _plot(record),
        "<h2>Figures</h2>",
        _figures(record),
        "<h2>Questions and answers</h2>",
        _answers(record),
        "<h2>Evidence</h2>",
        _evidence(record),
        "<h2>Environment</h2>",
        _environment(record),
        "<h2>How to read this</h2>",
        _how_to_read(record),
    )
    return "\n".join(
        (
            "<!DOCTYPE html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8" />',
            '<meta name="viewport" content="width=device-width, initial-scale=1" />',
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\" />",
            "<title>Forebay demo</title>",
            f"<style>{_STYLE}</style>",
            "</head>",
            "<body>",
            *body,
            "</body>",
            "</html>",
            "",
        )
    )


def _text(value: object) -> str:
    """Anything, as text that neither a browser nor an XML parser takes for more than that."""
    return html.escape(harmless(str(value)), quote=True)


def _verdict(record: Record) -> str:
    first, *reasons = verdict_lines(record)
    kind = "valid" if record.verdict.validity is Validity.VALID else "invalid"
    said = "the cold reads came from the device, and each way was what it is called" if not reasons else "because"
    items = f"<ul>{_items(reasons)}</ul>" if reasons else ""
    equal = (
        "The answers are equal in all ways, token for token."
        if record.tokens_equal
        else "<strong>The answers are not equal.</strong>"
    )
    return f'<div class="verdict {kind}"><strong>{_text(first)}</strong>: {_text(said)}.{items}<p>{equal}</p></div>'


def _items(lines: Iterable[str]) -> str:
    return "".join(f"<li>{_text(line)}</li>" for line in lines)


# ---- the plot: positions in percent and text in pixels, so that it is as readable on a phone as on a desk

_ROW_PIXELS = 64
_BAR_PIXELS = 22
_AXIS_PIXELS = 26


def _plot(record: Record) -> str:
    """A bar a way (TTFT p50, linear, from 0), and a point for each session."""
    top_s = axis_end(max(found.ttft_s for found in record.measurements))
    height = _ROW_PIXELS * len(record.summaries) + _AXIS_PIXELS
    described = "; ".join(
        f"{each.way.label}: p50 {seconds_text(each.ttft_p50_s)}, p99 {seconds_text(each.ttft_p99_s)}"
        for each in record.summaries
    )
    parts = [
        f'<svg role="img" height="{height}" aria-labelledby="plot-title plot-desc">',
        '<title id="plot-title">Time to the first token for each way, in seconds</title>',
        f'<desc id="plot-desc">{_text(described)}.</desc>',
        *_axis(top_s, height - _AXIS_PIXELS),
    ]
    for row, summary in enumerate(record.summaries):
        top, colour = row * _ROW_PIXELS, _COLOURS[summary.way]
        parts += [
            f'<text class="strong" x="0" y="{top + 18}">{_text(summary.way.label)}</text>',
            f'<text x="100%" y="{top + 18}" text-anchor="end">p50 {_text(seconds_text(summary.ttft_p50_s))}</text>',
            f'<rect x="0" y="{top + 26}" width="{_percent(summary.ttft_p50_s, top_s)}" height="{_BAR_PIXELS}" '
            f'fill="{colour}" fill-opacity="0.35" />',
        ]
        parts += [
            f'<circle cx="{_percent(found.ttft_s, top_s)}" cy="{top + 26 + _BAR_PIXELS // 2}" r="4" fill="{colour}" '
            f'stroke="#fff"><title>session {found.session}: {_text(seconds_text(found.ttft_s))}</title></circle>'
            for found in record.of(summary.way)
        ]
    return "\n".join((*parts, "</svg>", "<p class='over'>Bars: p50. Points: sessions. Linear, from 0.</p>"))


def _axis(top_s: float, bottom: int) -> list[str]:
    parts = []
    for quarter in range(5):
        at = f"{25 * quarter}%"
        anchor = ("start", "middle", "middle", "middle", "end")[quarter]
        parts.append(f'<line x1="{at}" x2="{at}" y1="0" y2="{bottom}" stroke="#e3e8ec" />')
        label = f"{top_s * quarter / 4:g}{' s' if quarter == 4 else ''}"
        parts.append(f'<text class="tick" x="{at}" y="{bottom + 18}" text-anchor="{anchor}">{label}</text>')
    return parts


def axis_end(largest: float) -> float:
    """The smallest of 1, 2, 4, 6, 8, 10, 12, 16, 20 ... times a power of ten that is not below `largest`."""
    power = 10.0 ** math.floor(math.log10(largest)) if largest > 0 else 1.0
    steps = (1.0, 1.2, 1.6, 2.0, 2.4, 3.0, 4.0, 6.0, 8.0, 10.0)
    return next(step * power for step in steps if step * power >= largest * (1 - 1e-12))


def _percent(value_s: float, top_s: float) -> str:
    return f"{100 * value_s / top_s:.2f}%"


# ---- tables


def _figures(record: Record) -> str:
    head = "".join(f'<th scope="col">{_text(summary.way.label)}</th>' for summary in record.summaries)
    rows = "".join(
        f'<tr><th scope="row">{_text(figure.name)}</th>'
        + "".join(f"<td>{_text(figure.show(summary))}</td>" for summary in record.summaries)
        + "</tr>"
        for figure in FIGURES
    )
    return (
        '<div class="scroll"><table class="figures">'
        f'<thead><tr><th scope="col"></th>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
        f"<h3>TTFT of each session</h3>{_sessions(record)}"
    )


def _sessions(record: Record) -> str:
    head = "".join(f'<th scope="col">{_text(way.label)}</th>' for way in Way)
    rows = ""
    for session in record.sessions:
        found = {each.way: each for each in record.measurements if each.session == session.number}
        cells = "".join(f"<td>{_text(seconds_text(found[way].ttft_s))}</td>" for way in Way)
        rows += f'<tr><th scope="row">{session.number}. {_text(session.title)}</th>{cells}</tr>'
    return (
        '<div class="scroll"><table class="figures">'
        f'<thead><tr><th scope="col">Session</th>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    )


def _answers(record: Record) -> str:
    return "\n".join(_answer(session) for session in record.sessions)


def _answer(session: Session) -> str:
    equal = (
        "" if session.tokens_equal else " <strong>The ways gave different answers; this is the recomputed one.</strong>"
    )
    return (
        f'<p class="question">{session.number}. {_text(session.question)}</p>'
        f'<p class="over">after {session.document_tokens:,} tokens of: {_text(session.title)}.{equal}</p>'
        f"<blockquote><bdi>{_text(session.answer) or '(nothing)'}</bdi></blockquote>"
    )


def _evidence(record: Record) -> str:
    notes = _items((*record.notes, pool_text(record)))
    return f"<p>{_text(evidence_text(record))}</p><h3>Notes</h3><ul>{notes}</ul>"


def _environment(record: Record) -> str:
    here, pool, resources, medium = record.environment, record.pool, record.resources, record.evidence.medium
    facts = {
        "Model": f"{record.model.name} ({record.model.architecture}, {record.model.parameters:,} parameters)",
        "KV": f"{record.model.kv_dtype}, {bytes_text(record.model.token_bytes)} a token, "
        f"{bytes_text(pool.block_bytes)} a block",
        "CPU": f"{here.cpu_model}; {here.usable_cpus} of {here.cpus} processors usable, "
        f"threads of the model: {resources.compute_threads}",
        "Virtual machine": "yes" if here.virtual_machine else "not that the CPU says",
        "Memory": bytes_text(here.memory_bytes),
        "Huge pages": f"{bytes_text(resources.huge_page_bytes)} in this process; "
        f"transparent huge pages: {here.transparent_huge_pages}",
        "Host pool (DRAM)": bytes_text(resources.host_pool_bytes),
        "Device cache": bytes_text(resources.device_cache_bytes),
        "Kernel": here.kernel,
        "Pool": f"{pool.path} ({medium.filesystem} on {medium.source}, "
        f"block device {medium.device or 'none'} {medium.device_number})",
        "Pool I/O": f"{pool.access}, since {pool.access_reason}",
        "Software": ", ".join([here.python, *(f"{name} {version}" for name, version in here.packages.items())]),
        "Options": ", ".join(f"{name} {value}" for name, value in record.options.items() if value is not None),
        "Command": " ".join(record.command),
        "Time": f"{record.created}; {seconds_text(record.durations.whole_s)} in all, of which "
        f"{seconds_text(record.durations.load_model_s)} loading the model, "
        f"{seconds_text(record.durations.populate_s)} populating, "
        f"{seconds_text(record.durations.measure_s)} measuring",
    }
    rows = "".join(f'<tr><th scope="row">{_text(name)}</th><td>{_text(fact)}</td></tr>' for name, fact in facts.items())
    return f'<table class="facts"><tbody>{rows}</tbody></table>'


def _how_to_read(record: Record) -> str:
    lines = (
        "Each document went through the model once, and the KV cache of its tokens into the pool on disk. Then the "
        "store was closed: nothing was left in device memory or DRAM.",
        "Recompute: no store, the whole prompt goes through the model. From cold disk: device memory and DRAM "
        "were emptied before, and the pool's pages dropped from the page cache. From DRAM: only device memory "
        "was emptied. The three take turns within each session, on the same prompt.",
        "TTFT is the time from the prompt to the first token of the answer. It contains the restore, and the "
        "computation of what was not restored: the question, and whatever of the document does not fill a block.",
        f"p50 is the median over the {len(record.sessions)} sessions. p99 is by nearest rank, which for fewer than "
        "100 sessions is the slowest one. The speed-up is recompute's p50 over that of the way.",
        "Restored bytes, tokens and rates are over all sessions. 1 GB is 1,000,000,000 bytes.",
        "VALID means: both the process's and the block device's counters saw at least 95 % of the restored bytes read "
        "from the device, and every restored token came from where the way's name says.",
    )
    return f"<ul>{_items(lines)}</ul>"
