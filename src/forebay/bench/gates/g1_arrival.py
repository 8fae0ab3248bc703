"""Gate G1: the devices as they arrive. Raw bandwidth, latency tails and integrity at the block sizes in use, and how
devices and links are attached, against what was promised.

Raw is the best of the plain controls of `forebay bench io`: fio, and threads that read files. What of it the product
reaches is not judged here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from forebay.bench.evidence import Validity
from forebay.bench.files import write_whole
from forebay.bench.gates.gate import Found, Workplace, check_root
from forebay.bench.gates.integrity import Integrity, prove_integrity
from forebay.bench.gates.verdicts import Bound, Check, check
from forebay.bench.io import report as io_report
from forebay.bench.io import run as io_run
from forebay.bench.io.options import Direction, IoOptions
from forebay.bench.io.options import check_options as check_io_options
from forebay.bench.io.results import TIER, Record, Summary, block_text
from forebay.bench.topology import NOT_READABLE, DeviceTopology, LinkTopology, Topology, words
from forebay.bench.units import encodable
from forebay.errors import ConfigError


class Promise(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Of one device, by a directory on it. What is not promised is measured and written down, and not judged."""

    path: str
    read_bytes_per_s: float | None = None
    write_bytes_per_s: float | None = None
    read_p99_s: float | None = None
    """Of one block, with `in_flight` of them on their way."""
    write_p99_s: float | None = None
    read_worst_s: float | None = None
    """Of the slowest block of all rounds."""
    write_worst_s: float | None = None
    pcie_width: int | None = None
    """Lanes, of each disk under the directory."""
    pcie_gt_per_s: float | None = None
    numa_node: int | None = None


