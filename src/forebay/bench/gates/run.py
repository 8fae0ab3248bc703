"""One run of a plan, gate by gate. Killed at any time, it goes on where it was: what is decided stays decided.

OUT/plan.toml     the plan, as it was read
OUT/gates.json    the record: all results so far
OUT/<gate>/       a gate's evidence, and what it needs to go on
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec

import forebay
from forebay.bench.environment import describe_environment
from forebay.bench.evidence import Kernel
from forebay.bench.files import CannotWrite, write_whole
from forebay.bench.gates.gate import Found, Gate, Workplace
from forebay.bench.gates.plan import AfterFailure, Plan
from forebay.bench.gates.report import encode_json
from forebay.bench.gates.verdicts import GateResult, GatesRecord, Outcome, Start, worst
from forebay.bench.progress import Progress, Silence
from forebay.errors import ConfigError, ForebayError

log = logging.getLogger("forebay.bench.gates")

RECORD_NAME, PLAN_NAME = "gates.json", "plan.toml"
_LOCK_NAME = ".lock"
_HALVES = (f".{RECORD_NAME}.", f".{PLAN_NAME}.")
"""How files begin that a process was writing when it was killed."""
_MOST_RECORD_BYTES = 256 * 2**20


def steps(plan: Plan) -> int:
    """How many steps a progress hears of, when nothing was done before."""
    return sum(gate.steps + 1 for gate in plan.gates.values())


def run_plan(
    plan: Plan,
    out: Path,
    *,
    command: Sequence[str] = (),
    progress: Progress | None = None,
    kernel: Kernel | None = None,
    now: Callable[[], str] = lambda: datetime.now(UTC).isoformat(timespec="seconds"),
) -> GatesRecord:
    """Run what is left of the plan; all of it in a new directory, nothing when it was through already.

    Raises ConfigError when `out` belongs to another plan or version, another process is at work in it, or it cannot be
    written to; then the run can be gone on with.
    """
    with _only_one(out):
        record = _resumed(plan, out) or _begun(plan, out, command, now())
        if record.is_whole:
            return record
        start = Start(at=now(), boot=_boot(), forebay=forebay.__version__, environment=describe_environment())
        record = msgspec.structs.replace(record, starts=(*record.starts, start))
        write_record(record, out)
        run = _Run(plan, out, progress or Silence(), kernel or Kernel(), now)
        for name, gate in plan.gates.items():
            if name not in {result.gate for result in record.results}:
                attempts = {**record.attempts, name: (*record.attempts.get(name, ()), now())}
                record = msgspec.structs.replace(record, attempts=attempts)
                write_record(record, out)
                record = msgspec.structs.replace(record, results=(*record.results, run.one(name, gate, record)))
                write_record(record, out)
        return record


def read_record(out: Path) -> GatesRecord | None:
    """None where no run has begun. Raises ConfigError for a record that cannot be read."""
    path = out / RECORD_NAME
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_RECORD_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): name another --out") from None
    try:
        return msgspec.json.decode(content, type=GatesRecord)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is no record of gates ({error}): name another --out") from None


def write_record(record: GatesRecord, out: Path) -> None:
    write_whole(out / RECORD_NAME, encode_json(record))


def evidence_files(record: GatesRecord, out: Path) -> dict[str, Path]:
    """All that a bundle of this run holds, by name."""
    names = [RECORD_NAME, PLAN_NAME, *(name for result in record.results for name in result.files)]
    return {name: out / name for name in names}


@contextlib.contextmanager
def _only_one(out: Path) -> Iterator[None]:
    """No other process works in the directory. The lock ends with the process, however that ends."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(out / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written ({error.strerror}): name another --out") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise ConfigError(f"another process runs gates in {out}: wait for it, or name another --out") from None
    finally:
        os.close(descriptor)


def _begun(plan: Plan, out: Path, command: Sequence[str], created: str) -> GatesRecord:
    for entry in out.iterdir():
        if entry.name.startswith(_HALVES):
            entry.unlink(missing_ok=True)
    foreign = sorted(entry.name for entry in out.iterdir() if entry.name not in (_LOCK_NAME, PLAN_NAME))
    if foreign:
        raise ConfigError(f"{out} holds {foreign[0]!a} but no run of gates: name a new or an empty --out")
    write_whole(out / PLAN_NAME, plan.text.encode())
    return GatesRecord(
        created=created, title=plan.title, plan_text=plan.text, plan_sha256=plan.sha256, planned=tuple(plan.gates),
        results=(), environment=describe_environment(), command=tuple(command),
    )  # fmt: skip


def _resumed(plan: Plan, out: Path) -> GatesRecord | None:
    record = read_record(out)
    if record is None:
        return None
    if record.plan_sha256 != plan.sha256:
        raise ConfigError(
            f"the plan is not the one with which the run in {out} began, and limits are not changed on the way: "
            "run the new plan in a new --out"
        )
    other = {start.forebay for start in record.starts} - {forebay.__version__}
    if other and not record.is_whole:
        raise ConfigError(
            f"the run in {out} began with forebay {min(other)} and this is {forebay.__version__}: "
            "go on with that one, or begin anew in another --out"
        )
    return record


@dataclass(frozen=True, slots=True)
class _Run:
    plan: Plan
    out: Path
    progress: Progress
    kernel: Kernel
    now: Callable[[], str]

    def one(self, name: str, gate: Gate, record: GatesRecord) -> GateResult:
        began = self.now()
        before = next((each for each in record.results if each.outcome is not Outcome.PASS), None)
        if before is not None and self.plan.after_failure is AfterFailure.STOP:
            reason = f"not run: {before.gate} ended as {before.outcome.name}, and the plan says to stop then"
            found = Found(checks=(), reasons=(reason,))
        else:
            found = self._measured(name, gate, record)
        outcome = worst(found.checks)
        self.progress.ended(f"{name}: {outcome.name}{_first(found)}")
        return GateResult(
            gate=name, outcome=outcome, checks=found.checks, reasons=found.reasons, stopped_early=found.stopped_early,
            began=began, ended=self.now(), attempts=record.attempts[name],
            files=tuple(f"{name}/{file}" for file in found.files),
        )  # fmt: skip

    def _measured(self, name: str, gate: Gate, record: GatesRecord) -> Found:
        self.progress.begins(name)
        directory = self.out / name
        directory.mkdir(exist_ok=True)
        digest = hashlib.sha256(f"{record.created}\0{self.out.resolve()}\0{name}".encode("utf-8", "backslashreplace"))
        work = Workplace(
            directory=directory,
            run_name=f"{name}-{digest.hexdigest()[:12]}",
            progress=self.progress,
            kernel=self.kernel,
        )
        try:
            return gate.run(work)
        except CannotWrite:  # no finding: once there is room, the run goes on
            raise
        except (OSError, ForebayError) as error:
            log.exception("gate %s could not measure", name)
            return Found(checks=(), reasons=(f"it could not measure: {type(error).__name__}: {error}",))


def _first(found: Found) -> str:
    """What to say of a gate at once."""
    for words in (found.stopped_early, *found.reasons[:1]):
        if words:
            return f", {words}"
    return ""


def _boot() -> str:
    """Another one after a reboot."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
