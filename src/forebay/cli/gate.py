"""`forebay gate`: acceptance by a plan whose limits were written down beforehand."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from forebay.bench.bundle import BundleUnsound, read_private_key, sign_bundle, verify_bundle, write_bundle
from forebay.bench.bundle.keys import SigningKey
from forebay.bench.files import write_whole
from forebay.bench.gates.plan import read_plan
from forebay.bench.gates.report import encode_json, exit_code, print_report
from forebay.bench.gates.run import evidence_files, run_plan, steps
from forebay.bench.gates.verdicts import GatesRecord
from forebay.bench.report.page import render_report
from forebay.bench.report.reading import records_of_run
from forebay.cli.output import foreign, tables
from forebay.cli.progress import show_progress, terminable
from forebay.errors import ConfigError

_PATH = click.Path(path_type=Path)
_BUNDLE_NAME, _PAGE_NAME = "gates.zip", "report.html"


@click.group()
def gate() -> None:
    """Run acceptance gates: arrival, baseline, comparison, stability."""


@gate.command("run")
@click.argument("plan_path", metavar="PLAN", type=_PATH)
@click.option("--out", type=_PATH, help="Directory of the run. Default: the plan's name with -run, here.")
@click.option("--key", type=_PATH, help="Sign the bundle with this private key, of `forebay bundle keygen`.")
@click.option("--json", "as_json", is_flag=True, help="The record as JSON on standard output, and nothing else there.")
def run_gates(plan_path: Path, out: Path | None, key: Path | None, as_json: bool) -> int:
    """Run the gates of PLAN (TOML), each with its limits, write report.html, and bundle the evidence.

    A run that was interrupted, by a reboot too, goes on where it was when the same command is given again. A plan that
    has changed meanwhile is refused.

    Exit code: 0 PASS; 1 FAIL; 2 for a bad plan, option or path; 3 INVALID: nothing can be said.
    """
    signing_key = read_private_key(key) if key is not None else None
    plan = read_plan(plan_path)
    directory = out or Path(f"{plan_path.stem}-run")
    with terminable(), show_progress(steps(plan)) as progress:
        record = run_plan(plan, directory, command=("forebay", *sys.argv[1:]), progress=progress)
    try:
        page = write_whole(directory / _PAGE_NAME, render_report(records_of_run(record, directory)).encode())
        bundle = _bundle(record, directory, signing_key)
    finally:  # hours of work are shown even if they cannot be kept
        if as_json:
            click.echo(encode_json(record), nl=False)
        else:
            print_report(record, tables())
    click.echo(foreign(f"wrote {page} and {bundle}"), err=True)
    return exit_code(record)


def _bundle(record: GatesRecord, directory: Path, key: SigningKey | None) -> Path:
    """Of a run that was through before, the bundle that is there stays; a signature that it lacks is added."""
    path = directory / _BUNDLE_NAME
    try:
        return _write_and_sign(path, record, directory, key)
    except BundleUnsound as error:
        raise ConfigError(f"{path} does not verify ({error}): move it away, and give the command again") from None


def _write_and_sign(path: Path, record: GatesRecord, directory: Path, key: SigningKey | None) -> Path:
    if not path.exists():
        files = evidence_files(record, directory) | {_PAGE_NAME: directory / _PAGE_NAME}
        write_bundle(path, files, title=record.title, created=record.created)
    if key is not None and key.public_bytes.hex() not in verify_bundle(path).signed_by:
        sign_bundle(path, key)
    return path
