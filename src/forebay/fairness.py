"""The order of transfers. Demand goes before prefetches; among demand loads, fair sharing says who goes first.

Loads that arrive together and share a device evenly all end together, at the time of the last one. Served one after the
other, the last one ends no later and the others much earlier. The order is that in which fair sharing would end them:
the Fair Sojourn Protocol of Friedman and Henderson, "Fairness and efficiency in web server protocols", SIGMETRICS 2003.
Short loads go first, nobody starves, and nobody ends later than under fair sharing, but for what is in flight already.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from forebay.types import Traffic


class Order(Enum):
    """How demand loads are ranked."""

    FAIR_SOJOURN = "fair_sojourn"
    """By when fair sharing would end them."""
    ARRIVAL = "arrival"
    INTERLEAVED = "interleaved"
    """The one that has got least so far: fair sharing itself, to compare with."""


class FairSharing:
    """The imaginary system in which all loads share the device evenly. Its clock is work done, in bytes.

    `level` is the work that a load present from the start would have got by now. A load that arrives at level v with
    work w ends, there, at level v + w: its tag, which never changes. Real work moves the level on, by its n-th part
    when n imaginary loads are present.
    """

    def __init__(self) -> None:
        self.level = 0.0
        """Bytes that a load present from the start would have got by now."""
        self._tags: list[tuple[float, str]] = []
        """Heap of the imaginary loads that have not ended; those that `_present` does not confirm are skipped."""
        self._present: dict[str, float] = {}

    def enter(self, name: str, work_bytes: int) -> float:
        """The level at which fair sharing begins to serve this load."""
        begins = self.level
        self._present[name] = begins + work_bytes
        heapq.heappush(self._tags, (begins + work_bytes, name))
        return begins

    def forget(self, name: str) -> None:
        """A load was given up: its work will never be done, in neither system."""
        self._present.pop(name, None)

    def served(self, work_bytes: float) -> None:
        while self._tags:
            tag, name = self._tags[0]
            if self._present.get(name) != tag:
                heapq.heappop(self._tags)
                continue
            to_next = (tag - self.level) * len(self._present)
            if work_bytes < to_next:
                self.level += work_bytes / len(self._present)
                return
            work_bytes -= to_next
            self.level = tag
            heapq.heappop(self._tags)
            del self._present[name]


@dataclass(slots=True)
class _Waiting:
    """A transfer that has blocks to move."""

    traffic: Traffic
    rank: tuple[int, float, int]
    """(traffic, tag or deadline or bytes so far, number of the arrival)"""
    left_bytes: int
    """Work that was not granted yet."""


class Queue:
    """Transfers in the order in which they are served."""

    def __init__(self, order: Order, stretch: float) -> None:
        """`stretch`: a load never ends later than fair sharing would end one this many times as long; 1 or more."""
        self._order, self._stretch = order, stretch
        self._fair = FairSharing()
        self._waiting: dict[str, _Waiting] = {}
        self._ranks: list[tuple[tuple[int, float, int], str]] = []
        self._arrivals = 0

    def enter(self, name: str, traffic: Traffic, work_bytes: int, deadline_ns: int | None) -> None:
        self._arrivals += 1
        rank = 0.0
        if traffic is not Traffic.DEMAND:
            rank = math.inf if deadline_ns is None else float(deadline_ns)
        elif self._order is Order.FAIR_SOJOURN:
            rank = self._fair.enter(name, work_bytes) + work_bytes * self._stretch
        waiting = _Waiting(traffic, (traffic.value, rank, self._arrivals), work_bytes)
        self._waiting[name] = waiting
        bisect.insort(self._ranks, (waiting.rank, name))

    def again(self, name: str, traffic: Traffic, work_bytes: int, deadline_ns: int | None) -> None:
        """More of its work has to be done after all, such as from another source."""
        waiting = self._waiting.get(name)
        if waiting is None:
            self.enter(name, traffic, work_bytes, deadline_ns)
        else:
            waiting.left_bytes += work_bytes

    def leave(self, name: str) -> None:
        """It has nothing more to be granted, or is given up. Unknown names are fine."""
        waiting = self._waiting.pop(name, None)
        if waiting is None:
            return
        del self._ranks[bisect.bisect_left(self._ranks, (waiting.rank, name))]
        if waiting.left_bytes > 0:
            self._fair.forget(name)

    def granted(self, name: str, work_bytes: int) -> None:
        waiting = self._waiting[name]
        waiting.left_bytes = max(0, waiting.left_bytes - work_bytes)
        if waiting.traffic is Traffic.DEMAND and self._order is Order.INTERLEAVED:
            del self._ranks[bisect.bisect_left(self._ranks, (waiting.rank, name))]
            traffic, got_bytes, arrival = waiting.rank
            waiting.rank = (traffic, got_bytes + work_bytes, arrival)
            bisect.insort(self._ranks, (waiting.rank, name))

    def served(self, work_bytes: int) -> None:
        """Demand work has been done."""
        self._fair.served(work_bytes)

    def in_order(self) -> list[str]:
        return [name for _, name in self._ranks]

    def ahead_bytes(self, work_bytes: int) -> int:
        """Work that would be granted before a demand load of this size, if it came now."""
        rank = self._next_rank(work_bytes)
        return sum(waiting.left_bytes for waiting in self._demand() if waiting.rank < rank)

    def passed(self, work_bytes: int) -> int:
        """How many demand loads that wait now would be granted after one of this size."""
        rank = self._next_rank(work_bytes)
        return sum(waiting.rank > rank for waiting in self._demand())

    def _demand(self) -> Iterator[_Waiting]:
        return (waiting for waiting in self._waiting.values() if waiting.traffic is Traffic.DEMAND)

    def _next_rank(self, work_bytes: int) -> tuple[int, float, int]:
        """The rank of a demand load of this size, if it came now."""
        level = self._fair.level if self._order is Order.FAIR_SOJOURN else math.inf
        return (Traffic.DEMAND.value, level + work_bytes * self._stretch, self._arrivals + 1)
