"""What an operator, or another program, may do to a pool's directories while a store has it open."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from file_tier_kit import BLOCK_BYTES, block_file, open_tier

from forebay.errors import ConfigError
from forebay.testing.tier_contract import filled, get, key_of, namespace_of, payload_of, put, slot
from forebay.tiers.file import FileTier, Options, RootOptions, admin, layout
from forebay.tiers.file.directio import REAL_CALLS
from forebay.types import Outcome


def test_a_store_makes_its_tmp_directory_again(tmp_path: Path) -> None:
    root = tmp_path / "a"
    tier = open_tier(root)
    shutil.rmtree(root / "tmp")
    put(tier, [1, 2, 3], BLOCK_BYTES)
    assert get(tier, 2, BLOCK_BYTES) == payload_of(2, BLOCK_BYTES)
    tier.close()


def test_damage_is_set_aside_although_the_quarantine_was_removed(tmp_path: Path) -> None:
    root = tmp_path / "a"
    tier = open_tier(root)
    put(tier, [1], BLOCK_BYTES)
    shutil.rmtree(root / "quarantine")
    path = block_file(root, key_of(1))
    content = bytearray(path.read_bytes())
    content[4096] ^= 1
    path.write_bytes(content)
    assert get(tier, 1, BLOCK_BYTES) is Outcome.CORRUPT
    assert len(layout.set_aside_files(str(root))) == 1
    put(tier, [1], BLOCK_BYTES)
    assert get(tier, 1, BLOCK_BYTES) == payload_of(1, BLOCK_BYTES)
    tier.close()


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: Path(path).write_bytes(b"\xff" * 99)])
def test_a_marker_that_is_none_neither_stops_nor_fools_anybody(tmp_path: Path, make: object) -> None:
    root = tmp_path / "a"
    tier = open_tier(root)
    put(tier, [1], BLOCK_BYTES)
    (root / layout.MARKER).unlink()
    make(str(root / layout.MARKER))  # type: ignore[operator]
    assert tier.write([key_of(2)], [filled(payload_of(2, BLOCK_BYTES))]) == [Outcome.FAILED]
    tier.close()
    with pytest.raises(ConfigError):
        admin.stat([root])


def test_one_key_in_several_namespaces_and_roots_is_counted_and_deleted_in_all(tmp_path: Path) -> None:
    """Such copies come from people who copy directories, and from a root that was away for a while."""
    a, b = tmp_path / "a", tmp_path / "b"
    tier = open_tier(a, b)
    put(tier, [1, 2, 3], BLOCK_BYTES)
    stored_bytes = tier.spec.stored_bytes
    path = next(p for p in (block_file(a, key_of(1)), block_file(b, key_of(1))) if p.exists())
    namespace_hex = path.parents[1].name
    for root in (a, b):
        for digest in (namespace_hex, "ab" * 32, "cd" * 32):
            copy = root / digest / path.parent.name / path.name
            copy.parent.mkdir(parents=True, exist_ok=True)
            if not copy.exists():
                shutil.copy(path, copy)
    tier.close()
    tier = open_tier(a, b)
    sizes = {stored.key: stored.stored_bytes for stored in tier.scan()}
    assert sizes == {key_of(1): 6 * stored_bytes, key_of(2): stored_bytes, key_of(3): stored_bytes}
    assert tier.delete([key_of(1)]) == [Outcome.OK]
    assert not list(tmp_path.rglob(path.name))
    tier.close()


def test_purge_passes_over_what_a_store_has_just_evicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "a"
    tier = open_tier(root)
    put(tier, [1, 2, 3], BLOCK_BYTES)
    walk = layout.walk_blocks

    def evicting(pool: str, namespace_hex: str) -> list[layout.BlockFile]:
        found = list(walk(pool, namespace_hex))
        tier.delete([key_of(2)])
        return found

    monkeypatch.setattr(layout, "walk_blocks", evicting)
    assert admin.purge([root]).removed_blocks == 2
    tier.close()


def test_a_read_returns_only_when_no_lane_touches_its_views_any_more(tmp_path: Path) -> None:
    """Also when one root's lane breaks with an exception that nobody foresaw."""
    a, b = tmp_path / "a", tmp_path / "b"
    tier = open_tier(a, b)
    numbers = range(12)
    put(tier, numbers, BLOCK_BYTES)
    tier.close()
    release, reading = threading.Event(), threading.Event()

    def preadv(descriptor: int, parts: Sequence[memoryview], at: int) -> int:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if path.suffix == ".kv" and path.is_relative_to(a):
            raise RuntimeError("nobody foresaw this")
        if path.suffix == ".kv":
            reading.set()
            release.wait(30)
        return os.preadv(descriptor, parts, at)

    namespace = namespace_of(BLOCK_BYTES)
    options = Options(roots=(RootOptions(path=str(a)), RootOptions(path=str(b))), capacity_bytes=2**30)
    digest = bytes.fromhex(next(iter(layout.walk_namespaces(str(a)))))
    slow = FileTier(options, namespace, digest, replace(REAL_CALLS, preadv=preadv))
    ended = threading.Event()

    def read() -> None:
        with pytest.raises(RuntimeError, match="foresaw"):
            slow.read([key_of(i) for i in numbers], [slot(BLOCK_BYTES) for _ in numbers])
        ended.set()

    thread = threading.Thread(target=read)
    thread.start()
    assert reading.wait(30)
    assert not ended.wait(0.1)
    release.set()
    thread.join(30)
    assert ended.is_set()
    slow.close()


def test_a_full_root_passes_its_writes_on_and_only_a_full_pool_is_full(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    full_roots = {a}

    def pwritev(descriptor: int, parts: Sequence[memoryview], at: int) -> int:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if len(parts) > 1 and any(path.is_relative_to(root) for root in full_roots):  # a block, not a trial
            raise OSError(errno.ENOSPC, "No space left on device")
        return os.pwritev(descriptor, parts, at)

    tier = open_tier(a, b, calls=replace(REAL_CALLS, pwritev=pwritev))
    put(tier, range(20), BLOCK_BYTES)
    assert not list(a.rglob("*.kv"))
    assert len(list(b.rglob("*.kv"))) == 20
    full_roots.add(b)
    assert tier.write([key_of(50)], [filled(payload_of(50, BLOCK_BYTES))]) == [Outcome.FULL]
    tier.close()


def test_a_file_on_a_bad_sector_is_replaced_by_the_next_write(tmp_path: Path) -> None:
    root = tmp_path / "a"
    bad: set[int] = set()

    def preadv(descriptor: int, parts: Sequence[memoryview], at: int) -> int:
        if os.fstat(descriptor).st_ino in bad:
            raise OSError(errno.EIO, "Input/output error")
        return os.preadv(descriptor, parts, at)

    tier = open_tier(root, calls=replace(REAL_CALLS, preadv=preadv))
    put(tier, [1, 2], BLOCK_BYTES)
    bad.add(block_file(root, key_of(1)).stat().st_ino)
    assert get(tier, 1, BLOCK_BYTES) is Outcome.FAILED
    put(tier, [1], BLOCK_BYTES)
    assert get(tier, 1, BLOCK_BYTES) == payload_of(1, BLOCK_BYTES)
    untouched = block_file(root, key_of(1)).stat().st_ino
    put(tier, [1], BLOCK_BYTES)
    assert block_file(root, key_of(1)).stat().st_ino == untouched, "a sound block is not written again"
    tier.close()
