"""What lies under a path, on made-up and on real kernels, and when reads may be called physical."""

import mmap
import os
from pathlib import Path

import pytest

from forebay.bench.evidence import NO_READS, Evidence, Kernel, Medium, ReadCounts, Validity, Verdict

DISK = Medium(path="/pool", filesystem="ext4", source="/dev/sda1", device="sda1", device_number="8:1")


class FakeKernel:
    """/proc and /sys as directories."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kernel = Kernel(proc=folder / "proc", sys=folder / "sys")
        (folder / "proc/self").mkdir(parents=True)
        (folder / "sys/dev/block").mkdir(parents=True)
        (folder / "sys/class/block").mkdir(parents=True)
        self.mounts: list[str] = []

    def mount(self, point: Path | str, filesystem: str, source: str, number: str, options: str = "rw") -> None:
        escaped = str(point).replace(" ", r"\040")
        self.mounts.append(f"30 1 {number} / {escaped} rw,relatime shared:1 - {filesystem} {source} {options}")
        (self.folder / "proc/self/mountinfo").write_text("\n".join(self.mounts) + "\n")

    def device(self, name: str, number: str, *, sectors_read: int = 0) -> Path:
        place = self.folder / "sys/devices" / name
        place.mkdir(parents=True)
        (place / "dev").write_text(f"{number}\n")
        (place / "stat").write_text(f"  7 0 {sectors_read} 3 0 0 0 0 0 0 0\n")
        (self.folder / "sys/dev/block" / number).symlink_to(place)
        (self.folder / "sys/class/block" / name).symlink_to(place)
        return place


@pytest.fixture
def fake(tmp_path: Path) -> FakeKernel:
    return FakeKernel(tmp_path)


def test_a_partition_is_found_by_the_deepest_mount(fake: FakeKernel, tmp_path: Path) -> None:
    fake.mount("/", "ext4", "/dev/sda1", "8:1")
    fake.mount(tmp_path / "with blank", "xfs", "/dev/nvme0n1p2", "259:2")
    fake.device("nvme0n1p2", "259:2", sectors_read=100)
    (tmp_path / "with blank").mkdir()
    medium = fake.kernel.medium_of(tmp_path / "with blank")
    assert (medium.filesystem, medium.device, medium.device_number, medium.doubt) == ("xfs", "nvme0n1p2", "259:2", "")
    (tmp_path / "proc/self/io").write_text("rchar: 1\nread_bytes: 4096\nwrite_bytes: 0\n")
    assert fake.kernel.read_counts(medium) == ReadCounts(process_bytes=4096, device_bytes=51_200)


def test_a_later_mount_hides_an_earlier_one_at_the_same_place(fake: FakeKernel) -> None:
    fake.device("sda1", "8:1")
    fake.mount("/", "ext4", "/dev/sda1", "8:1")
    fake.mount("/", "tmpfs", "tmpfs", "0:30")
    assert "tmpfs" in fake.kernel.medium_of(Path("/")).doubt


def test_a_file_system_with_a_number_of_its_own_is_found_by_its_source(fake: FakeKernel) -> None:
    fake.mount("/", "btrfs", "/dev/sdb3", "0:44")
    fake.device("sdb3", "8:19")
    medium = fake.kernel.medium_of(Path("/"))
    assert (medium.device, medium.device_number, medium.doubt) == ("sdb3", "8:19", "")


@pytest.mark.parametrize("filesystem", ["tmpfs", "ramfs", "nfs4", "virtiofs", "zfs"])
def test_without_a_block_device_nothing_can_be_shown(fake: FakeKernel, filesystem: str) -> None:
    fake.mount("/", filesystem, "somewhere", "0:30")
    medium = fake.kernel.medium_of(Path("/"))
    assert filesystem in medium.doubt
    assert fake.kernel.read_counts(medium) == ReadCounts(process_bytes=None, device_bytes=None)
    assert Evidence(medium=medium, wanted_bytes=1, read=NO_READS).reasons


def test_an_overlay_is_followed_to_its_upper_directory(fake: FakeKernel, tmp_path: Path) -> None:
    disk, upper, root = tmp_path / "disk", tmp_path / "disk/upper", tmp_path / "root"
    upper.mkdir(parents=True)
    root.mkdir()
    fake.device("sda1", "8:1")
    fake.mount(disk, "ext4", "/dev/sda1", "8:1")
    fake.mount(root, "overlay", "overlay", "0:50", f"rw,lowerdir=/x,upperdir={upper},workdir=/y")
    medium = fake.kernel.medium_of(root)
    assert (medium.device, medium.filesystem, medium.doubt) == ("sda1", "overlay on ext4", "")
    upper.rmdir()
    assert "overlay" in fake.kernel.medium_of(root).doubt


def test_memory_beneath_a_stack_of_devices_is_seen(fake: FakeKernel, tmp_path: Path) -> None:
    zram = fake.device("zram0", "252:0")
    mapped = fake.device("dm-0", "253:0")
    (mapped / "slaves").mkdir()
    fake.mount("/", "ext4", "/dev/mapper/x", "253:0")
    assert fake.kernel.medium_of(Path("/")).doubt == ""
    (mapped / "slaves/zram0").symlink_to(zram)
    assert "zram0 is memory" in fake.kernel.medium_of(Path("/")).doubt


def test_a_loop_device_is_as_good_as_its_file(fake: FakeKernel, tmp_path: Path) -> None:
    shm = tmp_path / "shm"
    shm.mkdir()
    loop = fake.device("loop0", "7:0")
    (loop / "loop").mkdir()
    (loop / "loop/backing_file").write_text(f"{shm}/image\n")
    fake.mount("/", "ext4", "/dev/loop0", "7:0")
    fake.mount(shm, "tmpfs", "tmpfs", "0:30")
    assert "tmpfs" in fake.kernel.medium_of(Path("/")).doubt


def test_an_unreadable_mount_table_is_a_doubt(fake: FakeKernel) -> None:
    assert fake.kernel.medium_of(Path("/")).doubt == "the mount table cannot be read"


@pytest.mark.parametrize(
    ("process_bytes", "device_bytes", "said"),
    [
        (1000, 1000, ()),
        (950, 2000, ()),
        (900, 1000, ("this process read 90%",)),
        (1000, 0, ("the device read 0%",)),
        (None, 1000, ("does not say what this process read",)),
        (0, None, ("this process read 0%", "does not say what the device read")),
    ],
)
def test_both_counters_have_to_show_the_working_set(
    process_bytes: int | None, device_bytes: int | None, said: tuple[str, ...]
) -> None:
    read = ReadCounts(process_bytes=process_bytes, device_bytes=device_bytes)
    reasons = Evidence(medium=DISK, wanted_bytes=1000, read=read).reasons
    assert len(reasons) == len(said)
    assert all(words in reason for words, reason in zip(said, reasons, strict=True))
    assert Verdict.of(reasons).validity is (Validity.INVALID if said else Validity.VALID)


def test_reading_nothing_is_no_evidence() -> None:
    assert Evidence(medium=DISK, wanted_bytes=0, read=NO_READS).reasons == ("nothing was read from cold disk",)


def test_counts_add_up_and_unknown_stays_unknown() -> None:
    later, earlier = ReadCounts(process_bytes=7, device_bytes=None), ReadCounts(process_bytes=3, device_bytes=1)
    assert later.since(earlier) == ReadCounts(process_bytes=4, device_bytes=None)
    assert NO_READS.plus(later).plus(earlier) == ReadCounts(process_bytes=10, device_bytes=None)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm here")
def test_shared_memory_is_no_disk() -> None:
    assert "memory" in Kernel().medium_of(Path("/dev/shm")).doubt


def test_the_real_kernel_counts_a_direct_read_and_no_cached_one(tmp_path: Path) -> None:
    kernel, path, length = Kernel(), tmp_path / "file", 4 * 2**20
    medium = kernel.medium_of(tmp_path)
    if medium.doubt or kernel.read_counts(medium).process_bytes is None:
        pytest.skip(f"no block device here: {medium.doubt}")
    path.write_bytes(os.urandom(length))
    os.sync()
    before = kernel.read_counts(medium)
    path.read_bytes()  # still in the page cache
    cached = kernel.read_counts(medium).since(before)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        with mmap.mmap(-1, length) as into:
            assert os.readv(descriptor, [into]) == length
    finally:
        os.close(descriptor)
    both = kernel.read_counts(medium).since(before)
    assert cached.process_bytes is not None
    assert cached.process_bytes < length / 2
    assert both.process_bytes is not None
    assert both.process_bytes >= length
    assert both.device_bytes is not None
    assert both.device_bytes >= length
