"""`forebay pool`: look at a file pool, prove it, empty it. Works whether or not a store has the pool open."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from forebay.cli.output import foreign, gib, print_json
from forebay.errors import ConfigError
from forebay.tiers.file import admin


@click.group()
def pool() -> None:
    """Look at a file pool, verify it, empty it.

    PATH... are the pool's roots: the directories that a store was given. Several roots of one pool go into one call.
    """


def _roots(command: Callable[..., Any]) -> Callable[..., Any]:
    """The arguments that every pool command takes."""
    path = click.Path(path_type=Path)
    command = click.option("--json", "as_json", is_flag=True, help="One JSON document instead of text.")(command)
    return click.argument("paths", metavar="PATH...", nargs=-1, required=True, type=path)(command)


@pool.command()
@_roots
def stat(paths: tuple[Path, ...], as_json: bool) -> int:
    """What is in each root: blocks, bytes, damage set aside, free space."""
    found = admin.stat(paths)
    if as_json:
        print_json({"roots": found})
        return 0
    for root in found:
        click.echo(foreign(root.root))
        click.echo(f"  blocks       {root.blocks:,} in {root.namespaces} namespaces, {gib(root.stored_bytes)}")
        click.echo(f"  set aside    {root.set_aside_files} damaged files, {gib(root.set_aside_bytes)}")
        click.echo(f"  unfinished   {root.unfinished_files} files being written or left by a writer that died")
        click.echo(f"  free         {gib(root.free_bytes)} of {gib(root.file_system_bytes)}")
        click.echo(f"  identity     {root.root_id}, format version {root.format_version}")
    return 0


@pool.command()
@_roots
def ls(paths: tuple[Path, ...], as_json: bool) -> int:
    """The namespaces: which model, weights, dtype and layout their blocks belong to."""
    found = admin.ls(paths)
    if as_json:
        print_json(
            {
                "namespaces": [
                    {
                        "digest": listing.digest,
                        "blocks": listing.blocks,
                        "stored_bytes": listing.stored_bytes,
                        "fields": listing.namespace,
                        "usage": listing.usage,
                    }
                    for listing in found
                ]
            }
        )
        return 0
    if not found:
        click.echo("no namespace: the pool is empty")
    for listing in found:
        click.echo(f"{listing.digest[:16]}  {listing.blocks:,} blocks, {gib(listing.stored_bytes)}")
        if listing.namespace is None:
            click.echo("  nothing here says what this namespace stands for; its blocks are served all the same")
            continue
        for name, value in dataclasses.asdict(listing.namespace).items():
            if value != "":
                click.echo(f"  {name:16}{foreign(str(value))}")
        if len(listing.usage) > 1:
            for usage in listing.usage:
                click.echo(f"  in {foreign(usage.root)}: {usage.blocks:,} blocks, {gib(usage.stored_bytes)}")
    return 0


@pool.command()
@_roots
def verify(paths: tuple[Path, ...], as_json: bool) -> int:
    """Read every block in full and check it. Damaged files are set aside and named; then the exit code is 1.

    Names each damaged file once, also those that reads have set aside since the last check.
    """
    total_blocks = sum(root.blocks for root in admin.stat(paths))
    with _progress(total_blocks) as progress:
        report = admin.verify(paths, progress)
    if as_json:
        print_json(report)
    else:
        for damaged in report.set_aside:
            went = f"set aside as {foreign(damaged.moved_to)}" if damaged.moved_to else "removed: quarantine is full"
            if damaged.moved_to == damaged.path:
                went = "still there: it cannot be moved"
            click.echo(
                f"damaged     {foreign(damaged.path)}: {damaged.reason}, found by {damaged.found_by.value}; {went}"
            )
        for path in report.unreadable:
            click.echo(f"unreadable  {foreign(path)}")
        for path in report.newer:
            click.echo(f"newer       {foreign(path)}: written by a later Forebay, left alone")
        click.echo(
            f"{report.checked_blocks:,} blocks, {gib(report.checked_bytes)} checked: "
            f"{len(report.set_aside)} damaged, {len(report.unreadable)} unreadable"
        )
    return 1 if report.set_aside or report.unreadable else 0


@contextlib.contextmanager
def _progress(total_blocks: int) -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error, if that is a terminal: `progress(blocks, bytes)` so far."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda blocks, bytes_: None
        return
    columns = (TextColumn("verifying"), BarColumn(), TextColumn("{task.fields[read]}"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task("verify", total=total_blocks, read="")
        yield lambda blocks, bytes_: bars.update(task, completed=blocks, read=gib(bytes_))


@pool.command()
@_roots
@click.option(
    "--namespace", metavar="DIGEST", help="Only this namespace: its digest, or 4 or more leading digits of it."
)
@click.option("--yes", is_flag=True, help="Do not ask.")
def purge(paths: tuple[Path, ...], as_json: bool, namespace: str | None, yes: bool) -> int:
    """Remove blocks. The directories stay a pool; what Forebay did not make is left alone.

    A store that has the pool open goes on writing to it.
    """
    if not yes:
        blocks = sum(listing.blocks for listing in admin.ls(paths) if listing.digest.startswith(namespace or ""))
        try:
            sure = click.confirm(f"Remove {blocks:,} blocks?", err=True)
        except click.Abort:
            if sys.stdin is not None and sys.stdin.isatty():
                raise
            raise ConfigError("nothing was removed, since nobody answered: give --yes") from None
        if not sure:
            click.echo("nothing was removed", err=True)
            return 1
    report = admin.purge(paths, namespace)
    if as_json:
        print_json(report)
        return 0
    click.echo(
        f"removed {report.removed_blocks:,} blocks, {gib(report.removed_bytes)}, of {len(report.namespaces)} namespaces"
    )
    for path in report.kept:
        click.echo(
            f"kept {foreign(path)}: there is something in it, blocks that a store has written meanwhile or what "
            "Forebay did not make"
        )
    return 0
