"""Figures of a restore benchmark, on made-up requests."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import restore_kit
from hypothesis import given
from hypothesis import strategies as st

from forebay.bench.restore.metrics import cell_of, comparisons, mean, quantile_of, spread
from forebay.bench.restore.results import BandwidthSample, Cell, RequestRecord, Role


def cell(requests: list[RequestRecord] | None = None, group: str = "candidate") -> Cell:
    [found] = [each for each in restore_kit.groups() if each.name == group]
    whole = restore_kit.requests() if requests is None else requests
    mine = [each for each in whole if each.group == group]
    return cell_of(found, 4, mine, [each for each in restore_kit.waves() if each.group == group], seed=0)


def test_a_cell_by_hand() -> None:
    found = cell()
    assert (found.requests, found.failed, found.rounds) == (12, 0, 3)
    assert found.ttft_mean_s is not None
    assert found.ttft_mean_s.value == pytest.approx(2.3)
    assert found.ttft_p50_s is not None
    assert found.ttft_p50_s.value == pytest.approx(2.3)
    assert found.ttft_p50_of_rounds_s == pytest.approx((2.3, 2.3, 2.3))
    assert found.tpot_p50_s is not None
    assert found.tpot_p50_s.value == pytest.approx(0.1)
    assert found.end_to_end_p50_s is not None
    assert found.end_to_end_p50_s.value == pytest.approx(3.3)
    assert found.output_tokens_per_s is not None
    assert found.output_tokens_per_s.value == pytest.approx(44 / 3.6)  # by the session that ended last
    assert found.hit_tokens == 12_000
    assert found.peak_bytes_per_s == 2e9
    assert found.busy_mean_bytes_per_s == 2e9  # the two idle seconds do not count
    assert found.core_s_per_gb == pytest.approx(0.5)
    assert found.core_s_per_request == pytest.approx(0.5)
    assert found.own_ttft_p50_s is found.others_ttft_p50_s is None


def test_computing_takes_processor_time_too() -> None:
    found = cell(group="recompute")
    assert found.core_s_per_gb is None
    assert found.core_s_per_request == pytest.approx(0.5)
    unknown = [restore_kit.wave(), restore_kit.wave(core_s=None)]
    assert cell_of(restore_kit.groups()[2], 4, restore_kit.requests(), unknown, seed=0).core_s_per_request is None


def test_a_shared_pool_has_a_figure_for_its_own_sessions_and_one_for_the_others() -> None:
    group = msgspec.structs.replace(restore_kit.groups()[2], role=Role.SHARED)
    asked = [restore_kit.request(session=session, written_by=session % 2) for session in range(4)]
    found = cell_of(group, 4, asked, [], seed=0)
    assert found.own_ttft_p50_s is not None
    assert found.own_ttft_p50_s.value == pytest.approx(2.2)  # sessions 0 and 2
    assert found.others_ttft_p50_s is not None
    assert found.others_ttft_p50_s.value == pytest.approx(2.4)


def test_the_slower_instance_decides_the_throughput_of_the_machine() -> None:
    whole = [
        msgspec.structs.replace(each, instance=each.session % 2, ended_s=each.ended_s + 10 * (each.session % 2))
        for each in restore_kit.requests()
    ]
    assert (found := cell(whole).output_tokens_per_s) is not None
    assert found.value == pytest.approx(44 / 13.6)


def test_failed_requests_count_and_give_no_figure() -> None:
    failed = [msgspec.structs.replace(each, error="gone", ttft_s=0.001) for each in restore_kit.requests()]
    found = cell(failed)
    assert (found.requests, found.failed) == (12, 12)
    assert found.ttft_p50_s is None
    assert found.output_tokens_per_s is None
    assert found.ttft_p50_of_rounds_s == ()


def test_a_cell_of_nothing_has_no_figures() -> None:
    found = cell([])
    assert found.requests == 0
    assert found.ttft_p99_s is None
    assert found.tpot_p50_s is None
    assert found.hit_tokens is None


def test_a_request_of_one_token_has_no_time_between_tokens() -> None:
    assert restore_kit.request(output_tokens=1).tpot_s is None
    assert restore_kit.request(ttft_s=None).tpot_s is None


def test_busy_means_weigh_samples_by_their_length() -> None:
    waves = [
        restore_kit.wave(
            bandwidth=(
                BandwidthSample(at_s=103.0, bytes_per_s=1e9),  # 3 s
                BandwidthSample(at_s=104.0, bytes_per_s=3e9),
                BandwidthSample(at_s=105.0, bytes_per_s=0.0),
            )
        )
    ]
    found = cell_of(restore_kit.groups()[2], 4, [], waves, seed=0)
    assert found.busy_mean_bytes_per_s == pytest.approx(1.5e9)
    assert found.peak_bytes_per_s == 3e9


def test_groups_are_compared_with_those_that_come_before_them() -> None:
    found = {(each.group, each.against): each for each in comparisons(restore_kit.groups(), restore_kit.requests(), 0)}
    assert set(found) == {("baseline", "recompute"), ("candidate", "recompute"), ("candidate", "baseline")}
    change = found["candidate", "baseline"].ttft_p50_change
    assert change is not None
    assert change.value == pytest.approx(-1 / 3)
    assert change.low <= change.value <= change.high
    faster = found["candidate", "baseline"].throughput_change
    assert faster is not None
    assert faster.value == pytest.approx((3.9 + 1) / (2.6 + 1) - 1)
    assert all(each.tokens_equal for each in found.values())


@pytest.mark.parametrize("changes", [{"output_digest": "another"}, {"output_digest": ""}, {"error": "gone"}])
def test_outputs_are_equal_only_where_both_gave_the_same_one(changes: dict[str, object]) -> None:
    if "error" in changes:
        changes["output_digest"] = ""
    whole = [*restore_kit.requests()[:-1], msgspec.structs.replace(restore_kit.requests()[-1], **changes)]
    assert {each.tokens_equal for each in comparisons(restore_kit.groups(), whole, 0) if each.group == "candidate"} == {
        False
    }


@given(st.lists(st.floats(0.001, 1e4), min_size=1, max_size=30), st.integers(0, 2**32 - 1))
def test_an_interval_lies_within_the_values_and_the_seed_decides_it(values: list[float], seed: int) -> None:
    for figure in (mean, quantile_of(0.5), quantile_of(0.99)):
        found = spread(values, figure, seed)
        assert found is not None
        assert min(values) * (1 - 1e-9) <= found.low <= found.high <= max(values) * (1 + 1e-9)
        assert found == spread(values, figure, seed)
    median = spread(values, quantile_of(0.5), seed)
    assert median is not None
    assert median.value == pytest.approx(float(np.median(values)))


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    rng = np.random.default_rng(1)
    covered = 0
    for seed in range(200):
        found = spread(list(rng.normal(10.0, 1.0, 40)), mean, seed)
        assert found is not None
        covered += found.low <= 10.0 <= found.high
    assert 0.90 <= covered / 200 <= 0.99
