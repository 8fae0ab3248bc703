"""Whole blocks of vLLM's paged cache, in every physical order of its axes, to host slots and back."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from played_driver import play

from forebay.connectors.vllm import device as kv_device
from forebay.connectors.vllm.device import CpuDevice, CudaDevice, KvPages, find_pages, gather, open_device, scatter
from forebay.errors import ConfigError
from forebay.hostpool import HostPool
from forebay.types import BlockKey, DeviceBlock, Job, JobId, JobKind, JobResult, Outcome, Slot

LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 3, 7, 2, 4, 10
NAMES = [f"layers.{i}" for i in range(LAYERS)]
ORDERS = ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]
DTYPES = [torch.float32, torch.bfloat16, torch.uint8]


def caches(order: str, dtype: torch.dtype = torch.float32, split: int = 1) -> dict[str, torch.Tensor]:
    """One view [blocks, heads, tokens, content] a layer over one allocation, as vLLM makes them.

    `split`: kernel blocks a block, which subdivide it along its tokens where it is dense.
    """
    lengths = {"L": LAYERS, "B": BLOCKS * split, "H": HEADS, "N": TOKENS // split, "C": CONTENT}
    whole = torch.zeros([lengths[axis] for axis in order], dtype=dtype)
    logical = whole.permute([order.index(axis) for axis in "LBHNC"])
    return {name: logical[i] for i, name in enumerate(NAMES)}


def number(kv: dict[str, torch.Tensor]) -> None:
    """Every element of every layer gets a value of its own, as far as its type goes."""
    values = itertools.count()
    for cache in kv.values():
        cache.copy_(torch.tensor([next(values) % 251 for _ in range(cache.numel())]).view(cache.shape))


def block_of(kv: dict[str, torch.Tensor], block: int, split: int = 1) -> torch.Tensor:
    return torch.stack([cache[block * split : (block + 1) * split] for cache in kv.values()]).clone()


def job(kind: JobKind, slots: Sequence[int]) -> Job:
    keys = tuple(BlockKey(bytes([slot]) * 32) for slot in slots)
    return Job(JobId(1), kind, "host", keys, tuple(Slot(slot) for slot in slots), 0)


def run(device: CpuDevice, kind: JobKind, slots: Sequence[int], blocks: Sequence[int]) -> JobResult:
    device.submit(job(kind, slots), [DeviceBlock(block) for block in blocks])
    if kind is JobKind.COPY_OUT:
        assert all(device.is_copying_out(DeviceBlock(block)) for block in blocks)
    device.drain()
    (result,) = device.poll()
    assert not any(device.is_copying_out(DeviceBlock(block)) for block in blocks)
    return result


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_come_back_bit_for_bit_and_touch_no_other(order: str, dtype: torch.dtype) -> None:
    kv = caches(order, dtype)
    pages = find_pages(kv, NAMES, BLOCKS)
    assert pages.block_bytes == LAYERS * HEADS * TOKENS * CONTENT * dtype.itemsize
    pool = HostPool(4, pages.block_bytes)
    device = CpuDevice(pages, pool)
    number(kv)
    before = [block_of(kv, block) for block in range(BLOCKS)]
    assert set(run(device, JobKind.COPY_OUT, (2, 0), (1, 5)).outcomes.values()) == {Outcome.OK}
    for cache in kv.values():
        cache[1], cache[5] = 0, 0
    run(device, JobKind.COPY_IN, (0, 2), (5, 3))
    device.close()
    expected = [*before[:1], torch.zeros_like(before[1]), before[2], before[1], before[4], before[5], before[6]]
    for block in range(BLOCKS):
        assert torch.equal(block_of(kv, block), expected[block]), block


@pytest.mark.parametrize("batch_blocks", [1, 2, 100])
@pytest.mark.parametrize("order", ORDERS)
def test_a_gpu_moves_blocks_bit_for_bit_behind_the_model(
    order: str, batch_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole path of CUDA and ROCm but for the hardware: on tensors in DRAM, with a driver that the test plays."""
    driver = play(monkeypatch)
    kv = caches(order)
    number(kv)
    pages = find_pages(kv, NAMES, BLOCKS)
    monkeypatch.setattr(kv_device, "_STAGING_BYTES", batch_blocks * pages.block_bytes)
    pool = HostPool(4, pages.block_bytes)
    device = CudaDevice(pages, pool)
    before = [block_of(kv, block) for block in range(BLOCKS)]
    device.submit(job(JobKind.COPY_OUT, (2, 0, 3)), [DeviceBlock(block) for block in (1, 5, 6)])
    assert driver.queued == ["wait for model", "event"], "not before the model has written what is copied"
    assert (device.poll(), device.is_copying_out(DeviceBlock(5))) == ([], True)
    driver.events[0].ended = True
    (result,) = device.poll()
    assert set(result.outcomes.values()) == {Outcome.OK}
    assert not device.is_copying_out(DeviceBlock(5))
    if order == "LBHNC":  # as the CPU puts them
        assert pool.slab[0, : pages.block_bytes].tobytes() == before[5].numpy().tobytes()
    for cache in kv.values():
        cache[1], cache[5] = 0, 0
    device.submit(job(JobKind.COPY_IN, (0, 2, 3)), [DeviceBlock(block) for block in (5, 3, 0)])
    assert not device.is_copying_out(DeviceBlock(5))
    device.close()
    assert not driver.pinned
    (result,) = device.poll()
    assert set(result.outcomes.values()) == {Outcome.OK}
    expected = [before[6], torch.zeros_like(before[1]), before[2], before[1], before[4], before[5], before[6]]
    for block in range(BLOCKS):
        assert torch.equal(block_of(kv, block), expected[block]), block


