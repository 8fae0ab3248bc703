"""What an operator writes into an entry of `secondary_tiers` of vLLM's native offloading."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from forebay.assemble import Named, open_policy
from forebay.connectors.vllm.options import IdentityOptions, check_finite
from forebay.errors import ConfigError
from forebay.ports import EvictionPolicy

_WHERE = "secondary_tiers, type forebay"
_SET_HERE = {"roots", "capacity_bytes", "shared", "name", "host_bytes"}
"""Options of the file tier that follow from the tier's own."""


class TierOptions(IdentityOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An entry of `secondary_tiers`, without `type`, `module_path` and `backpressure`, which are vLLM's own."""

    pool: str | tuple[str, ...]
    """Directory of the pool, or several on different disks, which share the blocks evenly."""
    capacity_gib: float
    """Room for blocks over all directories, in GiB, for the whole engine: all ranks together."""
    shared: bool = True
    """Other engines use the pool too: what is not in the index may be there, and is asked for. Without it lookups are
    answered at once."""
    eviction: str = "lru"
    """An eviction policy: its module in `forebay.policies`, or the dotted path of one."""
    lookup_deadline_s: float = 0.25
    """How long a request waits to hear what other engines have stored, before it goes on with what is known."""
    turn_s: float = 0.0002
    """While blocks are loaded, how long a thread of the scheduler's process keeps the interpreter from the others; 0:
    as long as it does otherwise."""
    locality: Literal["LOCAL", "REMOTE"] | None = None
    """What a request's `load_tiers` filter is matched with."""
    file: dict[str, Any] = msgspec.field(default_factory=dict)
    """More options of the file tier, such as reads_in_flight, writes_in_flight, verify, direct, durability."""

    @property
    def roots(self) -> tuple[str, ...]:
        return (self.pool,) if isinstance(self.pool, str) else self.pool


def read_tier_options(given: Mapping[str, Any]) -> TierOptions:
    """Raises ConfigError for unknown names, wrong types and values that make no sense."""
    try:
        options = msgspec.convert(dict(given), TierOptions)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{_WHERE}: {error}") from None
    check_finite(_WHERE, options)
    if not options.capacity_gib > 0:
        raise ConfigError(f"{_WHERE}: 'capacity_gib' must be positive, the room for blocks")
    if not (options.lookup_deadline_s >= 0 and options.turn_s >= 0):
        raise ConfigError(f"{_WHERE}: 'lookup_deadline_s' and 'turn_s' must be 0 or more seconds")
    if taken := _SET_HERE & options.file.keys():
        raise ConfigError(f"{_WHERE}: {', '.join(sorted(taken))} cannot be set in 'file': leave it out there")
    make_eviction(options)
    return options


def make_eviction(options: TierOptions) -> EvictionPolicy:
    """A new one. Raises ConfigError for a name that is none."""
    try:
        policy = open_policy(Named(kind=options.eviction))
    except ConfigError as error:
        raise ConfigError(f"{_WHERE}: 'eviction': {error}") from None
    if not hasattr(policy, "victims"):
        raise ConfigError(f"{_WHERE}: 'eviction': {options.eviction!a} is a policy of another kind")
    eviction: EvictionPolicy = policy
    return eviction
