"""A run of gates as text for a terminal and as JSON."""

from __future__ import annotations

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from forebay.bench.gates.verdicts import Check, GateResult, GatesRecord, Outcome
from forebay.bench.units import NOTHING, bytes_text, encodable, harmless, seconds_text

_STYLES = {Outcome.PASS: "green", Outcome.FAIL: "bold red", Outcome.INVALID: "bold yellow"}
_EXIT_CODES = {Outcome.PASS: 0, Outcome.FAIL: 1, Outcome.INVALID: 3}


def encode_json(record: GatesRecord) -> bytes:
    return msgspec.json.format(msgspec.json.encode(encodable(msgspec.to_builtins(record))), indent=2) + b"\n"


def exit_code(record: GatesRecord) -> int:
    """0 PASS, 1 FAIL, 3 INVALID."""
    return _EXIT_CODES[record.outcome]


def print_report(record: GatesRecord, console: Console) -> None:
    for result in record.results:
        console.print(_head(result), soft_wrap=True)
        if result.checks:
            console.print(_table(result))
    console.print(Text(f"{harmless(record.title)}: ").append(record.outcome.name, _STYLES[record.outcome]))


def _head(result: GateResult) -> Text:
    head = Text(f"{result.gate}: ", "bold").append(result.outcome.name, _STYLES[result.outcome])
    for words in (result.stopped_early, *result.reasons):
        if words:
            head.append(f"\n  {harmless(words)}", "not bold")
    return head


def _table(result: GateResult) -> Table:
    table = Table()
    for name in ("check", "measured", "limit", ""):
        table.add_column(name, justify="right" if name in ("measured", "limit") else "left", overflow="fold")
    for check in result.checks:
        said = Text(check.outcome.name, _STYLES[check.outcome])
        if check.why:
            said.append(f"  {harmless(check.why)}", "default not bold")
        table.add_row(
            check.name, quantity_text(check.measured, check.unit), f"{check.bound.value} {_limit_text(check)}", said
        )
    return table


def _limit_text(check: Check) -> str:
    return quantity_text(check.limit, check.unit)


def quantity_text(quantity: float | None, unit: str) -> str:
    """With its unit, such as `1.50 GB/s`, `-25.0 %`, `12 ms`."""
    if quantity is None:
        return NOTHING
    match unit:
        case "s":
            return seconds_text(quantity)
        case "bytes":
            return bytes_text(quantity)
        case "bytes/s":
            return f"{bytes_text(quantity)}/s"
        case "ratio":
            return f"{quantity * 100:.1f} %"
        case "count":
            return f"{quantity:,.0f}"
        case _:
            return f"{quantity:,.{0 if float(quantity).is_integer() else 2}f} {unit}"
