"""Roots that are full, broken, read-only, gone or hung: the others unhurt, and every event counted by its kind."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from file_tier_kit import BLOCK_BYTES, block_file, failing, open_tier, write_all

from forebay.testing.tier_contract import get, key_of, payload_of, put, slot
from forebay.tiers.file import FileTier, RootReport
from forebay.tiers.file.directio import REAL_CALLS
from forebay.tiers.file.health import RootState
from forebay.types import Outcome

NUMBERS = range(40)
RETRY_NS = 5 * 10**9
HANG_NS = 10 * 10**9


class Pool:
    """A tier over two roots, `a` and `b`. Whatever `strike` does happens at each call that touches a block of `b`."""

    def __init__(self, place: Path) -> None:
        self.a, self.b = place / "a", place / "b"
        self.now_ns = 0
        self.strike: Callable[[str], None] = lambda call: None
        calls = replace(REAL_CALLS, open=self._open, preadv=self._preadv, pwritev=self._pwritev)
        self.tier: FileTier = open_tier(self.a, self.b, calls=calls, clock_ns=lambda: self.now_ns)

    def _open(self, path: str, flags: int, mode: int) -> int:
        if path.startswith(str(self.b)) and flags & os.O_CREAT:
            self.strike("create")
        return os.open(path, flags, mode)

    def _is_of_b(self, descriptor: int) -> bool:
        return Path(f"/proc/self/fd/{descriptor}").readlink().is_relative_to(self.b)

    def _preadv(self, descriptor: int, parts: Sequence[memoryview], at: int) -> int:
        if self._is_of_b(descriptor):
            self.strike("read")
        return os.preadv(descriptor, parts, at)

    def _pwritev(self, descriptor: int, parts: Sequence[memoryview], at: int) -> int:
        if self._is_of_b(descriptor):
            self.strike("write")
        return os.pwritev(descriptor, parts, at)

    def fail(self, error_number: int, *calls: str) -> None:
        def strike(call: str) -> None:
            if call in calls:
                raise OSError(error_number, os.strerror(error_number))

        self.strike = strike

    def mend(self) -> None:
        self.strike = lambda call: None

    def held(self, root: Path, numbers: Sequence[int] = NUMBERS) -> list[int]:
        return [number for number in numbers if block_file(root, key_of(number)).exists()]

    def outcomes(self, numbers: Sequence[int]) -> set[Outcome]:
        views = [slot(BLOCK_BYTES) for _ in numbers]
        outcomes = self.tier.read([key_of(number) for number in numbers], views)
        for number, view, outcome in zip(numbers, views, outcomes, strict=True):
            assert outcome is not Outcome.OK or bytes(view[:BLOCK_BYTES]) == payload_of(number, BLOCK_BYTES)
        return set(outcomes)

    def contained(self, numbers: Sequence[int]) -> set[bool]:
        return set(self.tier.contains([key_of(number) for number in numbers]))

    @property
    def report(self) -> RootReport:
        a, b = self.tier.describe()
        assert (a.state, a.why, a.events) == (RootState.ONLINE, "", {}), "the other root is unhurt"
        return b


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    made = Pool(tmp_path)
    put(made.tier, NUMBERS, BLOCK_BYTES)
    yield made
    made.mend()
    made.tier.close()


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_reads_that_fail_stop_the_root_until_a_try_works(pool: Pool, caplog: pytest.LogCaptureFixture) -> None:
    on_a, on_b = pool.held(pool.a), pool.held(pool.b)
    pool.fail(errno.EIO, "read")
    for number in on_b[:5]:
        assert get(pool.tier, number, BLOCK_BYTES) is Outcome.FAILED
    assert pool.report.state is RootState.STOPPED
    assert dict(pool.report.events) == {"EIO": 5, "stopped": 1}
    assert pool.outcomes(on_b) == {Outcome.FAILED}
    assert pool.report.events["EIO"] == 5, "not one more call reached the device"
    assert pool.contained(on_b) == {False}
    assert pool.outcomes(on_a) == {Outcome.OK}
    assert pool.contained(on_a) == {True}
    put(pool.tier, range(100, 120), BLOCK_BYTES)
    assert pool.held(pool.a, range(100, 120)) == list(range(100, 120)), "writes go to the next root"
    assert pool.outcomes(range(100, 120)) == {Outcome.OK}, "and are found there"

    pool.now_ns = RETRY_NS
    assert pool.outcomes(on_b[:1]) == {Outcome.FAILED}
    assert pool.report.events["EIO"] == 6
    pool.mend()
    assert pool.outcomes(on_b) == {Outcome.FAILED}, "the try has failed: not yet"
    pool.now_ns = 2 * RETRY_NS
    assert pool.outcomes(on_b[:1]) == {Outcome.OK}
    assert pool.report.state is RootState.ONLINE
    assert pool.outcomes(NUMBERS) == {Outcome.OK}
    lines = warnings_of(caplog)
    assert len(lines) == 3
    assert "reads fail: [Errno 5]" in lines[0]
    assert f"root {pool.b} is stopped (reads: 5 in a row failed, the last with EIO)" in lines[1]
    assert f"root {pool.b} works again, after 10.0 s" in lines[2]


def test_one_bad_sector_among_good_blocks_stops_nothing(pool: Pool) -> None:
    bad, *good = pool.held(pool.b)
    inode = block_file(pool.b, key_of(bad)).stat().st_ino
    real = os.preadv

    def preadv(descriptor: int, parts: Sequence[memoryview], at: int) -> int:
        if os.fstat(descriptor).st_ino == inode:
            raise OSError(errno.EIO, "Input/output error")
        return real(descriptor, parts, at)

    tier = open_tier(pool.a, pool.b, calls=replace(REAL_CALLS, preadv=preadv))
    for number in good[:6]:
        assert get(tier, bad, BLOCK_BYTES) is Outcome.FAILED
        assert get(tier, number, BLOCK_BYTES) == payload_of(number, BLOCK_BYTES)
    assert tier.describe()[1].state is RootState.ONLINE
    assert tier.describe()[1].events == {"EIO": 6}
    tier.close()


@pytest.mark.parametrize("error_number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_root_is_counted_and_stays_in_use(pool: Pool, error_number: int) -> None:
    on_b = pool.held(pool.b)
    pool.fail(error_number, "write")
    put(pool.tier, range(100, 140), BLOCK_BYTES)
    assert pool.held(pool.b, range(100, 140)) == []
    assert pool.outcomes([*on_b, *range(100, 140)]) == {Outcome.OK}
    assert pool.report.state is RootState.ONLINE
    kind = errno.errorcode[error_number]
    assert set(pool.report.events) == {kind}
    assert pool.report.events[kind] > 5


@pytest.mark.parametrize("error_number", [errno.EIO, errno.EROFS])
def test_a_root_that_cannot_be_written_is_read(pool: Pool, error_number: int, caplog: pytest.LogCaptureFixture) -> None:
    on_b = pool.held(pool.b)
    pool.fail(error_number, "create", "write")
    put(pool.tier, range(100, 140), BLOCK_BYTES)
    assert pool.held(pool.b, range(100, 140)) == []
    kind = errno.errorcode[error_number]
    assert pool.report.state is RootState.WRITES_STOPPED
    tried = pool.report.events[kind]
    assert pool.report.events == {kind: tried, "writes stopped": 1}
    put(pool.tier, range(140, 160), BLOCK_BYTES)
    assert pool.report.events[kind] == tried, "not one more call reached the device"
    assert pool.outcomes(on_b) == {Outcome.OK}
    assert pool.contained(on_b) == {True}
    pool.mend()
    pool.now_ns = RETRY_NS
    put(pool.tier, range(200, 240), BLOCK_BYTES)
    assert pool.report.state is RootState.ONLINE
    put(pool.tier, range(300, 340), BLOCK_BYTES)
    assert len(pool.held(pool.b, range(300, 340))) > 5
    lines = warnings_of(caplog)
    expected = ("a write failed", "writes are stopped", "writes work again")
    assert [words in line for words, line in zip(expected, lines, strict=True)] == [True] * 3


def test_in_a_full_pool_a_delete_is_the_call_that_is_tried(tmp_path: Path) -> None:
    """There every write is preceded by a delete, and left out when that fails."""
    broken, now_ns = [False], [0]
    pwritev = failing(os.pwritev, lambda *_: broken[0], errno.EROFS)
    tier = open_tier(tmp_path / "a", calls=replace(REAL_CALLS, pwritev=pwritev), clock_ns=lambda: now_ns[0])
    put(tier, NUMBERS, BLOCK_BYTES)
    broken[0] = True
    write_all(tier, range(100, 110))
    assert tier.describe()[0].state is RootState.WRITES_STOPPED
    assert list(tier.delete([key_of(0)])) == [Outcome.FAILED]
    broken[0] = False
    now_ns[0] = RETRY_NS
    assert list(tier.delete([key_of(0)])) == [Outcome.OK]
    assert tier.describe()[0].state is RootState.ONLINE
    assert write_all(tier, [100]) == [Outcome.OK]
    tier.close()


def test_a_root_that_vanishes_and_returns(pool: Pool, tmp_path: Path) -> None:
    on_a, on_b = pool.held(pool.a), pool.held(pool.b)
    pool.b.rename(tmp_path / "unplugged")
    assert pool.outcomes(on_b) == {Outcome.MISSING}
    assert pool.contained(on_b) == {False}
    assert pool.outcomes(on_a) == {Outcome.OK}
    put(pool.tier, range(100, 120), BLOCK_BYTES)
    assert (pool.report.state, pool.report.events) == (RootState.ABSENT, {"vanished": 1})
    (tmp_path / "unplugged").rename(pool.b)
    assert pool.outcomes([*NUMBERS, *range(100, 120)]) == {Outcome.OK}
    assert (pool.report.state, pool.report.events) == (RootState.ONLINE, {"vanished": 1, "returned": 1})


def test_a_hung_read_hurts_no_other_root_and_the_root_comes_back(pool: Pool, caplog: pytest.LogCaptureFixture) -> None:
    on_a, on_b = pool.held(pool.a), pool.held(pool.b)
    hung, answer = threading.Semaphore(0), threading.Event()

    def strike(call: str) -> None:
        if call == "read":
            hung.release()
            answer.wait(60)

    pool.strike = strike
    late: list[set[Outcome]] = []
    reader = threading.Thread(target=lambda: late.append(pool.outcomes(on_b[:5])))
    reader.start()
    for _ in range(2):  # both read threads of the root
        assert hung.acquire(timeout=60)
    assert pool.outcomes(on_a) == {Outcome.OK}, "while it is not known yet that it hangs"
    pool.now_ns = HANG_NS + 1
    assert pool.outcomes(on_b) == {Outcome.FAILED}
    assert pool.contained(on_b) == {False}
    assert pool.report.state is RootState.STOPPED
    assert pool.report.events == {"hung": 2, "stopped": 1}
    assert pool.outcomes(on_a) == {Outcome.OK}
    put(pool.tier, range(100, 120), BLOCK_BYTES)
    assert pool.held(pool.a, range(100, 120)) == list(range(100, 120))
    assert set(pool.tier.delete([key_of(on_a[0]), key_of(on_b[0])])) == {Outcome.OK}
    pool.now_ns *= 2
    assert pool.outcomes(on_b) == {Outcome.FAILED}, "all its threads hang: nothing to try with"
    assert not late
    pool.mend()
    answer.set()
    reader.join(60)
    # two came back late, one of the rest was the try that closed it, the others were refused or served
    assert Outcome.OK in late[0]
    pool.tier.contains([key_of(on_b[0])])
    assert pool.outcomes(on_b) <= {Outcome.OK, Outcome.FAILED}
    assert pool.outcomes(on_b) == {Outcome.OK}
    assert pool.report.state is RootState.ONLINE
    stopped, again = warnings_of(caplog)
    assert "one has not come back for 10 s" in stopped
    assert "works again, after 10.0 s" in again


def test_a_hung_write_stops_writes_there_and_not_reads(pool: Pool) -> None:
    on_b = pool.held(pool.b)
    hung, answer = threading.Event(), threading.Event()

    def strike(call: str) -> None:
        if call == "write":
            hung.set()
            answer.wait(60)

    pool.strike = strike
    ended: list[object] = []
    for_b = [number for number in range(100, 140) if pool.tier.route(key_of(number)) == 1]
    writer = threading.Thread(target=lambda: ended.append(write_all(pool.tier, for_b)))
    writer.start()
    assert hung.wait(60)
    assert pool.outcomes(NUMBERS) == {Outcome.OK}
    pool.now_ns = HANG_NS + 1
    assert write_all(pool.tier, range(200, 220)) == [Outcome.OK] * 20
    assert pool.held(pool.b, range(200, 220)) == []
    assert pool.report.state is RootState.WRITES_STOPPED
    assert pool.report.events["hung"] >= 1
    assert pool.outcomes(on_b) == {Outcome.OK}
    assert not ended
    pool.mend()
    answer.set()
    writer.join(60)
    assert ended == [[Outcome.OK] * len(for_b)]
    pool.now_ns += RETRY_NS
    put(pool.tier, range(300, 340), BLOCK_BYTES)
    put(pool.tier, range(400, 440), BLOCK_BYTES)
    assert pool.report.state is RootState.ONLINE
    assert pool.outcomes([*for_b, *range(200, 220), *range(300, 340)]) == {Outcome.OK}


def test_a_stopped_root_is_tried_although_nobody_reads_there(pool: Pool) -> None:
    on_b = pool.held(pool.b)
    pool.fail(errno.EIO, "read")
    pool.outcomes(on_b)
    assert pool.report.state is RootState.STOPPED
    tried = threading.Event()
    pool.strike = lambda call: tried.set() if call == "read" else None
    pool.now_ns = RETRY_NS
    pool.contained(on_b[:1])  # its answer depends on which is first, the lookup or the try that it starts
    assert tried.wait(60)
    assert pool.outcomes(pool.held(pool.a)) == {Outcome.OK}
    pool.tier.close()  # waits for the threads
    assert pool.report.state is RootState.ONLINE


@pytest.mark.parametrize("error_number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_limits_of_the_process_are_no_fault_of_the_root(pool: Pool, error_number: int) -> None:
    on_b = pool.held(pool.b)
    pool.fail(error_number, "read")
    assert pool.outcomes(on_b) == {Outcome.FAILED}
    assert pool.report.events == {errno.errorcode[error_number]: len(on_b)}
    pool.mend()
    assert pool.outcomes(on_b) == {Outcome.OK}


def test_what_is_set_aside_is_counted_by_reason(pool: Pool) -> None:
    flipped, cut, *_ = pool.held(pool.b)
    os.truncate(block_file(pool.b, key_of(cut)), 100)
    with block_file(pool.b, key_of(flipped)).open("r+b") as file:
        file.seek(4096)
        file.write(b"x" * 64)
    assert pool.outcomes([flipped, cut]) == {Outcome.CORRUPT}
    assert pool.report.events == {"payload-checksum": 1, "wrong-length": 1}


def test_a_root_that_hangs_in_a_lookup_holds_a_write_up_for_a_hang_and_no_longer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Names on `b` do not resolve, as on a network mount whose server is gone. The wait is real, the hang is not."""
    hanging, answer, now_ns = threading.Event(), threading.Event(), [0]

    def lstat(path: str) -> os.stat_result:
        if hanging.is_set() and path.startswith(str(tmp_path / "b")) and path.endswith(".kv"):
            answer.wait(60)
        return os.lstat(path)

    tier = open_tier(
        tmp_path / "a", tmp_path / "b", calls=replace(REAL_CALLS, lstat=lstat), hang_s=2.0, clock_ns=lambda: now_ns[0]
    )
    for_a = [number for number in range(100) if tier.route(key_of(number)) == 0]
    hanging.set()
    assert write_all(tier, for_a[:3]) == [Outcome.OK] * 3
    assert "b has not answered a lookup" in warnings_of(caplog)[0]
    now_ns[0] = 2 * 10**9 + 1
    assert write_all(tier, for_a[3:6]) == [Outcome.OK] * 3
    assert tier.describe()[1].state is RootState.STOPPED
    assert [get(tier, number, BLOCK_BYTES) for number in for_a[:6]] == [payload_of(n, BLOCK_BYTES) for n in for_a[:6]]
    assert tier.describe()[1].events == {"hung": 1, "stopped": 1}
    assert tier.describe()[0].events == {}
    answer.set()
    tier.close()


