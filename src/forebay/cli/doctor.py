"""`forebay doctor`: the path that block I/O would really take in a directory, found by trying it."""

from __future__ import annotations

from pathlib import Path

import click

from forebay.cli.output import foreign, print_json
from forebay.tiers.file.admin import ProbeReport, Verdict, probe

_MARKS = {Verdict.OK: "ok  ", Verdict.WARN: "warn", Verdict.BAD: "BAD "}


@click.command()
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead of text.")
def doctor(paths: tuple[Path, ...], as_json: bool) -> int:
    """What each PATH really gets as a root: direct I/O or not, alignment, device, locks, space, huge pages.

    Writes and reads a page in a temporary file there. Exits with 1 when a path cannot be used.
    """
    reports = [probe(path) for path in paths]
    if as_json:
        print_json({"paths": [{"verdict": report.verdict, **_fields(report)} for report in reports]})
    else:
        for report in reports:
            _print(report)
    return 1 if any(report.verdict is Verdict.BAD for report in reports) else 0


def _fields(report: ProbeReport) -> dict[str, object]:
    return {name: getattr(report, name) for name in report.__dataclass_fields__}


def _print(report: ProbeReport) -> None:
    click.echo(foreign(report.path))
    for item in report.items:
        click.echo(f"  {_MARKS[item.verdict]}  {item.name:14} {foreign(item.words)}")
    click.echo(f"  {_MARKS[report.verdict]}  in all")
