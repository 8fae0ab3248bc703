"""A restore record as text, JSON and files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from forebay.bench.evidence import Validity
from forebay.bench.files import write_whole
from forebay.bench.restore.options import JSON_NAME, PARQUET_NAME, PLOT_NAME, REQUESTS_NAME
from forebay.bench.restore.plot import render_plot
from forebay.bench.restore.results import Cell, Comparison, RequestRecord, RestoreRecord, Spread
from forebay.bench.restore.tables import encode_parquet, request_row
from forebay.bench.units import NOTHING, encodable, harmless, seconds_text

_COLUMNS = ("at once", "group", "TTFT p50", "p90", "p99", "TPOT", "tokens/s", "read GB/s")


def encode_json(record: RestoreRecord) -> bytes:
    return msgspec.json.format(msgspec.json.encode(encodable(msgspec.to_builtins(record))), indent=2) + b"\n"


def encode_requests(requests: Iterable[RequestRecord]) -> bytes:
    """JSON lines: a request a line, with what follows from it."""
    return b"".join(msgspec.json.encode(request_row(each)) + b"\n" for each in requests)


def write_files(record: RestoreRecord, folder: Path) -> tuple[Path, ...]:
    """restore.json, requests.jsonl, restore.svg, and requests.parquet where pyarrow is installed.

    Raises ConfigError for one that cannot be written.
    """
    contents = {
        JSON_NAME: encode_json(record),
        REQUESTS_NAME: encode_requests(record.requests),
        PLOT_NAME: render_plot(record).encode(),
        PARQUET_NAME: encode_parquet(record.requests),
    }
    return tuple(write_whole(folder / name, content) for name, content in contents.items() if content is not None)


def print_record(record: RestoreRecord, console: Console) -> None:
    console.print(_cells(record))
    if record.comparisons:
        console.print(_comparisons(record))
    is_valid = record.verdict.validity is Validity.VALID
    text = Text(f"\n{record.verdict.validity.name}", style="bold green" if is_valid else "bold red")
    for reason in record.verdict.reasons:
        text.append(f"\n  because {harmless(reason)}", style="red not bold")
    for note in record.notes:
        text.append(f"\n{harmless(note)}", style="default not bold")
    console.print(text)


def exit_code(record: RestoreRecord) -> int:
    """0; 3 when the measurement is not valid."""
    return 0 if record.verdict.validity is Validity.VALID else 3


def _cells(record: RestoreRecord) -> Table:
    title = f"{harmless(record.title)} ({harmless(record.workload)})"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name == "group" else "right", no_wrap=name == "group")
    before = None
    for cell in record.cells:
        if before is not None and cell.concurrency != before:
            table.add_section()
        before = cell.concurrency
        table.add_row(*_row(cell))
    return table


def _row(cell: Cell) -> tuple[str, ...]:
    return (
        str(cell.concurrency),
        harmless(cell.group),
        _seconds(cell.ttft_p50_s),
        _seconds(cell.ttft_p90_s),
        _seconds(cell.ttft_p99_s),
        _seconds(cell.tpot_p50_s),
        NOTHING if cell.output_tokens_per_s is None else f"{cell.output_tokens_per_s.value:.1f}",
        NOTHING if cell.busy_mean_bytes_per_s is None else f"{cell.busy_mean_bytes_per_s / 1e9:.2f}",
    )


def _comparisons(record: RestoreRecord) -> Table:
    title = "Compared (95 % of the resampled figures lie between those in brackets)"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("at once", "group", "against", "TTFT p50", "tokens/s", "output"):
        table.add_column(name, justify="right" if name in ("at once", "TTFT p50", "tokens/s") else "left")
    for each in record.comparisons:
        table.add_row(*_compared(each))
    return table


def _compared(each: Comparison) -> tuple[str, ...]:
    return (
        str(each.concurrency),
        harmless(each.group),
        harmless(each.against),
        _change(each.ttft_p50_change),
        _change(each.throughput_change),
        "equal" if each.tokens_equal else "DIFFER",
    )


def _seconds(spread: Spread | None) -> str:
    return NOTHING if spread is None else seconds_text(spread.value)


def _change(spread: Spread | None) -> str:
    """`-33.1% [-34.0, -31.9]`."""
    if spread is None:
        return NOTHING
    digits = 0 if abs(spread.value) >= 1 else 1
    value, low, high = (f"{100 * each:+.{digits}f}" for each in (spread.value, spread.low, spread.high))
    return f"{value}% [{low}, {high}]"
