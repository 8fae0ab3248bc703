"""Its blocks are zeros past their key."""

from forebay.bench.restore.options import GroupOptions
from forebay.bench.restore.target import Target
from forebay.bench.restore.targets import emulated
from forebay.bench.restore.targets.emulated import Options
from forebay.bench.storm.device import Stamp
from forebay.ports import View
from forebay.types import BlockKey

__all__ = ["Options", "build"]


class Zeros(Stamp):
    def fill(self, view: View, key: BlockKey) -> None:
        view[:] = bytes(len(view))
        view[: len(key)] = key


def build(options: Options, group: GroupOptions, seed: int) -> Target:
    target = emulated.build(options, group, seed)
    target._stamp = Zeros(8)
    return target
