"""What all pages and pictures share: a document without script or network, foreign text escaped, the end of an axis.

Pages are well-formed XML as well as HTML, so that a test can parse them strictly.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable

from forebay.bench.units import harmless

STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 60rem; padding: 1.5rem 1rem 3rem; background: #fff; color: #1d2730;
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.55rem; line-height: 1.25; margin: .25rem 0 1rem; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; border-bottom: 1px solid #d5dce2; padding-bottom: .25rem; }
p { margin: .5rem 0; }
.over { color: #55636f; margin: 0; font-size: .9rem; }
.verdict { border-left: .4rem solid; border-radius: .2rem; padding: .6rem .9rem; margin: 1rem 0; }
.valid { border-color: #3b8f5a; background: #eef7f1; }
.invalid { border-color: #b3261e; background: #fdeeec; }
.verdict ul { margin: .3rem 0 0; padding-left: 1.2rem; }
svg { display: block; width: 100%; overflow: visible; }
svg text { font-size: 14px; fill: #1d2730; }
svg .strong { font-weight: 600; }
svg .tick { font-size: 12px; fill: #55636f; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; overflow-wrap: normal; }
th, td { padding: .35rem .5rem; border-bottom: 1px solid #e3e8ec; vertical-align: top; }
th { text-align: left; font-weight: 600; }
.figures td, .figures thead th { text-align: right; font-variant-numeric: tabular-nums; }
.figures thead th:first-child { text-align: left; }
.facts th { width: 11rem; font-weight: 400; color: #55636f; }
.facts td { overflow-wrap: anywhere; }
@media (max-width: 34rem) {
  body { font-size: 15px; } h1 { font-size: 1.3rem; }
  table { font-size: .82rem; } th, td { padding: .3rem .3rem; } .facts th { width: 7.5rem; }
}
"""
"""What pages have in common; a page adds its own below."""


def escaped(value: object) -> str:
    """Anything, as text that neither a browser nor an XML parser takes for more than that."""
    return html.escape(harmless(str(value)), quote=True)


def document(title: str, style: str, body: Iterable[str], *, language: str = "en") -> str:
    """A whole page. `title` is escaped here; `style` and `body` are markup."""
    return "\n".join(
        (
            "<!DOCTYPE html>",
            f'<html lang="{language}">',
            "<head>",
            '<meta charset="utf-8" />',
            '<meta name="viewport" content="width=device-width, initial-scale=1" />',
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\" />",
            f"<title>{escaped(title)}</title>",
            f"<style>{style}</style>",
            "</head>",
            "<body>",
            *body,
            "</body>",
            "</html>",
            "",
        )
    )


def items(lines: Iterable[str]) -> str:
    """Texts as the items of a list."""
    return "".join(f"<li>{escaped(line)}</li>" for line in lines)


def axis_end(largest: float) -> float:
    """The smallest of 1, 1.2, 1.6, 2, 2.4, 3, 4, 6, 8, 10 times a power of ten that is not below `largest`."""
    power = 10.0 ** max(-300, math.floor(math.log10(largest))) if largest > 0 else 1.0
    steps = (1.0, 1.2, 1.6, 2.0, 2.4, 3.0, 4.0, 6.0, 8.0, 10.0)
    return next(step * power for step in steps if step * power >= largest * (1 - 1e-12))
