"""What the operator's commands stand on."""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from file_tier_kit import BLOCK_BYTES, STORED_BYTES, block_file, digest_of, failing, flip, namespace_dir, open_tier

from forebay.errors import ConfigError
from forebay.testing.tier_contract import get, key_of, namespace_of, payload_of, put
from forebay.tiers.file import admin, checking, layout
from forebay.tiers.file.admin import Verdict
from forebay.tiers.file.directio import REAL_CALLS, Access, Scratch
from forebay.tiers.file.format import Header, Shape, checksum, encode_header
from forebay.types import Outcome

OTHER_BYTES = 100


@pytest.fixture
def roots(tmp_path: Path) -> list[Path]:
    """Two roots with 20 blocks of one namespace and 3 of another."""
    made = [tmp_path / "a", tmp_path / "b"]
    for block_bytes, numbers in ((BLOCK_BYTES, range(20)), (OTHER_BYTES, range(3))):
        tier = open_tier(*made, block_bytes=block_bytes)
        put(tier, numbers, block_bytes)
        tier.close()
    return made


def path_of(roots: list[Path], number: int) -> Path:
    [path] = [path for root in roots if (path := block_file(root, key_of(number))).exists()]
    return path


def test_stat_counts_what_is_there(roots: list[Path]) -> None:
    found = admin.stat(roots)
    assert [stat.root for stat in found] == [str(root) for root in roots]
    assert sum(stat.blocks for stat in found) == 23
    assert sum(stat.stored_bytes for stat in found) == 20 * STORED_BYTES + 3 * 8192
    assert {stat.namespaces for stat in found} == {2}
    assert {stat.unfinished_files + stat.set_aside_files for stat in found} == {0}
    assert all(0 < stat.free_bytes < stat.file_system_bytes for stat in found)
    assert len({stat.root_id for stat in found}) == 2


def test_ls_explains_every_namespace(roots: list[Path]) -> None:
    found = {listing.digest: listing for listing in admin.ls(roots)}
    mine = found[digest_of(namespace_of(BLOCK_BYTES)).hex()]
    assert mine.namespace == namespace_of(BLOCK_BYTES)
    assert (mine.blocks, mine.stored_bytes) == (20, 20 * STORED_BYTES)
    assert [usage.root for usage in mine.usage] == [str(root) for root in roots]
    for root in roots:
        (namespace_dir(root) / "namespace.json").write_text("not json")
    assert {listing.namespace for listing in admin.ls(roots)} == {None, namespace_of(OTHER_BYTES)}


def test_answers_are_ready_for_json(roots: list[Path]) -> None:
    for answer in (admin.stat(roots), admin.ls(roots), admin.verify(roots), admin.probe(roots[0]), admin.purge(roots)):
        assert msgspec.json.decode(msgspec.json.encode(answer))


def test_verify_finds_nothing_in_a_sound_pool(roots: list[Path]) -> None:
    seen: list[int] = []
    report = admin.verify(roots, lambda blocks, read_bytes: seen.append(blocks))
    assert (report.checked_blocks, report.checked_bytes) == (23, 20 * STORED_BYTES + 3 * 8192)
    assert report.set_aside == report.newer == report.unreadable == ()
    assert seen == sorted(seen)
    assert seen[-1] == 23


def test_verify_sets_aside_what_is_damaged_or_foreign_once(roots: list[Path], tmp_path: Path) -> None:
    spoiled = {number: path_of(roots, number) for number in range(8)}
    newer = bytearray(spoiled[7].read_bytes())
    newer[8] = 9
    newer[4080:4096] = checksum(bytes(newer[:4080]))
    spoiled[7].write_bytes(newer)
    flip(spoiled[0], 4096 + 77)
    flip(spoiled[1], 300)
    os.truncate(spoiled[2], 5000)
    os.truncate(spoiled[3], 100)
    shutil.copyfile(path_of(roots, 10), spoiled[4])
    spoiled[5].write_bytes(os.urandom(STORED_BYTES))
    spoiled[6].unlink()
    spoiled[6].symlink_to(tmp_path / "nowhere")
    report = admin.verify(roots)
    reasons = {found.path: found.reason for found in report.set_aside}
    assert reasons == {
        str(spoiled[0]): "payload-checksum", str(spoiled[1]): "header-checksum", str(spoiled[2]): "wrong-length",
        str(spoiled[3]): "wrong-length", str(spoiled[4]): "wrong-key", str(spoiled[5]): "bad-magic",
        str(spoiled[6]): "not-a-regular-file",
    }  # fmt: skip
    assert all(found.moved_to is not None and os.path.lexists(found.moved_to) for found in report.set_aside)
    assert report.newer == (str(spoiled[7]),)
    assert sum(stat.set_aside_files for stat in admin.stat(roots)) == 7
    again = admin.verify(roots)
    assert again.set_aside == ()
    assert again.checked_blocks == 23 - 7


def test_a_header_that_lies_about_its_length_asks_for_no_memory(roots: list[Path]) -> None:
    path = path_of(roots, 1)
    page = memoryview(bytearray(4096))
    encode_header(Header(Shape(digest_of(namespace_of(BLOCK_BYTES)), 2**50), key_of(1), bytes(16)), page)
    path.write_bytes(bytes(page) + bytes(8192))
    [found] = admin.verify(roots).set_aside
    assert (found.path, found.reason) == (str(path), "wrong-length")


def test_verify_refuses_a_block_of_another_namespace(roots: list[Path]) -> None:
    root = next(root for root in roots if block_file(root, key_of(1)).exists())
    target = namespace_dir(root, OTHER_BYTES) / key_of(1).hex()[:2] / f"{key_of(1).hex()}.kv"
    target.parent.mkdir(exist_ok=True)
    shutil.copyfile(block_file(root, key_of(1)), target)
    [found] = admin.verify(roots).set_aside
    assert (found.path, found.reason) == (str(target), "wrong-namespace")


