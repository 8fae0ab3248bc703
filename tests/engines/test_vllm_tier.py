"""Forebay as a secondary tier of vLLM's native offloading, with the real vLLM: tokens must be those of a recompute."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from model_kit import save_model, write_adapter
from native_kit import BLOCK_TOKENS, Engine, Tokens, engine, prompt, tier
from pool_files import DAMAGES, block_files, remove, stored_bytes
from schedule_kit import run_schedules

from forebay.errors import ConfigError

B = BLOCK_TOKENS
LENGTHS = (1, B - 1, B, 3 * B, 3 * B + 1, 3000)
COMMON = prompt(50, 20 * B)
PROMPTS = [prompt(seed, tokens) for seed, tokens in enumerate(LENGTHS)] + [
    COMMON + prompt(60 + tail, 5 + 40 * tail) for tail in range(4)
]
LONG = [prompt(100 + i, 10 * B + 7) for i in range(4)]
OTHER_START = [prompt(7, B) + tokens[B:] for tokens in LONG]
DAMAGED = [prompt(300 + i, 10 * B + 7) for i in range(3)]
HUNGRY = [prompt(400 + i, 6 * B + i) for i in range(6)]
"""With 4 blocks of answer each, more than a small device has room for."""
LIBRARY = [COMMON[: B * blocks] + prompt(500 + i, i % (2 * B)) for i, blocks in enumerate(range(1, 13))] + [
    prompt(600 + i, 1 + i * B // 2) for i in range(12)
]


def loadable(*prompts: list[int]) -> int:
    """Blocks of prompts that can come from the pool: all that are full, one of several prompts once."""
    return len({tuple(tokens[:end]) for tokens in prompts for end in range(B, len(tokens) + 1, B)})


@dataclass(frozen=True)
class Filled:
    """A pool that an engine, now gone, has filled, and what it and an engine without a pool said."""

    model: Path
    pool: Path
    filler_answers: list[Tokens]
    answers: list[Tokens]
    long_answers: list[Tokens]
    other_start_answers: list[Tokens]
    library_answers: list[Tokens]
    damaged_answers: list[Tokens]
    hungry_answers: list[Tokens]

    def copy(self, to: Path) -> Path:
        """A pool of one's own to damage."""
        return Path(shutil.copytree(self.pool, to))


