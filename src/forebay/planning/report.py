"""A plan as tables for a terminal, as JSON, and as one HTML page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from forebay.bench.files import write_whole
from forebay.bench.markup import document, escaped, items
from forebay.bench.units import NOTHING, bytes_text, encodable, harmless, seconds_text
from forebay.planning.picture import render_picture
from forebay.planning.results import Cell, Plan
from forebay.sim.sizing import units_text

JSON_NAME, PAGE_NAME = "plan.json", "plan.html"
_STYLE = """
body { margin: 0 auto; max-width: 62rem; padding: 1.5rem 1rem 3rem; color: #1d2730; background: #fff;
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.advice { border-left: .4rem solid #3b8f5a; background: #eef7f1; padding: .6rem .9rem; }
.scroll { overflow-x: auto; } svg { max-width: 100%; height: auto; }
table { border-collapse: collapse; font-size: .92rem; overflow-wrap: normal; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid #e3e8ec; text-align: right; }
td { font-variant-numeric: tabular-nums; }
th:first-child, td:first-child { text-align: left; }
.source { color: #55636f; font-size: .9rem; }
"""


@dataclass(frozen=True, slots=True)
class Grid:
    """A table, before it is known where it is shown."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def encode_json(plan: Plan) -> bytes:
    return msgspec.json.format(msgspec.json.encode(encodable(msgspec.to_builtins(plan))), indent=2) + b"\n"


def write_files(plan: Plan, folder: Path) -> tuple[Path, Path]:
    """plan.json and plan.html. Raises ConfigError for one that cannot be written."""
    return (
        write_whole(folder / JSON_NAME, encode_json(plan)),
        write_whole(folder / PAGE_NAME, render_page(plan).encode()),
    )


def print_plan(plan: Plan, console: Console) -> None:
    console.print(Text(f"\n{harmless(plan.name)}\n", style="bold"))
    for grid in grids(plan):
        table = Table(title=harmless(grid.title), title_justify="left")
        for number, column in enumerate(grid.columns):
            table.add_column(Text(harmless(column)), justify="right" if number else "left")
        for row in grid.rows:
            table.add_row(*(Text(harmless(cell)) for cell in row))
        console.print(table)
    console.print(Text(how_close(plan)), soft_wrap=True)
    for finding in plan.findings:
        console.print(Text.assemble((f"\n{finding.rule}: ", "bold"), harmless(finding.text)), soft_wrap=True)
        console.print(Text(f"  {finding.source}", style="dim"), soft_wrap=True)
    console.print(Text(f"\nTake {harmless(plan.recommended)}", style="bold green"))
    for reason in plan.reasons:
        console.print(Text(f"  {harmless(reason)}"), soft_wrap=True)


def how_close(plan: Plan) -> str:
    """How far the simulation is from the measurements that were given."""
    known = [cell for cell in plan.cells if cell.measured_p50_s is not None]
    if not known:
        return "No measurement was given: every time here is simulated."
    off = [abs(cell.ttft_p50_s / cell.best_p50_s - 1) for cell in known]
    speed = [abs(cell.throughput_tok_s / cell.best_throughput_tok_s - 1) for cell in known]
    return (
        f"Against the {len(known)} measured cells the simulation is off by {sum(off) / len(off):.0%} on average and "
        f"{max(off):.0%} at most in TTFT p50, and by {max(speed):.0%} at most in throughput. Gains are those "
        "of the measurements where there are any; saturation and the best point are shown of both."
    )


def grids(plan: Plan) -> tuple[Grid, ...]:
    made = (_volume(plan), _demand(plan), _cells(plan), _edges(plan), _steady(plan), _hits(plan), _economy(plan))
    return tuple(grid for grid in made if grid.rows)


def _volume(plan: Plan) -> Grid:
    volume = plan.volume
    rows = (
        (f"a token of {volume.model}, {volume.kv_format}", units_text(volume.token_bytes)),
        ("a session, over all ranks", units_text(volume.session_bytes)),
        ("  of it, in the rank that has most", units_text(volume.session_rank_bytes)),
        ("  read to restore it", units_text(volume.restored_bytes)),
        ("all sessions", units_text(volume.total_bytes)),
    )
    return Grid("KV", ("of", "size"), rows)


def _demand(plan: Plan) -> Grid:
    demand = plan.demand
    mean = demand.mean_read_bytes_per_s
    rows = (
        ("bandwidth, mean", NOTHING if mean is None else f"{mean / 1e9:.2f} GB/s"),
        (f"bandwidth, storm of {demand.peak_sessions}", f"{demand.peak_read_bytes_per_s / 1e9:.2f} GB/s"),
        ("DRAM in flight, whole sessions held", units_text(demand.held_staging_bytes)),
        ("  of it, in the rank that has most", units_text(demand.held_staging_rank_bytes)),
        ("DRAM in flight, blocks streamed", units_text(demand.streamed_staging_bytes)),
        ("  of it, in the rank that has most", units_text(demand.streamed_staging_rank_bytes)),
        ("DRAM of this plan", NOTHING if demand.dram_bytes is None else units_text(demand.dram_bytes)),
        ("  of it, for each rank", NOTHING if demand.dram_rank_bytes is None else units_text(demand.dram_rank_bytes)),
    )
    return Grid("What it asks for", ("of", "needs"), rows)


def _cells(plan: Plan) -> Grid:
    columns = (
        "medium", "sessions", "TTFT p50", "measured", "p99", "in order: p50", "mean", "tok/s", "measured", "busy",
        f"gain over {plan.baseline}",
    )  # fmt: skip
    rows = [_cell_row(plan, cell) for cell in plan.cells]
    for each in plan.recompute:
        computed = (seconds_text(each.ttft_p50_s), NOTHING, f"p90 {seconds_text(each.ttft_p90_s)}", NOTHING, NOTHING)
        speed = (f"{each.throughput_tok_s:.1f}", NOTHING, NOTHING, NOTHING)
        rows.append(("recompute", str(each.concurrency), *computed, *speed))
    return Grid("Storms: all sessions restored at once", columns, tuple(rows))


def _cell_row(plan: Plan, cell: Cell) -> tuple[str, ...]:
    gain = plan.gain(cell.candidate, cell.concurrency)
    measured = "" if gain.measured is None else " measured"
    speed = cell.measured_throughput_tok_s
    return (
        cell.candidate,
        str(cell.concurrency),
        seconds_text(cell.ttft_p50_s),
        seconds_text(cell.measured_p50_s),
        seconds_text(cell.ttft_p99_s),
        seconds_text(cell.ordered_p50_s),
        seconds_text(cell.ordered_mean_s),
        f"{cell.throughput_tok_s:.1f}",
        NOTHING if speed is None else f"{speed:.1f}",
        f"{cell.best_busy_share:.0%}",
        NOTHING if cell.candidate == plan.baseline else f"{gain.best:+.0%}{measured}",
    )


def _edges(plan: Plan) -> Grid:
    rows = []
    for name, full in plan.saturation.items():
        rows += [
            (f"{name}: saturated at", *map(_sessions_text, (full, plan.measured_saturation[name]))),
            (
                f"{name}: best point",
                *map(_sessions_text, (plan.best_concurrency[name], plan.measured_best_concurrency[name])),
            ),
        ]
    for concurrency, tokens in plan.tie_context_tokens.items():
        rows.append((f"tie at {concurrency} sessions", f"up to {tokens:,} tokens of context", NOTHING))
    return Grid("Where it turns", ("point", "simulated", "measured"), tuple(rows))


def _sessions_text(sessions: int | None) -> str:
    return NOTHING if sessions is None else f"{sessions} sessions"


def _steady(plan: Plan) -> Grid:
    rows = tuple(
        (each.candidate, f"{each.load_share:.0%}", seconds_text(each.restore_p50_s), seconds_text(each.restore_p99_s))
        for each in plan.steady
    )
    return Grid("At the mean rate, in order", ("medium", "load", "restore p50", "p99"), rows)


def _hits(plan: Plan) -> Grid:
    rows = tuple(
        (units_text(each.capacity_bytes), f"{each.token_hit_rate:.1%}", f"{each.written_share:.1%}")
        for each in plan.hit_rates
    )
    return Grid(f"Hit rate by capacity ({plan.hit_rate_basis})", ("capacity", "tokens hit", "tokens written"), rows)


def _economy(plan: Plan) -> Grid:
    wear = {each.candidate: each for each in plan.wear}
    costs = {each.candidate: each for each in plan.costs}
    rows = []
    for name in dict.fromkeys((*wear, *costs)):
        worn, cost = wear.get(name), costs.get(name)
        rows.append(
            (
                name,
                bytes_text(worn.written_bytes_per_day if worn else None),
                NOTHING if worn is None or worn.years is None else f"{worn.years:.1f}",
                NOTHING if cost is None else f"{cost.per_year:,.0f} {plan.currency}",
                _money(cost.per_million_tokens if cost else None, plan.currency),
                _money(cost.with_fleet_per_million_tokens if cost else None, plan.currency),
            )
        )
    columns = ("medium", "written a day", "years to rated wear", "cost a year", "a million tokens", "with the fleet")
    return Grid("Wear and cost", columns, tuple(rows))


def _money(amount: float | None, currency: str) -> str:
    return NOTHING if amount is None else f"{amount:.3f} {currency}"


def render_page(plan: Plan) -> str:
    """The whole page: well-formed XML as well as HTML, no script, nothing from elsewhere."""
    findings = "".join(
        f"<p><strong>{escaped(each.rule)}.</strong> {escaped(each.text)}<br />"
        f'<span class="source">{escaped(each.source)}</span></p>'
        for each in plan.findings
    )
    body = (
        f"<h1>{escaped(plan.name)}</h1>",
        f'<div class="advice"><strong>Take {escaped(plan.recommended)}</strong><ul>{items(plan.reasons)}</ul></div>',
        f'<div class="scroll">{render_picture(plan)}</div>',
        f"<p>{escaped(how_close(plan))}</p>",
        *(_grid(grid) for grid in grids(plan)),
        "<h2>Rules that apply</h2>",
        findings,
        f'<p class="source">{escaped(plan.source)} Model: {escaped(plan.volume.model_source)}. Forebay '
        f"{escaped(plan.version)}.</p>",
    )
    return document(plan.name, _STYLE, body)


def _grid(grid: Grid) -> str:
    head = "".join(f'<th scope="col">{escaped(column)}</th>' for column in grid.columns)
    body = "".join("<tr>" + "".join(f"<td>{escaped(cell)}</td>" for cell in row) + "</tr>" for row in grid.rows)
    return (
        f'<h2>{escaped(grid.title)}</h2><div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}'
        "</tbody></table></div>"
    )
