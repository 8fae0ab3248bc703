"""`forebay bench policy`: which eviction policy keeps what is asked for again."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from forebay.bench.policy.options import SEEDED, PolicyOptions
from forebay.bench.policy.report import print_report, write_files
from forebay.bench.policy.run import encode_json, run_bench, steps
from forebay.cli.output import foreign, tables
from forebay.cli.progress import show_progress, terminable

_DEFAULTS = PolicyOptions()


@click.command("policy")
@click.argument("trace", required=False, type=click.Path(path_type=Path))
@click.option(
    "--trace-block-tokens",
    type=int,
    default=_DEFAULTS.trace_block_tokens,
    show_default=True,
    help="Tokens that a hash id of the trace stands for.",
)
@click.option(
    "--workload",
    "workloads",
    multiple=True,
    help=f"A seeded workload, by its module. Default: {', '.join(SEEDED)}; 'none' for the trace alone.",
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    help=f"An eviction policy, by its module. Default: {', '.join(_DEFAULTS.policies)}.",
)
@click.option("--cache-blocks", type=int, multiple=True, help="Blocks that the cache holds.")
@click.option(
    "--share",
    "shares",
    type=float,
    multiple=True,
    help="The same as a share of the distinct blocks of the workload. "
    f"Default: {', '.join(map(str, _DEFAULTS.shares))}.",
)
@click.option("--admission", default=_DEFAULTS.admission, show_default=True, help="Beside writing everything.")
@click.option("--seed", type=int, default=_DEFAULTS.seed, show_default=True, help="Of the seeded workloads.")
@click.option("--processes", type=int, default=_DEFAULTS.processes, show_default=True, help="At work side by side.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=_DEFAULTS.out,
    help="Directory for policy.json and policy.svg. Default: the current one.",
)
@click.option("--json", "as_json", is_flag=True, help="The result as JSON on standard output, and nothing else there.")
def bench_policy(
    trace: Path | None,
    trace_block_tokens: int,
    workloads: tuple[str, ...],
    policies: tuple[str, ...],
    cache_blocks: tuple[int, ...],
    shares: tuple[float, ...],
    admission: str,
    seed: int,
    processes: int,
    out: Path,
    as_json: bool,
) -> int:
    """Hit rates of eviction policies over a TRACE and seeded workloads, beside LRU and Belady's bound.

    TRACE has JSON lines as the Mooncake traces, or is an Azure trace as .csv. The last of the policies is replayed with
    the admission policy too: what it does not write, and what that costs.

    Exit code: 0; 2 for a bad option, path or trace.
    """
    options = PolicyOptions(
        trace=trace,
        trace_block_tokens=trace_block_tokens,
        workloads=() if workloads == ("none",) else workloads or _DEFAULTS.workloads,
        policies=policies or _DEFAULTS.policies,
        shares=shares or _DEFAULTS.shares,
        cache_blocks=cache_blocks,
        admission=admission,
        seed=seed,
        processes=processes,
        out=out,
    )
    with terminable(), show_progress(steps(options)) as progress:
        record = run_bench(options, command=("forebay", *sys.argv[1:]), progress=progress)
    try:
        files = write_files(record, options)
    finally:  # minutes of work are shown even if they cannot be kept
        if as_json:
            click.echo(encode_json(record), nl=False)
        else:
            print_report(record, tables())
    click.echo(foreign(f"wrote {files[0]} and {files[1]}"), err=True)
    return 0
