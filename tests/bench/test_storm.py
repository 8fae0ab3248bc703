"""Restore storms: under virtual time what flow control promises, and once through the real file tier."""

from __future__ import annotations

import functools
import json
import statistics
import time
import xml.etree.ElementTree
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from forebay.assemble import StoreConfig, open_engine
from forebay.bench.evidence import Validity
from forebay.bench.storm import simulate
from forebay.bench.storm.device import StampDevice
from forebay.bench.storm.options import StormOptions, check_options, parse_mix, session_blocks
from forebay.bench.storm.plot import render_plot
from forebay.bench.storm.published import CELLS, SESSION_BYTES
from forebay.bench.storm.report import exit_code
from forebay.bench.storm.results import ORDERED, SHARED, Storm, Wave, percentile, storm_of
from forebay.bench.storm.run import run_storms, storm_namespace
from forebay.bench.storm.simulate import MODEL_BLOCK_BYTES, TIER, ModelStorm, model_keys, model_wave, model_world
from forebay.bench.storm.wave import restore, start_all, store
from forebay.cli import cli
from forebay.engine import Engine, EngineOptions
from forebay.errors import ConfigError
from forebay.events import Event, JobEnded, PrefetchEnded, PrefetchFate, Totals
from forebay.flow import FlowOptions
from forebay.keys import block_keys
from forebay.types import BlockKey, DeviceBlock, JobKind, Request, Traffic

SLOWER_IN_ORDER = [
    Wave(order=ORDERED, round=1, restored_bytes=100, ttft_s=(2.0,)),
    Wave(order=SHARED, round=1, restored_bytes=100, ttft_s=(1.0,)),
]
BLOCK_BYTES = 2_000_000
MODEL = ModelStorm(block_bytes=BLOCK_BYTES, bytes_per_s=2e9, latency_ns=2_000_000, host_blocks=512)
"""1 ms a block; 3 blocks in flight saturate it."""


@functools.cache
def storm(sessions: int, blocks: int, short_blocks: int, host_blocks: int) -> Storm:
    """Both orders, with every second session short."""
    model = msgspec.structs.replace(MODEL, host_blocks=host_blocks)
    keys = model_keys(sessions, blocks)
    wanted = [key[:short_blocks] if number % 2 else key for number, key in enumerate(keys)]
    short = tuple(range(1, sessions, 2)) if short_blocks < blocks else ()
    waves = [msgspec.structs.replace(model_wave(model, order, wanted), short=short) for order in (ORDERED, SHARED)]
    return storm_of(tuple(map(len, wanted)), waves)


@pytest.mark.parametrize("sessions", [16, 32])
def test_in_order_the_mean_and_the_median_fall_by_two_fifths_and_the_last_ends_no_later(sessions: int) -> None:
    found = storm(sessions, 96, 96, 512)
    assert found.missed == ()
    assert found.comparison.mean < 0.6
    assert found.comparison.p50 < 0.6
    assert found.comparison.p99 < 1.05
    assert found.comparison.bytes_per_s > 0.97
    whole_s = sessions * 96 * 1e-3
    assert found.waves[0].whole_s == pytest.approx(whole_s, rel=0.05)  # the device never idles


@pytest.mark.parametrize(("blocks", "share"), [(96, 0.98), (92, 0.98), (33, 0.98), (17, 0.96)])
def test_the_device_stays_busy_whatever_the_sessions_last_jobs_are_like(blocks: int, share: float) -> None:
    """A job is up to 16 blocks here; with a latency of 6 blocks, the device runs dry unless a few are always behind."""
    slow = msgspec.structs.replace(MODEL, bytes_per_s=BLOCK_BYTES / 1e-3, latency_ns=6_000_000, host_blocks=512)
    wave = model_wave(slow, ORDERED, model_keys(16, blocks))
    assert wave.bytes_per_s > share * slow.bytes_per_s


