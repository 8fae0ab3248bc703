"""`ForebayConnector` under the real vLLM on a CPU: its tokens must be those of a vLLM without it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from model_kit import save_model, write_adapter
from pool_files import DAMAGES, block_files, flip_a_byte, stored_bytes
from schedule_kit import run_schedules
from vllm_connector_kit import BLOCK_TOKENS, Engine, Tokens, block_file, engine, prompt

from forebay.errors import ConfigError

pytest.importorskip("vllm")

B = BLOCK_TOKENS
LENGTHS = (1, B - 1, B, 3 * B, 3 * B + 1, 3000)
COMMON = prompt(50, 20 * B)
PROMPTS = [prompt(seed, tokens) for seed, tokens in enumerate(LENGTHS)] + [
    COMMON + prompt(60 + tail, 5 + 40 * tail) for tail in range(4)
]
LONG = [prompt(100 + i, 10 * B + 7) for i in range(4)]
OTHER_START = [[*prompt(150 + i, B), *tokens[B:]] for i, tokens in enumerate(LONG)]
LIBRARY = [COMMON[: B * blocks] + prompt(500 + i, i % (2 * B)) for i, blocks in enumerate(range(1, 13))] + [
    prompt(600 + i, 1 + i * B // 2) for i in range(12)
]
FIRST_TURN = prompt(200, 3 * B - 4)
DAMAGED = [prompt(300 + i, 10 * B + 7) for i in range(3)]
HUNGRY = [prompt(400 + i, 6 * B + i) for i in range(6)]
"""With 4 blocks of answer each, more than a small device has room for."""


def loadable(*prompts: list[int]) -> int:
    """Blocks of prompts that can come from the pool: all that are full."""
    return sum(len(tokens) // B for tokens in prompts)


@dataclass(frozen=True)
class Filled:
    """A pool that an engine, now gone, has filled; what that engine said, and what one without a pool did."""

    model: Path
    pool: Path
    filler_answers: list[Tokens]
    answers: list[Tokens]
    long_answers: list[Tokens]
    other_start_answers: list[Tokens]
    library_answers: list[Tokens]
    first_reply: Tokens
    second_turn: list[int]
    second_reply: Tokens
    damaged_answers: list[Tokens]
    hungry_answers: list[Tokens]

    def copy(self, parent: Path) -> Path:
        """A pool of one's own."""
        return Path(shutil.copytree(self.pool, parent / "pool"))


