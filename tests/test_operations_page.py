"""docs/operations.md, and what docs/vllm.md says of warnings, follow the source."""

from __future__ import annotations

import ast
import inspect
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import click
import pytest

import forebay
from forebay.cli import cli
from forebay.cli.pool import pool
from forebay.tiers.file import scrub
from forebay.tiers.file.format import Damage
from forebay.tiers.file.health import RootState

SOURCE = Path(forebay.__file__).parent
DOCS = SOURCE.parents[1] / "docs"
PAGE, VLLM_PAGE = DOCS / "operations.md", DOCS / "vllm.md"
OF_VLLM = SOURCE / "connectors" / "vllm"
PLACEHOLDER = re.compile(r"%[-#0-9.]*[a-z]")
NOT_CONSTANT = "?"


def calls(path: Path) -> Iterator[tuple[str, ast.Call]]:
    """Every call in a module, with the text of what is called."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def texts(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """The constants among them."""
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value:
            yield node.value


def messages(path: Path) -> Iterator[str]:
    """What a module can log as a warning or worse, with `...` for what is filled in; what is no constant as `?`."""
    for name, call in calls(path):
        on, _, called = name.rpartition(".")
        is_log = "log" in on.lower()
        if is_log and called in ("warning", "error", "exception", "critical"):
            message = call.args[0]
        elif (is_log and called == "log") or called == "_say_once":
            message = call.args[1]
        else:
            continue
        yield PLACEHOLDER.sub("...", next(texts([message]), NOT_CONSTANT))


def all_messages() -> dict[Path, list[str]]:
    return {path: list(messages(path)) for path in SOURCE.rglob("*.py")}


def section(page: Path, title: str) -> str:
    return page.read_text().partition(f"## {title}\n")[2].partition("\n## ")[0]


def rows(page: Path, title: str) -> list[list[str]]:
    """The cells of the rows that begin with something in backticks."""
    lines = [line for line in section(page, title).splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def warnings(page: Path) -> list[str]:
    return [row[0].strip("`") for row in rows(page, "What warnings mean")]


def code(text: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", text))


# --- messages ----------------------------------------------------------------------------------


def test_every_warning_has_a_row() -> None:
    logged = all_messages()
    found = Counter(message for of_module in logged.values() for message in of_module)
    assert len(found) > 80
    assert found.pop(NOT_CONSTANT) == 1, "only `_say_once` is given its message"
    of_vllm = {message for path, those in logged.items() if path.is_relative_to(OF_VLLM) for message in those}
    elsewhere = {message for path, those in logged.items() if not path.is_relative_to(OF_VLLM) for message in those}
    on_page, on_vllm_page = set(warnings(PAGE)), set(warnings(VLLM_PAGE))
    assert sorted(elsewhere - on_page - {NOT_CONSTANT}) == [], "add rows to 'What warnings mean' in docs/operations.md"
    assert sorted(of_vllm - on_page - on_vllm_page) == [], "add rows to 'What warnings mean' in docs/vllm.md"


@pytest.mark.parametrize("page", [PAGE, VLLM_PAGE], ids=lambda page: page.name)
def test_every_row_is_in_the_source(page: Path) -> None:
    logged = {message for those in all_messages().values() for message in those}
    assert sorted(set(warnings(page)) - logged) == [], "nothing logs these any more"


def test_every_row_says_what_it_means_and_what_to_do() -> None:
    found = [*rows(PAGE, "What warnings mean"), *rows(VLLM_PAGE, "What warnings mean")]
    assert all(len(row) == 3 and all(row) for row in found)
    assert [message for message, times in Counter(row[0] for row in found).items() if times > 1] == []


# --- events of roots ---------------------------------------------------------------------------


def event_kinds() -> set[str]:
    """What the file tier counts by a name of its own: given to `count`, found by a scrub, or a reason of damage."""
    kinds = {damage.value for damage in Damage}
    for path in (SOURCE / "tiers" / "file").rglob("*.py"):
        for name, call in calls(path):
            if name.endswith(".count") or (name == "partial" and ast.unparse(call.args[0]).endswith(".count")):
                kinds.update(texts(call.args))
    for node in ast.walk(ast.parse(inspect.getsource(scrub._kind))):
        if isinstance(node, ast.Return):
            kinds.update(texts(ast.walk(node)))
    return kinds


def test_every_kind_of_event_has_a_row() -> None:
    listed = {kind for row in rows(PAGE, "When a root fails") for kind in code(row[0])}
    errors = {kind for kind in listed if re.fullmatch("E[A-Z]+", kind)}
    assert errors
    assert listed - errors == event_kinds()


def test_every_state_of_a_root_is_named() -> None:
    assert {state.value for state in RootState} <= code(section(PAGE, "When a root fails"))


# --- commands ----------------------------------------------------------------------------------


def options_of(command: click.Command) -> dict[str, click.Option]:
    """By the long name. Without those that every command has."""
    options = {max(param.opts, key=len): param for param in command.params if isinstance(param, click.Option)}
    return {name: option for name, option in options.items() if name != "--help"}


def test_the_table_of_commands_has_all_of_them_with_all_their_options() -> None:
    listed = {row[0].strip("`"): row for row in rows(PAGE, "Looking, checking, emptying")}
    assert set(listed) == set(pool.commands)
    for name, command in pool.commands.items():
        options, cell = options_of(command), listed[name][2]
        assert options.pop("--json").is_flag, "'All take --json'"
        assert {words.split()[0] for words in code(cell)} == set(options), name
        for option in options.values():
            if isinstance(option.default, str):
                assert f"({option.default})" in cell, name
            if not option.is_flag:
                assert f"{option.opts[0]} {option.make_metavar(click.Context(command))}`" in cell, name


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_every_command_line_on_a_page_is_one(page: Path) -> None:
    text = page.read_text()
    for line in [*re.findall(r"`(forebay [^`\n]+)`", text), *re.findall(r"(?m)^(forebay .+)$", text)]:
        command: click.Command = cli
        for word in line.partition("#")[0].split()[1:]:
            if isinstance(command, click.Group) and word in command.commands:
                command = command.commands[word]
            elif word.startswith("-"):
                assert word in {name for param in command.params for name in (*param.opts, "--help")}, line
            else:
                assert word.isupper() or not isinstance(command, click.Group), line


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_no_page_has_a_section_twice(page: Path) -> None:
    outside_code = re.sub(r"(?ms)^```.*?^```", "", page.read_text())
    titles = Counter(re.findall(r"(?m)^#+ .+$", outside_code))
    assert [title for title, times in titles.items() if times > 1] == []
