"""Hot, warm, cold and recomputed sessions give the same tokens, and each is what it says it is."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from connector_kit import (  # noqa: E402
    BLOCK_TOKENS,
    TINY,
    TINY_LLAMA,
    WrappedTier,
    file_runner,
    hits,
    make_cold,
    memory_tier,
    prompt,
    recomputed,
    runner_over,
    settle,
    tiny_model,
)

from forebay.connectors.transformers import DEVICE, RandomWeights, Reuse, Runner  # noqa: E402
from forebay.connectors.transformers.session import SessionKV  # noqa: E402
from forebay.keys import block_keys  # noqa: E402
from forebay.types import HOST  # noqa: E402

pytestmark = pytest.mark.model
B = BLOCK_TOKENS


@pytest.mark.parametrize("source", [TINY, TINY_LLAMA], ids=["qwen3", "llama"])
@pytest.mark.parametrize("tokens", [1, B - 1, B, B + 1, 4 * B, 4 * B + 1, 300])
def test_tokens_are_equal_wherever_the_blocks_come_from(tokens: int, source: RandomWeights) -> None:
    tier = memory_tier()
    with runner_over([tier], loaded=tiny_model(source)) as runner:
        expected = recomputed(runner, prompt(tokens), 12)
        first = runner.generate(prompt(tokens), 12)
        assert first.tokens == expected
        assert hits(first) == {}
        assert first.computed_tokens == tokens
        # all full blocks come back, but one token is always computed, for its logits
        restorable = min(tokens // B * B, tokens - 1)
        runner.flush()
        for place, forget in ((DEVICE, int), (HOST, runner.drop_device), ("memory", lambda: make_cold(runner))):
            forget()
            again = runner.generate(prompt(tokens), 12)
            assert again.tokens == expected
            assert hits(again) == ({place: restorable} if restorable else {})
            assert again.restored_bytes == -(-restorable // B) * runner.namespace.block_bytes
            assert again.restore_s + again.prefill_s == pytest.approx(again.ttft_s)
        settle(runner)


def test_what_comes_back_is_bit_for_bit_what_was_computed(tmp_path: Path) -> None:
    with file_runner(tmp_path / "pool") as runner:
        tokens = prompt(25 * B)
        keys = block_keys(runner.namespace, tokens)
        shape, device = runner.store.device.shape, runner.store.device.device
        first = SessionKV(shape, 25, device)
        with torch.inference_mode():
            runner.loaded.model(torch.tensor([tokens]), cache=first.cache, use_cache=True)
        assert first.buffer.any(dim=-1).all()
        runner.store.keep(keys, first, 0)
        runner.flush()
        for forget in (int, runner.drop_device, lambda: make_cold(runner)):
            forget()
            again = SessionKV(shape, 25, device)
            restored = runner.store.restore("r", keys, again)
            assert len(restored.sources) == 25
            assert torch.equal(again.buffer, first.buffer)


def test_generated_tokens_are_kept_for_the_next_turn(tmp_path: Path) -> None:
    with file_runner(tmp_path / "pool") as runner:
        question = prompt(21)
        answer = runner.generate(question, 40).tokens
        turn = [*question, *answer, *prompt(5, seed=1)]
        known = (21 + 39) // B * B  # the last new token never went through the model
        second = runner.generate(turn, 8)
        assert hits(second) == {DEVICE: known}
        assert second.tokens == recomputed(runner, turn, 8)


def test_sessions_share_a_prefix_and_not_more() -> None:
    with runner_over([memory_tier()]) as runner:
        shared = prompt(10 * B + 3)
        runner.generate([*shared, *prompt(50, seed=1)], 4)
        other = [*shared, *prompt(50, seed=2)]
        second = runner.generate(other, 4)
        assert hits(second) == {DEVICE: 10 * B}
        assert second.tokens == recomputed(runner, other, 4)


def test_mixed_sources_add_up() -> None:
    with runner_over([memory_tier()], device_blocks=10) as runner:
        tokens = prompt(20 * B)
        expected = runner.generate(tokens, 4).tokens
        make_cold(runner)
        runner.generate(tokens[: 4 * B], 1)  # brings the head back to the device and the pool
        third = runner.generate(tokens, 4)
        assert hits(third) == {DEVICE: 4 * B, "memory": 16 * B - 1}
        assert third.tokens == expected


def test_off_takes_no_part_in_the_store() -> None:
    with runner_over([memory_tier()]) as runner:
        runner.generate(prompt(100), 4, reuse=Reuse.OFF)
        assert runner.store.device.hot_blocks == 0
        assert hits(runner.generate(prompt(100), 4)) == {}
        assert hits(runner.generate(prompt(100), 4, reuse=Reuse.OFF)) == {}


def test_generation_stops_at_a_stop_token_and_refuses_nonsense() -> None:
    with runner_over([memory_tier()]) as runner:
        tokens = recomputed(runner, prompt(30), 10)
        stop = tokens[3]
        stopped = runner.generate(prompt(30), 10, stop_tokens={stop})
        assert stopped.tokens == tokens[: tokens.index(stop) + 1]
        with pytest.raises(ValueError, match="1 or more"):
            runner.generate([], 3)
        with pytest.raises(ValueError, match="1 or more"):
            runner.generate([1], 0)


def test_greedy_tokens_are_those_of_the_library() -> None:
    loaded = tiny_model()
    with runner_over([memory_tier()]) as runner:
        tokens = prompt(70)
        with torch.inference_mode():
            plain = loaded.model.generate(
                torch.tensor([tokens]), attention_mask=torch.ones(1, 70), max_new_tokens=20, do_sample=False,
                eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
        expected = tuple(plain[0, 70:].tolist())
        assert runner.generate(tokens, 20).tokens == expected
        assert runner.generate(tokens, 20).tokens == expected


# ---- more than fits


@pytest.mark.parametrize("device_blocks", [1, 2, 5])
@pytest.mark.parametrize("host_slots", [2, 4, 9])
def test_a_prefix_longer_than_the_device_and_the_pool_comes_back_whole(device_blocks: int, host_slots: int) -> None:
    with runner_over([memory_tier()], device_blocks=device_blocks, host_slots=host_slots) as runner:
        tokens = prompt(40 * B + 1)
        expected = recomputed(runner, tokens, 6)
        assert runner.generate(tokens, 6).tokens == expected
        settle(runner)
        assert runner.counts.lost_blocks == 0
        make_cold(runner)
        again = runner.generate(tokens, 6)
        assert again.tokens == expected
        assert again.computed_tokens == 1
        assert sum(hits(again).values()) == 40 * B
        settle(runner)


def test_eviction_demotes_what_only_the_device_holds_and_a_hit_promotes_it() -> None:
    with runner_over([], device_blocks=12, host_slots=10) as runner:  # no tier: the pool is all there is below
        one = prompt(4 * B + 1, seed=1)
        expected = runner.generate(one, 1).tokens
        runner.generate(prompt(8 * B + 1, seed=2), 1)  # the device is full now, and the pool has lost a part of `one`
        keys = block_keys(runner.namespace, one)
        assert [key in runner.store.device for key in keys] == [True] * 4
        assert runner.store.engine.holds(keys) == [True, True, False, False]
        runner.generate(prompt(2 * B + 1, seed=3), 1)  # needs the room of those two
        assert runner.counts.demoted_blocks == 2
        assert runner.counts.lost_blocks == 0
        demoted = runner.generate(one, 1)
        assert hits(demoted) == {DEVICE: 2 * B, HOST: 2 * B}
        promoted = runner.generate(one, 1)
        assert hits(promoted) == {DEVICE: 4 * B}
        assert demoted.tokens == promoted.tokens == expected
        settle(runner)


def test_a_busy_store_holds_no_step_up_and_gets_its_blocks_later() -> None:
    tier = WrappedTier(memory_tier())
    runner = runner_over([tier], device_blocks=4, host_slots=4)
    tier.may_write.clear()
    tokens = prompt(20 * B + 1)
    first = runner.generate(tokens, 5)  # returns although not one write can end
    assert runner.store.engine.holds(block_keys(runner.namespace, tokens)).count(True) < 20
    tier.may_write.set()
    settle(runner)
    assert runner.counts.lost_blocks == 0
    make_cold(runner)
    again = runner.generate(tokens, 5)
    assert again.tokens == first.tokens
    assert again.computed_tokens == 1
    runner.close()


def test_the_backlog_of_a_busy_store_is_bounded() -> None:
    tier = WrappedTier(memory_tier())
    runner = runner_over([tier], device_blocks=4, host_slots=4, backlog_bytes=0)
    tier.may_write.clear()
    first = runner.generate(prompt(20 * B + 1), 5)
    assert runner.counts.lost_blocks > 0
    tier.may_write.set()
    settle(runner)
    again = runner.generate(prompt(20 * B + 1), 5)
    assert again.tokens == first.tokens
    assert 1 < again.computed_tokens < 20 * B + 1
    runner.close()


# ---- other processes, other models

SECOND_PROCESS = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from connector_kit import file_runner, prompt
with file_runner(Path(sys.argv[2])) as runner:
    results = []
    for tokens in json.loads(sys.argv[3]):
        done = runner.generate(prompt(tokens), 10)
        results.append([list(done.tokens), dict(done.hit_tokens)])
print(json.dumps(results))
"""


