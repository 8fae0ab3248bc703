"""A disk that hangs, from end to end: a miss in time, the other disk unhurt, late data thrown away, and a way out."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from file_engine_kit import KEYS, OPTIONS, UNTOUCHED, Hang, Pool, truth
from file_tier_kit import BLOCK_BYTES, open_tier, write_all

from forebay.events import Overdue
from forebay.testing.schedule import BLOCK_BYTES as ENGINE_BLOCK_BYTES
from forebay.testing.tier_contract import key_of
from forebay.tiers.file import FileTier, Io, scrub
from forebay.tiers.file.directio import REAL_CALLS
from forebay.tiers.file.native import Task, find_kernel
from forebay.types import HOST

needs_kernel = pytest.mark.skipif(find_kernel().kernel is None, reason="no compiled kernel")
IO = [Io.PYTHON, pytest.param(Io.NATIVE, marks=needs_kernel)]


def open_pool(place: Path, io: Io, **options: object) -> Pool:
    pool = Pool(place, calls=REAL_CALLS, io=io, **options) if io is Io.NATIVE else Pool(place, **options)
    pool.offer(KEYS)
    assert pool.keys_at(pool.a)
    assert pool.keys_at(pool.b)
    return pool


def hang_reads(pool: Pool, root: Path, monkeypatch: pytest.MonkeyPatch) -> Hang:
    """Reads of blocks there do not come back. The kernel's are held up where Python waits for them."""
    hang = Hang()
    fast = pool.tier._fast_reads
    if fast is None:

        def strike(call: str, path: str) -> None:
            if call == "read" and path.startswith(str(root)):
                hang()

        pool.strike = strike
        return hang
    kernel, held = fast._kernel, list[object]()
    start, wait = kernel.start, kernel.wait

    def watched(jobs: Any, count: int, transfer: object) -> Any:
        trouble = start(jobs, count, transfer)
        reads = [jobs[i].paths[0] for i in range(count) if jobs[i].task != Task.PUBLISH]
        if any(path.startswith(str(root).encode()) for path in reads):
            held.append(transfer)
        return trouble

    def held_up(transfer: object, deadline_ns: int, done: object) -> int:
        if transfer in held:
            hang()
            held.remove(transfer)
        return int(wait(transfer, deadline_ns, done))

    monkeypatch.setattr(kernel, "start", watched)
    monkeypatch.setattr(kernel, "wait", held_up)
    return hang


