"""The table of messages in docs/operations.md follows the source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import forebay

SOURCE = Path(forebay.__file__).parent
PAGE = SOURCE.parents[1] / "docs" / "operations.md"
PLACEHOLDER = re.compile(r"%[-#0-9.]*[a-z]")


def messages(path: Path) -> Iterator[str]:
    """What a module can log as a warning or worse, with `...` for what is filled in; what is no constant as `?`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        called, on = node.func.attr, node.func.value
        of_log = isinstance(on, ast.Name) and on.id == "log"
        if of_log and called in ("warning", "error", "exception"):
            message = node.args[0]
        elif (of_log and called == "log") or called == "_say_once":
            message = node.args[1]
        else:
            continue
        if isinstance(message, ast.Constant) and isinstance(message.value, str):
            yield PLACEHOLDER.sub("...", message.value)
        else:
            yield "?"


def rows() -> list[list[str]]:
    section = PAGE.read_text().partition("## What warnings mean")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_every_warning_of_the_file_tier_has_a_row() -> None:
    named = {row[0].strip("`") for row in rows()}
    logged = [message for path in (SOURCE / "tiers" / "file").rglob("*.py") for message in messages(path)]
    assert len(logged) > 20
    assert logged.count("?") == 1, "only `_say_once` is given its message"
    assert sorted({*logged} - named - {"?"}) == [], "add a row to 'What warnings mean' in docs/operations.md for these"


def test_every_row_is_in_the_source() -> None:
    logged = {message for path in SOURCE.rglob("*.py") for message in messages(path)}
    assert sorted({row[0].strip("`") for row in rows()} - logged) == [], "nothing logs these any more"


def test_every_row_says_what_it_means_and_what_to_do() -> None:
    found = rows()
    assert all(len(row) == 3 and all(row) for row in found)
    assert len({row[0] for row in found}) == len(found)
