"""While it is asked, a process that is none of this benchmark's reads from the same device."""

import os
import select
import subprocess
from pathlib import Path

from forebay.bench.restore.options import GroupOptions
from forebay.bench.restore.target import Target
from forebay.bench.restore.targets import emulated
from forebay.bench.restore.targets.emulated import Options

__all__ = ["Options", "build"]

HAMMER_BYTES = 64 * 2**20


def hammer(folder: Path) -> None:
    """Returns once it has happened, as the shell says through a pipe. Its parent is none of these processes."""
    said = folder / "said"
    os.mkfifo(said)
    listening = os.open(said, os.O_RDONLY | os.O_NONBLOCK)
    write = f"dd if=/dev/zero of={folder}/hammer bs=1M count={HAMMER_BYTES >> 20} oflag=direct"
    subprocess.run(
        ["setsid", "--fork", "sh", "-c", f"{write}; echo done > {said}"], check=True, stderr=subprocess.DEVNULL
    )
    heard, _, _ = select.select([listening], [], [], 60.0)
    assert heard, "the hammer has not said that it is done"
    os.close(listening)
    said.unlink()
    (folder / "hammer").unlink()


def build(options: Options, group: GroupOptions, seed: int) -> Target:
    target = emulated.build(options, group, seed)
    ask = target.wave

    def wave(questions):
        hammer(group.roots[0])
        return ask(questions)

    target.wave = wave
    return target
