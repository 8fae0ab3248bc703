"""One block file: read it into a view and prove that it is what it claims, or write it from a view.

Errors: OSError from the system, Damaged and NewerFormat from the content. What they mean to a tier is `root.py`'s job.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from forebay.tiers.file.directio import Access, Calls, Scratch, is_aligned
from forebay.tiers.file.format import (
    PAGE_BYTES,
    Damage,
    Damaged,
    Header,
    Shape,
    check_claim,
    checksum,
    decode_header,
    encode_header,
)
from forebay.types import BlockKey

# O_NONBLOCK: a named pipe under a block's name must not stop the thread; regular files ignore it
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def read_flags(access: Access) -> int:
    """With what flags a block is opened for reading."""
    return _READ | access.open_flags


class Verify(Enum):
    """What a read proves before it says OK. The header is always checked in full."""

    PAYLOAD = "payload"
    HEADER = "header"
    """Trust the medium with the payload."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What a file has to be: the block `key` of the namespace and shape."""

    shape: Shape
    key: BlockKey


def read_block(
    calls: Calls, path: str, access: Access, claim: Claim, view: memoryview, scratch: Scratch, verify: Verify
) -> None:
    """Fill the first `payload_bytes` of `view`; what lies after them in the view may be overwritten too."""
    shape = claim.shape
    descriptor = calls.open(path, read_flags(access), 0)
    try:
        _check_length(calls, descriptor, shape, scratch)
        target = _read_target(view, access, shape, scratch)
        wanted_bytes = PAGE_BYTES + len(target)
        if _read_fully(calls, descriptor, [scratch.header, target]) < wanted_bytes:
            raise Damaged(Damage.WRONG_LENGTH)  # cut short since its length was looked at
    finally:
        os.close(descriptor)
    header = decode_header(scratch.header)
    check_claim(header, shape, claim.key)
    payload = target[: shape.payload_bytes]
    if verify is Verify.PAYLOAD and checksum(payload) != header.payload_checksum:
        raise Damaged(Damage.PAYLOAD_CHECKSUM)
    if target.obj is not view.obj:
        view[: shape.payload_bytes] = payload


def read_header(calls: Calls, path: str, scratch: Scratch) -> Header:
    """The header alone, by buffered I/O."""
    descriptor = calls.open(path, _READ, 0)
    try:
        return _read_header(calls, descriptor, scratch)
    finally:
        os.close(descriptor)


def read_start(calls: Calls, path: str, access: Access, scratch: Scratch) -> None:
    """Read up to a page of any file, whatever it says: does its device answer?"""
    descriptor = calls.open(path, _READ | access.open_flags, 0)
    try:
        calls.preadv(descriptor, [scratch.header], 0)
    finally:
        os.close(descriptor)


def write_block(
    calls: Calls, descriptor: int, access: Access, claim: Claim, view: memoryview, scratch: Scratch
) -> None:
    """Write the whole file. Nothing of `view` past `payload_bytes` reaches the disk: the padding is zeros."""
    shape = claim.shape
    payload = view[: shape.payload_bytes]
    encode_header(Header(shape, claim.key, checksum(payload)), scratch.header)
    if access is Access.DIRECT and not is_aligned(view):
        bounce = scratch.bounce(shape.payload_bytes)
        bounce[:] = payload
        payload = bounce
    rest_bytes = shape.payload_bytes % PAGE_BYTES
    parts = [scratch.header, payload[: shape.payload_bytes - rest_bytes]]
    if rest_bytes:
        scratch.tail[:rest_bytes] = payload[-rest_bytes:]
        scratch.tail[rest_bytes:] = bytes(PAGE_BYTES - rest_bytes)
        parts.append(scratch.tail)
    _write_fully(calls, descriptor, parts)


def _check_length(calls: Calls, descriptor: int, shape: Shape, scratch: Scratch) -> None:
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise Damaged(Damage.NOT_A_FILE)
    if found.st_size != shape.stored_bytes:
        _read_header(calls, descriptor, scratch)  # a newer format may well have another length
        raise Damaged(Damage.WRONG_LENGTH)


def _read_header(calls: Calls, descriptor: int, scratch: Scratch) -> Header:
    if _read_fully(calls, descriptor, [scratch.header]) < PAGE_BYTES:
        raise Damaged(Damage.WRONG_LENGTH)
    return decode_header(scratch.header)


def _read_target(view: memoryview, access: Access, shape: Shape, scratch: Scratch) -> memoryview:
    """Where the payload is read to: the view itself, if direct I/O can reach it and the padding fits in."""
    if access is Access.BUFFERED:
        return view[: shape.payload_bytes]
    if len(view) >= shape.padded_bytes and is_aligned(view):
        return view[: shape.padded_bytes]
    return scratch.bounce(shape.padded_bytes)


def _read_fully(calls: Calls, descriptor: int, parts: Sequence[memoryview]) -> int:
    """Bytes read from the start of the file: fewer than asked for only at its end."""
    total_bytes = sum(map(len, parts))
    got_bytes = calls.preadv(descriptor, parts, 0)
    while 0 < got_bytes < total_bytes:
        more_bytes = calls.preadv(descriptor, _skip(parts, got_bytes), got_bytes)
        if more_bytes == 0:
            break
        got_bytes += more_bytes
    return got_bytes


def _write_fully(calls: Calls, descriptor: int, parts: Sequence[memoryview]) -> None:
    total_bytes = sum(map(len, parts))
    sent_bytes = calls.pwritev(descriptor, parts, 0)
    while sent_bytes < total_bytes:
        more_bytes = calls.pwritev(descriptor, _skip(parts, sent_bytes), sent_bytes)
        if more_bytes == 0:
            raise OSError(errno.EIO, "a write made no progress")
        sent_bytes += more_bytes


def _skip(parts: Sequence[memoryview], done_bytes: int) -> list[memoryview]:
    """What is left of `parts` after their first `done_bytes`."""
    left: list[memoryview] = []
    for part in parts:
        if done_bytes < len(part):
            left.append(part[done_bytes:])
        done_bytes = max(0, done_bytes - len(part))
    return left
