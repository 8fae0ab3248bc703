"""One process of the stability gate: an engine over the shared pool, mixed load, and proof of every byte.

stdin     one line of `Orders`; then a line to end in peace. Its end means that the supervisor is gone: so do we go
stdout    a line of `Report` for each rest
stderr    what the product logs
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from forebay.assemble import StoreConfig, TierConfig, open_engine
from forebay.bench.gates.stability.log import Report
from forebay.bench.gates.stability.options import BLOCK_TOKENS, Options, session_count
from forebay.bench.storm.device import Stamp
from forebay.engine import Engine
from forebay.errors import InvariantBroken
from forebay.events import Totals
from forebay.hostpool import HostPool
from forebay.keys import block_keys
from forebay.types import HOST, BlockKey, DeviceBlock, Job, JobKind, JobResult, Loaded, Namespace, Outcome, Request

TIER = "file"
_STEP_NS = 5_000_000
_LONGEST_REST_S = 90.0
"""Longer than any load may take."""
_FAMILIES = 8
"""Sessions of one family begin with the same blocks, as those over one document do."""
_SHARED_SHARE = 0.25
"""Of a prompt, what its family shares."""
_NEW_SHARE, _DROPPED_SHARE, _CANCELLED_SHARE, _PREFETCHED_SHARE = 0.1, 0.4, 0.03, 0.1
_MOST_WORDS = 4
_SHM = "/dev/shm/"


class Orders(msgspec.Struct, frozen=True, kw_only=True):
    options: Options
    pool_roots: tuple[str, ...]
    control: str
    """File of the `Control` of faults; empty for a worker that is not struck."""
    seed: int


def namespace(options: Options) -> Namespace:
    return Namespace(
        model="stability", weights_digest="none", kv_dtype="uint8", rope="none", layers=1, kv_heads=1, head_dim=1,
        block_tokens=BLOCK_TOKENS, block_bytes=options.block_bytes, layout="stamped noise",
    )  # fmt: skip


def store_config(options: Options, pool_roots: Sequence[str], control: str) -> StoreConfig:
    file = {
        "roots": [{"path": root} for root in pool_roots],
        "capacity_bytes": options.capacity_bytes,
        "shared": True,
        "name": TIER,
        "retry_s": min(5.0, max(0.2, options.fault_for_s / 4)),
    }
    tier = TierConfig(kind="file", options=file)
    if control:
        tier = TierConfig(kind="forebay.testing.struck_file", options={"control": control, "file": file})
    return StoreConfig(host_bytes=options.host_bytes, tiers=(tier,))


class ProvingDevice:
    """Device memory that is not there: COPY_OUT writes a block's own bytes, COPY_IN compares every byte with them."""

    def __init__(self, pool: HostPool, block_bytes: int) -> None:
        self._pool, self._block_bytes = pool, block_bytes
        self._stamp = Stamp(block_bytes)
        self._truth = memoryview(bytearray(block_bytes))
        self._ended: list[JobResult] = []
        self.wrong_blocks = self.wrong_bytes = 0

    def submit(self, job: Job, blocks: Sequence[DeviceBlock]) -> None:
        started_ns = time.monotonic_ns()
        for key, slot in zip(job.keys, job.slots, strict=True):
            view = self._pool.view(slot)[: self._block_bytes]
            if job.kind is JobKind.COPY_OUT:
                self._stamp.fill(view, key)
            else:
                self._prove(view, key)
        self._ended.append(JobResult(job, dict.fromkeys(job.keys, Outcome.OK), started_ns, time.monotonic_ns()))

    def _prove(self, view: memoryview, key: BlockKey) -> None:
        self._stamp.fill(self._truth, key)
        if view != self._truth:
            self.wrong_blocks += 1
            found, truth = np.frombuffer(view, np.uint8), np.frombuffer(self._truth, np.uint8)
            self.wrong_bytes += int(np.count_nonzero(found != truth))

    def poll(self) -> Sequence[JobResult]:
        ended, self._ended = self._ended, []
        return ended


@dataclass(slots=True)
class _Load:
    keys: tuple[BlockKey, ...]
    blocks: list[DeviceBlock]
    disk_blocks: int
    started_ns: int


