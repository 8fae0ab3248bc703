"""All its blocks have the same bytes past their key."""

import numpy as np

from forebay.bench.restore.options import GroupOptions
from forebay.bench.restore.target import Target
from forebay.bench.restore.targets import emulated
from forebay.bench.restore.targets.emulated import Options
from forebay.bench.storm.device import Stamp
from forebay.hostpool import slot_bytes
from forebay.ports import View
from forebay.types import BlockKey

__all__ = ["Options", "build"]


class SameBytes(Stamp):
    def fill(self, view: View, key: BlockKey) -> None:
        np.frombuffer(view, dtype=np.uint64)[:] = self._noise[: len(view) // 8]
        view[: len(key)] = key


def build(options: Options, group: GroupOptions, seed: int) -> Target:
    target = emulated.build(options, group, seed)
    target._stamp = SameBytes(slot_bytes(target._namespace.block_bytes))
    return target
