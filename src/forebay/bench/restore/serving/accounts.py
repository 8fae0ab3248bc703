"""Where a server says that cached prompt tokens were, by the counters in its `/metrics`."""

from __future__ import annotations

from collections.abc import Mapping

from forebay.bench.restore.serving.endpoint import Endpoint, Unanswered
from forebay.testing.vllm_server import parse_metrics

_COUNTERS = {
    "vllm:prompt_tokens_cached_by_source": "source",
    "sglang:cached_tokens": "cache_source",
}
"""Counters of cached prompt tokens, and the label that names where they were: vLLM 0.32, SGLang 0.5."""
_LIMIT_S = 30.0


def cached_so_far(endpoint: Endpoint) -> Mapping[str, float] | None:
    """Tokens by place, since the server began. None where it does not count them."""
    try:
        metrics = parse_metrics(endpoint.ask("GET", "/metrics", limit_s=_LIMIT_S).decode(errors="replace"))
    except (Unanswered, ValueError):
        return None
    found: dict[str, float] = {}
    for sample in metrics.samples:
        label = _COUNTERS.get(sample.name.removesuffix("_total"))
        if label is not None and (place := sample.labels.get(label)):
            found[place] = found.get(place, 0.0) + sample.value
    has_counter = any(name.removesuffix("_total") in _COUNTERS for name in metrics.names)
    return found if found or has_counter else None


def cached_since(before: Mapping[str, float] | None, after: Mapping[str, float] | None) -> Mapping[str, int] | None:
    """Tokens by place, of those places that gave any. None where that is not known."""
    if before is None or after is None:
        return None
    return {place: int(count - before.get(place, 0)) for place, count in after.items() if count > before.get(place, 0)}
