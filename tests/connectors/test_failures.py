"""Whatever the store does, the tokens are those of a recompute."""

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from connector_kit import (  # noqa: E402
    BLOCK_TOKENS,
    WrappedTier,
    file_runner,
    hits,
    make_cold,
    memory_tier,
    prompt,
    recomputed,
    runner_over,
    settle,
)

from forebay.connectors.transformers import DEVICE  # noqa: E402
from forebay.keys import block_keys  # noqa: E402
from forebay.testing.fault import FaultPlan, FaultTier  # noqa: E402
from forebay.types import HOST  # noqa: E402

pytestmark = pytest.mark.model
B = BLOCK_TOKENS


def test_damaged_files_are_set_aside_and_the_rest_is_computed(tmp_path: Path) -> None:
    tokens = prompt(20 * B + 5)
    with file_runner(tmp_path / "pool") as runner:
        expected = runner.generate(tokens, 10).tokens
        keys = block_keys(runner.namespace, tokens)
    files = {path.stem: path for path in (tmp_path / "pool").rglob("*.kv")}
    flipped, short = files[keys[6].hex()], files[keys[11].hex()]
    content = bytearray(flipped.read_bytes())
    content[len(content) // 2] ^= 1
    flipped.write_bytes(content)
    short.write_bytes(short.read_bytes()[:1000])
    with file_runner(tmp_path / "pool") as runner:
        done = runner.generate(tokens, 10)
        assert done.tokens == expected
        assert hits(done) == {"file": 6 * B}
        quarantined = sorted(path.name.split(".")[0] for path in (tmp_path / "pool" / "quarantine").iterdir())
        assert quarantined == sorted([keys[6].hex(), keys[11].hex()])
        settle(runner)
        make_cold(runner)
        mended = runner.generate(tokens, 10)
        assert mended.tokens == expected
        assert hits(mended) == {"file": 20 * B}


@pytest.mark.parametrize(
    "tokens",
    [
        np.array(prompt(20), dtype=np.int64) + 2**32,
        np.array(prompt(20)) + 0.9,
        np.array([-1] * 20),
        [-1] * 20,
        [256] * 20,
        [2**70],
        np.array([prompt(20)]),
        "hello",
    ],
    ids=["wraps", "fractions", "negative", "negative list", "vocabulary", "huge", "two axes", "text"],
)
def test_what_is_no_token_id_is_refused_and_harms_nothing(tokens: object) -> None:
    with runner_over([memory_tier()]) as runner:
        with pytest.raises(ValueError, match="token"):
            runner.generate(tokens, 2)  # type: ignore[arg-type]
        assert runner.generate(np.array(prompt(20)), 2).tokens == recomputed(runner, prompt(20), 2)


def test_a_closed_runner_says_so_and_closes_again(tmp_path: Path) -> None:
    runner = file_runner(tmp_path / "pool")
    runner.generate(prompt(20), 2)
    runner.close()
    for call in (lambda: runner.generate(prompt(20, seed=1), 2), runner.flush, runner.drop_device):
        with pytest.raises(RuntimeError, match="the runner is closed"):
            call()
    runner.close()


def test_a_store_whose_writes_all_fail_costs_hits_only() -> None:
    tier = WrappedTier(memory_tier())
    tier.refuses_writes = True
    with runner_over([tier], device_blocks=6, host_slots=6) as runner:
        for _ in range(3):
            for seed in range(3):
                tokens = prompt(15 * B, seed=seed)
                assert runner.generate(tokens, 4).tokens == recomputed(runner, tokens, 4)
        settle(runner)


def test_a_tier_that_vanishes_is_a_recompute() -> None:
    tier = WrappedTier(memory_tier())
    with runner_over([tier]) as runner:
        tokens = prompt(15 * B)
        expected = runner.generate(tokens, 4).tokens
        make_cold(runner)
        tier.gone = True
        done = runner.generate(tokens, 4)
        assert done.tokens == expected
        assert hits(done) == {}
        assert hits(runner.generate(tokens, 4)) == {DEVICE: 15 * B - 1}
        tier.gone = False
        settle(runner)


def test_roots_that_vanish_are_a_recompute(tmp_path: Path) -> None:
    with file_runner(tmp_path / "pool") as runner:
        tokens = prompt(15 * B)
        expected = runner.generate(tokens, 4).tokens
        make_cold(runner)
        (tmp_path / "pool").rename(tmp_path / "elsewhere")
        done = runner.generate(tokens, 4)
        assert done.tokens == expected
        assert hits(done) == {}


def test_a_tier_that_hangs_is_a_recompute_after_the_deadline() -> None:
    tier = WrappedTier(memory_tier())
    runner = runner_over([tier], device_blocks=20, load_deadline_s=0.05)
    tokens = prompt(15 * B + 1)
    expected = runner.generate(tokens, 4).tokens
    make_cold(runner)
    tier.may_read.clear()
    done = runner.generate(tokens, 4, request_id="same")
    assert done.tokens == expected
    assert hits(done) == {}
    assert runner.generate(tokens, 4, request_id="same").tokens == expected  # while the first load still hangs
    tier.may_read.set()
    settle(runner)
    assert runner.store.device.free_blocks + runner.store.device.hot_blocks == 20
    runner.close()


def test_an_interrupted_generation_leaves_the_store_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = WrappedTier(memory_tier())
    runner = runner_over([tier], window_blocks=2)
    tokens = prompt(15 * B + 1)
    expected = runner.generate(tokens, 4).tokens
    make_cold(runner)
    wait = runner.store.engine.wait

    def interrupted(until_ns: int) -> None:
        raise KeyboardInterrupt

    tier.may_read.clear()
    monkeypatch.setattr(runner.store.engine, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        runner.generate(tokens, 4)
    monkeypatch.setattr(runner.store.engine, "wait", wait)
    tier.may_read.set()
    settle(runner)
    assert runner.store.device.free_blocks + runner.store.device.hot_blocks == 64
    again = runner.generate(tokens, 4)
    assert again.tokens == expected
    assert sum(hits(again).values()) == 15 * B
    runner.close()


@pytest.mark.parametrize("seed", range(3))
def test_random_faults_never_change_a_token(seed: int) -> None:
    plan = FaultPlan(
        seed=seed, unavailable=0.05, read_failed=0.1, read_missing=0.1, read_corrupt=0.1, write_failed=0.1,
        write_full=0.1, delete_failed=0.1,
    )  # fmt: skip
    tier = FaultTier(memory_tier(30), plan)
    with runner_over([tier], device_blocks=8, host_slots=8) as runner:
        expected = {seed: recomputed(runner, prompt(12 * B + 3, seed), 4) for seed in range(3)}
        for round_ in range(4):
            for prefix, tokens in expected.items():
                assert runner.generate(prompt(12 * B + 3, prefix), 4).tokens == tokens, f"round {round_}"
                runner.store.engine.check()
            make_cold(runner)
        runner.flush()
        assert sum(tier.injected.values()) > 0


def test_copies_that_fail_are_a_recompute(monkeypatch: pytest.MonkeyPatch) -> None:
    with runner_over([memory_tier()]) as runner:
        tokens = prompt(15 * B)
        expected = runner.generate(tokens, 4).tokens
        runner.drop_device()
        device = runner.store.device
        monkeypatch.setattr(device, "_slot_bytes", device._slot_bytes[:, :-1])  # every copy raises
        done = runner.generate(tokens, 4)
        assert done.tokens == expected
        assert hits(done) == {}
        monkeypatch.undo()
        runner.drop_device()
        assert hits(runner.generate(tokens, 4)) == {HOST: 15 * B - 1}
        settle(runner)
