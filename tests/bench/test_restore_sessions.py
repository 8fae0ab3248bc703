"""What is populated and what is asked, from every workload."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import pytest
import restore_kit
from hypothesis import given
from hypothesis import strategies as st

from forebay.assemble import Named, open_workload
from forebay.bench.restore.audit import broken_claims
from forebay.bench.restore.options import Limits
from forebay.bench.restore.results import RequestRecord
from forebay.bench.restore.sessions import (
    Prompt,
    Sessions,
    returning,
    sessions_for,
    shared_tokens,
    wave_of,
)
from forebay.errors import ConfigError
from forebay.workloads import Workload, agents, chat, cold, rag, restore, trace

TRACE = "\n".join(
    f'{{"timestamp": {at}, "input_length": {512 * blocks + 5}, "output_length": 7, "hash_ids": {ids}}}'
    for at, (blocks, ids) in enumerate(
        [(2, [1, 2, 90]), (3, [1, 2, 3, 91]), (1, [7, 92]), (3, [7, 8, 9, 93]), (1, [5, 94])]
    )
)


@pytest.fixture(params=["cold", "chat", "rag", "agents", "restore", "trace"])
def workload(request: pytest.FixtureRequest, tmp_path: Path) -> Workload:
    (tmp_path / "trace.jsonl").write_text(TRACE)
    return {
        "cold": lambda: cold.build(cold.Options(sessions=8, prefix_tokens=2048)),
        "chat": lambda: chat.build(chat.Options(sessions=20)),
        "rag": lambda: rag.build(rag.Options(requests=60, documents=10)),
        "agents": lambda: agents.build(agents.Options(tasks=5)),
        "restore": lambda: restore.build(restore.Options(sessions=20, prompt_tokens=2000)),
        "trace": lambda: trace.build(trace.Options(path=str(tmp_path / "trace.jsonl"))),
    }[request.param]()


@pytest.mark.parametrize("instances", [1, 2])
@pytest.mark.parametrize("is_shared", [False, True])
def test_what_is_asked_begins_as_something_that_was_populated(
    workload: Workload, instances: int, is_shared: bool
) -> None:
    pairs = returning(workload, 1 if workload.name == "trace.jsonl" else 6)
    found = sessions_for(workload, pairs, instances=instances, seed=0, is_shared=is_shared)
    assert [each.session for each in found.questions] == list(range(len(pairs)))
    for question in found.questions:
        tokens = question.prompt.token_ids(range(1000))
        assert len(tokens) == question.prompt.tokens
        assert 0 < question.stored_tokens <= question.prompt.tokens
        assert question.output_tokens >= 1
        reach = [each for each in found.populated if is_shared or each.instance == question.instance]
        longest = max(_common(tokens, each.prompt) for each in reach)
        assert longest >= question.stored_tokens  # it is really there, token by token
        assert longest < question.stored_tokens + workload.block_tokens


def _common(tokens, prompt: Prompt) -> int:
    other = prompt.token_ids(range(1000))
    length = min(len(tokens), len(other))
    differs = (tokens[:length] != other[:length]).nonzero()[0]
    return int(differs[0]) if len(differs) else length


def cold_sessions(sessions: int, instances: int, *, is_shared: bool) -> Sessions:
    workload = cold.build(cold.Options(sessions=sessions, prefix_tokens=1024))
    return sessions_for(workload, returning(workload, sessions), instances=instances, seed=0, is_shared=is_shared)


@given(st.integers(1, 5), st.integers(1, 6))
def test_a_shared_pool_is_read_by_its_writers_and_by_others_and_evenly(instances: int, turns: int) -> None:
    found = cold_sessions(instances * instances * turns, instances, is_shared=True)
    readers = [each.instance for each in found.questions]
    assert {readers.count(instance) for instance in range(instances)} == {len(readers) // instances}
    own = sum(each.instance == each.written_by for each in found.questions)
    assert own == len(readers) // instances


def test_independent_instances_read_what_they_wrote() -> None:
    found = cold_sessions(7, 3, is_shared=False)
    assert all(each.instance == each.written_by for each in found.questions)
    assert len(found.populated) == 7


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 9))
def test_a_wave_wants_each_session_once_and_all_have_their_turn(sessions: int, concurrency: int, rounds: int) -> None:
    questions = cold_sessions(sessions, 1, is_shared=False).questions
    concurrency = min(concurrency, sessions)
    waves = [wave_of(questions, [concurrency], concurrency, number) for number in range(1, rounds + 1)]
    for wave in waves:
        assert len({each.session for each in wave}) == concurrency
    asked = [each.session for wave in waves for each in wave]
    counts = [asked.count(session) for session in range(sessions)]
    assert max(counts) - min(counts) <= 1


def test_enough_sessions_are_read_once_each_and_fewer_more_often() -> None:
    steps, rounds = (4, 8, 16), 3
    for sessions, most in ((sum(steps) * rounds, 1), (16, 6)):
        questions = cold_sessions(sessions, 1, is_shared=False).questions
        asked = Counter(
            each.session
            for number in range(1, rounds + 1)
            for step in steps
            for each in wave_of(questions, steps, step, number)
        )
        assert max(asked.values()) == most


@pytest.mark.parametrize("kind", ["cold", "rag", "chat", "agents", "restore"])
def test_a_machine_without_noise_does_not_drift_whatever_it_is_asked(kind: str) -> None:
    """TTFT is the wait for those before it, each by its length, and tokens that another read are for free."""
    steps, rounds = (4, 8, 16), 3
    workload = open_workload(Named(kind=kind))
    found = sessions_for(workload, returning(workload, 32), instances=1, seed=0, is_shared=False)
    requests: list[RequestRecord] = []
    for number in range(1, rounds + 1):
        for step in steps:
            wave = wave_of(found.questions, steps, step, number)
            assert len({each.session for each in wave}) == step
            ttft_s = 0.0
            for each in wave:
                ttft_s += (each.prompt.tokens - shared_tokens(each, wave) / 2) / 1000
                requests.append(
                    restore_kit.request(
                        "baseline", each.session, round=number, concurrency=step, ttft_s=ttft_s,
                        ended_s=100.0 * number + ttft_s + 1, prompt_tokens=each.prompt.tokens,
                        output_tokens=each.output_tokens,
                    )
                )  # fmt: skip
    waves = [restore_kit.wave("baseline", round=n, concurrency=s) for n in range(1, rounds + 1) for s in steps]
    assert broken_claims(restore_kit.groups()[1:2], requests, waves, steps, Limits()) == ()


def test_what_questions_of_a_wave_share_may_be_read_by_one_for_both() -> None:
    workload = rag.build(rag.Options(requests=60, documents=2, documents_a_prompt=1))
    found = sessions_for(workload, returning(workload, 6), instances=1, seed=0, is_shared=False)
    shared = [shared_tokens(each, found.questions) for each in found.questions]
    assert all(512 <= tokens <= each.stored_tokens for tokens, each in zip(shared, found.questions, strict=True))
    apart = [dataclasses.replace(each, instance=each.session) for each in found.questions]
    assert [shared_tokens(each, apart) for each in apart] == [0] * 6
    alone = cold_sessions(4, 1, is_shared=False).questions
    assert [shared_tokens(each, alone) for each in alone] == [0] * 4


def test_the_seed_and_the_blocks_decide_the_tokens_and_nothing_else() -> None:
    one = Prompt((3, 4), 8, 13, seed=0)
    assert (one.token_ids(range(500)) == Prompt((3, 4), 8, 13, seed=0).token_ids(range(500))).all()
    assert (one.token_ids(range(500))[:8] == Prompt((3, 9), 8, 16, seed=0).token_ids(range(500))[:8]).all()
    assert (one.token_ids(range(500)) != Prompt((3, 4), 8, 13, seed=1).token_ids(range(500))).any()
    assert set(one.token_ids(range(7, 9))) <= {7, 8}
    assert len(Prompt((), 8, 0, seed=0).token_ids(range(5))) == 0


def test_a_workload_in_which_nothing_comes_back_is_refused() -> None:
    workload = restore.build(restore.Options(sessions=5, returning_share=0.0))
    with pytest.raises(ConfigError, match="has 0 requests that come back where 2 sessions are wanted"):
        returning(workload, 2)
