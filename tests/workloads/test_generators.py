"""Every seeded workload: deterministic, true to what an `Arrival` promises, and of the shape that it is named for."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from collections import Counter
from types import ModuleType

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import forebay.workloads
from forebay.errors import ConfigError
from forebay.workloads import Workload, agents, chat, cold, rag, restore
from forebay.workloads.arrival import Prompt, Prompts

MODULES = [
    module
    for found in pkgutil.iter_modules(forebay.workloads.__path__)
    if hasattr(module := importlib.import_module(f"forebay.workloads.{found.name}"), "build")
    and "path" not in module.Options.__struct_fields__
]
SMALL = {
    "chat": chat.Options(sessions=40),
    "rag": rag.Options(requests=100),
    "restore": restore.Options(sessions=40),
    "cold": cold.Options(sessions=20, prefix_tokens=3000),
    "agents": agents.Options(tasks=15),
}


def small(module: ModuleType, **changes: object) -> Workload:
    workload: Workload = module.build(msgspec.structs.replace(SMALL[module.__name__.rpartition(".")[2]], **changes))
    return workload


def test_all_generators_were_found() -> None:
    assert {module.__name__.rpartition(".")[2] for module in MODULES} == set(SMALL)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
class TestEveryGenerator:
    def test_the_seed_decides_everything(self, module: ModuleType) -> None:
        assert small(module) == small(module)
        assert small(module, seed=1) != small(module)

    def test_arrivals_are_what_they_promise(self, module: ModuleType) -> None:
        workload = small(module)
        parents: dict[int, int] = {}
        at_ns = 0
        for arrival in workload.arrivals:
            assert arrival.at_ns >= at_ns
            at_ns = arrival.at_ns
            assert arrival.output_tokens >= 1
            assert len(arrival.chain) == -(-arrival.prompt_tokens // workload.block_tokens)
            assert len(workload.full_blocks(arrival)) == arrival.prompt_tokens // workload.block_tokens
            for parent, block in zip((-1, *arrival.chain), arrival.chain, strict=False):
                assert parents.setdefault(block, parent) == parent, "an id stands for a prefix"

    def test_turns_of_a_session_go_on_from_each_other(self, module: ModuleType) -> None:
        workload = small(module)
        last: dict[int | None, tuple[int, ...]] = {}
        for arrival in workload.arrivals:
            before = last.get(arrival.session, ())
            assert workload.full_blocks(arrival)[: len(before)] == before
            last[arrival.session] = workload.full_blocks(arrival)

    @pytest.mark.parametrize("wrong", [{"block_tokens": 0}, {"duration_s": 0.0}, {"duration_s": float("nan")}])
    def test_options_that_cannot_work_are_refused(self, module: ModuleType, wrong: dict[str, float]) -> None:
        with pytest.raises(ConfigError, match=f"{next(iter(wrong))} must be"):
            small(module, **wrong)


def test_another_process_gets_the_same_workload() -> None:
    code = (
        "import hashlib\nfrom forebay.workloads import chat\n"
        "print(hashlib.sha256(repr(chat.build(chat.Options(sessions=20))).encode()).hexdigest())"
    )
    digests = {subprocess.check_output([sys.executable, "-c", code]) for _ in range(2)}
    assert len(digests) == 1


def test_sessions_of_restore_come_back_once_or_not_at_all() -> None:
    sessions = Counter(arrival.session for arrival in small(restore).arrivals)
    assert set(sessions.values()) == {1, 2}
    assert set(Counter(a.session for a in small(restore, returning_share=0.0).arrivals).values()) == {1}


def test_chats_share_their_system_prompt_and_nothing_else() -> None:
    workload = small(chat)
    owners: dict[int, set[int | None]] = {}
    for arrival in workload.arrivals:
        for block in arrival.chain:
            owners.setdefault(block, set()).add(arrival.session)
    shared = {block for block, sessions in owners.items() if len(sessions) > 1}
    assert len(shared) == SMALL["chat"].system_tokens // workload.block_tokens


def test_popular_documents_are_asked_about_more_often() -> None:
    def distinct_share(skew: float) -> float:
        workload = small(rag, skew=skew, requests=400)
        blocks = [block for arrival in workload.arrivals for block in workload.full_blocks(arrival)]
        return len(set(blocks)) / len(blocks)

    assert distinct_share(1.5) < 0.7 * distinct_share(0.0)


def test_helpers_of_agents_begin_with_what_was_said_before() -> None:
    workload = small(agents, branch_share=1.0)
    first: dict[int | None, tuple[int, ...]] = {}
    for arrival in workload.arrivals:
        first.setdefault(arrival.session, workload.full_blocks(arrival))
    assert len(first) > SMALL["agents"].tasks
    tools = SMALL["agents"].tool_prompt_tokens // workload.block_tokens
    longer = Counter(chain[: tools + 1] for chain in first.values() if len(chain) > tools + 1)
    assert longer.most_common(1)[0][1] > 1


@settings(max_examples=100)
@given(
    st.lists(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9)), max_size=5), min_size=2, max_size=4),
    st.integers(1, 4),
)
def test_ids_are_equal_exactly_where_prefixes_are(texts: list[list[tuple[str, int]]], block_tokens: int) -> None:
    """Against the tokens themselves; a text is the same tokens wherever it stands, and cut where it is cut."""
    prompts = Prompts(block_tokens)
    chains: list[tuple[list[object], tuple[int, ...]]] = []
    for pieces in texts:
        prompt, tokens = Prompt(prompts), []
        for text, length in pieces:
            prompt.add(text, length)
            tokens += [(text, at) for at in range(length)]
        chains.append((tokens, prompt.arrival(0.0, 0, 1).chain))
    for tokens, chain in chains:
        for other_tokens, other_chain in chains:
            for at, (block, other) in enumerate(zip(chain, other_chain, strict=False)):
                end = (at + 1) * block_tokens
                assert (block == other) == (tokens[:end] == other_tokens[:end])
