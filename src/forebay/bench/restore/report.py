"""A restore record as text, JSON and files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from forebay.bench.evidence import Validity
from forebay.bench.files import write_whole
from forebay.bench.restore.options import JSON_NAME, PLOT_NAME, REQUESTS_NAME
from forebay.bench.restore.plot import render_plot
from forebay.bench.restore.results import Cell, Comparison, RequestRecord, RestoreRecord, Spread
from forebay.bench.units import NOTHING, encodable, harmless, rate_text, seconds_text

_COLUMNS = (
    "at once", "group", "TTFT p50", "p90", "p99", "mean", "TPOT p50", "end to end p50", "tokens/s", "read, peak",
    "read, busy", "failed",
)  # fmt: skip


def encode_json(record: RestoreRecord) -> bytes:
    return msgspec.json.format(msgspec.json.encode(encodable(msgspec.to_builtins(record))), indent=2) + b"\n"


def encode_requests(requests: Iterable[RequestRecord]) -> bytes:
    """JSON lines: a request a line, with what follows from it."""
    encoder = msgspec.json.Encoder()
    lines = [
        encoder.encode(
            encodable(msgspec.to_builtins(each)) | {"end_to_end_s": each.end_to_end_s, "tpot_s": each.tpot_s}
        )
        for each in requests
    ]
    return b"".join(line + b"\n" for line in lines)


def write_files(record: RestoreRecord, folder: Path) -> tuple[Path, ...]:
    """restore.json, requests.jsonl and restore.svg. Raises ConfigError for one that cannot be written."""
    return (
        write_whole(folder / JSON_NAME, encode_json(record)),
        write_whole(folder / REQUESTS_NAME, encode_requests(record.requests)),
        write_whole(folder / PLOT_NAME, render_plot(record).encode()),
    )


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
    table = Table(title=f"{harmless(record.title)} ({harmless(record.workload)})", title_justify="left")
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name == "group" else "right")
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
        _seconds(cell.ttft_mean_s),
        _seconds(cell.tpot_p50_s),
        _seconds(cell.end_to_end_p50_s),
        NOTHING if cell.output_tokens_per_s is None else f"{cell.output_tokens_per_s.value:.1f}",
        _rate(cell.peak_bytes_per_s),
        _rate(cell.busy_mean_bytes_per_s),
        f"{cell.failed} of {cell.requests}",
    )


def _comparisons(record: RestoreRecord) -> Table:
    table = Table(title="Compared (95 % of the resampled figures lie between those in brackets)", title_justify="left")
    for name in ("at once", "group", "against", "TTFT p50", "tokens/s", "outputs"):
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
    """`-33.1 % [-34.0 .. -31.9]`."""
    if spread is None:
        return NOTHING
    return f"{100 * spread.value:+.1f} % [{100 * spread.low:+.1f} .. {100 * spread.high:+.1f}]"


def _rate(bytes_per_s: float | None) -> str:
    return rate_text(None if bytes_per_s is None else bytes_per_s / 1e9)