@pytest.fixture(scope="module")
def filled(make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Filled:
    model, pool = make_model(), tmp_path_factory.mktemp("pools") / "pool"
    with engine(model, pool) as filler:
        filler_answers = filler.answer(PROMPTS) + filler.answer(LONG)
        filler.check_at_rest()
    with engine(model) as plain:
        (first_reply,) = plain.answer([FIRST_TURN], max_tokens=2 * B)
        second_turn = [*FIRST_TURN, *first_reply, *prompt(201, 9)]
        return Filled(
            model,
            pool,
            filler_answers,
            plain.answer(PROMPTS),
            plain.answer(LONG),
            plain.answer(OTHER_START),
            plain.answer(LIBRARY),
            first_reply,
            second_turn,
            plain.answer([second_turn])[0],
            plain.answer(DAMAGED),
            plain.answer(HUNGRY, max_tokens=4 * B),
        )


class TestOneEngine:
    """One vLLM that starts on a filled pool, and that every test leaves well. (There can be only one in a process.)"""

    @pytest.fixture(scope="class")
    def pool(self, filled: Filled, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return filled.copy(tmp_path_factory.mktemp("copy"))

    @pytest.fixture(scope="class")
    def running(self, filled: Filled, pool: Path) -> Iterator[Engine]:
        with engine(filled.model, pool) as running:
            yield running

    def test_it_says_the_same_as_a_vllm_without(self, filled: Filled, running: Engine) -> None:
        assert filled.filler_answers == filled.answers + filled.long_answers
        assert not set(filled.other_start_answers) & set(filled.long_answers), "wrong KV would show"
        with running.growth("hit_blocks", "recomputed_blocks", "failed_blocks") as grown:
            assert running.answer(PROMPTS) == filled.answers
        assert grown == {"hit_blocks": loadable(*PROMPTS), "recomputed_blocks": 0, "failed_blocks": 0}
        running.check_at_rest()

    def test_generated_tokens_serve_the_next_turn(self, filled: Filled, running: Engine) -> None:
        assert running.answer([FIRST_TURN], max_tokens=2 * B) == [filled.first_reply]
        running.make_cold()
        with running.growth("hit_blocks", "recomputed_blocks") as grown:
            assert running.answer([filled.second_turn]) == [filled.second_reply]
        assert grown == {"hit_blocks": 4, "recomputed_blocks": 0}, "the last token of the reply had no KV yet"
        running.check_at_rest()

    @pytest.mark.parametrize("case", range(len(DAMAGES)))
    def test_a_damaged_block_in_the_middle_costs_a_recompute_and_is_mended(
        self, filled: Filled, running: Engine, pool: Path, case: int
    ) -> None:
        tokens, expected = DAMAGED[case], [filled.damaged_answers[case]]
        assert running.answer([tokens]) == expected
        running.make_cold()
        file = block_file(running, pool, tokens, 5)
        sound, kinds = file.read_bytes(), ("payload-checksum", "wrong-length")
        DAMAGES[case](file)
        found = {kind: running.metric("tier_events", kind=kind) for kind in kinds}
        counted = ("hit_blocks", "missed_blocks", "recomputed_blocks", "failed_blocks")
        with running.growth(*counted) as grown:
            assert running.answer([tokens]) == expected
        found = {kind: running.metric("tier_events", kind=kind) - before for kind, before in found.items()}
        if DAMAGES[case] is flip_a_byte:  # found only by reading it
            assert grown == dict(zip(counted, (10, 0, 5, 1), strict=True))
        else:
            assert grown == dict(zip(counted, (5, 5, 0, 0), strict=True))
        assert found == {kind: damage is DAMAGES[case] for kind, damage in zip(kinds, DAMAGES, strict=False)}
        running.make_cold()
        assert file.read_bytes()[-1000:] == sound[-1000:], "stored again, as it was"
        running.end_doubts()
        with running.growth("hit_blocks", "recomputed_blocks") as grown:
            assert running.answer([tokens]) == expected
        assert grown == {"hit_blocks": 10, "recomputed_blocks": 0}
        running.check_at_rest()

    def test_another_salt_shares_nothing(self, filled: Filled, running: Engine) -> None:
        for salt, hits in (("someone", 0), ("someone", loadable(*LONG)), ("someone else", 0)):
            running.make_cold()
            with running.growth("hit_blocks") as grown:
                assert running.answer(LONG, cache_salt=salt) == filled.long_answers
            assert grown == {"hit_blocks": hits}
        running.check_at_rest()

    def test_an_abort_in_the_middle_of_a_load_leaves_nothing_behind(self, filled: Filled, running: Engine) -> None:
        for steps_into_the_load in range(6):
            running.make_cold()
            running.send("given up", PROMPTS[5])
            running.step_until_loading()
            for _ in range(steps_into_the_load):
                running.step()
            running.abort("given up")
            running.send("other", LONG[0])
            running.finish()
            assert running.answers.pop("other") == filled.long_answers[0]
            running.answers.clear()
            running.check_at_rest()
        assert running.answer([PROMPTS[5]]) == [filled.answers[5]]

    def test_random_schedules(self, filled: Filled, running: Engine, pool: Path) -> None:
        with running.growth("hit_blocks", "loads", "failed_blocks") as grown:
            run_schedules(running, LIBRARY, filled.library_answers, pool)
        assert grown["hit_blocks"] > 500, "blocks came from the pool"
        assert grown["loads"] > 100
        assert grown["failed_blocks"] > 0, "damage was met by loads"


def test_a_pool_that_vanishes_under_load_costs_recomputes_and_comes_back(filled: Filled, tmp_path: Path) -> None:
    pool = filled.copy(tmp_path)
    with engine(filled.model, pool) as running:
        for i, tokens in enumerate(LONG):
            running.send(f"load-{i}", tokens)
        running.step_until_loading()
        pool.rename(tmp_path / "away")
        running.finish()
        assert [running.answers.pop(f"load-{i}") for i in range(len(LONG))] == filled.long_answers
        running.make_cold()
        with running.growth("hit_blocks", "missed_blocks") as grown:
            assert running.answer(PROMPTS) == filled.answers
        assert grown["hit_blocks"] == 0
        assert grown["missed_blocks"] > 0
        assert running.metric("tier_events", kind="vanished") > 0
        running.check_at_rest()
        assert not pool.exists(), "no new pool appears where the old one was mounted"
        (tmp_path / "away").rename(pool)
        running.make_cold()
        running.end_doubts()
        with running.growth("hit_blocks", "recomputed_blocks") as grown:
            assert running.answer(PROMPTS) == filled.answers
        assert grown == {"hit_blocks": loadable(*PROMPTS), "recomputed_blocks": 0}
        for hits in (0, loadable(*OTHER_START)):  # it takes new blocks again, too
            with running.growth("hit_blocks") as grown:
                assert running.answer(OTHER_START) == filled.other_start_answers
            assert grown == {"hit_blocks": hits}
            running.make_cold()
        assert running.metric("tier_events", kind="returned") > 0
        running.check_at_rest()


# --- no stale hit


def test_changed_weights_at_the_same_path_are_another_model(make_model: Callable[..., Path], tmp_path: Path) -> None:
    model, pool = make_model(seed=1), tmp_path / "pool"
    with engine(model, pool) as first:
        before = first.answer(LONG)
        first.settle()
    make_model(seed=2, path=model)
    with engine(model) as plain:
        expected = plain.answer(LONG)
    assert not set(expected) & set(before)
    with engine(model, pool) as second, second.growth("hit_blocks", "loads") as grown:
        assert second.answer(LONG) == expected
    assert grown == {"hit_blocks": 0, "loads": 0}


@pytest.mark.parametrize("options", [{"block_size": 64}, {"dtype": "bfloat16"}], ids=str)
def test_another_form_of_block_is_another_namespace(filled: Filled, tmp_path: Path, options: dict[str, Any]) -> None:
    with engine(filled.model, **options) as plain:
        expected = plain.answer(LONG)
    with engine(filled.model, filled.copy(tmp_path), **options) as other:
        with other.growth("hit_blocks") as grown:
            assert other.answer(LONG) == expected
        assert grown == {"hit_blocks": 0}
        other.check_at_rest()


def test_adapters_are_known_by_name_and_content(filled: Filled, tmp_path: Path) -> None:
    from vllm.lora.request import LoRARequest

    pool, path, with_lora = tmp_path / "pool", write_adapter(tmp_path / "adapter", 1), {"enable_lora": True}
    first, renamed = LoRARequest("first", 1, str(path)), LoRARequest("renamed", 2, str(path))
    with engine(filled.model, **with_lora) as plain:
        expected = plain.answer(LONG, lora=first)
    assert not set(expected) & set(filled.long_answers)
    with engine(filled.model, pool, **with_lora) as running:
        assert running.answer(LONG) == filled.long_answers
        for adapter, hits in ((first, 0), (first, loadable(*LONG)), (renamed, 0), (None, loadable(*LONG))):
            running.make_cold()
            with running.growth("hit_blocks") as grown:
                assert running.answer(LONG, lora=adapter) == (expected if adapter else filled.long_answers)
            assert grown == {"hit_blocks": hits}
        running.check_at_rest()
    write_adapter(path, 2)  # trained further, and saved to the same place
    with engine(filled.model, **with_lora) as plain:
        expected = plain.answer(LONG, lora=first)
    with engine(filled.model, pool, **with_lora) as running, running.growth("hit_blocks") as grown:
        assert running.answer(LONG, lora=first) == expected
    assert grown == {"hit_blocks": 0}


# --- other models, other processes


def test_layers_with_windows_beside_full_ones_are_served(tmp_path: Path) -> None:
    """vLLM keeps all of their tokens under a connector like this one, and then they have one kind of block table."""
    model, pool = save_model("sliding and full", tmp_path / "model"), tmp_path / "pool"
    with engine(model) as plain:
        expected = plain.answer(LONG)
    for hits in (0, loadable(*LONG)):
        with engine(model, pool) as running:
            with running.growth("hit_blocks", "recomputed_blocks") as grown:
                assert running.answer(LONG) == expected
            assert grown == {"hit_blocks": hits, "recomputed_blocks": 0}
            running.check_at_rest()


@pytest.mark.parametrize(
    ("family", "error", "words"),
    [
        ("sliding", ConfigError, "SlidingWindowSpec"),
        ("latent", ConfigError, "latent attention on a CPU"),
        ("states and full", ValueError, "one unified type"),  # said by vLLM itself, before the connector is asked
    ],
)
def test_models_that_cannot_be_restored_exactly_are_refused(
    tmp_path: Path, family: str, error: type[Exception], words: str
) -> None:
    starting = engine(save_model(family, tmp_path / "model"), tmp_path / "pool", dtype="bfloat16")
    with pytest.raises(error, match=words), starting:
        pass


def test_two_ranks_fill_a_pool_that_one_reads(filled: Filled, tmp_path: Path) -> None:
    """With real worker processes, and blocks stored by KV head."""
    pool, by_head = tmp_path / "pool", {"shard_kv_heads": 1}
    said = _in_processes(filled.model, pool, by_head, ranks=2)
    assert said == {
        "answers": [list(answer) for answer in filled.long_answers], "hit_blocks": 0, "recomputed_blocks": 0
    }  # fmt: skip
    with engine(filled.model, pool, extra=by_head) as running:
        with running.growth("hit_blocks", "recomputed_blocks") as grown:
            assert running.answer(LONG) == filled.long_answers
        assert grown == {"hit_blocks": loadable(*LONG), "recomputed_blocks": 0}
        running.check_at_rest()


def _in_processes(model: Path, pool: Path, extra: dict[str, Any], ranks: int) -> dict[str, Any]:
    """What an engine of its own says to LONG."""
    out, log = pool.with_name("said"), pool.with_name("log")
    task = {
        "model": str(model), "pool": str(pool), "ranks": ranks, "extra": extra, "out": str(out),
        "prompts": [[100 + i, 10 * B + 7] for i in range(4)],
    }  # fmt: skip
    command = [sys.executable, Path(__file__).with_name("vllm_connector_process.py"), json.dumps(task)]
    with (
        log.open("w") as lines,
        subprocess.Popen(command, stdout=lines, stderr=lines, start_new_session=True) as process,
    ):
        try:
            process.wait(timeout=240)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # workers that outlive their engine
    assert out.exists(), log.read_text()[-3000:]
    said: dict[str, Any] = json.loads(out.read_text())
    return said


# --- limits and options


def test_preemption_overwrites_nothing_that_is_still_being_stored(filled: Filled, tmp_path: Path) -> None:
    few_blocks = {"num_gpu_blocks_override": 34, "max_model_len": 1024, "scheduler_reserve_full_isl": False}
    with engine(filled.model, tmp_path / "pool", **few_blocks) as short:
        assert short.answer(HUNGRY, max_tokens=4 * B) == filled.hungry_answers
        assert short.preemptions > 0
        short.check_at_rest()
    with engine(filled.model, tmp_path / "pool") as next_one:
        with next_one.growth("hit_blocks", "failed_blocks") as grown:
            assert next_one.answer(HUNGRY, max_tokens=4 * B) == filled.hungry_answers
        assert grown == {"hit_blocks": loadable(*HUNGRY), "failed_blocks": 0}


def test_a_host_pool_of_a_few_slots_is_slow_and_right(filled: Filled, tmp_path: Path) -> None:
    block_bytes = 2 * 2 * 2 * 32 * B * 4
    for hits in (0, loadable(*LONG)):
        with engine(filled.model, tmp_path / "pool", extra={"host_gib": 4 * block_bytes / 2**30}) as running:
            with running.growth("hit_blocks") as grown:
                assert running.answer(LONG) == filled.long_answers
            assert grown == {"hit_blocks": hits}
            running.check_at_rest()


def test_a_full_pool_keeps_to_its_capacity(filled: Filled, tmp_path: Path) -> None:
    pool, capacity_bytes = tmp_path / "pool", 40 * 2**16
    with engine(filled.model, pool, extra={"capacity_gib": capacity_bytes / 2**30}) as running:
        for _ in range(2):
            assert running.answer(LONG + PROMPTS) == filled.long_answers + filled.answers
            running.check_at_rest()
            assert 0 < stored_bytes(pool) <= capacity_bytes
            running.make_cold()


def test_prompt_only_stores_no_generated_tokens(filled: Filled, tmp_path: Path) -> None:
    with engine(filled.model, tmp_path / "pool", extra={"stored_tokens": "prompt"}) as running:
        running.answer([prompt(700, 3 * B)], max_tokens=3 * B)
        running.check_at_rest()
        assert len(block_files(tmp_path / "pool")) == 3


def test_blocks_stored_by_kv_head_come_back_together_or_not_at_all(filled: Filled, tmp_path: Path) -> None:
    by_head = {"shard_kv_heads": 1}
    with engine(filled.model, tmp_path / "pool", extra=by_head) as filler:
        assert filler.answer(LONG) == filled.long_answers
        filler.check_at_rest()
    heads = [tmp_path / f"pool-kvheads{head}to{head}of2" for head in range(2)]
    assert [len(block_files(head)) for head in heads] == [loadable(*LONG)] * 2
    flip_a_byte(block_files(heads[1])[0])
    with engine(filled.model, tmp_path / "pool", extra=by_head) as running:
        with running.growth("hit_blocks", "failed_blocks") as grown:
            assert running.answer(LONG) == filled.long_answers
        assert grown == {"hit_blocks": loadable(*LONG), "failed_blocks": 1}
        running.make_cold()
        running.end_doubts()
        with running.growth("hit_blocks", "failed_blocks") as grown:
            assert running.answer(LONG) == filled.long_answers
        assert grown == {"hit_blocks": loadable(*LONG), "failed_blocks": 0}
        running.check_at_rest()


def test_hits_that_are_short_or_slow_to_load_are_computed(filled: Filled, tmp_path: Path) -> None:
    fast = {"kind": "measured", "options": {"prefill_tokens_per_s": 1e12}}
    extra = {"min_load_tokens": 10 * B, "load_or_compute": fast}
    with engine(filled.model, filled.copy(tmp_path), extra=extra) as running:
        with running.growth("hit_blocks") as grown:
            assert running.answer([PROMPTS[4], LONG[0]]) == [filled.answers[4], filled.long_answers[0]]
        assert grown == {"hit_blocks": loadable(LONG[0])}
        with running.growth("hit_blocks") as grown:
            assert running.answer(LONG[1:3]) == filled.long_answers[1:3]
            assert running.answer(LONG[3:]) == filled.long_answers[3:], "by now it is known how long loads take"
        assert grown == {"hit_blocks": loadable(*LONG[1:3])}
        running.check_at_rest()


def test_half_of_a_hit_is_loaded_and_the_rest_computed(filled: Filled, tmp_path: Path) -> None:
    with engine(filled.model, filled.copy(tmp_path), extra={"load_or_compute": {"kind": "own_rules.half"}}) as running:
        for _ in range(2):
            with running.growth("hit_blocks", "failed_blocks") as grown:
                assert running.answer(LONG) == filled.long_answers
            assert grown == {"hit_blocks": loadable(*LONG) // 2, "failed_blocks": 0}
            running.check_at_rest()
            running.make_cold()


def test_reset_forgets_for_this_engine_and_for_the_next(filled: Filled, tmp_path: Path) -> None:
    pool = filled.copy(tmp_path)
    for hits_at_start in (loadable(*LONG), 0):
        with engine(filled.model, pool) as running:
            with running.growth("hit_blocks") as grown:
                assert running.answer(LONG) == filled.long_answers
            assert grown == {"hit_blocks": hits_at_start}
            running.settle()
            assert running.llm.reset_prefix_cache(reset_connector=True)
            running.settle()
            assert not block_files(pool)
            for hits in (0, loadable(*LONG)):  # then it goes on, for itself
                with running.growth("hit_blocks") as grown:
                    assert running.answer(LONG) == filled.long_answers
                assert grown == {"hit_blocks": hits}
                running.make_cold()
            running.check_at_rest()


def test_a_bug_of_ours_costs_the_cache_and_not_the_engine(
    filled: Filled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(filled.model, filled.copy(tmp_path)) as running:
        sound_poll, polls = running.worker.engines[0].poll, iter(range(10**6))

        def poll() -> Any:
            if next(polls) > 8:
                raise RuntimeError("a bug")
            return sound_poll()

        monkeypatch.setattr(running.worker.engines[0], "poll", poll)
        for i, tokens in enumerate(LONG):
            running.send(f"{i}", tokens)
        running.finish()
        assert [running.answers[f"{i}"] for i in range(len(LONG))] == filled.long_answers
        assert running.worker.side.is_broken
        assert running.answer(PROMPTS) == filled.answers
        assert running.metric("broken_workers") == 1
        assert not running.scheduler_side._held
        assert running.block_pool.get_num_free_blocks() == running.block_pool.num_gpu_blocks - 1


@pytest.mark.parametrize(
    ("extra", "options", "words"),
    [
        ({"capacity_gib": 0}, {}, "capacity_gib"),
        ({"capcity": 1}, {}, "capcity"),
        ({"host_gib": 1e-6}, {}, "2 slots"),
        ({}, {"prefix_caching_hash_algo": "xxhash_cbor"}, "sha256_cbor"),
        ({}, {"load_format": "dummy"}, "identity"),
        ({"shard_kv_heads": 3}, {}, "no multiple of 3"),
    ],
    ids=str,
)
def test_what_cannot_work_is_said_at_the_start_in_one_line(
    filled: Filled, tmp_path: Path, extra: dict[str, Any], options: dict[str, Any], words: str
) -> None:
    starting = engine(filled.model, tmp_path / "pool", extra=extra, **options)
    with pytest.raises(ConfigError, match=words) as said, starting:
        pass
    assert "\n" not in str(said.value)
