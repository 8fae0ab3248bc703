"""Summaries, the headline, and what is claimed of each way."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from record_kit import TTFT_S, measurement, measurements, record

from forebay.bench.demo import audit
from forebay.bench.demo.results import Damage, Way, headline, nearest_rank, summarise
from forebay.bench.evidence import Verdict
from forebay.bench.units import bytes_text, factor_text, parse_bytes, seconds_text
from forebay.errors import ConfigError


def test_a_summary_is_what_its_measurements_say() -> None:
    recompute, disk, dram = summarise(measurements())
    assert [each.way for each in (recompute, disk, dram)] == list(Way)
    assert (recompute.ttft_p50_s, recompute.ttft_p99_s, recompute.speedup) == (15.0, 20.0, 1.0)
    assert (recompute.restored_bytes, recompute.restore_gb_per_s, recompute.restore_p50_s) == (0, None, None)
    assert (disk.ttft_p50_s, disk.ttft_p99_s, disk.speedup) == (0.75, 1.0, 20.0)
    assert (dram.ttft_p50_s, dram.speedup) == (0.375, 40.0)
    assert disk.hit_tokens == {"file": 1920}
    assert disk.computed_tokens == 80
    assert disk.restore_gb_per_s == pytest.approx(1_920_000 / 1e9 / 0.2)
    assert disk.answer_tokens_per_s == pytest.approx(4 / 2.0)
    assert disk.total_tokens_per_s == pytest.approx(6 / (3 * TTFT_S[Way.DISK] + 2.0))


def test_answers_of_one_token_have_no_rate() -> None:
    found = [measurement(1, way, tokens=(5,), total_s=TTFT_S[way]) for way in Way]
    assert all(each.answer_tokens_per_s is None for each in summarise(found))


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.01, 1))
def test_nearest_rank_is_a_value_that_enough_do_not_exceed(values: list[float], share: float) -> None:
    found = nearest_rank(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values) - 1e-9


def test_the_headline_says_what_was_found_and_whether_it_holds() -> None:
    found = summarise(measurements())
    good = headline(found, 960, verdict=Verdict.of(()), tokens_equal=True)
    assert good == (
        "Restoring 960 tokens from cold disk gave the first token 20x sooner than recomputing them; "
        "the tokens are equal."
    )
    assert "DIFFER" in headline(found, 960, verdict=Verdict.of(()), tokens_equal=False)
    assert headline(found, 960, verdict=Verdict.of(("x",)), tokens_equal=True).startswith("INVALID")
    slow = summarise([measurement(1, way, ttft_s=4.0 if way is Way.DISK else 2.0) for way in Way])
    assert "took 2.0x as long" in headline(slow, 960, verdict=Verdict.of(()), tokens_equal=True)


def claims(*found: object, damage: Damage | None = None) -> tuple[str, ...]:
    return audit.broken_claims(found, tier="file", restorable_tokens=960, damage=damage or Damage())  # type: ignore[arg-type]


def test_each_way_has_to_be_what_it_is_called() -> None:
    assert claims(*measurements()) == ()
    warm = measurement(1, Way.DISK, hit_tokens={"file": 900, "host": 60})
    assert claims(warm) == ("session 1, from cold disk: tokens came from host",)
    reused = measurement(2, Way.RECOMPUTE, hit_tokens={"device": 960}, computed_tokens=40)
    assert claims(reused) == ("session 2, recompute: tokens came from device",)
    lossy = measurement(1, Way.DRAM, computed_tokens=1)
    assert "do not make the prompt" in claims(lossy)[0]


def test_fewer_hits_are_honest_only_when_the_store_found_damage() -> None:
    partial = measurement(1, Way.DISK, hit_tokens={"file": 320}, computed_tokens=680)
    nothing = measurement(1, Way.DISK, hit_tokens={}, computed_tokens=1000)
    damage = Damage(corrupt_blocks=1)
    assert claims(partial) == ("session 1, from cold disk: restored 320 of 960 tokens",)
    assert claims(partial, damage=damage) == ()
    assert claims(nothing, damage=damage) == ("session 1, from cold disk: restored 0 of 960 tokens",)
    said = audit.notes(
        [partial], recomputed_tokens=0, restorable_tokens=960, damage=damage, pool=record().pool, virtual_machine=False
    )
    assert any("only 320 of 960 tokens" in note for note in said)


@pytest.mark.parametrize(
    ("tokens", "place"),
    [((5, 9, 7), "from token 2 on"), ((5, 6), "from token 3 on"), ((5, 6, 7, 8), "from token 4 on")],
)
def test_a_difference_is_named_with_its_place(tokens: tuple[int, ...], place: str) -> None:
    found = [*measurements()[:-1], measurement(2, Way.DRAM, tokens=tokens)]
    assert audit.differences(found) == {2: f"session 2: the answer from DRAM differs {place}"}
    assert audit.differences(measurements()) == {}


@pytest.mark.parametrize(
    ("text", "expected"),
    [("2GiB", 2 * 2**30), ("2 gb", 2 * 10**9), ("1.5MiB", 3 * 2**19), ("4096B", 4096), (" 3 kB ", 3000)],
)
def test_sizes_are_read_with_their_unit(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "12", "GiB", "1 parsec", "-1GB", "1,5GB", "1GB 2"])
def test_a_size_without_a_unit_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="number and its unit"):
        parse_bytes(text)


def test_figures_have_units_and_sensible_digits() -> None:
    assert [bytes_text(n) for n in (None, 12, 999_999, 2 * 2**30)] == ["–", "12 B", "1000.00 kB", "2.15 GB"]
    assert [seconds_text(n) for n in (None, 0.0123, 0.5324, 14.83)] == ["–", "12.3 ms", "0.532 s", "14.8 s"]
    assert [factor_text(n) for n in (None, 1.0, 9.94, 21.4)] == ["–", "1.0x", "9.9x", "21x"]
