"""Reading a whole pool and proving it: at once with `verify`, at a bounded rate with `scrub`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from forebay.errors import ConfigError
from forebay.tiers.file import layout
from forebay.tiers.file.admin.looking import Progress, marked, nobody
from forebay.tiers.file.checking import CheckReport, Finding, Tally, best_access, check_block, set_aside_by_reads
from forebay.tiers.file.directio import Access, Scratch
from forebay.tiers.file.lanes import Batch, Lanes, Patience, carry_out
from forebay.tiers.file.scrub import Pace, Scrub, ScrubLimits
from forebay.tiers.file.upkeep import Upkeep
from forebay.types import BlockKey

log = logging.getLogger("forebay.tiers.file")

_VERIFY_THREADS = 4
_CLOSE_WITHIN_S = 10.0
_BATCH_FILES = 256
"""Files between two calls of the progress callback."""


def verify(roots: Sequence[Path], progress: Progress = nobody) -> CheckReport:
    """Read every block in full and prove it; set aside what is damaged or foreign.

    Names each damaged file once: those it finds itself, and those that reads have set aside since the last check.

    `progress(blocks, bytes)` is called on this thread with the totals so far. A store may have the pool open meanwhile.
    """
    checked = Tally()
    lanes = Lanes("forebay-verify", _VERIFY_THREADS)
    try:
        for root, _ in marked(roots):
            checked.set_aside.extend(set_aside_by_reads(root))
            access = best_access(root)
            sound: list[tuple[str, BlockKey]] = []
            with Upkeep(root) as upkeep:
                for files in _batches(root):
                    findings = _check_all(lanes, root, access, files, upkeep)
                    for file, finding in zip(files, findings, strict=True):
                        checked.add(file, finding)
                        if file.is_regular and (finding is None or finding.set_aside is None):
                            sound.append((file.namespace_hex, file.key))
                    progress(checked.blocks, checked.read_bytes)
                checked.miscounted_blocks += upkeep.compare(sound)
    finally:
        if left := Patience(_CLOSE_WITHIN_S).outlast(lanes.close()):
            log.error("%d reads still hang: they are left behind", len(left))
    return checked.report()


def scrub(
    roots: Sequence[Path],
    limits: ScrubLimits,
    progress: Progress = nobody,
    *,
    clock_ns: Callable[[], int] = time.monotonic_ns,
    wall_s: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
    afresh: bool = False,
) -> CheckReport:
    """As `verify`, block by block at a bounded rate: from where the last scrub of each root stopped to its end.

    What interrupts it, such as KeyboardInterrupt, finds the position kept. Raises ConfigError when another process is
    scrubbing one of the roots.
    """
    tally, pace = Tally(), Pace(limits.bytes_per_s, clock_ns)
    for root, _ in marked(roots):
        tally.set_aside.extend(set_aside_by_reads(root))
        with Upkeep(root) as upkeep, Scrub(root, limits.ttl_s, wall_s, upkeep.removing) as run:
            if not run.is_mine:
                raise ConfigError(f"{root} is being scrubbed by another process: wait for it, or look at its log")
            if afresh:
                run.from_start()
            try:
                for step in run.steps():
                    if step.is_expired:
                        tally.add_expired(step.file)
                        continue
                    tally.add(step.file, step.finding)
                    progress(tally.blocks, tally.read_bytes)
                    sleep(pace.after(step.file.length_bytes))
            finally:
                run.keep_position()
    return tally.report()


def _batches(root: Path) -> Iterator[list[layout.BlockFile]]:
    for namespace_hex in layout.walk_namespaces(str(root)):
        batch: list[layout.BlockFile] = []
        for file in layout.walk_blocks(str(root), namespace_hex):
            batch.append(file)
            if len(batch) == _BATCH_FILES:
                yield batch
                batch = []
        if batch:
            yield batch


def _check_all(
    lanes: Lanes, root: Path, access: Access, files: list[layout.BlockFile], upkeep: Upkeep
) -> list[Finding | None]:
    findings: list[Finding | None] = [None] * len(files)

    def check_one(i: int, scratch: Scratch) -> None:
        findings[i] = check_block(root, access, files[i], scratch, upkeep.removing)

    carry_out([(lanes, Batch(check_one, range(len(files))))])
    return findings
