"""How commands print: sizes with their unit, foreign text made harmless, JSON for machines."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console

from forebay.bench.units import encodable, harmless

_FILE_COLUMNS = 120
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def tables() -> Console:
    """Standard output for tables: as wide as the terminal, or as a file or pipe may well be."""
    return Console() if sys.stdout.isatty() or "COLUMNS" in os.environ else Console(width=_FILE_COLUMNS)


def gib(quantity_bytes: float) -> str:
    """Bytes in the largest binary unit that keeps the number above 1, such as `1.50 GiB`."""
    value, unit = float(quantity_bytes), 0
    while abs(value) >= 1024 and unit < len(_BINARY) - 1:
        value, unit = value / 1024, unit + 1
    return f"{int(value)} B" if unit == 0 else f"{value:.2f} {_BINARY[unit]}"


def one_line(text: str) -> str:
    """Any text on one line, with its blanks run together."""
    return foreign(" ".join(text.split()))


def foreign(text: str) -> str:
    """Text that others wrote (names, paths), as part of a line: blanks stay, and what is not text becomes escapes."""
    valid: str = encodable(text)
    return harmless(valid).replace("\n", "\ufffd")


def print_json(value: Any) -> None:
    """One JSON document on standard output; paths as text, enums by value, what is no text in a path as escapes."""
    plain = encodable(msgspec.to_builtins(value, enc_hook=_encode))
    click.echo(msgspec.json.format(msgspec.json.encode(plain), indent=2).decode())


def _encode(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"no JSON form for {type(value).__name__}")
