"""What the host engine has been left to compute, and when it will be through with it. Pure.

The host is taken to compute one prefill at a time, and of those whose prefix has arrived the one that came first.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

_MOST_COMMITMENTS = 256
"""More are not looked at: the oldest is taken to have been computed unreported."""
_PATIENCE_NS = 1_000_000_000
"""How long after its time a prefill is still waited for, beyond as long again as it was expected to take."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """What it would mean to give the accelerator one more prefill."""

    first_token_ns: int
    """When that prefill would have ended."""
    delay_ns: int
    """By how much all others together would end later."""


@dataclass(slots=True)
class _Commitment:
    order: int
    ready_ns: int
    """When its prefix is on the device; while it is loading, when that is expected."""
    is_loading: bool
    work_ns: int
    until_ns: int
    """Past it nobody believes any more that it will be reported."""


class Accelerator:
    """The prefills that were left to the host and have not been reported as done."""

    def __init__(self) -> None:
        self._commitments: dict[str, _Commitment] = {}
        self._arrivals = 0
        self._free_ns = 0
        """When the last report came: what is being computed now began no earlier."""

    def __contains__(self, name: str) -> bool:
        return name in self._commitments

    def commit(self, name: str, ready_ns: int, work_ns: int, now_ns: int) -> None:
        """The host will compute this once its prefix has arrived."""
        self._forget_overdue(now_ns)
        while len(self._commitments) >= _MOST_COMMITMENTS:
            del self._commitments[next(iter(self._commitments))]
        ends_ns = self.outlook(ready_ns, work_ns, now_ns).first_token_ns
        until_ns = ends_ns + (ends_ns - now_ns) + _PATIENCE_NS
        self._commitments.pop(name, None)
        self._arrivals += 1
        self._commitments[name] = _Commitment(self._arrivals, ready_ns, ready_ns > now_ns, work_ns, until_ns)

    def arrived(self, name: str, work_ns: int, now_ns: int) -> None:
        """Its load has ended, and this much is left to compute. Unknown names are fine, here and below."""
        commitment = self._commitments.get(name)
        if commitment is not None:
            commitment.ready_ns, commitment.is_loading, commitment.work_ns = now_ns, False, work_ns

    def done(self, name: str, now_ns: int) -> None:
        self._free_ns = now_ns
        self._commitments.pop(name, None)

    def forget(self, name: str) -> None:
        """It will not be computed after all."""
        self._commitments.pop(name, None)

    def free_ns(self, now_ns: int) -> int:
        """When everything committed so far has been computed; `now_ns` if that is nothing."""
        self._forget_overdue(now_ns)
        return max(self._ends(self._commitments.values(), now_ns).values(), default=now_ns)

    def outlook(self, ready_ns: int, work_ns: int, now_ns: int) -> Outlook:
        """What one more prefill would mean. Costs n log n for n commitments."""
        self._forget_overdue(now_ns)
        without = self._ends(self._commitments.values(), now_ns)
        last = _Commitment(self._arrivals + 1, ready_ns, ready_ns > now_ns, work_ns, 0)
        ends = self._ends((*self._commitments.values(), last), now_ns)
        own_ns = ends.pop(last.order)
        return Outlook(own_ns, sum(ends.values()) - sum(without.values()))

    def _ends(self, commitments: Iterable[_Commitment], now_ns: int) -> dict[int, int]:
        """When each is through, by its order. None ends before now: it would have been reported."""
        coming = [
            (max(each.ready_ns, now_ns) if each.is_loading else each.ready_ns, each.order, each.work_ns)
            for each in commitments
        ]
        heapq.heapify(coming)
        ready: list[tuple[int, int]] = []
        ends: dict[int, int] = {}
        at_ns = self._free_ns
        while coming or ready:
            if not ready:
                at_ns = max(at_ns, coming[0][0])
            while coming and coming[0][0] <= at_ns:
                _, order, work_ns = heapq.heappop(coming)
                heapq.heappush(ready, (order, work_ns))
            order, work_ns = heapq.heappop(ready)
            at_ns = ends[order] = max(at_ns + work_ns, now_ns)
        return ends

    def _forget_overdue(self, now_ns: int) -> None:
        for name in [name for name, each in self._commitments.items() if each.until_ns < now_ns]:
            del self._commitments[name]
