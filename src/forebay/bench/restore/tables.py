"""Requests as a table of columns, for those who look at them with dataframes: Parquet, where pyarrow is installed."""

from __future__ import annotations

import importlib
import importlib.util
import typing
from collections.abc import Iterable
from typing import Any

import msgspec

from forebay.bench.restore.results import RequestRecord
from forebay.bench.units import encodable

_ARROW_TYPES = {int: "int64", float: "float64", str: "string"}
_DERIVED = ("end_to_end_s", "tpot_s")
"""Not in a record, since they follow from it."""


def request_row(request: RequestRecord) -> dict[str, Any]:
    """A request with what follows from it, as plain values."""
    row: dict[str, Any] = encodable(msgspec.to_builtins(request))
    return row | {name: getattr(request, name) for name in _DERIVED}


def encode_parquet(requests: Iterable[RequestRecord]) -> bytes | None:
    """One row a request, of columns with fixed types; None where pyarrow is not installed."""
    if importlib.util.find_spec("pyarrow") is None:
        return None
    arrow = importlib.import_module("pyarrow")
    parquet = importlib.import_module("pyarrow.parquet")
    columns = {name: _ARROW_TYPES[_plain(kind)] for name, kind in typing.get_type_hints(RequestRecord).items()}
    columns |= dict.fromkeys(_DERIVED, "float64")
    schema = arrow.schema([(name, getattr(arrow, kind)()) for name, kind in columns.items()])
    table = arrow.Table.from_pylist([request_row(each) for each in requests], schema=schema)
    sink = arrow.BufferOutputStream()
    parquet.write_table(table, sink)
    encoded: bytes = sink.getvalue().to_pybytes()
    return encoded


def _plain(kind: Any) -> type:
    """`int` of `int | None`."""
    found: type = next(part for part in (*typing.get_args(kind), kind) if part in _ARROW_TYPES)
    return found
