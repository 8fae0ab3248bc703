"""Records from files, and from bundles that verify: nothing of them is trusted before."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from pathlib import Path

import msgspec

from forebay.bench.bundle import BundleUnsound, Verification, read_member, verify_bundle
from forebay.bench.bundle.bundle import BundledFile
from forebay.bench.gates.run import RECORD_NAME as GATES_NAME
from forebay.bench.gates.stability.supervisor import LOG_NAME
from forebay.bench.gates.verdicts import GatesRecord
from forebay.bench.report.history import History, history_of
from forebay.bench.report.page import Records
from forebay.bench.restore.options import JSON_NAME as RESTORE_NAME
from forebay.bench.restore.results import RestoreRecord, Role
from forebay.errors import ConfigError

_MOST_BYTES = 512 * 2**20
_ZIP_MAGIC = b"PK"


class _Kind(msgspec.Struct):
    """Enough of a record to know which one it is."""

    plan_text: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    cells: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def read_records(paths: Sequence[Path]) -> Records:
    """Records of gates and of restores in JSON, or bundles of them.

    Raises ConfigError for what is neither, and for more than one run of gates; BundleUnsound for a bundle that does
    not verify.
    """
    records: list[GatesRecord | RestoreRecord] = []
    proofs: list[Verification] = []
    histories: list[History] = []
    for path in paths:
        text = _content(path)
        if text.startswith(_ZIP_MAGIC):
            proofs.append(verify_bundle(path))
            records += _bundled(path, proofs[-1])
            histories += _bundled_histories(path, proofs[-1])
        else:
            records.append(decode_record(str(path), text))
    return _sorted(records, histories, proofs)


def records_of_run(gates: GatesRecord, directory: Path) -> Records:
    """A run of gates with the measurements that lie in its directory. Raises ConfigError for one that is no record."""
    names = [name for result in gates.results for name in result.files]
    restores = [
        _named(name, decode_record(name, _content(directory / name))) for name in names if _ends(name, RESTORE_NAME)
    ]
    histories = [_history_in(directory, name) for name in names if _ends(name, LOG_NAME)]
    return _sorted([gates, *restores], histories)


def _history_in(directory: Path, name: str) -> History:
    try:
        with (directory / name).open("rb") as log:
            return history_of(_gate_of(name), log)
    except OSError as error:
        raise ConfigError(f"{directory / name} cannot be read ({error.strerror})") from None


def decode_record(name: str, text: bytes) -> GatesRecord | RestoreRecord:
    """Raises ConfigError, with the file's name, for anything else."""
    try:
        kind = msgspec.json.decode(text, type=_Kind)
        if kind.plan_text is not msgspec.UNSET:
            return msgspec.json.decode(text, type=GatesRecord)
        if kind.cells is not msgspec.UNSET:
            return msgspec.json.decode(text, type=RestoreRecord)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{name} is no record that this version can read: {error}") from None
    raise ConfigError(f"{name} is no record of gates or of a restore benchmark: give a gates.json or a restore.json")


def _bundled(path: Path, verified: Verification) -> list[GatesRecord | RestoreRecord]:
    found = [
        _named(each.name, decode_record(f"{path}: {each.name}", _member(path, each)))
        for each in verified.manifest.files
        if _ends(each.name, GATES_NAME) or _ends(each.name, RESTORE_NAME)
    ]
    if not found:
        raise ConfigError(f"{path} holds no record to report on")
    return found


def _bundled_histories(path: Path, verified: Verification) -> list[History]:
    return [
        history_of(_gate_of(each.name), io.BytesIO(_member(path, each)))
        for each in verified.manifest.files
        if _ends(each.name, LOG_NAME)
    ]


def _member(path: Path, listed: BundledFile) -> bytes:
    """As it was verified. Raises BundleUnsound for another."""
    content = read_member(path, listed.name, _MOST_BYTES)
    if hashlib.sha256(content).hexdigest() != listed.sha256:
        raise BundleUnsound(f"{path} changed while it was read")
    return content


def _ends(name: str, last: str) -> bool:
    return name.rpartition("/")[2] == last


def _gate_of(name: str) -> str:
    """A gate's evidence lies in a folder that has its name."""
    return name.partition("/")[0]


def _named(name: str, record: GatesRecord | RestoreRecord) -> GatesRecord | RestoreRecord:
    """A measurement's title begins with the gate that made it, which is the folder that it lies in."""
    gate, slash, _ = name.partition("/")
    if not slash or isinstance(record, GatesRecord):
        return record
    return msgspec.structs.replace(record, title=f"{gate.upper()}: {record.title}")


def _sorted(
    records: Sequence[GatesRecord | RestoreRecord], histories: Sequence[History], proofs: Sequence[Verification] = ()
) -> Records:
    """Measurements of a candidate come before those that prepare for them."""
    gates = [each for each in records if isinstance(each, GatesRecord)]
    if len(gates) > 1:
        raise ConfigError("a report tells of one run of gates: give one record of gates, and make a page for each")
    restores = sorted((each for each in records if isinstance(each, RestoreRecord)), key=_has_no_candidate)
    return Records(
        gates=gates[0] if gates else None,
        restores=tuple(restores),
        histories=tuple(histories),
        proofs=tuple(proofs),
    )


def _has_no_candidate(record: RestoreRecord) -> bool:
    return not any(group.role in (Role.CANDIDATE, Role.SHARED) for group in record.groups)


def _content(path: Path) -> bytes:
    """Of a bundle, only its first bytes."""
    try:
        with path.open("rb") as file:
            if (magic := file.read(len(_ZIP_MAGIC))) == _ZIP_MAGIC:
                return magic
            text = magic + file.read(_MOST_BYTES)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): name a record or a bundle") from None
    if len(text) > _MOST_BYTES:
        raise ConfigError(f"{path} is too large for a record: it has more than {_MOST_BYTES} bytes")
    return text
