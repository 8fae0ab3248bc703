"""The bytes of a block file: a header page, then the payload padded to a page. Pure. See docs/format.md.

    offset  bytes  field
         0      8  magic "FOREBAY\\n"
         8      4  format version, little-endian like every number here
        12      4  header bytes, 4096
        16     32  namespace digest
        48     32  block key
        80      8  payload bytes
        88      8  padded payload bytes
        96     16  XXH3-128 of the payload
       112   3968  zero
      4080     16  XXH3-128 of bytes 0..4079

Magic, version and the checksum of the page stay where they are in every later version, so that a reader can tell a
newer file (leave it) from a damaged one (set it aside).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import Enum

import xxhash

from forebay.types import BlockKey

PAGE_BYTES = 4096
"""Header length, padding unit, and the alignment of every direct transfer."""

VERSION = 1
MAGIC = b"FOREBAY\n"
_FIELDS = struct.Struct("<8sII32s32sQQ16s")
_CHECKSUM_BYTES = 16
_PAYLOAD_CHECKSUM_AT = _FIELDS.size - _CHECKSUM_BYTES
_CHECKED_BYTES = PAGE_BYTES - _CHECKSUM_BYTES
_REST = bytes(_CHECKED_BYTES - _FIELDS.size)

checksum = xxhash.xxh3_128_digest
"""bytes-like -> 16 bytes. Releases the GIL for long input."""


class Damage(Enum):
    """Why a file is not the block that its name claims. The value becomes part of its name in quarantine."""

    NOT_A_FILE = "not-a-regular-file"
    WRONG_LENGTH = "wrong-length"
    BAD_MAGIC = "bad-magic"
    BAD_VERSION = "bad-version"
    HEADER_CHECKSUM = "header-checksum"
    WRONG_NAMESPACE = "wrong-namespace"
    WRONG_KEY = "wrong-key"
    PAYLOAD_CHECKSUM = "payload-checksum"


class Damaged(Exception):
    """The file is not a sound block. Internal to the file tier: becomes `Outcome.CORRUPT`."""

    def __init__(self, damage: Damage) -> None:
        super().__init__(damage.value)
        self.damage = damage


class NewerFormat(Exception):
    """A sound file of a later format version. Internal to the file tier: becomes `Outcome.MISSING`."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What all block files of one namespace have in common."""

    namespace_digest: bytes
    payload_bytes: int

    @property
    def padded_bytes(self) -> int:
        return -(-self.payload_bytes // PAGE_BYTES) * PAGE_BYTES

    @property
    def stored_bytes(self) -> int:
        """Exact length of the file."""
        return PAGE_BYTES + self.padded_bytes


@dataclass(frozen=True, slots=True)
class Header:
    shape: Shape
    key: BlockKey
    payload_checksum: bytes


def header_start(shape: Shape) -> bytes:
    """All that a sound header says before its first checksum, with zeros for the key."""
    page = memoryview(bytearray(PAGE_BYTES))
    encode_header(Header(shape, BlockKey(bytes(32)), bytes(_CHECKSUM_BYTES)), page)
    return bytes(page[:_PAYLOAD_CHECKSUM_AT])


def encode_header(header: Header, page: memoryview) -> None:
    """Fill `page`, PAGE_BYTES long."""
    shape = header.shape
    page[: _FIELDS.size] = _FIELDS.pack(
        MAGIC, VERSION, PAGE_BYTES, shape.namespace_digest, header.key,
        shape.payload_bytes, shape.padded_bytes, header.payload_checksum,
    )  # fmt: skip
    page[_FIELDS.size : _CHECKED_BYTES] = _REST
    page[_CHECKED_BYTES:] = checksum(page[:_CHECKED_BYTES])


def decode_header(page: memoryview) -> Header:
    """What a sound page of this version says. Raises Damaged or NewerFormat; any flipped bit is Damaged."""
    magic, version, header_bytes, digest, key, payload_bytes, padded_bytes, payload_checksum = _FIELDS.unpack_from(page)
    if magic != MAGIC:
        raise Damaged(Damage.BAD_MAGIC)
    if checksum(page[:_CHECKED_BYTES]) != page[_CHECKED_BYTES:]:
        raise Damaged(Damage.HEADER_CHECKSUM)
    if version > VERSION:
        raise NewerFormat(version)
    if version != VERSION:
        raise Damaged(Damage.BAD_VERSION)
    shape = Shape(digest, payload_bytes)
    if (header_bytes, padded_bytes) != (PAGE_BYTES, shape.padded_bytes):
        raise Damaged(Damage.WRONG_LENGTH)
    return Header(shape, BlockKey(key), payload_checksum)


def check_claim(header: Header, shape: Shape, key: BlockKey) -> None:
    """Raise Damaged unless the header names exactly this block of this namespace and shape."""
    if header.shape.namespace_digest != shape.namespace_digest:
        raise Damaged(Damage.WRONG_NAMESPACE)
    if header.key != key:
        raise Damaged(Damage.WRONG_KEY)
    if header.shape.payload_bytes != shape.payload_bytes:
        raise Damaged(Damage.WRONG_LENGTH)
