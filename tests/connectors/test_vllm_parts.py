"""KV stored by heads: what one number of ranks wrote, another reads. Geometry and real copies."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forebay.connectors.vllm.device import CpuDevice, KvPages
from forebay.connectors.vllm.options import ConnectorOptions, HeadRange, Part, store_config
from forebay.connectors.vllm.parts import RankGeometry, check_sharding, pages_of, parts_of
from forebay.errors import ConfigError
from forebay.hostpool import HostPool
from forebay.types import BlockKey, DeviceBlock, Job, JobId, JobKind, Slot

LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 2, 5, 8, 4, 6
NAMES = [f"layers.{i}" for i in range(LAYERS)]


def geometry(rank: int, tensor_parallel: int, pipeline_parallel: int = 1) -> RankGeometry:
    return RankGeometry(rank, tensor_parallel, pipeline_parallel, max(1, HEADS // tensor_parallel), HEADS)


def test_a_rank_is_one_part_unless_heads_are_asked_for() -> None:
    assert parts_of(geometry(0, 1), 0) == (Part(),)
    assert parts_of(geometry(3, 2, 2), 0) == (Part(3, 4, "rank3of4"),)


@pytest.mark.parametrize("tensor_parallel", [1, 2, 4, 8])
@pytest.mark.parametrize("pipeline_parallel", [1, 2])
def test_parts_of_heads_are_the_same_for_every_number_of_ranks(tensor_parallel: int, pipeline_parallel: int) -> None:
    ranks = range(tensor_parallel * pipeline_parallel)
    parts = [part for rank in ranks for part in parts_of(geometry(rank, tensor_parallel, pipeline_parallel), 1)]
    assert [part.index for part in parts] == list(range(HEADS * pipeline_parallel))
    assert {part.count for part in parts} == {HEADS * pipeline_parallel}
    assert [part.heads for part in parts] == [HeadRange(h, h + 1) for h in range(HEADS)] * pipeline_parallel
    assert len({part.name for part in parts}) == len(parts)
    assert parts == [part for stage in range(pipeline_parallel) for part in _alone(stage, pipeline_parallel)]


def _alone(stage: int, pipeline_parallel: int) -> tuple[Part, ...]:
    return parts_of(geometry(stage, 1, pipeline_parallel), 1)


def rank_caches(order: str, whole: list[torch.Tensor], rank: int, tensor_parallel: int) -> dict[str, torch.Tensor]:
    """A rank's caches in vLLM's physical order, filled with its heads of `whole`, [blocks, heads, tokens, content]."""
    heads = HEADS // tensor_parallel
    lengths = {"L": LAYERS, "B": BLOCKS, "H": heads, "N": TOKENS, "C": CONTENT}
    memory = torch.zeros([lengths[axis] for axis in order])
    logical = memory.permute([order.index(axis) for axis in "LBHNC"])
    for cache, layer in zip(logical, whole, strict=True):
        cache.copy_(layer[:, rank * heads : (rank + 1) * heads])
    return dict(zip(NAMES, logical, strict=True))


def copy_all(kind: JobKind, pages: KvPages, pool: HostPool) -> None:
    """Block b of these pages <-> slot b."""
    device = CpuDevice(pages, pool)
    keys = tuple(BlockKey(bytes([block]) * 32) for block in range(BLOCKS))
    slots = tuple(Slot(block) for block in range(BLOCKS))
    device.submit(Job(JobId(1), kind, "host", keys, slots, 0), [DeviceBlock(block) for block in range(BLOCKS)])
    device.drain()
    device.close()


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
@pytest.mark.parametrize(
    ("unit", "writers", "readers"),
    [(1, 8, 4), (1, 4, 8), (1, 2, 1), (1, 8, 1), (1, 1, 2), (2, 4, 2), (2, 4, 1), (2, 1, 4), (4, 2, 1), (4, 1, 2)],
)
def test_what_one_number_of_ranks_stored_another_reads(order: str, unit: int, writers: int, readers: int) -> None:
    whole = [torch.rand((BLOCKS, HEADS, TOKENS, CONTENT)) for _ in range(LAYERS)]
    stored: dict[str, HostPool] = {}
    """What lies in the pool, by the directory it lies in."""
    for rank in range(writers):
        caches = rank_caches(order, whole, rank, writers)
        for part in parts_of(geometry(rank, writers), unit):
            pool = HostPool(BLOCKS, unit * LAYERS * TOKENS * CONTENT * 4)
            copy_all(JobKind.COPY_OUT, pages_of(part, geometry(rank, writers), caches, NAMES, BLOCKS), pool)
            stored[part.name] = pool
    for rank in range(readers):
        caches = rank_caches(order, [torch.zeros_like(layer) for layer in whole], rank, readers)
        for part in parts_of(geometry(rank, readers), unit):
            copy_all(JobKind.COPY_IN, pages_of(part, geometry(rank, readers), caches, NAMES, BLOCKS), stored[part.name])
        expected = rank_caches(order, whole, rank, readers)
        assert all(torch.equal(caches[name], expected[name]) for name in NAMES)


class FullAttentionSpec(SimpleNamespace):
    pass


class MLAAttentionSpec(SimpleNamespace):
    pass


def served(spec: Any, tensor_parallel: int = 1, total_kv_heads: int = HEADS) -> tuple[Any, Any]:
    parallel = SimpleNamespace(rank=0, tensor_parallel_size=tensor_parallel, pipeline_parallel_size=1)
    model = SimpleNamespace(get_total_num_kv_heads=lambda: total_kv_heads)
    groups = [SimpleNamespace(kv_cache_spec=spec)]
    return SimpleNamespace(parallel_config=parallel, model_config=model), SimpleNamespace(kv_cache_groups=groups)


def test_heads_that_cannot_be_told_apart_or_do_not_divide_are_refused(tmp_path: Path) -> None:
    options = ConnectorOptions(pool=str(tmp_path), capacity_gib=1, shard_kv_heads=2)
    check_sharding(*served(FullAttentionSpec(num_kv_heads=4), tensor_parallel=2), options)
    for config_and_kv, words in [
        (served(MLAAttentionSpec(num_kv_heads=8)), "apart"),
        (served(FullAttentionSpec(num_kv_heads=8, num_head_slots=1)), "apart"),
        (served(FullAttentionSpec(num_kv_heads=1), tensor_parallel=16), "evenly"),
        (served(FullAttentionSpec(num_kv_heads=1), tensor_parallel=8), "no multiple"),
    ]:
        with pytest.raises(ConfigError, match=words):
            check_sharding(*config_and_kv, options)
    part = parts_of(geometry(1, 4), 2)[0]
    assert store_config(options, part).tiers[0].options["roots"] == [{"path": f"{tmp_path}-kvheads2to3of8"}]


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ("", ""),
        ('mode = "off"', ""),
        ('mode = "on"', "set 'load_or_compute'"),
        ("prefill_tokens_per_s = 1000.0", "min_load_tokens"),
    ],
)
def test_a_choice_that_nobody_would_make_is_refused(tmp_path: Path, section: str, words: str) -> None:
    path = tmp_path / "store.toml"
    path.write_text(f"host_bytes = 1000000\n[engine.load_or_compute]\n{section}\n")
    options = ConnectorOptions(config=str(path))
    if not words:
        assert store_config(options, Part()).host_bytes == 1_000_000
        return
    with pytest.raises(ConfigError, match=words) as refused:
        store_config(options, Part())
    assert "\n" not in str(refused.value)
