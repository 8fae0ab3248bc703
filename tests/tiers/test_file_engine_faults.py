"""Full, broken, read-only and vanished disks below an engine: exact results, and every event counted by its kind."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from file_engine_kit import KEYS, Pool

from forebay.events import Reason
from forebay.types import HOST, BlockKey, Happening, JobKind, Outcome

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
WRITE_ERRORS = [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS]


@pytest.fixture
def pool(tmp_path: Path) -> Pool:
    return Pool(tmp_path)


def fail(pool: Pool, call: str, number: int, *roots: Path) -> None:
    def strike(struck: str, path: str) -> None:
        if struck == call and any(path.startswith(str(root)) for root in roots):
            raise OSError(number, os.strerror(number))

    pool.strike = strike


def mend(pool: Pool) -> None:
    pool.strike = lambda call, path: None


def events(pool: Pool) -> list[dict[str, int]]:
    return [dict(report.events) for report in pool.tier.describe()]


def check(pool: Pool) -> None:
    """At rest, and files, catalogue and index agree."""
    pool.settle()
    pool.engine.check_idle()
    files = [path for root in (pool.a, pool.b) for path in root.rglob("*.kv")]
    assert pool.tier.used_bytes == sum(path.stat().st_size for path in files)
    assert pool.engine._index.used_bytes("file") == pool.tier.used_bytes
    assert [path for root in (pool.a, pool.b) for path in (root / "tmp").iterdir()] == []


@pytest.mark.parametrize("number", WRITE_ERRORS)
def test_one_disk_that_takes_no_writes_leaves_them_to_the_other(pool: Pool, number: int) -> None:
    fail(pool, "write", number, pool.b)
    pool.offer(KEYS)
    assert pool.failures() == {}
    assert pool.load(KEYS) == len(KEYS)
    assert list(pool.b.rglob("*.kv")) == []
    name = errno.errorcode[number]
    assert events(pool)[0] == {}
    assert events(pool)[1][name] >= 1
    assert ("writes stopped" in events(pool)[1]) == (number not in NO_ROOM)
    assert pool.engine.drop_host_copies() == len(KEYS)
    check(pool)
    pool.engine.close()


@pytest.mark.parametrize("number", WRITE_ERRORS)
def test_when_no_disk_takes_writes_blocks_stay_in_the_host_pool_and_are_stored_later(pool: Pool, number: int) -> None:
    fail(pool, "write", number, pool.a, pool.b)
    pool.offer(KEYS)
    outcome = Outcome.FULL if number in NO_ROOM else Outcome.FAILED
    assert set(pool.failures()) == {(JobKind.WRITE, outcome)}
    assert pool.failures()[JobKind.WRITE, outcome] >= len(KEYS)
    assert all(counted[errno.errorcode[number]] >= 1 for counted in events(pool))
    assert pool.load(KEYS) == len(KEYS), "from the host pool"
    pool.forget_host()
    assert pool.load(KEYS) == 0
    check(pool)
    mend(pool)
    pool.until(lambda: _offers_until_stored(pool))
    assert pool.load(KEYS) == len(KEYS)
    pool.engine.drop_host_copies()
    check(pool)
    pool.engine.close()


def _offers_until_stored(pool: Pool) -> bool:
    """A breaker lets one write through at a time until it is closed again."""
    pool.offer([key for key in KEYS if pool.engine._index.get(key, "file") is None])
    pool.forget_host()
    return all(pool.engine.holds(KEYS))


def test_reads_that_fail_are_misses_and_stop_the_disk(pool: Pool) -> None:
    pool.offer(KEYS)
    on_a, on_b = pool.keys_at(pool.a), pool.keys_at(pool.b)
    fail(pool, "read", errno.EIO, pool.b)
    assert pool.load(KEYS) == min(KEYS.index(key) for key in on_b)
    assert pool.load(on_a) == len(on_a)
    for key in on_b:
        assert pool.load([key]) == 0
    assert pool.failures()[JobKind.READ, Outcome.FAILED] >= 2
    counted = events(pool)[1]
    assert counted["stopped"] == 1
    assert counted["EIO"] >= 5
    assert events(pool)[0] == {}
    assert pool.engine.happened()[Happening("file", "1", "stopped")] == 1
    assert {event.place for event in pool.engine.happened()} == {"1"}
    mend(pool)
    pool.engine.drop_host_copies()
    pool.until(lambda: bool(pool.tier.contains(on_b[:1])[0]))
    pool.until(lambda: all(pool.engine.holds(KEYS)))  # what the root holds comes as changes
    assert pool.load(KEYS) == len(KEYS), "nothing was lost, and nothing has to be written again"
    pool.engine.drop_host_copies()
    check(pool)
    pool.engine.close()


def test_a_disk_that_vanishes_is_missed_and_one_that_returns_is_known_again(pool: Pool) -> None:
    pool.offer(KEYS)
    on_a, on_b = pool.keys_at(pool.a), pool.keys_at(pool.b)
    away = pool.b.with_name("away")
    pool.b.rename(away)
    assert pool.load(KEYS) == min(KEYS.index(key) for key in on_b)
    assert pool.load(on_a) == len(on_a)
    assert pool.load(on_b) == 0
    assert events(pool)[1] == {"vanished": 1}
    assert 1 <= pool.totals.dropped["file", Reason.MISSING] <= len(on_b)
    pool.offer(on_b[:3])  # the rest of the index says that they are there
    pool.engine.drop_host_copies()
    away.rename(pool.b)
    pool.offer([BlockKey(bytes(32))])  # the next write notices
    pool.until(lambda: all(pool.engine.holds(KEYS)))
    assert pool.load(KEYS) == len(KEYS)
    assert events(pool)[1] == {"vanished": 1, "returned": 1}
    pool.engine.drop_host_copies()
    assert {pool.engine._index.get(key, HOST) for key in KEYS} == {None}
    pool.settle()
    pool.engine.check_idle()
    pool.engine.close()


def test_a_disk_that_was_away_while_its_blocks_were_evicted_gives_their_room_back(tmp_path: Path) -> None:
    """They are deleted for the engine, and back with the disk: else nobody could ever evict them."""
    stored_bytes = 2 * 4096
    pool = Pool(tmp_path, capacity_bytes=8 * stored_bytes)
    pool.offer(KEYS[:8])
    away = pool.b.with_name("away")
    pool.b.rename(away)
    pool.load(pool.keys_at(pool.b)[:1])
    pool.offer(KEYS[8:24])
    away.rename(pool.b)
    for key in KEYS[24:]:
        pool.offer([key])
    pool.settle()
    files = {path.stem for root in (pool.a, pool.b) for path in root.rglob("*.kv")}
    assert len(files) <= 8
    assert {key.hex() for key in KEYS if pool.engine._index.is_ready(key, "file")} == files
    check(pool)
    pool.engine.close()
