"""A GPU driver that the test plays: streams in order, events that end when they are told to."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch


@dataclass
class Driver:
    """Stands in for `torch.cuda`."""

    queued: list[str] = field(default_factory=list)
    events: list[PlayedEvent] = field(default_factory=list)
    status: int = 0
    pinned: set[int] = field(default_factory=set)

    def Stream(self, device: Any) -> PlayedStream:  # noqa: N802
        return PlayedStream(self)

    def Event(self) -> PlayedEvent:  # noqa: N802
        self.events.append(PlayedEvent(self))
        return self.events[-1]

    def current_stream(self, device: Any) -> str:
        return "model"

    def stream(self, stream: PlayedStream) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def cudart(self) -> Driver:
        return self

    def cudaHostRegister(self, address: int, pinned_bytes: int, flags: int) -> int:  # noqa: N802
        if self.status == 0:
            self.pinned.add(address)
        return self.status

    def cudaHostUnregister(self, address: int) -> None:  # noqa: N802
        self.pinned.remove(address)


@dataclass
class PlayedStream:
    driver: Driver

    def wait_stream(self, other: str) -> None:
        self.driver.queued.append(f"wait for {other}")

    def synchronize(self) -> None:
        for event in self.driver.events:
            event.ended = True


@dataclass
class PlayedEvent:
    driver: Driver
    ended: bool = False
    error: str = ""

    def record(self, stream: PlayedStream) -> None:
        self.driver.queued.append("event")

    def query(self) -> bool:
        if self.error:
            raise RuntimeError(self.error)
        return self.ended


def play(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """In place of `torch.cuda`'s, over tensors in DRAM."""
    played = Driver()
    for name in ("Stream", "Event", "current_stream", "stream", "cudart"):
        monkeypatch.setattr(torch.cuda, name, getattr(played, name))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    return played
