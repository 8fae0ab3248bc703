"""The tables of the catalogue in docs/format.md follow the source."""

from __future__ import annotations

from pathlib import Path

import forebay
from forebay.tiers.file.records import CATALOGUE_VERSION, RECORD_BYTES, Limit, Operation, empty

PAGE = Path(forebay.__file__).parents[2] / "docs" / "format.md"
SECTION = PAGE.read_text().partition("\n## Catalogue\n")[2].partition("\n## ")[0]


def table(heading: str) -> list[list[str]]:
    """Cells of the rows below the table's heading and its rule."""
    lines = SECTION[SECTION.index(heading) :].splitlines()[2:]
    rows = lines[: next((i for i, line in enumerate(lines) if not line.startswith("|")), len(lines))]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_every_operation_has_its_row() -> None:
    assert [(int(number), name) for number, name, _ in table("| operation | name |")] == [
        (operation.value, operation.name) for operation in Operation
    ]


def test_the_fields_lie_where_the_page_says() -> None:
    rows = [(int(offset), int(length)) for offset, length, _ in table("| offset | bytes |")]
    fields = empty(1).dtype.fields
    assert fields is not None
    lies = [(offset, kind.itemsize) for kind, offset, *_ in fields.values()]
    assert rows == [(0, 1), (1, 3), *lies[1:]], "the namespace is above the operation in one field"
    assert lies[0] == (0, 4)
    assert [offset for offset, _ in rows] == [0, *(offset + length for offset, length in rows)][:-1], "without a gap"
    assert sum(length for _, length in rows) == RECORD_BYTES
    assert f"records of {RECORD_BYTES} bytes" in SECTION


def test_the_constants_that_the_page_names() -> None:
    start, limit = table("| operation | name |")[0][2], table("| operation | name |")[-1][2]
    assert f"version, {CATALOGUE_VERSION};" in start
    numbers = {Limit.CAPACITY_BYTES: "capacity in bytes", Limit.BUDGET_BYTES_PER_DAY: "write budget in bytes a day",
               Limit.ENDURANCE_BYTES: "rated endurance in bytes"}  # fmt: skip
    assert set(numbers) == set(Limit)
    assert all(f"{number.value} {words}" in limit for number, words in numbers.items())
