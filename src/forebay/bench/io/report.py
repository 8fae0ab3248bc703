"""A record as text for a terminal, and as files: JSON, a plot, the device's curve."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from forebay.bench.evidence import Validity
from forebay.bench.io.options import Direction, Load
from forebay.bench.io.plot import draw
from forebay.bench.io.results import TIER, Comparison, Record, block_text, curve_of
from forebay.bench.units import NOTHING, bytes_text, encodable, harmless, seconds_text

_INVALID_EXIT = 3


def exit_code(record: Record) -> int:
    return 0 if record.verdict.validity is Validity.VALID else _INVALID_EXIT


def encode_json(value: msgspec.Struct) -> bytes:
    plain = encodable(msgspec.to_builtins(value, enc_hook=str))
    return msgspec.json.format(msgspec.json.encode(plain), indent=2) + b"\n"


def write_files(record: Record) -> tuple[Path, ...]:
    """Into the directory and the export file of the options; returns what was written."""
    out, export = record.options.out, record.options.export
    contents = {out / "bench-io.json": encode_json(record), out / "bench-io.svg": draw(record).encode()}
    if export is not None:
        contents[export] = encode_json(curve_of(record))
    for path, content in contents.items():
        path.write_bytes(content)
    return tuple(contents)


def print_report(record: Record, console: Console) -> None:
    for direction in record.options.directions:
        chosen = [each for each in record.comparisons if each.cell.direction is direction]
        console.print(_rates(record, direction, chosen))
        console.print(_costs(record, direction, chosen))
    for line in notes(record):
        console.print(Text(harmless(line)))


def notes(record: Record) -> list[str]:
    """What has to be known to read the figures: who took part, and whether it was cold."""
    verdict = record.verdict
    lines = [
        f"{record.options.rounds} rounds; every pass moves {bytes_text(record.options.pass_bytes)} or more; medians",
        f"the tier: {', '.join(sorted(set(record.access)))} I/O, checksums on",
        f"reads by {record.reads_by}; writes by {record.writes_by}",
        f"a checksum of memory alone takes {record.checksum_core_s_per_gb:.3f} core-s/GB here; the controls have none",
        f"controls: plain threads, {record.fio}; huge-page buffers",
        "the threads use the tier's slots; fio has as many buffers as blocks in flight, which caches may hold",
    ]
    if Direction.READS in record.options.directions:
        wanted_bytes, read = record.evidence.wanted_bytes, record.evidence.read
        lines.append(
            f"reads: {bytes_text(wanted_bytes)} wanted, this process read {bytes_text(read.process_bytes)} "
            f"from disk, the device read {bytes_text(read.device_bytes)}"
        )
    if record.written:
        shares = ", ".join(f"{share:.0%} of what {who} wrote" for who, share in record.written.items())
        lines.append(f"writes: when they were said to be done, the device had written {shares}")
    lines.append(f"meanwhile, others used {record.others_cores:.2f} of the machine's {record.environment.cpus} cores")
    if record.environment.virtual_machine:
        lines.append("a virtual machine: caches beneath its disk cannot be seen from here")
    lines.append(verdict.validity.value.upper())
    return lines + [f"  because {reason}" for reason in verdict.reasons]


def _rates(record: Record, direction: Direction, comparisons: Sequence[Comparison]) -> Table:
    by_who = {(each.cell, each.contestant, each.load): each for each in record.summaries}
    is_busy = Load.BUSY in record.options.loads
    heads = ("block", "in\nflight", TIER, "best\ncontrol", "which is", "ratio", "to\nthreads")
    table = _table(f"{direction.value}, GB/s", (*heads, *(("busy/\nidle", "threads'") if is_busy else ())))
    for each in comparisons:
        best = by_who[each.cell, each.best_control, Load.IDLE]
        table.add_row(
            *_cell(each),
            f"{each.gb_per_s:.2f}",
            f"{best.gb_per_s:.2f}",
            best.contestant,
            f"{each.to_best_control:.2f}",
            f"{each.to_threads:.2f}",
            *((_share(each.busy_to_idle), _share(each.threads_busy_to_idle)) if is_busy else ()),
        )
    return table


def _costs(record: Record, direction: Direction, comparisons: Sequence[Comparison]) -> Table:
    by_who = {(each.cell, each.contestant, each.load): each for each in record.summaries}
    heads = ("block", "in\nflight", "core-s/GB", "best\ncontrol's", "p50", "p99", "best\ncontrol's p50", "p99")
    table = _table(f"{direction.value}, processor time and latency of a block", heads)
    for each in comparisons:
        tier, best = (by_who[each.cell, who, Load.IDLE] for who in (TIER, each.best_control))
        table.add_row(
            *_cell(each),
            *(f"{who.core_s_per_gb:.3f}" for who in (tier, best)),
            *(seconds_text(took_s) for who in (tier, best) for took_s in (who.p50_s, who.p99_s)),
        )
    return table


def _table(title: str, heads: Sequence[str]) -> Table:
    """Narrow enough for a terminal of 80 columns."""
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=0, collapse_padding=True
    )
    for head in heads:
        table.add_column(head, justify="left" if head == "which is" else "right", no_wrap=True)
    return table


def _cell(comparison: Comparison) -> tuple[str, str]:
    return block_text(comparison.cell.block_bytes), str(comparison.cell.depth)


def _share(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}"
