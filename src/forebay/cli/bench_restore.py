"""`forebay bench restore`: cold sessions come back, from a candidate medium, from a baseline, or by computing anew."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from forebay.bench.bundle import read_private_key, sign_bundle, write_bundle
from forebay.bench.restore import report, run
from forebay.bench.restore.options import parse_options, read_plan
from forebay.cli.output import foreign, tables
from forebay.cli.progress import show_progress, terminable
from forebay.errors import ConfigError

_PLAN_NAME = "plan.toml"


@click.command("restore")
@click.argument("plan", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="The result as JSON on standard output, and nothing else there.")
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path(), help="Directory for the files of the result. [.]"
)
@click.option("--bundle", type=click.Path(path_type=Path), help="Zip file for plan, record, requests and picture.")
@click.option("--key", type=click.Path(path_type=Path), help="Sign it with this key, of `forebay bundle keygen`.")
def bench_restore(plan: Path, as_json: bool, out: Path, bundle: Path | None, key: Path | None) -> int:
    """Restore cold sessions, many at once, and compare where they come from.

    PLAN is a TOML file with the groups to compare: what each asks (an emulated accelerator, a server, the built-in
    engine) and where its KV lies. Sessions are stored, leave memory, and are asked for in waves, group after group in
    turns. A result is VALID only if its evidence says so: reads were physical, nothing was warm, every request
    succeeded. Written: restore.json, requests.jsonl (a request a line; requests.parquet too where pyarrow is
    installed) and restore.svg.

    Exit code: 0; 2 for a bad option or path; 3 if the measurement is not valid.
    """
    plan_bytes = read_plan(plan)
    options = parse_options(plan, plan_bytes)
    if not out.is_dir():
        raise ConfigError(f"--out: {out} is not a directory: make it first, or name another one")
    if bundle is not None and (bundle.is_dir() or not bundle.parent.is_dir()):
        raise ConfigError(f"--bundle: {bundle} is no place for a file: name one in a directory that is there")
    if key is not None and bundle is None:
        raise ConfigError("--key signs a bundle: give --bundle, too")
    signing_key = read_private_key(key) if key is not None else None
    with terminable(), show_progress(run.steps(options)) as progress:
        record = run.run_restore(options, command=("forebay", *sys.argv[1:]), progress=progress)
    if as_json:
        click.echo(report.encode_json(record), nl=False)
    else:
        report.print_record(record, tables())
    written = report.write_files(record, out)
    if bundle is not None:
        files: dict[str, Path | bytes] = {path.name: path for path in written} | {_PLAN_NAME: plan_bytes}
        write_bundle(bundle, files, title=record.title, created=record.created)
        if signing_key is not None:
            sign_bundle(bundle, signing_key)
        written = (*written, bundle)
    click.echo(foreign(f"wrote {', '.join(str(path) for path in written)}"), err=True)
    return report.exit_code(record)
