"""Forebay as a secondary tier of vLLM's native offloading (`TieringOffloadingSpec`).

    {"type": "forebay", "module_path": "forebay.connectors.vllm.tier", "pool": "/mnt/nvme/pool", "capacity_gib": 500}

vLLM copies between the device and its own pinned DRAM; this tier moves blocks between that DRAM and a pool of files.
All of it is called on the scheduler's thread and returns at once: the work is done by `Shelf`'s jobs. vLLM's word for
what is stored is a chunk: one row of its DRAM region, with the shards of all ranks one after the other.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from forebay.assemble import StoreConfig, open_tiers
from forebay.connectors.vllm.namespace import (
    BlockForm,
    attention_form,
    check_hashing,
    check_served,
    namespace_of,
    weights_identity,
)
from forebay.connectors.vllm.options import GIB, digest_cache_path
from forebay.connectors.vllm.region import HugePages, RegionPool
from forebay.connectors.vllm.setup import join_logs
from forebay.connectors.vllm.shelf import Presence, Shelf, ShelfOptions
from forebay.connectors.vllm.tier_options import TierOptions, make_eviction, read_tier_options
from forebay.connectors.vllm.turns import ShortTurns
from forebay.errors import ConfigError
from forebay.events import Totals
from forebay.executor import ThreadExecutor
from forebay.keys import derived_key, namespace_key
from forebay.policies.admit_all import AdmitAll
from forebay.types import BlockKey, JobKind, Namespace, Outcome, Slot

log = logging.getLogger("forebay.connectors.vllm.tier")

_RESULTS = {
    Presence.HELD: LookupResult.HIT,
    Presence.ABSENT: LookupResult.MISS,
    Presence.ASKING: LookupResult.RETRY,
}


class Metric:
    """Names in vLLM's /metrics. Hits, bytes and seconds of each tier are vLLM's own, labelled with the tier's type."""

    FAILED = "vllm:forebay_tier_failed_blocks"
    DROPPED = "vllm:forebay_tier_dropped_blocks"
    REFUSED = "vllm:forebay_tier_refused_blocks"
    USED = "vllm:forebay_tier_used_bytes"
    EVENTS = "vllm:forebay_tier_events"
    OPEN_JOBS = "vllm:forebay_tier_open_jobs"


class ForebayTier(SecondaryTierManager):  # type: ignore[misc,unused-ignore]
    """See `SecondaryTierManager` for what vLLM promises, and asks, at each call. vLLM 0.32 calls on one thread."""

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **config: Any,
    ) -> None:
        """Raises ConfigError for bad options, and for an engine whose blocks cannot be served exactly."""
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        join_logs()
        options = read_tier_options(config)
        self.locality = Locality(options.locality) if options.locality else None
        self._pool = RegionPool(primary_kv_view)
        namespace = _namespace(_find_configs(), offloading_spec, options, self._pool.block_bytes)
        self._root_key = namespace_key(namespace)
        self._totals = Totals()
        self._told: Counter[tuple[str, tuple[str, ...]]] = Counter()
        self._told_levels: dict[str, int] = {}
        self._sent: dict[int, _Sent] = {}
        self._shelf = _open_shelf(options, namespace, self._pool, self._totals)
        self._huge_pages = HugePages(primary_kv_view)
        self._turns = ShortTurns(options.turn_s)
        log.info(
            "pool %s: %.2f GiB of it used, %.2f GiB at most for all ranks together, in blocks of %d bytes (%d tokens)",
            ", ".join(options.roots), self._shelf.used_bytes / GIB, options.capacity_gib,
            namespace.block_bytes, namespace.block_tokens,
        )  # fmt: skip

    # --- lookups

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        return _RESULTS[self._shelf.look_up(self._block_key(key))]

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._shelf.ask()

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._shelf.accessed(map(self._block_key, keys))

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Blocks that vLLM served from its device or DRAM were used too, and are not to be evicted here before others.

        vLLM keeps a request's keys with their positions in the context, under a private name; a version that does not
        leaves the order to stores and loads.
        """
        positions: dict[OffloadKey, int] = getattr(req_context, "_offload_key_positions", {})
        self._shelf.requested(map(self._block_key, sorted(positions, key=positions.__getitem__)))

    # --- jobs

    def submit_store(self, job_metadata: TransferJob) -> None:
        keys, slots = self._note_job(job_metadata)
        self._shelf.store(job_metadata.job_id, keys, slots)

    def submit_load(self, job_metadata: TransferJob, expedited: bool = False) -> None:
        """`expedited` is of vLLM 0.33; loads never queue behind stores here."""
        keys, slots = self._note_job(job_metadata)
        self._turns.begin()
        self._shelf.load(job_metadata.job_id, keys, slots)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        results: list[JobResult] = []
        for ended in self._shelf.poll():
            sent = self._sent.pop(ended.task)
            if sent.is_load:
                self._turns.end()
            good = tuple(key for key, own in sent.keys.items() if own not in ended.failed)
            results.append(
                JobResult(
                    job_id=ended.task,
                    success=not ended.failed,
                    successful_keys=good if ended.failed and sent.is_load else None,
                    transfer_time=ended.busy_ns / 1e9,
                    transfer_bytes=len(good) * self._pool.block_bytes,
                )
            )
        return results

    def drain_jobs(self) -> None:
        self._shelf.drain()

    def shutdown(self) -> None:
        """Finish what was submitted, then let go of vLLM's memory, which it unmaps next."""
        self._huge_pages.close()
        self._shelf.close()
        self._turns.close()
        self._pool.release()

    # --- metrics

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        return {
            Metric.FAILED: OffloadingCounterMetadata("Blocks that a job did not get through.", ("kind", "outcome")),
            Metric.DROPPED: OffloadingCounterMetadata("Blocks that left the tier, by reason.", ("reason",)),
            Metric.REFUSED: OffloadingCounterMetadata("Blocks that the tier did not take, by reason.", ("reason",)),
            Metric.USED: OffloadingGaugeMetadata("Bytes that blocks occupy in the pool, headers included."),
            Metric.EVENTS: OffloadingCounterMetadata(
                "What happened to a root of the pool (by its place in the list), by kind: EIO, hung, vanished, ...",
                ("root", "kind"),
            ),
            Metric.OPEN_JOBS: OffloadingGaugeMetadata("Jobs in flight or in the queue: reads, writes, lookups."),
        }

    def get_stats(self) -> OffloadingConnectorStats:
        """What has changed since the last call, which comes every step."""
        stats = OffloadingConnectorStats()
        counted = _counted(self._totals)
        for event, times in self._shelf.happened().items():
            counted[Metric.EVENTS, (event.place, event.kind)] += times
        for (name, labels), blocks in counted.items():
            if blocks > self._told[name, labels]:
                stats.increase_counter(name, blocks - self._told[name, labels], labels)
        self._told = counted
        gauges = {Metric.USED: self._shelf.used_bytes, Metric.OPEN_JOBS: self._shelf.open_jobs}
        for name, level in gauges.items():
            if level != self._told_levels.get(name):
                stats.set_gauge(name, level)
        self._told_levels = gauges
        return stats

    # --- keys

    def _note_job(self, job: TransferJob) -> tuple[list[BlockKey], list[Slot]]:
        own = {key: self._block_key(key) for key in job.keys}
        self._sent[job.job_id] = _Sent(own, job.is_promotion)
        return list(own.values()), [Slot(int(chunk)) for chunk in job.chunk_ids]

    def _block_key(self, key: OffloadKey) -> BlockKey:
        """vLLM's keys (a hash over all tokens so far, then the cache group) say nothing of the model; ours must."""
        return derived_key(self._root_key, key)


