"""The `forebay` command. Thin: parse, call, render. A command returns its exit code.

Exit codes: 0 done; 1 the answer is no (damage found, tokens differ, a gate failed); 2 a bad option, path or file, in
one line on standard error; 3 the measurement is not valid; 130 interrupted; 141 the reader of the output has left.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import click

import forebay
from forebay.bench.units import harmless
from forebay.cli.bench import bench
from forebay.cli.bundle import bundle
from forebay.cli.demo import demo
from forebay.cli.doctor import doctor
from forebay.cli.explain import explain
from forebay.cli.gate import gate
from forebay.cli.output import one_line
from forebay.cli.plan import plan
from forebay.cli.pool import pool
from forebay.cli.report import report
from forebay.cli.sim import sim
from forebay.cli.vllm_args import vllm_args
from forebay.errors import ConfigError

_READER_LEFT = 128 + signal.SIGPIPE
"""As a shell says it of a command that the signal ended."""


class _ReaderLeft(Exception):
    """A broken pipe under another name: click would make exit code 1 of it, which here means that damage was found."""


class _Commands(click.Group):
    def make_context(self, *given: Any, **options: Any) -> click.Context:
        with _renamed():
            return super().make_context(*given, **options)

    def invoke(self, ctx: click.Context) -> Any:
        with _renamed():
            return super().invoke(ctx)


@contextlib.contextmanager
def _renamed() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError as error:
        raise _ReaderLeft from error


class _HarmlessLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return harmless(super().format(record))


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(forebay.__version__, prog_name="forebay")
@click.option("-v", "--verbose", count=True, help="Log more to standard error: -v decisions, -vv everything.")
def cli(verbose: int) -> None:
    """A tiered KV-cache store for LLM inference."""
    level = (logging.WARNING, logging.INFO, logging.DEBUG)[min(verbose, 2)]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_HarmlessLines("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("forebay").setLevel(level)


cli.add_command(bench)
cli.add_command(bundle)
cli.add_command(demo)
cli.add_command(doctor)
cli.add_command(explain)
cli.add_command(gate)
cli.add_command(plan)
cli.add_command(pool)
cli.add_command(report)
cli.add_command(sim)
cli.add_command(vllm_args)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    try:
        code = cli.main(arguments, prog_name="forebay", standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()
        return int(code or 0)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return 2
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx else "forebay"
        return _refuse(f"{error.format_message()} (see '{where} --help')")
    except (click.ClickException, ConfigError) as error:
        message = error.format_message() if isinstance(error, click.ClickException) else str(error)
        return _refuse(message)
    except (click.Abort, KeyboardInterrupt):
        click.echo("forebay: interrupted", err=True)
        return 130
    except (_ReaderLeft, BrokenPipeError):  # nothing more to say to it
        _drop_output()
        return _READER_LEFT
    except OSError as error:  # a path that cannot be used, or an output that cannot be written
        if error.filename is None:
            _drop_output()
        where = error.filename or "cannot go on"
        return _refuse(f"{where}: {error.strerror or error}")


def _refuse(message: str) -> int:
    click.echo(f"forebay: {one_line(message)}", err=True)
    return 2


def _drop_output() -> None:
    """What is still buffered cannot be written; the interpreter shall not try again at its end."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main() -> None:
    _open_missing_streams()
    raise SystemExit(run())


def _open_missing_streams() -> None:
    """What was closed before we began leads nowhere: else the next file that is opened takes its number."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123
