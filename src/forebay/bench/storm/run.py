"""A storm on real disks, through the real engine and file tier.

```
fill:   every session's unique blocks through the engine into a new pool
storm:  for each round, in each order in turns: a new engine, as after a restart, with nothing in memory or page cache;
        all sessions are wanted at once, and each is timed until it is restored in full
```
"""

from __future__ import annotations

import contextlib
import gc
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from forebay.assemble import StoreConfig, open_engine, open_tiers
from forebay.bench.environment import describe_environment
from forebay.bench.evidence import NO_READS, Evidence, Kernel, Medium, ReadCounts, Verdict
from forebay.bench.progress import Progress, Silence
from forebay.bench.storm.device import StampDevice
from forebay.bench.storm.options import StormOptions, check_options, session_blocks, stored_bytes
from forebay.bench.storm.results import LABELS, ORDERED, Record, Storm, Wave, storm_of
from forebay.bench.storm.wave import restore, store
from forebay.bench.units import bytes_text, seconds_text
from forebay.engine import Engine, EngineOptions
from forebay.errors import ConfigError
from forebay.events import Totals
from forebay.fairness import Order
from forebay.flow import FlowOptions
from forebay.hostpool import HostPool
from forebay.keys import block_keys
from forebay.tiers.file import FileTier
from forebay.types import Namespace

_TIER = "file"
_BLOCK_TOKENS = 4


def steps(options: StormOptions) -> int:
    """How many steps a progress will hear of."""
    return 1 + len(options.sessions) * options.rounds * len(LABELS)


def run_storms(
    options: StormOptions,
    *,
    command: Sequence[str] = (),
    progress: Progress | None = None,
    kernel: Kernel | None = None,
) -> Record:
    """Run all storms. The pool is made in the roots and removed afterwards; nothing else is written.

    Raises ConfigError for what cannot work.
    """
    check_options(options)
    with contextlib.ExitStack() as stack:
        roots = tuple(stack.enter_context(_temporary_root(root)) for root in options.roots)
        return _Bench(options, roots, progress or Silence(), kernel or Kernel()).run(command)


@contextlib.contextmanager
def _temporary_root(parent: Path) -> Iterator[Path]:
    try:
        place = Path(tempfile.mkdtemp(prefix=".forebay-storm-", dir=parent))
    except OSError as error:
        raise ConfigError(f"no pool can be made in {parent} ({error.strerror}): name another directory") from None
    try:
        yield place / "pool"
    finally:
        shutil.rmtree(place, ignore_errors=True)


