"""A recorded trace: Mooncake-style JSON lines, or the Azure LLM inference traces as CSV. Nothing in it is trusted.

JSON lines: `timestamp` in ms, `input_length` and `output_length` in tokens, and `hash_ids`, one for each block of
`block_tokens` tokens of the prompt, equal for equal prefixes (R. Qin et al., "Mooncake: trading more storage for less
computation", FAST 2025). CSV: TIMESTAMP, ContextTokens, GeneratedTokens (P. Patel et al., "Splitwise", ISCA 2024); it
says nothing of what prompts share, so no two of its requests share a block.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated, TextIO

import msgspec

from forebay.errors import ConfigError
from forebay.workloads.arrival import Arrival, Workload

_MOST_TOKENS = 2**31
_MOST_TIME_MS = 2**40
_MOST_LINE_CHARACTERS = 64 * 2**20
_CSV_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    path: str
    block_tokens: int = 512
    """Tokens a hash id stands for; 512 in the Mooncake traces."""
    most_requests: int | None = None
    """Read no more than these. None: all."""


Count = Annotated[int, msgspec.Meta(ge=0, le=_MOST_TOKENS)]


class _Line(msgspec.Struct):
    timestamp: float
    input_length: Count
    output_length: Count
    hash_ids: list[Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]]


def build(options: Options) -> Workload:
    """Raises ConfigError with the file and the line for the first thing that is not as it should be."""
    path = Path(options.path)
    if options.block_tokens < 1:
        raise ConfigError(f"block_tokens must be 1 or more, not {options.block_tokens}")
    if options.most_requests is not None and options.most_requests < 1:
        raise ConfigError(f"most_requests must be 1 or more, not {options.most_requests}")
    reader = _from_csv if path.suffix.lower() == ".csv" else _from_json_lines
    arrivals: list[Arrival] = []
    try:
        with path.open(newline="", encoding="utf-8") as file:
            for arrival in reader(path, file, options.block_tokens):
                arrivals.append(arrival)
                if len(arrivals) == options.most_requests:
                    break
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path, or what is not UTF-8
        raise ConfigError(f"cannot read the trace {path}: {getattr(error, 'strerror', None) or error}") from None
    if not arrivals:
        raise ConfigError(f"{path} has no requests: give a trace of JSON lines, or an Azure trace as .csv")
    arrivals.sort(key=lambda arrival: arrival.at_ns)
    return Workload(path.name, options.block_tokens, tuple(arrivals))


def _lines(path: Path, file: TextIO) -> Iterator[tuple[int, str]]:
    number = 0
    while line := file.readline(_MOST_LINE_CHARACTERS):
        number += 1
        if len(line) == _MOST_LINE_CHARACTERS:
            raise ConfigError(f"{path}, line {number}: longer than {_MOST_LINE_CHARACTERS} characters: is it a trace?")
        yield number, line


def _from_json_lines(path: Path, file: TextIO, block_tokens: int) -> Iterator[Arrival]:
    decoder = msgspec.json.Decoder(_Line)
    parents: dict[int, int] = {}
    for number, text in _lines(path, file):
        if not text.strip():
            continue
        try:
            line = decoder.decode(text)
            yield _arrival(line, block_tokens, parents)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise ConfigError(f"{path}, line {number}: {error}") from None


def _arrival(line: _Line, block_tokens: int, parents: dict[int, int]) -> Arrival:
    """Raises ValueError for what cannot be a request."""
    if not (math.isfinite(line.timestamp) and 0 <= line.timestamp <= _MOST_TIME_MS):
        raise ValueError(f"timestamp must be from 0 to {_MOST_TIME_MS} ms, not {line.timestamp}")
    blocks = -(-line.input_length // block_tokens)
    if len(line.hash_ids) != blocks:
        raise ValueError(
            f"{line.input_length} tokens are {blocks} blocks of {block_tokens}, and there are {len(line.hash_ids)} "
            "hash_ids: give the trace's own block_tokens"
        )
    parent = -1
    for block in line.hash_ids:
        if parents.setdefault(block, parent) != parent:
            raise ValueError(f"hash id {block} follows another block than before, so it is not the id of a prefix")
        parent = block
    at_ns = int(line.timestamp * 1e6)
    return Arrival(at_ns, None, tuple(line.hash_ids), line.input_length, line.output_length)


def _from_csv(path: Path, file: TextIO, block_tokens: int) -> Iterator[Arrival]:
    rows = csv.reader(text for _, text in _lines(path, file))
    first_at: datetime | None = None
    used_ids = 0
    try:
        if tuple(next(rows, [])) != _CSV_COLUMNS:
            raise ValueError(f"the columns must be {', '.join(_CSV_COLUMNS)}")
        for row in rows:
            if len(row) != len(_CSV_COLUMNS):
                raise ValueError(f"{len(row)} fields instead of {len(_CSV_COLUMNS)}")
            at, prompt_tokens, output_tokens = datetime.fromisoformat(row[0]), _count(row[1]), _count(row[2])
            first_at = first_at or at
            since_ns = round((at - first_at).total_seconds() * 1e9)
            if since_ns < 0:
                raise ValueError("earlier than the first request")
            blocks = -(-prompt_tokens // block_tokens)
            yield Arrival(since_ns, None, tuple(range(used_ids, used_ids + blocks)), prompt_tokens, output_tokens)
            used_ids += blocks
    except (csv.Error, ValueError, TypeError) as error:  # TypeError: times with and without a zone
        raise ConfigError(f"{path}, line {max(rows.line_num, 1)}: {error}") from None


def _count(text: str) -> int:
    count = int(text) if text.isascii() and text.isdigit() and len(text) <= 12 else -1
    if not 0 <= count <= _MOST_TOKENS // 2**7:  # 16 Mi tokens: such a row makes as many ids as it has blocks
        raise ValueError(f"{text[:40]!r} is not a number of tokens")
    return count
