"""The run: for each size, direction and depth, all contestants in turns, so that a drifting device drifts under all."""

from __future__ import annotations

import contextlib
import logging
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from forebay.bench.environment import describe_environment
from forebay.bench.evidence import ENOUGH_SHARE, NO_READS, Evidence, Kernel, Medium, ReadCounts, Verdict
from forebay.bench.io.contestants import (
    THREADS,
    Contestant,
    FioContestant,
    ThreadsContestant,
    TierContestant,
    Timed,
    busy_python,
)
from forebay.bench.io.fio import FioEngine, FioFailed, FioFound, check_places, find_fio
from forebay.bench.io.options import Direction, IoOptions, Load, check_options
from forebay.bench.io.results import Cell, Pass, Record, compare, summarize
from forebay.bench.io.setting import Setting, open_setting
from forebay.bench.progress import Progress, Silence
from forebay.tiers.file.format import checksum

log = logging.getLogger("forebay.bench.io")


def steps(options: IoOptions) -> int:
    """How many steps a progress will hear of."""
    return len(options.block_bytes) * len(options.directions) * len(options.depths)


def run_bench(
    options: IoOptions,
    *,
    command: Sequence[str] = (),
    progress: Progress | None = None,
    kernel: Kernel | None = None,
    fio: FioFound | None = None,
) -> Record:
    """Raises ConfigError for what cannot be measured, OSError when a disk fails or fills during the run."""
    check_options(options)
    began = datetime.now(UTC).isoformat(timespec="seconds")
    bench = _Bench(options, progress or Silence(), kernel or Kernel(), fio or find_fio())
    for block_bytes in options.block_bytes:
        bench.measure_size(block_bytes)
    evidence, passes = bench.evidence(), tuple(bench.passes)
    reasons = list(bench.write_reasons())
    if Direction.READS in options.directions:
        reasons += [*evidence.reasons, *bench.fio_reasons()]
    return Record(
        command=tuple(command),
        began=began,
        options=options,
        environment=describe_environment(),
        reads_by=bench.reads_by,
        writes_by=bench.writes_by,
        access=bench.access,
        fio=bench.fio.words,
        passes=passes,
        summaries=summarize(passes),
        comparisons=compare(passes, THREADS),
        checksum_core_s_per_gb=statistics.median(bench.checksum_core_s_per_gb),
        others_cores=statistics.mean(each.others_cores for each in passes),
        evidence=evidence,
        written=bench.written_shares(),
        verdict=Verdict.of(tuple(dict.fromkeys(reasons))),
    )


@dataclass(frozen=True, slots=True)
class _Field:
    """Who takes part at one block size."""

    setting: Setting
    tier: TierContestant
    threads: ThreadsContestant
    fio: tuple[FioContestant, ...]
    """One for each engine that works."""


class Others:
    """How many cores the processes that are neither this one nor its children keep busy, from now on."""

    def __init__(self, proc: Path) -> None:
        self._proc = proc
        self._began_s, self._all_s, self._own_s = time.monotonic(), self._busy_s(), _own_s()

    def cores(self) -> float:
        """On average so far; 0 where the kernel does not say."""
        wall_s = time.monotonic() - self._began_s
        others_s = (self._busy_s() - self._all_s) - (_own_s() - self._own_s)
        return max(0.0, others_s / wall_s) if wall_s > 0 else 0.0

    def _busy_s(self) -> float:
        """Of all cores: user, nice, system, interrupts."""
        try:
            fields = (self._proc / "stat").read_text().split("\n", 1)[0].split()
        except OSError:
            return 0.0
        return sum(int(fields[at]) for at in (1, 2, 3, 6, 7)) / os.sysconf("SC_CLK_TCK") if len(fields) > 7 else 0.0


def _checksum_core_s(setting: Setting) -> float:
    """Of all blocks in turn: together they are more than a cache holds."""
    began_s = time.thread_time()
    for view in setting.views:
        checksum(view[: setting.block_bytes])
    return time.thread_time() - began_s


def _own_s() -> float:
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


