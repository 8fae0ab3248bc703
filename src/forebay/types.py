"""The values that flow through Forebay. No behaviour beyond derived properties; standard library only.

Units are in the names: `_bytes`, `_ns` (nanoseconds), `_tokens`. A GiB is 2**30 bytes, a GB is 10**9.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, NewType

BlockKey = NewType("BlockKey", bytes)
"""32 bytes: SHA-256 of (parent key, tokens of the block), rooted in the digest of a whole `Namespace`."""

Slot = NewType("Slot", int)
"""Index into the host pool."""

DeviceBlock = NewType("DeviceBlock", int)
"""Index into the host engine's paged KV cache."""

JobId = NewType("JobId", int)

HOST = "host"
"""The name under which the host pool appears wherever a tier's name is expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """Everything that decides the bytes of a block of given tokens, and nothing else.

    Two processes that agree on every field may exchange blocks; two that differ in any field share no key.
    What only a process knows (pid, port, hash seed, batch size, free memory) has no place here.
    """

    model: str
    """Name for people; `weights_digest` is what identifies the weights."""
    weights_digest: str
    """Hex digest of the weights, or an identity that the operator vouches for."""
    adapter_digest: str = ""
    """Hex digest of a LoRA or other adapter; empty without one."""
    kv_dtype: str
    """Element type of the stored KV, such as `float32` or `bfloat16`."""
    kv_scales: str = ""
    """Digest of quantisation scales; empty for unquantised KV."""
    rope: str
    """Rotary embedding and its scaling, in canonical form."""
    layers: int
    kv_heads: int
    """KV heads in this shard."""
    head_dim: int
    block_tokens: int
    block_bytes: int
    """Payload of one block in bytes."""
    layout: str
    """Order of the axes inside a block, and whatever else shapes its bytes (attention backend, instruction set)."""
    shard: int = 0
    shard_count: int = 1
    tenant_digest: str = ""
    """Digest of the tenant's salt (`keys.tenant_digest`), never the salt itself."""


class Extent(Enum):
    """How much of a stored prefix a request wants to have loaded."""

    BEST = "best"
    """As much as brings its first token soonest. The host computes the rest, and reports it as computed."""
    STORED = "stored"
    """All of it: the host has settled that already."""


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt: the keys of its full blocks, in token order. A partial last block has no key."""

    request_id: str
    keys: tuple[BlockKey, ...]
    announced: bool = False
    """This is a part of a prompt that was announced to the engine as a whole."""
    tokens: int = 0
    """From the first key's first token to the end of the prompt, the partial last block included; 0: full blocks."""
    context_tokens: int = 0
    """Tokens before the first key, whose KV the host has already."""
    extent: Extent = Extent.BEST


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSpec:
    """What the engine needs to know of a tier before it asks it anything."""

    name: str
    capacity_bytes: int
    """Bytes that blocks may occupy, headers and padding included."""
    stored_bytes: int
    """Bytes that one block of this engine's namespace occupies, header and padding included."""
    read_latency_ns: int
    """Typical time to the first byte. Orders the tiers from fast to slow."""
    shared: bool = False
    """Other processes add and remove blocks: a block that the index does not know may still be there."""
    quota_bytes: int | None = None
    """Bytes that the blocks of this engine's tenant may occupy; None without a quota."""


class ChangeKind(Enum):
    ADDED = "added"
    REMOVED = "removed"


class Stored(NamedTuple):
    """A block that a tier found in itself when it was opened, of this namespace or of another."""

    key: BlockKey
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class StoredRun:
    """Blocks that a tier found in itself when it was opened, next to each other in age and alike."""

    keys: Sequence[BlockKey]
    """Oldest first."""
    stored_bytes: int
    """Of each."""
    is_ours: bool
    """They belong to the tenant of this engine's namespace."""


class Change(NamedTuple):
    """Another process has added or removed a block of a shared tier."""

    key: BlockKey
    stored_bytes: int
    kind: ChangeKind
    is_ours: bool = True
    """It belongs to the tenant of this engine's namespace."""


class Happening(NamedTuple):
    """Something that befell one place of one tier."""

    tier: str
    place: str
    """Such as the number of a root, from 0 in the order of the options."""
    kind: str
    """The name of an error (`EIO`, `ENOSPC`), `hung`, `stopped`, `vanished`, `returned`, a reason for which a file was
    set aside, ..."""


