"""Putting the two sides together: from options and vLLM's configuration to running objects, and to their end."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from forebay.assemble import StoreConfig, open_engine, open_tiers
from forebay.connectors.vllm.counts import Changes, flat
from forebay.connectors.vllm.device import KvDevice, KvPages, find_pages, open_device
from forebay.connectors.vllm.lookup import Lookup, Shard
from forebay.connectors.vllm.namespace import BlockForm, attention_form, namespace_of, weights_identity
from forebay.connectors.vllm.options import GIB, ConnectorOptions, Rank, digest_cache_path, store_config
from forebay.connectors.vllm.scheduler import SchedulerSide
from forebay.connectors.vllm.wire import Handshake
from forebay.connectors.vllm.worker import WorkerSide
from forebay.errors import ConfigError
from forebay.events import Totals
from forebay.hostpool import HostPool
from forebay.keys import namespace_key
from forebay.tiers.file import admin
from forebay.types import Namespace

log = logging.getLogger("forebay.connectors.vllm")

FORM = "connector/1"


def join_logs() -> None:
    """Have Forebay's lines shown where vLLM's are, which shows only loggers below its own name."""
    ours, theirs = logging.getLogger("forebay"), logging.getLogger("vllm")
    if not ours.handlers and theirs.handlers:
        for handler in theirs.handlers:
            ours.addHandler(handler)
        ours.setLevel(theirs.level)
        ours.propagate = theirs.propagate


class WorkerStack:
    """One rank's engine with everything it needs."""

    def __init__(
        self,
        options: ConnectorOptions,
        config: Any,
        kv: Any,
        kv_caches: Mapping[str, Any],
        rank: Rank,
        seed: str | None,
    ) -> None:
        """May read all weight files once. Raises ConfigError for what does not go together."""
        group = kv.kv_cache_groups[0]
        pages = find_pages(kv_caches, group.layer_names, kv.num_blocks)
        form = BlockForm(
            FORM, pages.block_bytes, group.kv_cache_spec.block_size, attention_form(config, group.layer_names)
        )
        weights = weights_identity(config, options, digest_cache_path(options, options.pool))
        namespace = namespace_of(config, kv, weights_digest=weights, form=form, rank=rank, seed=seed)
        store = store_config(options, rank)
        _log_limits(store, rank)
        self.handshake = Handshake(rank.rank, namespace)
        self.totals = Totals()
        self._changes = Changes()
        port = _Port(pages)
        self.engine = open_engine(store, namespace, port.open, emit=self.totals.add)
        self.side = WorkerSide(
            self.engine,
            port.device,
            namespace_key(namespace),
            lambda: _delete_stored(store, namespace),
            options.drain_s,
        )

    def take_numbers(self) -> dict[str, Any]:
        """What has changed since the last call, for `ForebayStats`."""
        side = self.side
        sums = flat(self.totals) | {
            "loads|complete": side.loads - side.loads_cut_short,
            "loads|cut short": side.loads_cut_short,
            "broken_workers": int(side.is_broken),
        }
        numbers: dict[str, Any] = dict(self._changes.take(sums))
        seconds = side.take_load_seconds()
        if seconds:
            numbers["load_seconds"] = seconds
        if numbers:
            numbers |= {"queue|loads": side.open_loads, "queue|stores": side.open_stores}
        return numbers

    def close(self) -> None:
        self.side.close()


class _Port:
    """Makes the device port over the pool that `open_engine` makes, and keeps hold of it."""

    def __init__(self, pages: KvPages) -> None:
        self._pages = pages
        self._device: KvDevice | None = None

    def open(self, pool: HostPool) -> KvDevice:
        self._device = open_device(self._pages, pool)
        return self._device

    @property
    def device(self) -> KvDevice:
        assert self._device is not None, "the engine is open, and its port with it"
        return self._device


@dataclass(frozen=True, slots=True)
class _RankStore:
    """Where a rank stores, and under which namespace."""

    store: StoreConfig
    namespace: Namespace

    def open(self) -> Shard:
        """Its tiers without the I/O threads that looking does not need."""
        slim = {"reads_in_flight": 1, "writes_in_flight": 1}
        tiers = tuple(
            msgspec.structs.replace(tier, options=tier.options | slim) if tier.kind == "file" else tier
            for tier in self.store.tiers
        )
        looking = msgspec.structs.replace(self.store, tiers=tiers)
        return Shard(namespace_key(self.namespace), open_tiers(looking, self.namespace))


class SchedulerStack:
    """The scheduler's side, with a view of every rank's shard."""

    def __init__(
        self, options: ConnectorOptions, handshakes: Sequence[Handshake], ranks: int, block_tokens: int
    ) -> None:
        if len(handshakes) != ranks:
            raise ConfigError(f"{len(handshakes)} of {ranks} workers have said what they store: start again")
        self._shards = [
            _RankStore(store_config(options, Rank(shake.rank, ranks)), shake.namespace) for shake in handshakes
        ]
        self._lookup = Lookup([shard.open() for shard in self._shards], options.lookup_deadline_s)
        self._changes = Changes()
        self.side = SchedulerSide(options, block_tokens, ranks, self._lookup)

    def forget(self) -> None:
        """Delete what the pool holds of this model, and never again find what may still be written. May block."""
        self.side.forget()
        for shard in self._shards:
            _delete_stored(shard.store, shard.namespace)

    def take_numbers(self) -> dict[str, Any]:
        asked, sides = self._lookup.counts, self.side.counts
        return dict(
            self._changes.take(
                {
                    "lookups|answered": asked.asked - asked.timed_out - asked.failed,
                    "lookups|timed out": asked.timed_out,
                    "lookups|failed": asked.failed,
                    "hit_blocks": sides.hit_blocks,
                    "missed_blocks": sides.missed_blocks,
                    "recomputed_blocks": sides.failed_blocks,
                }
            )
        )

    def close(self) -> None:
        self.side.close()


def _log_limits(store: StoreConfig, rank: Rank) -> None:
    capacity_bytes = sum(tier.options.get("capacity_bytes", 0) for tier in store.tiers)
    log.info(
        "rank %d of %d: %.2f GiB of DRAM and %.2f GiB in the pool; all ranks together %.2f and %.2f GiB",
        rank.rank, rank.ranks, store.host_bytes / GIB, capacity_bytes / GIB,
        store.host_bytes * rank.ranks / GIB, capacity_bytes * rank.ranks / GIB,
    )  # fmt: skip


def _delete_stored(store: StoreConfig, namespace: Namespace) -> None:
    """Delete what the tiers hold of this namespace; what stays is said in the log."""
    for tier in store.tiers:
        if tier.kind == "file":
            _delete_from([Path(root["path"]) for root in tier.options["roots"]], namespace)
        else:
            log.warning("blocks in tier %s stay: this engine no longer finds them, another may", tier.kind)


def _delete_from(roots: Sequence[Path], namespace: Namespace) -> None:
    digest = namespace_key(namespace).hex()
    if not any((root / digest).is_dir() for root in roots):
        return
    try:
        report = admin.purge(roots, digest)
    except (ConfigError, OSError) as error:
        log.warning("blocks stay: this engine no longer finds them, another may (%s)", error)
    else:
        log.info("deleted %d blocks, %.2f GiB", report.removed_blocks, report.removed_bytes / GIB)