class _Bench:
    def __init__(self, options: StormOptions, roots: Sequence[Path], progress: Progress, kernel: Kernel) -> None:
        self._options, self._progress, self._kernel = options, progress, kernel
        self._namespace = storm_namespace(options.block_bytes)
        self._store = StoreConfig.embedded(
            roots, host_bytes=options.host_bytes, capacity_bytes=2 * stored_bytes(options), name=_TIER
        )
        self._keys = tuple(
            block_keys(self._namespace, [options.seed, number, *[0] * (_BLOCK_TOKENS * blocks - 2)])
            for number, blocks in enumerate(session_blocks(options, max(options.sessions)))
        )
        """Of each session of the largest storm: smaller ones want the first of them."""
        self._wrong_blocks = 0
        self._media: dict[str, Medium] = {}
        self._read: dict[str, ReadCounts] = {}
        self._wanted_bytes = 0

    def run(self, command: Sequence[str]) -> Record:
        self._fill()
        tier = open_tiers(self._store, self._namespace)[_TIER]
        assert isinstance(tier, FileTier)
        try:
            self._media = {
                medium.device or str(path): medium
                for path in self._options.roots
                for medium in (self._kernel.medium_of(path),)
            }
            self._read = dict.fromkeys(self._media, NO_READS)
            storms = tuple(self._storm(tier, sessions) for sessions in self._options.sessions)
        finally:
            tier.close()
        evidence = self._evidence()
        reasons = [reason for each in evidence for reason in each.reasons]
        if self._wrong_blocks:
            reasons.append(f"{self._wrong_blocks} blocks were not what was asked for")
        short = [f"{storm.sessions} sessions: {text}" for storm in storms for text in self._losses(storm)]
        plain: dict[str, object] = msgspec.to_builtins(self._options, enc_hook=str)
        return Record(
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            verdict=Verdict.of((*reasons, *short)),
            storms=storms,
            evidence=evidence,
            wrong_blocks=self._wrong_blocks,
            options=plain,
            environment=describe_environment(),
            command=tuple(command),
        )

    # ---- the phases

    def _fill(self) -> None:
        blocks = sum(map(len, self._keys))
        what = f"{len(self._keys)} sessions, {bytes_text(blocks * self._options.block_bytes)}"
        self._progress.begins(f"Writing {what}")
        with self._open(ORDERED) as engine:
            began_ns = engine.now_ns()
            for keys in self._keys:
                store(engine, keys)
            taken_s = (engine.now_ns() - began_ns) / 1e9
        self._progress.ended(f"wrote {what} in {seconds_text(taken_s)}")

    def _storm(self, tier: FileTier, sessions: int) -> Storm:
        waves: list[Wave] = []
        for number in range(1, self._options.rounds + 1):
            orders = tuple(LABELS) if number % 2 else tuple(LABELS)[::-1]  # neither always has the other before it
            for order in orders:
                self._progress.begins(f"{sessions} sessions, {LABELS[order]}, round {number}")
                wave = self._wave(tier, sessions, order, number)
                waves.append(wave)
                mean_s = sum(wave.ttft_s) / sessions
                self._progress.ended(
                    f"{sessions} sessions, {LABELS[order]}, round {number}: mean {seconds_text(mean_s)}, "
                    f"all after {seconds_text(wave.whole_s)}, {wave.bytes_per_s / 1e9:.2f} GB/s"
                )
        return storm_of(tuple(map(len, self._keys[:sessions])), waves)

    def _wave(self, tier: FileTier, sessions: int, order: Order, number: int) -> Wave:
        keys = self._keys[:sessions]
        with self._open(order) as engine:
            tier.drop_page_cache()
            before = self._counts()
            restored = restore(engine, keys)
            for name, counts in self._counts().items():
                self._read[name] = self._read[name].plus(counts.since(before[name]))
        restored_bytes = restored.blocks * self._options.block_bytes
        self._wanted_bytes += restored_bytes
        mixed = len(set(map(len, keys))) > 1
        return Wave(
            order=order,
            round=number,
            restored_bytes=restored_bytes,
            ttft_s=restored.ttft_s,
            short=tuple(range(1, sessions, 2)) if mixed else (),
        )

    @contextlib.contextmanager
    def _open(self, order: Order) -> Iterator[Engine]:
        """A new engine over the pool, with nothing in its memory."""
        devices: list[StampDevice] = []

        def make_device(pool: HostPool) -> StampDevice:
            devices.append(StampDevice(pool, time.monotonic_ns))
            return devices[-1]

        options = EngineOptions(flow=FlowOptions(order=order), load_deadline_s=600.0)
        store = msgspec.structs.replace(self._store, engine=options)
        engine = open_engine(store, self._namespace, make_device, emit=Totals().add)
        try:
            yield engine
        finally:
            engine.close()
            self._wrong_blocks += devices[0].wrong_blocks
        del engine
        gc.collect()  # its memory is to be free before the next one asks for as much

    # ---- what was observed

    def _counts(self) -> dict[str, ReadCounts]:
        return {name: self._kernel.read_counts(medium) for name, medium in self._media.items()}

    def _evidence(self) -> tuple[Evidence, ...]:
        """Blocks lie evenly on the roots. Where they share a device, or there is one, it has to have read them all."""
        share = 1 / len(self._media)
        return tuple(
            Evidence(
                medium=medium,
                wanted_bytes=int(self._wanted_bytes * share * (1.0 if share == 1 else 0.8)),
                read=self._read[name],
            )
            for name, medium in self._media.items()
        )

    def _losses(self, storm: Storm) -> Iterator[str]:
        whole_bytes = sum(storm.blocks) * self._options.block_bytes
        for wave in storm.waves:
            if wave.restored_bytes != whole_bytes:
                yield f"{LABELS[wave.order]}, round {wave.round}: not every block was restored"


def storm_namespace(block_bytes: int) -> Namespace:
    return Namespace(
        model="restore storm",
        weights_digest="none",
        kv_dtype="uint8",
        rope="none",
        layers=1,
        kv_heads=1,
        head_dim=1,
        block_tokens=_BLOCK_TOKENS,
        block_bytes=block_bytes,
        layout="random bytes",
    )
