"""What sysfs says about disks, accelerators and network ports, on a made-up sysfs."""

from __future__ import annotations

from pathlib import Path

import pytest

from forebay.bench.environment import describe_environment
from forebay.bench.evidence import Kernel
from forebay.bench.hardware import accelerators, disk_facts, network_ports


class FakeSys:
    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, place: str, **content: str) -> Path:
        folder = self.root / place
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in content.items():
            (folder / name).write_text(text + "\n")
        return folder

    def pci(self, address: str, kind: str, **content: str) -> Path:
        place = self.write(
            f"devices/pci0000:00/{address}", **{"class": kind}, vendor="0x144d", device="0xa80a", numa_node="1",
            current_link_speed="16.0 GT/s PCIe", current_link_width="4", max_link_speed="16.0 GT/s PCIe",
            max_link_width="4", **content,
        )  # fmt: skip
        self.link(f"bus/pci/devices/{address}", place)
        return place

    def link(self, place: str, target: Path) -> None:
        (self.root / place).parent.mkdir(parents=True, exist_ok=True)
        (self.root / place).symlink_to(target)


@pytest.fixture
def sys(tmp_path: Path) -> FakeSys:
    return FakeSys(tmp_path)


def local_nvme(sys: FakeSys, number: int = 0) -> Path:
    sys.pci(f"0000:0{number}:00.0", "0x010802")
    controller = sys.write(
        f"devices/pci0000:00/0000:0{number}:00.0/nvme/nvme{number}", transport="pcie", model="SSD 9000",
        queue_count="17", firmware_rev="1.2", address=f"0000:0{number}:00.0",
    )  # fmt: skip
    disk = sys.write(f"devices/pci0000:00/0000:0{number}:00.0/nvme/nvme{number}/nvme{number}n1")
    sys.write(
        str(disk.relative_to(sys.root)) + "/queue", rotational="0", scheduler="[none] mq-deadline", max_segments="127",
        nr_requests="1023", max_sectors_kb="1280", logical_block_size="512", write_cache="write through",
    )  # fmt: skip
    (disk / "device").symlink_to(controller)
    return disk


def test_a_local_drive_with_its_link_and_node(sys: FakeSys) -> None:
    facts = disk_facts(local_nvme(sys))
    assert facts["transport"] == "NVMe over pcie"
    assert facts["model"] == "SSD 9000"
    assert facts["PCIe"] == "16.0 GT/s PCIe x4"
    assert "PCIe, at most" not in facts  # it has what it can have
    assert facts["NUMA node"] == "1"
    assert facts["scheduler"] == "none"
    assert facts["rotating"] == "no"


def test_a_partition_is_its_disk_and_a_slower_link_is_seen(sys: FakeSys) -> None:
    disk = local_nvme(sys)
    (disk / "nvme0n1p2").mkdir()
    (disk / "nvme0n1p2/partition").write_text("2\n")
    sys.write("devices/pci0000:00/0000:00:00.0", current_link_width="2")
    facts = disk_facts(disk / "nvme0n1p2")
    assert facts["disk"] == "nvme0n1"
    assert (facts["PCIe"], facts["PCIe, at most"]) == ("16.0 GT/s PCIe x2", "16.0 GT/s PCIe x4")


def test_a_drive_behind_a_network_with_two_paths(sys: FakeSys) -> None:
    subsystem = sys.write("devices/virtual/nvme-subsystem/nvme-subsys0", subsysnqn="nqn.2026-01.example:pool")
    for number in (0, 1):
        controller = sys.write(
            f"devices/virtual/nvme-fabrics/ctl/nvme{number}", transport="rdma", model="fabric",
            address=f"traddr=192.0.2.{number},trsvcid=4420",
        )  # fmt: skip
        (subsystem / f"nvme{number}").symlink_to(controller)
    disk = sys.write("devices/virtual/nvme-subsystem/nvme-subsys0/nvme0n1")
    (disk / "device").symlink_to(subsystem)
    facts = disk_facts(disk)
    assert facts["transport"] == "NVMe over rdma"
    assert facts["address"] == "traddr=192.0.2.0,trsvcid=4420; traddr=192.0.2.1,trsvcid=4420"
    assert facts["paths"] == "2"
    assert "PCIe" not in facts


