"""Putting the two sides together: from options and vLLM's configuration to running objects, and to their end."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from forebay.assemble import StoreConfig, open_chooser, open_engine, open_tiers
from forebay.connectors.vllm.adapters import Adapters
from forebay.connectors.vllm.counts import Changes, flat
from forebay.connectors.vllm.device import KvDevice, KvPages, open_device
from forebay.connectors.vllm.lookup import Lookup, Shard
from forebay.connectors.vllm.namespace import BlockForm, attention_form, namespace_of, weights_identity
from forebay.connectors.vllm.options import GIB, ConnectorOptions, Part, digest_cache_path, store_config
from forebay.connectors.vllm.parts import RankGeometry, check_sharding, geometry_of, pages_of, parts_of
from forebay.connectors.vllm.rank import RankSide
from forebay.connectors.vllm.scheduler import SchedulerSide
from forebay.connectors.vllm.wire import Handshake, StoredPart
from forebay.connectors.vllm.worker import WorkerSide
from forebay.engine import Engine
from forebay.errors import ConfigError
from forebay.events import Totals
from forebay.hostpool import HostPool
from forebay.keys import namespace_key
from forebay.tiers.file import admin
from forebay.types import Happening, Namespace

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
    """One rank: an engine for each of its parts, with everything they need."""

    def __init__(
        self, options: ConnectorOptions, config: Any, kv: Any, kv_caches: Mapping[str, Any], seed: str | None
    ) -> None:
        """May read all weight files once. Raises ConfigError for what does not go together."""
        check_sharding(config, kv, options)
        maker = _PartMaker(options, config, kv, kv_caches, seed)
        geometry = geometry_of(config, kv)
        self.totals = Totals()
        self._changes = Changes()
        self.engines: list[Engine] = []
        sides: list[WorkerSide] = []
        stored: list[StoredPart] = []
        for part in parts_of(geometry, options.shard_kv_heads):
            made = maker.make(part, geometry, self.totals)
            self.engines.append(made.engine)
            sides.append(made.side)
            stored.append(StoredPart(part, made.namespace))
        self.side = RankSide(sides)
        self.handshake = Handshake(tuple(stored))

    def take_numbers(self) -> dict[str, Any]:
        """What has changed since the last call, for `ForebayStats`."""
        parts = self.side.parts
        cut_short = sum(part.loads_cut_short for part in parts)
        sums = flat(self.totals) | {
            "loads|complete": sum(part.loads for part in parts) - cut_short,
            "loads|cut short": cut_short,
            "broken_workers": int(self.side.is_broken),
        }
        for engine in self.engines:
            _add_events(sums, engine.happened())
        numbers: dict[str, Any] = dict(self._changes.take(sums))
        seconds = self.side.take_load_seconds()
        if seconds:
            numbers["load_seconds"] = seconds
        return numbers

    def close(self) -> None:
        self.side.close()


@dataclass(frozen=True, slots=True)
class _MadePart:
    engine: Engine
    side: WorkerSide
    namespace: Namespace


class _PartMaker:
    """What the parts of a rank have in common, found out once."""

    def __init__(
        self, options: ConnectorOptions, config: Any, kv: Any, kv_caches: Mapping[str, Any], seed: str | None
    ) -> None:
        self._options, self._config, self._kv, self._kv_caches, self._seed = options, config, kv, kv_caches, seed
        self._group = kv.kv_cache_groups[0]
        self._attention = attention_form(config, self._group.layer_names)
        self._weights = weights_identity(config, options, digest_cache_path(options, options.pool or options.config))

    def make(self, part: Part, geometry: RankGeometry, totals: Totals) -> _MadePart:
        options = self._options
        pages = pages_of(part, geometry, self._kv_caches, self._group.layer_names, self._kv.num_blocks)
        name = f"{FORM}/{pages.kernel_blocks}" + (" by head" if part.heads is not None else "")
        form = BlockForm(name, pages.block_bytes, self._group.kv_cache_spec.block_size, self._attention)
        namespace = namespace_of(
            self._config, self._kv, weights_digest=self._weights, form=form, part=part, seed=self._seed
        )
        store = store_config(options, part)
        _log_limits(store, part)
        port = _Port(pages)
        engine = open_engine(store, namespace, port.open, emit=totals.add)
        root = namespace_key(namespace)
        side = WorkerSide(engine, port.device, root, partial(_delete_stored, store, namespace), options.drain_s)
        return _MadePart(engine, side, namespace)


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
class _PartStore:
    """Where a part is stored, and under which namespace."""

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
    """The scheduler's side, with a view of every part."""

    def __init__(self, options: ConnectorOptions, handshakes: Sequence[Handshake], block_tokens: int) -> None:
        stored = [each for shake in handshakes for each in shake.parts]
        if sorted(each.part.index for each in stored) != list(range(stored[0].part.count)):
            raise ConfigError(f"only {len(stored)} of {stored[0].part.count} parts have a worker: start again")
        shards = [_PartStore(store_config(options, each.part), each.namespace).open() for each in stored]
        self._lookup = Lookup(shards, options.lookup_deadline_s)
        self._changes = Changes()
        self._told_queue: dict[str, int] = {}
        chooser = open_chooser(options.load_or_compute) if options.load_or_compute else None
        self.side = SchedulerSide(options, block_tokens, len(stored), self._lookup, Adapters(), chooser=chooser)

    def take_numbers(self) -> dict[str, Any]:
        """What has changed since the last call, for `ForebayStats`."""
        asked, sides = self._lookup.counts, self.side.counts
        sums: dict[str, float] = {
            "lookups|answered": asked.answered,
            "lookups|timed out": asked.timed_out,
            "lookups|failed": asked.failed,
            "hit_blocks": sides.hit_blocks,
            "missed_blocks": sides.missed_blocks,
            "recomputed_blocks": sides.failed_blocks,
        }
        _add_events(sums, self._lookup.happened())
        numbers = self._changes.take(sums)
        queue = {"queue|loads": self.side.open_loads, "queue|stores": self.side.open_stores}
        if queue != self._told_queue:
            numbers |= queue
            self._told_queue = queue
        return dict(numbers)

    def close(self) -> None:
        self.side.close()


def _add_events(sums: dict[str, float], happened: Mapping[Happening, int]) -> None:
    for event, times in happened.items():
        name = f"tier_events|{event.tier}|{event.place}|{event.kind}"
        sums[name] = sums.get(name, 0) + times


def _log_limits(store: StoreConfig, part: Part) -> None:
    capacity_bytes = sum(tier.options.get("capacity_bytes", 0) for tier in store.tiers)
    log.info(
        "part %d of %d: %.2f GiB of DRAM and %.2f GiB in the pool; all parts together %.2f and %.2f GiB",
        part.index + 1, part.count, store.host_bytes / GIB, capacity_bytes / GIB,
        store.host_bytes * part.count / GIB, capacity_bytes * part.count / GIB,
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
        report = admin.purge(roots, admin.Selection(namespace=digest))
    except (ConfigError, OSError) as error:
        log.warning("blocks stay: this engine no longer finds them, another may (%s)", error)
    else:
        log.info("deleted %d blocks, %.2f GiB", report.removed_blocks, report.removed_bytes / GIB)
