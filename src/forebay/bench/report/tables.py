"""Tables and lists of the report. What goes in is markup: escape before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    head: str
    cells: tuple[str, ...]


def table(heads: Sequence[str], rows: Iterable[Row], kind: str = "figures") -> str:
    """With a head above and one at the left; wider than the page, it scrolls by itself."""
    above = "".join(f'<th scope="col">{head}</th>' for head in heads)
    body = "".join(
        f'<tr><th scope="row">{row.head}</th>{"".join(f"<td>{cell}</td>" for cell in row.cells)}</tr>' for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0"><table class="{kind}"><thead><tr>{above}</tr></thead><tbody>{body}</tbody>'
        "</table></div>"
    )


def facts(rows: Iterable[Row]) -> str:
    """Names and what they are, without a head above."""
    body = "".join(f'<tr><th scope="row">{row.head}</th><td>{"".join(row.cells)}</td></tr>' for row in rows)
    return f'<table class="facts"><tbody>{body}</tbody></table>'
