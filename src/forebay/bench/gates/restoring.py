"""What the gates share that stand on the restore benchmark: the run, stop-loss, and checks of its requests."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from forebay.bench.evidence import Validity
from forebay.bench.gates.gate import Found, Workplace
from forebay.bench.gates.verdicts import Bound, Check, check
from forebay.bench.restore import audit
from forebay.bench.restore.options import GroupOptions, RestoreOptions, check_options, convert_options
from forebay.bench.restore.report import write_files
from forebay.bench.restore.results import Cell, Group, RequestRecord, RestoreRecord, Role, WaveRecord
from forebay.bench.restore.run import run_restore, steps, wave_count
from forebay.errors import ConfigError

_STORES_BY_ITSELF = ("emulated", "builtin")
"""Targets that make a pool of their own in the roots of their group. Others are told where one is."""
_POOL_TO_FILL_IN = re.compile(r"\{pool\d*\}")
"""In the options of a server that is started: it is given a pool in the roots, too."""

Judge = Callable[[RestoreRecord], tuple[Check, ...]]


@dataclass(frozen=True, slots=True)
class RestoreGate:
    """A restore benchmark, and what is made of its record."""

    options: RestoreOptions
    judge: Judge
    lost: Callable[[Sequence[RequestRecord]], str] = lambda requests: ""
    """Of the requests of whole rounds, why this gate cannot pass any more; empty as long as it can."""

    @property
    def steps(self) -> int:
        return steps(self.options)

    def run(self, work: Workplace) -> Found:
        """From the beginning, also after an interruption. Ends early when it cannot pass any more."""
        with _own_roots(self.options, work) as options:
            record = run_restore(options, progress=work.progress, lost_cause=self.lost_cause)
        was_stopped = len(record.waves) < wave_count(self.options)
        files = write_files(record, work.directory)
        return Found(
            checks=self.judge(record),
            reasons=(*record.verdict.reasons, *record.notes),
            stopped_early=self.lost_cause(record.groups, record.requests, record.waves) if was_stopped else "",
            files=tuple(path.name for path in files),
        )

    def lost_cause(
        self, groups: Sequence[Group], requests: Sequence[RequestRecord], waves: Sequence[WaveRecord]
    ) -> str:
        """At once for wrong answers. For the rest after whole rounds, in which all groups were asked the same."""
        if cause := wrong_answers(requests):
            return f"stopped: {cause}"
        if len(waves) % (len(groups) * len(self.options.concurrency)):
            return ""
        lasting = audit.broken_claims(groups, requests, waves, (), self.options.limits)  # more samples mend none of it
        cause = self.lost(requests) or next(iter(lasting), "")
        return f"stopped after round {max(each.round for each in waves)}: {cause}" if cause else ""


def restore_options(plain: Mapping[str, Any], *roles: Role) -> RestoreOptions:
    """As `forebay bench restore` takes them. Raises ConfigError for bad ones, and when a role has no group."""
    options = convert_options(plain)
    check_options(options)
    for role in roles:
        if role not in {group.role for group in options.group}:
            raise ConfigError(f"restore: no group has the role {role.value}, and this gate compares it: add one")
    return options


def check_concurrency(wanted: Sequence[int], options: RestoreOptions) -> None:
    """Raises ConfigError where limits name a concurrency that is not measured: it could only be INVALID."""
    if missing := sorted(set(wanted) - set(options.concurrency)):
        raise ConfigError(
            f"limits: concurrency {missing[0]} is not among those measured: add it to restore.concurrency"
        )


def makes_its_pool(group: GroupOptions) -> bool:
    """In its roots; else what lies there is somebody else's."""
    given = msgspec.json.encode(group.options, enc_hook=str).decode()
    return group.target in _STORES_BY_ITSELF or bool(_POOL_TO_FILL_IN.search(given))


@contextlib.contextmanager
def _own_roots(options: RestoreOptions, work: Workplace) -> Iterator[RestoreOptions]:
    """Pools are made in directories of this gate, so that one left by an attempt that was killed is removed."""
    own = [group for group in options.group if makes_its_pool(group)]
    with contextlib.ExitStack() as stack:
        roots: dict[Path, Path] = {}
        for root in dict.fromkeys(root for group in own for root in group.roots):
            roots[root] = stack.enter_context(work.scratch(root))
        groups = tuple(
            msgspec.structs.replace(group, roots=tuple(roots[root] for root in group.roots)) if group in own else group
            for group in options.group
        )
        yield msgspec.structs.replace(options, group=groups)


def wrong_answers(requests: Sequence[RequestRecord]) -> str:
    """Why no gate can pass any more; empty as long as it can."""
    outputs: dict[tuple[int, int], str] = {}
    for each in requests:
        if each.error:
            return f"a request of {each.group} failed in round {each.round}: {each.error}"
        if outputs.setdefault((each.concurrency, each.session), each.output_digest) != each.output_digest:
            return f"session {each.session} had another output with {each.group} in round {each.round}"
    return ""


def doubt(record: RestoreRecord) -> str:
    """Whether the record's figures are not to be believed, for a check; empty if they are. The gate says why not."""
    is_valid = record.verdict.validity is Validity.VALID
    return "" if is_valid else "the measurement is INVALID, for the reasons given"


def failed_requests(record: RestoreRecord) -> Check:
    failed = [each for each in record.requests if each.error]
    found = check("failed_requests", len(failed) if record.requests else None, Bound.EQUAL, 0, "count")
    return msgspec.structs.replace(found, why=failed[0].error) if failed else found


def cells_of(record: RestoreRecord, role: Role, concurrency: int) -> list[Cell]:
    return [each for each in record.cells if each.role is role and each.concurrency == concurrency]


def at(concurrency: int, group: str, among: Sequence[str]) -> str:
    """What stands after the `@` of a check's name: the group too, where there are several."""
    return f"{concurrency} {group}" if len(among) > 1 else f"{concurrency}"
