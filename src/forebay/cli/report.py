"""`forebay report`: records as one page for manager and engineer."""

from __future__ import annotations

from pathlib import Path

import click

from forebay.bench.bundle import BundleUnsound
from forebay.bench.files import write_whole
from forebay.bench.report.page import render_report
from forebay.bench.report.reading import read_records
from forebay.bench.report.texts import Language
from forebay.cli.output import foreign, one_line

_TAGS = {"en": Language.ENGLISH, "zh": Language.CHINESE}


@click.command("report")
@click.argument("records", metavar="RECORD...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), default=Path("report.html"), help="The page. [report.html]")
@click.option(
    "--language", type=click.Choice(list(_TAGS)), default="en", show_default=True,
    help="In which it opens; it has both.",
)  # fmt: skip
def report(records: tuple[Path, ...], out: Path, language: str) -> int:
    """Make one HTML page, in English and Chinese, of RECORDs: gates.json, restore.json, or bundles of them (.zip).

    The page needs no network and no script, and prints on A4. Bundles are verified first.

    Exit code: 0; 1 if a bundle does not verify; 2 for a file that is no record.
    """
    try:
        page = render_report(read_records(records), first=_TAGS[language])
    except BundleUnsound as error:
        click.echo(f"does not verify: {one_line(str(error))}")
        return 1
    click.echo(foreign(f"wrote {write_whole(out, page.encode())}"), err=True)
    return 0
