"""Opening the roots of a tier, and the compiled kernel's threads for them."""

from __future__ import annotations

import os
from collections.abc import Sequence

from forebay.errors import ConfigError
from forebay.tiers.file import layout
from forebay.tiers.file.fastpath import Choice, FastPath, Way, reading, writing
from forebay.tiers.file.format import Shape
from forebay.tiers.file.lanes import Patience
from forebay.tiers.file.native import Kernel
from forebay.tiers.file.options import Options
from forebay.tiers.file.root import Root


def open_roots(roots: Sequence[Root]) -> None:
    """Raises ConfigError when they make no pool; then close them."""
    for root in roots:
        root.open()
    if not any(root.health.is_present for root in roots):
        reasons = "; ".join(_trouble(root) for root in roots)
        raise ConfigError(
            f"no root of the file tier can be used ({reasons}): make the parent directory, mount the disk, or name "
            "another directory"
        )
    known = [root.root_id for root in roots if root.root_id is not None]
    if len(set(known)) < len(known):
        raise ConfigError("two roots of the file tier have the same identity: one is a copy, name only one of them")


def close_roots(roots: Sequence[Root], patience: Patience) -> None:
    """Give back what those that were opened hold: each is a writer as long as its catalogue is open."""
    patience.outlast([root.close() for root in roots])


def _trouble(root: Root) -> str:
    """Why a root could not be opened, its path included."""
    marker = str(root.path / layout.MARKER)
    dangling = os.path.islink(marker) and not os.path.exists(marker)  # noqa: PTH110, PTH114 - whatever the path
    return f"{marker} is a link to nothing" if dangling else root.trouble


def fast_reads(choice: Choice, roots: Sequence[Root], options: Options, shape: Shape) -> FastPath | None:
    return _fast_path(choice.reads.kernel, roots, options.reads_in_flight, reading(shape, options.verify))


def fast_writes(choice: Choice, roots: Sequence[Root], options: Options, shape: Shape) -> FastPath | None:
    return _fast_path(choice.writes.kernel, roots, options.writes_in_flight, writing(shape))


def _fast_path(kernel: Kernel | None, roots: Sequence[Root], in_flight: int, way: Way) -> FastPath | None:
    if kernel is None:
        return None
    try:
        return FastPath(kernel, roots, in_flight, way)
    except OSError as error:
        raise ConfigError(
            f"file tier: {error.strerror}: {os.strerror(error.errno or 0)}; have fewer reads_in_flight and "
            "writes_in_flight, or raise the limit on processes (ulimit -u)"
        ) from None
