"""Long-lived I/O threads that pull single items out of whole batches.

Why not a pool of futures: a future a block costs several times the interpreter work of a block's read, and that work
holds the GIL. Here a batch is queued as a few tickets; a thread that draws one keeps taking items from the batch until
none is left. Tickets are drawn in order, so batches are served first come, first served, and the threads that find the
first batch exhausted go on to the second.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from queue import Empty, SimpleQueue

from forebay.errors import TierUnavailable
from forebay.tiers.file.directio import Scratch

_MOMENT_S = 0.05

Work = Callable[[int, Scratch], None]
"""Does item i of a batch with the buffers of the thread it runs on."""


class Batch:
    """Items on their way through the lanes.

    Whether it is through is looked at, and not counted by the caller: who is interrupted in waiting can wait again.
    """

    def __init__(self, work: Work, items: Iterable[int]) -> None:
        self._work = work
        self._items = deque(items)  # popleft is atomic: no lock between the threads for each item
        self._lock = threading.Lock()
        self._running = 0
        """Threads that may be at an item."""
        self._errors: list[BaseException] = []
        self._ended: SimpleQueue[None] = SimpleQueue()
        """Wakes whoever waits, to look whether it is through."""

    def __len__(self) -> int:
        """Items that nobody has begun."""
        return len(self._items)

    @property
    def is_through(self) -> bool:
        """Whether every item is done, or will not be begun any more."""
        return not self._items and not self._running  # in this order: a thread counts as running before it takes one

    def run(self, scratch: Scratch) -> None:
        """Take items until none is left. An exception is a bug in `work`: it ends the batch."""
        with self._lock:
            self._running += 1
        try:
            while True:
                try:
                    item = self._items.popleft()
                except IndexError:
                    break
                self._work(item, scratch)
        except BaseException as caught:  # handed to the caller by `check`; the thread must live on
            self._errors.append(caught)
            self.abandon()
        with self._lock:
            self._running -= 1
        if self.is_through:
            self._ended.put(None)

    def abandon(self) -> None:
        """Begin none of the items that are left. Those that were begun are still to be waited for."""
        self._items.clear()

    def wait_until(self, deadline_ns: int, clock_ns: Callable[[], int]) -> bool:
        """`settle` and `check`, but False if it is not through by then: it may go on, and must not be waited for."""
        while not self.is_through:
            try:
                self._ended.get(timeout=max(0, deadline_ns - clock_ns()) / 1e9)
            except Empty:
                return False
        self.check()
        return True

    def settle(self) -> None:
        """Block until it is through."""
        while not self.is_through:
            self._ended.get()

    def check(self) -> None:
        """Raise what `work` raised."""
        for error in self._errors:
            raise error


class Patience:
    """How long threads that were told to end are waited for, all together: a hung device must not hang the host."""

    def __init__(self, seconds: float) -> None:
        self._until_s = time.monotonic() + seconds

    def outlast(self, threads: Iterable[threading.Thread]) -> list[threading.Thread]:
        """Wait for these to end; returns those that have not. What is asked for after the time is up gets a moment."""
        threads = list(threads)
        for thread in threads:
            thread.join(max(_MOMENT_S, self._until_s - time.monotonic()))
        return [thread for thread in threads if thread.is_alive()]


class Lanes:
    """`threads` threads, each with its own buffers. `start` may be called from any thread."""

    def __init__(self, name: str, threads: int) -> None:
        self._tickets: SimpleQueue[Batch | None] = SimpleQueue()
        self._gate = threading.Lock()  # nothing is queued after the threads were told to end
        self._closed = False
        # daemon: a host that forgets to close the tier must still be able to exit
        self._threads = [threading.Thread(target=self._serve, name=f"{name}-{i}", daemon=True) for i in range(threads)]
        for thread in self._threads:
            thread.start()

    def start(self, work: Work, items: Iterable[int]) -> Batch:
        """Queue a batch behind those already there. Raises TierUnavailable when closed."""
        batch = Batch(work, items)
        self.put(batch)
        return batch

    def put(self, batch: Batch) -> None:
        """As `start`, for those who must know the batch before any of it begins."""
        with self._gate:
            if self._closed:
                raise TierUnavailable("the file tier is closed")
            for _ in range(min(len(batch), len(self._threads))):
                self._tickets.put(batch)

    def close(self) -> list[threading.Thread]:
        """Have the threads end after what is queued; returns them. Safe to call twice."""
        with self._gate:
            if not self._closed:
                self._closed = True
                for _ in self._threads:
                    self._tickets.put(None)
        return self._threads

    def _serve(self) -> None:
        scratch = Scratch()
        while (batch := self._tickets.get()) is not None:
            batch.run(scratch)
            del batch  # an idle thread must not keep the views of its last batch alive


def carry_out(parts: Sequence[tuple[Lanes, Batch]]) -> None:
    """Have each batch done in its lanes; return when every item is. Raises what `work` raised, and what `put` raises.

    An exception from outside, such as KeyboardInterrupt, comes out only when no item is in the works any more: then
    what they work on is the caller's again. Items that nobody has begun by then are left.
    """
    try:
        for lanes, batch in parts:
            lanes.put(batch)
        for _, batch in parts:
            batch.settle()
    except BaseException:
        _break_off([batch for _, batch in parts])
        raise
    for _, batch in parts:
        batch.check()


def _break_off(batches: Sequence[Batch]) -> None:
    while True:
        try:
            for batch in batches:
                batch.abandon()
            for batch in batches:
                batch.settle()
        except BaseException:  # another interrupt: the first one is on its way already
            continue
        return