def test_short_sessions_gain_most_and_long_ones_lose_nothing() -> None:
    found = storm(32, 96, 10, 512)
    assert found.missed == ()
    assert found.comparison.short_mean is not None
    assert found.comparison.long_mean is not None
    assert found.comparison.short_mean < found.comparison.long_mean < 1.0
    assert found.comparison.short_mean < 0.55
    ordered, shared = found.waves
    late = [mine / other for mine, other in zip(ordered.ttft_s, shared.ttft_s, strict=True)]
    assert max(late) < 1.05  # nobody pays for it


def test_a_staging_pool_of_a_twentieth_costs_nothing_at_the_end() -> None:
    ample, scarce = storm(16, 60, 60, 1200), storm(16, 60, 60, 16 * 60 // 20)
    for mine, other in zip(scarce.waves, ample.waves, strict=True):  # `model_wave` has checked that all is at rest
        assert mine.restored_bytes == 16 * 60 * BLOCK_BYTES
        assert percentile(mine.ttft_s, 0.99) < 1.10 * percentile(other.ttft_s, 0.99)


def test_a_staging_pool_of_a_twentieth_fails_nothing_and_is_free_at_the_end() -> None:
    totals, keys = Totals(), model_keys(16, 60)
    world = model_world(msgspec.structs.replace(MODEL, host_blocks=48), keys, totals.add)
    assert restore(world.engine, keys).blocks == 16 * 60
    assert world.device.wrong_blocks == 0
    assert not totals.failures
    assert not totals.overdue
    assert not totals.refused
    world.engine.check_idle()
    world.engine.drop_host_copies()
    assert world.pool.free_slots == 48


# --- a wave that was foreseen

WAKERS, WAKER_BLOCKS, SPAN_NS, AHEAD_S = 32, 25, 5_000_000_000, 30.0
SLOW = msgspec.structs.replace(
    MODEL,
    bytes_per_s=WAKERS * WAKER_BLOCKS * BLOCK_BYTES / 25.0,
    host_blocks=2 * WAKERS * WAKER_BLOCKS,
    engine=EngineOptions(prefetch_pool_share=0.6, load_deadline_s=600.0),
)
"""The whole wave takes 25 s."""


class Wave32:
    """32 requests that all come some time from now, with or without a word beforehand."""

    def __init__(self, *, foreseen: bool, ahead_s: float = AHEAD_S, prefetch_share: float = 0.9) -> None:
        self.events: list[Event] = []
        self.totals = Totals()
        keys = model_keys(WAKERS, WAKER_BLOCKS)
        options = msgspec.structs.replace(SLOW.engine, flow=FlowOptions(prefetch_share=prefetch_share))
        world = model_world(msgspec.structs.replace(SLOW, engine=options), keys, self._note)
        self.engine, now_ns = world.engine, world.executor.now_ns
        due_ns = now_ns() + int(ahead_s * 1e9)
        if foreseen:
            for number, session in enumerate(keys):
                assert self.engine.prefetch(Request(str(number), session), due_ns) == WAKER_BLOCKS
        while now_ns() < due_ns:
            self.engine.poll()
            self.engine.wait(due_ns)
        self.ttft_s = restore(self.engine, keys).ttft_s

    def _note(self, event: Event) -> None:
        self.events.append(event)
        self.totals.add(event)

    def peak_bytes_per_s(self, *kinds: Traffic, span_ns: int = SPAN_NS) -> float:
        """Most bytes that reads of these kinds brought within any span, of 5 s, that begins with the end of a job."""
        reads = [
            (event.at_ns, event.job.moved_bytes / MODEL_BLOCK_BYTES * BLOCK_BYTES)
            for event in self.events
            if isinstance(event, JobEnded) and event.job.kind is JobKind.READ and event.job.traffic in kinds
        ]
        within = (sum(moved for at, moved in reads if begins < at <= begins + span_ns) for begins, _ in reads)
        return max(within, default=0.0) / (span_ns / 1e9)


def test_a_wave_that_was_foreseen_comes_from_memory_and_asks_nothing_of_the_device_when_it_breaks() -> None:
    foreseen, unforeseen = Wave32(foreseen=True), Wave32(foreseen=False)
    full_bytes_per_s = SLOW.bytes_per_s
    assert max(unforeseen.ttft_s) == pytest.approx(25.0, rel=0.05)
    assert max(foreseen.ttft_s) < 0.01  # a hit in memory: copies only
    assert foreseen.totals.prefetches == {PrefetchFate.USED: WAKERS}
    assert unforeseen.peak_bytes_per_s(Traffic.DEMAND) == pytest.approx(full_bytes_per_s, rel=0.15)
    assert 3 * foreseen.peak_bytes_per_s(Traffic.DEMAND) <= unforeseen.peak_bytes_per_s(Traffic.DEMAND)
    # the device itself is as busy as prefetches may make it, only earlier
    peak_share = foreseen.peak_bytes_per_s(Traffic.DEMAND, Traffic.PREFETCH) / full_bytes_per_s
    assert 0.75 < peak_share < 1.05


def test_told_early_enough_a_wave_takes_a_third_of_the_device_at_its_peak() -> None:
    """25 s of work within 30 s cannot take less than 83 % of the device; within 110 s it can take a quarter."""
    early = Wave32(foreseen=True, ahead_s=110.0, prefetch_share=0.25)
    assert max(early.ttft_s) < 0.01
    assert early.totals.prefetches == {PrefetchFate.USED: WAKERS}
    assert early.peak_bytes_per_s(Traffic.DEMAND) == 0
    peak_bytes_per_s = early.peak_bytes_per_s(Traffic.PREFETCH, span_ns=2 * SPAN_NS)  # a session is read in one go
    assert 3 * peak_bytes_per_s <= SLOW.bytes_per_s


# --- one block, one read


def test_fifty_requests_for_one_prefix_read_each_block_once_and_none_waits_for_the_others() -> None:
    """Requests, not threads: an engine belongs to one thread, and has no call that many may make at once."""
    prefix = model_keys(1, 64)[0]
    totals = Totals()
    world = model_world(MODEL, [prefix], totals.add)
    alone_s = max(restore(model_world(MODEL, [prefix], Totals().add).engine, [prefix]).ttft_s)
    together = restore(world.engine, [prefix] * 50)
    assert together.blocks == 50 * 64
    assert totals.moved_blocks[TIER, JobKind.READ] == 64
    assert max(together.ttft_s) < 1.5 * alone_s
    world.engine.check_idle()


# --- who goes first, and how fast


def reads_between(events: list[Event], began_ns: int, ended_ns: int) -> int:
    return sum(
        event.job.moved_bytes
        for event in events
        if isinstance(event, JobEnded) and event.job.kind is JobKind.READ and began_ns < event.at_ns <= ended_ns
    )


def test_a_rate_limit_that_is_set_and_lifted_while_loads_run_takes_effect() -> None:
    events: list[Event] = []
    keys = model_keys(4, 600)
    world = model_world(MODEL, keys, events.append)
    engine, clock = world.engine, world.executor.now_ns
    start_all(engine, {str(number): session for number, session in enumerate(keys)})
    scale = MODEL_BLOCK_BYTES / BLOCK_BYTES

    def run(seconds: float) -> float:
        """Bytes a second, at full size."""
        began_ns = clock()
        while clock() < began_ns + seconds * 1e9:
            engine.poll()
            engine.wait(began_ns + int(seconds * 1e9))
        engine.poll()
        return reads_between(events, began_ns, clock()) / scale / seconds

    assert run(0.3) == pytest.approx(2e9, rel=0.2)
    engine.limit_rate(TIER, Traffic.DEMAND, 0.5e9 * scale)
    run(0.2)  # what was in flight, and the bucket
    assert run(1.0) == pytest.approx(0.5e9, rel=0.15)
    engine.limit_rate(TIER, Traffic.DEMAND, None)
    run(0.1)
    assert run(0.3) == pytest.approx(2e9, rel=0.2)


def test_demand_passes_prefetches_and_writes() -> None:
    keys = model_keys(6, 100)
    wanted, foreseen = keys[0], keys[1:]
    alone_s = max(restore(model_world(MODEL, [wanted], Totals().add).engine, [wanted]).ttft_s)
    events: list[Event] = []
    world = model_world(MODEL, keys, events.append)
    engine, clock = world.engine, world.executor.now_ns
    for number, session in enumerate(foreseen):
        engine.prefetch(Request(str(number), session), clock() + 10**9)
    fresh = [BlockKey(b"w" * 24 + position.to_bytes(8)) for position in range(64)]
    engine.offer(fresh, [DeviceBlock(position) for position in range(64)])
    for _ in range(4):
        engine.poll()
        engine.wait(clock() + 10_000_000)
    took = restore(engine, [wanted])
    # what was in flight when it came cannot be called back, and writes keep their tenth
    assert max(took.ttft_s) < 1.35 * alone_s + 0.064
    last_demand_ns = max(event.at_ns for event in events if is_read(event, Traffic.DEMAND))
    first_demand_ns = min(event.at_ns for event in events if is_read(event, Traffic.DEMAND))
    run_until(engine, clock() + 200_000_000)
    after = [event.at_ns for event in events if is_read(event, Traffic.PREFETCH) and first_demand_ns < event.at_ns]
    assert after  # they went on
    assert min(after) > last_demand_ns


def is_read(event: Event, traffic: Traffic) -> bool:
    return isinstance(event, JobEnded) and event.job.kind is JobKind.READ and event.job.traffic is traffic


# --- prefetches that come to nothing


def test_a_prefetch_without_its_request_is_dropped_counted_and_leaves_the_pool() -> None:
    totals, keys = Totals(), model_keys(1, 20)
    world = model_world(MODEL, keys, totals.add)
    engine, clock = world.engine, world.executor.now_ns
    engine.prefetch(Request("no-show", keys[0]), clock() + 10**9)
    run_until(world.engine, clock() + 20 * 10**9)
    assert totals.prefetches == {PrefetchFate.UNUSED: 1}
    engine.check_idle()
    engine.drop_host_copies()
    assert world.pool.free_slots == MODEL.host_blocks


def test_a_prefetch_that_cannot_be_in_time_is_dropped_counted_and_reads_nothing_more() -> None:
    events: list[Event] = []
    totals, keys = Totals(), model_keys(2, 400)
    world = model_world(MODEL, keys, lambda event: (events.append(event), totals.add(event))[1])
    engine, clock = world.engine, world.executor.now_ns
    start_all(engine, {"demand": keys[0]})  # holds the device for 0.4 s
    engine.prefetch(Request("late", keys[1]), clock() + 100_000_000)
    run_until(engine, clock() + 10**9)
    assert totals.prefetches == {PrefetchFate.LATE: 1}
    (ended,) = (event for event in events if isinstance(event, PrefetchEnded))
    assert (ended.planned_blocks, ended.arrived_blocks) == (400, 0)
    assert not [event for event in events if is_read(event, Traffic.PREFETCH)]
    engine.check_idle()


def run_until(engine: Engine, until_ns: int) -> None:
    while engine.now_ns() < until_ns:
        engine.poll()
        engine.wait(until_ns)


# --- the bench itself


def test_a_real_storm_restores_every_byte_in_both_orders_and_leaves_nothing_behind(tmp_path: Path) -> None:
    roots = (tmp_path / "disk",)
    roots[0].mkdir()
    options = StormOptions(
        roots=roots, sessions=(4,), bytes_per_session=2**20, rounds=1, block_bytes=2**16, host_bytes=2**21, out=tmp_path
    )
    record = run_storms(options)
    (found,) = record.storms
    assert found.blocks == (16, 16, 16, 16)
    assert {wave.order for wave in found.waves} == {ORDERED, SHARED}
    assert all(wave.restored_bytes == 4 * 2**20 for wave in found.waves)
    assert record.wrong_blocks == 0
    assert not [reason for reason in record.verdict.reasons if "restored" in reason or "asked for" in reason]
    assert list(roots[0].iterdir()) == []
    met = msgspec.structs.replace(found, missed=())
    missed = msgspec.structs.replace(found, missed=("p50 is 12.0% lower, not 40%",))
    for validity, storms, code in (
        (Validity.VALID, (met, met), 0),
        (Validity.VALID, (met, missed), 1),
        (Validity.INVALID, (met,), 3),
        (Validity.INVALID, (missed,), 3),
    ):
        verdict = msgspec.structs.replace(record.verdict, validity=validity)
        assert exit_code(msgspec.structs.replace(record, verdict=verdict, storms=storms)) == code


def test_fifty_requests_for_one_prefix_read_it_once_from_a_real_disk(tmp_path: Path) -> None:
    """How long it takes is held to a limit under virtual time only: a disk here may be anything."""
    namespace = storm_namespace(2**16)
    config = StoreConfig.embedded([tmp_path / "pool"], host_bytes=2**24, capacity_bytes=2**30)
    keys = block_keys(namespace, list(range(64 * namespace.block_tokens)))
    for wanted in (0, 50):
        totals = Totals()
        engine = open_engine(config, namespace, lambda pool: StampDevice(pool, time.monotonic_ns), emit=totals.add)
        try:
            if not wanted:
                store(engine, keys)
                continue
            assert restore(engine, [keys] * wanted).blocks == wanted * 64
            assert totals.moved_blocks["file", JobKind.READ] == 64
            assert not totals.failures
            engine.check_idle()
        finally:
            engine.close()


def test_in_memory_nothing_is_called_cold(tmp_path: Path) -> None:
    shm = Path("/dev/shm")
    if not shm.is_dir():
        pytest.skip("no /dev/shm here")
    options = StormOptions(
        roots=(shm,), sessions=(2,), bytes_per_session=2**18, rounds=1, block_bytes=2**16, host_bytes=2**21,
        out=tmp_path,
    )  # fmt: skip
    assert run_storms(options).verdict.validity is Validity.INVALID


def test_the_record_compares_round_by_round() -> None:
    waves = [
        Wave(order=ORDERED, round=1, restored_bytes=100, ttft_s=(1.0, 2.0)),
        Wave(order=SHARED, round=1, restored_bytes=100, ttft_s=(2.0, 2.0)),
        Wave(order=SHARED, round=2, restored_bytes=100, ttft_s=(20.0, 20.0)),
        Wave(order=ORDERED, round=2, restored_bytes=100, ttft_s=(10.0, 22.0)),
    ]
    found = storm_of((1, 1), waves)
    assert found.comparison.mean == pytest.approx(statistics.median([0.75, 0.8]))
    assert found.comparison.p50 == pytest.approx(0.5)
    assert found.comparison.p99 == pytest.approx(1.05)
    assert found.missed == ("mean is 22.5% lower, not 40%", "bandwidth is 4.5% lower, not 3% at most")
    mixed = msgspec.structs.replace(found.comparison, short_mean=0.7, long_mean=0.6)
    assert "short sessions gain 30.0% and long ones 40.0%: short ones have to gain most" in mixed.missed
    assert msgspec.structs.replace(mixed, short_mean=0.6).missed == found.missed
    svg = xml.etree.ElementTree.fromstring(render_plot([found], "two <storms>"))
    assert len(svg.findall("{http://www.w3.org/2000/svg}path")) == 4


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"roots": ()}, "name one"),
        ({"roots": (Path("/nowhere/at/all"),)}, "is not a directory"),
        ({"sessions": (1,)}, "--sessions"),
        ({"sessions": ()}, "--sessions"),
        ({"rounds": 0}, "--rounds"),
        ({"block_bytes": 100}, "--block-bytes"),
        ({"host_bytes": 2**20}, "--host-bytes"),
        ({"host_bytes": 2**60}, "--host-bytes"),
        ({"bytes_per_session": 2**60}, "free"),
        ({"out": Path("/nowhere/at/all")}, "--out"),
    ],
)
def test_bad_options_are_one_line(tmp_path: Path, wrong: dict[str, object], says: str) -> None:
    good = StormOptions(roots=(tmp_path,), out=tmp_path, sessions=(2,), bytes_per_session=2**20, host_bytes=2**26)
    check_options(good)
    with pytest.raises(ConfigError, match=says) as caught:
        check_options(msgspec.structs.replace(good, **wrong))
    assert "\n" not in str(caught.value)