def test_a_copy_that_a_gpu_refuses_is_failed_and_the_next_one_works(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = play(monkeypatch)
    pages = find_pages(caches("LBHNC"), NAMES, BLOCKS)
    device = CudaDevice(pages, HostPool(2, pages.block_bytes))
    with monkeypatch.context() as broken:
        broken.setattr(kv_device, "gather", refuse)
        device.submit(job(JobKind.COPY_OUT, (0, 1)), [DeviceBlock(0), DeviceBlock(1)])
    driver.events[0].ended = True
    (result,) = device.poll()
    assert set(result.outcomes.values()) == {Outcome.FAILED}
    assert not device.is_copying_out(DeviceBlock(0))
    device.submit(job(JobKind.COPY_OUT, (0, 1)), [DeviceBlock(0), DeviceBlock(1)])
    device.drain()
    (result,) = device.poll()
    assert set(result.outcomes.values()) == {Outcome.OK}
    device.close()


def refuse(*_: object) -> None:
    raise RuntimeError("out of memory")


@pytest.mark.parametrize("order", ORDERS)
def test_gather_and_scatter_put_the_same_bytes_into_a_slot_as_the_cpu_does(order: str) -> None:
    """What CUDA and ROCm do a batch at a time, on tensors that happen to be in DRAM."""
    kv = caches(order)
    number(kv)
    pages = find_pages(kv, NAMES, BLOCKS)
    pool = HostPool(2, pages.block_bytes)
    device = CpuDevice(pages, pool)
    run(device, JobKind.COPY_OUT, (0, 1), (6, 2))
    device.close()
    staging = torch.zeros((2, pages.block_bytes), dtype=torch.uint8)
    gather(pages, staging, torch.tensor([6, 2]))
    assert torch.equal(staging, torch.from_numpy(pool.slab)[:, : pages.block_bytes])
    before = [block_of(kv, block) for block in range(BLOCKS)]
    scatter(pages, staging, torch.tensor([0, 4]))
    assert torch.equal(block_of(kv, 0), before[6])
    assert torch.equal(block_of(kv, 4), before[2])
    assert all(torch.equal(block_of(kv, block), before[block]) for block in (1, 2, 3, 5, 6))


@pytest.mark.parametrize(("order", "one_kernel"), [("LBHNC", True), ("BLHNC", True), ("LHBNC", False)])
def test_evenly_spaced_layers_are_moved_by_one_kernel(order: str, one_kernel: bool) -> None:
    assert (find_pages(caches(order), NAMES, BLOCKS).whole is not None) == one_kernel


def test_layers_in_allocations_of_their_own_are_moved_one_by_one() -> None:
    kv = {name: torch.zeros((BLOCKS, HEADS, TOKENS, CONTENT)) for name in NAMES}
    number(kv)
    pages = find_pages(kv, NAMES, BLOCKS)
    assert pages.whole is None
    staging = torch.zeros((1, pages.block_bytes), dtype=torch.uint8)
    gather(pages, staging, torch.tensor([3]))
    expected = torch.cat([cache[3].reshape(-1).view(torch.uint8) for cache in kv.values()])
    assert torch.equal(staging[0], expected)


def test_a_block_of_several_kernel_blocks_is_one_page() -> None:
    kv = caches("LBHNC", split=2)
    number(kv)
    pages = find_pages(kv, NAMES, BLOCKS)
    assert pages.num_blocks == BLOCKS
    pool = HostPool(2, pages.block_bytes)
    device = CpuDevice(pages, pool)
    before = block_of(kv, 4, split=2)
    run(device, JobKind.COPY_OUT, (1,), (4,))
    run(device, JobKind.COPY_IN, (1,), (0,))
    device.close()
    assert torch.equal(block_of(kv, 0, split=2), before)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.permutations(range(BLOCKS)), min_size=1, max_size=4), st.sampled_from(ORDERS))
