from __future__ import annotations

import threading
from collections.abc import Mapping

import pytest

from forebay.executor import ThreadExecutor
from forebay.ports import Executor
from forebay.sim.executor import SimExecutor
from forebay.types import BlockKey, Job, JobId, JobKind, Outcome

KEY = BlockKey(b"k" * 32)
SECOND_NS = 1_000_000_000


def job(number: int, kind: JobKind = JobKind.READ, tier: str = "disk") -> Job:
    return Job(JobId(number), kind, tier, (KEY,), (), 0)


def done() -> Mapping[BlockKey, Outcome]:
    return {KEY: Outcome.OK}


@pytest.fixture(params=["threads", "sim"])
def executor(request: pytest.FixtureRequest) -> Executor:
    return ThreadExecutor() if request.param == "threads" else SimExecutor(lambda job: 1_000)


def test_a_job_ends_once_and_wait_finds_it(executor: Executor) -> None:
    executor.submit(job(1), done)
    executor.wait(executor.now_ns() + 10 * SECOND_NS)
    (result,) = executor.poll()
    assert result.job == job(1)
    assert result.outcomes == {KEY: Outcome.OK}
    assert result.started_ns <= result.finished_ns <= executor.now_ns()
    assert executor.poll() == []
    executor.close()


def test_wait_returns_at_its_time_when_nothing_ends(executor: Executor) -> None:
    until_ns = executor.now_ns() + 1_000_000
    executor.wait(until_ns)
    assert executor.now_ns() >= until_ns
    assert executor.poll() == []
    executor.close()


@pytest.mark.parametrize("error", [RuntimeError("a bug in a tier"), SystemExit("a library's idea of an error")])
def test_an_exception_in_a_job_fails_its_blocks_and_nothing_else(error: BaseException) -> None:
    def broken() -> Mapping[BlockKey, Outcome]:
        raise error

    executor = ThreadExecutor()
    executor.submit(job(1), broken)
    executor.wait(executor.now_ns() + 10 * SECOND_NS)
    assert [result.outcomes for result in executor.poll()] == [{KEY: Outcome.FAILED}]
    executor.submit(job(2), done)
    executor.wait(executor.now_ns() + 10 * SECOND_NS)
    assert [result.outcomes for result in executor.poll()] == [{KEY: Outcome.OK}]
    executor.close()


def test_a_slow_write_holds_up_no_read() -> None:
    release = threading.Event()

    def slow() -> Mapping[BlockKey, Outcome]:
        release.wait(30)
        return done()

    executor = ThreadExecutor(threads_per_lane=1)
    executor.submit(job(1, JobKind.WRITE), slow)
    executor.submit(job(2), done)
    executor.submit(job(3, tier="other"), done)
    ended: set[int] = set()
    while len(ended) < 2:
        executor.wait(executor.now_ns() + 10 * SECOND_NS)
        ended.update(result.job.job_id for result in executor.poll())
    assert ended == {2, 3}
    release.set()
    executor.close()


def test_virtual_time_serves_a_lane_in_order_and_lanes_side_by_side() -> None:
    executor = SimExecutor(lambda job: 1_000)
    for number in (1, 2):
        executor.submit(job(number), done)
    executor.submit(job(3, tier="other"), done)
    ends: dict[int, int] = {}
    while len(ends) < 3:
        executor.wait(SECOND_NS)
        ends.update({result.job.job_id: result.finished_ns for result in executor.poll()})
    assert ends == {1: 1_000, 2: 2_000, 3: 1_000}


def test_a_job_for_which_no_thread_can_be_started_fails_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    executor = ThreadExecutor()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        executor.submit(job(1), done)
    executor.submit(job(2), done)
    ended: dict[int, Outcome] = {}
    while len(ended) < 2:
        executor.wait(executor.now_ns() + 10 * SECOND_NS)
        for result in executor.poll():
            assert result.job.job_id not in ended
            ended[result.job.job_id] = result.outcomes[KEY]
    executor.close()
    assert ended == {1: Outcome.FAILED, 2: Outcome.OK}
    assert executor.poll() == []


def test_in_a_fork_every_job_fails_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads do not survive a fork: without this a load in the child would wait for ever."""
    executor = ThreadExecutor()
    with monkeypatch.context() as patch:
        patch.setattr("os.getpid", lambda: -1)
        executor.submit(job(1), done)
    (result,) = executor.poll()
    assert result.outcomes == {KEY: Outcome.FAILED}
    executor.close()
