"""`forebay pool`: look at a file pool, prove it, empty it. Works whether or not a store has the pool open."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from forebay.bench.units import parse_rate, parse_seconds
from forebay.cli.output import foreign, gib, print_json
from forebay.errors import ConfigError
from forebay.tiers.file import admin


class _Parsed(click.ParamType[float]):
    """An option in units."""

    parse: Callable[[str], float]

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            return value if isinstance(value, float) else type(self).parse(value)
        except ConfigError as error:
            self.fail(str(error), param, ctx)


class Rate(_Parsed):
    name = "rate"
    parse = staticmethod(parse_rate)


class Seconds(_Parsed):
    name = "time"
    parse = staticmethod(parse_seconds)


@click.group()
def pool() -> None:
    """Look at a file pool, check it, tidy it, empty it.

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
    """What is in each root: blocks, bytes, damage set aside, free space. Then what was written, and the wear of it."""
    with _counting() as progress:
        found = admin.stat(paths, progress)
    worn = admin.wear(paths, time.time())
    if as_json:
        print_json({"roots": found, "wear": worn})
        return 0
    for root in found:
        click.echo(foreign(root.root))
        click.echo(f"  blocks       {root.blocks:,} in {root.namespaces} namespaces, {gib(root.stored_bytes)}")
        if root.odd_files:
            click.echo(f"  of them      {root.odd_files:,} of another length, {gib(root.odd_bytes)}: newer or damaged")
        click.echo(f"  set aside    {root.set_aside_files} damaged files, {gib(root.set_aside_bytes)}")
        click.echo(
            f"  unfinished   {root.unfinished_files} files, {gib(root.unfinished_bytes)}, being written or left by a "
            "writer that died"
        )
        click.echo(f"  free         {gib(root.free_bytes)} of {gib(root.file_system_bytes)}")
        click.echo(f"  identity     {root.root_id}, format version {root.format_version}")
    _print_wear(worn)
    return 0


def _print_wear(worn: admin.Wear) -> None:
    since = time.strftime("%Y-%m-%d %H:%M", time.gmtime(worn.since_unix_s))
    click.echo(f"written        {gib(worn.written_bytes)} since {since} UTC, {gib(worn.today_bytes)} of it today")
    if worn.budget_bytes_per_day is not None and worn.budget_left_bytes is not None:
        click.echo(f"budget         {gib(worn.budget_left_bytes)} left today of {gib(worn.budget_bytes_per_day)}")
    if worn.endurance_bytes is not None:
        days = worn.days_to_rated_wear
        when = "not known in the first hour" if days is None else f"in {days:,.0f} days at this rate"
        click.echo(f"rated wear     {when}; the drives are rated for {gib(worn.endurance_bytes)}")


@pool.command()
@_roots
def ls(paths: tuple[Path, ...], as_json: bool) -> int:
    """The namespaces: which model, weights, dtype and layout their blocks belong to."""
    with _counting() as progress:
        found = admin.ls(paths, progress)
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
    with _progress("verifying", paths) as progress:
        report = admin.verify(paths, progress)
    return _render_check(report, as_json)


@pool.command()
@_roots
@click.option("--rate", type=Rate(), default="100MB/s", show_default=True, help="Bytes to read a second, at most.")
@click.option("--ttl", type=Seconds(), metavar="TIME", help="Also remove blocks written longer ago than this: 7d.")
@click.option("--afresh", is_flag=True, help="Begin at the beginning, and not where the last scrub was stopped.")
def scrub(paths: tuple[Path, ...], as_json: bool, rate: float, ttl: float | None, afresh: bool) -> int:
    """As verify, at a bounded rate beside a running store. Interrupted, it goes on where it was the next time.

    A store scrubs by itself in the background with the file tier's option `scrub_bytes_per_s`.
    """
    limits = admin.ScrubLimits(bytes_per_s=rate, ttl_s=ttl or 0.0)
    with _progress("scrubbing", paths) as progress:
        report = admin.scrub(paths, limits, progress, afresh=afresh)
    return _render_check(report, as_json)


def _render_check(report: admin.CheckReport, as_json: bool) -> int:
    code = 1 if report.set_aside or report.unreadable else 0
    if as_json:
        print_json(report)
        return code
    for damaged in report.set_aside:
        went = f"set aside as {foreign(damaged.moved_to)}" if damaged.moved_to else "removed: quarantine is full"
        if damaged.moved_to == damaged.path:
            went = "still there: it cannot be moved"
        click.echo(f"damaged     {foreign(damaged.path)}: {damaged.reason}, found by {damaged.found_by.value}; {went}")
    for path in report.unreadable:
        click.echo(f"unreadable  {foreign(path)}")
    for path in report.newer:
        click.echo(f"newer       {foreign(path)}: written by a later Forebay, left alone")
    if report.newer:
        click.echo(f"blocks of a newer format take {gib(report.newer_bytes)}")
    if report.expired_blocks:
        click.echo(f"{report.expired_blocks:,} blocks, {gib(report.expired_bytes)}, were too old and are removed")
    if report.miscounted_blocks:
        click.echo(f"{report.miscounted_blocks:,} blocks were wrong in the catalogue, which is put right")
    click.echo(
        f"{report.checked_blocks:,} blocks, {gib(report.checked_bytes)} checked: "
        f"{len(report.set_aside)} damaged, {len(report.unreadable)} unreadable"
    )
    return code


