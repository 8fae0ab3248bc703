"""What long commands share: sizes as options, a bar or lines on standard error, and a polite end."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from forebay.bench.progress import Progress
from forebay.bench.units import harmless, parse_bytes
from forebay.cli.output import foreign
from forebay.errors import ConfigError

_ENDS: dict[type[BaseException], int] = {SystemExit: signal.SIGTERM, KeyboardInterrupt: signal.SIGINT}
"""What a signal raises."""
_MOMENT_S = 0.05


class Bytes(click.ParamType[int]):
    """A size with its unit."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return value if isinstance(value, int) else parse_bytes(value)
        except ConfigError as error:
            self.fail(str(error), param, ctx)


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """A polite SIGTERM ends the run like an exception, so that a temporary pool does not outlive it."""

    def leave(number: int, _: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    before, hook = signal.signal(signal.SIGTERM, leave), sys.unraisablehook
    sys.unraisablehook = lambda lost: _ask_again(lost, hook)
    try:
        yield
    finally:
        sys.unraisablehook = hook
        signal.signal(signal.SIGTERM, before)


def _ask_again(lost: sys.UnraisableHookArgs, hook: Callable[[sys.UnraisableHookArgs], object]) -> None:
    """A signal that comes while a finalizer runs is lost with its exception: it is sent once more, a moment later."""
    number = _ENDS.get(lost.exc_type)
    if number is None:
        hook(lost)
    else:
        threading.Timer(_MOMENT_S, signal.pthread_kill, (threading.main_thread().ident, number)).start()


@contextlib.contextmanager
def show_progress(total: int) -> Iterator[Progress]:
    """On standard error: a bar for a terminal, and one line a step anywhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines(total)
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Bars(*columns, console=console, transient=True) as bars:
        yield _Bar(bars, total)


class _Lines:
    def __init__(self, total: int) -> None:
        self._total, self._done = total, 0

    def begins(self, doing: str) -> None: ...

    def ended(self, done: str) -> None:
        self._done += 1
        click.echo(f"[{self._done}/{self._total}] {foreign(done)}", err=True)


class _Bar:
    def __init__(self, bars: Bars, total: int) -> None:
        self._bars = bars
        self._task = bars.add_task("", total=total)

    def begins(self, doing: str) -> None:
        self._bars.update(self._task, description=doing)

    def ended(self, done: str) -> None:
        self._bars.console.print(harmless(done), markup=False, highlight=False)
        self._bars.advance(self._task)
