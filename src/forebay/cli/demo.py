"""`forebay demo`: recompute against restore, with a real model, in a few minutes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from forebay.bench.demo.options import DemoOptions
from forebay.bench.demo.page import render_page
from forebay.bench.demo.report import encode_json, exit_code, print_report, write_files
from forebay.bench.demo.results import Record
from forebay.bench.demo.run import run_demo, steps
from forebay.bench.units import seconds_text
from forebay.cli.output import foreign, tables
from forebay.cli.progress import Bytes, show_progress, terminable

_DEFAULTS = DemoOptions()


@click.command()
@click.option(
    "--model",
    type=click.Path(path_type=Path),
    help="A local model: a directory of save_pretrained, or a GGUF file. Default: SmolLM2-135M-Instruct.",
)
@click.option(
    "--random-weights", is_flag=True, help="A seeded Qwen3 shape in place of a real model; its answers mean nothing."
)
@click.option(
    "--sessions", type=int, default=_DEFAULTS.sessions, show_default=True, help="Sessions, each over a text of its own."
)
@click.option(
    "--tokens", type=int, default=_DEFAULTS.tokens, show_default=True, help="Length of each document, in tokens."
)
@click.option(
    "--answer-tokens",
    type=int,
    default=_DEFAULTS.answer_tokens,
    show_default=True,
    help="Length of each answer, in tokens, at most.",
)
@click.option("--block-tokens", type=int, default=_DEFAULTS.block_tokens, show_default=True, help="Tokens a block.")
@click.option(
    "--pool",
    type=click.Path(path_type=Path),
    help="Directory of the pool, which is kept: a second run finds its blocks. Default: a temporary one, here.",
)
@click.option(
    "--host-memory", type=Bytes(), metavar="SIZE", help="DRAM tier, such as 2GiB. Default: what one session needs."
)
@click.option("--threads", type=int, help="Threads of the model. Default: as many as torch takes.")
@click.option(
    "--seed", type=int, default=_DEFAULTS.seed, show_default=True, help="Of random weights, and which text comes first."
)
@click.option("--json", "as_json", is_flag=True, help="The result as JSON on standard output, and nothing else there.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=_DEFAULTS.out,
    help="Directory for demo.json and demo.html. Default: the current one.",
)
def demo(as_json: bool, host_memory: int | None, **given: Any) -> int:
    """Restore long contexts from DRAM and from cold disk, against recomputing them.

    Several long sessions go through the model and into the pool, leave device memory and DRAM, and are brought back in
    three ways that have to give the same tokens. Takes about 4 minutes on 2 processors.

    Exit code: 0; 1 if tokens differ; 2 for a bad option or path; 3 if the measurement is not valid.
    """
    options = DemoOptions(host_memory_bytes=host_memory, **given)
    with terminable(), show_progress(steps(options)) as progress:
        record = run_demo(options, command=("forebay", *sys.argv[1:]), progress=progress)
    try:
        files = write_files(record, render_page(record), options.out)
    finally:  # minutes of work are shown even if they cannot be kept
        _show(record, as_json)
    wrote = foreign(f"wrote {files[0]} and {files[1]}")
    click.echo(f"{wrote}, in all {seconds_text(record.durations.whole_s)}", err=True)
    return exit_code(record)


def _show(record: Record, as_json: bool) -> None:
    if as_json:
        click.echo(encode_json(record), nl=False)
    else:
        print_report(record, tables())
