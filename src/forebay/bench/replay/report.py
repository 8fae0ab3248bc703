"""A replay as a table for a terminal, as JSON, and as one page with plots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from forebay.bench.files import write_whole
from forebay.bench.replay.page import render_page
from forebay.bench.replay.results import ReplayRecord
from forebay.bench.units import bytes_text, encodable, harmless, seconds_text

JSON_NAME, PAGE_NAME = "sim-replay.json", "sim-replay.html"


def encode_json(record: ReplayRecord) -> bytes:
    plain: Any = encodable(msgspec.to_builtins(record))
    return msgspec.json.format(msgspec.json.encode(plain), indent=2) + b"\n"


def write_files(record: ReplayRecord, folder: Path) -> tuple[Path, Path]:
    """Raises ConfigError for one that cannot be written."""
    return (
        write_whole(folder / JSON_NAME, encode_json(record)),
        write_whole(folder / PAGE_NAME, render_page(record).encode()),
    )


def print_report(record: ReplayRecord, console: Console) -> None:
    title = (
        f"{record.workload}: {record.requests:,} requests, {record.distinct_blocks:,} distinct blocks of "
        f"{record.block_tokens} tokens; {record.accelerators} x {record.profile}"
    )
    table = Table(title=harmless(title), title_justify="left")
    table.add_column("store", overflow="fold", min_width=28)
    for name in ("hits", "of DRAM", "loaded", "TTFT p50", "p90", "p99", "read, peak", "written"):
        table.add_column(name, justify="right")
    for each in record.outcomes:
        table.add_row(
            harmless(each.variant.name),
            f"{each.hit_share:.1%}",
            f"{each.dram_blocks / max(1, each.wanted_blocks):.1%}",
            f"{each.loaded_share:.1%}",
            seconds_text(each.ttft_p50_s),
            seconds_text(each.ttft_p90_s),
            seconds_text(each.ttft_p99_s),
            f"{bytes_text(each.read_peak_bytes_per_s)}/s",
            bytes_text(each.written_bytes),
        )
    console.print(table)
    console.print(
        "Hits: of the full blocks asked for, those that are stored when a request is planned; loaded: of all prompt "
        "tokens, those that were not computed. Without decode. " + record.fleet_text,
        soft_wrap=True,
    )