@pytest.fixture(scope="module")
def filled(make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Filled:
    model, pool = make_model(), tmp_path_factory.mktemp("pools") / "pool"
    with engine(model, tier(pool)) as filler:
        filler_answers = filler.answer(PROMPTS) + filler.answer(LONG)
        filler.check_at_rest()
    with engine(model) as plain:
        return Filled(
            model,
            pool,
            filler_answers,
            plain.answer(PROMPTS),
            plain.answer(LONG),
            plain.answer(OTHER_START),
            plain.answer(LIBRARY),
            plain.answer(DAMAGED),
            plain.answer(HUNGRY, max_tokens=4 * B),
        )


def test_a_new_engine_on_a_filled_pool_says_the_same(filled: Filled, tmp_path: Path) -> None:
    assert not set(filled.other_start_answers) & set(filled.long_answers), "wrong KV would show"
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


class TestOneEngine:
    """One vLLM that starts on a filled pool, and that every test leaves well. (There can be only one in a process.)"""

    @pytest.fixture(scope="class")
    def pool(self, filled: Filled, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return filled.copy(tmp_path_factory.mktemp("copy") / "pool")

    @pytest.fixture(scope="class")
    def running(self, filled: Filled, pool: Path) -> Iterator[Engine]:
        with engine(filled.model, tier(pool), num_gpu_blocks_override=640) as running:
            yield running

    @pytest.mark.parametrize("case", range(len(DAMAGES)))
    def test_a_damaged_block_in_the_middle_costs_a_recompute_and_is_mended(
        self, filled: Filled, running: Engine, pool: Path, case: int
    ) -> None:
        tokens, expected, damage = DAMAGED[case], [filled.damaged_answers[case]], DAMAGES[case]
        assert running.answer([tokens]) == expected
        running.make_cold()
        file = running.file_of(pool, tokens, 5)
        sound = file.read_bytes()
        damage(file)
        outcomes = {f"failed_blocks kind=read outcome={outcome}" for outcome in ("corrupt", "missing", "failed")}
        kinds = ("events kind=payload-checksum", "events kind=wrong-length")
        with running.growth(*outcomes, *kinds) as grown:
            assert running.answer([tokens]) == expected
        outcome = "missing" if damage is remove else "corrupt"
        met = {
            f"failed_blocks kind=read outcome={outcome}",
            *(k for k, d in zip(kinds, DAMAGES, strict=False) if d is damage),
        }
        assert {name for name, times in grown.items() if times == 1} == met
        assert sum(grown.values()) == len(met)
        running.make_cold()
        assert file.read_bytes()[-1000:] == sound[-1000:], "stored again, as it was"
        running.end_doubts()
        with running.growth("hits", "failed_blocks") as grown:
            assert running.answer([tokens]) == expected
        assert grown == {"hits": loadable(tokens), "failed_blocks": 0}
        running.check_at_rest()

    def test_an_abort_in_the_middle_of_a_load_leaves_nothing_behind(self, filled: Filled, running: Engine) -> None:
        for steps_into_the_load in range(6):
            running.make_cold()
            running.send("given up", PROMPTS[5])
            running.step_until_loading()
            for _ in range(steps_into_the_load):
                running.step()
            assert "given up" not in running.answers
            running.abort("given up")
            running.send("other", LONG[0])
            running.finish()
            assert running.answers == {"other": filled.long_answers[0]}
            running.answers.clear()
            running.check_at_rest()
        assert running.answer([PROMPTS[5]]) == [filled.answers[5]]

    def test_random_schedules(self, filled: Filled, running: Engine, pool: Path) -> None:
        counted = ("hits", "failed_blocks kind=read outcome=corrupt")
        with running.growth(*counted) as grown:
            run_schedules(running, LIBRARY, filled.library_answers, pool)
        assert grown["hits"] > 500, "blocks came from the pool"
        assert grown[counted[1]] > 0, "damage was met by loads"


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
    with engine(filled.model, dtype="bfloat16") as plain:
        expected = plain.answer(LONG)
    with engine(filled.model, tier(pool), dtype="bfloat16") as rounded:
        assert rounded.answer(LONG) == expected
        assert rounded.hits == 0


def test_adapters_are_known_by_name(filled: Filled, tmp_path: Path) -> None:
    from vllm.lora.request import LoRARequest

    path = write_adapter(tmp_path / "adapter", 1)
    first, renamed = LoRARequest("first", 1, str(path)), LoRARequest("renamed", 2, str(path))
    other = LoRARequest("other", 3, str(write_adapter(tmp_path / "other", 2)))
    with engine(filled.model, tier(tmp_path / "pool"), enable_lora=True) as running:
        assert running.answer(LONG) == filled.long_answers
        computed: dict[str, list[Tokens]] = {}
        for adapter, hits in (
            (first, 0), (other, 0), (first, loadable(*LONG)), (renamed, 0), (other, loadable(*LONG)),
        ):  # fmt: skip
            running.make_cold()
            with running.growth("hits") as grown:
                answers = running.answer(LONG, lora=adapter)
            assert grown == {"hits": hits}
            assert answers == computed.setdefault(adapter.lora_path, answers)
        assert not set(computed[first.lora_path]) & set(computed[other.lora_path])
        assert not set(filled.long_answers) & {answer for answers in computed.values() for answer in answers}
        running.check_at_rest()


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
    few_blocks = {"num_gpu_blocks_override": 34, "max_model_len": 1024, "scheduler_reserve_full_isl": False}
    with engine(filled.model, tier(tmp_path / "pool"), **few_blocks) as short:
        assert short.answer(HUNGRY, max_tokens=4 * B) == filled.hungry_answers
        assert short.metric("vllm:num_preemptions") > 0
        short.check_at_rest()
    with engine(filled.model, tier(tmp_path / "pool")) as next_one:
        assert next_one.answer(HUNGRY, max_tokens=4 * B) == filled.hungry_answers
        assert next_one.hits >= 5 * len(HUNGRY)
        next_one.check_at_rest()


@pytest.mark.parametrize("shared", [True, False])
def test_a_pool_that_vanishes_under_load_costs_recomputes(filled: Filled, tmp_path: Path, shared: bool) -> None:
    pool = filled.copy(tmp_path / "pool")
    with engine(filled.model, tier(pool, shared=shared)) as running:
        for i, tokens in enumerate(LONG):
            running.send(f"load-{i}", tokens)
        running.step_until_loading()
        pool.rename(tmp_path / "away")
        running.finish()
        assert [running.answers.pop(f"load-{i}") for i in range(len(LONG))] == filled.long_answers
        lost = "failed_blocks kind=read outcome=missing"
        with running.growth(lost, "failed_blocks kind=read") as grown:
            assert running.answer(PROMPTS) == filled.answers
        assert grown == dict.fromkeys(grown, loadable(*PROMPTS))
        assert running.metric("vllm:forebay_tier_events", kind="vanished") > 0
        running.check_at_rest()
        assert not pool.exists(), "no new pool appears where the old one was mounted"
        (tmp_path / "away").rename(pool)
        running.make_cold()
        assert running.answer(OTHER_START) == filled.other_start_answers
        assert running.metric("vllm:forebay_tier_events", kind="returned") > 0
        running.make_cold()
        running.end_doubts()
        with running.growth("hits", "failed_blocks") as grown:
            assert running.answer(PROMPTS) == filled.answers
            assert running.answer(OTHER_START) == filled.other_start_answers
        assert grown == {"hits": loadable(*PROMPTS, *OTHER_START), "failed_blocks": 0}
        running.check_at_rest()


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("sliding", "SlidingWindowSpec"),
        ("sliding and full", "2 block tables"),
        ("states and full", "2 block tables"),
        ("latent", "latent attention on a CPU"),
    ],
)
def test_models_that_cannot_be_restored_exactly_are_refused(tmp_path: Path, family: str, words: str) -> None:
    starting = engine(save_model(family, tmp_path / "model"), tier(tmp_path / "pool"), dtype="bfloat16")
    with pytest.raises(ConfigError, match=words), starting:
        pass


def test_bad_options_are_named(filled: Filled, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="capacity_gb"), engine(filled.model, tier(tmp_path / "pool", capacity_gb=3)):
        pass
