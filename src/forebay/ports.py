"""The interfaces. A tier, policy, device or executor imports this, `types` and `errors`, and nothing else of Forebay.

Every method here is abstract on purpose: a new ability is a new small Protocol, not an optional hook.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from forebay.types import BlockKey, DeviceBlock, Job, JobResult, Outcome, Stored, TierSpec

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


class AdmissionPolicy(Protocol):
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

    def wait(self, until_ns: int) -> None:
        """Block until `poll` has something to give, or the clock reaches `until_ns`."""
        ...

    def close(self) -> None:
        """Let running jobs end and release the threads. Results that were not polled are gone."""
        ...