def test_a_raid_names_its_members(sys: FakeSys) -> None:
    raid = sys.write("devices/virtual/block/md0")
    sys.write("devices/virtual/block/md0/md", level="raid0", raid_disks="2", chunk_size="524288")
    (raid / "slaves").mkdir()
    for number in (0, 1):
        (raid / f"slaves/nvme{number}n1").symlink_to(local_nvme(sys, number))
    facts = disk_facts(raid)
    assert (facts["RAID level"], facts["RAID disks"], facts["RAID chunk"]) == ("raid0", "2", "524288 B")
    for number in (0, 1):
        assert facts[f"member {number + 1}"] == (
            f"disk nvme{number}n1, transport NVMe over pcie, address 0000:0{number}:00.0, queues 17, firmware 1.2, "
            "model SSD 9000, PCIe 16.0 GT/s PCIe x4, NUMA node 1, rotating no, scheduler none, requests in queue 1023, "
            "largest request 1280 KiB, segments a request 127, logical block 512 B, write cache write through"
        )


def test_a_ring_of_devices_ends(sys: FakeSys) -> None:
    one = sys.write("devices/virtual/block/dm-0")
    (one / "slaves").mkdir()
    (one / "slaves/dm-0").symlink_to(one)
    assert disk_facts(one)["disk"] == "dm-0"


def test_what_is_no_text_does_no_harm(sys: FakeSys) -> None:
    disk = local_nvme(sys)
    (disk.parent / "model").write_bytes(b"\x1b[2J\xff" + b"a" * 10_000)
    model = disk_facts(disk)["model"]
    assert model.isprintable()
    assert len(model) == 200


def test_accelerators_and_network_ports(sys: FakeSys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    big = sys.pci("0000:41:00.0", "0x030200")
    sys.pci("0000:42:00.0", "0x120000", mem_info_vram_total="206158430208")
    (big / "driver").symlink_to(sys.write("bus/pci/drivers/nvidia"))
    sys.write("module/nvidia", version="580.95")
    tool = sys.write("bin") / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 00000000:41:00.0, 143771 MiB\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:/usr/bin:/bin")
    named = sys.write("proc/driver/nvidia/gpus/0000:41:00.0", information="Model: \t Big GPU\nIRQ: 5")
    nic = sys.pci("0000:81:00.0", "0x020000")
    port = sys.write("class/net/eth0", operstate="up", speed="100000", mtu="9000")
    (port / "device").symlink_to(nic)
    sys.write("class/net/lo", mtu="65536")
    assert named.exists()
    first, second = accelerators(tmp_path, tmp_path / "proc")
    assert first == (
        "0000:41:00.0: model Big GPU, memory 143771 MiB, driver nvidia 580.95, PCIe 16.0 GT/s PCIe x4, NUMA node 1"
    )
    assert second.startswith("0000:42:00.0: model 0x144d:0xa80a, memory 206158430208 B, PCIe")
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert "Big GPU, driver nvidia" in accelerators(tmp_path, tmp_path / "proc")[0]
    assert network_ports(tmp_path) == (
        "eth0: state up, speed 100000 Mb/s, MTU 9000, PCIe 16.0 GT/s PCIe x4, NUMA node 1",
    )


def test_without_sysfs_there_are_no_facts(tmp_path: Path) -> None:
    assert accelerators(tmp_path, tmp_path) == network_ports(tmp_path) == ()
    environment = describe_environment(tmp_path, tmp_path)
    assert environment.accelerators == environment.network == ()
    assert {"vllm", "sglang", "lmcache", "torch"} <= environment.packages.keys()
    assert disk_facts(tmp_path / "none") == {"disk": "none"}


def test_a_real_medium_has_its_mount_options(tmp_path: Path) -> None:
    medium = Kernel().medium_of(tmp_path)
    assert {"rw"} & set(medium.mount_options.split(","))
    if medium.device:
        assert medium.hardware["disk"]
