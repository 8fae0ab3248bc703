"""The header page: what goes in comes out, and nothing else passes for it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.testing.tier_contract import key_of
from forebay.tiers.file.format import (
    PAGE_BYTES,
    Damage,
    Damaged,
    Header,
    NewerFormat,
    Shape,
    check_claim,
    checksum,
    decode_header,
    encode_header,
)
from forebay.types import BlockKey

digests = st.binary(min_size=32, max_size=32)
headers = st.builds(
    Header,
    st.builds(Shape, digests, st.integers(0, 2**40)),
    digests.map(BlockKey),
    st.binary(min_size=16, max_size=16),
)


def page_of(header: Header) -> bytearray:
    page = bytearray(b"\xee" * PAGE_BYTES)
    encode_header(header, memoryview(page))
    return page


SOUND = Header(Shape(bytes(range(32)), 5000), key_of(1), bytes(16))


@given(headers)
def test_round_trip(header: Header) -> None:
    assert decode_header(memoryview(page_of(header))) == header


@given(headers, headers)
def test_different_headers_have_different_pages(one: Header, other: Header) -> None:
    assert (page_of(one) == page_of(other)) == (one == other)


def test_a_change_of_any_byte_is_detected() -> None:
    page = page_of(SOUND)
    for offset in range(PAGE_BYTES):
        for mask in (0x01, 0x80, 0xFF):
            page[offset] ^= mask
            with pytest.raises(Damaged):
                decode_header(memoryview(page))
            page[offset] ^= mask
    assert decode_header(memoryview(page)) == SOUND


@given(st.binary(max_size=PAGE_BYTES - 8))
def test_arbitrary_bytes_are_no_header(start: bytes) -> None:
    for page in (start.ljust(PAGE_BYTES, b"\0"), b"FOREBAY\n" + start.ljust(PAGE_BYTES - 8, b"\0")):
        with pytest.raises(Damaged):
            decode_header(memoryview(page))


def resealed(page: bytearray, offset: int, replacement: bytes) -> memoryview:
    """The page with other bytes and a right checksum: what another program version, not damage, would write."""
    page[offset : offset + len(replacement)] = replacement
    page[-16:] = checksum(page[:-16])
    return memoryview(page)


def test_versions() -> None:
    with pytest.raises(NewerFormat, match="2"):
        decode_header(resealed(page_of(SOUND), 8, b"\2\0\0\0"))
    with pytest.raises(Damaged, match="bad-version"):
        decode_header(resealed(page_of(SOUND), 8, b"\0\0\0\0"))


@pytest.mark.parametrize(("offset", "field"), [(12, "header_bytes"), (88, "padded_bytes")])
def test_lengths_that_contradict_each_other(offset: int, field: str) -> None:
    with pytest.raises(Damaged, match="wrong-length"):
        decode_header(resealed(page_of(SOUND), offset, b"\1"))


@pytest.mark.parametrize(
    ("header", "damage"),
    [
        (Header(Shape(bytes(32), 5000), key_of(1), bytes(16)), Damage.WRONG_NAMESPACE),
        (Header(SOUND.shape, key_of(2), bytes(16)), Damage.WRONG_KEY),
        (Header(Shape(bytes(range(32)), 5001), key_of(1), bytes(16)), Damage.WRONG_LENGTH),
    ],
)
def test_a_sound_header_of_another_block_is_refused(header: Header, damage: Damage) -> None:
    with pytest.raises(Damaged, match=damage.value):
        check_claim(header, SOUND.shape, key_of(1))
    check_claim(SOUND, SOUND.shape, key_of(1))


@pytest.mark.parametrize(
    ("payload_bytes", "padded_bytes"), [(1, 4096), (4095, 4096), (4096, 4096), (4097, 8192), (2**21, 2**21)]
)
def test_file_length(payload_bytes: int, padded_bytes: int) -> None:
    shape = Shape(bytes(32), payload_bytes)
    assert (shape.padded_bytes, shape.stored_bytes) == (padded_bytes, 4096 + padded_bytes)
