"""Configuration -> engine. The only place where names become objects.

A tier or policy is named by its module in `forebay.tiers` or `forebay.policies` (`file`, `lrfu`), or by the dotted path
of a module anywhere. Such a module has an `Options` struct and a `build` function.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import msgspec

from forebay.engine import Engine, EngineOptions, check_options
from forebay.errors import ConfigError
from forebay.events import EventSink, both
from forebay.executor import ThreadExecutor
from forebay.hostpool import HostPool, slot_bytes
from forebay.journal import Journal, JournalOptions
from forebay.keys import namespace_key
from forebay.ports import AdmissionPolicy, DevicePort, EvictionPolicy, Executor, Tier
from forebay.stage import Policies
from forebay.types import HOST, Namespace, Traffic
from forebay.workloads import Workload


class Named(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A module by name, and its options in that module's own terms."""

    kind: str
    options: dict[str, Any] = {}


class TierConfig(Named, frozen=True, forbid_unknown_fields=True, kw_only=True):
    eviction: Named = Named(kind="prefix_aware")


class RateLimit(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one kind of traffic of a tier may take. `Engine.limit_rate` changes it while running."""

    tier: str
    """By its name."""
    traffic: Literal["demand", "prefetch", "write", "scrub"]
    bytes_per_s: float


class StoreConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A whole store. From TOML by `read_config`, or from the embedded default by `embedded`."""

    host_bytes: int
    """DRAM for the host pool, in bytes. Every transfer passes through it, so it bounds the bytes in flight."""
    tiers: tuple[TierConfig, ...] = ()
    host_eviction: Named = Named(kind="prefix_aware")
    admission: Named = Named(kind="admit_all")
    threads_per_lane: int = 2
    """Jobs at a time for each kind of work on each tier."""
    engine: EngineOptions = EngineOptions()
    limits: tuple[RateLimit, ...] = ()
    events: JournalOptions | None = None
    """Where to write what happens, for `forebay explain` and others; None: nowhere."""

    @classmethod
    def embedded(
        cls, roots: Sequence[Path | str], *, host_bytes: int, capacity_bytes: int, **file_options: Any
    ) -> StoreConfig:
        """One file tier over these roots: the default of everything that needs no configuration file."""
        options = {
            "roots": [{"path": str(root)} for root in roots],
            "capacity_bytes": capacity_bytes,
            **file_options,
        }
        return cls(host_bytes=host_bytes, tiers=(TierConfig(kind="file", options=options),))


def read_config(path: Path | str) -> StoreConfig:
    """Read a TOML file. Raises ConfigError with the file, the field and what is wrong with it."""
    path = Path(path)
    try:
        return msgspec.convert(tomllib.loads(path.read_text()), StoreConfig)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path}: {error}") from None


