"""A validation as tables for a terminal, and as files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from forebay.bench.calibration.hypotheses import Aside, Tested
from forebay.bench.calibration.plot import render_plot
from forebay.bench.calibration.published import Quantity
from forebay.bench.calibration.validate import MEDIAN_ERROR, MOST_ERROR, Cell, Validation
from forebay.bench.files import write_whole

JSON_NAME, PLOT_NAME = "sim-validation.json", "sim-validation.svg"
_LABELS = {
    Quantity.TTFT_P50: "TTFT p50, s",
    Quantity.TTFT_P90: "TTFT p90, s",
    Quantity.TTFT_P99: "TTFT p99, s",
    Quantity.TTFT_MEAN: "TTFT mean, s",
    Quantity.TPOT_P50: "TPOT p50, ms",
    Quantity.THROUGHPUT: "tokens/s",
    Quantity.READ_PEAK: "read peak, 1.024 GB/s",
    Quantity.READ_BUSY: "read while busy, 1.024 GB/s",
}


class Report(msgspec.Struct, frozen=True, kw_only=True):
    validation: Validation
    hypotheses: tuple[Tested, ...] = ()
    asides: tuple[Aside, ...] = ()


def encode_json(report: Report) -> bytes:
    """With each cell's error, which is derived."""
    plain: Any = msgspec.to_builtins(report)
    for cell, encoded in zip(report.validation.cells, plain["validation"]["cells"], strict=True):
        encoded["error"] = cell.error
    return msgspec.json.format(msgspec.json.encode(plain), indent=2) + b"\n"


def write_files(report: Report, folder: Path) -> tuple[Path, Path]:
    """Raises ConfigError for one that cannot be written."""
    return (
        write_whole(folder / JSON_NAME, encode_json(report)),
        write_whole(folder / PLOT_NAME, render_plot(report.validation).encode()),
    )


def print_report(report: Report, console: Console) -> None:
    validation = report.validation
    console.print(_cells(validation.cells))
    console.print(_parameters(validation))
    if report.hypotheses:
        console.print(_hypotheses(report.hypotheses))
    for aside in report.asides:
        console.print(f"{aside.name}: {aside.published} {aside.unit} published, {aside.simulated:.1f} simulated")
    verdict = "GOAL MET" if validation.is_met else "GOAL MISSED"
    console.print(
        f"[bold {'green' if validation.is_met else 'red'}]{verdict}[/]: TTFT p50 and throughput are off by at most "
        f"{validation.worst_headline_error:.1%} (goal {MOST_ERROR:.0%}), {validation.median_headline_error:.1%} in the "
        f"median (goal {MEDIAN_ERROR:.0%}).",
        soft_wrap=True,
    )


def _cells(cells: Sequence[Cell]) -> Table:
    table = Table(title="Published measurements on an 8-GPU machine with a 480B model", title_justify="left")
    for name in ("", "", "measured", "simulated", "error", "is"):
        table.add_column(name, justify="right" if name in ("measured", "simulated", "error") else "left")
    row = ""
    for cell in cells:
        if cell.row != row and row:
            table.add_section()
        table.add_row(
            cell.row if cell.row != row else "",
            f"[bold]{_LABELS[cell.quantity]}[/]" if cell.is_headline else _LABELS[cell.quantity],
            f"{cell.measured:.2f}",
            f"{cell.simulated:.2f}",
            f"{cell.error:+.1%}",
            cell.role.value,
        )
        row = cell.row
    return table


def _parameters(validation: Validation) -> Table:
    table = Table(title="Fitted parameters", title_justify="left")
    for name in ("", "value", "unit", "is", "fitted on"):
        table.add_column(name)
    for each in validation.parameters:
        table.add_row(each.name, f"{each.value:.4g}", each.unit, each.meaning, each.fitted_on)
    return table


def _hypotheses(tested: Sequence[Tested]) -> Table:
    table = Table(title="If something else were so", title_justify="left")
    for name in ("", "largest error", "median", "of"):
        table.add_column(name)
    for each in tested:
        table.add_row(
            each.name,
            f"{each.worst_headline_error:.1%}",
            f"{each.median_headline_error:.1%}",
            f"{each.worst_row}, {_LABELS[each.worst_quantity]}",
        )
    return table
