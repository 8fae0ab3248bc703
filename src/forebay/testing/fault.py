"""A tier that fails on purpose: any other tier behind a seeded plan of faults, and behind a limited bandwidth.

Whether a fault strikes is a hash of the seed, the method, the key, and how often the method saw that key before. It
does not depend on the order in which threads arrive, so a run with the same calls has the same faults.
"""

from __future__ import annotations

import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import msgspec
import xxhash

from forebay.errors import TierUnavailable
from forebay.ports import Metered, Routed, Tier, View
from forebay.types import BlockKey, Outcome, Stored, TierSpec

_GARBAGE = b"\xa5"


class FaultPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Probabilities in [0, 1], a block unless it says otherwise. Those of one method must not sum to more than 1."""

    seed: int
    unavailable: float = 0.0
    """A whole read, write or delete raises TierUnavailable, decided by the first key of the call."""
    read_failed: float = 0.0
    read_missing: float = 0.0
    """Somebody else removed the block just before the read."""
    read_corrupt: float = 0.0
    """The block turns out to be damaged and is set aside."""
    write_failed: float = 0.0
    write_full: float = 0.0
    delete_failed: float = 0.0
    """Half of these deletes took place all the same, which FAILED allows."""


class Pace:
    """A pipe of `bytes_per_s` that all callers share. Time comes from outside: `now_ns` is read, `sleep_ns` waits."""

    def __init__(self, bytes_per_s: float, now_ns: Callable[[], int], sleep_ns: Callable[[int], None]) -> None:
        if not bytes_per_s > 0:
            raise ValueError(f"bytes_per_s must be positive, not {bytes_per_s}")
        self._bytes_per_s = bytes_per_s
        self._now_ns = now_ns
        self._sleep_ns = sleep_ns
        self._lock = threading.Lock()
        self._free_at_ns = 0

    def carry(self, moved_bytes: int) -> None:
        """Return when these bytes, queued behind everybody else's, are through."""
        with self._lock:
            now_ns = self._now_ns()
            self._free_at_ns = max(self._free_at_ns, now_ns) + round(moved_bytes * 1e9 / self._bytes_per_s)
            wait_ns = self._free_at_ns - now_ns
        if wait_ns > 0:
            self._sleep_ns(wait_ns)


class FaultTier:
    """A `Tier` around `tier`. `contains` and `scan` tell the truth; `close` closes the tier behind."""

    def __init__(self, tier: Tier, plan: FaultPlan, pace: Pace | None = None) -> None:
        self._tier = tier
        self._plan = plan
        self._pace = pace
        self._lock = threading.Lock()
        self._seen: Counter[tuple[str, BlockKey]] = Counter()
        self.injected: Counter[str] = Counter()
        """How many faults of each kind of the plan struck; read it when no call is running."""

    @property
    def spec(self) -> TierSpec:
        return self._tier.spec

    def contains(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        return self._tier.contains(keys)

    def read(self, keys: Sequence[BlockKey], into: Sequence[View]) -> Sequence[Outcome]:
        plan = self._plan
        self._gate("read", keys)
        faults = [
            self._fault(
                "read",
                key,
                read_failed=plan.read_failed,
                read_missing=plan.read_missing,
                read_corrupt=plan.read_corrupt,
            )
            for key in keys
        ]
        gone = [key for key, fault in zip(keys, faults, strict=True) if fault in ("read_missing", "read_corrupt")]
        if gone:
            self._tier.delete(gone)
        outcomes = list(self._pass_on(self._tier.read, keys, into, faults))
        for i, fault in enumerate(faults):
            if fault is not None:
                into[i][:] = _GARBAGE * len(into[i])  # nobody may use a view after any outcome but OK
                outcomes[i] = _READ_OUTCOME[fault]
        return outcomes

    def write(self, keys: Sequence[BlockKey], views: Sequence[View]) -> Sequence[Outcome]:
        plan = self._plan
        self._gate("write", keys)
        faults = [self._fault("write", key, write_failed=plan.write_failed, write_full=plan.write_full) for key in keys]
        outcomes = list(self._pass_on(self._tier.write, keys, views, faults))
        for i, fault in enumerate(faults):
            if fault is not None:
                outcomes[i] = Outcome.FULL if fault == "write_full" else Outcome.FAILED
        return outcomes

    def delete(self, keys: Sequence[BlockKey]) -> Sequence[Outcome]:
        half = self._plan.delete_failed / 2
        self._gate("delete", keys)
        faults = [self._fault("delete", key, delete_kept=half, delete_landed=half) for key in keys]
        landing = [key for key, fault in zip(keys, faults, strict=True) if fault != "delete_kept"]
        deleted = iter(self._tier.delete(landing))
        outcomes = [Outcome.FAILED if fault == "delete_kept" else next(deleted) for fault in faults]
        return [
            Outcome.FAILED if fault == "delete_landed" else outcome
            for fault, outcome in zip(faults, outcomes, strict=True)
        ]

    def scan(self) -> Iterator[Stored]:
        return self._tier.scan()

    def route(self, key: BlockKey) -> int:
        return self._tier.route(key) if isinstance(self._tier, Routed) else 0

    def write_budget_bytes(self) -> int | None:
        return self._tier.write_budget_bytes() if isinstance(self._tier, Metered) else None

    def close(self) -> None:
        self._tier.close()

    def _pass_on(
        self,
        move: Callable[[Sequence[BlockKey], Sequence[View]], Sequence[Outcome]],
        keys: Sequence[BlockKey],
        views: Sequence[View],
        faults: Sequence[str | None],
    ) -> Iterator[Outcome]:
        """Outcomes of the blocks without a fault, from the tier behind; FAILED stands in for the others."""
        sound = [i for i, fault in enumerate(faults) if fault is None]
        moved = iter(move([keys[i] for i in sound], [views[i] for i in sound]))
        if self._pace is not None:
            self._pace.carry(len(sound) * self.spec.stored_bytes)
        return (next(moved) if fault is None else Outcome.FAILED for fault in faults)

    def _gate(self, method: str, keys: Sequence[BlockKey]) -> None:
        if keys and self._fault(f"call {method}", keys[0], unavailable=self._plan.unavailable):
            raise TierUnavailable(f"injected: {method} of {len(keys)} blocks")

    def _fault(self, method: str, key: BlockKey, **rates: float) -> str | None:
        """The kind of fault that strikes this block in this call, if any."""
        with self._lock:
            self._seen[method, key] += 1
            turn = self._seen[method, key]
        draw = _uniform(self._plan.seed, method, turn, key)
        for kind, rate in rates.items():
            if draw < rate:
                with self._lock:
                    self.injected[kind] += 1
                return kind
            draw -= rate
        return None


_READ_OUTCOME = {
    "read_failed": Outcome.FAILED,
    "read_missing": Outcome.MISSING,
    "read_corrupt": Outcome.CORRUPT,
}


def _uniform(seed: int, method: str, turn: int, key: BlockKey) -> float:
    """In [0, 1), from nothing but the arguments."""
    text = struct.pack("<qq", seed, turn) + method.encode() + b"/" + key
    return (xxhash.xxh3_64_intdigest(text) >> 11) / 2.0**53