def open_engine(
    config: StoreConfig,
    namespace: Namespace,
    make_device: Callable[[HostPool], DevicePort],
    *,
    emit: EventSink = lambda event: None,
    executor: Executor | None = None,
) -> Engine:
    """Build the tiers, the host pool and the engine over them. The caller closes the engine.

    Raises ConfigError for unknown names, bad options, and a host pool too small for two blocks.
    """
    if config.threads_per_lane < 1:
        raise ConfigError(f"threads_per_lane must be 1 or more, not {config.threads_per_lane}")
    _check_namespace(namespace)
    check_options(config.engine)
    pool = HostPool(config.host_bytes // slot_bytes(namespace.block_bytes), namespace.block_bytes)
    tiers = open_tiers(config, namespace)
    with contextlib.ExitStack() as undo:
        for tier in tiers.values():
            undo.callback(tier.close)
        closing = contextlib.ExitStack()
        if config.events is not None:
            journal = Journal(config.events)
            undo.callback(journal.close)
            closing.callback(journal.close)
            emit = both(emit, journal.add)
        engine = _engine_over(
            config, pool, tiers, make_device(pool), emit, executor, namespace.block_tokens, closing.close
        )
        undo.pop_all()
    return engine


def _check_namespace(namespace: Namespace) -> None:
    if namespace.block_bytes < 1:
        raise ConfigError(f"a block must have 1 byte or more, not {namespace.block_bytes}")
    if namespace.block_tokens < 1:
        raise ConfigError(f"a block must have 1 token or more, not {namespace.block_tokens}")
    for name, value in dataclasses.asdict(namespace).items():
        try:
            str(value).encode()
        except UnicodeEncodeError:  # it could neither be hashed nor written down
            raise ConfigError(f"{name} of the namespace holds what is no text, {value!a}: give it as UTF-8") from None


def _engine_over(
    config: StoreConfig,
    pool: HostPool,
    tiers: Mapping[str, Tier],
    device: DevicePort,
    emit: EventSink,
    executor: Executor | None,
    block_tokens: int,
    at_close: Callable[[], None],
) -> Engine:
    eviction: dict[str, EvictionPolicy] = {HOST: _build("policies", config.host_eviction)}
    for name, tier in zip(tiers, config.tiers, strict=True):
        eviction[name] = _build("policies", tier.eviction)
    ours = {
        name: _build("policies", chosen.eviction)
        for (name, tier), chosen in zip(tiers.items(), config.tiers, strict=True)
        if tier.spec.quota_bytes is not None
    }
    admission: AdmissionPolicy = _build("policies", config.admission)
    engine = Engine(
        pool=pool,
        tiers=tiers,
        policies=Policies(eviction, admission, ours),
        device=device,
        executor=executor or ThreadExecutor(config.threads_per_lane),
        emit=emit,
        options=config.engine,
        block_tokens=block_tokens,
        at_close=at_close,
    )
    for limit in config.limits:
        engine.limit_rate(limit.tier, Traffic[limit.traffic.upper()], limit.bytes_per_s)
    return engine


def open_tiers(config: StoreConfig, namespace: Namespace) -> Mapping[str, Tier]:
    """The tiers by their names, in the order of the configuration."""
    tiers: dict[str, Tier] = {}
    with contextlib.ExitStack() as undo:
        for entry in config.tiers:
            tier: Tier = _build("tiers", entry, namespace, bytes(namespace_key(namespace)))
            undo.callback(tier.close)
            if tier.spec.name in (HOST, *tiers):
                raise ConfigError(f"two tiers are named {tier.spec.name!r}: give one another name in its options")
            tiers[tier.spec.name] = tier
        undo.pop_all()
    return tiers


def open_policy(named: Named) -> Any:
    """An eviction or admission policy by name. Raises ConfigError for unknown names and bad options."""
    return _build("policies", named)


def open_workload(named: Named) -> Workload:
    """A workload by name. Raises ConfigError for unknown names, bad options and broken traces."""
    workload: Workload = _build("workloads", named)
    return workload


def open_gate(named: Named) -> Any:
    """A gate of `bench.gates` by name, ready to run. Raises ConfigError for unknown names and bad options."""
    return _build("bench.gates", named)


def open_target(named: Named, *context: object) -> Any:
    """A target of `bench.restore.targets` by name. Raises ConfigError for unknown names and bad options."""
    return _build("bench.restore.targets", named, *context)


def open_chooser(named: Named) -> Any:
    """A rule of `connectors.vllm.choosers` by name. Raises ConfigError for unknown names and bad options."""
    return _build("connectors.vllm.choosers", named)


def open_tier(named: Named, namespace: Namespace, namespace_digest: bytes) -> Tier:
    """One tier by name, for a tier around another. Raises ConfigError for unknown names and bad options."""
    tier: Tier = _build("tiers", named, namespace, namespace_digest)
    return tier


def _build(package: str, named: Named, *context: object) -> Any:
    module = _module(package, named.kind)
    try:
        options = msgspec.convert(named.options, module.Options)
    except msgspec.ValidationError as error:
        raise ConfigError(f"options of {named.kind}: {error}") from None
    return module.build(options, *context)


def _module(package: str, kind: str) -> ModuleType:
    path = kind if "." in kind else f"forebay.{package}.{kind}"
    if not all(part.isidentifier() for part in path.split(".")):
        raise ConfigError(f"{kind!a} names none of the {package}: use a module's name or its dotted path")
    try:
        module = importlib.import_module(path)
    except ImportError as error:
        raise ConfigError(
            f"no {kind!r} among the {package} ({error}): use a module's name or its dotted path"
        ) from None
    if not hasattr(module, "build") or not hasattr(module, "Options"):
        raise ConfigError(f"{path} has no Options and build: it is not one of the {package}")
    return module
