"""Jobs on GPU streams, with a driver that the test plays."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from forebay.connectors.streams import PinnedMemory, StreamJobs
from forebay.types import HOST, BlockKey, DeviceBlock, Job, JobId, JobKind, Outcome, Slot


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


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    played = Driver()
    for name in ("Stream", "Event", "current_stream", "stream", "cudart"):
        monkeypatch.setattr(torch.cuda, name, getattr(played, name))
    return played


def job(number: int, kind: JobKind = JobKind.COPY_IN) -> Job:
    return Job(JobId(number), kind, HOST, (BlockKey(bytes([number]) * 32),), (Slot(0),), moved_bytes=64)


def start(jobs: StreamJobs, driver: Driver, each: Job, outcome: Outcome = Outcome.OK) -> None:
    def queue_copies() -> dict[BlockKey, Outcome]:
        driver.queued.append("copy")
        return dict.fromkeys(each.keys, outcome)

    jobs.start(each, [DeviceBlock(each.job_id)], queue_copies)


def test_copies_are_queued_behind_the_model_and_end_with_their_event(driver: Driver) -> None:
    ticks = iter(range(100))
    jobs = StreamJobs(torch.device("cpu"), lambda: next(ticks))
    start(jobs, driver, job(1))
    start(jobs, driver, job(2, JobKind.COPY_OUT), Outcome.FAILED)
    assert driver.queued == ["wait for model", "copy", "event"] * 2
    assert (len(jobs), jobs.take_ended()) == (2, [])
    driver.events[1].ended = True
    (second,) = jobs.take_ended()
    assert (second.result.job.job_id, second.blocks) == (2, (2,))
    assert set(second.result.outcomes.values()) == {Outcome.FAILED}
    assert second.result.started_ns < second.result.finished_ns
    jobs.drain()
    (first,) = jobs.take_ended()
    assert set(first.result.outcomes.values()) == {Outcome.OK}
    assert len(jobs) == 0


def test_an_error_of_the_device_fails_the_job_and_not_the_engine(driver: Driver) -> None:
    jobs = StreamJobs(torch.device("cpu"), lambda: 0)
    start(jobs, driver, job(1))
    driver.events[0].error = "an illegal memory access"
    (ended,) = jobs.take_ended()
    assert set(ended.result.outcomes.values()) == {Outcome.FAILED}
    assert len(jobs) == 0


def test_memory_is_pinned_until_it_is_closed(driver: Driver) -> None:
    memory = PinnedMemory(torch.zeros((2, 64), dtype=torch.uint8))
    assert len(driver.pinned) == 1
    memory.close()
    memory.close()
    assert not driver.pinned


def test_a_driver_that_refuses_to_pin_is_said_once(driver: Driver, caplog: pytest.LogCaptureFixture) -> None:
    driver.status = 2
    PinnedMemory(torch.zeros((2, 64), dtype=torch.uint8)).close()
    (record,) = caplog.records
    assert "not page-locked" in record.getMessage()
