"""Jobs on GPU streams, with a driver that the test plays."""

from __future__ import annotations

import pytest
import torch
from played_driver import Driver, play

from forebay.connectors.streams import PinnedMemory, StreamJobs
from forebay.types import HOST, BlockKey, DeviceBlock, Job, JobId, JobKind, Outcome, Slot


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return play(monkeypatch)


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