def test_a_second_process_finds_every_full_block(tmp_path: Path) -> None:
    lengths = [1, B, 5 * B, 300]
    with file_runner(tmp_path / "pool") as runner:
        expected = [list(runner.generate(prompt(tokens, seed=0), 10).tokens) for tokens in lengths]
    second = subprocess.run(
        [sys.executable, "-c", SECOND_PROCESS, str(Path(__file__).parent), str(tmp_path / "pool"), json.dumps(lengths)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    results = json.loads(second.stdout)
    assert [tokens for tokens, _ in results] == expected
    restored = [sum(found.values()) for _, found in results]
    assert restored == [0, B - 1, 5 * B - 1, 300 // B * B]
    assert set(results[2][1]) <= {"file", DEVICE}
    assert results[3][1]["file"] == 300 // B * B - 5 * B
    assert second.stderr == ""


@pytest.mark.parametrize("other", ["weights", "block", "dtype", "config"])
def test_what_differs_shares_nothing(tmp_path: Path, other: str) -> None:
    with file_runner(tmp_path / "pool") as runner:
        runner.generate(prompt(100), 2)
    match other:
        case "weights":
            second = file_runner(tmp_path / "pool", _variant(seed=1))
        case "block":
            second = file_runner(tmp_path / "pool", block_tokens=2 * B)
        case "dtype":
            from forebay.connectors.transformers import load_model

            second = file_runner(tmp_path / "pool", load_model(TINY, dtype="bfloat16"))
        case _:
            second = file_runner(tmp_path / "pool", _other_epsilon())
    with second:
        assert hits(second.generate(prompt(100), 2)) == {}
        assert hits(second.generate(prompt(100), 2)) != {}
    with file_runner(tmp_path / "pool") as runner:
        assert hits(runner.generate(prompt(100), 2)) == {"file": 96}


def _variant(**changes: int):
    from dataclasses import replace

    return tiny_model(replace(TINY, **changes))


def _other_epsilon():
    import copy

    from forebay.connectors.transformers import adopt_model

    model = copy.deepcopy(tiny_model().model)
    model.config.rms_norm_eps = 1e-3
    return adopt_model(model, None, "other")


def test_a_schedule_of_sessions_over_a_tiny_store(tmp_path: Path) -> None:
    import random

    pick = random.Random(7)
    stems = [prompt(length, seed=stem) for stem, length in enumerate((5 * B, 9 * B + 3, 17 * B, 30))]
    runner: Runner = file_runner(tmp_path / "pool", device_blocks=10, host_slots=12, capacity_blocks=40)
    with runner:
        reused = 0
        for request in range(30):
            stem = pick.choice(stems)
            tokens = [*stem[: pick.randint(1, len(stem))], *prompt(pick.randint(0, 20), seed=100 + request % 3)]
            new_tokens = pick.randint(1, 10)
            if pick.random() < 0.15:
                make_cold(runner)
            done = runner.generate(tokens, new_tokens)
            assert done.tokens == recomputed(runner, tokens, new_tokens), f"request {request}"
            reused += sum(hits(done).values())
            runner.store.engine.check()
        assert reused > 500
        assert runner.store.device.free_blocks + runner.store.device.hot_blocks == 10
        settle(runner)


def test_a_pinned_prompt_stays_and_goes_when_it_is_unpinned() -> None:
    with runner_over([memory_tier(blocks=40)], host_slots=40) as runner:
        system = prompt(4 * B)
        pinned = runner.pin(system)
        assert (len(pinned.keys), pinned.refused_blocks) == (4, 0)
        runner.generate(system, 1)
        for expected in (4 * B - 1, 0):
            for seed in range(1, 9):
                runner.generate(prompt(10 * B, seed=seed), 1)
                runner.flush()
            runner.drop_device()
            assert sum(hits(runner.generate(system, 1)).values()) == expected
            runner.unpin(pinned)
        settle(runner)
