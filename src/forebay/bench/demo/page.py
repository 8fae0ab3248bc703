"""A record as one HTML page: no script, no network, nothing that is not in the record.

Everything that goes in passes `escaped`: the answers are a model's, and so are hostile until escaped.
"""

from __future__ import annotations

from forebay.bench.demo.report import FIGURES, evidence_text, pool_text, verdict_lines
from forebay.bench.demo.results import Record, Session, Way
from forebay.bench.evidence import Validity
from forebay.bench.markup import STYLE, axis_end, document, escaped, items
from forebay.bench.units import bytes_text, seconds_text

_COLOURS = {Way.RECOMPUTE: "#b5502b", Way.DISK: "#1f6f8b", Way.DRAM: "#3b8f5a"}

_STYLE = """
blockquote { margin: .4rem 0 1.2rem; padding: .5rem .9rem; background: #f5f7f9; border-left: .25rem solid #c3ccd4; }
.question { font-weight: 600; margin: 1rem 0 0; }
"""


def render_page(record: Record) -> str:
    """The whole page: well-formed XML as well as HTML."""
    body = (
        '<p class="over">Forebay demo</p>',
        f"<h1>{escaped(record.headline)}</h1>",
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
    return document("Forebay demo", STYLE + _STYLE, body)


def _verdict(record: Record) -> str:
    first, *reasons = verdict_lines(record)
    kind = "valid" if record.verdict.validity is Validity.VALID else "invalid"
    said = "the cold reads came from the device, and each way was what it is called" if not reasons else "because"
    because = f"<ul>{items(reasons)}</ul>" if reasons else ""
    equal = (
        "The answers are equal in all ways, token for token."
        if record.tokens_equal
        else "<strong>The answers are not equal.</strong>"
    )
    return (
        f'<div class="verdict {kind}"><strong>{escaped(first)}</strong>: {escaped(said)}.{because}<p>{equal}</p></div>'
    )


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
        f'<desc id="plot-desc">{escaped(described)}.</desc>',
        *_axis(top_s, height - _AXIS_PIXELS),
    ]
    for row, summary in enumerate(record.summaries):
        top, colour = row * _ROW_PIXELS, _COLOURS[summary.way]
        parts += [
            f'<text class="strong" x="0" y="{top + 18}">{escaped(summary.way.label)}</text>',
            f'<text x="100%" y="{top + 18}" text-anchor="end">p50 {escaped(seconds_text(summary.ttft_p50_s))}</text>',
            f'<rect x="0" y="{top + 26}" width="{_percent(summary.ttft_p50_s, top_s)}" height="{_BAR_PIXELS}" '
            f'fill="{colour}" fill-opacity="0.35" />',
        ]
        parts += [
            f'<circle cx="{_percent(found.ttft_s, top_s)}" cy="{top + 26 + _BAR_PIXELS // 2}" r="4" fill="{colour}" '
            f'stroke="#fff"><title>session {found.session}: {escaped(seconds_text(found.ttft_s))}</title></circle>'
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


def _percent(value_s: float, top_s: float) -> str:
    return f"{100 * value_s / top_s:.2f}%"


# ---- tables


def _figures(record: Record) -> str:
    head = "".join(f'<th scope="col">{escaped(summary.way.label)}</th>' for summary in record.summaries)
    rows = "".join(
        f'<tr><th scope="row">{escaped(figure.name)}</th>'
        + "".join(f"<td>{escaped(figure.show(summary))}</td>" for summary in record.summaries)
        + "</tr>"
        for figure in FIGURES
    )
    return (
        '<div class="scroll"><table class="figures">'
        f'<thead><tr><th scope="col"></th>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
        f"<h3>TTFT of each session</h3>{_sessions(record)}"
    )


def _sessions(record: Record) -> str:
    head = "".join(f'<th scope="col">{escaped(way.label)}</th>' for way in Way)
    rows = ""
    for session in record.sessions:
        found = {each.way: each for each in record.measurements if each.session == session.number}
        cells = "".join(f"<td>{escaped(seconds_text(found[way].ttft_s))}</td>" for way in Way)
        rows += f'<tr><th scope="row">{session.number}. {escaped(session.title)}</th>{cells}</tr>'
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
        f'<p class="question">{session.number}. {escaped(session.question)}</p>'
        f'<p class="over">after {session.document_tokens:,} tokens of: {escaped(session.title)}.{equal}</p>'
        f"<blockquote><bdi>{escaped(session.answer) or '(nothing)'}</bdi></blockquote>"
    )


def _evidence(record: Record) -> str:
    notes = items((*record.notes, pool_text(record)))
    return f"<p>{escaped(evidence_text(record))}</p><h3>Notes</h3><ul>{notes}</ul>"


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
    rows = "".join(
        f'<tr><th scope="row">{escaped(name)}</th><td>{escaped(fact)}</td></tr>' for name, fact in facts.items()
    )
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
    return f"<ul>{items(lines)}</ul>"
