"""What the sides of the connector tell vLLM's metrics, without vLLM."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forebay.connectors.vllm import lookup
from forebay.connectors.vllm.options import ConnectorOptions, Part
from forebay.connectors.vllm.scheduler import _Held
from forebay.connectors.vllm.setup import SchedulerStack
from forebay.connectors.vllm.wire import Handshake, StoredPart
from forebay.testing.schedule import NAMESPACE

BLOCK_TOKENS = 16


def request(name: str, blocks: int = 3) -> Any:
    hashes = [bytes([i]) * 32 for i in range(blocks)]
    return SimpleNamespace(request_id=name, block_hashes=hashes, lora_request=None)


def stack(tmp_path: Path, **options: Any) -> SchedulerStack:
    given = ConnectorOptions(pool=str(tmp_path / "pool"), capacity_gib=1, host_gib=0.01, **options)
    return SchedulerStack(given, [Handshake((StoredPart(Part(), NAMESPACE),))], BLOCK_TOKENS)


def test_what_is_under_way_is_told_whenever_it_changes(tmp_path: Path) -> None:
    scheduler = stack(tmp_path)
    assert scheduler.take_numbers() == {"queue|loads": 0, "queue|stores": 0}
    assert scheduler.take_numbers() == {}
    scheduler.side._held[1] = _Held((), (), 1, 0)
    assert scheduler.take_numbers() == {"queue|loads": 0, "queue|stores": 1}
    del scheduler.side._held[1]
    assert scheduler.take_numbers() == {"queue|loads": 0, "queue|stores": 0}
    scheduler.close()


@pytest.mark.parametrize("error", [None, OSError("gone")], ids=repr)
def test_counters_never_shrink_however_late_the_pool_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError | None
) -> None:
    go_on, looked = threading.Event(), threading.Event()

    def slow(*_: object) -> int:
        go_on.wait()
        looked.set()
        if error is not None:
            raise error
        return 0

    monkeypatch.setattr(lookup, "_leading", slow)
    scheduler = stack(tmp_path, lookup_deadline_s=0.01)
    late, told = request("late"), list[dict[str, Any]]()
    tokens = None
    while tokens is None:
        tokens = scheduler.side.matched_tokens(late, 0)
        told.append(scheduler.take_numbers())
    go_on.set()
    assert looked.wait(60)
    scheduler.side.finished(late)
    in_time = request("in time")
    scheduler._lookup._deadline_ns = 60_000_000_000
    while scheduler.side.matched_tokens(in_time, 0) is None:
        threading.Event().wait(0.001)
    told.append(scheduler.take_numbers())
    scheduler.close()
    assert all(value >= 0 for numbers in told for value in numbers.values())
    told = [{name: value for name, value in numbers.items() if not name.startswith("queue")} for numbers in told]
    sums = {name: sum(numbers.get(name, 0) for numbers in told) for numbers in told for name in numbers}
    assert sums == {"lookups|timed out": 1, "lookups|answered" if error is None else "lookups|failed": 1}
