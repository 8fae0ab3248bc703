"""A long command ends politely, whenever it is asked to."""

from __future__ import annotations

import signal
import threading
import weakref

import pytest

from forebay.cli.progress import terminable


class Thing:
    pass


@pytest.mark.parametrize(("number", "error"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)])
def test_a_signal_that_comes_while_a_finalizer_runs_is_not_lost(number: int, error: type[BaseException]) -> None:
    things = [Thing()]
    weakref.finalize(things[0], signal.raise_signal, number)
    seen: list[str] = []

    def run(thing: list[Thing]) -> None:
        with terminable():
            thing.clear()  # what is raised in here goes nowhere
            seen.append("went on")
            threading.Event().wait(30)

    with pytest.raises(error):
        run(things)
    assert seen == ["went on"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
