"""`forebay sim replay`: a trace through the engine under virtual time, on stores to compare."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from forebay.bench.replay import report
from forebay.bench.replay.options import ReplayOptions, parse_sizes
from forebay.bench.replay.run import run_replays, steps
from forebay.choice import LoadOrCompute
from forebay.cli.output import foreign, tables
from forebay.cli.progress import show_progress, terminable
from forebay.errors import ConfigError
from forebay.fairness import Order

_DEFAULTS = ReplayOptions()


class Sizes(click.ParamType[tuple[int, ...]]):
    """`64GB,256GB`."""

    name = "sizes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        try:
            return value if isinstance(value, tuple) else parse_sizes(value)
        except ConfigError as error:
            self.fail(str(error), param, ctx)


@click.command("replay")
@click.argument("trace", required=False, type=click.Path(path_type=Path))
@click.option("--trace-block-tokens", type=int, default=_DEFAULTS.trace_block_tokens, show_default=True)
@click.option(
    "--workload", default=_DEFAULTS.workload, show_default=True, help="A seeded one, where no TRACE is given."
)
@click.option("--seed", type=int, default=_DEFAULTS.seed, show_default=True, help="Of the seeded workload.")
@click.option("--requests", type=int, help="No more than these of the trace.")
@click.option(
    "--profile", default=_DEFAULTS.profile, show_default=True, help="Of an instance: a name, or a .toml file."
)
@click.option("--accelerators", type=int, default=_DEFAULTS.accelerators, show_default=True, help="Instances.")
@click.option("--pace", type=float, default=_DEFAULTS.pace, show_default=True, help="Times as fast as recorded.")
@click.option("--dram", "dram_bytes", type=Sizes(), default=_DEFAULTS.dram_bytes, metavar="SIZE[,SIZE]", help="[256GB]")
@click.option("--disk", "disk_bytes", type=Sizes(), default=_DEFAULTS.disk_bytes, metavar="SIZE[,SIZE]", help="[8TB]")
@click.option(
    "--medium", "media", multiple=True, help="Such as 4*nvme-gen4@100gbe, or a curve.json of 'forebay bench io'. "
    f"[{_DEFAULTS.media[0]}]",
)  # fmt: skip
@click.option("--policy", "evictions", multiple=True, help=f"Eviction. [{_DEFAULTS.evictions[0]}]")
@click.option("--admission", "admissions", multiple=True, help=f"[{_DEFAULTS.admissions[0]}]")
@click.option(
    "--order", type=click.Choice([each.value for each in Order]), default=_DEFAULTS.order.value, show_default=True
)
@click.option(
    "--load-or-compute", type=click.Choice([each.value for each in LoadOrCompute]),
    default=_DEFAULTS.load_or_compute.value, show_default=True,
)  # fmt: skip
@click.option("--bin", "bin_s", type=float, default=_DEFAULTS.bin_s, show_default=True, help="Seconds a point.")
@click.option("--processes", type=int, default=_DEFAULTS.processes, show_default=True, help="At work side by side.")
@click.option("--json", "as_json", is_flag=True, help="The result as JSON on standard output, and nothing else there.")
@click.option(
    "--out", type=click.Path(path_type=Path), default=_DEFAULTS.out, help="For sim-replay.json and sim-replay.html. [.]"
)
def sim_replay(as_json: bool, order: str, load_or_compute: str, **given: Any) -> int:
    """Hit rates, times to first token and bandwidths of a TRACE, for all combinations of the stores given.

    TRACE has JSON lines as the Mooncake traces (hash_ids), or is an Azure trace as .csv. Everything that can be given
    more than once, and lists of sizes, make variants: each is replayed by itself.

    Exit code: 0; 2 for a bad option, path or trace.
    """
    for name in ("media", "evictions", "admissions"):
        given[name] = given[name] or getattr(_DEFAULTS, name)
    options = ReplayOptions(order=Order(order), load_or_compute=LoadOrCompute(load_or_compute), **given)
    with terminable(), show_progress(steps(options)) as progress:
        record = run_replays(options, command=("forebay", *sys.argv[1:]), progress=progress)
    if as_json:
        click.echo(report.encode_json(record), nl=False)
    else:
        report.print_report(record, tables())
    files = report.write_files(record, options.out)
    click.echo(foreign(f"wrote {files[0]} and {files[1]}"), err=True)
    return 0
