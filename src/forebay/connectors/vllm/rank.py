"""All parts of one rank as one: a load has ended when every part has, a store is counted part by part."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from forebay.connectors.vllm.wire import StepPlan, WorkerReport
from forebay.connectors.vllm.worker import EndedLoads, WorkerSide

_LINGER_FOR_ANSWERS_S = 0.0005


class RankSide:
    """Has the steps of `WorkerSide`."""

    def __init__(self, parts: Sequence[WorkerSide]) -> None:
        self.parts = tuple(parts)
        self._ended: Counter[str] = Counter()
        """Requests whose load has ended in some parts, and in how many."""

    def begin(self, plan: StepPlan) -> None:
        for part in self.parts:
            part.begin(plan)

    def offer_stores(self) -> None:
        for part in self.parts:
            part.offer_stores()

    def poll(self) -> None:
        for part in self.parts:
            part.poll()

    def linger(self) -> None:
        """Let others work, in a step in which the model has nothing to do."""
        for part in self.parts:
            if part.open_loads or part.open_stores or part.forgets:
                part.linger()
                return
        time.sleep(_LINGER_FOR_ANSWERS_S)

    def take_ended_loads(self) -> EndedLoads:
        failed: set[int] = set()
        for part in self.parts:
            ended = part.take_ended_loads()
            self._ended.update(ended.request_ids)
            failed |= ended.failed_blocks
        over = frozenset(request_id for request_id, parts in self._ended.items() if parts == len(self.parts))
        for request_id in over:
            del self._ended[request_id]
        return EndedLoads(over, frozenset(failed))

    def take_report(self) -> WorkerReport | None:
        total: WorkerReport | None = None
        for part in self.parts:
            report = part.take_report()
            if report is not None:
                total = report if total is None else total.aggregate(report)
        return total

    def take_load_seconds(self) -> list[float]:
        return [seconds for part in self.parts for seconds in part.take_load_seconds()]

    @property
    def is_broken(self) -> bool:
        return any(part.is_broken for part in self.parts)

    def close(self) -> None:
        for part in self.parts:
            part.close()
