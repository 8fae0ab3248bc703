"""Rules that say how much of a hit is loaded under vLLM."""

from __future__ import annotations

import pytest

from forebay.assemble import Named, open_chooser
from forebay.connectors.vllm.choosers import Choice, Chooser, Loaded
from forebay.errors import ConfigError


def measured(prefill_tokens_per_s: float) -> Chooser:
    chooser: Chooser = open_chooser(Named(kind="measured", options={"prefill_tokens_per_s": prefill_tokens_per_s}))
    return chooser


def choice(stored: int, loading: int = 0) -> Choice:
    return Choice("r", stored, 0, stored, loading)


def test_everything_is_loaded_until_loads_were_timed() -> None:
    chooser = measured(1e9)
    for _ in range(3):
        assert chooser.choose(choice(640)) == 640
        chooser.loaded(Loaded(640, 0, 1.0))
    assert chooser.choose(choice(640)) == 0


def test_a_request_behind_a_long_queue_is_computed_meanwhile() -> None:
    """Loads bring 10,000 tokens/s, the accelerator 2,000: behind four times as much the two are level."""
    chooser = measured(2_000)
    for ahead in (0, 5_000, 10_000):
        chooser.loaded(Loaded(1_000, ahead, (ahead + 1_000) / 10_000))
    assert chooser.choose(choice(1_000, loading=4_000)) == 1_000
    assert chooser.choose(choice(1_000, loading=4_100)) == 0
    assert chooser.choose(choice(2_000, loading=4_100)) == 2_000


def test_a_disk_that_was_slow_once_is_tried_again() -> None:
    chooser = measured(2_000)
    for _ in range(3):
        chooser.loaded(Loaded(1_000, 0, 100.0))
    tries = [chooser.choose(choice(1_000)) for _ in range(66)]
    assert [at for at, tokens in enumerate(tries) if tokens] == [32, 65]
    for _ in range(16):
        chooser.loaded(Loaded(1_000, 0, 0.01))
    assert chooser.choose(choice(1_000)) == 1_000


@pytest.mark.parametrize("options", [{}, {"prefill_tokens_per_s": 0}, {"prefill_tokens_per_s": float("inf")}])
def test_a_speed_has_to_be_given(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="prefill_tokens_per_s"):
        open_chooser(Named(kind="measured", options=options))
    with pytest.raises(ConfigError, match="choosers"):
        open_chooser(Named(kind="nosuch"))
