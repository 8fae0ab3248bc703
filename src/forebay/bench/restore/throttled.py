"""A tier whose reads are throttled: any other tier as if it were on a slower medium.

    kind = "forebay.bench.restore.throttled"
    [options]
    read_bytes_per_s = 800e6
    [options.tier]
    kind = "file"
    [options.tier.options]
    ...

Engines that share a medium share its bandwidth: those that name the same `pipe` queue in one line, also across
processes. The line is one number in that file, the monotonic time at which it is free again.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from forebay.assemble import Named, open_tier
from forebay.errors import ConfigError, TierUnavailable
from forebay.ports import Catalogued, Metered, Observed, Routed, Tier, View, Watched
from forebay.types import BlockKey, Namespace, Outcome, Stored, TierSpec

_ABILITIES: dict[type, tuple[str, ...]] = {
    Catalogued: ("inventory",),
    Metered: ("write_budget_bytes",),
    Observed: ("happened",),
    Routed: ("route",),
    Watched: ("changes",),
}
_PIECE_S = 0.02
"""Reads are passed on in pieces that take about so long, so that the throttled medium is slow all the time, and not
fast for a while and then silent."""
_FREE_AT = struct.Struct("<q")
_LONGEST_LINE_NS = 3600 * 10**9
"""No line of blocks that take a second at most gets longer."""
_OPEN_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    tier: Named
    read_bytes_per_s: float
    pipe: str = ""
    """A file, made if need be, that all tiers on this medium name. Empty: this tier has the medium for itself."""


def build(options: Options, namespace: Namespace, namespace_digest: bytes) -> ThrottledTier:
    """Raises ConfigError for a rate that is none, a pipe that cannot be used, and whatever the tier behind says."""
    if not 0 < options.read_bytes_per_s < float("inf"):
        raise ConfigError(f"throttled tier: read_bytes_per_s must be above 0, not {options.read_bytes_per_s}")
    tier = open_tier(options.tier, namespace, namespace_digest)
    if options.read_bytes_per_s < tier.spec.stored_bytes:
        tier.close()
        raise ConfigError(
            f"throttled tier: at {options.read_bytes_per_s:.0f} bytes/s a block of {tier.spec.stored_bytes} bytes "
            "takes more than a second: give a higher read_bytes_per_s, or smaller blocks"
        )
    try:
        line = Line(Path(options.pipe) if options.pipe else None, options.read_bytes_per_s)
    except ConfigError:
        tier.close()
        raise
    return ThrottledTier(tier, line, options.read_bytes_per_s)


class ThrottledTier:
    """A `Tier` around `tier`, with that tier's abilities. Only reads are throttled."""

    def __init__(self, tier: Tier, line: Line, bytes_per_s: float) -> None:
        self._tier, self._line = tier, line
        self._piece_blocks = max(1, round(bytes_per_s * _PIECE_S / tier.spec.stored_bytes))
        for ability, methods in _ABILITIES.items():
            if isinstance(tier, ability):
                for method in methods:
                    setattr(self, method, getattr(tier, method))

    @property
    def spec(self) -> TierSpec:
        return self._tier.spec

    def contains(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        return self._tier.contains(keys)

    def read(self, keys: Sequence[BlockKey], into: Sequence[View]) -> Sequence[Outcome]:
        outcomes: list[Outcome] = []
        for first in range(0, len(keys), self._piece_blocks):
            piece = slice(first, first + self._piece_blocks)
            through_ns = self._line.queue(len(keys[piece]) * self.spec.stored_bytes)
            outcomes += self._tier.read(keys[piece], into[piece])
            self._line.wait(through_ns)
        return outcomes

    def write(self, keys: Sequence[BlockKey], views: Sequence[View]) -> Sequence[Outcome]:
        return self._tier.write(keys, views)

    def delete(self, keys: Sequence[BlockKey]) -> Sequence[Outcome]:
        return self._tier.delete(keys)

    def scan(self) -> Iterator[Stored]:
        return self._tier.scan()

    def close(self) -> None:
        self._tier.close()
        self._line.close()


class Line:
    """A medium of `bytes_per_s`: who comes later waits for those before. Thread-safe, and shared by a file.

    The clock must be the same for all who share it: the monotonic one is, on one machine.
    """

    def __init__(
        self,
        path: Path | None,
        bytes_per_s: float,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        sleep_ns: Callable[[int], None] | None = None,
    ) -> None:
        """None: nobody else shares it. Raises ConfigError for a file that cannot be used."""
        try:
            self._descriptor = os.memfd_create("forebay-line") if path is None else os.open(path, _OPEN_FLAGS, 0o600)
        except (OSError, ValueError) as error:
            raise ConfigError(f"throttled tier: the pipe {path} cannot be used ({error}): name a file") from None
        self._bytes_per_s, self._clock_ns, self._sleep_ns = bytes_per_s, clock_ns, sleep_ns or _sleep
        self._lock = threading.Lock()
        self._is_closed = False

    def queue(self, moved_bytes: int) -> int:
        """Take the medium's next time for these bytes; returns when they are through, by the clock.

        Raises TierUnavailable once closed.
        """
        with self._lock:
            if self._is_closed:
                raise TierUnavailable("the throttled tier is closed")
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            try:
                return self._append(round(moved_bytes * 1e9 / self._bytes_per_s))
            finally:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def wait(self, through_ns: int) -> None:
        """Return when the clock says so."""
        wait_ns = through_ns - self._clock_ns()
        if wait_ns > 0:
            self._sleep_ns(wait_ns)

    def close(self) -> None:
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                os.close(self._descriptor)

    def _append(self, takes_ns: int) -> int:
        now_ns = self._clock_ns()
        held = os.pread(self._descriptor, _FREE_AT.size, 0)
        free_at_ns = _FREE_AT.unpack(held)[0] if len(held) == _FREE_AT.size else 0
        if free_at_ns > now_ns + _LONGEST_LINE_NS:
            free_at_ns = 0  # written before a reboot, or by nobody who keeps to this: the clock began anew
        free_at_ns = max(free_at_ns, now_ns) + takes_ns
        os.pwrite(self._descriptor, _FREE_AT.pack(free_at_ns), 0)
        return free_at_ns


def _sleep(wait_ns: int) -> None:
    time.sleep(wait_ns / 1e9)
