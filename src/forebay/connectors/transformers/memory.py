"""Buffers for KV, paid for when they are made and not in the middle of a transfer."""

from __future__ import annotations

import logging
import math
import mmap
from collections.abc import Sequence

import torch

from forebay.errors import ConfigError

log = logging.getLogger("forebay.connectors.transformers.memory")


def touched(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A zeroed contiguous tensor whose memory is really there.

    On a CPU it lies in huge pages where the kernel gives them: first touch of 4 KiB pages costs several times the
    copy that causes it. Raises ConfigError when the memory is not to be had.
    """
    wanted_bytes = math.prod(shape) * dtype.itemsize
    try:
        if device.type != "cpu":
            return torch.zeros(tuple(shape), dtype=dtype, device=device)
        return _huge_pages(wanted_bytes).view(dtype).view(tuple(shape))
    except (OSError, ValueError, OverflowError, torch.OutOfMemoryError) as error:
        raise ConfigError(
            f"cannot get {wanted_bytes / 2**30:.2f} GiB for KV on {device} ({error}): ask for less"
        ) from None


def _huge_pages(wanted_bytes: int) -> torch.Tensor:
    """uint8 [wanted_bytes]. The mapping lives as long as a tensor refers to it."""
    region = mmap.mmap(-1, wanted_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        region.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:
        log.warning("no huge pages for KV (%s): copies will be slower", error)
    return torch.frombuffer(region, dtype=torch.uint8).zero_()