forebay = ForebayTier
"""The name by which `"type": "forebay"` finds the class."""


@dataclass(frozen=True, slots=True)
class _Sent:
    """A job of vLLM that has not been reported back."""

    keys: Mapping[OffloadKey, BlockKey]
    is_load: bool


@dataclass(frozen=True, slots=True)
class _Configs:
    engine: VllmConfig
    kv_cache: KVCacheConfig


def _find_configs() -> _Configs:
    """The configuration of the engine that is being built, from the constructor of its connector, up the stack.

    vLLM gives a tier only a digest of it, without rope, quantisation, overrides and hash settings, and a namespace
    that is blind to those would serve one model's KV to another. So it is taken from where it is; if a later vLLM
    builds its connector otherwise, nothing is served rather than something wrong.
    """
    frame = inspect.currentframe()
    while frame is not None:
        engine, kv_cache = frame.f_locals.get("vllm_config"), frame.f_locals.get("kv_cache_config")
        if isinstance(engine, VllmConfig) and isinstance(kv_cache, KVCacheConfig):
            return _Configs(engine, kv_cache)
        frame = frame.f_back
    raise ConfigError("this vLLM does not build its connector in a way that Forebay knows: use 0.32 or 0.33")


def _namespace(configs: _Configs, spec: OffloadingSpec, options: TierOptions, block_bytes: int) -> Namespace:
    """A row of the region holds the shards of all ranks, so the whole engine is one shard; how many there are is in
    the layout."""
    engine, kv_cache = configs.engine, configs.kv_cache
    seed = os.environ.get("PYTHONHASHSEED")
    check_served(engine, kv_cache)
    check_hashing(engine, seed)
    group = kv_cache.kv_cache_groups[0]
    form = BlockForm(
        name=f"native/1 canonical={spec.config.canonical_layout} replicated={spec.replicated_layout}",
        block_bytes=block_bytes,
        block_tokens=spec.config.groups[0].tokens_per_block * spec.blocks_per_chunk,
        attention=attention_form(engine, group.layer_names),
    )
    weights = weights_identity(engine, options, digest_cache_path(options, options.roots[0]))
    return namespace_of(engine, kv_cache, weights_digest=weights, form=form, seed=seed)


def _open_shelf(options: TierOptions, namespace: Namespace, pool: RegionPool, totals: Totals) -> Shelf:
    store = StoreConfig.embedded(
        options.roots,
        host_bytes=0,  # vLLM's region stands in for the host pool
        capacity_bytes=int(options.capacity_gib * GIB),
        shared=options.shared,
        **options.file,
    )
    (tier,) = open_tiers(store, namespace).values()
    return Shelf(
        pool,
        tier,
        partial(make_eviction, options),
        AdmitAll(),
        ThreadExecutor(),
        totals.add,
        ShelfOptions(lookup_deadline_s=options.lookup_deadline_s),
    )


def _counted(totals: Totals) -> Counter[tuple[str, tuple[str, ...]]]:
    """Totals so far, by metric and labels. "Not there" is an answer to a lookup, and a failure of a read."""
    counted: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for (_, kind, outcome), blocks in totals.failures.items():
        if kind is not JobKind.PROBE or outcome is Outcome.FAILED:
            counted[Metric.FAILED, (kind.value, outcome.value)] += blocks
    for (_, reason), blocks in totals.dropped.items():
        counted[Metric.DROPPED, (reason.value,)] += blocks
    for (_, reason), blocks in totals.refused.items():
        counted[Metric.REFUSED, (reason.value,)] += blocks
    return counted
