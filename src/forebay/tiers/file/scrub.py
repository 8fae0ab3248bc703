"""Reading every block of a pool from time to time, at a bounded rate, so that damage is found before it is needed.

Where a scrub has got to is kept in each root, so that it goes on there after a restart. One process at a time scrubs a
root; the others notice and leave it alone.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from forebay.tiers.file import layout
from forebay.tiers.file.checking import Finding, Removing, best_access, check_block
from forebay.tiers.file.directio import Scratch

log = logging.getLogger("forebay.tiers.file")

POSITION_FILE = "scrub.json"
_POSITION_BYTES = 4096
_AFTER = re.compile(r"(?:[0-9a-f]{64}/[0-9a-f]{64})?")
PASS_EVERY_S = 24 * 3600.0
"""A background pass begins this long after the one before has begun, at the earliest: small pools are not read
without end."""
_KEEP_EVERY_NS = 10 * 10**9
"""From one writing down of the position to the next."""
_ASIDE_S, _MOST_ASIDE_S = 0.1, 10.0
"""While loads wait, how often to look whether they still do, and how long a block waits at most."""
_LOOK_AGAIN_S = 60.0
"""After a round in which there was nothing to do."""


class Position(msgspec.Struct, frozen=True, kw_only=True):
    """Content of scrub.json. No read of a block depends on it; one that is damaged means: from the beginning."""

    after: str = ""
    """`<namespace digest>/<key>` of the last block done; empty at the beginning of a pass."""
    began_unix_s: float = 0.0
    """When this pass began, or the last one if `after` is empty."""


@dataclass(frozen=True, slots=True)
class Step:
    """One block was looked at."""

    file: layout.BlockFile
    is_expired: bool
    """It was too old, and is removed."""
    finding: Finding | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrubLimits:
    bytes_per_s: float
    ttl_s: float = 0.0
    """Blocks written longer ago than this are removed; 0 keeps them whatever their age."""


class Pace:
    """Turns bytes moved into times to wait. A pause does not add up to a burst afterwards."""

    def __init__(self, bytes_per_s: float, clock_ns: Callable[[], int]) -> None:
        self.bytes_per_s = bytes_per_s
        """May be changed at any time."""
        self._clock_ns = clock_ns
        self._free_at_ns = clock_ns()

    def after(self, moved_bytes: int) -> float:
        """Seconds to wait before the next bytes."""
        now_ns = self._clock_ns()
        self._free_at_ns = max(self._free_at_ns, now_ns) + round(moved_bytes * 1e9 / self.bytes_per_s)
        return (self._free_at_ns - now_ns) / 1e9


class Scrub:
    """One pass over one root, from where the last one stopped. A context: the root is this process's while it lasts.

    `is_mine` is False when another process is scrubbing the root; then nothing else may be called.
    """

    def __init__(
        self,
        root: Path,
        ttl_s: float,
        wall_s: Callable[[], float],
        removing: Removing,
    ) -> None:
        self._root, self._ttl_s, self._wall_s, self._removing = root, ttl_s, wall_s, removing
        self._scratch = Scratch()
        self._descriptor = -1
        self.is_mine = False
        self.position = Position()

    def __enter__(self) -> Scrub:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        self._descriptor = os.open(self._root / POSITION_FILE, flags, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.position = _decode(os.pread(self._descriptor, _POSITION_BYTES, 0), self._wall_s())
        except BlockingIOError:
            return self
        except OSError:  # no locks here: several processes may scrub at once, which only costs
            pass
        self.is_mine = True
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._descriptor)

    def from_start(self) -> None:
        """Begin a new pass, wherever the last one stopped."""
        self.position = Position()

    def steps(self) -> Iterator[Step]:
        """Do the next block at each step, and be at the beginning again after the last."""
        if not self.position.after:
            self.position = Position(began_unix_s=self._wall_s())
        access = best_access(self._root)
        for file in _blocks_after(str(self._root), self.position.after):
            is_expired = self._removes_expired(file)
            finding = None if is_expired else check_block(self._root, access, file, self._scratch, self._removing)
            self.position = msgspec.structs.replace(self.position, after=f"{file.namespace_hex}/{file.key.hex()}")
            yield Step(file, is_expired, finding)
        self.position = msgspec.structs.replace(self.position, after="")

    def _removes_expired(self, file: layout.BlockFile) -> bool:
        age_s = self._wall_s() - file.mtime_ns / 1e9
        if not (self._ttl_s and file.is_regular and age_s > self._ttl_s):
            return False
        with self._removing(file):
            return layout.remove_block(file)

    def keep_position(self) -> None:
        """In place, under the lock: whoever reads half of it begins at the beginning."""
        try:
            content = msgspec.json.encode(self.position) + b"\n"
            os.pwrite(self._descriptor, content.ljust(_POSITION_BYTES // 8), 0)
        except OSError as error:
            log.warning("root %s: the position of the scrub cannot be kept: %s", self._root, error)


class BackgroundScrub:
    """Scrubs roots one after the other on a thread of its own, until it is closed.

    `roots` gives those that are well right now. `noticed` is told of each thing found, by root and kind. `pause` waits
    that many seconds and says whether to stop. `removing` is `Removing`, by root.
    """

    def __init__(
        self,
        roots: Callable[[], Sequence[Path]],
        limits: ScrubLimits,
        noticed: Callable[[Path, str], None],
        clock_ns: Callable[[], int] = time.monotonic_ns,
        wall_s: Callable[[], float] = time.time,
        pause: Callable[[float], bool] | None = None,
        *,
        removing: Callable[[Path, layout.BlockFile], AbstractContextManager[None]],
    ) -> None:
        self._roots, self.limits, self._noticed, self._removing = roots, limits, noticed, removing
        self._clock_ns, self._wall_s = clock_ns, wall_s
        self._ended = threading.Event()
        self._pause = pause or self._ended.wait
        self.pace = Pace(limits.bytes_per_s, clock_ns)
        self.demand_waits = False
        """Set from elsewhere: loads wait for the disks, and a block is read every few seconds only."""
        self.read_bytes = 0
        self._thread = threading.Thread(target=self._run, name="forebay-scrub", daemon=True)
        self._thread.start()

    def close(self) -> list[threading.Thread]:
        """Have it end after the block being read; returns its thread. Safe to call twice."""
        self._ended.set()
        return [self._thread]

    def _run(self) -> None:
        while not self._ended.is_set():
            for root in self._roots():
                try:
                    if self._pass(root):
                        return
                except OSError as error:
                    log.warning("root %s: scrubbing stopped: %s", root, error)
            if self._pause(_LOOK_AGAIN_S):
                return

    def _stands_aside(self) -> bool:
        """Let loads go first; returns whether to stop for good."""
        waited_s = 0.0
        while self.demand_waits and waited_s < _MOST_ASIDE_S:
            if self._pause(_ASIDE_S):
                return True
            waited_s += _ASIDE_S
        return False

    def _pass(self, root: Path) -> bool:
        """Whether to stop for good."""
        with Scrub(root, self.limits.ttl_s, self._wall_s, partial(self._removing, root)) as scrub:
            position = scrub.position
            if not scrub.is_mine or (not position.after and self._wall_s() < position.began_unix_s + PASS_EVERY_S):
                return False
            blocks, kept_ns, stopped = 0, self._clock_ns(), False
            found: Counter[str] = Counter()
            for step in scrub.steps():
                blocks += 1
                if kind := _kind(step):
                    found[kind] += 1
                    self._noticed(root, kind)
                if self._clock_ns() - kept_ns >= _KEEP_EVERY_NS:
                    scrub.keep_position()
                    kept_ns = self._clock_ns()
                moved_bytes = 0 if step.is_expired else step.file.length_bytes
                self.read_bytes += moved_bytes
                stopped = self._pause(self.pace.after(moved_bytes)) or self._stands_aside()
                if stopped or root not in self._roots():
                    break
            scrub.keep_position()
            level = logging.WARNING if set(found) - {"expired"} else logging.INFO
            kinds = "".join(f", {count} {kind}" for kind, count in sorted(found.items()))
            log.log(level, "root %s: scrubbed %d blocks%s", root, blocks, kinds)
            return stopped


def _kind(step: Step) -> str:
    """What was found, in a word; empty for a sound block."""
    if step.is_expired:
        return "expired"
    if step.finding is None:
        return ""
    if step.finding.set_aside is not None:
        return step.finding.set_aside.reason
    return "newer format" if step.finding.newer is not None else "unreadable"


def _blocks_after(root: str, after: str) -> Iterator[layout.BlockFile]:
    """In the order of their names, beginning behind that one."""
    last_namespace, _, last_key = after.partition("/")
    for namespace_hex in layout.walk_namespaces(root):
        if namespace_hex < last_namespace:
            continue
        behind = last_key if namespace_hex == last_namespace else ""
        yield from layout.walk_blocks_after(root, namespace_hex, behind)


def _decode(content: bytes, now_unix_s: float) -> Position:
    """The position, or the beginning for what cannot be one."""
    try:
        position = msgspec.json.decode(content, type=Position)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Position()
    if not _AFTER.fullmatch(position.after) or position.began_unix_s > now_unix_s:
        return Position()
    return position
