"""Its engines are never restarted: what they hold in DRAM stays warm."""

from forebay.bench.restore.options import GroupOptions
from forebay.bench.restore.target import Target
from forebay.bench.restore.targets import emulated
from forebay.bench.restore.targets.emulated import Options

__all__ = ["Options", "build"]


def build(options: Options, group: GroupOptions, seed: int) -> Target:
    target = emulated.build(options, group, seed)
    target.forget = target.rest = lambda: None
    return target
