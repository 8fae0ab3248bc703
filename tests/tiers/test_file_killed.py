"""A process that is killed at each system call in turn, in a write, a delete, an eviction and a compaction."""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from file_tier_kit import BLOCK_BYTES, block_file, flip, open_tier, unfinished, write_all

from forebay.testing.tier_contract import get, key_of, payload_of
from forebay.tiers.file import FileTier, Io, admin, catalogue, checking, layout, upkeep
from forebay.tiers.file.directio import REAL_CALLS, Calls
from forebay.types import Outcome

MOST_CALLS = 400


class Killer:
    """System calls before the n-th of which, once it is armed, the process dies.

    After the n-th is before the next one: nothing outside the process changes in between.
    """

    def __init__(self) -> None:
        self.left: float = float("inf")
        self.calls = Calls(
            **{field.name: self.counting(getattr(REAL_CALLS, field.name)) for field in dataclasses.fields(Calls)}
        )

    def counting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: object) -> Any:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args)

        return counted


def write(tier: FileTier) -> None:
    write_all(tier, [10, 11])


def overwrite(tier: FileTier) -> None:
    """One block is there, one is not, one is twice in the call."""
    write_all(tier, [1, 12, 12])


def delete(tier: FileTier) -> None:
    tier.delete([key_of(1), key_of(2), key_of(99)])


def evict(tier: FileTier) -> None:
    """What a WRITE job does."""
    tier.delete([key_of(3)])
    write_all(tier, [13])


def shorten(tier: FileTier) -> None:
    """The catalogue is replaced by a short one, by the way."""
    tier.delete([key_of(4)])
    write_all(tier, [14])
    tier.close()


def scrub(tier: FileTier) -> None:
    """A damaged block is set aside, one that is too old is removed."""
    root = Path(tier.describe()[0].path)
    flip(block_file(root, key_of(1)), 4096)
    os.utime(block_file(root, key_of(2)), (1, 1))
    admin.scrub([root], admin.ScrubLimits(bytes_per_s=1e12, ttl_s=1e6), afresh=True)


def collect(tier: FileTier) -> None:
    root = Path(tier.describe()[0].path)
    os.utime(block_file(root, key_of(2)), (1, 1))
    admin.gc([root], admin.GcLimits(now_unix_s=1e9, ttl_s=1e6, quarantine_s=1e9))


def set_aside(tier: FileTier) -> None:
    """By a read."""
    flip(block_file(Path(tier.describe()[0].path), key_of(1)), 4096)
    assert get(tier, 1, BLOCK_BYTES) is Outcome.CORRUPT


def give_back(tier: FileTier) -> None:
    """Another process has reserved the same last room in another root at the same moment: both see too much then."""
    rooms = iter([2**20, -1] * 2)
    tier._ledger.room_bytes = lambda: next(rooms)  # type: ignore[method-assign]
    assert write_all(tier, [10, 11]) == [Outcome.FULL] * 2


def opened(roots: Sequence[Path], calls: Calls = REAL_CALLS) -> FileTier:
    return open_tier(*roots, calls=calls, reads_in_flight=1, writes_in_flight=1, io=Io.PYTHON)


def dies(roots: Sequence[Path], operation: Callable[[FileTier], None], calls_before: int) -> bool:
    """Whether a process was killed in it; False when it came to its end before."""
    child = os.fork()
    if child == 0:
        try:
            killer = Killer()
            upkeep.REAL_CALLS = killer.calls  # the child's own
            checking.REAL_CALLS = replace(REAL_CALLS, rename=killer.calls.rename, unlink=killer.calls.unlink)
            layout.remove_block = killer.counting(layout.remove_block)
            tier = opened(roots, killer.calls)
            killer.left = calls_before
            operation(tier)
            killer.left = float("inf")
        except BaseException:
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the operation failed"
    return os.WIFSIGNALED(status)


def check(tier: FileTier, roots: Sequence[Path]) -> None:
    """Every block is whole or absent, nothing is left over, and the catalogue says exactly what the files are."""
    files = {path.name[:-3]: path.stat().st_size for root in roots for path in root.rglob("*.kv")}
    assert [unfinished(root) for root in roots] == [[]] * len(roots)
    counted = {stored.key.hex(): stored.stored_bytes for stored in tier.scan()}
    assert counted == files
    assert tier.used_bytes == sum(files.values())
    for number in (*range(1, 5), *range(10, 15)):
        found = get(tier, number, BLOCK_BYTES)
        if found is Outcome.CORRUPT:  # damaged on purpose, and whoever was to set it aside was killed before
            assert number == 1
            assert not any(block_file(root, key_of(number)).exists() for root in roots)
            continue
        assert found == (payload_of(number, BLOCK_BYTES) if key_of(number).hex() in files else Outcome.MISSING)
    assert tier.used_bytes == sum(path.stat().st_size for root in roots for path in root.rglob("*.kv"))


@pytest.mark.parametrize(
    ("operation", "count"),
    [
        *((operation, 1) for operation in (write, overwrite, delete, evict, shorten, scrub, collect, set_aside)),
        *((operation, 2) for operation in (write, evict, give_back)),
    ],
)
def test_killed_at_any_system_call(
    tmp_path: Path, operation: Callable[[FileTier], None], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    roots = [tmp_path / str(i) for i in range(count)]
    identities = itertools.cycle(range(count))
    monkeypatch.setattr(
        layout, "secrets", SimpleNamespace(token_hex=lambda size: bytes([next(identities)] * size).hex())
    )
    for calls_before in range(1, MOST_CALLS):
        tier = opened(roots)
        check(tier, roots)
        tier.delete([key_of(number) for number in range(10, 15)])
        write_all(tier, [1, 2, 3, 4])
        tier.close()
        with monkeypatch.context() as patch:
            if operation is shorten:
                patch.setattr(catalogue, "_SPARE_RECORDS", 0)
            if not dies(roots, operation, calls_before):
                break
    else:
        pytest.fail("the operation has no end")
    assert calls_before > 15, "hardly any call goes through the seam"
    tier = opened(roots)
    check(tier, roots)
    tier.close()
