"""Waves through the real engine under virtual time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from forebay.engine import Engine
from forebay.errors import ConfigError
from forebay.fairness import Order
from forebay.flow import Flow
from forebay.sim.host import Hosting
from forebay.sim.media import medium_named
from forebay.sim.profiles import EngineProfile
from forebay.sim.storm import Placement, StormResult, StormSpec, StormWave, run_storm

PROFILE = EngineProfile(
    name="test", ranks=1, kv_bytes_per_token=100_000, token_s=1e-4, half_speed_tokens=1e9, step_s=0.01,
    kv_bytes_per_s=1e15, source="round figures",
)  # fmt: skip
DISK = medium_named("nvme-gen4")
STORM = StormSpec(
    profile=PROFILE, media=(DISK,), waves=(8,), stored_tokens=256 * 40, new_tokens=100, output_tokens=11,
    host_bytes=2_000_000_000,
)  # fmt: skip
WAVE_BYTES = 8 * 256 * 40 * 100_000


def run(**changes: Any) -> StormWave:
    return run_storm(msgspec.structs.replace(STORM, **changes)).last


def test_the_medium_decides_when_the_last_session_is_restored_and_order_when_the_others_are() -> None:
    ordered, shared = run(), run(order=Order.INTERLEAVED)
    for wave in (ordered, shared):
        assert wave.read_bytes == WAVE_BYTES
        assert wave.dram_blocks == 0
        assert wave.read_span_s == pytest.approx(WAVE_BYTES / 6.9e9, rel=0.02)
        assert max(wave.ttft_s) == pytest.approx(WAVE_BYTES / 6.9e9 + 0.01, rel=0.03)
    assert ordered.ttft_mean_s < 0.65 * shared.ttft_mean_s
    assert min(shared.ttft_s) > 0.85 * max(shared.ttft_s)


def test_recompute_takes_what_the_profile_says() -> None:
    wave = run(media=())
    assert wave.read_bytes == wave.loaded_blocks == 0
    assert wave.ttft_at_s(0.5) == pytest.approx(5 * PROFILE.prefill_s(10_340, 0), rel=0.05)
    assert wave.whole_s == pytest.approx(8 * PROFILE.prefill_s(10_340, 0) + 10 * 0.01, rel=0.01)
    assert max(wave.tpot_s) > 5 * min(wave.tpot_s), "a decode beside prefills has one token a chunk"


def test_a_host_that_blocks_lets_nobody_begin_before_all_are_loaded() -> None:
    wave = run(hosting=Hosting.BLOCKING)
    assert min(wave.ttft_s) == max(wave.ttft_s) > WAVE_BYTES / 6.9e9
    staged = run(hosting=Hosting.BLOCKING, loads_at_once=6)
    assert staged.ttft_at_s(0.5) == pytest.approx(0.75 * wave.ttft_at_s(0.5), rel=0.05)
    assert staged.tpot_s[0] > 4 * wave.tpot_s[0], "those that decode wait for the loads of the others"


def test_a_wave_finds_in_dram_what_the_one_before_left_there_unless_it_goes_elsewhere() -> None:
    result = run_storm(msgspec.structs.replace(STORM, waves=(4, 8)))
    pool_blocks = STORM.host_bytes // (256 * 100_000)
    assert pool_blocks - 2 <= result.last.dram_blocks <= pool_blocks
    assert result.last.read_bytes == WAVE_BYTES - result.last.dram_blocks * 256 * 100_000
    crossed = run_storm(msgspec.structs.replace(STORM, waves=(4, 8), instances=2, placement=Placement.CROSS))
    assert crossed.last.dram_blocks == 0
    own = run_storm(msgspec.structs.replace(STORM, waves=(4, 8), instances=2))
    assert own.last.dram_blocks > pool_blocks


def test_two_instances_share_a_device_and_the_far_one_gets_less() -> None:
    wave = run(instances=2, far_speed=0.5, order=Order.INTERLEAVED)
    near, far = wave.ttft_s[::2], wave.ttft_s[1::2]
    assert max(near) < 0.85 * min(far)
    assert max(far) == pytest.approx(WAVE_BYTES / 6.9e9, rel=0.05)


def test_blocks_on_two_media_come_from_both_at_once() -> None:
    wave = run(media=(DISK, medium_named("4*nvme-gen4@100gbe")), host_bytes=8_000_000_000)
    both = DISK.read_bytes_per_s + medium_named("4*nvme-gen4@100gbe").read_bytes_per_s
    assert wave.read_span_s == pytest.approx(WAVE_BYTES / both, rel=0.05)


def test_sessions_come_when_they_are_said_to_and_wait_from_then_on() -> None:
    alone = run(waves=(1,)).ttft_s[0]
    apart = run(waves=(3,), arrivals_s=(0.0, 5.0, 10.0), setup_s=0.5)
    assert apart.ttft_s == pytest.approx([alone + 0.5] * 3, rel=0.01)
    assert apart.whole_s == pytest.approx(10.5 + alone + 10 * 0.01, rel=0.01)


def test_copies_to_the_accelerator_take_their_time_beside_the_reads_and_alone_behind_dram() -> None:
    session_bytes = WAVE_BYTES / 8
    beside, alone = run_storm(
        msgspec.structs.replace(STORM, waves=(1, 1), host_bytes=3_000_000_000, copy_bytes_per_s=10e9)
    ).waves
    assert beside.ttft_s[0] == pytest.approx(
        session_bytes / 6.9e9 + 0.02, rel=0.05
    )  # the last job of reads is copied alone
    assert alone.read_bytes == 0
    assert alone.ttft_s[0] == pytest.approx(session_bytes / 10e9 + 0.01, rel=0.02)
    slower = run(waves=(1,), copy_bytes_per_s=2e9)
    assert slower.ttft_s[0] == pytest.approx(session_bytes / 2e9 + 0.01, rel=0.10)


def test_a_chunk_of_few_tokens_costs_a_chunk() -> None:
    heavy = msgspec.structs.replace(STORM, profile=replace(PROFILE, chunk_s=0.5, chunk_tokens=512))
    assert run_storm(heavy).waves[0].ttft_s[0] > 0.5
    assert heavy.profile.prefill_s(1, 0) == pytest.approx(0.5 + 1e-4)
    assert heavy.profile.prefill_s(513, 0) == pytest.approx(1.0 + 513e-4)
    assert heavy.profile.prefill_s(0, 0) == 0


def test_the_same_storm_gives_the_same_figures() -> None:
    assert run_storm(STORM) == run_storm(STORM)
    result = run_storm(STORM)
    assert msgspec.json.decode(msgspec.json.encode(result), type=StormResult) == result


def test_the_engine_and_flow_that_run_are_those_of_production(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    for owner, name in ((Engine, "plan_load"), (Engine, "start_load"), (Flow, "grant")):
        original = getattr(owner, name)

        def spy(*given: Any, _original: Any = original, _name: str = name, **named: Any) -> Any:
            called.append(_name)
            return _original(*given, **named)

        monkeypatch.setattr(owner, name, spy)
    run()
    assert called.count("plan_load") == called.count("start_load") == 8
    assert called.count("grant") >= 8


@pytest.mark.parametrize(
    "changes",
    [
        {"waves": ()}, {"waves": (0,)}, {"instances": 0}, {"new_tokens": 0}, {"output_tokens": 0}, {"host_bytes": 1},
        {"far_speed": 0.0}, {"far_speed": 2.0}, {"reads_in_flight": 0}, {"block_tokens": 0}, {"stored_tokens": -1},
        {"arrivals_s": (0.0,)}, {"arrivals_s": tuple(range(8, 0, -1))}, {"copy_bytes_per_s": 0.0},
        {"loads_at_once": 0}, {"setup_s": -1.0}, {"setup_s": float("nan")},
    ],
)  # fmt: skip
def test_storms_that_cannot_be_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        run(**changes)