def test_purge_of_one_namespace_leaves_the_other(roots: list[Path]) -> None:
    digest = digest_of(namespace_of(OTHER_BYTES)).hex()
    report = admin.purge(roots, admin.Selection(namespace=digest[:8]))
    assert (report.namespaces, report.removed_blocks, report.removed_bytes) == ((digest,), 3, 3 * 8192)
    assert report.kept == ()
    assert not any(namespace_dir(root, OTHER_BYTES).exists() for root in roots)
    tier = open_tier(*roots)
    assert sorted(stored.key for stored in tier.scan()) == sorted(key_of(number) for number in range(20))
    tier.close()


def test_purge_removes_only_what_forebay_made(roots: list[Path]) -> None:
    mine = namespace_dir(roots[0]) / "notes.txt"
    mine.write_text("mine")
    flip(path_of(roots, 1), 0)
    admin.verify(roots)
    report = admin.purge(roots)
    assert report.removed_blocks == 22
    assert report.kept == (str(mine.parent),)
    assert mine.read_text() == "mine"
    assert [stat.blocks + stat.set_aside_files for stat in admin.stat(roots)] == [0, 0]
    tier = open_tier(*roots)  # still a pool
    put(tier, [1], BLOCK_BYTES)
    tier.close()


@pytest.mark.parametrize("namespace", ["", "..", "xyz", "0" * 65, "abc", "*"])
def test_purge_wants_a_digest(roots: list[Path], namespace: str) -> None:
    with pytest.raises(ConfigError, match="hex digits"):
        admin.purge(roots, admin.Selection(namespace=namespace))
    assert sum(stat.blocks for stat in admin.stat(roots)) == 23


def test_purge_wants_exactly_one_namespace(roots: list[Path]) -> None:
    missing = next(f"{i:04x}" for i in range(3) if not any(f"{i:04x}" == path.name[:4] for path in roots[0].iterdir()))
    with pytest.raises(ConfigError, match="0 namespaces"):
        admin.purge(roots, admin.Selection(namespace=missing))


@pytest.mark.parametrize("command", [admin.stat, admin.ls, admin.verify, admin.purge])
def test_a_directory_that_is_no_pool_is_refused(roots: list[Path], tmp_path: Path, command: object) -> None:
    precious = tmp_path / "home" / ("a" * 64) / "bb" / ("b" * 64 + ".kv")
    precious.parent.mkdir(parents=True)
    precious.write_text("mine")
    with pytest.raises(ConfigError, match=r"not a pool"):
        command([*roots, tmp_path / "home"])  # type: ignore[operator]
    assert precious.read_text() == "mine"
    assert sum(stat.blocks for stat in admin.stat(roots)) == 23


def test_probe_tries_what_the_tier_will_do(tmp_path: Path) -> None:
    report = admin.probe(tmp_path)
    assert report.io is not None
    assert {item.name for item in report.items} == {
        "directory", "writable", "medium", "direct I/O", "file locks", "space", "reads, writes", "huge pages",
        "locked memory",
    }  # fmt: skip
    assert report.verdict is not Verdict.BAD
    assert report.free_bytes > 0
    assert report.file_system
    assert list(tmp_path.iterdir()) == []
    new = admin.probe(tmp_path / "new")
    assert (new.path, new.tried) == (str(tmp_path / "new"), str(tmp_path))
    assert new.verdict is Verdict.WARN


def test_probe_says_why_io_is_buffered(tmp_path: Path) -> None:
    refused = replace(REAL_CALLS, open=failing(os.open, lambda path, flags, mode: bool(flags & os.O_DIRECT), 22))
    report = admin.probe(tmp_path, refused)
    assert report.io is not None
    assert report.io.access is Access.BUFFERED
    [item] = [item for item in report.items if item.name == "direct I/O"]
    assert item.verdict is Verdict.WARN
    assert "refuses O_DIRECT" in item.words


def test_probe_of_a_place_that_cannot_be_used(tmp_path: Path) -> None:
    assert admin.probe(tmp_path / "no" / "such").verdict is Verdict.BAD
    read_only = replace(REAL_CALLS, open=failing(os.open, lambda *_: True, errno.EROFS))
    report = admin.probe(tmp_path, read_only)
    assert report.io is None
    [writable] = [item for item in report.items if item.name == "writable"]
    assert writable.verdict is Verdict.BAD
    assert os.strerror(errno.EROFS) in writable.words


def test_payloads_survive_everything_that_only_looks(roots: list[Path]) -> None:
    admin.stat(roots), admin.ls(roots), admin.verify(roots)
    tier = open_tier(*roots)
    for number in range(20):
        assert path_of(roots, number).read_bytes()[4096 : 4096 + BLOCK_BYTES] == payload_of(number, BLOCK_BYTES)
    tier.close()


def test_a_damaged_block_that_a_read_has_taken_first_is_not_called_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "a"
    tier = open_tier(root)
    put(tier, [1, 2], BLOCK_BYTES)
    flip(block_file(root, key_of(1)), 4096)
    prove = checking._prove

    def overtaken(access: Access, file: layout.BlockFile, scratch: Scratch) -> None:
        try:
            prove(access, file, scratch)
        except checking.Damaged:
            assert get(tier, 1, BLOCK_BYTES) is Outcome.CORRUPT
            raise

    monkeypatch.setattr(checking, "_prove", overtaken)
    found = [*admin.verify([root]).set_aside, *admin.verify([root]).set_aside]
    assert [(damaged.found_by, damaged.moved_to is None) for damaged in found] == [(admin.FoundBy.READ, False)]
    tier.close()
