"""The bytes of a catalogue: records of 64 bytes, each with its checksum. Pure. See docs/format.md.

    offset  bytes  field
         0      1  operation
         1      3  number of a namespace, little-endian like every number here
         4      4  time, whole seconds since 1970
         8      8  an amount, mostly of bytes
        16      8  writer
        24     32  block key, or a digest
        56      8  checksum of bytes 0 to 55, of the record's place in the file, and of the file's own random seed

A checksum that knows the file and the place finds what a lost write or a stale sector leaves behind: a sound record
where another one belongs.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

RECORD_BYTES = 64
CATALOGUE_VERSION = 1
NO_KEY = bytes(32)
_FIELDS = struct.Struct("<IIQQ32sQ")
_WORDS = RECORD_BYTES // 8
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
"""2**64 / golden ratio, odd: multiplying by it is a bijection. Knuth, The Art of Computer Programming 3, 6.4."""
_LAYOUT = np.dtype(
    [("operation", "<u4"), ("time_s", "<u4"), ("amount", "<u8"), ("writer", "<u8"), ("key", "V32"), ("checksum", "<u8")]
)  # `operation` is the operation in its lowest byte and the namespace above

_WRITER_AND_KEY = np.dtype({"names": ["both"], "formats": ["V40"], "offsets": [16], "itemsize": RECORD_BYTES})

Records = NDArray[np.void]
"""Records as they are in the file, in its order."""


class Operation(IntEnum):
    START = 1
    """The first record. amount: records that were written with the file; namespace: the format version; writer: the
    file's inode; key: the file's seed (8 bytes, random), then zeros."""
    NAMESPACE = 2
    """namespace: a number in use from here on; key: the digest."""
    TENANT = 3
    """namespace: of which; key: the tenant's digest, zeros for none."""
    TOTAL = 4
    """amount: bytes ever written until here; time: since when they are counted."""
    TODAY = 5
    """amount: bytes written on the day (UTC) that began at time."""
    OPENED = 6
    """writer: a process that writes here from now on; amount: a digest of the boot it lives in."""
    CLOSED = 7
    """writer: it has ended well, and the records before this one are on the medium."""
    INTENT = 8
    """writer: is about to publish or remove the block; amount: bytes reserved until HELD, WRITTEN or GONE says what
    became of it."""
    HELD = 9
    """The block's file is there; amount: its length in bytes. Ends the writer's intent."""
    WRITTEN = 10
    """As HELD, and the bytes were written now."""
    GONE = 11
    """There is no file of the block. Ends the writer's intent."""
    SEALED = 12
    """The file was replaced by one that begins with the state at this record; amount: the seed of that one."""
    LIMIT = 13
    """namespace: which `Limit`; amount: its value, 0 for none."""


class Limit(IntEnum):
    """What a store that has the pool open was told to keep to, for people who look at the pool."""

    CAPACITY_BYTES = 1
    """Over all roots."""
    BUDGET_BYTES_PER_DAY = 2
    ENDURANCE_BYTES = 3


class Doubtful(Exception):
    """A catalogue that must not be trusted. Internal to the file tier: it is made anew from the files."""


class Record(NamedTuple):
    operation: Operation
    namespace: int = 0
    time_s: int = 0
    amount: int = 0
    writer: int = 0
    key: bytes = NO_KEY


def encode(records: Sequence[Record], seed: int, place: int) -> bytes:
    """`place`: how many records are before these in the file."""
    raw = bytearray(
        b"".join(
            _FIELDS.pack(record.operation | record.namespace << 8, *record[2:], 0) for record in records
        )
    )  # fmt: skip
    seal(np.frombuffer(raw, dtype=_LAYOUT), seed, place)
    return bytes(raw)


def empty(count: int) -> Records:
    return np.zeros(count, dtype=_LAYOUT)


def seal(records: Records, seed: int, place: int) -> None:
    """Fill in the checksums."""
    records["checksum"] = _checksums(records, seed, place)


def writers_and_keys(records: Records) -> list[bytes]:
    """The two fields of each record in one."""
    both: list[bytes] = np.ascontiguousarray(records).view(_WRITER_AND_KEY)["both"].tolist()
    return both


def decode(raw: bytes, seed: int, place: int) -> Records:
    """The sound records at the beginning of `raw`; all of them if it is as long as their number says."""
    records: Records = np.frombuffer(raw, dtype=_LAYOUT, count=len(raw) // RECORD_BYTES)
    wrong = np.flatnonzero(records["checksum"] != _checksums(records, seed, place))
    return records[: wrong[0]] if len(wrong) else records


def seed_of(raw: bytes) -> int:
    """The seed that a file's first record names. Raises Doubtful for what is no beginning of a catalogue."""
    if len(raw) < RECORD_BYTES:
        raise Doubtful("it has no beginning")
    operation, _, _, _, key, _ = _FIELDS.unpack_from(raw)
    if operation & 0xFF != Operation.START:
        raise Doubtful("it does not begin as one")
    if operation >> 8 != CATALOGUE_VERSION:
        raise Doubtful(f"it is of version {operation >> 8}, and this Forebay knows {CATALOGUE_VERSION}")
    return int.from_bytes(key[:8], "little")


def _checksums(records: Records, seed: int, place: int) -> NDArray[np.uint64]:
    """For each word: xor it in, multiply, fold. Every step is a bijection, so any change of one word is found."""
    words = records.view("<u8").reshape(len(records), _WORDS)
    sums = np.arange(place, place + len(records), dtype=np.uint64) ^ np.uint64(seed)
    sums *= _MULTIPLIER
    for column in range(_WORDS - 1):
        sums ^= words[:, column]
        sums *= _MULTIPLIER
        sums ^= sums >> np.uint64(32)
    return sums