def test_a_mix_is_short_to_long() -> None:
    assert parse_mix("1:10") == 0.1
    for text in ("10:1", "0:1", "1", "1:2:3", "a:b", "-1:2", "1:٣", "1:99999999"):
        with pytest.raises(ConfigError):
            parse_mix(text)
    options = StormOptions(roots=(), bytes_per_session=100, block_bytes=1, short_share=0.1)
    assert session_blocks(options, 3) == (100, 10, 100)


def test_published_storms_are_simulated_and_their_figures_scaled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = CELLS[3]
    monkeypatch.setattr(simulate, "CELLS", (cell,))
    told = ("bench", "storm", "--simulate", "--host-bytes", "4GiB", "--out", str(tmp_path))
    result = CliRunner().invoke(cli, told, standalone_mode=False)
    assert result.return_value == 0
    assert "Published restore storms" in result.stdout
    (implied,) = json.loads((tmp_path / "storm.json").read_bytes())
    ordered, shared = implied["storm"]["summaries"]
    transfer_s = 8 * SESSION_BYTES / cell.medium.bytes_per_s
    assert shared["p50_s"] == pytest.approx(transfer_s, rel=0.05)
    assert ordered["p50_s"] == pytest.approx(transfer_s / 2, rel=0.1)
    assert implied["implied_p50_s"] == pytest.approx(cell.ttft_p50_s * ordered["p50_s"] / shared["p50_s"])
    assert implied["implied_mean_s"] == pytest.approx(cell.ttft_p50_s * ordered["mean_s"] / shared["mean_s"])
    worse = simulate.Implied(
        medium="m", bytes_per_s=1.0, sessions=1, published_p50_s=1.0, implied_p50_s=1.0, implied_mean_s=1.0,
        storm=storm_of((1,), SLOWER_IN_ORDER),
    )  # fmt: skip
    monkeypatch.setattr(simulate, "simulate", lambda host_bytes, progress: (worse,))
    assert CliRunner().invoke(cli, told, standalone_mode=False).return_value == 1


def test_the_command_writes_json_and_a_picture(tmp_path: Path) -> None:
    told = (
        "bench", "storm", str(tmp_path), "--sessions", "2", "--bytes-per-session", "512KiB", "--rounds", "1",
        "--block-bytes", "64KiB", "--host-bytes", "2MiB", "--out", str(tmp_path), "--json",
    )  # fmt: skip
    result = CliRunner().invoke(cli, told, standalone_mode=False)
    assert result.return_value in (0, 1, 3)  # how fast a test's machine is says nothing
    assert json.loads(result.stdout)["storms"][0]["sessions"] == 2
    assert (tmp_path / "storm.json").read_bytes() == result.stdout.encode()
    xml.etree.ElementTree.parse(tmp_path / "storm.svg")
