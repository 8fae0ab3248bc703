"""The catalogue of a root: one capacity over all who share it, and what becomes of one that cannot be trusted."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from file_tier_kit import BLOCK_BYTES, STORED_BYTES, block_file, flip, open_tier, write_all
from hypothesis import given
from hypothesis import strategies as st

from forebay.testing.tier_contract import get, key_of, payload_of, put
from forebay.tiers.file import FileTier, admin
from forebay.tiers.file.directio import REAL_CALLS
from forebay.tiers.file.holdings import Holdings
from forebay.tiers.file.records import RECORD_BYTES, Operation, Record, decode, encode
from forebay.types import ChangeKind, Outcome

FILE = "catalogue"


def held(tier: FileTier) -> dict[bytes, int]:
    return {stored.key: stored.stored_bytes for stored in tier.scan()}


def test_the_catalogue_and_the_walk_give_the_same_answer(tmp_path: Path) -> None:
    root = tmp_path / "a"
    tier = open_tier(root)
    put(tier, range(20), BLOCK_BYTES)
    tier.delete([key_of(i) for i in range(0, 20, 3)])
    tier.close()
    tier = open_tier(root)
    by_catalogue = held(tier)
    tier.close()
    (root / FILE).unlink()
    tier = open_tier(root)
    assert held(tier) == by_catalogue == {key_of(i): STORED_BYTES for i in range(20) if i % 3}
    tier.close()


def no_file(path: Path) -> None:
    path.unlink()


def flipped(path: Path) -> None:
    flip(path, path.stat().st_size // 2)


def zeros_behind(path: Path) -> None:
    with path.open("ab") as file:
        file.write(bytes(4096))


def garbage(path: Path) -> None:
    path.write_bytes(os.urandom(5000))


def empty(path: Path) -> None:
    path.write_bytes(b"")


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def copied(path: Path) -> None:
    shutil.copy(path, path.with_name("copy"))
    path.with_name("copy").rename(path)


def records_swapped(path: Path) -> None:
    raw = path.read_bytes()
    at = len(raw) // RECORD_BYTES // 2 * RECORD_BYTES
    one, other = raw[at : at + RECORD_BYTES], raw[at + RECORD_BYTES : at + 2 * RECORD_BYTES]
    path.write_bytes(raw[:at] + other + one + raw[at + 2 * RECORD_BYTES :])


@pytest.mark.parametrize(
    "damage", [no_file, flipped, zeros_behind, garbage, empty, link, copied, records_swapped]
)  # fmt: skip
def test_a_doubtful_catalogue_is_made_anew(
    tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "a"
    tier = open_tier(root)
    put(tier, range(10), BLOCK_BYTES)
    tier.close()
    block_file(root, key_of(3)).unlink()  # what nobody was told: only the files know
    damage(root / FILE)
    tier = open_tier(root)
    assert held(tier) == {key_of(i): STORED_BYTES for i in range(10) if i != 3}
    assert tier.used_bytes == 9 * STORED_BYTES
    assert sum("made anew" in record.getMessage() for record in caplog.records) == 1
    tier.close()
    caplog.clear()
    open_tier(root).close()
    assert not caplog.records or all(record.levelno < logging.WARNING for record in caplog.records)


@pytest.mark.parametrize("cut_bytes", [1, 33, 63])
def test_a_record_that_its_writer_died_in_is_cut_off(tmp_path: Path, cut_bytes: int) -> None:
    root = tmp_path / "a"
    tier = open_tier(root)
    put(tier, range(3), BLOCK_BYTES)
    with (root / FILE).open("ab") as file:
        file.write(bytes(cut_bytes))
    put(tier, range(3, 6), BLOCK_BYTES)
    assert (root / FILE).stat().st_size % RECORD_BYTES == 0
    other = open_tier(root)
    assert held(other) == held(tier) == {key_of(i): STORED_BYTES for i in range(6)}
    other.close()
    tier.close()


@pytest.mark.parametrize("roots", [1, 3])
def test_two_who_share_a_pool_keep_one_capacity(tmp_path: Path, roots: int) -> None:
    paths = [tmp_path / name for name in "abc"[:roots]]
    one = open_tier(*paths, capacity_bytes=10 * STORED_BYTES, shared=True)
    other = open_tier(*paths, capacity_bytes=10 * STORED_BYTES, shared=True)
    assert one.changes() == []
    assert write_all(one, range(6)) == [Outcome.OK] * 6
    outcomes = write_all(other, range(100, 108))
    assert outcomes.count(Outcome.OK) == 4
    assert outcomes.count(Outcome.FULL) == 4
    assert one.used_bytes == other.used_bytes == 10 * STORED_BYTES
    assert write_all(one, [50]) == [Outcome.FULL]
    assert other.delete([key_of(0)]) == [Outcome.OK]
    assert write_all(one, [50]) == [Outcome.OK]
    seen = {(change.key, change.kind) for change in one.changes()}
    assert (key_of(0), ChangeKind.REMOVED) in seen
    assert sum(kind is ChangeKind.ADDED for _, kind in seen) == 4
    one.close()
    assert write_all(other, [51]) == [Outcome.FULL]
    other.close()
    again = open_tier(*paths, capacity_bytes=10 * STORED_BYTES)
    assert len(held(again)) == 10
    again.close()


def test_the_same_key_written_and_deleted_by_two_is_counted_once(tmp_path: Path) -> None:
    root = tmp_path / "a"
    one, other = open_tier(root), open_tier(root)
    for tier in (one, other, one):
        put(tier, [1, 2], BLOCK_BYTES)
    assert one.used_bytes == other.used_bytes == 2 * STORED_BYTES
    for tier in (one, other):
        tier.delete([key_of(1)])
    assert one.used_bytes == other.used_bytes == STORED_BYTES
    block_file(root, key_of(2)).unlink()
    assert get(other, 2, BLOCK_BYTES) is Outcome.MISSING
    assert one.used_bytes == other.used_bytes == 0
    one.close()
    other.close()


def test_a_follower_goes_over_to_a_catalogue_that_was_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "a"
    one, other = open_tier(root, shared=True), open_tier(root, shared=True)
    monkeypatch.setattr("forebay.tiers.file.catalogue._SPARE_RECORDS", 0)
    for number in range(30):
        put(one, [number, number + 1], BLOCK_BYTES)
        one.delete([key_of(number)])
        if number % 7 == 0:
            assert held(other) == held(one) == {key_of(number + 1): STORED_BYTES}
    assert (root / FILE).stat().st_size < 64 * RECORD_BYTES
    assert held(other) == held(one)
    one.close()
    other.close()


def test_a_floor_of_free_space(tmp_path: Path) -> None:
    space = os.statvfs(tmp_path)
    free_bytes = space.f_bavail * space.f_frsize
    tier = open_tier(tmp_path / "a", free_floor_bytes=2 * free_bytes)
    assert write_all(tier, [1]) == [Outcome.FULL]
    assert tier.used_bytes == 0
    tier.close()
    tier = open_tier(tmp_path / "a", free_floor_bytes=free_bytes // 2)
    assert write_all(tier, [1]) == [Outcome.OK]
    tier.close()


def small_disk(root: Path, blocks: int) -> Callable[[str], os.statvfs_result]:
    """`statvfs` of a disk with room for so many blocks; other roots have all they want."""

    def statvfs(path: str) -> os.statvfs_result:
        free = blocks - len(list(root.rglob("*.kv"))) if path == str(root) else 10**6
        return os.statvfs_result((STORED_BYTES, STORED_BYTES, blocks, free, free, 0, 0, 0, 0, 255))

    return statvfs


@pytest.mark.parametrize("batch", [1, 3, 20])
def test_the_floor_holds_to_the_block_for_all_who_write(tmp_path: Path, batch: int) -> None:
    root, numbers = tmp_path / "a", iter(range(1000))
    calls = replace(REAL_CALLS, statvfs=small_disk(root, 20))
    stores = [open_tier(root, calls=calls, free_floor_bytes=5 * STORED_BYTES, shared=True) for _ in range(3)]
    for store in stores * 3:
        write_all(store, [next(numbers) for _ in range(batch)])
        assert len(list(root.rglob("*.kv"))) <= 15
    while write_all(stores[0], [next(numbers)]) == [Outcome.OK]:
        pass
    assert len(list(root.rglob("*.kv"))) == 15
    assert write_all(stores[1], [1000]) == [Outcome.FULL]
    assert stores[1].describe()[0].events["free floor"] >= 1
    for store in stores:
        store.delete([key_of(0)])
    assert write_all(stores[2], [1000]) == [Outcome.OK]
    assert stores[0].used_bytes == 15 * STORED_BYTES
    for store in stores:
        store.close()


def test_the_floor_of_one_root_sends_writes_to_the_next(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    tier = open_tier(a, b, calls=replace(REAL_CALLS, statvfs=small_disk(a, 8)), free_floor_bytes=5 * STORED_BYTES)
    assert write_all(tier, range(20)) == [Outcome.OK] * 20
    assert len(list(a.rglob("*.kv"))) == 3
    tier.close()


def test_what_others_are_about_to_write_counts_for_the_floor(tmp_path: Path) -> None:
    root, asked = tmp_path / "a", list[list[object]]()
    calls = replace(REAL_CALLS, statvfs=small_disk(root, 10))
    other = open_tier(root, calls=calls, free_floor_bytes=8 * STORED_BYTES, shared=True)

    def rename(temp: str, path: str) -> None:
        if path.endswith(".kv") and not asked:
            asked.append(write_all(other, range(10, 14)))
        Path(temp).rename(path)

    options = {"free_floor_bytes": 8 * STORED_BYTES, "writes_in_flight": 1, "shared": True}
    tier = open_tier(root, calls=replace(calls, rename=rename), **options)
    assert write_all(tier, [1, 2]) == [Outcome.OK] * 2
    assert asked == [[Outcome.FULL] * 4]
    tier.close()
    other.close()


def test_a_block_past_its_time_is_missing_and_written_anew(tmp_path: Path) -> None:
    tier = open_tier(tmp_path / "a", ttl_s=60.0)
    put(tier, [1, 2], BLOCK_BYTES)
    old = block_file(tmp_path / "a", key_of(1)).stat().st_mtime - 100
    os.utime(block_file(tmp_path / "a", key_of(1)), (old, old))
    assert get(tier, 1, BLOCK_BYTES) is Outcome.MISSING
    assert list(tier.contains([key_of(1), key_of(2)])) == [False, True]
    put(tier, [1], BLOCK_BYTES)
    assert get(tier, 1, BLOCK_BYTES) == payload_of(1, BLOCK_BYTES)
    assert tier.used_bytes == 2 * STORED_BYTES
    tier.close()


def test_the_write_budget_is_that_of_all_and_outlives_a_restart(tmp_path: Path) -> None:
    options = {"write_budget_bytes_per_day": 10 * STORED_BYTES}
    one, other = open_tier(tmp_path / "a", **options), open_tier(tmp_path / "a", **options)
    put(one, range(4), BLOCK_BYTES)
    put(other, range(2, 7), BLOCK_BYTES)
    one.delete([key_of(0)])
    assert one.write_budget_bytes() == 3 * STORED_BYTES
    one.close()
    other.close()
    again = open_tier(tmp_path / "a", **options)
    assert again.write_budget_bytes() == 3 * STORED_BYTES
    again.close()


def test_of_a_lost_catalogue_the_budget_keeps_what_is_still_there(tmp_path: Path) -> None:
    root, options = tmp_path / "a", {"write_budget_bytes_per_day": 10 * STORED_BYTES}
    tier = open_tier(root, **options)
    put(tier, range(6), BLOCK_BYTES)
    tier.delete([key_of(0)])
    yesterday_s = block_file(root, key_of(1)).stat().st_mtime - 86_400
    os.utime(block_file(root, key_of(1)), (yesterday_s, yesterday_s))
    tier.close()
    (root / FILE).unlink()
    tier = open_tier(root, **options)
    assert tier.write_budget_bytes() == 6 * STORED_BYTES, "of six, one is gone, and one is of yesterday"
    put(tier, [7], BLOCK_BYTES)
    assert tier.write_budget_bytes() == 5 * STORED_BYTES
    tier.close()
    assert admin.wear([root], time.time()).written_bytes == STORED_BYTES, "counted anew"


def test_a_full_disk_can_be_emptied(tmp_path: Path) -> None:
    """The catalogue cannot be appended to, and blocks can be deleted all the same; it is told once there is room."""
    full = [False]

    def pwrite(descriptor: int, raw: bytes, at: int) -> int:
        if full[0]:
            raise OSError(28, "No space left on device")
        return os.pwrite(descriptor, raw, at)

    root = tmp_path / "a"
    tier = open_tier(root, calls=replace(REAL_CALLS, pwrite=pwrite))
    put(tier, [1, 2, 3], BLOCK_BYTES)
    full[0] = True
    assert write_all(tier, [4]) == [Outcome.FULL]
    assert tier.delete([key_of(1)]) == [Outcome.OK]
    assert not block_file(root, key_of(1)).exists()
    full[0] = False
    put(tier, [5], BLOCK_BYTES)
    assert set(held(tier)) == {key_of(2), key_of(3), key_of(5)}
    tier.close()


def test_verify_finds_what_was_copied_in_and_what_was_taken_away(tmp_path: Path) -> None:
    root = tmp_path / "a"
    tier = open_tier(root)
    put(tier, [1, 2, 3], BLOCK_BYTES)
    kept = block_file(root, key_of(1)).read_bytes()
    tier.delete([key_of(1)])
    block_file(root, key_of(1)).write_bytes(kept)
    block_file(root, key_of(2)).unlink()
    assert admin.verify([root]).miscounted_blocks == 2
    assert held(tier) == {key_of(1): STORED_BYTES, key_of(3): STORED_BYTES}
    assert admin.verify([root]).miscounted_blocks == 0
    tier.close()


_BLOCK_OPERATIONS = st.sampled_from([Operation.INTENT, Operation.HELD, Operation.WRITTEN, Operation.GONE])
_EVENTS = st.tuples(_BLOCK_OPERATIONS, st.integers(0, 1), st.integers(0, 3), st.integers(1, 2), st.integers(0, 200_000))


@given(st.lists(_EVENTS, max_size=40), st.booleans())
def test_many_records_at_once_say_what_they_say_one_by_one(
    events: list[tuple[Operation, int, int, int, int]], is_closed: bool
) -> None:
    records = [Record(Operation.START, 1)]
    for number in range(2):
        records.append(Record(Operation.NAMESPACE, number, key=bytes([number]) * 32))
        records.append(Record(Operation.TENANT, number))
    records += [Record(Operation.OPENED, writer=1), Record(Operation.OPENED, writer=2)]
    records += [
        Record(op, ns, time_s, 4096 * (key + 1), writer, bytes([key]) * 32) for op, ns, key, writer, time_s in events
    ]
    records += [Record(Operation.CLOSED, writer=1)] if is_closed else []
    raw = encode(records, 7, 0)
    found = decode(raw, 7, 0)
    assert len(found) == len(records)
    at_once, one_by_one = Holdings(), Holdings()
    at_once.adopt(found)
    one_by_one.apply(found)
    for a, b in zip(at_once.spaces, one_by_one.spaces, strict=True):
        assert (list(a.held.items()), a.held_bytes) == (list(b.held.items()), b.held_bytes)
        assert (a.intents, a.reserved_bytes) == (b.intents, b.reserved_bytes)
    assert at_once.meter == one_by_one.meter
    shot = one_by_one.snapshot(9, 5, 0)
    again = Holdings()
    again.adopt(decode(shot.tobytes(), 9, 0))
    assert [(s.held, s.intents, s.used_bytes) for s in again.spaces] == [
        (s.held, s.intents, s.used_bytes) for s in one_by_one.spaces
    ]
    assert (again.meter, again.writers) == (one_by_one.meter, one_by_one.writers)
    assert len(decode(raw[:-1] + bytes([raw[-1] ^ 1]), 7, 0)) == len(records) - 1
    assert len(decode(raw, 8, 0)) == 0
