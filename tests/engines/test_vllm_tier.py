"""Forebay as a secondary tier of vLLM's native offloading, with the real vLLM: tokens must be those of a recompute."""

from __future__ import annotations

import logging
import random
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from native_kit import BLOCK_TOKENS, Tokens, engine, prompt, tier
from pool_files import DAMAGES, block_files, stored_bytes

B = BLOCK_TOKENS
LENGTHS = (1, B - 1, B, 3 * B, 3 * B + 1, 3000)
COMMON = prompt(50, 20 * B)
PROMPTS = [prompt(seed, tokens) for seed, tokens in enumerate(LENGTHS)] + [
    COMMON + prompt(60 + tail, 5 + 40 * tail) for tail in range(4)
]
LONG = [prompt(100 + i, 10 * B + 7) for i in range(4)]
LIBRARY = [COMMON[: B * blocks] + prompt(500 + i, i % (2 * B)) for i, blocks in enumerate(range(1, 13))] + [
    prompt(600 + i, 1 + i * B // 2) for i in range(12)
]


@dataclass(frozen=True)
class Filled:
    """A pool that an engine, now gone, has filled, and what it and an engine without a pool said."""

    model: Path
    pool: Path
    answers: list[Tokens]
    long_answers: list[Tokens]
    filler_answers: list[Tokens]

    def copy(self, to: Path) -> Path:
        """A pool of one's own to damage."""
        return Path(shutil.copytree(self.pool, to))


@pytest.fixture(scope="module")
def filled(make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Filled:
    model, pool = make_model(), tmp_path_factory.mktemp("pools") / "pool"
    with engine(model) as plain:
        answers, long_answers = plain.answer(PROMPTS), plain.answer(LONG)
    with engine(model, tier(pool)) as filler:
        filler_answers = filler.answer(PROMPTS) + filler.answer(LONG)
        filler.flush()
    return Filled(model, pool, answers, long_answers, filler_answers)


def test_a_new_engine_on_a_filled_pool_says_the_same(filled: Filled, tmp_path: Path) -> None:
    with engine(filled.model) as plain:
        others = plain.answer([prompt(7, B) + tokens[B:] for tokens in LONG])
    different = [other != own for other, own in zip(others, filled.long_answers, strict=True)]
    assert all(different), "answers depend on the first block: with wrong KV they would be wrong"
    assert filled.filler_answers == filled.answers + filled.long_answers
    pool = filled.copy(tmp_path / "pool")
    with logged() as lines, engine(filled.model, tier(pool)) as restored:
        assert restored.answer(PROMPTS) == filled.answers
        check_documented_metrics()
        for start in (f"root {pool}: ", f"pool {pool}: ", "huge pages: "):  # as docs/vllm.md says
            assert any(line.startswith(start) for line in lines), start
        whole_blocks = (
            sum(len(tokens) // B for tokens in PROMPTS[:6])
            + len(COMMON) // B
            + sum((5 + 40 * tail) // B for tail in range(4))
        )
        assert restored.hits >= whole_blocks - len(PROMPTS), "nearly all came from the pool"
        assert restored.metric("vllm:kv_offload_tiering_read_bytes", tier="1:forebay") > 0
        assert restored.metric("vllm:forebay_tier_used_bytes") > 0
        assert restored.metric("vllm:forebay_tier_failed_blocks") == 0


@contextmanager
def logged() -> Iterator[list[str]]:
    """What Forebay logs at INFO."""
    lines: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    ours, collect = logging.getLogger("forebay"), Collect()
    level = ours.level
    ours.addHandler(collect)
    ours.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        ours.removeHandler(collect)
        ours.setLevel(level)


def check_documented_metrics() -> None:
    """docs/vllm.md lists the tier's metrics, all of them, and vLLM's own that say what it does."""
    from prometheus_client import REGISTRY

    document = (Path(__file__).parents[2] / "docs" / "vllm.md").read_text()
    documented = set(re.findall(r"`(vllm:(?:external_prefix|kv_offload|forebay_tier)\w+)", document))
    there = {family.name for family in REGISTRY.collect()}
    assert documented <= there, documented - there
    own = {name for name in there if name.startswith("vllm:forebay_tier_") and not name.endswith("_created")}
    assert own == {name for name in documented if name.startswith("vllm:forebay_tier_")}


def test_answers_without_asking_when_the_pool_is_not_shared(filled: Filled, tmp_path: Path) -> None:
    pool = filled.copy(tmp_path / "pool")
    with engine(filled.model, tier(pool, shared=False, eviction="lrfu")) as restored:
        assert restored.answer(PROMPTS) == filled.answers
        assert restored.hits > 0


def test_damage_costs_a_recompute_and_no_token(filled: Filled, tmp_path: Path) -> None:
    """Three blocks of three long prompts: a flipped byte, a cut, a deletion."""
    pool = filled.copy(tmp_path / "pool")
    blocks_each = len(LONG[0]) // B
    files = block_files(pool)
    newest = files[-blocks_each * 4 :]
    size_bytes = newest[0].stat().st_size
    for at, path in enumerate(newest):
        if at % 3 == 0:
            with path.open("r+b") as file:
                file.seek(4096 + 1000)
                byte = file.read(1)[0]
                file.seek(4096 + 1000)
                file.write(bytes([byte ^ 0x10]))
        elif at % 3 == 1:
            with path.open("r+b") as file:
                file.truncate(size_bytes // 2)
        elif at % 2 == 0:
            path.unlink()
    with engine(filled.model, tier(pool)) as restored:
        assert restored.answer(LONG) == filled.long_answers
        assert restored.answer(PROMPTS) == filled.answers
        restored.flush()
        assert restored.metric("vllm:forebay_tier_failed_blocks", kind="read", outcome="corrupt") > 0
    assert list((pool / "quarantine").iterdir()), "damage is set aside, not served again"
    with engine(filled.model, tier(pool)) as again:
        assert again.answer(LONG) == filled.long_answers
        assert again.metric("vllm:forebay_tier_failed_blocks", kind="read") == 0


def test_other_weights_at_the_same_path_find_nothing(make_model: Callable[..., Path], tmp_path: Path) -> None:
    model = make_model(seed=1)
    with engine(model, tier(tmp_path / "pool")) as first:
        before = first.answer(LONG)
        first.flush()
    make_model(seed=2, path=model)
    with engine(model) as plain:
        expected = plain.answer(LONG)
    assert expected != before
    with engine(model, tier(tmp_path / "pool")) as second:
        assert second.answer(LONG) == expected
        assert second.hits == 0


def test_other_salt_other_block_size_and_other_dtype_find_nothing(filled: Filled, tmp_path: Path) -> None:
    pool = filled.copy(tmp_path / "pool")
    with engine(filled.model, tier(pool)) as salted:
        assert salted.answer(LONG, cache_salt="somebody else") == filled.long_answers
        assert salted.hits == 0
    with engine(filled.model, tier(pool), block_size=2 * B) as coarse:
        assert coarse.answer(LONG) == filled.long_answers
        assert coarse.hits == 0
    with engine(filled.model, tier(pool), dtype="bfloat16") as rounded:
        rounded.answer(LONG)
        assert rounded.hits == 0


def test_capacity_holds_while_more_is_stored(filled: Filled, tmp_path: Path) -> None:
    pool, blocks = tmp_path / "pool", 24
    block_bytes = block_files(filled.pool)[0].stat().st_size
    capacity_gib = blocks * block_bytes / 2**30
    most_bytes: list[int] = []
    with engine(filled.model, tier(pool, capacity_gib=capacity_gib)) as small:
        for tokens, expected in zip(LONG, filled.long_answers, strict=True):
            assert small.answer([tokens]) == [expected]
            small.flush()
            most_bytes.append(stored_bytes(pool))
        assert small.metric("vllm:forebay_tier_dropped_blocks", reason="evicted") > 0
    assert max(most_bytes) <= blocks * block_bytes
    with engine(filled.model, tier(pool, capacity_gib=capacity_gib)) as restored:
        assert restored.answer(LONG[-1:]) == filled.long_answers[-1:]
        assert restored.hits == len(LONG[-1]) // B, "the last prompt stayed"


def test_preemption_overwrites_nothing_that_is_still_being_stored(filled: Filled, tmp_path: Path) -> None:
    hungry = [prompt(400 + i, 6 * B + i) for i in range(6)]
    few_blocks = {"num_gpu_blocks_override": 34, "max_model_len": 1024, "scheduler_reserve_full_isl": False}
    with engine(filled.model) as plain:
        expected = plain.answer(hungry, max_tokens=4 * B)
    with engine(filled.model, tier(tmp_path / "pool"), **few_blocks) as short:
        assert short.answer(hungry, max_tokens=4 * B) == expected
        assert short.metric("vllm:num_preemptions") > 0
        short.flush()
    with engine(filled.model, tier(tmp_path / "pool")) as next_one:
        assert next_one.answer(hungry, max_tokens=4 * B) == expected
        assert next_one.hits >= 5 * len(hungry)


def test_an_abort_in_the_middle_of_a_load_leaves_nothing_behind(filled: Filled, tmp_path: Path) -> None:
    with engine(filled.model, tier(filled.copy(tmp_path / "pool"))) as running:
        for steps, tokens in enumerate(LONG):
            running.give_up(tokens, after_steps=steps + 1)
            assert running.answer(PROMPTS[2:4]) == filled.answers[2:4]
        assert running.answer(LONG) == filled.long_answers
        running.flush()
        assert running.metric("vllm:forebay_tier_open_jobs") == 0


def test_random_schedules(filled: Filled, tmp_path: Path) -> None:
    """Requests that share prefixes come, go and are aborted, while blocks are damaged and memory is emptied."""
    pool = filled.copy(tmp_path / "pool")
    with engine(filled.model) as plain:
        expected = [plain.answer([tokens])[0] for tokens in LIBRARY]
    with engine(filled.model, tier(pool), num_gpu_blocks_override=640) as running:
        for seed in range(200):
            draw = random.Random(seed)
            sent: dict[str, int] = {}
            for number in range(draw.randint(1, 5)):
                request_id, choice = f"{seed}-{number}", draw.randrange(len(LIBRARY))
                sent[request_id] = choice
                running.send(request_id, LIBRARY[choice])
                for _ in range(draw.randint(0, 4)):
                    running.step()
                if draw.random() < 0.25:
                    given_up = draw.choice(sorted(sent))
                    running.abort(given_up)
                    del sent[given_up]
                if draw.random() < 0.2:
                    with suppress(FileNotFoundError):  # set aside meanwhile, for an earlier damage
                        draw.choice(DAMAGES)(draw.choice(block_files(pool)))
            running.finish()
            assert {name: running.answers[name] for name in sent} == {
                name: expected[choice] for name, choice in sent.items()
            }, seed
            running.answers.clear()
            running.check_at_rest()
            if draw.random() < 0.7:
                running.make_cold()
                running.end_doubts()
        assert running.hits > 200, "blocks came from the pool"
        assert running.metric("vllm:forebay_tier_failed_blocks", kind="read", outcome="corrupt") > 0


def test_a_pool_that_vanishes_under_load(filled: Filled, tmp_path: Path) -> None:
    pool = filled.copy(tmp_path / "pool")
    with engine(filled.model, tier(pool, shared=False)) as restored:
        gone = threading.Thread(target=lambda: pool.rename(tmp_path / "elsewhere"))
        gone.start()
        assert restored.answer(PROMPTS + LONG) == filled.answers + filled.long_answers
        gone.join()
        assert restored.answer([[*tokens[:-1], 3] for tokens in LONG])
        restored.flush()
        assert restored.answer(LONG) == filled.long_answers
        counted = ("failed", "dropped", "refused")
        assert sum(restored.metric(f"vllm:forebay_tier_{what}_blocks") for what in counted) > 0


def test_bad_options_are_named(filled: Filled, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="capacity_gb"), engine(filled.model, tier(tmp_path / "pool", capacity_gb=3)):
        pass
