"""A bit of each stored block is flipped on disk, where no checksum looks."""

import os
from pathlib import Path

from forebay.bench.restore.options import GroupOptions
from forebay.bench.restore.pagecache import files_below
from forebay.bench.restore.target import Target
from forebay.bench.restore.targets import emulated
from forebay.bench.restore.targets.emulated import Options

__all__ = ["Options", "build"]


def flip(path: Path) -> None:
    descriptor = os.open(path, os.O_RDWR)
    middle = path.stat().st_size // 2
    [byte] = os.pread(descriptor, 1, middle)
    os.pwrite(descriptor, bytes([byte ^ 4]), middle)
    os.close(descriptor)


def build(options: Options, group: GroupOptions, seed: int) -> Target:
    target = emulated.build(options, group, seed)
    populate = target.populate

    def populate_and_flip(prompts):
        populate(prompts)
        for path in files_below(target.describe().roots):
            if path.stat().st_size > 100_000:
                flip(path)

    target.populate = populate_and_flip
    return target
