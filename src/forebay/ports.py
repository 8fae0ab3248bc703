"""The interfaces. A tier, policy, device or executor imports this, `types` and `errors`, and nothing else of Forebay.

Every method here is abstract on purpose: a new ability is a new small Protocol, not an optional hook.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

from forebay.types import BlockKey, Change, DeviceBlock, Happening, Job, JobResult, Outcome, Stored, StoredRun, TierSpec

View = memoryview
"""A writable, C-contiguous byte view of one host slot: at least `block_bytes` long; bytes past that are scratch."""


class Tier(Protocol):
    """A place that keeps blocks. Blocking, thread-safe, and only ever called on a worker thread.

    A failed block is an `Outcome`, in the order of the keys given; a tier that is gone as a whole raises
    `TierUnavailable` or `OSError`, and the engine counts that as FAILED for every block of the call.
    """

    @property
    def spec(self) -> TierSpec: ...

    def contains(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        """Which keys a read would find now. Cheap: no payload is read."""
        ...

    def read(self, keys: Sequence[BlockKey], into: Sequence[View]) -> Sequence[Outcome]:
        """Fill `into[i]` with the block `keys[i]`, many at once. After any outcome but OK the view holds anything.

        Never OK with wrong bytes: a damaged block is CORRUPT, and is set aside so that it is MISSING next time.
        """
        ...

    def write(self, keys: Sequence[BlockKey], views: Sequence[View]) -> Sequence[Outcome]:
        """Store blocks, each published whole or not at all. A key that is already held is OK and left as it is."""
        ...

    def delete(self, keys: Sequence[BlockKey]) -> Sequence[Outcome]:
        """Remove blocks: OK when gone, also when it was not there; FAILED when it may still be there."""
        ...

    def scan(self) -> Iterator[Stored]:
        """Every block held when the tier was opened, oldest first. Blocks of other namespaces count: they take room."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class Routed(Protocol):
    """A tier over several places that can hang or fail one without the other, such as disks.

    The engine gives every place jobs of its own, so that a block on a sound one never waits for a hung one.
    """

    def route(self, key: BlockKey) -> int:
        """The place that a read of this block goes to first. Cheap; any thread."""
        ...


@runtime_checkable
class Watched(Protocol):
    """A tier that others change (processes, an operator, its own upkeep), and that notices in passing what they did."""

    def changes(self) -> Sequence[Change]:
        """What others added and removed since the last call, as far as it was noticed; in order. Never blocks.

        Nothing that was so once and is not so any more.
        """
        ...


@runtime_checkable
class Metered(Protocol):
    """A tier whose medium wears out, and whose owner has set a budget for that."""

    def write_budget_bytes(self) -> int | None:
        """Bytes that may be written now, over all processes on the tier; None without a budget. Never blocks."""
        ...


@runtime_checkable
class Observed(Protocol):
    """A tier that counts what happens to its places."""

    def happened(self) -> Mapping[Happening, int]:
        """How often, since it was opened. Never blocks; any thread."""
        ...


@runtime_checkable
class Scrubbing(Protocol):
    """A tier that can read its blocks of its own accord, to find damage before they are wanted."""

    def stand_aside(self, demand_waits: bool) -> None:
        """Whether loads wait for this tier: meanwhile it should hardly read of its own accord. Never blocks."""
        ...

    def limit_scrub(self, bytes_per_s: float | None) -> None:
        """Change its rate, or have it as configured (None). Nothing happens where there is no scrub."""
        ...

    def scrub_bytes_per_s(self) -> float:
        """Its rate; 0 for one that does not scrub."""
        ...

    def scrubbed_bytes(self) -> int:
        """Read in this way since it was opened."""
        ...


@runtime_checkable
class Catalogued(Protocol):
    """A tier that can say what it holds a great many blocks at a time."""

    def inventory(self) -> Iterator[StoredRun]:
        """What `scan` says, in runs, oldest first. A block that is in the tier twice counts with all its bytes."""
        ...


class EvictionPolicy(Protocol):
    """Ranks the blocks of one place. Sees keys, never bytes or locks; it proposes, the engine acts.

    The keys of one call are in token order. Tails rank below heads: a suffix without its prefix is useless.
    """

    def inserted(self, keys: Sequence[BlockKey]) -> None: ...

    def accessed(self, keys: Sequence[BlockKey]) -> None:
        """Known keys were used; unknown ones are ignored."""
        ...

    def removed(self, keys: Sequence[BlockKey]) -> None:
        """Keys are gone; unknown ones are ignored."""
        ...

    def victims(self, count: int, evictable: Callable[[BlockKey], bool]) -> Sequence[BlockKey]:
        """Up to `count` keys for which `evictable` holds, the most dispensable first. Changes nothing that ranks."""
        ...


@runtime_checkable
class SeesLookups(Protocol):
    """An eviction policy that learns from whole prompts: it hears of a lookup by this, and not by `accessed`."""

    def requested(self, keys: Sequence[BlockKey]) -> None:
        """A prompt was looked up: all of its full blocks, in token order, held or not. What is held counts as used."""
        ...


class AdmissionPolicy(Protocol):
    def requested(self, keys: Sequence[BlockKey]) -> None:
        """A prompt was looked up: all of its full blocks, in token order."""
        ...

    def admit(self, key: BlockKey, tier: TierSpec, used_bytes: int) -> bool:
        """Whether the block is worth a write to this tier."""
        ...


class DevicePort(Protocol):
    """The host engine's memory, owned by its connector. Called on the engine's thread; must not block on transfers."""

    def submit(self, job: Job, blocks: Sequence[DeviceBlock]) -> None:
        """Start a COPY_IN or COPY_OUT between `job.slots[i]` and `blocks[i]`."""
        ...

    def poll(self) -> Sequence[JobResult]:
        """The jobs that ended since the last call."""
        ...


Work = Callable[[], Mapping[BlockKey, Outcome]]


class Executor(Protocol):
    """Runs jobs on real threads or under virtual time, and owns the clock. Called on the engine's thread only."""

    def now_ns(self) -> int: ...

    def submit(self, job: Job, work: Work) -> None: ...

    def poll(self) -> Sequence[JobResult]:
        """The jobs that ended since the last call, in the order in which they ended. Never blocks."""
        ...

    def give_up(self, job: Job) -> None:
        """Nobody waits for this job any more; it may hang. It still ends in `poll`, if it ends at all."""
        ...

    def wait(self, until_ns: int) -> None:
        """Block until `poll` has something to give, or the clock reaches `until_ns`."""
        ...

    def close(self) -> None:
        """Let running jobs end, but for those given up, and release the threads. Results not polled are gone."""
        ...
