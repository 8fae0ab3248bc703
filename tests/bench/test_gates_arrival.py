"""Gate G1: devices against promises, how they are attached, and a device that gives back something else."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from forebay.bench.evidence import Kernel
from forebay.bench.gates import g1_arrival, integrity
from forebay.bench.gates.g1_arrival import LinkPromise, Promise
from forebay.bench.gates.integrity import prove_integrity
from forebay.bench.gates.plan import read_plan
from forebay.bench.gates.run import run_plan
from forebay.bench.gates.verdicts import Check, Outcome
from forebay.bench.topology import DeviceTopology, Flow, LinkTopology, Topology, read_pause, words
from forebay.cli import run


def put(path: Path, text: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


@pytest.fixture
def sys_root(tmp_path: Path) -> Path:
    """Two NVMe disks with a RAID over their partitions, one remote disk over two controllers, and a network card."""
    root = tmp_path / "sys"
    for number in (0, 1):
        pci = root / f"devices/pci0000:{number}0/0000:{number}1:00.0"
        for name, text in (
            ("current_link_width", "4"), ("max_link_width", "4"), ("current_link_speed", "32.0 GT/s PCIe"),
            ("numa_node", str(number)),
        ):  # fmt: skip
            put(pci / name, text)
        controller = pci / f"nvme/nvme{number}"
        put(controller / "model", f"Disk {number}  ")
        put(controller / "transport", "pcie")
        disk = controller / f"nvme{number}n1"
        put(disk / f"nvme{number}n1p1/partition", "1")
        (disk / "device").symlink_to(controller)
        links = root / "class/block"
        links.mkdir(parents=True, exist_ok=True)
        (links / f"nvme{number}n1").symlink_to(disk)
        (links / f"nvme{number}n1p1").symlink_to(disk / f"nvme{number}n1p1")
        raid = root / "devices/virtual/block/md0/slaves"
        raid.mkdir(parents=True, exist_ok=True)
        (raid / f"nvme{number}n1p1").symlink_to(disk / f"nvme{number}n1p1")
    (root / "class/block/md0").symlink_to(root / "devices/virtual/block/md0")
    subsystem = root / "devices/virtual/nvme-subsystem/nvme-subsys2"
    for number in (2, 3):
        put(root / f"devices/virtual/nvme-fabrics/ctl/nvme{number}/transport", "rdma")
        subsystem.mkdir(parents=True, exist_ok=True)
        (subsystem / f"nvme{number}").symlink_to(root / f"devices/virtual/nvme-fabrics/ctl/nvme{number}")
    (subsystem / "nvme2n1").mkdir()
    (root / "class/block/nvme2n1").symlink_to(subsystem / "nvme2n1")
    for name, text in (("speed", "200000"), ("mtu", "9000"), ("device/numa_node", "1")):
        put(root / "class/net/eth0" / name, text)
    put(root / "class/net/down/speed", "-1")
    return root


def test_how_disks_are_attached(sys_root: Path) -> None:
    topology = Topology(sys_root)
    assert topology.devices("nvme1n1p1") == (
        DeviceTopology(
            device="nvme1n1", model="Disk 1", transport="pcie", pcie_width=4, pcie_max_width=4, pcie_gt_per_s=32.0,
            numa_node=1,
        ),
    )  # fmt: skip
    assert [each.numa_node for each in topology.devices("md0")] == [0, 1]
    remote = topology.devices("nvme2n1")
    assert [(each.device, each.transport, each.pcie_width) for each in remote] == [
        ("nvme2n1 by nvme2", "rdma", None), ("nvme2n1 by nvme3", "rdma", None),
    ]  # fmt: skip
    assert "pcie_width not readable" in words(remote[0])
    assert topology.devices("absent") == ()


def test_how_links_are_set(sys_root: Path) -> None:
    topology = Topology(sys_root, lambda interface: Flow(rx=True, tx=False))
    assert topology.link("eth0") == LinkTopology(
        interface="eth0", speed_mbit_per_s=200_000, mtu_bytes=9000, numa_node=1, pause_rx=True, pause_tx=False
    )
    assert topology.link("down").speed_mbit_per_s is None
    for hostile in ("", "..", "../../etc", "a" * 200, "a\nb", "absent"):
        assert topology.link(hostile).mtu_bytes is None
        assert read_pause(hostile) is None


def outcomes(checks: Sequence[Check]) -> dict[str, Outcome]:
    return {each.name: each.outcome for each in checks}


def test_attachments_against_promises(sys_root: Path) -> None:
    devices = Topology(sys_root).devices("md0")
    promise = Promise(path="/a", pcie_width=4, pcie_gt_per_s=32.0, numa_node=0)
    found = outcomes(list(g1_arrival.attachment_checks(promise, devices)))
    assert list(found.values()).count(Outcome.PASS) == 5
    assert [name.partition("@")[0] for name, outcome in found.items() if outcome is Outcome.FAIL] == ["numa_node"]
    unknown = outcomes(list(g1_arrival.attachment_checks(promise, Topology(sys_root).devices("nvme2n1"))))
    assert set(unknown.values()) == {Outcome.INVALID}
    assert set(outcomes(list(g1_arrival.attachment_checks(promise, ()))).values()) == {Outcome.INVALID}
    link = Topology(sys_root, lambda interface: Flow(rx=True, tx=False)).link("eth0")
    wanted = LinkPromise(interface="eth0", speed_mbit_per_s=400_000, mtu_bytes=9000, pause_rx=True, pause_tx=True)
    assert outcomes(list(g1_arrival.link_checks(wanted, link))) == {
        "speed_mbit_per_s@eth0": Outcome.FAIL, "mtu_bytes@eth0": Outcome.PASS, "pause_rx@eth0": Outcome.PASS,
        "pause_tx@eth0": Outcome.FAIL,
    }  # fmt: skip


def lose_writes(monkeypatch: pytest.MonkeyPatch, every_bytes: int) -> None:
    def stale(descriptor: int, content: list[memoryview], at: int) -> int:
        """One write in two is lost, as on a device that lies."""
        return os.pwritev(descriptor, content, at) if at % every_bytes == 0 else len(content[0])

    real = {name: getattr(os, name) for name in os.__all__ if hasattr(os, name)}
    monkeypatch.setattr(integrity, "os", SimpleNamespace(**real | {"pwritev": stale, "path": os.path}))


def test_wrong_bytes_end_it_before_anything_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_file(tmp_path, read_bytes_per_s=1e4)
    plan.write_text(plan.read_text().replace("integrity_bytes = 1048576", "integrity_bytes = 786432"))  # 3 blocks
    lose_writes(monkeypatch, 2 * 262144)
    [result] = run_plan(read_plan(plan), tmp_path / "out").results
    assert result.outcome is Outcome.FAIL
    assert "wrong bytes came back from" in result.stopped_early
    assert [each.name.partition("@")[0] for each in result.checks] == ["wrong_bytes", "mtu_bytes"]
    assert result.files == ("g1/topology.json",)


def test_a_device_that_gives_back_something_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert prove_integrity(tmp_path, 65536, 4 * 65536) == integrity.Integrity(65536, 4 * 65536, 0)
    lose_writes(monkeypatch, 131072)
    with pytest.raises(OSError, match="0 bytes were moved"):  # the last one: beyond the end of the file
        prove_integrity(tmp_path, 65536, 4 * 65536)
    assert prove_integrity(tmp_path, 65536, 3 * 65536).wrong_bytes > 60_000
    assert list(tmp_path.iterdir()) == []


def test_right_bytes_from_memory_prove_nothing_of_a_disk() -> None:
    promise, doubt = Promise(path="/dev/shm"), "/dev/shm is on tmpfs, which keeps files in memory"
    right, wrong = integrity.Integrity(65536, 65536, 0), integrity.Integrity(65536, 65536, 3)
    found = [g1_arrival.integrity_check(promise, each, why) for why in ("", doubt) for each in (right, wrong)]
    assert [each.outcome for each in found] == [Outcome.PASS, Outcome.FAIL, Outcome.INVALID, Outcome.FAIL]


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs memory that looks like a disk")
def test_memory_keeps_no_promise_of_a_disk() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        plan = plan_file(Path(folder), read_bytes_per_s=1e4, write_bytes_per_s=1e4, read_p99_s=100, write_p99_s=100)
        [result] = run_plan(read_plan(plan), Path(folder) / "out").results
    assert {each.outcome for each in result.checks if "in flight" in each.name} == {Outcome.INVALID}
    assert len([each for each in result.checks if each.outcome is Outcome.INVALID]) == 5


def plan_file(folder: Path, **promised: float) -> Path:
    (folder / "root").mkdir()
    lines = "".join(f"{name} = {value}\n" for name, value in promised.items())
    (folder / "plan.toml").write_text(f"""
