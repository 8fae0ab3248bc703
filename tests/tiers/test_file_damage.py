"""Files that are not what they claim: never OK, set aside with the reason, missing from then on."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import pytest
from file_tier_kit import (
    BLOCK_BYTES,
    STORED_BYTES,
    block_file,
    flip,
    namespace_dir,
    open_tier,
    set_aside,
    write_all,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forebay.errors import ConfigError
from forebay.testing.tier_contract import filled, get, key_of, payload_of, put, slot
from forebay.tiers.file import Verify
from forebay.tiers.file.blockfile import Claim, write_block
from forebay.tiers.file.directio import REAL_CALLS, Access, Scratch
from forebay.tiers.file.format import Shape, checksum
from forebay.tiers.file.layout import QUARANTINE_FILES
from forebay.types import Outcome

pytestmark = pytest.mark.usefixtures("io")
SAME_DIR = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)


def spoil(root: Path, content: bytes) -> Outcome | bytes:
    """Put other content under block 1's name and read it; the place is clean afterwards."""
    tier = open_tier(root)
    put(tier, [1], BLOCK_BYTES)
    block_file(root, key_of(1)).write_bytes(content)
    first, second = get(tier, 1, BLOCK_BYTES), get(tier, 1, BLOCK_BYTES)
    tier.close()
    assert second == first or second is Outcome.MISSING
    return first


def stored(root: Path) -> bytes:
    """The bytes of block 1's file."""
    tier = open_tier(root)
    put(tier, [1], BLOCK_BYTES)
    tier.close()
    return block_file(root, key_of(1)).read_bytes()


def test_layout_of_a_stored_block(tmp_path: Path) -> None:
    tier = open_tier(tmp_path / "a")
    view = slot(BLOCK_BYTES)
    view[:BLOCK_BYTES] = payload_of(1, BLOCK_BYTES)  # and 0xEE after it, which must not reach the disk
    assert list(tier.write([key_of(1)], [view])) == [Outcome.OK]
    content = block_file(tmp_path / "a", key_of(1)).read_bytes()
    assert len(content) == STORED_BYTES == tier.spec.stored_bytes
    assert content[:8] == b"FOREBAY\n"
    assert content[4096 : 4096 + BLOCK_BYTES] == payload_of(1, BLOCK_BYTES)
    assert set(content[4096 + BLOCK_BYTES :]) == {0}
    assert content[96:112] == checksum(payload_of(1, BLOCK_BYTES))
    tier.close()


def test_padding_is_zeros_whatever_the_buffers_held(tmp_path: Path) -> None:
    scratch, path = Scratch(), tmp_path / "block"
    scratch.tail[:] = b"\xee" * 4096
    claim = Claim(Shape(bytes(32), BLOCK_BYTES), key_of(1))
    with path.open("wb") as file:
        write_block(REAL_CALLS, file.fileno(), Access.BUFFERED, claim, filled(payload_of(1, BLOCK_BYTES)), scratch)
    assert path.read_bytes()[4096:] == payload_of(1, BLOCK_BYTES) + bytes(8192 - BLOCK_BYTES)


@SAME_DIR
@given(offset=st.integers(0, 4096 + BLOCK_BYTES - 1), mask=st.integers(1, 255))
def test_a_flip_anywhere_is_detected(tmp_path: Path, offset: int, mask: int) -> None:
    root = tmp_path / "a"
    tier = open_tier(root, reads_in_flight=1, writes_in_flight=1)
    put(tier, [1], BLOCK_BYTES)
    flip(block_file(root, key_of(1)), offset, mask)
    assert get(tier, 1, BLOCK_BYTES) is Outcome.CORRUPT
    assert get(tier, 1, BLOCK_BYTES) is Outcome.MISSING
    tier.close()


@pytest.mark.parametrize(
    "length_bytes",
    [0, 1, 512, 4095, 4096, 4097, 4096 + BLOCK_BYTES, 8192, STORED_BYTES - 1, STORED_BYTES + 1, STORED_BYTES + 4096],
)
def test_any_other_length_is_detected(tmp_path: Path, length_bytes: int) -> None:
    root = tmp_path / "a"
    whole = stored(root)
    assert spoil(root, (whole + bytes(8192))[:length_bytes]) is Outcome.CORRUPT
    assert set_aside(root) == ["wrong-length"]


def test_a_foreign_file_under_a_block_name(tmp_path: Path) -> None:
    root = tmp_path / "a"
    assert spoil(root, os.urandom(STORED_BYTES)) is Outcome.CORRUPT
    assert set_aside(root) == ["bad-magic"]


