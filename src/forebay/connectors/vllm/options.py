"""What an operator writes into `kv_connector_extra_config`, and the store that comes of it for each rank."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec

from forebay.assemble import Named, StoreConfig
from forebay.engine import EngineOptions
from forebay.errors import ConfigError

GIB = 2**30
_WORKER_PROBE_DEADLINE_S = 2.0
"""A rank is asked to load only what was just seen in the pool: a slow answer there is better than a recompute."""


class StoredTokens(Enum):
    """Whose blocks are stored."""

    PROMPT = "prompt"
    """Blocks that lie in the prompt as a whole."""
    ALL = "all"
    """Blocks with generated tokens too: they serve the next turn of a conversation."""


class IdentityOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What says whose blocks these are. Both ways into vLLM have these options."""

    identity: str = ""
    """A name for exactly these weights that the operator vouches for. Without it the weight files are read whole."""
    digest_cache: str = ""
    """File that remembers digests of weight files; beside the pool, or the store's TOML file, if not given."""


class ConnectorOptions(IdentityOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Limits are for the whole engine: its parts share them evenly."""

    pool: str = ""
    """Directory of the pool. With several parts (see `Part`), each has a directory of its own beside it."""
    capacity_gib: float = 0.0
    """Room for blocks on the pool's file system, in GiB."""
    host_gib: float = 2.0
    """DRAM for blocks on their way and for recent ones, in GiB."""
    config: str = ""
    """A TOML file of a whole store for one part, instead of the three above. `{part}` in it is filled in."""
    shard_kv_heads: int = 0
    """KV heads in a stored block; 0: all that a rank has. With a number, engines of all tensor-parallel sizes that give
    a rank a multiple of it share one pool, where the KV layout allows; without, each size has its own."""
    stored_tokens: StoredTokens = StoredTokens.ALL
    min_load_tokens: int = 0
    """Shorter hits are computed instead of loaded."""
    load_or_compute: Named | None = None
    """One of `choosers`, which says how much of a longer hit is loaded. None: all of it."""
    lookup_deadline_s: float = 0.25
    """How long a request waits to hear what the pool holds of it, before it goes on with what is known by then."""
    held_share: float = 0.25
    """Share of vLLM's blocks that may be kept from reuse, after their request has gone, until they are copied out."""
    drain_s: float = 10.0
    """How long a shutdown waits for blocks on their way to the pool."""


@dataclass(frozen=True, slots=True)
class HeadRange:
    """KV heads `first` up to, not including, `end`, counted over the whole model."""

    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Part:
    """What is stored together: the KV of one rank, or some heads of it. A part has its own namespace and store."""

    index: int = 0
    count: int = 1
    """Over the whole engine: all ranks of tensor and pipeline parallelism."""
    name: str = ""
    """Of its directory, beside the pool's; empty when there is only one part."""
    heads: HeadRange | None = None
    """None: all heads of a rank, in the shape that it has with this tensor-parallel size."""


def check_finite(where: str, options: IdentityOptions) -> None:
    """Raises ConfigError for a number that is none, or none as bytes: infinite, or not a number."""
    for name, value in msgspec.structs.asdict(options).items():
        if isinstance(value, float) and not math.isfinite(value * GIB):
            raise ConfigError(f"{where}: '{name}' must be a finite number, not {value}")


def read_options(extra_config: Mapping[str, Any]) -> ConnectorOptions:
    """Raises ConfigError for unknown names, wrong types and combinations that make no sense."""
    try:
        options = msgspec.convert(dict(extra_config), ConnectorOptions)
    except msgspec.ValidationError as error:
        raise ConfigError(f"kv_connector_extra_config: {error}") from None
    check_finite("kv_connector_extra_config", options)
    if bool(options.pool) == bool(options.config):
        raise ConfigError("kv_connector_extra_config: give either 'pool', a directory, or 'config', a TOML file")
    if options.pool and not options.capacity_gib > 0:
        raise ConfigError("kv_connector_extra_config: give 'capacity_gib', the room for blocks in the pool")
    if not options.host_gib > 0 or not 0 <= options.held_share < 1:
        raise ConfigError("kv_connector_extra_config: 'host_gib' must be positive and 'held_share' in [0, 1)")
    if not (options.lookup_deadline_s >= 0 and options.drain_s >= 0):
        raise ConfigError("kv_connector_extra_config: 'lookup_deadline_s' and 'drain_s' must be 0 or more seconds")
    if options.min_load_tokens < 0 or options.shard_kv_heads < 0:
        raise ConfigError("kv_connector_extra_config: 'min_load_tokens' and 'shard_kv_heads' must be 0 or more")
    return options


def digest_cache_path(options: IdentityOptions, beside: str) -> Path:
    """Where digests of weight files are remembered: unless that is given, beside this file or directory."""
    return Path(options.digest_cache or f"{beside.rstrip('/')}-weights.json")


def store_config(options: ConnectorOptions, part: Part) -> StoreConfig:
    """The store of one part. Raises ConfigError for a bad TOML file, or one that several parts cannot share."""
    if options.config:
        return _from_toml(Path(options.config), part)
    root = f"{options.pool.rstrip('/')}-{part.name}" if part.name else options.pool
    embedded = StoreConfig.embedded(
        [root],
        host_bytes=int(options.host_gib * GIB) // part.count,
        capacity_bytes=int(options.capacity_gib * GIB) // part.count,
        shared=True,  # other engines may use the pool too, and the scheduler looks into it
    )
    return msgspec.structs.replace(embedded, engine=EngineOptions(probe_deadline_s=_WORKER_PROBE_DEADLINE_S))


def _from_toml(path: Path, part: Part) -> StoreConfig:
    try:
        text = path.read_text()
        if part.count > 1 and "{part}" not in text:
            raise ConfigError(
                f"{path}: this engine stores {part.count} parts, and each needs a directory of its own: "
                "write {part} into the path of each root"
            )
        written = tomllib.loads(text.replace("{part}", part.name or "whole"))
        store = msgspec.convert(written, StoreConfig)
        _check_choice(path, written)
        return store
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path}: {error}") from None


def _check_choice(path: Path, written: Mapping[str, Any]) -> None:
    """vLLM says what it will load before a worker could weigh it, so a section that would be idle is refused."""
    choice = written.get("engine", {}).get("load_or_compute")
    if choice and choice.get("mode") != "off":
        raise ConfigError(
            f"{path}: engine.load_or_compute decides nothing under vLLM: leave it away, and set 'load_or_compute' or "
            "'min_load_tokens' in kv_connector_extra_config"
        )
