"""How a long measurement tells how far it is."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    def begins(self, doing: str) -> None:
        """A step begins."""

    def ended(self, done: str) -> None:
        """It has ended; one line about what came of it."""


class Silence:
    """Progress that nobody watches."""

    def begins(self, doing: str) -> None: ...

    def ended(self, done: str) -> None: ...