@dataclass(slots=True)
class _Counts:
    """Since the last report."""

    loads: int = 0
    disk_loads: int = 0
    loaded_blocks: int = 0
    disk_blocks: int = 0
    offered_blocks: int = 0
    disk_load_s: list[float] = field(default_factory=list)
    unsound: list[str] = field(default_factory=list)


class Worker:
    def __init__(self, orders: Orders, send: Callable[[Report], None], is_asked_to_end: Callable[[], bool]) -> None:
        self._options, self._send, self._is_asked_to_end = orders.options, send, is_asked_to_end
        self._chance = random.Random(orders.seed)
        self._namespace = namespace(orders.options)
        self._sessions = session_count(orders.options)
        self._totals = Totals()
        devices: list[ProvingDevice] = []

        def make_device(pool: HostPool) -> ProvingDevice:
            devices.append(ProvingDevice(pool, orders.options.block_bytes))
            return devices[0]

        config = store_config(orders.options, orders.pool_roots, orders.control)
        self._engine: Engine = open_engine(config, self._namespace, make_device, emit=self._totals.add)
        self._device = devices[0]
        blocks = orders.options.in_flight * orders.options.prompt_blocks
        self._free = [DeviceBlock(i) for i in range(blocks)]
        self._loads: dict[str, _Load] = {}
        self._counts = _Counts()
        self._reported_errors: Counter[str] = Counter()
        self._reported_wrong = Counter[str]()
        self._requests = 0
        self._began_s = self._reported_s = time.monotonic()

    def run(self) -> None:
        """Until asked to end."""
        next_request_s = next_rest_s = self._began_s
        while not self._is_asked_to_end():
            now_s = time.monotonic()
            if now_s >= next_rest_s:
                self._rest()
                next_rest_s = time.monotonic() + self._options.rest_s
            if now_s >= next_request_s and len(self._loads) < self._options.in_flight:
                next_request_s = max(next_request_s + 1 / self._options.requests_per_s, now_s - 1)
                self._request()
            self._step()
        self._rest()
        self._engine.close()

    # --- load

    def _keys(self, session: int) -> tuple[BlockKey, ...]:
        """A family's document, then the session's own blocks."""
        shared_tokens = int(self._options.prompt_blocks * _SHARED_SHARE) * BLOCK_TOKENS
        own_tokens = self._options.prompt_blocks * BLOCK_TOKENS - shared_tokens
        seed = self._options.seed
        tokens = [seed, session % _FAMILIES, *[0] * (shared_tokens - 2)][:shared_tokens]
        return tuple(block_keys(self._namespace, [*tokens, *[seed + session + 1] * own_tokens]))

    def _request(self) -> None:
        """One request: most come back to a session, whose popularity falls with its number."""
        chance = self._chance
        if chance.random() < _NEW_SHARE:
            session = self._sessions + chance.randrange(10**9)
        else:
            session = int(self._sessions * chance.random() ** 2)
        self._requests += 1
        request = Request(f"r{self._requests}", self._keys(session))
        if chance.random() < _PREFETCHED_SHARE:
            self._engine.prefetch(request, self._engine.now_ns() + 50_000_000)
        while (plan := self._engine.plan_load(request)) is None:
            self._step()
        disk_blocks = sum(read.source != HOST for read in plan.reads)
        blocks = [self._free.pop() for _ in request.keys]
        self._loads[request.request_id] = _Load(request.keys, blocks, disk_blocks, time.monotonic_ns())
        self._engine.start_load(plan, blocks)
        if chance.random() < _CANCELLED_SHARE:
            self._engine.cancel_load(request.request_id)
        if chance.random() < _DROPPED_SHARE:
            self._engine.drop_host_copies()

    def _step(self) -> None:
        for loaded in self._engine.poll():
            self._ended(loaded)
        self._engine.wait(self._engine.now_ns() + _STEP_NS)

    def _ended(self, loaded: Loaded) -> None:
        """What was not loaded is computed, and all of it is offered, as a host engine does."""
        load, counts = self._loads.pop(loaded.request_id), self._counts
        counts.loads += 1
        counts.loaded_blocks += loaded.blocks
        if load.disk_blocks and loaded.blocks:
            counts.disk_loads += 1
            counts.disk_blocks += min(load.disk_blocks, loaded.blocks)
            counts.disk_load_s.append(round((time.monotonic_ns() - load.started_ns) / 1e9, 6))
        counts.offered_blocks += self._engine.offer(load.keys, load.blocks)
        self._free += load.blocks

    # --- rest

    def _rest(self) -> None:
        """Let all work end, prove that nothing is left over, and report."""
        gives_up_s = time.monotonic() + _LONGEST_REST_S
        while not (self._engine.idle and not self._loads) and time.monotonic() < gives_up_s:
            self._step()
        if self._loads or not self._engine.idle:
            self._counts.unsound.append(f"no rest within {_LONGEST_REST_S:g} s: {len(self._loads)} loads are open")
        else:
            self._settle()
        self._report()

    def _settle(self) -> None:
        """Slots, pins and counts add up. Prefetched blocks may go before they do."""
        try:
            self._engine.check_idle()
        except InvariantBroken as broken:
            self._counts.unsound.append(str(broken))

    def _report(self) -> None:
        now_s, counts, errors = time.monotonic(), self._counts, self._errors()
        wrong = Counter(blocks=self._device.wrong_blocks, bytes=self._device.wrong_bytes)
        self._send(
            Report(
                age_s=now_s - self._began_s,
                covers_s=now_s - self._reported_s,
                loads=counts.loads,
                disk_loads=counts.disk_loads,
                loaded_blocks=counts.loaded_blocks,
                disk_blocks=counts.disk_blocks,
                offered_blocks=counts.offered_blocks,
                wrong_blocks=wrong["blocks"] - self._reported_wrong["blocks"],
                wrong_bytes=wrong["bytes"] - self._reported_wrong["bytes"],
                unsound=tuple(counts.unsound[:_MOST_WORDS]),
                rss_bytes=rss_bytes(),
                descriptors=len(os.listdir("/proc/self/fd")),
                threads=threading.active_count(),
                shm_segments=shm_segments(),
                errors=dict(errors - self._reported_errors),
                disk_load_s=tuple(counts.disk_load_s),
            )
        )
        self._counts, self._reported_s = _Counts(), now_s
        self._reported_errors, self._reported_wrong = errors, wrong

    def _errors(self) -> Counter[str]:
        """By kind, since the start."""
        found: Counter[str] = Counter()
        for (tier, kind, outcome), blocks in self._totals.failures.items():
            if kind is JobKind.PROBE and outcome is Outcome.MISSING:
                continue  # an answer, and no error
            found[f"{tier} {kind.value} {outcome.value}"] += blocks
        for tier, blocks in self._totals.overdue.items():
            found[f"{tier} read late"] += blocks
        for happening, count in self._engine.happened().items():
            found[f"{happening.tier} {happening.kind}"] += count
        return found


def rss_bytes(proc: Path = Path("/proc/self")) -> int:
    return int((proc / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def shm_segments(proc: Path = Path("/proc/self")) -> tuple[str, ...]:
    """Names of files in /dev/shm that this process has mapped or open."""
    found = {line.split(maxsplit=5)[-1].rstrip() for line in (proc / "maps").read_text().splitlines() if _SHM in line}
    for descriptor in (proc / "fd").iterdir():
        with contextlib.suppress(OSError):  # it was the listing's own
            found.add(str(descriptor.readlink()))
    return tuple(sorted(name for name in found if name.startswith(_SHM) and not name.endswith(" (deleted)")))


def main() -> None:
    orders = msgspec.json.decode(sys.stdin.buffer.readline(), type=Orders)
    asked = threading.Event()

    def listen() -> None:
        if not sys.stdin.buffer.readline():
            os._exit(1)  # the supervisor is gone: nobody would end us
        asked.set()

    threading.Thread(target=listen, daemon=True).start()

    def send(report: Report) -> None:
        sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
        sys.stdout.buffer.flush()

    Worker(orders, send, asked.is_set).run()


if __name__ == "__main__":
    main()
