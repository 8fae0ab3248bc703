"""In which parts an engine's KV is stored, and what of a rank's pages belongs to each.

By default a part is all that a rank has: simple and large, but another tensor-parallel size finds nothing. With KV
heads as the unit a rank stores several parts, and an engine with fewer ranks reads the parts of several others:

    8 KV heads, shard_kv_heads=1     tp 8: rank r stores head r      tp 4: rank r reads and stores heads 2r and 2r+1
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from forebay.connectors.vllm.device import KvPages, find_pages
from forebay.connectors.vllm.options import ConnectorOptions, HeadRange, Part
from forebay.errors import ConfigError

_HEAD_AXIS = 1
"""Of vLLM's logical view [blocks, heads, tokens, content] of a layer."""


@dataclass(frozen=True, slots=True)
class RankGeometry:
    """Where a rank stands in its engine. vLLM counts the ranks of one pipeline stage in a row."""

    rank: int
    tensor_parallel: int
    pipeline_parallel: int
    kv_heads: int
    """Of this rank."""
    total_kv_heads: int
    """Of the model. With fewer of them than ranks, some ranks hold the same."""

    @property
    def ranks(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel


def geometry_of(config: Any, kv: Any) -> RankGeometry:
    """From vLLM's VllmConfig and the KVCacheConfig of this rank."""
    parallel, spec = config.parallel_config, kv.kv_cache_groups[0].kv_cache_spec
    return RankGeometry(
        parallel.rank,
        parallel.tensor_parallel_size,
        parallel.pipeline_parallel_size,
        spec.num_kv_heads,
        config.model_config.get_total_num_kv_heads(),
    )


def check_sharding(config: Any, kv: Any, options: ConnectorOptions) -> None:
    """Raises ConfigError where KV cannot be stored by heads, as it is asked for."""
    if not options.shard_kv_heads:
        return
    spec, geometry, unit = kv.kv_cache_groups[0].kv_cache_spec, geometry_of(config, kv), options.shard_kv_heads
    reason = ""
    if type(spec).__name__ != "FullAttentionSpec" or getattr(spec, "num_head_slots", None) is not None:
        reason = "this KV cache does not keep its heads apart"
    elif geometry.kv_heads * geometry.tensor_parallel != geometry.total_kv_heads:
        reason = f"{geometry.total_kv_heads} KV heads over {geometry.tensor_parallel} ranks are not spread evenly"
    elif geometry.kv_heads % unit:
        reason = f"a rank has {geometry.kv_heads} KV heads, which is no multiple of {unit}"
    if reason:
        raise ConfigError(f"'shard_kv_heads' is {unit}, but {reason}: leave it away, or choose another number")


def parts_of(geometry: RankGeometry, shard_kv_heads: int) -> tuple[Part, ...]:
    """The parts that one rank stores, in the order of their heads."""
    if not shard_kv_heads:
        name = f"rank{geometry.rank}of{geometry.ranks}" if geometry.ranks > 1 else ""
        return (Part(geometry.rank, geometry.ranks, name),)
    stage, tensor_rank = divmod(geometry.rank, geometry.tensor_parallel)
    parts_a_stage = geometry.total_kv_heads // shard_kv_heads
    count = parts_a_stage * geometry.pipeline_parallel
    start = tensor_rank * geometry.kv_heads
    parts = []
    for first in range(start, start + geometry.kv_heads, shard_kv_heads):
        heads = HeadRange(first, first + shard_kv_heads)
        name = f"kvheads{first}to{heads.end - 1}of{geometry.total_kv_heads}"
        if geometry.pipeline_parallel > 1:
            name += f"-stage{stage}of{geometry.pipeline_parallel}"
        parts.append(Part(stage * parts_a_stage + first // shard_kv_heads, count, name, heads))
    return tuple(parts)


def pages_of(
    part: Part,
    geometry: RankGeometry,
    kv_caches: Mapping[str, torch.Tensor],
    layer_names: Sequence[str],
    num_blocks: int,
) -> KvPages:
    """What of a rank's registered caches belongs to a part. Raises ConfigError as `find_pages` does."""
    if part.heads is None:
        return find_pages(kv_caches, layer_names, num_blocks)
    start = part.heads.first - geometry.rank % geometry.tensor_parallel * geometry.kv_heads
    length = part.heads.end - part.heads.first
    heads = {name: cache.narrow(_HEAD_AXIS, start, length) for name, cache in kv_caches.items()}
    return find_pages(heads, layer_names, num_blocks, by_head=True)
