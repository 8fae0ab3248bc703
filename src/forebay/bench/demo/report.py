"""A record as text for a terminal, as JSON, and as files. Every figure comes from the record's summaries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from forebay.bench.demo.options import JSON_NAME, PAGE_NAME
from forebay.bench.demo.results import Record, Summary
from forebay.bench.evidence import Validity
from forebay.bench.files import write_whole
from forebay.bench.units import (
    NOTHING,
    bytes_text,
    encodable,
    factor_text,
    harmless,
    rate_text,
    seconds_text,
    tokens_rate_text,
)

_ANSWER_CHARACTERS = 200
"""Of an answer, what the terminal shows."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table: a name, and how each way's summary shows it."""

    name: str
    show: Callable[[Summary], str]


FIGURES = (
    Figure("TTFT p50", lambda way: seconds_text(way.ttft_p50_s)),
    Figure("TTFT p99", lambda way: seconds_text(way.ttft_p99_s)),
    Figure("speed-up (p50)", lambda way: factor_text(way.speedup)),
    Figure("restore p50", lambda way: seconds_text(way.restore_p50_s)),
    Figure("restored", lambda way: bytes_text(way.restored_bytes) if way.restored_bytes else NOTHING),
    Figure("restore rate", lambda way: rate_text(way.restore_gb_per_s)),
    Figure("hit tokens", lambda way: hits_text(way)),
    Figure("computed tokens", lambda way: f"{way.computed_tokens:,}"),
    Figure("answer", lambda way: tokens_rate_text(way.answer_tokens_per_s)),
    Figure("end to end", lambda way: tokens_rate_text(way.total_tokens_per_s)),
)


def hits_text(summary: Summary) -> str:
    """`16,384 file`: restored tokens by source, over all sessions."""
    return ", ".join(f"{tokens:,} {source}" for source, tokens in sorted(summary.hit_tokens.items())) or "0"


def encode_json(record: Record) -> bytes:
    return msgspec.json.format(msgspec.json.encode(encodable(msgspec.to_builtins(record))), indent=2) + b"\n"


def print_report(record: Record, console: Console) -> None:
    """The finding, the table, the evidence and the answers."""
    title = Text(harmless(f"{record.model.name}, sessions: {len(record.sessions)}").replace("\n", " "))
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for summary in record.summaries:
        table.add_column(summary.way.label, justify="right", overflow="fold")
    for figure in FIGURES:
        table.add_row(figure.name, *(figure.show(summary) for summary in record.summaries))
    console.print(Group(_headline(record), table, _evidence(record), _notes(record), _answers(record)))


def evidence_text(record: Record) -> str:
    """One sentence: what the counters say of the cold reads."""
    evidence, place = record.evidence, record.evidence.medium.device or "no block device"
    return (
        f"The cold restores delivered {bytes_text(evidence.wanted_bytes)}; at the block layer this process read "
        f"{bytes_text(evidence.read.process_bytes)} and the device ({place}) {bytes_text(evidence.read.device_bytes)}."
    )


def verdict_lines(record: Record) -> list[str]:
    verdict = record.verdict
    return [verdict.validity.name, *verdict.reasons] if verdict.reasons else [verdict.validity.name]


def pool_text(record: Record) -> str:
    pool = record.pool
    if not pool.kept:
        return "The pool was a temporary one and has been removed."
    return f"The pool {pool.path} is kept: a further run with the same options finds its blocks."


def write_files(record: Record, page: str, folder: Path) -> tuple[Path, Path]:
    """demo.json and demo.html, each written whole or not at all. Raises ConfigError for one that cannot be."""
    return (
        write_whole(folder / JSON_NAME, encode_json(record)),
        write_whole(folder / PAGE_NAME, page.encode()),
    )


def _headline(record: Record) -> Text:
    good = record.tokens_equal and record.verdict.validity is Validity.VALID
    return Text(f"\n{record.headline}\n", style="bold green" if good else "bold red")


def _evidence(record: Record) -> Text:
    first, *reasons = verdict_lines(record)
    text = Text(f"\n{first}", style="bold green" if not reasons else "bold red")
    for reason in reasons:
        text.append(f"\n  because {harmless(reason)}", style="red")
    text.append(f"\n{harmless(evidence_text(record))}", style="default not bold")
    equal = "equal in all ways, token for token" if record.tokens_equal else "NOT EQUAL"
    text.append(f"\nThe answers are {equal}.", style="default not bold")
    return text


def _notes(record: Record) -> Text:
    return Text("".join(f"\n- {harmless(note)}" for note in (*record.notes, pool_text(record))))


def _answers(record: Record) -> Text:
    text = Text()
    for session in record.sessions:
        text.append(f"\n\n{harmless(session.title)}: {harmless(session.question)}", style="bold")
        answer = " ".join(harmless(session.answer).split())
        text.append(f"\n  {answer[:_ANSWER_CHARACTERS]}{'…' if len(answer) > _ANSWER_CHARACTERS else ''}")
    text.append("\n")
    return text


def exit_code(record: Record) -> int:
    """0; 1 when tokens differ; 3 when the measurement is not valid."""
    if not record.tokens_equal:
        return 1
    return 3 if record.verdict.validity is Validity.INVALID else 0