def test_a_tier_under_a_rain_of_errors_gives_right_bytes_or_none(tmp_path: Path) -> None:
    """Two of three roots fail at random, in any call, under several threads; once they are mended all is well again."""
    roots = [tmp_path / name for name in "abc"]
    counter = itertools.count()
    raining = threading.Event()

    def chance(path: str) -> None:
        if raining.is_set() and not path.startswith(str(roots[0])) and zlib.crc32(b"%d" % next(counter)) % 3 == 0:
            number = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE)[next(counter) % 5]
            raise OSError(number, os.strerror(number))

    def opener(path: str, flags: int, mode: int) -> int:
        chance(path)
        return os.open(path, flags, mode)

    def mover(source: str, target: str) -> None:
        chance(target)
        os.rename(source, target)  # noqa: PTH104

    def guarded(call: Callable[[int, Sequence[memoryview], int], int]) -> Callable[..., int]:
        def strike(descriptor: int, parts: Sequence[memoryview], at: int) -> int:
            chance(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
            return call(descriptor, parts, at)

        return strike

    calls = replace(REAL_CALLS, open=opener, preadv=guarded(os.preadv), pwritev=guarded(os.pwritev), rename=mover)
    now_ns = itertools.count(0, 10**6)
    tier = open_tier(*roots, calls=calls, clock_ns=lambda: next(now_ns), retry_s=0.1, hang_s=1e6)
    raining.set()
    wrong: list[int] = []

    def live(thread: int) -> None:
        for turn in range(12):
            numbers = [(thread * 7 + turn * 5 + i) % 40 for i in range(8)]
            write_all(tier, numbers)
            views = [slot(BLOCK_BYTES) for _ in numbers]
            outcomes = tier.read([key_of(number) for number in numbers], views)
            wrong.extend(
                number for number, view, outcome in zip(numbers, views, outcomes, strict=True)
                if outcome is Outcome.OK and bytes(view[:BLOCK_BYTES]) != payload_of(number, BLOCK_BYTES)
            )  # fmt: skip
            tier.delete([key_of(numbers[0])])
            tier.contains([key_of(number) for number in numbers])

    threads = [threading.Thread(target=live, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    raining.clear()
    assert wrong == []
    for _ in range(60):  # tries come with time, and with blocks that have their home there
        write_all(tier, range(200, 260))
        tier.delete([key_of(number) for number in range(200, 260)])
        if all(report.state is RootState.ONLINE for report in tier.describe()):
            break
    put(tier, NUMBERS, BLOCK_BYTES)
    assert [get(tier, number, BLOCK_BYTES) for number in NUMBERS] == [payload_of(n, BLOCK_BYTES) for n in NUMBERS]
    assert [report.state for report in tier.describe()] == [RootState.ONLINE] * 3
    assert [os.listdir(root / "tmp") for root in roots] == [[], [], []]
    assert tier.describe()[0].events == {}
    assert {"EIO", "ENOSPC", "EDQUOT", "EROFS", "EMFILE"} <= {kind for r in tier.describe() for kind in r.events}
    tier.close()
