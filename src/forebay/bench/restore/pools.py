"""Pools of targets that store by themselves: made in the roots of a group, throttled where it says so, and removed."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forebay.assemble import TierConfig
from forebay.bench.environment import available_memory_bytes
from forebay.bench.restore.options import GroupOptions
from forebay.bench.restore.results import Role
from forebay.bench.units import bytes_text
from forebay.errors import ConfigError
from forebay.hostpool import slot_bytes

TIER = "file"
_HEADER_BYTES = 4096


class Pools:
    """A directory of one's own in each root. Close it, which removes them."""

    def __init__(self, group: GroupOptions) -> None:
        """Raises ConfigError."""
        self._group = group
        self.roots: list[Path] = []
        try:
            for root in group.roots:
                self.roots.append(Path(tempfile.mkdtemp(prefix=".forebay-restore-", dir=root)))
        except OSError as error:
            self.close()
            raise ConfigError(f"no pool can be made in {root} ({error.strerror}): name another one") from None

    def tiers(self, instance: int, file: Mapping[str, Any]) -> tuple[TierConfig, ...]:
        """What an instance stores in: of a shared pool the same for all, else a pool of its own in each root.

        `file`: more options of the file tier. Empty without roots.
        """
        if not self.roots:
            return ()
        is_shared = self._group.role is Role.SHARED
        kind, options = "file", {
            "roots": [{"path": str(place)} for place in self._of_instance(instance)],
            "capacity_bytes": 2**50,
            "name": TIER,
            "shared": is_shared,
            **file,
        }  # fmt: skip
        if self._group.limit_bytes_per_s is not None:
            options = {
                "tier": {"kind": kind, "options": options},
                "read_bytes_per_s": self._group.limit_bytes_per_s,
                "pipe": str(self.roots[0] / "line"),
            }
            kind = "forebay.bench.restore.throttled"
        return (TierConfig(kind=kind, options=options),)

    @property
    def directories(self) -> tuple[Path, ...]:
        """Of all instances, each once."""
        each = (place for instance in range(self._group.instances) for place in self._of_instance(instance))
        return tuple(dict.fromkeys(each))

    def _of_instance(self, instance: int) -> list[Path]:
        name = "pool" if self._group.role is Role.SHARED else f"pool-{instance}"
        return [root / name for root in self.roots]

    def check_room(self, blocks: int, block_bytes: int, host_bytes: int) -> None:
        """`host_bytes`: of all instances. Raises ConfigError when disk or memory do not hold what is to come."""
        needed_bytes = blocks * (slot_bytes(block_bytes) + _HEADER_BYTES)
        free_bytes = sum({root.stat().st_dev: shutil.disk_usage(root).free for root in self.roots}.values())
        if needed_bytes > free_bytes:
            raise ConfigError(
                f"group {self._group.name} needs {bytes_text(needed_bytes)} and there are {bytes_text(free_bytes)} "
                "free: make room, or ask for fewer or shorter sessions"
            )
        available_bytes = available_memory_bytes()
        if available_bytes is not None and host_bytes > available_bytes:
            raise ConfigError(
                f"group {self._group.name} needs {bytes_text(host_bytes)} of memory for its host pools where "
                f"{bytes_text(available_bytes)} are free: lower host_bytes, or the instances"
            )

    def close(self) -> None:
        for root in self.roots:
            shutil.rmtree(root, ignore_errors=True)


def throttled_fact(group: GroupOptions) -> dict[str, str]:
    """What a reader has to know of a medium that is none."""
    if not group.limit:
        return {}
    return {"throttled": f"reads are held to {group.limit} by software: the medium is emulated"}
