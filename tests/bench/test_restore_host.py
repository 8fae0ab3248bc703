"""What the machine says during a wave: processes and their children, devices, the page cache, what is stored."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path

import pytest

from forebay.assemble import Named
from forebay.bench.evidence import Kernel
from forebay.bench.restore import pagecache
from forebay.bench.restore.contents import sample_contents
from forebay.bench.restore.host import Host, Moved
from forebay.bench.restore.options import GroupOptions, Limits, RestoreOptions
from forebay.bench.restore.pagecache import drop_page_cache, resident_bytes
from forebay.bench.restore.results import Role
from forebay.bench.restore.run import run_restore
from forebay.bench.restore.sampler import Sampler, samples_of


class FakeHost:
    """/proc and /sys as directories, with this process in them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.host = Host(Kernel(proc=folder / "proc", sys=folder / "sys"))
        self.process(os.getpid(), 1)

    def process(
        self, pid: int, parent: int, *, read: int = 0, written: int = 0, ticks: int = 0, name: str = "x"
    ) -> None:
        place = self.folder / "proc" / str(pid)
        place.mkdir(parents=True, exist_ok=True)
        (place / "stat").write_text(f"{pid} ({name}) S {parent} 1 1 0 -1 0 0 0 0 0 {ticks} {ticks} 0 0 20 0\n")
        (place / "io").write_text(f"rchar: 9\nread_bytes: {read}\nwrite_bytes: {written}\n")

    def device(self, number: str, *, read: int, written: int) -> None:
        place = self.folder / "sys/dev/block" / number
        place.mkdir(parents=True, exist_ok=True)
        (place / "stat").write_text(f"1 0 {read // 512} 9 1 0 {written // 512} 9 0 0 0\n")


@pytest.fixture
def fake(tmp_path: Path) -> FakeHost:
    return FakeHost(tmp_path)


def test_a_server_counts_with_its_children_and_nobody_else_does(fake: FakeHost) -> None:
    fake.process(os.getpid(), 1, read=1, ticks=100)
    fake.process(70, os.getpid(), read=10)
    fake.process(80, 1, read=100, written=5)
    fake.process(81, 80, read=1000, name="a) S 1 (b")
    fake.process(82, 81, read=10_000)
    fake.process(90, 1, read=10**9)
    reading = fake.host.read((80,), ())
    assert reading.processes == Moved(11_111, 5)
    assert reading.core_s == pytest.approx(200 / os.sysconf("SC_CLK_TCK"))
    assert fake.host.read((), ()).processes == Moved(11, 0)


def test_a_ring_of_parents_ends_and_an_ended_process_is_left_out(fake: FakeHost) -> None:
    fake.process(70, 71, read=1)
    fake.process(71, 70, read=2)
    assert fake.host.read((70, 4_000_000), ()).processes == Moved(3, 0)


def test_what_may_not_be_read_is_unknown_and_not_nothing(fake: FakeHost) -> None:
    fake.process(80, 1)
    (fake.folder / "proc/80/io").unlink()
    (fake.folder / "proc/80/io").mkdir()  # as good as a file that may not be read, and root may read all
    assert fake.host.read((80,), ()).processes is None


def test_devices_add_up_and_a_missing_one_makes_all_unknown(fake: FakeHost) -> None:
    fake.device("8:1", read=5120, written=512)
    fake.device("8:2", read=1024, written=0)
    assert fake.host.moved_on(("8:1", "8:2")) == Moved(6144, 512)
    assert fake.host.moved_on(("8:1", "8:9")) is None
    assert fake.host.moved_on(()) is None


def test_a_real_child_is_counted_with_this_process() -> None:
    burn = "import sys; x = sum(i * i for i in range(3_000_000)); print('done', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        before = Host().read((), ()).core_s
        assert child.stdout is not None
        child.stdout.readline()
        after = Host().read((), ()).core_s
        child.communicate()
    assert before is not None
    assert after is not None
    assert after - before > 0.02


def test_own_reads_are_not_foreign(tmp_path: Path) -> None:
    """The counters of this process grow as much as the device's: nobody else was there."""
    fake, counted = FakeHost(tmp_path / "fake"), iter(range(0, 10**9, 512 * 10**5))
    (tmp_path / "pool").mkdir()

    class Counting(Host):
        def devices_of(self, roots: object) -> tuple[str, ...]:
            return ("8:1",)

        def read(self, processes: object, devices: object):  # type: ignore[no-untyped-def]
            moved = next(counted)
            fake.process(os.getpid(), 1, read=moved)
            fake.device("8:1", read=moved, written=0)
            return fake.host.read((), ("8:1",))

        def moved_on(self, devices: object) -> Moved | None:
            return None

    options = {"block_tokens": 256, "kv_scale": 0.004, "time_scale": 0.001, "host_bytes": 8_000_000}
    group = GroupOptions(name="it", role=Role.CANDIDATE, roots=(tmp_path / "pool",), options=options)
    workload = Named(kind="cold", options={"sessions": 1, "prefix_tokens": 512, "output_tokens": 2})
    record = run_restore(
        RestoreOptions(group=(group,), workload=workload, concurrency=(1,), rounds=1, limits=Limits(rounds=1)),
        host=Counting(),
    )
    [wave] = record.waves
    assert wave.read.process_bytes == wave.read.device_bytes == 512 * 10**5
    assert wave.foreign_bytes == 0
    assert wave.bandwidth == ()


