"""Several roots: shares, a new root, a lost root, a root that goes and comes back."""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from file_engine_kit import Hang
from file_tier_kit import BLOCK_BYTES, block_file, failing, open_tier, write_all

from forebay.errors import ConfigError
from forebay.testing.tier_contract import filled, get, key_of, payload_of, put, slot
from forebay.tiers.file import FileTier, RootOptions, layout
from forebay.tiers.file.directio import REAL_CALLS
from forebay.tiers.file.health import RootState
from forebay.types import Outcome

NUMBERS = range(60)

pytestmark = pytest.mark.usefixtures("io")


def held_in(root: Path) -> set[int]:
    return {number for number in NUMBERS if block_file(root, key_of(number)).exists()}


def readable(tier: FileTier) -> set[int]:
    views = [slot(BLOCK_BYTES) for _ in NUMBERS]
    outcomes = tier.read([key_of(number) for number in NUMBERS], views)
    for number, view, outcome in zip(NUMBERS, views, outcomes, strict=True):
        assert outcome in (Outcome.OK, Outcome.MISSING)
        assert outcome is Outcome.MISSING or bytes(view[:BLOCK_BYTES]) == payload_of(number, BLOCK_BYTES)
    return {number for number, outcome in zip(NUMBERS, outcomes, strict=True) if outcome is Outcome.OK}


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Warnings so far; the list grows."""
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    caplog.handler.addFilter(lambda record: handler.handle(record) or True)
    return found


def test_blocks_are_spread_by_weight(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    tier = open_tier(RootOptions(path=str(a), weight=3.0), RootOptions(path=str(b)))
    put(tier, NUMBERS, BLOCK_BYTES)
    assert held_in(a) | held_in(b) == set(NUMBERS)
    assert held_in(a).isdisjoint(held_in(b))
    assert len(held_in(a)) > 1.5 * len(held_in(b)) > 0
    tier.close()


def test_roots_keep_their_blocks_when_mounted_elsewhere_and_named_in_another_order(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    tier = open_tier(a, b)
    put(tier, NUMBERS, BLOCK_BYTES)
    tier.close()
    a.rename(tmp_path / "c")
    tier = open_tier(b, tmp_path / "c")
    before = held_in(b)
    assert readable(tier) == set(NUMBERS)
    tier.delete([key_of(number) for number in NUMBERS])
    put(tier, NUMBERS, BLOCK_BYTES)
    assert held_in(b) == before
    tier.close()


def test_a_new_root_loses_nothing_of_the_old_ones(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    tier = open_tier(a)
    put(tier, NUMBERS, BLOCK_BYTES)
    tier.close()
    tier = open_tier(a, b)
    assert all(tier.contains([key_of(number) for number in NUMBERS]))
    assert readable(tier) == set(NUMBERS)
    put(tier, NUMBERS, BLOCK_BYTES)  # all held: nothing is written twice
    assert held_in(b) == set()
    assert len(list(tier.scan())) == len(NUMBERS)
    assert set(tier.delete([key_of(number) for number in NUMBERS])) == {Outcome.OK}
    assert list(tier.scan()) == []
    tier.close()


def test_a_root_that_is_lost_at_start_costs_only_its_blocks(tmp_path: Path, lines: list[str]) -> None:
    a, b = tmp_path / "a", tmp_path / "mount" / "b"
    b.parent.mkdir()
    tier = open_tier(a, b)
    put(tier, NUMBERS, BLOCK_BYTES)
    lost = held_in(b)
    tier.close()
    b.parent.rename(tmp_path / "unplugged")
    tier = open_tier(a, b)
    assert len(lines) == 1
    assert str(b) in lines[0]
    assert readable(tier) == set(NUMBERS) - lost
    put(tier, NUMBERS, BLOCK_BYTES)
    assert readable(tier) == set(NUMBERS)
    assert len(lines) == 1
    (tmp_path / "unplugged").rename(b.parent)
    assert readable(tier) == set(NUMBERS)
    assert lines[1:] == [f"root {b} is back"]
    assert [report.state for report in tier.describe()] == [RootState.ONLINE] * 2
    tier.close()


def test_a_root_that_goes_and_comes_back(tmp_path: Path, lines: list[str]) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    tier = open_tier(a, b)
    put(tier, NUMBERS[:30], BLOCK_BYTES)
    lost, kept = held_in(b), held_in(a)
    b.rename(tmp_path / "unplugged")
    assert readable(tier) == kept
    assert [report.state for report in tier.describe()] == [RootState.ONLINE, RootState.ABSENT]
    put(tier, NUMBERS[30:], BLOCK_BYTES)
    assert readable(tier) == kept | set(NUMBERS[30:])
    assert len(lines) == 1
    assert "went" in lines[0]
    (tmp_path / "unplugged").rename(b)
    assert readable(tier) == set(NUMBERS)
    assert lost <= readable(tier)
    assert len(lines) == 2
    assert "is back" in lines[1]
    tier.close()


def test_a_root_that_went_counts_with_its_blocks(tmp_path: Path) -> None:
    """Two stores on one pool, so that what the others write counts as well."""
    a, b = tmp_path / "a", tmp_path / "b"
    stored_bytes = open_tier(tmp_path / "sample").spec.stored_bytes
    tiers = [open_tier(a, b, capacity_bytes=40 * stored_bytes) for _ in range(2)]
    for tier, numbers in zip(tiers, (NUMBERS[:20], NUMBERS[20:40]), strict=True):
        put(tier, numbers, BLOCK_BYTES)
    there = held_in(a)
    b.rename(tmp_path / "unplugged")
    for tier in tiers:
        assert readable(tier) == there
        assert set(write_all(tier, NUMBERS[40:], BLOCK_BYTES)) == {Outcome.FULL}
        assert tier.used_bytes == 40 * stored_bytes
    gone = sorted(there)[:5]
    assert set(tiers[0].delete([key_of(number) for number in gone])) == {Outcome.OK}
    assert write_all(tiers[1], NUMBERS[40:], BLOCK_BYTES).count(Outcome.OK) == 5
    (tmp_path / "unplugged").rename(b)
    for tier in tiers:
        assert len(readable(tier)) == 40
        assert tier.used_bytes == 40 * stored_bytes
        tier.close()


def test_an_empty_mount_point_is_not_taken_for_the_root(tmp_path: Path, lines: list[str]) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    tier = open_tier(a, b)
    b.rename(tmp_path / "unplugged")
    b.mkdir()
    put(tier, NUMBERS, BLOCK_BYTES)
    assert list(b.iterdir()) == []
    assert held_in(a) == set(NUMBERS)
    assert len(lines) == 1
    tier.close()


def test_another_pool_in_its_place_is_not_taken_for_the_root(tmp_path: Path, lines: list[str]) -> None:
    a, b, stranger = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    open_tier(stranger).close()
    tier = open_tier(a, b)
    b.rename(tmp_path / "unplugged")
    stranger.rename(b)
    put(tier, NUMBERS, BLOCK_BYTES)
    assert held_in(a) == set(NUMBERS)
    assert tier.describe()[1].state is RootState.ABSENT
    assert len(lines) == 1
    tier.close()


def test_a_dying_root_passes_its_writes_on(tmp_path: Path, lines: list[str]) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    dying = [False]
    opener = failing(
        os.open, lambda path, flags, mode: dying[0] and path.startswith(str(b)) and bool(flags & os.O_CREAT), 5
    )
    tier = open_tier(a, b, calls=replace(REAL_CALLS, open=opener))
    put(tier, NUMBERS[:30], BLOCK_BYTES)
    before = held_in(b)
    dying[0] = True
    put(tier, NUMBERS[30:], BLOCK_BYTES)
    assert readable(tier) == set(NUMBERS)
    assert held_in(b) == before
    assert len(lines) == 2
    assert "a write failed" in lines[0]
    assert "writes are stopped" in lines[1]
    tier.close()


def test_all_roots_gone_while_open(tmp_path: Path) -> None:
    a = tmp_path / "a"
    tier = open_tier(a)
    put(tier, [1], BLOCK_BYTES)
    a.rename(tmp_path / "unplugged")
    assert get(tier, 1, BLOCK_BYTES) is Outcome.MISSING
    assert write_all(tier, [2]) == [Outcome.FAILED]
    assert list(tier.scan()) == []
    assert list(tier.delete([key_of(1)])) == [Outcome.OK]
    (tmp_path / "unplugged").rename(a)
    assert get(tier, 1, BLOCK_BYTES) == payload_of(1, BLOCK_BYTES)
    tier.close()


def test_scan_is_oldest_first_over_all_roots(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    tier = open_tier(a, b)
    put(tier, NUMBERS, BLOCK_BYTES)
    for number in NUMBERS:
        [path] = [path for root in (a, b) if (path := block_file(root, key_of(number))).exists()]
        age = (number * 7) % 60
        os.utime(path, ns=(age * 10**9, age * 10**9))
    tier.close()
    for root in (a, b):
        (root / "catalogue").unlink()
    tier = open_tier(a, b)
    found = [stored.key for stored in tier.scan()]
    assert found == [key_of(number) for number in sorted(NUMBERS, key=lambda number: (number * 7) % 60)]
    tier.close()


def test_blocks_of_other_namespaces_are_found_and_can_be_deleted(tmp_path: Path) -> None:
    root = tmp_path / "a"
    other = open_tier(root, block_bytes=100)
    put(other, [1, 2], 100)
    tier = open_tier(root)
    put(tier, [3], BLOCK_BYTES)
    found = {stored.key: stored.stored_bytes for stored in tier.scan()}
    assert found == {key_of(1): 8192, key_of(2): 8192, key_of(3): 12288}
    assert list(tier.contains([key_of(1)])) == [False]
    assert get(tier, 1, BLOCK_BYTES) is Outcome.MISSING
    assert list(tier.delete([key_of(1), key_of(3)])) == [Outcome.OK] * 2
    assert get(other, 1, 100) is Outcome.MISSING
    assert get(other, 2, 100) == payload_of(2, 100)
    assert {stored.key for stored in tier.scan()} == {key_of(2)}
    tier.close()
    other.close()


def test_one_call_uses_all_roots_at_once(tmp_path: Path) -> None:
    """With one read thread a root, reads of two roots meet at a barrier: neither waits for the other to end."""
    a, b = tmp_path / "a", tmp_path / "b"
    barrier = threading.Barrier(2)
    meet = [False]

    def preadv(descriptor: int, parts: list[memoryview], offset: int) -> int:
        if meet[0]:
            barrier.wait(timeout=20)
        return os.preadv(descriptor, parts, offset)

    tier = open_tier(a, b, reads_in_flight=1, calls=replace(REAL_CALLS, preadv=preadv))
    put(tier, NUMBERS, BLOCK_BYTES)
    one_each = [min(held_in(a)), min(held_in(b))]
    meet[0] = True
    outcomes = tier.read([key_of(number) for number in one_each], [slot(BLOCK_BYTES), slot(BLOCK_BYTES)])
    assert list(outcomes) == [Outcome.OK, Outcome.OK]
    tier.close()


def test_a_directory_with_other_things_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"thesis\.txt"):
        open_tier(tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_a_marker_of_another_version_or_a_damaged_one_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "a"
    open_tier(root).close()
    marker = root / "forebay-pool.json"
    sound = marker.read_text()
    marker.write_text(sound.replace('"format_version": 1', '"format_version": 2'))
    with pytest.raises(ConfigError, match="version 2"):
        open_tier(root)
    marker.write_text(sound[:20])
    with pytest.raises(ConfigError, match="damaged"):
        open_tier(root)


def test_a_root_whose_making_was_cut_short_is_made_again(tmp_path: Path) -> None:
    root = tmp_path / "a"
    (root / "tmp").mkdir(parents=True)
    tier = open_tier(root)
    put(tier, [1], BLOCK_BYTES)
    tier.close()


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_weights_must_be_positive(tmp_path: Path, weight: float) -> None:
    with pytest.raises(ConfigError, match="weight"):
        open_tier(RootOptions(path=str(tmp_path / "a"), weight=weight))


def test_wrong_roots_are_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no roots"):
        open_tier()
    with pytest.raises(ConfigError, match="same root twice"):
        open_tier(tmp_path / "a", tmp_path / "." / "a")
    with pytest.raises(ConfigError, match="make the parent"):
        open_tier(tmp_path / "no" / "a", tmp_path / "no" / "b")
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="no root"):
        open_tier(tmp_path / "file")


def test_a_copy_of_a_root_is_refused(tmp_path: Path) -> None:
    open_tier(tmp_path / "a").close()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "forebay-pool.json").write_bytes((tmp_path / "a" / "forebay-pool.json").read_bytes())
    with pytest.raises(ConfigError, match="same identity"):
        open_tier(tmp_path / "a", tmp_path / "b")


def test_two_tiers_may_make_the_same_root_at_once(tmp_path: Path) -> None:
    root, start = tmp_path / "a", threading.Barrier(4)
    tiers: list[FileTier] = []

    def make() -> None:
        start.wait()
        tiers.append(open_tier(root))

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({report.root_id for tier in tiers for report in tier.describe()}) == 1
    assert set(tiers[0].write([key_of(1)], [filled(payload_of(1, BLOCK_BYTES))])) == {Outcome.OK}
    assert [get(tier, 1, BLOCK_BYTES) for tier in tiers] == [payload_of(1, BLOCK_BYTES)] * 4
    for tier in tiers:
        tier.close()


def test_a_root_that_was_never_seen_and_hangs_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = tmp_path / "a", tmp_path / "mount" / "b"
    tier = open_tier(a, b)
    put(tier, NUMBERS, BLOCK_BYTES)
    b.parent.mkdir()
    open_tier(b).close()
    hang, read_marker, answers = Hang(), layout.read_marker, list[set[int]]()

    def hanging(root: Path) -> layout.Marker | None:
        if root == b:
            hang()
        return read_marker(root)

    monkeypatch.setattr(layout, "read_marker", hanging)
    thread = threading.Thread(target=lambda: answers.extend(readable(tier) for _ in range(3)), daemon=True)
    thread.start()
    assert hang.hanging.acquire(timeout=30)
    thread.join(30)
    assert answers == [set(NUMBERS)] * 3
    assert not hang.hanging.acquire(blocking=False), "one look at a time"
    hang.release()
    tier._looks[1].settle()
    assert readable(tier) == set(NUMBERS)
    assert [report.state for report in tier.describe()] == [RootState.ONLINE] * 2
    tier.close()
