"""The report: the same figures everywhere, well-formed, self-contained, and safe whatever a model says."""

import io
import re
import stat
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from record_kit import record
from rich.console import Console

from forebay.bench.demo.page import render_page
from forebay.bench.demo.report import FIGURES, encode_json, exit_code, print_report, write_files
from forebay.bench.demo.results import SCHEMA, Record
from forebay.bench.evidence import Validity
from forebay.bench.markup import axis_end
from forebay.bench.units import harmless
from forebay.errors import ConfigError

HOSTILE = (
    "</blockquote><script>alert(1)</script><img src=x onerror='a' alt=\"b\">&amp;\x1b[31m\x00\u202eevil [bold]x[/nope]"
)


def parsed(page: str) -> ElementTree.Element:
    return ElementTree.fromstring(page)


def printed(found: Record, width: int = 100) -> str:
    text = io.StringIO()
    print_report(found, Console(file=text, width=width))
    return text.getvalue()


def test_the_page_is_well_formed_and_stands_alone() -> None:
    root = parsed(render_page(record()))
    tags = {element.tag for element in root.iter()}
    assert not tags & {"script", "link", "img", "iframe", "object", "form", "a", "image", "use"}
    attributes = {name for element in root.iter() for name in element.attrib}
    assert not attributes & {"src", "href", "srcset", "data", "action", "style"}
    assert not {name for name in attributes if name.startswith("on")}
    page = render_page(record())
    assert not re.search(r"https?:|//\w|url\(|@import", page)


def test_hostile_text_stays_text_everywhere() -> None:
    found = record(answer=HOSTILE, reasons=(HOSTILE,))
    found = msgspec.structs.replace(found, notes=(HOSTILE,), command=("forebay", HOSTILE), options={"pool": HOSTILE})
    page = render_page(found)
    root = parsed(page)
    assert "script" not in {element.tag for element in root.iter()}
    assert "<script" not in page
    shown = "".join(root.itertext())
    assert shown.count("<script>alert(1)</script>") >= 4
    for text in (page, printed(found)):
        assert not set(text) & {"\x1b", "\x00", "\u202e"}


@pytest.mark.parametrize("name", [HOSTILE, "[bold]x", "slash[/red]", "x[link=file:///etc/passwd]y"])
def test_a_models_name_is_text_in_the_table_and_unchanged_in_json(name: str) -> None:
    found = record()
    found = msgspec.structs.replace(found, model=msgspec.structs.replace(found.model, name=name))
    text = printed(found, width=200)
    assert "".join(harmless(name).split()) in "".join(text.split())  # however the table wraps it
    assert not set(text) & {"\x1b", "\x00", "\u202e"}
    assert msgspec.json.decode(encode_json(found), type=Record).model.name == name


def test_what_is_no_text_becomes_escapes_in_json() -> None:
    found = record()
    medium = msgspec.structs.replace(found.evidence.medium, source="/dev/\udcff")
    found = msgspec.structs.replace(found, evidence=msgspec.structs.replace(found.evidence, medium=medium))
    assert msgspec.json.decode(encode_json(found), type=Record).evidence.medium.source == "/dev/\\udcff"
    assert parsed(render_page(found)) is not None


@given(st.text())
def test_any_answer_leaves_the_page_well_formed(answer: str) -> None:
    root = parsed(render_page(record(answer=answer)))
    quotes = ["".join(quote.itertext()) for quote in root.iter("blockquote")]
    assert quotes == [harmless(answer).replace("\r", "") or "(nothing)"] * 2
    assert harmless(harmless(answer)) == harmless(answer)


def test_the_plot_is_described_and_shows_every_session() -> None:
    root = parsed(render_page(record()))
    plot = next(root.iter("svg"))
    assert plot.attrib["role"] == "img"
    named = {element.attrib.get("id"): element for element in plot}
    for name in plot.attrib["aria-labelledby"].split():
        assert named[name].text
    assert "p50 0.750 s" in (named["plot-desc"].text or "")
    assert len(list(plot.iter("circle"))) == 6
    assert len(list(plot.iter("rect"))) == 3
    widths = [float(bar.attrib["width"].rstrip("%")) for bar in plot.iter("rect")]
    assert widths == [75.0, 3.75, 1.88]


@pytest.mark.parametrize(("largest", "end"), [(20.0, 20.0), (14.2, 16.0), (0.31, 0.4), (1.0, 1.0), (9.1, 10.0)])
def test_the_axis_ends_at_a_round_number(largest: float, end: float) -> None:
    assert axis_end(largest) == pytest.approx(end)


def test_json_text_and_page_show_the_same_figures() -> None:
    found = record()
    decoded = msgspec.json.decode(encode_json(found), type=Record)
    assert decoded == found
    assert decoded.schema == SCHEMA
    text, page = printed(found, width=200), "".join(parsed(render_page(found)).itertext())
    for figure in FIGURES:
        for summary in decoded.summaries:
            assert figure.show(summary) in text
            assert figure.show(summary) in page


def test_an_invalid_run_says_so_everywhere() -> None:
    found = record(reasons=("the pool is on tmpfs",))
    assert found.verdict.validity is Validity.INVALID
    page = "".join(parsed(render_page(found)).itertext())
    for text in (printed(found), page, encode_json(found).decode()):
        assert "INVALID" in text
        assert "the pool is on tmpfs" in text
    assert exit_code(found) == 3


def test_exit_codes() -> None:
    assert exit_code(record()) == 0
    assert exit_code(record(tokens_equal=False)) == 1
    assert exit_code(record(tokens_equal=False, reasons=("x",))) == 1


def test_files_are_written_whole_and_readable(tmp_path: Path) -> None:
    found = record()
    (tmp_path / "new").mkdir()
    (tmp_path / "new/demo.json").write_text("old")
    files = write_files(found, render_page(found), tmp_path / "new")
    assert [path.name for path in files] == ["demo.json", "demo.html"]
    assert msgspec.json.decode(files[0].read_bytes(), type=Record) == found
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["demo.html", "demo.json"]
    assert stat.S_IMODE(files[1].stat().st_mode) & stat.S_IRUSR


def test_a_place_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="name another --out"):
        write_files(record(), "", tmp_path / "file/below")
