"""`forebay bench storm`: many sessions restored at once, in order against sharing the device."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from forebay.bench.storm import report, run, simulate
from forebay.bench.storm.options import StormOptions, parse_mix
from forebay.bench.units import bytes_text
from forebay.cli.output import foreign, tables
from forebay.cli.progress import Bytes, show_progress, terminable
from forebay.errors import ConfigError

_DEFAULTS = StormOptions(roots=())


class Counts(click.ParamType[tuple[int, ...]]):
    """`16,32`."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        parts = str(value).split(",")
        if not all(part.strip().isascii() and part.strip().isdecimal() and len(part) < 10 for part in parts):
            self.fail(f"{value!r} is no list of numbers: give one or more, such as 16,32", param, ctx)
        return tuple(int(part) for part in parts)


class Mix(click.ParamType[float]):
    """`1:10`."""

    name = "short:long"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            return value if isinstance(value, float) else parse_mix(value)
        except ConfigError as error:
            self.fail(str(error), param, ctx)


@click.command("storm")
@click.argument("roots", nargs=-1, type=click.Path(path_type=Path))
@click.option(
    "--sessions", type=Counts(), default=_DEFAULTS.sessions, metavar="N[,N...]", help="Storms of so many. [16,32]"
)
@click.option("--bytes-per-session", type=Bytes(), default=_DEFAULTS.bytes_per_session, metavar="SIZE", help="[192MB]")
@click.option(
    "--mix", "short_share", type=Mix(), default=_DEFAULTS.short_share, metavar="SHORT:LONG",
    help="Lengths of every second session and of the others, such as 1:10. [1:1]",
)  # fmt: skip
@click.option("--rounds", type=int, default=_DEFAULTS.rounds, show_default=True, help="Each has both orders.")
@click.option("--block-bytes", type=Bytes(), default=_DEFAULTS.block_bytes, metavar="SIZE", help="[2MiB]")
@click.option("--host-bytes", type=Bytes(), default=_DEFAULTS.host_bytes, metavar="SIZE", help="Host pool. [1GiB]")
@click.option("--seed", type=int, default=_DEFAULTS.seed, show_default=True, help="Of the blocks' keys.")
@click.option("--simulate", "simulated", is_flag=True, help="Published storms in virtual time; needs no ROOT.")
@click.option("--json", "as_json", is_flag=True, help="The result as JSON on standard output, and nothing else there.")
@click.option(
    "--out", type=click.Path(path_type=Path), default=_DEFAULTS.out, help="Directory for storm.json and storm.svg. [.]"
)
def bench_storm(roots: tuple[Path, ...], simulated: bool, as_json: bool, **given: Any) -> int:
    """Restore many sessions at once: served in order, against sharing the device evenly.

    The sessions' blocks are written into a temporary pool in each ROOT (an existing directory, one a device) and read
    back cold, in both orders in turns. Nothing remains but the report.

    Exit code: 0; 1 if in order was not as much better as it should be; 2 for a bad option or path; 3 if the
    measurement is not valid.
    """
    if simulated:
        return _simulate(given["host_bytes"], given["out"], as_json, is_measured=bool(roots))
    options = StormOptions(roots=roots, **given)
    with terminable(), show_progress(run.steps(options)) as progress:
        record = run.run_storms(options, command=("forebay", *sys.argv[1:]), progress=progress)
    _show(report.encode_json(record), as_json)
    if not as_json:
        report.print_record(record, tables())
    _say_files(report.write_files(record, record.storms, options.out))
    return report.exit_code(record)


def _simulate(host_bytes: int, out: Path, as_json: bool, *, is_measured: bool) -> int:
    if is_measured:
        raise ConfigError("--simulate needs no directory: give either a ROOT or --simulate")
    if not out.is_dir():
        raise ConfigError(f"--out: {out} is not a directory: make it first, or name another one")
    with terminable(), show_progress(simulate.steps()) as progress:
        cells = simulate.simulate(host_bytes, progress)
    _show(report.encode_json(cells), as_json)
    if not as_json:
        click.echo(f"host pool: {bytes_text(host_bytes)}")
        report.print_implied(cells, tables())
    _say_files(report.write_files(cells, [cell.storm for cell in cells], out))
    return 1 if any(cell.storm.missed for cell in cells) else 0


def _show(encoded: bytes, as_json: bool) -> None:
    if as_json:
        click.echo(encoded, nl=False)


def _say_files(files: tuple[Path, Path]) -> None:
    click.echo(foreign(f"wrote {files[0]} and {files[1]}"), err=True)