def test_damage_is_said_with_its_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = tmp_path / "a"
    whole = bytearray(stored(root))
    whole[5000] ^= 1
    with caplog.at_level(logging.WARNING):
        spoil(root, bytes(whole))
    [line] = [record.getMessage() for record in caplog.records]
    assert "payload-checksum" in line
    assert block_file(root, key_of(1)).name in line


def test_without_payload_verification_the_header_still_counts(tmp_path: Path) -> None:
    root = tmp_path / "a"
    tier = open_tier(root, verify=Verify.HEADER)
    put(tier, [1, 2], BLOCK_BYTES)
    flip(block_file(root, key_of(1)), 4096)
    flip(block_file(root, key_of(2)), 100)
    assert get(tier, 1, BLOCK_BYTES) not in (Outcome.CORRUPT, payload_of(1, BLOCK_BYTES))
    assert get(tier, 2, BLOCK_BYTES) is Outcome.CORRUPT
    tier.close()


def test_another_block_under_this_name(tmp_path: Path) -> None:
    root = tmp_path / "a"
    tier = open_tier(root)
    put(tier, [1, 2], BLOCK_BYTES)
    shutil.copyfile(block_file(root, key_of(2)), block_file(root, key_of(1)))
    assert get(tier, 1, BLOCK_BYTES) is Outcome.CORRUPT
    assert set_aside(root) == ["wrong-key"]
    assert get(tier, 2, BLOCK_BYTES) == payload_of(2, BLOCK_BYTES)
    tier.close()


def test_a_block_of_another_namespace_under_this_name(tmp_path: Path) -> None:
    root = tmp_path / "a"
    other_bytes = BLOCK_BYTES + 1  # another namespace, with files of the same length
    for block_bytes in (BLOCK_BYTES, other_bytes):
        tier = open_tier(root, block_bytes=block_bytes)
        put(tier, [1], block_bytes)
        tier.close()
    shutil.copyfile(block_file(root, key_of(1), other_bytes), block_file(root, key_of(1)))
    tier = open_tier(root)
    assert get(tier, 1, BLOCK_BYTES) is Outcome.CORRUPT
    assert set_aside(root) == ["wrong-namespace"]
    tier.close()


@pytest.mark.parametrize("extra_bytes", [0, 4096])
def test_a_newer_format_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture, extra_bytes: int) -> None:
    root = tmp_path / "a"
    newer = bytearray(stored(root)) + bytes(extra_bytes)
    newer[8:12] = b"\7\0\0\0"
    newer[4080:4096] = checksum(bytes(newer[:4080]))
    block_file(root, key_of(1)).write_bytes(newer)
    tier = open_tier(root)
    with caplog.at_level(logging.WARNING):
        assert [get(tier, 1, BLOCK_BYTES) for _ in range(3)] == [Outcome.MISSING] * 3
        write_all(tier, [1])  # whatever it answers, it must not replace the file
    assert block_file(root, key_of(1)).read_bytes() == newer
    assert sum("version 7" in record.getMessage() for record in caplog.records) == 1
    tier.close()


def test_symbolic_links_pipes_and_directories_are_not_blocks(tmp_path: Path) -> None:
    root = tmp_path / "a"
    secret = tmp_path / "secret"
    secret.write_bytes(stored(root))
    tier = open_tier(root)
    put(tier, [2, 3], BLOCK_BYTES)
    for number in (1, 2, 3):
        block_file(root, key_of(number)).unlink()
    block_file(root, key_of(1)).symlink_to(secret)
    os.mkfifo(block_file(root, key_of(2)))
    block_file(root, key_of(3)).mkdir()
    assert [get(tier, i, BLOCK_BYTES) for i in (1, 2, 3)] == [Outcome.CORRUPT] * 3
    assert set_aside(root) == ["not-a-regular-file"] * 3
    assert secret.exists()
    assert list(tier.scan()) == []
    assert [get(tier, i, BLOCK_BYTES) for i in (1, 2, 3)] == [Outcome.MISSING] * 3
    assert tier.describe()[0].io.access.value == "direct"  # the refusals were not taken for the file system's
    tier.close()


