"""The device model against what it promises: Little's law below saturation, the bandwidth above."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.sim.device import Device, DeviceModel
from forebay.types import BlockKey, Job, JobId, JobKind, Slot

BLOCK_BYTES = 1_000_000
MODEL = DeviceModel(read_bytes_per_s=1e9, write_bytes_per_s=2e9, latency_ns=4_000_000)
"""1 ms a block to read, 0.5 ms to write, and 4 ms of latency: 5 blocks in flight saturate it."""


def job(kind: JobKind, blocks: int, *, evicts: int = 0) -> Job:
    keys = tuple(BlockKey(i.to_bytes(32)) for i in range(blocks))
    slots = tuple(Slot(i) for i in range(blocks))
    gone = tuple(BlockKey((1000 + i).to_bytes(32)) for i in range(evicts))
    return Job(JobId(1), kind, "disk", keys, slots, blocks * BLOCK_BYTES, evicts=gone)


def closed_loop_bytes_per_s(model: DeviceModel, in_flight: int) -> float:
    """Throughput with so many jobs of one block kept in flight, over 1000 blocks."""
    device, ends_ns = Device(model), [0] * in_flight
    for _ in range(1000):
        ends_ns.sort()
        ends_ns[0] = device.serve(job(JobKind.READ, 1), ends_ns[0]).ended_ns
    return 1000 * BLOCK_BYTES / max(ends_ns) * 1e9


@pytest.mark.parametrize("in_flight", [1, 2, 4, 5, 8, 64])
def test_throughput_is_what_is_in_flight_over_the_latency_up_to_the_bandwidth(in_flight: int) -> None:
    expected = min(1e9, in_flight * BLOCK_BYTES / 5e-3)
    assert closed_loop_bytes_per_s(MODEL, in_flight) == pytest.approx(expected, rel=0.01)


def test_a_small_queue_depth_bounds_the_throughput_however_much_is_submitted() -> None:
    shallow = DeviceModel(read_bytes_per_s=1e9, write_bytes_per_s=1e9, latency_ns=4_000_000, queue_depth=2)
    assert closed_loop_bytes_per_s(shallow, 64) == pytest.approx(0.4e9, rel=0.01)


def test_a_job_ends_with_its_last_block_and_a_later_one_waits_for_the_pipe() -> None:
    device = Device(MODEL)
    assert device.serve(job(JobKind.READ, 10), 0).ended_ns == 14_000_000
    assert device.serve(job(JobKind.WRITE, 4), 0).ended_ns == 16_000_000
    assert device.serve(job(JobKind.READ, 1), 100_000_000).ended_ns == 105_000_000
    assert device.serve(job(JobKind.PROBE, 5), 200_000_000).ended_ns == 204_000_000


def test_deleting_before_a_write_costs_a_latency() -> None:
    assert Device(MODEL).serve(job(JobKind.WRITE, 1, evicts=3), 0).ended_ns == 8_500_000


@given(st.lists(st.tuples(st.integers(0, 10**7), st.sampled_from(JobKind), st.integers(1, 20)), max_size=50))
def test_jobs_end_in_order_after_they_began_and_never_above_the_bandwidth(
    calls: list[tuple[int, JobKind, int]],
) -> None:
    device, now_ns, last_ns, read_bytes = Device(MODEL), 0, 0, 0
    for after_ns, kind, blocks in calls:
        now_ns += after_ns
        span = device.serve(job(kind, blocks), now_ns)
        assert now_ns <= span.started_ns <= span.ended_ns
        if kind is JobKind.READ:
            assert span.ended_ns >= last_ns
            last_ns, read_bytes = span.ended_ns, read_bytes + blocks * BLOCK_BYTES
    assert read_bytes <= 1e9 * (last_ns / 1e9) + 1
