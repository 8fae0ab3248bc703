"""Runs the workers, strikes them, looks at the pool, and writes the log. Decides nothing but when to end."""

from __future__ import annotations

import contextlib
import logging
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from forebay.assemble import open_tiers
from forebay.bench.evidence import Medium
from forebay.bench.files import CannotWrite
from forebay.bench.gates.gate import Found, Workplace
from forebay.bench.gates.stability.disks import Disks
from forebay.bench.gates.stability.faults import Fault, schedule
from forebay.bench.gates.stability.findings import Findings
from forebay.bench.gates.stability.log import (
    Closing,
    GateError,
    Line,
    Log,
    Look,
    Report,
    Resumed,
    Sample,
    Strike,
    WorkerEnded,
    WorkerStuck,
    read_log,
)
from forebay.bench.gates.stability.options import FaultKind, Options, check_machine
from forebay.bench.gates.stability.worker import TIER, Orders, namespace, store_config
from forebay.bench.units import seconds_text
from forebay.errors import ConfigError, ForebayError
from forebay.testing.struck_file import Control

log = logging.getLogger("forebay.bench.gates.stability")

LOG_NAME, CONTROL_NAME = "log.jsonl", "control"
PROGRESS_STEPS = 20
_WAKE_S = 0.2
_ENDS_WITHIN_S = 150.0
"""Of a worker that was asked to: longer than its longest rest."""
_DIES_WITHIN_S = 60.0
"""Of one that was killed: a system call that a dead device never answers outlives any signal."""
_STARTS_WITHIN_S = 300.0
_LONGEST_GAP_S = 5.0
"""Between two looks at the clock, that counts: far longer than it takes to come by again."""


@dataclass(frozen=True, slots=True)
class _Heard:
    """From one worker. `report` is None at the end of its output."""

    incarnation: int
    report: Report | None


@dataclass(slots=True)
class _Running:
    worker: int
    incarnation: int
    process: subprocess.Popen[bytes]
    was_asked: bool = False