class LinkPromise(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Of one network interface."""

    interface: str
    speed_mbit_per_s: int | None = None
    mtu_bytes: int | None = None
    pause_rx: bool | None = None
    pause_tx: bool | None = None
    numa_node: int | None = None


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    root: tuple[Promise, ...]
    link: tuple[LinkPromise, ...] = ()
    block_bytes: tuple[int, ...] = (2 * 2**20, 8 * 2**20)
    in_flight: tuple[int, ...] = (16,)
    rounds: int = 5
    pass_bytes: int = 2**30
    """Moved by one contestant in one round."""
    integrity_bytes: int = 2**30
    """Written, and read back and compared, at each block size."""


@dataclass(frozen=True, slots=True)
class ArrivalGate:
    options: Options
    topology: Topology

    @property
    def steps(self) -> int:
        sizes = len(self.options.block_bytes)
        return len(self.options.root) * (2 * sizes * len(self.options.in_flight) + sizes)

    def run(self, work: Workplace) -> Found:
        """From the beginning, also after an interruption. Ends at the first device that gives back something else."""
        checks: list[Check] = []
        attached: list[DeviceTopology | LinkTopology] = []
        files: list[str] = []
        wrong = ""
        for number, promise in enumerate(self.options.root):
            with work.scratch(Path(promise.path)) as scratch:
                medium = work.kernel.medium_of(scratch)
                devices = self.topology.devices(medium.device)
                attached += devices
                checks += attachment_checks(promise, devices)
                for block_bytes in self.options.block_bytes:
                    proven = self._prove(work, scratch, promise, block_bytes)
                    checks.append(integrity_check(promise, proven, medium.doubt))
                    if proven.wrong_bytes:
                        wrong = f"stopped: {proven.wrong_bytes:,} wrong bytes came back from {promise.path}"
                        break
                if wrong:
                    break
                record = io_run.run_bench(io_options(self.options, scratch), progress=work.progress, kernel=work.kernel)
            checks += device_checks(promise, record, medium.doubt)
            files.append(f"device{number}.json")
            write_whole(work.directory / files[-1], io_report.encode_json(record))
        for link in self.options.link:
            found = self.topology.link(link.interface)
            attached.append(found)
            checks += link_checks(link, found)
        files.append("topology.json")
        plain = encodable(msgspec.to_builtins(attached))
        write_whole(work.directory / files[-1], msgspec.json.format(msgspec.json.encode(plain)) + b"\n")
        reasons = tuple(words(each) for each in attached)
        return Found(checks=tuple(checks), reasons=reasons, stopped_early=wrong, files=tuple(files))

    def _prove(self, work: Workplace, scratch: Path, promise: Promise, block_bytes: int) -> Integrity:
        what = f"{promise.path}: blocks of {block_text(block_bytes)}, written and compared"
        work.progress.begins(what)
        found = prove_integrity(scratch, block_bytes, self.options.integrity_bytes)
        work.progress.ended(f"{what}: {found.wrong_bytes} wrong bytes of {found.compared_bytes:,}")
        return found


def build(options: Options) -> ArrivalGate:
    if not options.root:
        raise ConfigError("name at least one [[gate.options.root]], with its path and what was promised of it")
    for promise in options.root:
        check_root(Path(promise.path))
        check_io_options(io_options(options, Path(promise.path)))
        _check_positive(promise.path, promise)
    for link in options.link:
        _check_positive(link.interface, link)
    if len({promise.path for promise in options.root}) < len(options.root):
        raise ConfigError("a root is named twice: name each once")
    if options.integrity_bytes < max(options.block_bytes):
        raise ConfigError(f"integrity_bytes {options.integrity_bytes} is less than one block: give more")
    return ArrivalGate(options, Topology())


def _check_positive(name: str, promise: Promise | LinkPromise) -> None:
    for field, value in msgspec.structs.asdict(promise).items():
        least = 0 if field == "numa_node" else 1e-9
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and not (math.isfinite(value) and value >= least):
            raise ConfigError(f"{name}: {field} must be a number above 0, not {value}")


def io_options(options: Options, root: Path) -> IoOptions:
    return IoOptions(
        roots=(root,), block_bytes=options.block_bytes, depths=options.in_flight, rounds=options.rounds,
        pass_bytes=options.pass_bytes,
    )  # fmt: skip


# --- verdicts


def device_checks(promise: Promise, record: Record, doubt: str) -> Iterator[Check]:
    """At each block size and depth, the best control against what was promised. `doubt`: why it is no disk."""
    doubts = "; ".join(record.verdict.reasons) if record.verdict.validity is Validity.INVALID else ""
    limits = {
        Direction.READS: ("read", promise.read_bytes_per_s, promise.read_p99_s, promise.read_worst_s),
        Direction.WRITES: ("write", promise.write_bytes_per_s, promise.write_p99_s, promise.write_worst_s),
    }
    for cell in dict.fromkeys(each.cell for each in record.summaries):
        verb, bytes_per_s, p99_s, worst_s = limits[cell.direction]
        where = f"{block_text(cell.block_bytes)}, {cell.depth} in flight, {promise.path}"
        best = _best([each for each in record.summaries if each.cell == cell and each.contestant != TIER])
        invalid = doubts if cell.direction is Direction.READS else doubt
        if bytes_per_s is not None:
            measured = best.gb_per_s * 1e9 if best else None
            yield check(f"{verb}_bandwidth@{where}", measured, Bound.AT_LEAST, bytes_per_s, "bytes/s", invalid=invalid)
        if p99_s is not None:
            measured = best.p99_s if best else None
            yield check(f"{verb}_latency_p99@{where}", measured, Bound.AT_MOST, p99_s, "s", invalid=invalid)
        if worst_s is not None:
            measured = best.worst_s if best else None
            yield check(f"{verb}_latency_worst@{where}", measured, Bound.AT_MOST, worst_s, "s", invalid=invalid)


def _best(controls: Sequence[Summary]) -> Summary | None:
    return max(controls, key=lambda each: each.gb_per_s, default=None)


def integrity_check(promise: Promise, found: Integrity, doubt: str) -> Check:
    """Wrong bytes are wrong on whatever they were; right ones prove nothing of a disk unless they came from one."""
    measured = found.wrong_bytes if found.compared_bytes else None
    where = f"{block_text(found.block_bytes)}, {promise.path}"
    return check(f"wrong_bytes@{where}", measured, Bound.EQUAL, 0, "bytes", invalid="" if measured else doubt)


def attachment_checks(promise: Promise, devices: Sequence[DeviceTopology]) -> Iterator[Check]:
    for name, bound, unit in (
        ("pcie_width", Bound.AT_LEAST, "lanes"), ("pcie_gt_per_s", Bound.AT_LEAST, "GT/s"),
        ("numa_node", Bound.EQUAL, "node"),
    ):  # fmt: skip
        limit = getattr(promise, name)
        if limit is None:
            continue
        if not devices:
            yield check(f"{name}@{promise.path}", None, bound, limit, unit, invalid="no disk is known under it")
        for device in devices:
            yield _attached(f"{name}@{device.device}", getattr(device, name), bound, limit, unit)


def link_checks(promise: LinkPromise, found: LinkTopology) -> Iterator[Check]:
    for name, bound, unit in (
        ("speed_mbit_per_s", Bound.AT_LEAST, "Mbit/s"), ("mtu_bytes", Bound.AT_LEAST, "bytes"),
        ("pause_rx", Bound.EQUAL, "count"), ("pause_tx", Bound.EQUAL, "count"), ("numa_node", Bound.EQUAL, "node"),
    ):  # fmt: skip
        limit = getattr(promise, name)
        if limit is not None:
            yield _attached(f"{name}@{promise.interface}", getattr(found, name), bound, limit, unit)


def _attached(name: str, measured: float | None, bound: Bound, limit: float, unit: str) -> Check:
    measured = None if measured is None else float(measured)
    return check(name, measured, bound, float(limit), unit, invalid="" if measured is not None else NOT_READABLE)
