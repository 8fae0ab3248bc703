"""`forebay sim`: the engine under virtual time, held against measurements and run over traces."""

from __future__ import annotations

from pathlib import Path

import click

from forebay.bench.calibration import report
from forebay.bench.calibration.hypotheses import asides, hypothesis_steps, try_hypotheses
from forebay.bench.calibration.validate import steps, validate
from forebay.cli.output import foreign, tables
from forebay.cli.progress import show_progress, terminable
from forebay.cli.sim_replay import sim_replay
from forebay.errors import ConfigError


@click.group()
def sim() -> None:
    """Simulate: the same engine under virtual time."""


@sim.command("validate")
@click.option("--hypotheses", "is_thorough", is_flag=True, help="Try what else could explain the figures, too.")
@click.option("--json", "as_json", is_flag=True, help="The result as JSON on standard output, and nothing else there.")
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path(), help="For sim-validation.json and sim-validation.svg. [.]"
)
def sim_validate(is_thorough: bool, as_json: bool, out: Path) -> int:
    """Hold the simulator against published measurements, figure by figure.

    Exit code: 0; 1 if a TTFT p50 or throughput is off by more than 10 %, or their median by more than 5 %; 2 for a bad
    option or path.
    """
    if not out.is_dir():
        raise ConfigError(f"--out: {out} is not a directory: make it first, or name another one")
    with terminable(), show_progress(steps() + (hypothesis_steps() if is_thorough else 0)) as progress:
        found = report.Report(
            validation=validate(progress),
            hypotheses=try_hypotheses(progress) if is_thorough else (),
            asides=asides() if is_thorough else (),
        )
    if as_json:
        click.echo(report.encode_json(found), nl=False)
    else:
        report.print_report(found, tables())
    files = report.write_files(found, out)
    click.echo(foreign(f"wrote {files[0]} and {files[1]}"), err=True)
    return 0 if found.validation.is_met else 1


sim.add_command(sim_replay)
