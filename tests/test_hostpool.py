from __future__ import annotations

import logging

import pytest

from forebay.errors import ConfigError
from forebay.hostpool import ALIGNMENT, HUGE_PAGE_BYTES, HostPool


def test_slots_are_aligned_disjoint_and_whole() -> None:
    pool = HostPool(slots=5, block_bytes=10_000)
    assert pool.slot_bytes == 12_288
    assert pool.slab.ctypes.data % HUGE_PAGE_BYTES == 0
    addresses = [pool.slab[i].ctypes.data for i in range(5)]
    assert all(address % ALIGNMENT == 0 for address in addresses)
    for number in range(5):
        slot = pool.take()
        assert slot is not None
        pool.view(slot)[:] = bytes([number + 1]) * pool.slot_bytes
    assert pool.take() is None
    assert sorted({int(row[0]) for row in pool.slab}) == [1, 2, 3, 4, 5]
    assert all((row == row[0]).all() for row in pool.slab)


def test_a_slot_given_back_twice_is_caught() -> None:
    pool = HostPool(slots=2, block_bytes=1)
    slot = pool.take()
    assert slot is not None
    pool.give(slot)
    with pytest.raises(AssertionError, match="already free"):
        pool.give(slot)
    assert pool.free_slots == 2


def test_its_real_size_is_logged_with_units(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="forebay.hostpool"):
        pool = HostPool(slots=16, block_bytes=2**20)
    assert "16 slots of 1048576 bytes, 0.02 GiB in all" in caplog.text
    assert pool.memory.slab_bytes == 16 * 2**20
    assert 0 <= pool.memory.huge_bytes <= pool.memory.slab_bytes


@pytest.mark.parametrize(("slots", "block_bytes"), [(1, 4096), (0, 4096), (2**40, 2**30)])
def test_a_pool_that_cannot_be_is_refused_in_one_line(slots: int, block_bytes: int) -> None:
    with pytest.raises(ConfigError) as caught:
        HostPool(slots, block_bytes)
    assert "\n" not in str(caught.value)