title = "arrival"
[[gate]]
kind = "g1_arrival"
[gate.options]
block_bytes = [262144]
in_flight = [2]
rounds = 1
pass_bytes = 2097152
integrity_bytes = 1048576
[[gate.options.root]]
path = "{folder}/root"
{lines}
[[gate.options.link]]
interface = "lo"
mtu_bytes = 1500
""")
    return folder / "plan.toml"


def test_a_real_device_keeps_modest_promises_and_breaks_bold_ones(tmp_path: Path) -> None:
    is_on_disk = not Kernel().medium_of(tmp_path).doubt
    (tmp_path / "modest").mkdir()
    (tmp_path / "bold").mkdir()
    modest = plan_file(
        tmp_path / "modest",
        read_bytes_per_s=1e4,
        write_bytes_per_s=1e4,
        read_p99_s=100,
        write_p99_s=100,
        read_worst_s=100,
        write_worst_s=100,
    )
    record = run_plan(read_plan(modest), tmp_path / "modest/out")
    assert record.outcome is (Outcome.PASS if is_on_disk else Outcome.INVALID), record.results
    [result] = record.results
    kinds = [each.name.partition("@")[0] for each in result.checks]
    assert kinds == [
        "wrong_bytes", "read_bandwidth", "read_latency_p99", "read_latency_worst",
        "write_bandwidth", "write_latency_p99", "write_latency_worst", "mtu_bytes",
    ]  # fmt: skip
    for verb in ("read", "write"):
        p99, worst = (
            next(c for c in result.checks if f"{verb}_latency_{tail}@" in c.name) for tail in ("p99", "worst")
        )
        assert p99.measured is not None
        assert worst.measured is not None
        assert 0 < 0.9 * p99.measured < worst.measured, "fio puts a p99 into bins"
    assert any("not readable" in words for words in result.reasons) or "pcie_width" in result.reasons[0]
    topology = json.loads((tmp_path / "modest/out/g1/topology.json").read_text())
    assert topology[-1]["interface"] == "lo"
    assert list((tmp_path / "modest/root").iterdir()) == []
    bold = plan_file(tmp_path / "bold", write_bytes_per_s=1e15, write_p99_s=1e-9, numa_node=77)
    found = run_plan(read_plan(bold), tmp_path / "bold/out")
    assert found.outcome is Outcome.FAIL


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rounds = 1", "rounds = 0"),
        ("read_p99_s = 1", "read_p99_s = -1"),
        ("read_p99_s = 1", "read_p99_s = nan"),
        ("block_bytes = [262144]", "block_bytes = [1000]"),
        ("/root", "/absent"),
        ("[[gate.options.root]]", "[[gate.options.rots]]"),
    ],
)
def test_plans_that_cannot_work(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: str) -> None:
    plan = plan_file(tmp_path, read_p99_s=1)
    assert text in plan.read_text()
    plan.write_text(plan.read_text().replace(text, words))
    assert run(["gate", "run", str(plan), "--out", str(tmp_path / "out")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