class _Writes:
    """What one contestant has written, and what the devices have."""

    def __init__(self) -> None:
        self._wanted_bytes = 0
        self._device_bytes: int | None = 0

    def add(self, wanted_bytes: int, before_bytes: int | None, after_bytes: int | None) -> None:
        self._wanted_bytes += wanted_bytes
        if self._device_bytes is None or before_bytes is None or after_bytes is None:
            self._device_bytes = None
        else:
            self._device_bytes += after_bytes - before_bytes

    @property
    def share(self) -> float | None:
        """None where the kernel does not say."""
        return None if self._device_bytes is None else self._device_bytes / self._wanted_bytes


def _writer(contestant: Contestant) -> str:
    return "fio" if isinstance(contestant, FioContestant) else contestant.name


class _Bench:
    def __init__(self, options: IoOptions, progress: Progress, kernel: Kernel, fio: FioFound) -> None:
        self.fio = fio
        self.passes: list[Pass] = []
        self.reads_by = self.writes_by = ""
        self.checksum_core_s_per_gb: list[float] = []
        self.access: tuple[str, ...] = ()
        self._options, self._progress, self._kernel = options, progress, kernel
        self._media = tuple(kernel.medium_of(root) for root in options.roots)
        self._read, self._wanted_bytes = NO_READS, 0
        """Over the reads of this process."""
        self._fio_read, self._fio_wanted_bytes = NO_READS, 0
        self._writes: dict[str, _Writes] = {}
        """Of each contestant; fio's engines together."""
        if fio.path is not None:
            check_places(options.roots)

    # --- what happens

    def measure_size(self, block_bytes: int) -> None:
        with open_setting(self._options, block_bytes) as setting, self._field(setting) as field:
            for direction in self._options.directions:
                for depth in self._options.depths:
                    cell = Cell(direction=direction, block_bytes=block_bytes, depth=depth)
                    self._progress.begins(cell.words)
                    self._measure_cell(cell, field)
                    self._progress.ended(f"{cell.words}: {self._found(cell)}")

    @contextlib.contextmanager
    def _field(self, setting: Setting) -> Iterator[_Field]:
        """The contestants, with the blocks that are read on disk."""
        self._progress.begins(f"writing {len(setting.keys)} blocks of {setting.block_bytes} bytes")
        tier = TierContestant(setting, self._options.io)
        try:
            opened = tier.tier(max(self._options.depths))
            reads, writes = opened.reads(), opened.writes()
            self.reads_by = f"{reads.by.value}: {reads.reason}"
            self.writes_by = f"{writes.by.value}: {writes.reason}"
            self.access = tuple(root.io.access.value for root in opened.describe())
            tier.fill()
            self.checksum_core_s_per_gb.append(_checksum_core_s(setting) / (setting.moved_bytes / 1e9))
            fio = self._fio_that_works(setting)
            yield _Field(setting, tier, ThreadsContestant(setting, setting.block_paths()), fio)
        finally:
            tier.close()

    def _fio_that_works(self, setting: Setting) -> tuple[FioContestant, ...]:
        if self.fio.path is None:
            return ()
        setting.write_control_files()
        working = []
        for engine in FioEngine:
            contestant = FioContestant(setting, self.fio.path, engine)
            trial = Cell(direction=Direction.READS, block_bytes=setting.block_bytes, depth=1)
            try:
                contestant.run(trial, 0, time.process_time)
            except FioFailed as failed:
                log.warning("fio's %s is left out: %s", engine.value, failed)
            else:
                working.append(contestant)
        return tuple(working)

    def _measure_cell(self, cell: Cell, field: _Field) -> None:
        best = self._best_fio(cell, field.fio)
        idle: list[Contestant] = [field.tier, field.threads, *best]
        busy: list[Contestant] = [field.tier, field.threads] if Load.BUSY in self._options.loads else []
        turns = [(each, Load.IDLE) for each in idle] + [(each, Load.BUSY) for each in busy]
        for turn in range(self._options.rounds):
            first = turn % len(turns)
            for contestant, load in turns[first:] + turns[:first]:
                self._one_pass(cell, contestant, load, turn)

    def _best_fio(self, cell: Cell, candidates: Sequence[FioContestant]) -> list[FioContestant]:
        """The engine that is fastest in a trial: one run of each, which does not count."""
        rates = {}
        for each in candidates:
            found = each.run(cell, 0, time.process_time)
            rates[each] = found.moved_bytes / found.wall_s
        return [max(rates, key=lambda each: rates[each])] if rates else []

    def _one_pass(self, cell: Cell, contestant: Contestant, load: Load, turn: int) -> None:
        before, written_before, others = self._counts(), self._written(), Others(self._kernel.proc)
        try:
            found = self._timed(cell, contestant, load, turn)
            written_after = self._written()
        finally:
            contestant.clear()
        if cell.direction is Direction.READS:
            self._account(contestant, self._counts().since(before), found)
        else:
            writes = self._writes.setdefault(_writer(contestant), _Writes())
            writes.add(found.all_bytes, written_before, written_after)
        self.passes.append(
            Pass(
                cell=cell,
                contestant=contestant.name,
                load=load,
                round=turn,
                moved_bytes=found.moved_bytes,
                wall_s=found.wall_s,
                core_s=found.core_s,
                others_cores=others.cores(),
                p50_s=found.p50_s,
                p99_s=found.p99_s,
                worst_s=found.worst_s,
            )
        )

    def _timed(self, cell: Cell, contestant: Contestant, load: Load, turn: int) -> Timed:
        if load is Load.IDLE:
            return contestant.run(cell, turn, time.process_time)
        with busy_python() as used_s:
            return contestant.run(cell, turn, lambda: time.process_time() - used_s())

    # --- what shows that it was physical

    def _counts(self) -> ReadCounts:
        """This process's reads; and those of all devices under the roots, each counted once."""
        counts = {medium.device_number: self._kernel.read_counts(medium) for medium in self._media}
        devices = [count.device_bytes for count in counts.values()]
        known = [each for each in devices if each is not None]
        return ReadCounts(
            process_bytes=next(iter(counts.values())).process_bytes,
            device_bytes=sum(known) if len(known) == len(devices) else None,
        )

    def _written(self) -> int | None:
        """Bytes that all devices under the roots have written, each counted once."""
        found = {medium.device_number: self._kernel.written_bytes(medium) for medium in self._media}
        known = [each for each in found.values() if each is not None]
        return sum(known) if len(known) == len(found) else None

    def written_shares(self) -> dict[str, float]:
        return {who: writes.share for who, writes in self._writes.items() if writes.share is not None}

    def write_reasons(self) -> Sequence[str]:
        """Why the writes cannot be called physical; empty if they can."""
        doubts = [f"physical writes cannot be shown: {medium.doubt}" for medium in self._media if medium.doubt]
        if doubts and self._writes:
            return doubts
        reasons = []
        for who, writes in self._writes.items():
            if writes.share is None:
                reasons.append("physical writes cannot be shown: the kernel does not say what the device wrote")
            elif writes.share < ENOUGH_SHARE:
                reasons.append(f"the writes of {who} were not physical: {writes.share:.0%} had reached the device")
        return reasons

    def _account(self, contestant: Contestant, read: ReadCounts, found: Timed) -> None:
        if isinstance(contestant, FioContestant):
            self._fio_read = self._fio_read.plus(read)
            self._fio_wanted_bytes += found.all_bytes
        else:
            self._read = self._read.plus(read)
            self._wanted_bytes += found.all_bytes

    def evidence(self) -> Evidence:
        medium = next((medium for medium in self._media if medium.doubt), self._media[0])
        if len(self._media) > 1:
            medium = _joined(medium, self._media)
        return Evidence(medium=medium, wanted_bytes=self._wanted_bytes, read=self._read)

    def fio_reasons(self) -> tuple[str, ...]:
        """fio is another process: only the devices' counters tell."""
        read_bytes = self._fio_read.device_bytes
        if not self._fio_wanted_bytes or read_bytes is None or read_bytes >= ENOUGH_SHARE * self._fio_wanted_bytes:
            return ()
        return (f"fio's reads were not physical: {read_bytes / self._fio_wanted_bytes:.0%} came from the device",)

    def _found(self, cell: Cell) -> str:
        [found] = compare([each for each in self.passes if each.cell == cell], THREADS)
        busy = "" if found.busy_to_idle is None else f", busy {found.busy_to_idle:.2f} of idle"
        return f"{found.gb_per_s:.2f} GB/s, {found.to_best_control:.2f} of {found.best_control}{busy}"


def _joined(medium: Medium, media: Sequence[Medium]) -> Medium:
    names = {each.device or each.source: None for each in media}
    return msgspec.structs.replace(medium, device=" + ".join(names), path=", ".join(each.path for each in media))
