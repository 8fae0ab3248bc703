"""The reference tier: blocks in a dict. What every other tier is measured against for meaning, not for speed."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import xxhash

from forebay.errors import ConfigError, TierUnavailable
from forebay.ports import View
from forebay.types import BlockKey, Namespace, Outcome, Stored, TierSpec


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    capacity_bytes: int
    name: str = "memory"
    read_latency_ns: int = 1_000


def build(options: Options, namespace: Namespace, namespace_digest: bytes) -> MemoryTier:
    """Raises ConfigError for a capacity below 1. Nothing outlives the tier, so it does not need the digest."""
    return MemoryTier(options, namespace.block_bytes)


@dataclass(frozen=True, slots=True)
class _Block:
    payload: bytes
    checksum: bytes


class MemoryTier:
    """A `Tier`. One lock around everything."""

    def __init__(self, options: Options, block_bytes: int) -> None:
        if options.capacity_bytes < 1:
            raise ConfigError(f"memory tier: capacity_bytes must be 1 or more, not {options.capacity_bytes}")
        self.spec = TierSpec(
            name=options.name,
            capacity_bytes=options.capacity_bytes,
            stored_bytes=block_bytes,
            read_latency_ns=options.read_latency_ns,
        )
        self._lock = threading.Lock()
        self._blocks: dict[BlockKey, _Block] = {}
        self._closed = False

    def contains(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        with self._lock:
            self._check_open()
            return [key in self._blocks for key in keys]

    def read(self, keys: Sequence[BlockKey], into: Sequence[View]) -> Sequence[Outcome]:
        with self._lock:
            self._check_open()
            return [self._read_block(key, view) for key, view in zip(keys, into, strict=True)]

    def write(self, keys: Sequence[BlockKey], views: Sequence[View]) -> Sequence[Outcome]:
        with self._lock:
            self._check_open()
            return [self._write_block(key, view) for key, view in zip(keys, views, strict=True)]

    def delete(self, keys: Sequence[BlockKey]) -> Sequence[Outcome]:
        with self._lock:
            self._check_open()
            for key in keys:
                self._blocks.pop(key, None)
            return [Outcome.OK] * len(keys)

    def scan(self) -> Iterator[Stored]:
        with self._lock:
            self._check_open()
            held = list(self._blocks)
        return iter([Stored(key, self.spec.stored_bytes) for key in held])

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._blocks.clear()

    def damage(self, key: BlockKey) -> None:
        """For tests: flip a bit of a stored block, beneath its checksum."""
        with self._lock:
            block = self._blocks[key]
            flipped = bytes([block.payload[0] ^ 1]) + block.payload[1:]
            self._blocks[key] = _Block(flipped, block.checksum)

    def _read_block(self, key: BlockKey, view: View) -> Outcome:
        block = self._blocks.get(key)
        if block is None:
            return Outcome.MISSING
        if xxhash.xxh3_128_digest(block.payload) != block.checksum:
            del self._blocks[key]
            return Outcome.CORRUPT
        view[: len(block.payload)] = block.payload
        return Outcome.OK

    def _write_block(self, key: BlockKey, view: View) -> Outcome:
        if key in self._blocks:
            return Outcome.OK
        stored_bytes = self.spec.stored_bytes
        if (len(self._blocks) + 1) * stored_bytes > self.spec.capacity_bytes:
            return Outcome.FULL
        payload = bytes(view[:stored_bytes])
        self._blocks[key] = _Block(payload, xxhash.xxh3_128_digest(payload))
        return Outcome.OK

    def _check_open(self) -> None:
        if self._closed:
            raise TierUnavailable("the memory tier is closed")
