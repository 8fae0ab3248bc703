"""Media by name and by measured curve."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import ConfigError
from forebay.sim.device import Device
from forebay.sim.media import PCIE_EFFICIENCY, PORT_EFFICIENCY, curve_medium, drive_names, medium_named
from forebay.sim.profiles import profile_named, profile_names
from forebay.types import BlockKey, Job, JobId, JobKind, Slot


@pytest.mark.parametrize("name", drive_names())
def test_every_drive_has_figures_and_their_source(name: str) -> None:
    medium = medium_named(name)
    assert medium.source
    assert 0 < medium.stream_bytes_per_s <= medium.read_bytes_per_s
    assert medium.write_bytes_per_s <= medium.read_bytes_per_s


def test_drives_add_up_and_the_slowest_part_decides() -> None:
    assert medium_named("4*nvme-gen4").read_bytes_per_s == 4 * 6.9e9
    assert medium_named("4*nvme-gen4@100gbe").read_bytes_per_s == pytest.approx(12.5e9 * PORT_EFFICIENCY)
    assert medium_named("4*nvme-gen4@2*100gbe").read_bytes_per_s == pytest.approx(25e9 * PORT_EFFICIENCY)
    assert medium_named("4*nvme-gen4@200gbe").read_bytes_per_s == medium_named("4*nvme-gen4@2*100gbe").read_bytes_per_s
    assert medium_named("4*nvme-gen4@400gbe").read_bytes_per_s == 4 * 6.9e9
    narrow = medium_named("dram@pcie4x16").read_bytes_per_s
    assert narrow == pytest.approx(16 * 16e9 * 128 / 130 / 8 * PCIE_EFFICIENCY)
    assert medium_named("dram@pcie5x16").read_bytes_per_s == pytest.approx(2 * narrow)
    assert medium_named("nvme-gen4@bounced").latency_ns > medium_named("nvme-gen4@direct").latency_ns


@pytest.mark.parametrize(
    "name",
    [
        "", "floppy", "0*nvme-gen4", "65*nvme-gen4", "nvme-gen4@", "nvme-gen4@0gbe", "nvme-gen4@pcie9x16", "@100gbe",
        "nvme-gen4@100gbe@", "-1*dram", "nvme-gen4\n", "四*dram", "nvme-gen4@１00gbe", "1e3*dram",
    ],
)  # fmt: skip
def test_any_other_name_is_refused_in_one_line(name: str) -> None:
    with pytest.raises(ConfigError) as refused:
        medium_named(name)
    assert "\n" not in str(refused.value)


@given(st.text(max_size=30))
def test_no_name_does_anything_but_be_refused_or_understood(name: str) -> None:
    with contextlib.suppress(ConfigError):
        assert medium_named(name).read_bytes_per_s > 0


def read_rate(name: str, in_flight: int, block_bytes: int = 8_000_000) -> float:
    device, ends_ns = Device(medium_named(name).model(block_bytes, 64)), [0] * in_flight
    for number in range(400):
        ends_ns.sort()
        job = Job(JobId(number), JobKind.READ, "m", (BlockKey(bytes(32)),), (Slot(0),), 64)
        ends_ns[0] = device.serve(job, ends_ns[0]).ended_ns
    return 400 * block_bytes / max(ends_ns) * 1e9


def test_one_read_at_a_time_gets_a_stream_and_many_the_bandwidth() -> None:
    assert read_rate("nvme-gen4", 1) == pytest.approx(2.5e9, rel=0.05)
    assert read_rate("nvme-gen4", 2) == pytest.approx(5e9, rel=0.05)
    assert read_rate("nvme-gen4", 16) == pytest.approx(6.9e9, rel=0.05)
    assert read_rate("s3", 1) == pytest.approx(8e6 / (0.1 + 8e6 / 87e6), rel=0.05)


def curve(path: Path, **changes: object) -> Path:
    points = [
        {"direction": "reads", "block_bytes": size, "depth": depth, "gb_per_s": rate, "p50_s": 0.1, "p99_s": 0.2}
        for size, depth, rate in ((2**21, 1, 1.0), (2**21, 16, 3.0), (2**23, 1, 2.0), (2**23, 16, 3.5))
    ]
    points.append({"direction": "writes", "block_bytes": 2**21, "depth": 4, "gb_per_s": 2.5, "p50_s": 1, "p99_s": 1})
    whole = {
        "schema": "forebay-device-curve/1", "device": "vda", "filesystem": "ext4", "began": "", "validity": "valid",
        "points": points,
    }  # fmt: skip
    path.write_text(json.dumps({**whole, **changes}))
    return path


def test_a_measured_curve_takes_the_place_of_a_name(tmp_path: Path) -> None:
    medium = curve_medium(curve(tmp_path / "curve.json"), 2**21)
    assert (medium.stream_bytes_per_s, medium.read_bytes_per_s, medium.write_bytes_per_s) == (1e9, 3e9, 2.5e9)
    assert curve_medium(tmp_path / "curve.json", 64 * 2**20).read_bytes_per_s == 3.5e9


def test_a_curve_says_where_the_model_of_it_is_most_off(tmp_path: Path) -> None:
    points = [
        {"direction": "reads", "block_bytes": 2**21, "depth": depth, "gb_per_s": rate}
        for depth, rate in ((1, 1.0), (4, 2.0), (16, 4.0), (64, 3.2))
    ]
    medium = curve_medium(curve(tmp_path / "curve.json", points=points), 2**21)
    assert medium.queue_depth == 16  # the best one: with more in flight it got slower
    assert "of 4 depths the model is most off at 4 in flight: 4.00 GB/s, measured 2.00 (+100%)" in medium.source


@pytest.mark.parametrize(
    "changes",
    [
        {"schema": "another/1"}, {"points": []}, {"points": [{"direction": "reads"}]},
        {"points": [{"direction": "reads", "block_bytes": 0, "depth": 1, "gb_per_s": 1}]},
        {"points": [{"direction": "reads", "block_bytes": 1, "depth": 1, "gb_per_s": -1}]},
    ],
)  # fmt: skip
def test_what_is_no_curve_is_refused(tmp_path: Path, changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        curve_medium(curve(tmp_path / "curve.json", **changes), 2**21)
    with pytest.raises(ConfigError):
        curve_medium(tmp_path / "none.json", 2**21)


@pytest.mark.parametrize("name", profile_names())
def test_prefill_grows_with_context_and_decode_with_the_batch(name: str) -> None:
    profile = profile_named(name)
    assert profile.prefill_s(1000, 20_000) > profile.prefill_s(1000, 0) > 0
    halves = profile.prefill_s(500, 0) + profile.prefill_s(500, 500)
    assert halves == pytest.approx(profile.prefill_s(1000, 0))
    assert profile.decode_s(8, 30_000) > profile.decode_s(1, 30_000) > profile.step_s
    mixed = profile.mixed_s(2048, 0, 4, 30_000)
    assert profile.prefill_s(2048, 0) < mixed < profile.prefill_s(2048, 0) + profile.decode_s(4, 30_000)
    with pytest.raises(ConfigError):
        profile_named(name + "x")


PROFILE = """
name = "mine"
ranks = 2
kv_bytes_per_token = 131072
token_s = 2e-4
half_speed_tokens = inf
step_s = 0.02
kv_bytes_per_s = 1e12
source = "measured here"
"""


def test_a_measured_profile_is_read_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(PROFILE)
    assert profile_named("mine.toml", tmp_path).prefill_s(1000, 5000) == pytest.approx(0.2)
    for old, new, said in (
        ("ranks = 2", "ranks = 0", "ranks"), ("ranks = 2", "", "ranks"), ("ranks = 2", "ranks = 2\nfast = 1", "'fast'"),
        ("2e-4", "nan", "token_s"), ("ranks = 2", "ranks = ", "line 3"), ("= inf", "= 0", "half_speed"),
    ):  # fmt: skip
        (tmp_path / "bad.toml").write_text(PROFILE.replace(old, new))
        with pytest.raises(ConfigError, match=said):
            profile_named("bad.toml", tmp_path)
    for name in ("none.toml", "\0.toml"):
        with pytest.raises(ConfigError, match="cannot read the profile"):
            profile_named(name, tmp_path)