@pytest.mark.parametrize("io", IO)
def test_a_disk_that_hangs_costs_its_own_blocks_and_no_more(
    tmp_path: Path, io: Io, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = open_pool(tmp_path, io)
    on_a, on_b = pool.keys_at(pool.a), pool.keys_at(pool.b)
    first_on_b = min(KEYS.index(key) for key in on_b)
    hang = hang_reads(pool, pool.b, monkeypatch)
    began_s = time.monotonic()
    assert pool.load(KEYS) == first_on_b
    assert time.monotonic() - began_s < 10 * OPTIONS.read_deadline_s, "a miss, in time"
    assert hang.hanging.acquire(timeout=60)
    assert any(isinstance(event, Overdue) for event in pool.events)
    stranded = pool.engine._stage.stranded_slots
    assert stranded > 0
    assert pool.load(on_a) == len(on_a), "the other disk"
    assert pool.load(on_b) == 0
    memory_before = list(pool.device.memory)
    hang.release()
    pool.until(lambda: pool.engine._stage.stranded_slots == 0)
    pool.settle()
    assert pool.device.memory == memory_before, "what came late is thrown away"
    assert {pool.engine._index.get(key, HOST) for key in on_b} == {None}
    pool.engine.drop_host_copies()
    assert pool.engine._stage.pool.free_slots == pool.engine._stage.pool.slots
    pool.engine.check_idle()
    pool.until(lambda: pool.load(KEYS) == len(KEYS))
    pool.engine.close()


@pytest.mark.parametrize("io", IO)
def test_an_engine_is_closed_although_its_disk_hangs(
    tmp_path: Path, io: Io, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = set(threading.enumerate())
    pool = open_pool(tmp_path, io, hang_s=0.2, close_within_s=0.2)
    hang = hang_reads(pool, pool.b, monkeypatch)
    assert pool.load(KEYS) < len(KEYS)
    assert hang.hanging.acquire(timeout=60)
    caplog.clear()
    began_s = time.monotonic()
    pool.engine.close()
    assert time.monotonic() - began_s < 10
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert sum("still hang in a tier" in line for line in lines) == 1
    hang.release()
    assert_ended(before)


def test_a_write_that_hangs_does_not_hold_up_closing_and_is_counted_when_it_lands(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = set(threading.enumerate())
    hang = Hang()
    pool = Pool(tmp_path, hang_s=0.2, close_within_s=0.2)
    pool.strike = lambda call, path: hang() if call == "write" and path.startswith(str(pool.b)) else None
    [key] = pool.keys_at(pool.b)[:1]
    pool.device.memory[0] = truth(key)
    assert pool.engine.offer([key], [0]) == 1  # type: ignore[list-item]
    pool.until(lambda: hang.hanging.acquire(blocking=False))
    pool.engine.close()
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert [line.startswith(f"root {pool.b}: 1 threads still hang") for line in lines if "root" in line] == [True]
    other = open_tier(pool.a, pool.b, block_bytes=ENGINE_BLOCK_BYTES)
    stored_bytes = pool.tier.spec.stored_bytes
    assert other.used_bytes == stored_bytes, "what may yet land is counted"
    assert list(tmp_path.rglob("*.kv")) == []
    hang.release()
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("forebay-file-write-"):  # the executor's: it settles what the tier's wrote
            thread.join(60)
    assert len(list(tmp_path.rglob("*.kv"))) == 1
    assert other.used_bytes == stored_bytes
    other.close()
    assert_ended(before)


def close_hung(tier: FileTier, caplog: pytest.LogCaptureFixture, thread: str) -> None:
    caplog.clear()
    began_s = time.monotonic()
    tier.close()
    assert time.monotonic() - began_s < 10
    [line] = [record.getMessage() for record in caplog.records]
    assert f"1 threads still hang, {thread}" in line
    tier.close()


def test_a_scrub_that_hangs_does_not_hold_up_closing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = set(threading.enumerate())
    hang = Hang()
    filling = open_tier(tmp_path / "a")
    write_all(filling, [1])
    filling.close()
    monkeypatch.setattr(scrub, "check_block", hang)
    tier = open_tier(tmp_path / "a", scrub_bytes_per_s=1e12, hang_s=0.2)
    assert hang.hanging.acquire(timeout=60)
    close_hung(tier, caplog, "forebay-scrub")
    hang.release()
    assert_ended(before)


@needs_kernel
def test_a_kernel_that_hangs_does_not_hold_up_closing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = set(threading.enumerate())
    tier, hang = open_tier(tmp_path / "a", io=Io.NATIVE, hang_s=0.2), Hang()
    assert tier._fast_reads is not None
    kernel, [lanes] = tier._fast_reads._kernel, tier._fast_reads._lanes
    reads = lanes.pool
    end: Callable[[object], None] = kernel.close

    def close(pool: object) -> None:
        if pool == reads:
            hang()
        end(pool)

    monkeypatch.setattr(kernel, "close", close)
    close_hung(tier, caplog, "forebay-native-close")
    hang.release()
    assert_ended(before)


def test_a_catalogue_that_hangs_does_not_hold_up_closing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = set(threading.enumerate())
    tier, hang = open_tier(tmp_path / "a", hang_s=0.2), Hang()
    write_all(tier, [1])
    [member] = tier._members
    assert member.root.catalogue is not None
    monkeypatch.setattr(member.root.catalogue, "close", hang)
    close_hung(tier, caplog, "forebay-catalogue-close")
    hang.release()
    assert_ended(before)
    again = open_tier(tmp_path / "a")
    assert [stored.key for stored in again.scan()] == [key_of(1)]
    assert again.used_bytes == 4096 + -(-BLOCK_BYTES // 4096) * 4096
    again.close()


def assert_ended(before: set[threading.Thread]) -> None:
    """Whatever hung has ended by itself: no thread is left but those that were there before."""
    started = set(threading.enumerate()) - before
    for thread in started:
        thread.join(60)
    assert not [thread.name for thread in started if thread.is_alive()]


assert len(UNTOUCHED) == ENGINE_BLOCK_BYTES