@contextlib.contextmanager
def _counting() -> Iterator[Callable[[int, int], None]]:
    """As `_progress`, for what takes 15 s a million blocks and does not know how many there are."""
    console = Console(stderr=True)
    with console.status("counting blocks") as status:
        yield lambda blocks, bytes_: status.update(f"counting blocks: {blocks:,}, {gib(bytes_)}")


@contextlib.contextmanager
def _progress(doing: str, paths: tuple[Path, ...]) -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error, if that is a terminal: `progress(blocks, bytes)` so far."""
    with _counting() as counted:
        total_blocks = sum(root.blocks for root in admin.stat(paths, counted))
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda blocks, bytes_: None
        return
    columns = (TextColumn(doing), BarColumn(), TextColumn("{task.fields[read]}"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task(doing, total=total_blocks, read="")
        yield lambda blocks, bytes_: bars.update(task, completed=blocks, read=gib(bytes_))


@pool.command()
@_roots
@click.option("--namespace", metavar="DIGEST", help="Only this one: its digest, or 4 or more leading digits of it.")
@click.option("--tenant", metavar="DIGEST", help="Only of this tenant: its digest or the beginning of it.")
@click.option("--model", metavar="NAME", help="Only of the model with exactly this name.")
@click.option(
    "--older-than", type=Seconds(), metavar="TIME", help="Only what was written longer ago, such as 12h or 7d."
)
@click.option("--dry-run", is_flag=True, help="Say what would be removed, and remove nothing.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def purge(
    paths: tuple[Path, ...],
    as_json: bool,
    namespace: str | None,
    tenant: str | None,
    model: str | None,
    older_than: float | None,
    dry_run: bool,
    yes: bool,
) -> int:
    """Remove blocks: those for which all given options hold, or all. What Forebay did not make is left alone.

    The directories stay a pool. A store that has it open goes on writing to it.
    """
    selection = admin.Selection(namespace=namespace, tenant=tenant, model=model, older_than_s=older_than)
    plan = partial(admin.purge, paths, selection, now_unix_s=time.time())
    if dry_run or not yes:
        would = plan(effect=admin.Effect.DRY_RUN)
    if not dry_run and not yes:
        _make_sure(f"Remove {would.removed_blocks:,} blocks, {gib(would.removed_bytes)}?")
    if dry_run:
        report = would
    else:
        with _progress("removing", paths) as progress:
            report = plan(progress=progress)
    if as_json:
        print_json(report)
        return 0
    click.echo(
        f"{_done(report.effect)} {report.removed_blocks:,} blocks, {gib(report.removed_bytes)}, of "
        f"{len(report.namespaces)} namespaces"
    )
    for path in report.kept:
        click.echo(
            f"kept {foreign(path)}: there is something in it, blocks that a store has written meanwhile or what "
            "Forebay did not make"
        )
    return 0


@pool.command()
@_roots
@click.option("--ttl", type=Seconds(), metavar="TIME", help="Remove blocks written longer ago than this: 12h, 7d.")
@click.option(
    "--quarantine",
    type=Seconds(),
    metavar="TIME",
    default="7d",
    show_default=True,
    help="Remove files that were set aside longer ago than this.",
)
@click.option("--dry-run", is_flag=True, help="Say what would be removed, and remove nothing.")
def gc(paths: tuple[Path, ...], as_json: bool, ttl: float | None, quarantine: float, dry_run: bool) -> int:
    """Remove what nobody needs: files of writers that died, old quarantine, empty directories, expired blocks."""
    limits = admin.GcLimits(now_unix_s=time.time(), ttl_s=ttl, quarantine_s=quarantine)
    effect = admin.Effect.DRY_RUN if dry_run else admin.Effect.REMOVE
    with _progress("looking through", paths) as progress:
        report = admin.gc(paths, limits, effect=effect, progress=progress)
    if as_json:
        print_json(report)
        return 0
    click.echo(
        f"{_done(report.effect)} {report.unfinished_files:,} unfinished files ({gib(report.unfinished_bytes)}), "
        f"{report.expired_blocks:,} expired blocks ({gib(report.expired_bytes)}), "
        f"{report.set_aside_files:,} files of the quarantine ({gib(report.set_aside_bytes)}), "
        f"{report.empty_directories:,} empty directories"
    )
    return 0


def _done(effect: admin.Effect) -> str:
    return "would remove" if effect is admin.Effect.DRY_RUN else "removed"


def _make_sure(question: str) -> None:
    """Ask, and end the command unless the answer is yes. Raises ConfigError when there is nobody to ask."""
    try:
        sure = click.confirm(question, err=True)
    except click.Abort:
        if sys.stdin is not None and sys.stdin.isatty():
            raise
        raise ConfigError("nothing was removed, since nobody answered: give --yes") from None
    if not sure:
        click.echo("nothing was removed", err=True)
        raise click.exceptions.Exit(1)
