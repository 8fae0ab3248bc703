"""The breaker alone, under a clock that the test turns."""

from __future__ import annotations

import threading
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from forebay.tiers.file.breaker import Breaker, BreakerLimits, BreakerState, Call, Turn

LIMITS = BreakerLimits(failures_in_a_row=3, hang_ns=100, retry_ns=50, threads=2)
CLOSED, OPEN, HALF_OPEN = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN


class Bench:
    """A breaker, its clock, and what it told."""

    def __init__(self, limits: BreakerLimits = LIMITS) -> None:
        self.now_ns = 0
        self.turns: list[Turn] = []
        self.hangs = 0
        self.breaker = Breaker(limits, lambda: self.now_ns, self.turns.append, self._hung)

    def _hung(self) -> None:
        self.hangs += 1

    def work(self, failure: str = "") -> bool:
        """One call, begun and ended at once; False when it was refused."""
        with self.breaker.call() as call:
            if failure and not call.refused:
                call.failed(failure)
            return not call.refused

    def states(self) -> list[BreakerState]:
        return [turn.state for turn in self.turns]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_it_opens_after_failures_in_a_row_only(bench: Bench) -> None:
    for failure in ("EIO", "EIO", "", "EIO", "EIO", ""):
        assert bench.work(failure)
    assert bench.breaker.state is CLOSED
    for _ in range(3):
        assert bench.work("EIO")
    assert bench.breaker.state is OPEN
    assert not bench.work()
    [turn] = bench.turns
    assert turn.why == "3 in a row failed, the last with EIO"


def test_it_tries_one_call_and_closes_when_that_works(bench: Bench) -> None:
    bench.breaker.trip("why")
    bench.now_ns = 49
    assert bench.breaker.refuses()
    bench.now_ns = 50
    assert not bench.breaker.refuses()
    with bench.breaker.call() as trial:
        assert not trial.refused
        assert bench.breaker.state is HALF_OPEN
        assert bench.breaker.refuses()
        assert not bench.work()
    assert bench.states() == [OPEN, HALF_OPEN, CLOSED]
    assert bench.turns[-1].lasted_ns == 50
    assert bench.work()


def test_a_failed_try_waits_again(bench: Bench) -> None:
    bench.breaker.trip("why")
    bench.now_ns = 50
    assert bench.work("EIO")
    assert bench.breaker.state is OPEN
    bench.now_ns = 99
    assert not bench.work()
    bench.now_ns = 100
    assert bench.work()
    assert bench.states() == [OPEN, HALF_OPEN, OPEN, HALF_OPEN, CLOSED]


def test_a_hung_call_opens_it_and_its_late_end_asks_for_a_try(bench: Bench) -> None:
    hung = bench.breaker.call()
    bench.now_ns = 100
    assert bench.breaker.state is CLOSED
    bench.now_ns = 101
    assert bench.breaker.refuses()
    assert bench.hangs == 1
    assert "has not come back" in bench.breaker.why
    bench.now_ns = 120
    with hung:
        pass
    assert bench.breaker.state is OPEN
    assert bench.breaker.is_due(), "before the time: the device has answered"
    assert bench.work()
    assert bench.breaker.state is CLOSED
    assert bench.hangs == 1


def test_a_hung_call_that_fails_late_asks_for_none(bench: Bench) -> None:
    hung = bench.breaker.call()
    bench.now_ns = 101
    assert bench.breaker.refuses()
    with hung:
        hung.failed("EIO")
    assert not bench.breaker.is_due()


def test_a_try_needs_a_thread_that_does_not_hang(bench: Bench) -> None:
    hung = [bench.breaker.call() for _ in range(LIMITS.threads)]
    bench.now_ns = 101
    assert bench.breaker.refuses()
    bench.now_ns = 10_000
    assert bench.breaker.refuses()
    with hung[0]:
        hung[0].failed("EIO")
    assert bench.work()
    assert bench.breaker.state is CLOSED


def test_a_try_that_hangs_is_no_try_for_ever(bench: Bench) -> None:
    bench.breaker.trip("why")
    bench.now_ns = 50
    lost = bench.breaker.call()
    bench.now_ns = 151
    assert bench.breaker.state is OPEN
    assert bench.hangs == 1
    bench.now_ns = 201
    assert bench.work()
    assert bench.breaker.state is CLOSED
    with lost:
        pass
    assert bench.breaker.state is CLOSED


def test_a_glance_that_works_proves_nothing(bench: Bench) -> None:
    def glance(failure: str = "") -> bool:
        with bench.breaker.glance() as call:
            if failure and not call.refused:
                call.failed(failure)
            return not call.refused

    assert bench.work("EIO")
    assert glance()
    assert bench.work("EIO")
    assert glance()
    assert glance("EIO")
    assert bench.breaker.state is OPEN
    bench.now_ns = 50
    assert not glance()
    assert bench.breaker.state is OPEN
    assert bench.work()
    assert glance()


def test_threads_share_one_try() -> None:
    bench = Bench(BreakerLimits(failures_in_a_row=3, hang_ns=100, retry_ns=50, threads=99))
    bench.breaker.trip("why")
    bench.now_ns = 50
    start, got = threading.Barrier(8), Counter[bool]()
    ended = threading.Barrier(8)

    def go() -> None:
        start.wait()
        with bench.breaker.call() as call:
            got[call.refused] += 1
            ended.wait()

    threads = [threading.Thread(target=go) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == {False: 1, True: 7}
    assert bench.states() == [OPEN, HALF_OPEN, CLOSED]


class Calls(RuleBasedStateMachine):
    """Calls that begin, end, fail and hang in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench()
        self.flying: list[Call] = []

    @rule(nanoseconds=st.integers(0, 120))
    def wait(self, nanoseconds: int) -> None:
        self.bench.now_ns += nanoseconds

    @rule(glance=st.booleans())
    def begin(self, glance: bool) -> None:
        breaker = self.bench.breaker
        refuses, state = breaker.refuses(), breaker.state
        call = breaker.glance() if glance else breaker.call()
        assert call.refused == (state is not CLOSED if glance else refuses)
        if not call.refused:
            self.flying.append(call)

    @precondition(lambda self: self.flying)
    @rule(at=st.integers(0, 9), failure=st.sampled_from(["", "", "EIO"]))
    def end(self, at: int, failure: str) -> None:
        call = self.flying.pop(at % len(self.flying))
        with call:
            if failure:
                call.failed(failure)

    @invariant()
    def what_it_told_is_a_path_through_the_states(self) -> None:
        state, turns = self.bench.breaker.state, self.bench.turns
        assert state is (turns[-1].state if turns else CLOSED)
        assert all(before.state is after.was for before, after in pairwise(turns))
        allowed = {(CLOSED, OPEN), (OPEN, HALF_OPEN), (HALF_OPEN, CLOSED), (HALF_OPEN, OPEN)}
        assert {(turn.was, turn.state) for turn in turns} <= allowed

    @invariant()
    def nothing_hangs_while_it_is_closed(self) -> None:
        if self.bench.breaker.state is CLOSED:
            opened = max((i for i, turn in enumerate(self.bench.turns) if turn.state is CLOSED), default=None)
            young = [call for call in self.flying if self.bench.now_ns - call.began_ns <= LIMITS.hang_ns]
            assert opened is not None or len(young) == len(self.flying)

    def teardown(self) -> None:
        """When all calls have ended and work, it closes in the end."""
        for call in self.flying:
            with call:
                pass
        self.bench.now_ns += LIMITS.retry_ns
        assert self.bench.work()
        assert self.bench.breaker.state is CLOSED


TestCalls = Calls.TestCase
TestCalls.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
