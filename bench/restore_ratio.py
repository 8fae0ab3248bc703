"""Does the time to the first token follow the medium's bandwidth? An emulated accelerator at the published geometry.

    python bench/restore_ratio.py [--root DIR] [--rate 800MB/s] [--factor 1.5] [--rounds 3] [--out DIR] [--json]

Published storms of 16 sessions (Qwen3-Coder-480B on 8 GPUs, 30,208 stored tokens a session, blocks of 8,126,464 bytes)
restore from two media of which one gives 1.5 times as much. Here both are one disk, throttled to --rate and to
--factor times that, which both have to be below what the disk gives; recomputing is timed by the same machine's
profile. Block size, sessions, tokens and their order are the published ones. To fit a small disk, a token has --blocks
of 944 parts of its KV bytes, and compute is faster by --time-scale, so that restoring takes about the same share of
recomputing as it does there.

What is looked at: TTFT p50 of the candidate over that of the baseline, against the inverse ratio of the rates. Exit
code 1 when they differ by more than --tolerance, 3 when the measurement is not valid.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from forebay.assemble import Named
from forebay.bench.calibration.published import Quantity, published
from forebay.bench.restore import report
from forebay.bench.restore.options import GroupOptions, RestoreOptions
from forebay.bench.restore.results import RestoreRecord, Role
from forebay.bench.restore.run import run_restore, steps
from forebay.bench.units import parse_rate
from forebay.cli.progress import show_progress
from forebay.errors import ConfigError

PROFILE, TOKENS, QUESTION_TOKENS, OUTPUT_TOKENS = "qwen3-coder-480b-fp8/8xmi308x", 30_208, 64, 64
BLOCK_BYTES, BLOCKS = 8_126_464, 944
"""Of a published session: 944 files of this size."""


@dataclass(frozen=True)
class Ratio:
    """Candidate over baseline."""

    figure: str
    measured: float
    predicted: float

    @property
    def deviation(self) -> float:
        return self.measured / self.predicted - 1


def options_of(given: argparse.Namespace) -> RestoreOptions:
    emulated = {
        "profile": PROFILE,
        "block_tokens": TOKENS // given.blocks,
        "kv_scale": given.blocks / BLOCKS,
        "time_scale": given.time_scale,
        "host_bytes": given.host_bytes,
    }
    fast = f"{parse_rate(given.rate) * given.factor / 1e6:.0f}MB/s"
    stored = {"roots": (given.root,), "options": emulated}
    groups = (
        GroupOptions(name="recompute", role=Role.RECOMPUTE, options=emulated),
        GroupOptions(name="baseline", role=Role.BASELINE, limit=given.rate, **stored),
        GroupOptions(name="candidate", role=Role.CANDIDATE, limit=fast, **stored),
    )
    workload = {
        "sessions": given.sessions,
        "prefix_tokens": TOKENS // given.blocks * given.blocks,
        "question_tokens": QUESTION_TOKENS,
        "output_tokens": OUTPUT_TOKENS,
    }
    return RestoreOptions(
        title=f"{given.sessions} sessions at the published geometry, media {given.factor:g} to 1",
        group=groups if given.recompute else groups[1:],
        workload=Named(kind="cold", options=workload),
        concurrency=(given.sessions,),
        rounds=given.rounds,
    )


def ratios_of(record: RestoreRecord, factor: float) -> list[Ratio]:
    cells = {cell.role: cell for cell in record.cells}
    slow, fast = cells[Role.BASELINE], cells[Role.CANDIDATE]
    found = []
    for name in ("ttft_p50_s", "ttft_mean_s", "ttft_p99_s"):
        one, other = getattr(fast, name), getattr(slow, name)
        if one is not None and other is not None:
            found.append(Ratio(name, one.value / other.value, 1 / factor))
    return found


def published_ratios() -> list[str]:
    """The same cells of the reports: what bandwidth does to TTFT there."""
    rows = {(row.medium, row.sessions): row.measured for row in published() if row.report == "R2"}
    lines = []
    for sessions in (8, 16, 32):
        slow, fast = rows["local_nvme", sessions], rows["fx100", sessions]
        of = {quantity: fast[quantity] / slow[quantity] for quantity in slow}
        lines.append(
            f"published, {sessions} sessions: TTFT p50 is {of[Quantity.TTFT_P50]:.3f} of the baseline's, predicted by "
            f"peak bandwidths {1 / of[Quantity.READ_PEAK]:.3f}, by busy means {1 / of[Quantity.READ_BUSY]:.3f}"
        )
    return lines


def print_ratios(ratios: list[Ratio], console: Console) -> None:
    table = Table(title="Candidate over baseline", title_justify="left")
    for name in ("", "measured", "predicted by the rates", "off by"):
        table.add_column(name, justify="right" if name else "left")
    for each in ratios:
        table.add_row(each.figure, f"{each.measured:.3f}", f"{each.predicted:.3f}", f"{each.deviation:+.1%}")
    console.print(table)
    for line in published_ratios():
        console.print(line)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(), help="a directory on the disk [.]")
    parser.add_argument("--rate", default="800MB/s", help="of the baseline medium [800MB/s]")
    parser.add_argument("--factor", type=float, default=1.5, help="of the candidate's rate to that [1.5]")
    parser.add_argument("--sessions", type=int, default=16)
    parser.add_argument(
        "--blocks", type=int, default=16, help="of each session, where the published ones have 944 [16]"
    )
    parser.add_argument("--time-scale", type=float, default=0.1, help="of compute [0.1]")
    parser.add_argument("--host-bytes", type=int, default=2**30)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tolerance", type=float, default=0.10)
    parser.add_argument("--no-recompute", dest="recompute", action="store_false", help="only the two media")
    parser.add_argument("--out", type=Path, default=Path(), help="for restore.json, requests.jsonl, restore.svg [.]")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(arguments)


def main() -> int:
    given = parse(sys.argv[1:])
    try:
        options = options_of(given)
        with show_progress(steps(options)) as progress:
            record = run_restore(options, command=("bench/restore_ratio.py", *sys.argv[1:]), progress=progress)
        report.write_files(record, given.out)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    ratios = ratios_of(record, given.factor)
    if given.json:
        plain = {"ratios": [asdict(each) for each in ratios], "record": json.loads(report.encode_json(record))}
        print(json.dumps(plain, indent=2))
    else:
        report.print_record(record, Console())
        print_ratios(ratios, Console())
    if report.exit_code(record):
        return report.exit_code(record)
    is_close = bool(ratios) and abs(ratios[0].deviation) <= given.tolerance
    return 0 if is_close else 1


if __name__ == "__main__":
    sys.exit(main())
