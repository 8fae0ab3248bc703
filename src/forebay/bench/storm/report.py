"""A storm as text, JSON and files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from forebay.bench.evidence import Evidence, Validity
from forebay.bench.files import write_whole
from forebay.bench.storm.options import JSON_NAME, PLOT_NAME
from forebay.bench.storm.plot import render_plot
from forebay.bench.storm.results import LABELS, Comparison, Record, Storm, Summary
from forebay.bench.storm.simulate import Implied
from forebay.bench.units import NOTHING, bytes_text, encodable, harmless, rate_text, seconds_text

_NAMES = ("mean", "p50", "p99", "bandwidth", "short, mean", "long, mean")


def encode_json(value: Any) -> bytes:
    return msgspec.json.format(msgspec.json.encode(encodable(msgspec.to_builtins(value))), indent=2) + b"\n"


def write_files(value: Any, storms: Sequence[Storm], folder: Path) -> tuple[Path, Path]:
    """storm.json and storm.svg. Raises ConfigError for one that cannot be written."""
    plot = render_plot(storms, "Restored sessions over time")
    return write_whole(folder / JSON_NAME, encode_json(value)), write_whole(folder / PLOT_NAME, plot.encode())


def print_record(record: Record, console: Console) -> None:
    for storm in record.storms:
        console.print(_table(storm))
        console.print(_goals(storm))
    is_valid = record.verdict.validity is Validity.VALID
    text = Text(f"\n{record.verdict.validity.name}", style="bold green" if is_valid else "bold red")
    for reason in record.verdict.reasons:
        text.append(f"\n  because {harmless(reason)}", style="red")
    for evidence in record.evidence:
        text.append(f"\n{harmless(evidence_text(evidence))}", style="default not bold")
    if record.environment.virtual_machine:
        text.append(
            "\nThis is a virtual machine: the host beneath may have caches of its own.", style="default not bold"
        )
    console.print(text)


def evidence_text(evidence: Evidence) -> str:
    place = evidence.medium.device or "no block device"
    return (
        f"Cold restores wanted {bytes_text(evidence.wanted_bytes)} of {evidence.medium.path}; at the block layer this "
        f"process read {bytes_text(evidence.read.process_bytes)} and the device ({place}) "
        f"{bytes_text(evidence.read.device_bytes)}."
    )


def _table(storm: Storm) -> Table:
    whole = sum(storm.blocks)
    lengths = f"{min(storm.blocks)} to {max(storm.blocks)}" if len(set(storm.blocks)) > 1 else f"{storm.blocks[0]}"
    table = Table(
        title=f"{storm.sessions} sessions of {lengths} blocks, {whole:,} in all", title_justify="left"
    )  # fmt: skip
    table.add_column("")
    is_mixed = storm.summaries[0].short_mean_s is not None
    names = _NAMES if is_mixed else _NAMES[:4]
    for name in names:
        table.add_column(name if name == "bandwidth" else f"TTFT {name}", justify="right")
    for summary in storm.summaries:
        table.add_row(LABELS[summary.order], *_cells(summary)[: len(names)])
    table.add_row("in order / fair", *_ratios(storm.comparison)[: len(names)], style="bold")
    return table


def _cells(summary: Summary) -> tuple[str, ...]:
    return (
        seconds_text(summary.mean_s),
        seconds_text(summary.p50_s),
        seconds_text(summary.p99_s),
        rate_text(summary.bytes_per_s / 1e9),
        seconds_text(summary.short_mean_s),
        seconds_text(summary.long_mean_s),
    )


def _ratios(found: Comparison) -> tuple[str, ...]:
    ratios = (found.mean, found.p50, found.p99, found.bytes_per_s, found.short_mean, found.long_mean)
    return tuple(change_text(ratio) for ratio in ratios)


def change_text(ratio: float | None) -> str:
    """`-46.2 %`."""
    return NOTHING if ratio is None else f"{(ratio - 1) * 100:+.1f} %"


def _goals(storm: Storm) -> Text:
    if not storm.missed:
        return Text("every goal met\n", style="green")
    return Text("missed: " + "; ".join(storm.missed) + "\n", style="red")


def print_implied(cells: Iterable[Implied], console: Console) -> None:
    """The published storms, and what the same device would do in order."""
    table = Table(title="Published restore storms (R2, TP8) and the same in virtual time", title_justify="left")
    for name in (
        "medium", "sessions", "published p50 = p90", "simulated, fair: p50", "in order: mean", "p50", "p99",
        "bandwidth", "implied mean", "implied p50",
    ):  # fmt: skip
        table.add_column(name, justify="left" if name == "medium" else "right")
    for cell in cells:
        ordered, shared = cell.storm.summaries
        table.add_row(
            cell.medium, str(cell.sessions), seconds_text(cell.published_p50_s), seconds_text(shared.p50_s),
            seconds_text(ordered.mean_s), seconds_text(ordered.p50_s), change_text(cell.storm.comparison.p99),
            change_text(cell.storm.comparison.bytes_per_s), seconds_text(cell.implied_mean_s),
            seconds_text(cell.implied_p50_s),
        )  # fmt: skip
    console.print(table)
    console.print("p99 and bandwidth: in order against fair sharing. Implied: the published figure times the ratio.")


def exit_code(record: Record) -> int:
    """0; 1 when a goal was missed; 3 when the measurement is not valid."""
    if record.verdict.validity is Validity.INVALID:
        return 3
    return 1 if any(storm.missed for storm in record.storms) else 0
