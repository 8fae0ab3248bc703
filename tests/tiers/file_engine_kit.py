"""A real engine with real threads over a real file tier of two roots, at whose system calls a test can strike."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from forebay.engine import Engine, EngineOptions
from forebay.events import Event, Reason, Totals
from forebay.executor import ThreadExecutor
from forebay.flow import FlowOptions
from forebay.hostpool import HostPool
from forebay.keys import block_keys, namespace_key
from forebay.policies.admit_all import AdmitAll
from forebay.policies.lru import LRU
from forebay.stage import Policies
from forebay.testing.schedule import BLOCK_BYTES, NAMESPACE
from forebay.tiers.file import FileTier, Io, Options, RootOptions
from forebay.tiers.file.directio import REAL_CALLS, Calls
from forebay.types import HOST, BlockKey, DeviceBlock, Job, JobKind, JobResult, Loaded, Outcome, Request

KEYS = block_keys(NAMESPACE, list(range(32 * NAMESPACE.block_tokens)))
UNTOUCHED = b"\xee" * BLOCK_BYTES
OPTIONS = EngineOptions(
    batch_blocks=4, read_deadline_s=0.3, load_deadline_s=60.0, full_backoff_s=0.0, flow=FlowOptions(retry_s=0.05)
)


def truth(key: BlockKey) -> bytes:
    return hashlib.shake_128(key).digest(BLOCK_BYTES)


class Device:
    """Device memory as a list of bytes; copies are done at once."""

    def __init__(self, pool: HostPool) -> None:
        self.memory = [UNTOUCHED] * (2 * len(KEYS))
        self._pool = pool
        self._ended: list[JobResult] = []

    def submit(self, job: Job, blocks: Sequence[DeviceBlock]) -> None:
        for slot, block in zip(job.slots, blocks, strict=True):
            view = self._pool.view(slot)[:BLOCK_BYTES]
            if job.kind is JobKind.COPY_IN:
                self.memory[block] = bytes(view)
            else:
                view[:] = self.memory[block]
        self._ended.append(JobResult(job, dict.fromkeys(job.keys, Outcome.OK), 0, 0))

    def poll(self) -> Sequence[JobResult]:
        ended, self._ended = self._ended, []
        return ended


class Pool:
    """`strike(call, path)` is called before each system call on a block's file, or on one that is to become one."""

    def __init__(
        self,
        place: Path,
        *,
        slots: int = 64,
        calls: Calls | None = None,
        close_within_s: float = 30.0,
        **options: object,
    ) -> None:
        """Without `calls`, those at which `strike` strikes: then Python reads."""
        self.a, self.b = place / "a", place / "b"
        self.strike: Callable[[str, str], None] = lambda call, path: None
        usual = {"capacity_bytes": 2**24, "reads_in_flight": 2, "writes_in_flight": 2, "retry_s": 0.05}
        chosen = Options(
            roots=(RootOptions(path=str(self.a)), RootOptions(path=str(self.b))),
            **{"io": Io.PYTHON, **usual, **options},
        )
        mine = replace(REAL_CALLS, preadv=self._preadv, pwritev=self._pwritev, open=self._open)
        self.tier = FileTier(chosen, NAMESPACE, bytes(namespace_key(NAMESPACE)), calls or mine)
        self.totals, self.events = Totals(), list[Event]()
        pool = HostPool(slots, BLOCK_BYTES)
        self.device = Device(pool)
        self.engine = Engine(
            pool, {"file": self.tier}, Policies({HOST: LRU(), "file": LRU()}, AdmitAll()), self.device,
            ThreadExecutor(close_within_s=close_within_s), self._emit, OPTIONS,
        )  # fmt: skip
        self.ended: list[Loaded] = []
        self._requests = 0

    def _emit(self, event: Event) -> None:
        self.events.append(event)
        self.totals.add(event)

    def _open(self, path: str, flags: int, mode: int) -> int:
        if path.endswith((".kv", ".tmp")):
            self.strike("open", path)
        return os.open(path, flags, mode)

    def _preadv(self, descriptor: int, parts: Sequence[memoryview], at: int) -> int:
        self.strike("read", str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        return os.preadv(descriptor, parts, at)

    def _pwritev(self, descriptor: int, parts: Sequence[memoryview], at: int) -> int:
        self.strike("write", str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        return os.pwritev(descriptor, parts, at)

    def keys_at(self, root: Path) -> list[BlockKey]:
        """Those whose home it is."""
        at = (self.a, self.b).index(root)
        return [key for key in KEYS if self.tier.route(key) == at]

    def step(self) -> None:
        """Apply what has ended."""
        self.ended += self.engine.poll()
        self.engine.check()

    def until(self, holds: Callable[[], bool]) -> None:
        ends = time.monotonic() + 60
        while not holds():
            assert time.monotonic() < ends, "it never came to hold"
            self.step()
            self.engine.wait(self.engine.now_ns() + 5_000_000)

    def settle(self) -> None:
        self.until(lambda: self.engine.idle and self.engine._stores.idle)

    def offer(self, keys: Sequence[BlockKey]) -> None:
        """Offer each once; whether it was stored, events tell."""
        for key in keys:
            self.device.memory[-1] = truth(key)
            assert self.engine.offer([key], [DeviceBlock(len(self.device.memory) - 1)]) == 1
            self.settle()
        self.engine.drop_host_copies()

    def forget_host(self) -> None:
        """Also the host copies that no tier holds."""
        for key in KEYS:
            if self.engine._index.is_evictable(key, HOST):
                self.engine._stage.forget(key, HOST, Reason.ASKED)

    def load(self, keys: Sequence[BlockKey]) -> int:
        """Leading blocks that came, each compared; of the others no byte was touched before the load ended."""
        self._requests += 1
        name = f"r{self._requests}"
        self.device.memory[: len(keys)] = [UNTOUCHED] * len(keys)
        while (plan := self.engine.plan_load(Request(name, tuple(keys)))) is None:
            self.step()
        self.engine.start_load(plan, [DeviceBlock(i) for i in range(plan.hit_blocks)])
        self.until(lambda: bool(self.ended))
        [loaded], self.ended = self.ended, []
        assert loaded.request_id == name
        blocks = loaded.blocks
        assert [self.device.memory[i] == truth(key) for i, key in enumerate(keys[:blocks])] == [True] * blocks
        return blocks

    def failures(self) -> dict[tuple[JobKind, Outcome], int]:
        return {(kind, outcome): blocks for (_, kind, outcome), blocks in self.totals.failures.items()}


class Hang:
    """Calls that wait in it until `release`."""

    def __init__(self) -> None:
        self.hanging = threading.Semaphore(0)
        self._answer = threading.Event()

    def __call__(self, *_: object) -> None:
        self.hanging.release()
        assert self._answer.wait(120)

    def release(self) -> None:
        self._answer.set()