class Outcome(Enum):
    """What became of one block of a job."""

    OK = "ok"
    MISSING = "missing"
    """The tier does not hold it (any more)."""
    CORRUPT = "corrupt"
    """It was there and was not what it claimed to be; the tier has set it aside."""
    FAILED = "failed"
    """An I/O error, or the tier is gone. The stored block may be sound."""
    FULL = "full"
    """A write found no room."""


class CopyState(Enum):
    """State of one copy of a block.

    (absent) --reserve--> FILLING --commit--> READY --begin_drop--> DROPPING --drop--> (absent)
    FILLING --abandon--> (absent) when the fill failed; DROPPING --keep--> READY when the delete failed.
    READY --withdraw--> (absent), by way of LOST while somebody still holds a pin.
    """

    FILLING = "filling"
    """Bytes are on their way; a reader must wait."""
    READY = "ready"
    DROPPING = "dropping"
    """A delete is on its way: not readable, and not writable again until it has landed."""
    LOST = "lost"
    """Found missing or damaged: nobody new reads it, and it goes with its last pin."""


class JobKind(Enum):
    READ = "read"
    """tier -> host slot"""
    WRITE = "write"
    """host slot -> tier, after the blocks it evicts are deleted"""
    COPY_IN = "copy_in"
    """host slot -> device block"""
    COPY_OUT = "copy_out"
    """device block -> host slot"""
    PROBE = "probe"
    """ask a shared tier which blocks it holds"""


class Traffic(Enum):
    """What a transfer is for. The value is its rank: the lower goes first."""

    DEMAND = 0
    """A request waits for it."""
    PREFETCH = 1
    WRITE = 2
    SCRUB = 3
    """A tier's own reading, to find damage. No job: the tier does it, and is told when to stand aside."""


class Channel(NamedTuple):
    """One place of one tier: what can be slow, full or hung by itself."""

    tier: str
    route: int


class Read(NamedTuple):
    """One block of a load plan: where it comes from. `source` is `HOST` or a tier's name; that copy is pinned."""

    key: BlockKey
    source: str


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """An unbroken prefix of a request, in token order. Every copy it names is pinned until the load has ended."""

    request_id: str
    reads: tuple[Read, ...]
    wanted_blocks: int

    @property
    def hit_blocks(self) -> int:
        return len(self.reads)

    @property
    def compute_blocks(self) -> int:
        """Full blocks that the host engine has to compute itself."""
        return self.wanted_blocks - len(self.reads)


@dataclass(frozen=True, slots=True)
class Job:
    """One piece of work for an executor or a device port. `keys` and `slots` run in parallel (no slots in a PROBE)."""

    job_id: JobId
    kind: JobKind
    tier: str
    """The tier read, written or probed; `HOST` for copies between host and device."""
    keys: tuple[BlockKey, ...]
    slots: tuple[Slot, ...]
    moved_bytes: int
    route: int = 0
    """Which of a `Routed` tier's places a READ goes to. Jobs of different routes never wait for each other."""
    traffic: Traffic = Traffic.DEMAND
    evicts: tuple[BlockKey, ...] = ()
    """Blocks that a WRITE deletes before it writes, so that the tier never exceeds its capacity."""

    @property
    def channel(self) -> Channel:
        return Channel(self.tier, self.route)


@dataclass(frozen=True, slots=True)
class JobResult:
    """`outcomes` has an entry for every key in `job.keys` and `job.evicts`."""

    job: Job
    outcomes: Mapping[BlockKey, Outcome]
    started_ns: int
    finished_ns: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """A started load has ended: this many leading blocks are on the device, and all its device blocks are free to use.

    A cancelled load ends with 0 blocks. Every started load ends exactly once.
    """

    request_id: str
    blocks: int


@dataclass(frozen=True, slots=True)
class Pinned:
    """What became of a wish to keep blocks."""

    keys: tuple[BlockKey, ...]
    """The leading ones, which are pinned: these are to be unpinned."""
    refused_blocks: int
    """The rest, for which no place may set aside more room: they come and go as before."""
    kept: tuple[tuple[str, int], ...]
    """How many of `keys` each place keeps once it holds them, from the fastest place to the slowest."""
