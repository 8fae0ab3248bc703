"""The `forebay` command. Thin: parse, call, render. A command returns its exit code.

Exit codes: 0 done; 1 the answer is no (damage found, tokens differ); 2 a bad option, path or file, in one line on
standard error; 3 the measurement is not valid; 130 interrupted.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

import click

import forebay
from forebay.cli.demo import demo
from forebay.cli.doctor import doctor
from forebay.cli.output import one_line
from forebay.cli.pool import pool
from forebay.cli.vllm_args import vllm_args
from forebay.errors import ConfigError


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(forebay.__version__, prog_name="forebay")
@click.option("-v", "--verbose", count=True, help="Log more to standard error: -v decisions, -vv everything.")
def cli(verbose: int) -> None:
    """A tiered KV-cache store for LLM inference."""
    level = (logging.WARNING, logging.INFO, logging.DEBUG)[min(verbose, 2)]
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("forebay").setLevel(level)


cli.add_command(demo)
cli.add_command(doctor)
cli.add_command(pool)
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
    except BrokenPipeError:  # the reader of our output has left; nothing more to say to it
        _drop_output()
        return 0
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
    raise SystemExit(run())
