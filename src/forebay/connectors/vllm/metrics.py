"""What the connector counts, as vLLM carries it to its log and its `/metrics`.

A step's changes travel as flat numbers, `name` or `name|label value|...`, which add up over ranks and steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (  # type: ignore[import-not-found,unused-ignore]
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from forebay.connectors.vllm.counts import COUNTERS, GAUGES, LOAD_SECONDS, SECONDS_BUCKETS, Metric, summary


@dataclass
class ForebayStats(KVConnectorStats):  # type: ignore[misc,unused-ignore]
    """`data`: flat numbers, and under `load_seconds` a list of durations."""

    data: dict[str, Any] = field(default_factory=dict)

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> ForebayStats:
        for name, value in other.data.items():
            self.data[name] = self.data[name] + value if name in self.data else value
        return self

    def reduce(self) -> dict[str, int | float]:
        return summary(self.data)

    def is_empty(self) -> bool:
        return not self.data  # a level of 0 is news


class ForebayMetrics(KVConnectorPromMetrics):  # type: ignore[misc,unused-ignore]
    """Prometheus metrics `vllm:forebay_*`, for each engine of an API server."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {metric.name: self._make(metric_types[Counter], metric) for metric in COUNTERS}
        self._gauges = {
            metric.name: self._make(metric_types[Gauge], metric, multiprocess_mode="mostrecent") for metric in GAUGES
        }
        self._load_seconds = self._make(metric_types[Histogram], LOAD_SECONDS, buckets=SECONDS_BUCKETS)

    def _make(self, kind: Any, metric: Metric, **more: Any) -> Any:
        return kind(
            name=f"vllm:forebay_{metric.name}",
            documentation=metric.documentation,
            labelnames=[*self._labelnames, *metric.labels],
            **more,
        )

    def observe(self, transfer_stats_data: Mapping[str, Any], engine_idx: int = 0) -> None:
        engine = self.per_engine_labelvalues[engine_idx]
        for flat_name, value in transfer_stats_data.items():
            name, *labels = flat_name.split("|")
            if name == LOAD_SECONDS.name:
                self._observe_seconds(engine, value)
            elif name in self._gauges:
                self._gauges[name].labels(*engine, *labels).set(value)
            elif name in self._counters and value > 0:  # Prometheus raises below 0, and vLLM then ends the engine
                self._counters[name].labels(*engine, *labels).inc(value)

    def _observe_seconds(self, engine: Sequence[object], seconds: Sequence[float]) -> None:
        for each in seconds:
            self._load_seconds.labels(*engine).observe(each)
