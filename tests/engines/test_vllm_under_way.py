"""The connector under the real vLLM while something is under way: a slow pool, a reset, a host pool of a few slots."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pool_files import block_files
from vllm_connector_kit import BLOCK_TOKENS, Engine, engine, prompt

from forebay.connectors.vllm import lookup, setup

pytest.importorskip("vllm")
prometheus = pytest.importorskip("prometheus_client")

B = BLOCK_TOKENS
LONG = [prompt(700 + i, 10 * B + 7) for i in range(4)]
SLOTS = 4
BLOCK_BYTES = 2 * 2 * 2 * 32 * B * 4
"""Layers, keys and values, heads, size of a head, tokens, float32."""


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("under-way") / "pool"


@pytest.fixture(scope="module")
def running(make_model: Callable[..., Path], pool: Path) -> Iterator[Engine]:
    with engine(make_model(), pool, extra={"host_gib": SLOTS * BLOCK_BYTES / 2**30}) as running:
        yield running


def queue(running: Engine, what: str) -> float:
    (level,) = (
        each.value
        for each in running.llm.get_metrics()
        if each.name == "vllm:forebay_queue" and each.labels["what"] == what
    )
    return float(level)


def test_at_rest_nothing_is_queued_and_what_waited_for_a_slot_was_not_refused(running: Engine, pool: Path) -> None:
    running.answer(LONG)
    while running.core.scheduler.has_requests():
        running.step()
    assert (queue(running, "loads"), queue(running, "stores")) == (0, 0)
    running.check_at_rest()
    assert len(block_files(pool)) == 10 * len(LONG)
    assert running.metric("refused_blocks") == 0


def test_a_pool_that_answers_after_the_deadline_costs_recomputes(
    running: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = running.answer(LONG)
    running.make_cold()
    go_on, sound = threading.Event(), lookup._leading

    def slow(*asked: Any) -> int:
        go_on.wait()
        return sound(*asked)

    monkeypatch.setattr(lookup, "_leading", slow)
    monkeypatch.setattr(running.scheduler_side._lookup, "_deadline_ns", 50_000_000)
    with running.growth("lookups", "hit_blocks") as grown:
        assert running.answer(LONG) == answers
    assert grown == {"lookups": len(LONG), "hit_blocks": 0}
    assert running.metric("lookups", result="timed out") == len(LONG)
    go_on.set()
    monkeypatch.setattr(running.scheduler_side._lookup, "_deadline_ns", 30_000_000_000)
    running.make_cold()
    with running.growth("lookups", "hit_blocks") as grown:
        assert running.answer(LONG) == answers
    assert grown == {"lookups": len(LONG), "hit_blocks": 10 * len(LONG)}
    assert running.metric("lookups", result="failed") == 0
    running.check_at_rest()


def test_a_reset_is_not_held_up_by_the_deletion_of_files(
    running: Engine, pool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = running.answer(LONG)
    running.make_cold()
    assert block_files(pool)
    may_delete, sound = threading.Event(), setup._delete_from

    def slow(*asked: Any) -> None:
        assert may_delete.wait(120)
        sound(*asked)

    monkeypatch.setattr(setup, "_delete_from", slow)
    assert running.llm.reset_prefix_cache(reset_connector=True)
    hits = running.metric("hit_blocks")
    assert running.answer(LONG) == answers, "requests go on"
    assert running.metric("hit_blocks") == hits
    assert block_files(pool)
    may_delete.set()
    running.check_at_rest()
    assert running.llm.reset_prefix_cache(reset_connector=True)
    running.settle()
    assert not block_files(pool)


def test_vllm_does_not_reset_what_is_being_stored(running: Engine) -> None:
    """As docs/vllm.md says."""
    running.settle()
    for i in range(3):
        running.send(f"{i}", prompt(800 + i, 60 * B), max_tokens=50)
    while not running.scheduler_side.open_stores:
        running.step()
    assert not running.llm.reset_prefix_cache()
    with pytest.raises(RuntimeError, match="Failed to reset KV cache"):
        running.core.scheduler.reset_prefix_cache(reset_running_requests=True)
    running.finish()
    running.settle()
    assert running.llm.reset_prefix_cache()
    running.check_at_rest()


def test_a_number_that_shrinks_ends_no_server() -> None:
    """Prometheus raises, and vLLM ends its engine."""
    from forebay.connectors.vllm.metrics import ForebayMetrics

    registry = prometheus.CollectorRegistry()
    types = (prometheus.Counter, prometheus.Gauge, prometheus.Histogram)
    kinds = {kind: partial(kind, registry=registry) for kind in types}
    metrics = ForebayMetrics(SimpleNamespace(kv_transfer_config=None), kinds, ["engine"], {0: ["0"]})
    for change in (3, -1, 2):
        metrics.observe({"hit_blocks": change, "queue|loads": change})
    assert registry.get_sample_value("vllm:forebay_hit_blocks_total", {"engine": "0"}) == 5
    assert registry.get_sample_value("vllm:forebay_queue", {"engine": "0", "what": "loads"}) == 2
