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
from collections.abc import Callable, Iterable
from queue import Empty, SimpleQueue

from forebay.errors import TierUnavailable
from forebay.tiers.file.directio import Scratch

_MOMENT_S = 0.05

Work = Callable[[int, Scratch], None]
"""Does item i of a batch with the buffers of the thread it runs on."""


class Batch:
    """Items on their way through the lanes."""

    def __init__(self, work: Work, items: Iterable[int]) -> None:
        self._work = work
        self._items = deque(items)  # popleft is atomic: no lock between the threads
        self._ended: SimpleQueue[BaseException | None] = SimpleQueue()
        self._tickets = 0

    def issue(self, most: int) -> int:
        """How many threads shall work on it; each of them calls `run` once."""
        self._tickets = min(most, len(self._items))
        return self._tickets

    def run(self, scratch: Scratch) -> None:
        """Take items until none is left. An exception is a bug in `work`: it ends this thread's part of the batch."""
        error: BaseException | None = None
        try:
            while True:
                try:
                    item = self._items.popleft()
                except IndexError:
                    break
                self._work(item, scratch)
        except BaseException as caught:  # handed to the caller in `wait`; the thread must live on
            error = caught
        self._ended.put(error)

    def wait(self) -> None:
        """Block until every item is done. Raises what `work` raised."""
        errors = [self._ended.get() for _ in range(self._tickets)]
        for error in errors:
            if error is not None:
                raise error

    def wait_until(self, deadline_ns: int, clock_ns: Callable[[], int]) -> bool:
        """As `wait`, but False if it is not all done at the deadline. Then it may go on, and must not be waited for."""
        while self._tickets:
            try:
                error = self._ended.get(timeout=max(0, deadline_ns - clock_ns()) / 1e9)
            except Empty:
                return False
            self._tickets -= 1
            if error is not None:
                raise error
        return True


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
        with self._gate:
            if self._closed:
                raise TierUnavailable("the file tier is closed")
            for _ in range(batch.issue(len(self._threads))):
                self._tickets.put(batch)
        return batch

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
