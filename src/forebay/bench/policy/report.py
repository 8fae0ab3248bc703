"""A record as tables for a terminal, and as files."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from forebay.bench.policy.options import PolicyOptions
from forebay.bench.policy.picture import render_picture
from forebay.bench.policy.record import BOUND, PolicyRecord, Row, Subject
from forebay.bench.policy.run import encode_json
from forebay.bench.units import harmless

JSON_NAME, PICTURE_NAME = "policy.json", "policy.svg"
_WRITE_ALL = "admit_all"


def write_files(record: PolicyRecord, options: PolicyOptions) -> tuple[Path, Path]:
    """Both under `options.out`; raises OSError where that cannot be written."""
    paths = options.out / JSON_NAME, options.out / PICTURE_NAME
    for path, text in zip(paths, (encode_json(record), render_picture(record)), strict=True):
        path.write_text(text, encoding="utf-8")
    return paths


def print_report(record: PolicyRecord, console: Console) -> None:
    for subject in record.subjects:
        rows = record.of(subject.workload)
        console.print(_hit_rates(subject, [row for row in rows if row.admission == _WRITE_ALL]))
        console.print(_admission(subject, rows))
    console.print(
        "Hits: blocks of the longest held prefix in % of the full blocks asked for / tokens in % of all prompt tokens. "
        f"'{BOUND}': Belady's MIN, which also counts blocks behind a hole; no policy exceeds it, and it may be out of "
        "reach.",
        soft_wrap=True,
    )


def _hit_rates(subject: Subject, rows: list[Row]) -> Table:
    table = Table(title=_title(subject), title_justify="left")
    table.add_column("blocks held")
    for blocks in subject.cache_blocks:
        table.add_column(f"{blocks:,}", justify="right")
    for policy in dict.fromkeys(row.policy for row in rows):
        if policy == BOUND:
            table.add_section()
        table.add_row(policy, *(_rates(row) for row in rows if row.policy == policy))
    return table


def _rates(row: Row) -> str:
    return f"{100 * row.block_hit_rate:.1f} / {100 * row.token_hit_rate:.1f}"


def _admission(subject: Subject, rows: tuple[Row, ...]) -> Table:
    """What was not written, and what that cost, of the policy that ran with both."""
    fewer = [row for row in rows if row.admission != _WRITE_ALL]
    whole = {row.cache_blocks: row for row in rows if row.policy == fewer[0].policy and row.admission == _WRITE_ALL}
    table = Table(title=f"{fewer[0].policy} with {fewer[0].admission}", title_justify="left")
    table.add_column("blocks held")
    for row in fewer:
        table.add_column(f"{row.cache_blocks:,}", justify="right")
    table.add_row("hits, all written", *(_rates(whole[row.cache_blocks]) for row in fewer))
    table.add_row(f"hits, {fewer[0].admission}", *(_rates(row) for row in fewer))
    table.add_row("writes saved", *(_saved(row, whole[row.cache_blocks]) for row in fewer))
    return table


def _saved(fewer: Row, whole: Row) -> str:
    return f"{100 * (1 - fewer.written_blocks / whole.written_blocks):.1f} %" if whole.written_blocks else "0 %"


def _title(subject: Subject) -> str:
    return harmless(
        f"{subject.workload}: {subject.requests:,} requests, {subject.wanted_blocks:,} blocks of "
        f"{subject.block_tokens} tokens asked for, {subject.distinct_blocks:,} distinct"
    )