def test_any_sequence_of_moves_permutes_blocks(moves: list[list[int]], order: str) -> None:
    kv = caches(order)
    number(kv)
    pages = find_pages(kv, NAMES, BLOCKS)
    device = CpuDevice(pages, HostPool(BLOCKS, pages.block_bytes))
    expected = [block_of(kv, block) for block in range(BLOCKS)]
    for targets in moves:
        run(device, JobKind.COPY_OUT, range(BLOCKS), range(BLOCKS))
        run(device, JobKind.COPY_IN, range(BLOCKS), targets)
        moved = dict(zip(targets, expected, strict=True))
        expected = [moved[block] for block in range(BLOCKS)]
    device.close()
    assert all(torch.equal(block_of(kv, block), expected[block]) for block in range(BLOCKS))


def test_a_copy_that_cannot_be_made_is_failed_and_the_next_one_works() -> None:
    pages = find_pages(caches("LBHNC"), NAMES, BLOCKS)
    device = CpuDevice(pages, HostPool(2, pages.block_bytes))
    result = run(device, JobKind.COPY_OUT, (0, 1), (BLOCKS, 1))
    assert [outcome.value for outcome in result.outcomes.values()] == ["failed", "ok"]
    device.close()


def test_loads_do_not_wait_behind_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = find_pages(caches("LBHNC"), NAMES, BLOCKS)
    device = CpuDevice(pages, HostPool(4, pages.block_bytes))
    began, go_on, sound = threading.Event(), threading.Event(), device._copy

    def copy(kind: JobKind, slot: int, block: int) -> Outcome:
        began.set()
        assert go_on.wait(60)
        return sound(kind, slot, block)

    monkeypatch.setattr(device, "_copy", copy)
    kinds = [JobKind.COPY_OUT, JobKind.COPY_OUT, JobKind.COPY_IN]
    for slot, kind in enumerate(kinds):
        device.submit(job(kind, (slot,)), [DeviceBlock(slot)])
        assert began.wait(60), "the first is under way before the others come"
    go_on.set()
    device.drain()
    assert [result.job.slots for result in device.poll()] == [(0,), (2,), (1,)]
    device.close()


def test_caches_that_are_not_what_was_planned_are_refused() -> None:
    kv = caches("LBHNC")
    with pytest.raises(ConfigError, match=r"layers\.9"):
        find_pages(kv, [*NAMES, "layers.9"], BLOCKS)
    with pytest.raises(ConfigError, match="planned"):
        find_pages(kv, NAMES, BLOCKS - 1)
    with pytest.raises(ConfigError, match="differ"):
        find_pages({**kv, NAMES[1]: torch.zeros((BLOCKS, HEADS, TOKENS, 2))}, NAMES, BLOCKS)
    pages = find_pages(kv, NAMES, BLOCKS)
    with pytest.raises(ConfigError, match="bytes"):
        open_device(pages, HostPool(2, pages.block_bytes + 1))
    elsewhere = KvPages(tuple(layer.to("meta") for layer in pages.layers), None, BLOCKS, pages.page_bytes)
    with pytest.raises(ConfigError, match="meta device"):
        open_device(elsewhere, HostPool(2, pages.block_bytes))
