"""The report as a browser shows it, at the width of a phone and of a desk, in both languages, and on paper."""

import base64
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser_kit import NAMES, Browser, browser, chromium
from report_kit import gates_record, restore_record

from forebay.bench.gates.stability.options import FaultKind
from forebay.bench.gates.verdicts import Bound, check
from forebay.bench.report.history import History, Interval
from forebay.bench.report.page import Records, render_report
from forebay.bench.report.texts import Language

PROGRAM = chromium()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason=f"no Chromium here: none of {', '.join(NAMES)} is in PATH")

LONG = "a-very-long-name-without-a-single-blank-" * 6
HISTORY = History(
    gate="g4",
    intervals=tuple(Interval(600.0 * (n + 1), 0.01, 0.02 + n / 1e4, 10**9 + n, 2 * 10**12) for n in range(400)),
    strikes_s=tuple(1800.0 * (n + 1) for n in range(130)),
    strikes={FaultKind.KILL: 65, FaultKind.LOST: 65},
)
LOOK = """
(() => {
  const shown = [...document.querySelectorAll("main")].filter(each => each.getClientRects().length);
  const main = shown[0], wide = window.innerWidth;
  const box = each => each.getBoundingClientRect();
  const figures = [...main.querySelectorAll("figure")].map(figure => {
    const svg = figure.querySelector("svg");
    const named = svg.getAttribute("aria-labelledby").split(" ").map(id => document.getElementById(id).textContent);
    const texts = [...svg.querySelectorAll("text")];
    return {
      named, caption: figure.querySelector("figcaption").innerText, width: box(svg).width, height: box(svg).height,
      right: box(svg).right, texts: texts.length,
      outside: texts.filter(each => box(each).left < box(svg).left - 3 || box(each).right > box(svg).right + 3
        || box(each).bottom > box(svg).bottom + 3).map(each => each.textContent),
      smallest: Math.min(...texts.map(each => box(each).height)),
    };
  });
  const scrolls = each => each.closest(".scroll") !== null;
  return {
    languages: shown.map(each => each.lang), wide, scroll: document.documentElement.scrollWidth, figures,
    images: main.querySelectorAll('svg[role="img"]').length, heading: main.querySelector("h1").innerText,
    beyond: [...main.querySelectorAll("*")].filter(each => !scrolls(each) && box(each).width > 0
      && box(each).right > wide + 1).map(each => each.outerHTML.slice(0, 120)),
    links: [...main.querySelectorAll("a")].map(each => [each.getAttribute("href"),
      document.getElementById(each.getAttribute("href").slice(1)) !== null
      && main.contains(document.getElementById(each.getAttribute("href").slice(1)))]),
    choices: [...document.querySelectorAll("input")].map(each => each.labels[0].innerText),
  };
})()
"""


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    assert PROGRAM is not None
    with browser(PROGRAM, tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With everything in it that a report can hold, and with names that do not break."""
    failed = check(f"unheard_of_{LONG}@8", 3.0, Bound.AT_MOST, 2.0, "count")
    invalid = check("ttft_p50_change@16", None, Bound.AT_MOST, -0.25, "ratio", invalid=LONG)
    records = Records(
        gates=gates_record(failed, invalid, title=f"Acceptance {LONG}", stopped_early="p99 has left its bound"),
        restores=(
            restore_record(),
            restore_record(3, concurrencies=(2,), rounds=1, reasons=(LONG,), title=LONG),
        ),
        histories=(HISTORY,),
    )
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(render_report(records))
    return path


def messages(found: Browser) -> list[object]:
    """All that the page made the browser say."""
    said = ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")
    return [each for each in found.events if each["method"] in said]


@pytest.mark.parametrize("width", [390, 1280])
def test_both_languages_fit_and_every_figure_has_its_text(opened: Browser, page: Path, width: int) -> None:
    opened.show(page, width)
    for language in Language:
        opened.evaluate(f"document.getElementById('{language.value}').click()")
        look = opened.evaluate(LOOK)
        assert look["languages"] == [language.value]
        assert look["wide"] == width
        assert look["scroll"] <= width
        assert look["beyond"] == []
        assert look["choices"] == ["English", "中文"]
        assert look["heading"].startswith("Acceptance")
        assert len(look["links"]) == 10
        assert all(leads for _, leads in look["links"])
        assert look["images"] == len(look["figures"]) == 17
        for figure in look["figures"]:
            assert all(len(text) > 10 for text in figure["named"]), figure
            assert len(figure["caption"]) > 40
            assert figure["width"] >= 300
            assert figure["right"] <= width
            assert figure["texts"] >= 6
            assert figure["outside"] == []
            assert figure["smallest"] >= 9  # pixels
    requests = [each for each in opened.events if each["method"] == "Network.requestWillBeSent"]
    assert [each["params"]["request"]["url"] for each in requests] == [page.as_uri()]
    assert messages(opened) == []


def test_what_the_browser_says_would_be_seen(opened: Browser, tmp_path: Path) -> None:
    """The test above can fail: a script in the page is refused aloud."""
    text = render_report(Records(restores=(restore_record(concurrencies=(2,), rounds=1),)))
    (tmp_path / "bad.html").write_text(text.replace("</main>", "</main><script>alert(1)</script>", 1))
    opened.show(tmp_path / "bad.html", 1280)
    assert "Content Security Policy" in str(messages(opened))


def test_it_prints_on_a4_in_the_chosen_language(opened: Browser, page: Path) -> None:
    opened.show(page, 1280)
    opened.evaluate("document.getElementById('zh-Hans').click()")
    printed = base64.b64decode(opened.call("Page.printToPDF", preferCSSPageSize=True)["data"])
    boxes = re.findall(rb"/MediaBox \[0 0 ([\d.]+) ([\d.]+)\]", printed)
    assert 4 <= len(boxes) <= 30
    assert {(round(float(across)), round(float(down))) for across, down in boxes} == {(595, 842)}
    opened.call("Emulation.setEmulatedMedia", media="print")
    try:
        hidden = "[...document.querySelectorAll('input, label, nav')].every(each => !each.getClientRects().length)"
        assert opened.evaluate(hidden)
    finally:
        opened.call("Emulation.setEmulatedMedia", media="")