def test_contains_sets_aside_what_cannot_be_a_block(tmp_path: Path) -> None:
    """Counted by nobody, it would still take room."""
    root = tmp_path / "a"
    tier = open_tier(root)
    put(tier, [1, 2, 3], BLOCK_BYTES)
    block_file(root, key_of(1)).write_bytes(b"short")
    block_file(root, key_of(2)).unlink()
    block_file(root, key_of(2)).mkdir()
    assert list(tier.contains([key_of(i) for i in (1, 2, 3)])) == [False, False, True]
    assert set_aside(root) == ["not-a-regular-file", "wrong-length"]
    assert [get(tier, i, BLOCK_BYTES) for i in (1, 2)] == [Outcome.MISSING] * 2
    tier.close()


def test_a_write_replaces_what_cannot_be_a_block(tmp_path: Path) -> None:
    root = tmp_path / "a"
    tier = open_tier(root)
    put(tier, [1, 2], BLOCK_BYTES)
    block_file(root, key_of(1)).write_bytes(b"short")
    block_file(root, key_of(2)).unlink()
    block_file(root, key_of(2)).mkdir()
    put(tier, [1, 2], BLOCK_BYTES)
    assert [get(tier, i, BLOCK_BYTES) for i in (1, 2)] == [payload_of(i, BLOCK_BYTES) for i in (1, 2)]
    assert set_aside(root) == ["not-a-regular-file", "wrong-length"]
    tier.close()


def test_names_that_are_no_blocks_are_ignored_and_kept(tmp_path: Path) -> None:
    root = tmp_path / "a"
    tier = open_tier(root)
    put(tier, [1], BLOCK_BYTES)
    sound = block_file(root, key_of(1))
    name, directory = sound.name, namespace_dir(root)
    strangers = [
        sound.with_name(name.upper()),
        sound.with_name(name + "x"),
        sound.with_name(f"{name[:2]}zz{name[4:]}"),
        sound.with_name("..kv"),
        sound.with_name("ff" * 31 + ".kv"),
        directory / name,
        directory / "zz" / name,
        directory / f"{int(name[:2], 16) ^ 1:02x}" / f"{name[:2]}{'0' * 62}.kv",
        root / "notes.txt",
        root / ("g" * 64) / name[:2] / name,
        root / "tmp" / "mine.txt",
        root / "quarantine" / "mine.txt",
    ]
    for stranger in strangers:
        stranger.parent.mkdir(parents=True, exist_ok=True)
        stranger.write_bytes(b"not ours")
    tier.close()
    again = open_tier(root)
    assert [stored.key for stored in again.scan()] == [key_of(1)]
    assert all(stranger.read_bytes() == b"not ours" for stranger in strangers)
    again.close()


def test_keys_of_another_length_never_become_a_path(tmp_path: Path) -> None:
    tier = open_tier(tmp_path / "a")
    with pytest.raises(ValueError, match="32 bytes"):
        tier.read([b"../../etc/passwd"], [slot(BLOCK_BYTES)])
    put(tier, [1], BLOCK_BYTES)  # the lanes have survived it
    tier.close()


@pytest.mark.parametrize("where", ["namespace", "fan"])
def test_linked_directories_are_refused(tmp_path: Path, where: str) -> None:
    root, outside = tmp_path / "a", tmp_path / "outside"
    stored(root)
    linked = namespace_dir(root) if where == "namespace" else block_file(root, key_of(1)).parent
    linked.rename(outside)
    linked.symlink_to(outside)
    with pytest.raises(ConfigError, match="symbolic link"):
        open_tier(root)


def test_quarantine_does_not_grow_without_end(tmp_path: Path) -> None:
    root = tmp_path / "a"
    tier = open_tier(root)
    numbers = range(QUARANTINE_FILES + 5)
    put(tier, numbers, BLOCK_BYTES)
    for number in numbers:
        flip(block_file(root, key_of(number)), 0)
    outcomes = tier.read([key_of(number) for number in numbers], [slot(BLOCK_BYTES) for _ in numbers])
    assert set(outcomes) == {Outcome.CORRUPT}
    assert QUARANTINE_FILES <= len(set_aside(root)) < QUARANTINE_FILES + 3  # two readers may decide at once
    assert list(tier.contains([key_of(number) for number in numbers])) == [False] * len(numbers)
    tier.close()


def test_the_namespace_explains_itself_and_is_mended(tmp_path: Path) -> None:
    root = tmp_path / "a"
    open_tier(root).close()
    path = namespace_dir(root) / "namespace.json"
    before = path.read_text()
    assert '"model": "contract"' in before
    path.write_text("{")
    tier = open_tier(root)
    assert path.read_text() == before
    assert list(tier.write([key_of(1)], [filled(payload_of(1, BLOCK_BYTES))])) == [Outcome.OK]
    tier.close()
