"""What the server's helper reads in `/metrics`."""

from __future__ import annotations

from forebay.testing.vllm_server import parse_metrics

TEXT = """\
# HELP vllm:forebay_hit_blocks_total Blocks that lookups found.
# TYPE vllm:forebay_hit_blocks_total counter
vllm:forebay_hit_blocks_total{engine="0",model_name="/a/\\"b\\", c=d"} 41.0
vllm:forebay_hit_blocks_total{engine="1",model_name="m"} 1.0
# TYPE vllm:forebay_hit_blocks_created gauge
# TYPE vllm:forebay_queue gauge
vllm:forebay_queue{what="loads"} 2
# TYPE vllm:forebay_load_seconds histogram
vllm:forebay_load_seconds_bucket{le="+Inf"} 3.0
vllm:forebay_load_seconds_sum 1.5e-02
up NaN
not a sample
"""


def test_metrics_are_read_by_name_and_labels() -> None:
    metrics = parse_metrics(TEXT)
    assert metrics.names == {"vllm:forebay_hit_blocks", "vllm:forebay_queue", "vllm:forebay_load_seconds"}
    assert metrics.total("vllm:forebay_hit_blocks") == 42
    assert metrics.total("vllm:forebay_hit_blocks", engine="1") == 1
    assert metrics.total("vllm:forebay_hit_blocks", model_name='/a/\\"b\\", c=d') == 41
    assert metrics.total("vllm:forebay_queue", what="stores") == 0
    assert metrics.total("vllm:forebay_load_seconds_sum") == 0.015
