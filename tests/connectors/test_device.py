"""The paged device cache and the session buffer, without a model."""

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from forebay.connectors.transformers.device import BlockShape, PagedDeviceCache  # noqa: E402
from forebay.connectors.transformers.session import SessionKV  # noqa: E402
from forebay.errors import ConfigError  # noqa: E402
from forebay.hostpool import HostPool  # noqa: E402
from forebay.policies.lru import LRU  # noqa: E402
from forebay.types import HOST, BlockKey, DeviceBlock, Job, JobId, JobKind, Outcome, Slot  # noqa: E402

pytestmark = pytest.mark.model
CPU = torch.device("cpu")


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(32, "little"))


def shape(dtype: torch.dtype = torch.float32) -> BlockShape:
    return BlockShape(layers=3, kv_heads=2, block_tokens=4, head_dim=5, dtype=dtype)


def cache_of(blocks: int, dtype: torch.dtype = torch.float32, slots: int = 8) -> tuple[PagedDeviceCache, HostPool]:
    pool = HostPool(slots, shape(dtype).block_bytes)
    return PagedDeviceCache(pool, shape(dtype), blocks, device=CPU, policy=LRU()), pool


def job(kind: JobKind, keys: list[int], slots: list[int]) -> Job:
    return Job(JobId(1), kind, HOST, tuple(map(key, keys)), tuple(map(Slot, slots)), 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_copies_keep_every_bit(dtype: torch.dtype) -> None:
    device, pool = cache_of(4, dtype)
    random = torch.randint(0, 256, (4, shape(dtype).block_bytes), dtype=torch.uint8)  # NaNs with payloads among them
    device.blocks.view(4, -1).view(torch.uint8).copy_(random)
    device.submit(job(JobKind.COPY_OUT, [1, 2], [7, 3]), [DeviceBlock(2), DeviceBlock(0)])
    (out,) = device.poll()
    assert set(out.outcomes.values()) == {Outcome.OK}
    assert bytes(pool.view(Slot(7)))[: pool.block_bytes] == bytes(random[2].numpy())
    assert bytes(pool.view(Slot(3)))[: pool.block_bytes] == bytes(random[0].numpy())
    device.submit(job(JobKind.COPY_IN, [1, 2], [7, 3]), [DeviceBlock(3), DeviceBlock(1)])
    device.poll()
    held = device.blocks.view(4, -1).view(torch.uint8)
    assert torch.equal(held, random[[0, 0, 2, 2]])


def test_a_copy_that_cannot_be_made_is_a_failed_outcome() -> None:
    device, _ = cache_of(2)
    device.submit(job(JobKind.COPY_OUT, [1, 2, 3], [0, 999, 1]), [DeviceBlock(0), DeviceBlock(0), DeviceBlock(99)])
    (result,) = device.poll()
    assert result.outcomes == {key(1): Outcome.OK, key(2): Outcome.FAILED, key(3): Outcome.FAILED}
    assert result.started_ns <= result.finished_ns
    assert not device.poll()


def test_gather_is_the_inverse_of_scatter() -> None:
    device, _ = cache_of(8)
    one, other = SessionKV(shape(), 6, CPU), SessionKV(shape(), 6, CPU)
    one.buffer.normal_()
    chosen = [DeviceBlock(b) for b in (5, 0, 7)]
    one.scatter(2, device.blocks, chosen)
    assert torch.equal(device.blocks[5, 1, 0], one.buffer[1, 0, :, 8:12])  # block 2 is tokens 8 to 11
    other.gather(1, device.blocks, chosen)
    assert torch.equal(other.buffer[:, :, :, 4:16], one.buffer[:, :, :, 8:20])
    assert not other.buffer[:, :, :, :4].any()
    assert not other.buffer[:, :, :, 16:].any()


def test_a_layer_appends_in_place() -> None:
    kv = SessionKV(shape(), 2, CPU)
    layer = kv.cache.layers[1]
    before = layer.keys.data_ptr()
    first = torch.randn(1, 2, 3, 5)
    layer.update(first, first + 1)
    second = torch.randn(1, 2, 1, 5)
    keys, values = layer.update(second, second + 1)
    assert torch.equal(keys, torch.cat([first, second], dim=2))
    assert torch.equal(values, torch.cat([first, second], dim=2) + 1)
    assert keys.data_ptr() == before == kv.buffer[1, 0].data_ptr()
    assert layer.get_mask_sizes(5) == (9, 0)
    kv.tokens = 2
    assert kv.cache.get_seq_length() == 2


def test_impossible_caches_are_refused() -> None:
    pool = HostPool(2, shape().block_bytes)
    with pytest.raises(ConfigError, match="give it more"):
        PagedDeviceCache(pool, shape(), 0, device=CPU, policy=LRU())
    with pytest.raises(ConfigError, match="namespace"):
        PagedDeviceCache(HostPool(2, 4096), shape(), 2, device=CPU, policy=LRU())
    with pytest.raises(ConfigError, match="ask for less"):
        PagedDeviceCache(pool, shape(), 2**40, device=CPU, policy=LRU())


Step = st.one_of(
    st.tuples(st.just("insert"), st.integers(0, 11)),
    st.tuples(st.just("drop"), st.integers(0, 11)),
    st.tuples(st.just("evict"), st.integers(1, 3)),
    st.tuples(st.just("return"), st.integers(1, 3)),
)


@settings(deadline=None, max_examples=60)
@given(st.lists(Step, max_size=40))
def test_every_block_is_free_or_hot_once(steps: list[tuple[str, int]]) -> None:
    device, _ = cache_of(5)
    hot: list[int] = []  # in the order of last insertion, as LRU ranks them
    for step, number in steps:
        match step:
            case "insert":
                blocks = device.take(1)
                assert bool(blocks) == (len(hot) < 5)
                if blocks:
                    device.insert([key(number)], blocks)
                    hot += [] if number in hot else [number]
            case "drop" if number in hot:
                device.drop([key(number)])
                hot.remove(number)
            case "evict":
                victims = device.victims(number)
                assert list(victims) == [key(n) for n in hot[:number]]
                device.drop(victims)
                del hot[:number]
            case "return":
                device.give(device.take(number))
        assert device.hot_keys() == [key(n) for n in hot]
        assert device.free_blocks + device.hot_blocks == 5
        lying = {device.block(key(n)) for n in hot}
        assert len(lying) == len(hot)