class TestPageCache:
    def test_what_was_read_is_there_until_it_is_dropped(self, tmp_path: Path) -> None:
        if Kernel().medium_of(tmp_path).doubt:
            pytest.skip("not on a disk")
        for name in ("a", "b/c"):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_bytes(os.urandom(300_000))
        drop_page_cache([tmp_path])
        assert resident_bytes([tmp_path]) == 0
        (tmp_path / "b/c").read_bytes()
        assert resident_bytes([tmp_path]) == 74 * 4096
        with (tmp_path / "b/c").open("rb") as file:
            assert pagecache._mincore(file.fileno()) == 74 * 4096  # an older kernel's way says the same
        drop_page_cache([tmp_path])
        assert resident_bytes([tmp_path]) == 0

    def test_links_pipes_and_strangers_are_passed_over(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        (tmp_path / "loop").symlink_to(tmp_path)
        (tmp_path / "out").symlink_to("/proc/kmsg")
        (tmp_path / "empty").touch()
        assert resident_bytes([tmp_path, tmp_path / "gone"]) == 0
        drop_page_cache([tmp_path])


class TestSampler:
    """Readings in milliseconds and MB, at an interval of 100 ms."""

    @pytest.mark.parametrize(
        ("counts", "samples"),
        [
            ([(0, 0), (100, 50), (200, 150)], [(100, 500), (200, 1000)]),
            ([(0, 0), (100, 50), (101, 58)], [(101, 574)]),  # the 8 MB that came in 1 ms are no 8 GB/s
            ([(0, 0), (100, 50), (160, 80)], [(100, 500), (160, 500)]),
            ([(0, 0), (100, 50), (120, 100), (200, 150)], [(100, 500), (200, 1000)]),
            ([(0, 0), (1, 8)], [(1, 8000)]),  # all of the wave
            ([(0, 0), (0, 8)], []),
            ([], []),
        ],
    )
    def test_no_sample_is_of_a_moment(self, counts: list[tuple[int, int]], samples: list[tuple[int, int]]) -> None:
        given = [(7 + at_ms * 10**6, counted * 10**6) for at_ms, counted in counts]
        found = [(round(each.at_s * 1e3), int(each.bytes_per_s / 1e6)) for each in samples_of(given, 0.1, 7)]
        assert found == samples

    def test_everything_that_was_counted_is_in_the_samples(self) -> None:
        counted, passed = itertools.count(), threading.Event()

        def count() -> int | None:
            number = next(counted)
            if number == 5:
                passed.set()
            return None if number == 3 else number * 1000  # the kernel may not say, once

        epoch_ns = time.monotonic_ns()
        with Sampler(count, 0.002, epoch_ns) as sampler:
            assert passed.wait(30)
        ends_s = [0.0, *(each.at_s for each in sampler.samples)]
        assert ends_s == sorted(ends_s)
        assert all(each.bytes_per_s > 0 for each in sampler.samples)
        assert len(sampler.samples) <= next(counted) - 2


class TestContents:
    def test_unique_noise_is_sound(self, tmp_path: Path) -> None:
        for number in range(10):
            (tmp_path / str(number)).write_bytes(os.urandom(20_000))
        found = sample_contents([tmp_path], 0)
        assert found is not None
        assert (found.sampled_files, found.duplicate_files) == (10, 0)
        assert found.compressed_share > 0.99

    def test_equal_and_dull_bytes_behind_unique_headers_are_seen(self, tmp_path: Path) -> None:
        dull = b"forebay " * 4000
        (tmp_path / "pool").mkdir()
        for number in range(4):
            (tmp_path / "pool" / str(number)).write_bytes(os.urandom(64) + dull)
        found = sample_contents([tmp_path], 0)
        assert found is not None
        assert found.duplicate_files == 3
        assert found.compressed_share < 2 * len(zlib.compress(dull, 1)) / len(dull) + 0.01

    @pytest.mark.parametrize("folders", [1, 50])
    def test_a_root_that_is_a_pool_itself_is_looked_at_as_one(self, tmp_path: Path, folders: int) -> None:
        noise = os.urandom(20_000)
        for number in range(50):
            place = tmp_path if folders == 1 else tmp_path / str(number)
            place.mkdir(exist_ok=True)
            (place / f"block-{number}").write_bytes(os.urandom(64) + noise)
        found = sample_contents([tmp_path], 0)
        assert found is not None
        assert (found.sampled_files, found.duplicate_files) == (50, 49)

    def test_two_pools_may_hold_the_same(self, tmp_path: Path) -> None:
        noise = os.urandom(20_000)
        for pool in ("pool-0", "pool-1"):
            (tmp_path / pool).mkdir()
            (tmp_path / pool / "block").write_bytes(noise)
        found = sample_contents([tmp_path / "pool-0", tmp_path / "pool-1"], 0)
        assert found is not None
        assert found.duplicate_files == 0

    def test_small_files_and_links_are_no_blocks(self, tmp_path: Path) -> None:
        (tmp_path / "small").write_bytes(b"1" * 4096)
        (tmp_path / "big").symlink_to("/proc/self/exe")
        os.mkfifo(tmp_path / "pipe")
        assert sample_contents([tmp_path], 0) is None
