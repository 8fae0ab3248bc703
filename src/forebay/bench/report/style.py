"""The look of the report: on a screen of any width, and on A4 paper."""

from forebay.bench.markup import STYLE
from forebay.bench.report.texts import Language

_HIDING = "".join(
    f'#{shown.value}:checked ~ main:not([lang="{shown.value}"]) {{ display: none; }}\n' for shown in Language
)

REPORT_STYLE = (
    STYLE
    + _HIDING
    + """
body { max-width: 66rem; }
main:lang(zh-Hans) { font-family: system-ui, "PingFang SC", "Microsoft YaHei", "Noto Sans CJK SC",
  "Source Han Sans SC", "WenQuanYi Micro Hei", sans-serif; }
.choice { margin: 0 .25rem 0 0; }
.choice + label { margin-right: 1rem; cursor: pointer; }
.choice:focus-visible + label { outline: 2px solid #1f6f8b; outline-offset: 2px; }
main { margin-top: 1rem; }
h3 { font-size: 1rem; margin: 1.4rem 0 .4rem; }
h4 { font-size: .95rem; margin: 1rem 0 .3rem; }
nav ul { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; list-style: none; margin: 0; padding: 0; }
nav { font-size: .92rem; }
a { color: #14566e; }
.verdict p { margin: 0; } .verdict .word { font-size: 1.3rem; font-weight: 700; margin-right: .5rem; }
.pass, .valid { border-color: #3b8f5a; background: #eef7f1; }
.fail { border-color: #b3261e; background: #fdeeec; }
.invalid { border-color: #a87412; background: #fdf6e7; }
.badge { display: inline-block; border: 1px solid; border-radius: .2rem; padding: 0 .4rem; font-size: .85em;
  font-weight: 700; white-space: nowrap; }
.headline p { font-size: 1.12rem; }
.headline p.small, .small { font-size: .9rem; color: #44515c; }
.interval { display: block; color: #55636f; font-size: .85em; white-space: nowrap; }
.figures td, .figures th { overflow-wrap: normal; }
.figures td { white-space: nowrap; }
.left td { text-align: left; white-space: normal; overflow-wrap: anywhere; }
.left td.number, .left th.number { text-align: right; white-space: nowrap; overflow-wrap: normal; }
.figures th { word-break: keep-all; }
.wraps { white-space: normal; } .whole { white-space: nowrap; }
.verdict div { margin-top: .6rem; }
.why { color: #44515c; font-size: .92em; overflow-wrap: anywhere; }
code, pre { font: .88em/1.5 ui-monospace, "DejaVu Sans Mono", Consolas, monospace; }
code { overflow-wrap: anywhere; }
pre { background: #f5f7f9; padding: .7rem .9rem; white-space: pre-wrap; overflow-wrap: anywhere; margin: .4rem 0; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; margin: .6rem 0 0; padding: 0; list-style: none; }
.legend svg { display: inline-block; width: 34px; height: 12px; margin-right: .4rem; vertical-align: middle; }
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); gap: 1rem 1.5rem; }
figure { margin: .6rem 0; min-width: 0; }
figure svg { max-width: 36rem; height: auto; }
figcaption { font-size: .88rem; color: #44515c; } figcaption strong { color: #1d2730; }
figure svg text { font-size: 12.5px; } figure svg .tick { font-size: 12px; }
dl { margin: .4rem 0; } dt { font-weight: 600; } dd { margin: 0 0 .5rem; }
@media (max-width: 34rem) { .interval { white-space: normal; } .headline p { font-size: 1.05rem; } }
@page { size: A4; margin: 14mm 12mm; }
@media print {
  html { font-size: 9.5pt; }
  body { max-width: none; padding: 0; font-size: 1rem; }
  .choice, .choice + label, nav { display: none; }
  main { margin: 0; }
  .scroll { overflow: visible; }
  table { font-size: 8.5pt; }
  h2, h3, h4 { break-after: avoid; }
  figure, tr, .verdict, dd, li { break-inside: avoid; }
  .panels { grid-template-columns: 1fr 1fr; }
  .verdict, .badge, pre, svg * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  a { color: inherit; text-decoration: none; }
}
"""
)
