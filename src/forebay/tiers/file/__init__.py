"""The file tier. `Options` and `build` are what `assemble` asks every tier module for."""

from forebay.tiers.file.blockfile import Verify
from forebay.tiers.file.directio import DirectMode
from forebay.tiers.file.fastpath import Io, PathReport
from forebay.tiers.file.options import Options, RootOptions
from forebay.tiers.file.root import Durability
from forebay.tiers.file.tier import FileTier, RootReport, build

__all__ = [
    "DirectMode",
    "Durability",
    "FileTier",
    "Io",
    "Options",
    "PathReport",
    "RootOptions",
    "RootReport",
    "Verify",
    "build",
]
