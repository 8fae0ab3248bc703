"""Device memory that is not there: a `DevicePort` that writes unique blocks and proves those that come back.

A copy to the device costs nothing here, as where it runs on a stream of its own beside the reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from forebay.hostpool import HostPool
from forebay.ports import View
from forebay.types import BlockKey, DeviceBlock, Job, JobKind, JobResult, Outcome

_WORD_BYTES = 8


class StampDevice:
    """COPY_OUT fills a slot with a block's own bytes; COPY_IN looks whether they are those of the block asked for."""

    def __init__(self, pool: HostPool, clock: Callable[[], int]) -> None:
        self._pool, self._clock = pool, clock
        self._stamp = Stamp(pool.slot_bytes)
        self._ended: list[JobResult] = []
        self.wrong_blocks = 0
        """Copied in, and not the block that was asked for."""

    def submit(self, job: Job, blocks: Sequence[DeviceBlock]) -> None:
        started_ns = self._clock()
        outcomes: dict[BlockKey, Outcome] = {}
        for key, slot in zip(job.keys, job.slots, strict=True):
            view = self._pool.view(slot)
            if job.kind is JobKind.COPY_OUT:
                self._stamp.fill(view, key)
                outcomes[key] = Outcome.OK
            else:
                is_right = bytes(view[: len(key)]) == key
                self.wrong_blocks += not is_right
                outcomes[key] = Outcome.OK if is_right else Outcome.FAILED
        self._ended.append(JobResult(job, outcomes, started_ns, self._clock()))

    def poll(self) -> Sequence[JobResult]:
        ended, self._ended = self._ended, []
        return ended


class Stamp:
    """A block's bytes: its key, then noise. No two blocks share a word, and none compresses."""

    def __init__(self, most_bytes: int) -> None:
        """`most_bytes`: of a block, in whole words."""
        self._noise = np.random.Generator(np.random.SFC64(0)).integers(
            0, 2**64, most_bytes // _WORD_BYTES, dtype=np.uint64
        )
        self._folds: dict[int, int] = {}
        """Of the first so many words of the noise."""

    def fill(self, view: View, key: BlockKey) -> None:
        words = np.frombuffer(view, dtype=np.uint64)
        word = np.uint64(int.from_bytes(key[:_WORD_BYTES]))
        np.bitwise_xor(self._noise[: len(words)], word, out=words)
        view[: len(key)] = key

    def fold(self, key: BlockKey, block_bytes: int) -> int:
        """The exclusive or of the words that `fill` writes into a block of so many bytes, a multiple of a word's."""
        words = block_bytes // _WORD_BYTES
        if words not in self._folds:
            self._folds[words] = fold(self._noise[:words].data)
        head = np.empty(len(key) // _WORD_BYTES, dtype=np.uint64)
        word = np.uint64(int.from_bytes(key[:_WORD_BYTES]))
        np.bitwise_xor(self._noise[: len(head)], word, out=head)
        rest = self._folds[words] ^ (int(word) if words % 2 else 0)
        return rest ^ fold(head.data) ^ fold(memoryview(key))


def fold(view: View) -> int:
    """The exclusive or of all 64-bit words. One flipped bit anywhere gives another one."""
    return int(np.bitwise_xor.reduce(np.frombuffer(view, dtype=np.uint64)))