class Stopwatch:
    """Time in which somebody looks at it: when the supervisor is stopped, workers may be too, and that is no load."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._read_s: float | None = None
        self._counted_s = 0.0
        self.stood_still_s = 0.0

    def start(self) -> None:
        self._read_s = self._clock_s()

    def read_s(self) -> float:
        """Seconds since the start; 0 before it."""
        if self._read_s is not None:
            now_s = self._clock_s()
            passed_s, self._read_s = now_s - self._read_s, now_s
            self._counted_s += min(passed_s, _LONGEST_GAP_S)
            self.stood_still_s += max(0.0, passed_s - _LONGEST_GAP_S)
        return self._counted_s


class Supervisor:
    """One attempt, from the beginning or from where the log ends."""

    def __init__(self, options: Options, work: Workplace) -> None:
        self._options, self._work = options, work
        self._faults = schedule(options)
        self._findings = Findings(options, self._faults)
        self._shm: set[str] = set()
        for line in read_log(work.directory / LOG_NAME):
            self._findings.add(line)
            if isinstance(line, Sample):
                self._shm.update(line.report.shm_segments)
        self._is_new = self._findings.starts == 0
        self._elapsed_before_s = self._findings.elapsed_s
        scratches = [work.scratch_path(Path(root)) for root in options.roots]
        self._disks = Disks(scratches, self._note)
        self._watch = Stopwatch()
        self._heard: queue.SimpleQueue[_Heard] = queue.SimpleQueue()
        self._running: dict[int, _Running] = {}
        """By worker."""
        self._at_work: set[int] = set()
        """Workers that were heard of."""
        self._incarnations = self._findings.incarnations
        self._steps_told = 0

    def run(self) -> Found:
        try:
            found = self._run()
        except CannotWrite:  # it will be gone on with
            raise
        except (OSError, ForebayError):
            self._disks.remove()
            raise
        self._disks.remove()
        return found

    def _run(self) -> Found:
        if self._findings.closing is None:
            if self._is_new:
                check_machine(self._options)
                self._disks.make()
            self._control = Control(self._work.directory / CONTROL_NAME)
            self._log = Log(self._work.directory / LOG_NAME)
            self._add(
                Resumed(
                    elapsed_s=self._elapsed_s,
                    at=datetime.now(UTC).isoformat(timespec="seconds"),
                    media=tuple(self._work.kernel.medium_of(Path(root)) for root in self._options.roots),
                )
            )
            try:
                self._end_faults()
                self._disks.find()
                self._load()
                self._close()
            finally:
                for running in self._running.values():
                    running.process.kill()
                self._end_faults()
                self._log.close()
        cause = self._findings.lost_cause
        stopped = f"stopped after {seconds_text(self._findings.elapsed_s)} of load: {cause}" if cause else ""
        return Found(
            checks=self._findings.checks(),
            reasons=tuple(self._notes()),
            stopped_early=stopped if self._findings.elapsed_s < self._options.duration_s else "",
            files=tuple(sorted(path.name for path in self._work.directory.iterdir() if path.name != CONTROL_NAME)),
        )

    def _notes(self) -> Iterator[str]:
        if self._findings.starts > 1:
            yield f"interrupted and gone on with {self._findings.starts - 1} times"
        if self._watch.stood_still_s:
            yield f"stood still for {seconds_text(self._watch.stood_still_s)}, which are not counted as time of load"
        if self._findings.errors:
            yield "errors: " + ", ".join(f"{kind}: {count}" for kind, count in self._findings.errors.items())
        yield from (medium_text(medium) for medium in self._findings.media)

    # --- the load

    @property
    def _elapsed_s(self) -> float:
        return self._elapsed_before_s + self._watch.read_s()

    def _load(self) -> None:
        """Until the time is over, or nothing can pass any more."""
        if self._elapsed_s >= self._options.duration_s or self._findings.lost_cause:
            return
        self._start_all()
        begun = self._faults[: self._findings.struck]
        pending = list(self._faults[self._findings.struck :])
        active = [self._apply(fault) for fault in begun if fault.ends_s > self._elapsed_s]  # interrupted meanwhile
        next_look_s = self._elapsed_s
        while self._elapsed_s < self._options.duration_s and not self._findings.lost_cause:
            self._listen(_WAKE_S)
            while pending and self._elapsed_s >= pending[0].begins_s:
                active.append(self._strike(pending.pop(0)))
            for fault in [each for each in active if self._elapsed_s >= each.ends_s]:
                active.remove(fault)
                self._end_fault(fault)
            if self._elapsed_s >= next_look_s:
                self._disks.bring_back_late()
                if (pool_bytes := self._disks.look(self._options.capacity_bytes)) is not None:
                    self._add(Look(elapsed_s=self._elapsed_s, pool_bytes=pool_bytes))
                next_look_s = self._elapsed_s + self._options.look_s
            self._tell()
        self._end_faults()
        self._stop_all()

    def _tell(self) -> None:
        """One line a twentieth of the time."""
        share = min(1.0, self._elapsed_s / self._options.duration_s)
        while self._steps_told < int(share * PROGRESS_STEPS):
            self._steps_told += 1
            if self._steps_told / PROGRESS_STEPS <= self._elapsed_before_s / self._options.duration_s:
                continue  # told before the interruption
            of = seconds_text(self._options.duration_s)
            self._work.progress.ended(f"{self._steps_told * 100 // PROGRESS_STEPS} % of {of}: {self._findings.summary}")

    def _listen(self, timeout_s: float) -> None:
        """To what the workers say, until nothing came for so long."""
        with contextlib.suppress(queue.Empty):
            heard = self._heard.get(timeout=timeout_s)
            while True:
                self._hear(heard)
                heard = self._heard.get_nowait()

    def _hear(self, heard: _Heard) -> None:
        running = next((each for each in self._running.values() if each.incarnation == heard.incarnation), None)
        if running is None:
            return
        if heard.report is not None:
            self._at_work.add(running.worker)
            self._shm.update(heard.report.shm_segments)
            self._add(
                Sample(
                    elapsed_s=self._elapsed_s, worker=running.worker, incarnation=running.incarnation,
                    report=heard.report,
                )
            )  # fmt: skip
            return
        try:
            exit_code = running.process.wait(_DIES_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._give_up(running)
            return
        del self._running[running.worker]
        self._add(
            WorkerEnded(
                elapsed_s=self._elapsed_s, worker=running.worker, incarnation=running.incarnation, exit_code=exit_code,
                was_asked=running.was_asked,
            )
        )  # fmt: skip

    # --- workers

    def _start_all(self) -> None:
        """The time of load begins when all are at work."""
        for worker in range(self._options.workers):
            self._start(worker)
        gives_up_s = time.monotonic() + _STARTS_WITHIN_S
        while len(self._at_work) < self._options.workers and len(self._running) == self._options.workers:
            self._listen(_WAKE_S)
            if time.monotonic() > gives_up_s:
                raise ConfigError(f"the workers were not ready within {_STARTS_WITHIN_S:g} s: their logs say why")
        self._watch.start()

    def _start(self, worker: int) -> None:
        is_struck = worker % 2 == 1
        incarnation, self._incarnations = self._incarnations, self._incarnations + 1
        orders = Orders(
            options=self._options,
            pool_roots=tuple(str(pool) for pool in self._disks.pools),
            control=str(self._work.directory / CONTROL_NAME) if is_struck else "",
            seed=self._options.seed * 1_000_003 + incarnation,
        )
        with (self._work.directory / f"worker{worker}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "forebay.bench.gates.stability.worker"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                start_new_session=True,  # an interrupt from the keyboard is the supervisor's
            )  # fmt: skip
        self._running[worker] = _Running(worker, incarnation, process)
        threading.Thread(target=self._hear_all, args=(incarnation, process), daemon=True).start()
        _say(process, msgspec.json.encode(orders) + b"\n")

    def _hear_all(self, incarnation: int, process: subprocess.Popen[bytes]) -> None:
        """On a thread of its own."""
        assert process.stdout is not None
        with process.stdout:
            for text in process.stdout:
                with contextlib.suppress(msgspec.MsgspecError):  # the last line of a process that was killed
                    self._heard.put(_Heard(incarnation, msgspec.json.decode(text, type=Report)))
        self._heard.put(_Heard(incarnation, None))

    def _stop_all(self) -> None:
        for running in self._running.values():
            running.was_asked = True
            _say(running.process, b"\n")
        gives_up_s = time.monotonic() + _ENDS_WITHIN_S
        while self._running:
            self._listen(_WAKE_S)
            if time.monotonic() > gives_up_s:
                for running in tuple(self._running.values()):
                    running.was_asked = False
                    running.process.kill()
                    self._await_end(running)

    def _await_end(self, running: _Running) -> bool:
        """Of one that was killed: hear all that it said. False if it does not end: then it is given up."""
        gives_up_s = time.monotonic() + _DIES_WITHIN_S
        while self._running.get(running.worker) is running:
            if time.monotonic() > gives_up_s:
                self._give_up(running)
            else:
                self._listen(_WAKE_S)
        return running.process.returncode is not None

    def _give_up(self, running: _Running) -> None:
        del self._running[running.worker]
        self._add(WorkerStuck(elapsed_s=self._elapsed_s, worker=running.worker, incarnation=running.incarnation))

    # --- faults

    def _strike(self, fault: Fault) -> Fault:
        self._add(Strike(elapsed_s=self._elapsed_s, number=fault.number, kind=fault.kind, target=fault.target))
        return self._apply(fault)

    def _apply(self, fault: Fault) -> Fault:
        match fault.kind:
            case FaultKind.KILL:
                self._kill(fault.target)
            case FaultKind.FULL:
                self._control.fill_disk()
            case FaultKind.SLOW:
                self._control.set_delay(self._options.slow_s)
            case FaultKind.LOST:
                self._disks.take_away(fault.target)
            case FaultKind.PULLED:
                self._work.progress.ended(pull_text(self._options, fault))
        return fault

    def _kill(self, worker: int) -> None:
        """And start it again, once it is known to be dead."""
        running = self._running.get(worker)
        if running is not None:
            running.was_asked = True
            running.process.kill()
            if self._await_end(running):
                self._start(worker)

    def _end_fault(self, fault: Fault) -> None:
        match fault.kind:
            case FaultKind.FULL:
                self._control.free_disk()
            case FaultKind.SLOW:
                self._control.set_delay(0.0)
            case FaultKind.LOST:
                self._disks.bring_back(fault.target)
            case FaultKind.KILL | FaultKind.PULLED:
                pass

    def _end_faults(self) -> None:
        """All of them, whichever are on."""
        self._control.free_disk()
        self._control.set_delay(0.0)
        self._disks.bring_back_all()

    # --- the end

    def _close(self) -> None:
        """What is left when everybody has gone. Of a device that is gone too nothing is known: the checks lack it."""
        try:
            closing = self._closing()
        except (OSError, ForebayError) as error:
            log.warning("what is left in the pool cannot be seen: %s", error)
            self._note("close failed")
        else:
            self._add(closing)

    def _closing(self) -> Closing:
        """Opening the pool once more is what tidies up after those killed."""
        self._disks.check_there()
        config = store_config(self._options, [str(pool) for pool in self._disks.pools], "")
        tier = open_tiers(config, namespace(self._options))[TIER]
        try:
            counted_bytes = sum(stored.stored_bytes for stored in tier.scan())
        finally:
            tier.close()
        return Closing(
            elapsed_s=self._elapsed_s,
            files_bytes=self._disks.pool_bytes(),
            counted_bytes=counted_bytes,
            temporary_files=self._disks.temporary_files(),
            shm_segments=sum(Path(name).exists() for name in self._shm),
        )

    def _note(self, kind: str) -> None:
        self._add(GateError(elapsed_s=self._elapsed_s, kind=kind))

    def _add(self, line: Line) -> None:
        self._log.add(line)
        self._findings.add(line)


def pull_text(options: Options, fault: Fault) -> str:
    return (
        f"pull the device under {options.roots[fault.target]} now, and have it back and mounted within "
        f"{seconds_text(fault.ends_s - fault.begins_s)}"
    )


def medium_text(medium: Medium) -> str:
    """On one line."""
    parts = [f"{medium.path} is {medium.filesystem} on {medium.device or medium.source}", medium.mount_options]
    return ", ".join(filter(None, [*parts, *(f"{name} {value}" for name, value in medium.hardware.items())]))


def _say(process: subprocess.Popen[bytes], text: bytes) -> None:
    """To a process that may be dead already: then its end tells."""
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.write(text)
        process.stdin.flush()
