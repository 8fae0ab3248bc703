"""Load or compute: the decisions of the engine against the best there are, and what a host may rely on."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.accelerator import Accelerator
from forebay.bench.choice.grid import Cell, judge
from forebay.bench.choice.host import Host, Prefill, Source, Storm
from forebay.choice import ChoiceOptions, Chooser, LoadOrCompute, Prefix, check_choice_options
from forebay.engine import EngineOptions
from forebay.errors import ConfigError
from forebay.events import ChoiceReason, Chosen, Event
from forebay.flow import Flow, FlowOptions
from forebay.types import BlockKey, Channel, Request

SECOND_NS = 1_000_000_000
FAST, SLOW = Channel("fast", 0), Channel("slow", 0)
BLOCK_TOKENS, BLOCK_BYTES = 100, 1_000_000


def chooser(fast: float = 1e9, slow: float = 1e8, prefill: float | None = 10_000, **more: object) -> Chooser:
    """`fast` and `slow` in bytes a second, `prefill` in tokens a second."""
    flow = Flow(FlowOptions(), BLOCK_BYTES)
    flow.assume("fast", fast, 0)
    flow.assume("slow", slow, 0)
    return Chooser(ChoiceOptions(prefill_tokens_per_s=prefill, **more), flow, BLOCK_TOKENS, BLOCK_BYTES)


def request(blocks: int, name: str = "r", new_tokens: int = 10) -> Request:
    keys = tuple(BlockKey(bytes([at]) * 32) for at in range(blocks))
    return Request(name, keys, tokens=blocks * BLOCK_TOKENS + new_tokens)


@pytest.mark.parametrize(
    "cell",
    [
        Cell(prefill_tokens_per_s=rate, bytes_per_s=bandwidth, context_tokens=context, sessions=sessions)
        for rate, bandwidth, context, sessions in (
            (2_000.0, 0.5e9, 16_384, 1),
            (128_000.0, 0.5e9, 4_096, 1),
            (128_000.0, 8e9, 65_536, 4),
            (32_000.0, 2e9, 16_384, 4),
            (8_000.0, 8e9, 131_072, 4),
            (128_000.0, 2e9, 4_096, 4),
        )
    ]
    + [
        Cell(
            prefill_tokens_per_s=rate, bytes_per_s=2e9, context_tokens=131_072, sessions=1, slow_share=slow,
            host_share=host,
        )
        for rate, slow, host in ((8_000.0, 0.25, 0.0), (32_000.0, 0.5, 0.25))
    ],
)  # fmt: skip
def test_regret_is_small(cell: Cell) -> None:
    """A part of the grid of `bench/load_or_compute.py`."""
    judged = judge(cell)
    assert judged.regret <= 0.05
    assert judged.regret_of_ends <= 0.05


def storm(rate: float, block_s: float, sessions: int, new_tokens: int) -> Storm:
    return Storm(
        sessions=sessions,
        block_tokens=512,
        sources=(Source(name="fast", blocks=8, block_s=block_s),),
        new_tokens=new_tokens,
        prefill=Prefill(tokens_per_s=rate, half_speed_tokens=32_768),
    )


@settings(max_examples=10)
@given(
    rate=st.floats(500, 200_000), block_s=st.floats(0.001, 1.0), sessions=st.integers(1, 4),
    new_tokens=st.integers(1, 2_000),
)  # fmt: skip
def test_never_much_slower_than_either_end(rate: float, block_s: float, sessions: int, new_tokens: int) -> None:
    given_storm = storm(rate, block_s, sessions, new_tokens)

    def mean_s(limit: int | None) -> float:
        host = Host(given_storm)
        host.learn()
        return host.run(lambda number: limit).mean_s

    assert mean_s(None) <= 1.05 * min(mean_s(0), mean_s(8))


@given(
    places=st.lists(st.sampled_from([FAST, SLOW, None]), min_size=1, max_size=60),
    fast=st.floats(1e6, 1e11), ratio=st.floats(0.01, 1.0), prefill=st.floats(100, 1e6), more=st.floats(1.0, 100.0),
)  # fmt: skip
def test_more_bandwidth_never_means_fewer_blocks_loaded(
    places: list[Channel | None], fast: float, ratio: float, prefill: float, more: float
) -> None:
    def chosen(factor: float) -> int:
        deciding = chooser(fast * factor, fast * ratio * factor, prefill)
        return deciding.choose(request(len(places)), Prefix(places), 0).blocks

    assert chosen(more) >= chosen(1.0)


@given(places=st.lists(st.sampled_from([FAST, SLOW, None]), max_size=60), others=st.integers(0, 5))
def test_a_choice_is_a_length_of_the_prefix_and_host_blocks_are_always_taken(
    places: list[Channel | None], others: int
) -> None:
    deciding = chooser()
    for number in range(others):
        deciding.choose(request(40, f"other {number}"), Prefix([FAST] * 20 + [SLOW] * 20), 0)
    choice = deciding.choose(request(len(places)), Prefix(places), 0)
    assert 0 <= choice.blocks <= len(places)
    leading = next((at for at, place in enumerate(places) if place is not None), len(places))
    if not others:
        assert choice.blocks >= leading
    for alternative in choice.alternatives:
        assert alternative.first_token_ns >= alternative.load_ns + alternative.prefill_ns


def test_nothing_is_decided_before_a_prefill_is_known() -> None:
    deciding = chooser(prefill=None)
    choice = deciding.choose(request(10), Prefix([SLOW] * 10), 0)
    assert (choice.blocks, choice.reason) == (10, ChoiceReason.UNKNOWN_PREFILL)
    deciding.computed("x", 1000, 0, SECOND_NS // 1000, 0)
    assert deciding.choose(request(10), Prefix([SLOW] * 10), 0).blocks == 0


def test_an_unknown_source_is_loaded_from() -> None:
    unknown = Channel("new", 0)
    choice = chooser().choose(request(10), Prefix([unknown] * 10), 0)
    assert (choice.blocks, choice.reason) == (10, ChoiceReason.UNKNOWN_SOURCE)


def test_a_source_passed_over_is_tried_once_in_a_while() -> None:
    deciding, now_ns = chooser(prefill=1e9), 100 * SECOND_NS
    first = deciding.choose(request(50), Prefix([SLOW] * 50), now_ns)
    assert first.reason is ChoiceReason.TRIAL
    assert 0 < first.blocks <= 8, "a trial costs a few blocks, not the whole prefix"
    assert deciding.choose(request(50, "s"), Prefix([SLOW] * 50), now_ns).blocks == 0
    later_ns = now_ns + 61 * SECOND_NS
    assert deciding.choose(request(50, "t"), Prefix([SLOW] * 50), later_ns).reason is ChoiceReason.TRIAL


def test_a_guess_far_beyond_what_was_seen_is_made_by_one_request_at_a_time() -> None:
    deciding = chooser(prefill=None)
    deciding.computed("x", 10, 0, 1_000, 0)  # 10 tokens in a microsecond: long prefills look free
    places = Prefix([SLOW] * 50)
    assert deciding.choose(request(50, "a"), places, 0).blocks == 0
    assert deciding.choose(request(50, "b"), places, 0).blocks == 50
    deciding.computed("a", 5010, 0, 60 * SECOND_NS, 0)
    assert deciding.choose(request(50, "c"), places, 0).blocks == 50


def test_a_host_that_never_reports_is_not_waited_for_for_ever() -> None:
    accelerator = Accelerator()
    for number in range(1000):
        accelerator.commit(f"r{number}", 0, SECOND_NS, 0)
    assert accelerator.free_ns(0) <= 256 * SECOND_NS, "bounded in number"
    assert accelerator.free_ns(1000 * SECOND_NS) == 1000 * SECOND_NS, "and in time"


def test_the_accelerator_computes_what_came_first_of_what_has_arrived() -> None:
    accelerator = Accelerator()
    accelerator.commit("loading", 2 * SECOND_NS, SECOND_NS, 0)
    outlook = accelerator.outlook(0, 3 * SECOND_NS, 0)
    assert (outlook.first_token_ns, outlook.delay_ns) == (3 * SECOND_NS, SECOND_NS)
    accelerator.arrived("loading", SECOND_NS, 0)
    assert accelerator.outlook(0, 3 * SECOND_NS, 0).first_token_ns == 4 * SECOND_NS
    accelerator.done("loading", SECOND_NS)
    assert accelerator.free_ns(SECOND_NS) == SECOND_NS


def test_every_decision_is_an_event() -> None:
    events: list[Event] = []
    host = Host(storm(50_000, 0.05, 4, 100), emit=events.append)
    host.learn()
    host.run()
    chosen = [event for event in events if isinstance(event, Chosen)]
    assert [event.request_id for event in chosen] == [f"storm-{number}" for number in range(4)]
    for event in chosen:
        assert event.chosen_blocks in [alternative.blocks for alternative in event.alternatives]
        assert (event.stored_blocks, event.wanted_blocks) == (8, 8)


def test_off_is_off() -> None:
    events: list[Event] = []
    off = EngineOptions(load_or_compute=ChoiceOptions(mode=LoadOrCompute.OFF))
    host = Host(storm(1e6, 0.05, 2, 100), off, emit=events.append)
    host.learn()
    assert host.run() == Host(storm(1e6, 0.05, 2, 100), off).run(lambda number: 8)
    assert not [event for event in events if isinstance(event, Chosen)]


@pytest.mark.parametrize(
    "options",
    [
        ChoiceOptions(margin=1.0),
        ChoiceOptions(margin=float("nan")),
        ChoiceOptions(prefill_tokens_per_s=0.0),
        ChoiceOptions(read_bytes_per_s={"file": -1.0}),
        ChoiceOptions(trial_s=float("inf")),
    ],
)
def test_options_that_cannot_work_are_refused(options: ChoiceOptions) -> None:
    with pytest.raises(ConfigError, match="load_or_compute: "):
        check_choice_options(options)
