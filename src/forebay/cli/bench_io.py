"""`forebay bench io`: the file tier against plain controls on the same device."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from forebay.bench.io.options import Direction, IoOptions, Load
from forebay.bench.io.report import encode_json, exit_code, print_report, write_files
from forebay.bench.io.run import run_bench, steps
from forebay.cli.output import foreign, tables
from forebay.cli.progress import Bytes, show_progress, terminable
from forebay.tiers.file import Io

_DEFAULTS = IoOptions(roots=())


@click.command("io")
@click.argument("roots", metavar="ROOT...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--block-size", "block_bytes", type=Bytes(), multiple=True, help="Default: 512KiB, 2MiB, 8MiB, 16MiB.")
@click.option("--in-flight", "depths", type=int, multiple=True, help="Blocks in flight. Default: 1, 4, 16, 32.")
@click.option("--rounds", type=int, default=_DEFAULTS.rounds, show_default=True)
@click.option("--bytes", "pass_bytes", type=Bytes(), default="512MiB", show_default=True, help="Moved in each pass.")
@click.option("--only", type=click.Choice([each.value for each in Direction]), help="Reads or writes alone.")
@click.option("--busy", is_flag=True, help="Measure beside a busy Python thread too.")
@click.option(
    "--io",
    type=click.Choice([each.value for each in Io]),
    default=Io.AUTO.value,
    show_default=True,
    help="Who reads in the tier.",
)
@click.option("--out", type=click.Path(path_type=Path), default=_DEFAULTS.out, help="For the JSON and the plot.")
@click.option("--export", type=click.Path(path_type=Path), help="Write the device's measured curve to this file.")
@click.option("--json", "as_json", is_flag=True, help="The result as JSON on standard output, and nothing else there.")
def bench_io(
    roots: tuple[Path, ...],
    block_bytes: tuple[int, ...],
    depths: tuple[int, ...],
    rounds: int,
    pass_bytes: int,
    only: str | None,
    busy: bool,
    io: str,
    out: Path,
    export: Path | None,
    as_json: bool,
) -> int:
    """The file tier's cold reads and writes in each ROOT's file system, against fio and plain threads.

    All take turns on the same device with the same sizes, so that ratios hold where absolute figures drift. Needs room
    for three passes in every ROOT and for one in memory, and removes what it wrote. About 10 minutes with the defaults.

    Exit code: 0; 2 for a bad option or path; 3 if the reads were not shown to be cold.
    """
    options = IoOptions(
        roots=roots,
        block_bytes=block_bytes or _DEFAULTS.block_bytes,
        depths=depths or _DEFAULTS.depths,
        rounds=rounds,
        pass_bytes=pass_bytes,
        directions=(Direction(only),) if only else _DEFAULTS.directions,
        loads=(Load.IDLE, Load.BUSY) if busy else (Load.IDLE,),
        io=Io(io),
        out=out,
        export=export,
    )
    with terminable(), show_progress(steps(options)) as progress:
        record = run_bench(options, command=("forebay", *sys.argv[1:]), progress=progress)
    try:
        files = write_files(record)
    finally:  # minutes of work are shown even if they cannot be kept
        if as_json:
            click.echo(encode_json(record), nl=False)
        else:
            print_report(record, tables())
    click.echo(foreign(f"wrote {', '.join(map(str, files))}"), err=True)
    return exit_code(record)
