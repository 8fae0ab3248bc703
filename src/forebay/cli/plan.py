"""`forebay plan`: how much storage, how fast, and which, before it is bought."""

from __future__ import annotations

from pathlib import Path

import click

from forebay.cli.output import foreign, tables
from forebay.cli.progress import show_progress, terminable
from forebay.planning.options import read_plan, with_profile
from forebay.planning.plan import make_plan, steps
from forebay.planning.report import encode_json, print_plan, write_files


@click.command("plan")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(),
    help="Directory for plan.json and plan.html. Default: the current one.",
)
@click.option("--json", "as_json", is_flag=True, help="The plan as JSON on standard output, and nothing else there.")
@click.option(
    "--profile", help="An engine's profile in place of the file's own: a .toml file that was measured, or a name."
)
def plan(file: Path, out: Path, as_json: bool, profile: str | None) -> int:
    """Size the storage of a fleet from FILE, a TOML file: model, engine, fleet, workload and candidate media.

    KV volume, DRAM, bandwidth, TTFT and throughput of each medium at each concurrency, hit rates, wear, cost, and what
    to take and why. Examples are in the repository's examples/: edge-box.toml, rack.toml, 480b-tp8.toml.

    Exit code: 0; 2 for a bad file.
    """
    options = read_plan(file)
    if profile is not None:
        options = with_profile(options, str(Path(profile).absolute()) if profile.endswith(".toml") else profile)
    with terminable(), show_progress(steps(options)) as progress:
        made = make_plan(options, file.parent, progress)
    try:
        files = write_files(made, out)
    finally:  # what was worked out is shown even if it cannot be kept
        if as_json:
            click.echo(encode_json(made).decode(), nl=False)
        else:
            print_plan(made, tables())
    click.echo(foreign(f"wrote {files[0]} and {files[1]}"), err=True)
    return 0
