"""It answers at once, and never says a token."""

import dataclasses

from forebay.bench.restore.options import GroupOptions
from forebay.bench.restore.target import Target
from forebay.bench.restore.targets import emulated
from forebay.bench.restore.targets.emulated import Options

__all__ = ["Options", "build"]


def build(options: Options, group: GroupOptions, seed: int) -> Target:
    target = emulated.build(options, group, seed)
    ask = target.wave

    def wave(questions):
        whole = ask(questions)
        silent = [dataclasses.replace(each, first_token_ns=None, output_tokens=0) for each in whole.answers]
        return dataclasses.replace(whole, answers=tuple(silent))

    target.wave = wave
    return target
