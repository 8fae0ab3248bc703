"""How much of a disk that is shared with other data may still be filled."""

from __future__ import annotations

from dataclasses import dataclass

from forebay.tiers.file.directio import Calls


@dataclass(frozen=True, slots=True)
class FreeSpace:
    """Of one root."""

    root: str
    floor_bytes: int
    """What is left free for others; 0: nothing in particular, and a full disk says so itself."""
    calls: Calls

    def spare_bytes(self, reserved_bytes: int) -> int | None:
        """What may still be reserved, given what is reserved and perhaps not written yet; None without a floor.

        A block that is written and still counts as reserved counts twice until its batch is through: the floor holds,
        and the last batch before it may come out smaller. Raises OSError.
        """
        if not self.floor_bytes:
            return None
        space = self.calls.statvfs(self.root)
        return space.f_bavail * space.f_frsize - self.floor_bytes - reserved_bytes
