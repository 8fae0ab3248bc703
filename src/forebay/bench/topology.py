"""How devices and links are attached, as far as the kernel says it: PCIe, NUMA, transport, speed, MTU, flow control.

Nothing is guessed: what cannot be read is None, and reports say so.
"""

from __future__ import annotations

import array
import fcntl
import re
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

NOT_READABLE = "not readable"
_DEEPEST = 8
_SIOCETHTOOL, _ETHTOOL_GPAUSEPARAM = 0x8946, 0x12
"""linux/sockios.h, linux/ethtool.h."""
_INTERFACE = re.compile(r"[^/\s]{1,15}")
_UNKNOWN_SPEED = 2**32 - 1


class DeviceTopology(msgspec.Struct, frozen=True, kw_only=True):
    """One disk, or one controller of a disk that has several."""

    device: str
    model: str | None
    transport: str | None
    """`pcie`, `tcp`, `rdma`, ... for NVMe; else the bus that it is on, such as `virtio`."""
    pcie_width: int | None
    """Lanes in use."""
    pcie_max_width: int | None
    pcie_gt_per_s: float | None
    """Giga-transfers a second and lane, in use."""
    numa_node: int | None


class LinkTopology(msgspec.Struct, frozen=True, kw_only=True):
    """One network interface."""

    interface: str
    speed_mbit_per_s: int | None
    mtu_bytes: int | None
    numa_node: int | None
    pause_rx: bool | None
    """It stops sending when it is told to (IEEE 802.3x flow control). Priority flow control is not told here."""
    pause_tx: bool | None


def words(topology: DeviceTopology | LinkTopology) -> str:
    """On one line, with what is not readable."""
    plain = msgspec.structs.asdict(topology)
    return ", ".join(f"{name} {NOT_READABLE if value is None else value}" for name, value in plain.items())


@dataclass(frozen=True, slots=True)
class Flow:
    rx: bool
    tx: bool


def read_pause(interface: str) -> Flow | None:
    """By ethtool's ioctl. None where the driver, or this user's rights, do not allow it."""
    found = array.array("I", [_ETHTOOL_GPAUSEPARAM, 0, 0, 0])
    request = struct.pack("16sP", interface.encode(), found.buffer_info()[0])
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as channel:
            fcntl.ioctl(channel, _SIOCETHTOOL, request)
    except OSError:
        return None
    return Flow(rx=bool(found[2]), tx=bool(found[3]))


class Topology:
    """Reads /sys. Another root than the real one is for tests."""

    def __init__(self, sys: Path = Path("/sys"), pause: Callable[[str], Flow | None] = read_pause) -> None:
        self._sys, self._pause = sys, pause

    def devices(self, name: str) -> tuple[DeviceTopology, ...]:
        """The disks under a block device: of a partition its disk, of a stack (RAID, LVM) all that it stands on."""
        return tuple(
            found for place in self._disks(self._sys / "class/block" / name, 0) for found in self._paths(place)
        )

    def link(self, interface: str) -> LinkTopology:
        place = self._sys / "class/net" / interface if _INTERFACE.fullmatch(interface) else Path("/nowhere")
        speed = _number(place / "speed")
        flow = self._pause(interface) if place.exists() else None
        return LinkTopology(
            interface=interface,
            speed_mbit_per_s=speed if speed and 0 < speed < _UNKNOWN_SPEED else None,
            mtu_bytes=_number(place / "mtu"),
            numa_node=_node(place / "device/numa_node"),
            pause_rx=flow.rx if flow else None,
            pause_tx=flow.tx if flow else None,
        )

    def _disks(self, place: Path, depth: int) -> Iterator[Path]:
        if not place.exists() or depth > _DEEPEST:
            return
        place = place.resolve()
        if (place / "partition").exists():
            place = place.parent
        parts = sorted((place / "slaves").iterdir()) if (place / "slaves").is_dir() else []
        for part in parts:
            yield from self._disks(part, depth + 1)
        if not parts:
            yield place

    def _paths(self, disk: Path) -> Iterator[DeviceTopology]:
        """Of an NVMe disk with several controllers, one for each of them: they may be attached differently."""
        controllers = [each for each in sorted(disk.parent.glob("nvme*")) if re.fullmatch(r"nvme\d+", each.name)]
        for controller in controllers or [disk]:
            yield self._described(disk, controller.resolve())

    def _described(self, disk: Path, controller: Path) -> DeviceTopology:
        pci = next((each for each in (controller, *controller.parents) if (each / "current_link_width").exists()), None)
        nodes = (_node(each / name) for each in (controller, *controller.parents) for name in ("numa_node",))
        speed = re.match(r"\d+(\.\d+)?", _text(pci / "current_link_speed") or "") if pci else None
        return DeviceTopology(
            device=disk.name if controller == disk else f"{disk.name} by {controller.name}",
            model=_text(controller / "model") or _text(disk / "device/model"),
            transport=_text(controller / "transport") or self._bus(disk),
            pcie_width=_positive(pci / "current_link_width") if pci else None,
            pcie_max_width=_positive(pci / "max_link_width") if pci else None,
            pcie_gt_per_s=float(speed[0]) if speed else None,
            numa_node=next((node for node in nodes if node is not None), None),
        )

    def _bus(self, disk: Path) -> str | None:
        transport = _text(disk / "device/transport")
        subsystem = disk / "device/subsystem"
        return transport or (subsystem.resolve().name if subsystem.exists() else None)


def _text(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip() or None
    except OSError:
        return None


def _number(path: Path) -> int | None:
    text = _text(path)
    try:
        return int(text) if text is not None else None
    except ValueError:
        return None


def _positive(path: Path) -> int | None:
    """A width of 0 or 255 is how a device without one says so."""
    number = _number(path)
    return number if number and 0 < number < 255 else None


def _node(path: Path) -> int | None:
    """-1: the kernel does not know."""
    number = _number(path)
    return number if number is not None and number >= 0 else None
