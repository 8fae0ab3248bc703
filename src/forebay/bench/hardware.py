"""What stands under a measurement, as far as sysfs says: disks with their transport, accelerators, network ports.

All of it is for people and for evidence; nothing is decided by it. What cannot be read is left out.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

Facts = dict[str, str]

_DEEPEST = 8
"""Devices upon devices that are followed."""
_MOST_CHARACTERS = 200
"""Of a fact: files of sysfs are short, and some are not text."""
_MOST_OF_A_MEMBER = 4000
"""Characters, with all that is beneath it: what it is comes first."""
_DISPLAY, _ACCELERATOR = "0x03", "0x12"
"""PCI base classes of what computes: display controllers and processing accelerators."""
_PCI_ADDRESS = len("0000:00:00.0")
"""nvidia-smi writes eight digits of the domain, the kernel four."""
_TOOL_LIMIT_S = 10


def disk_facts(device: Path, depth: int = 0) -> Facts:
    """Of a block device, by its place below /sys/dev/block: what it is, how it is attached, and what it consists of."""
    disk = device.resolve()
    if (disk / "partition").exists():
        disk = disk.parent
    facts = {
        "disk": disk.name,
        **_raid(disk),
        **_nvme(disk),
        **_model(disk),
        **_pci(_pci_above(disk / "device")),
        **_queue(disk),
    }
    members = sorted((disk / "slaves").iterdir()) if (disk / "slaves").is_dir() and depth < _DEEPEST else []
    for number, member in enumerate(members, 1):
        below = disk_facts(member, depth + 1)
        facts[f"member {number}"] = ", ".join(f"{name} {value}" for name, value in below.items())[:_MOST_OF_A_MEMBER]
    return facts


def accelerators(sys_root: Path = Path("/sys"), proc: Path = Path("/proc")) -> tuple[str, ...]:
    """Each in one line: the maker's name where its driver says one, else PCI ids; memory, driver, link, NUMA node."""
    found = []
    nvidia = _nvidia_memory() if (proc / "driver/nvidia").is_dir() else {}
    for place in _entries(sys_root / "bus/pci/devices"):
        kind = _text(place / "class")
        if kind[:4] in (_DISPLAY, _ACCELERATOR):
            name = _nvidia_name(proc, place.name) or f"{_text(place / 'vendor')}:{_text(place / 'device')}"
            driver = _name_of(place / "driver")
            facts = {
                "model": name,
                "memory": nvidia.get(place.name) or _with(_text(place / "mem_info_vram_total"), " B"),  # amdgpu's
                "driver": f"{driver} {_text(sys_root / 'module' / driver / 'version')}".strip() if driver else "",
                **_pci(place),
            }
            found.append(_line(place.name, facts))
    return tuple(found)


def network_ports(sys_root: Path = Path("/sys")) -> tuple[str, ...]:
    """Each that is a device and not virtual, in one line: speed, MTU, link to the host, NUMA node."""
    found = []
    for place in _entries(sys_root / "class/net"):
        if not (place / "device").exists():
            continue
        speed = _text(place / "speed")
        facts = {
            "state": _text(place / "operstate"),
            "speed": f"{speed} Mb/s" if speed.isdecimal() else "",
            "MTU": _text(place / "mtu"),
            "driver": _name_of(place / "device/driver"),
            **_pci(_pci_above(place / "device")),
        }
        found.append(_line(place.name, facts))
    return tuple(found)


# ---- parts of a disk


def _queue(disk: Path) -> Facts:
    queue = disk / "queue"
    scheduler = _text(queue / "scheduler")
    return _said(
        {
            "rotating": {"0": "no", "1": "yes"}.get(_text(queue / "rotational"), ""),
            "scheduler": scheduler.partition("[")[2].partition("]")[0] or scheduler,
            "requests in queue": _text(queue / "nr_requests"),
            "largest request": _with(_text(queue / "max_sectors_kb"), " KiB"),
            "segments a request": _text(queue / "max_segments"),
            "logical block": _with(_text(queue / "logical_block_size"), " B"),
            "write cache": _text(queue / "write_cache"),
        }
    )


def _raid(disk: Path) -> Facts:
    """Of md, and the name and kind of a device-mapper device."""
    return _said(
        {
            "RAID level": _text(disk / "md/level"),
            "RAID disks": _text(disk / "md/raid_disks"),
            "RAID chunk": _with(_text(disk / "md/chunk_size"), " B"),
            "RAID state": _text(disk / "md/array_state"),
            "mapping": _text(disk / "dm/name"),
        }
    )


def _nvme(disk: Path) -> Facts:
    """Of the controller, or with multipath of the controllers of the subsystem: transport and address."""
    above = disk / "device"
    controllers = [above] if (above / "transport").is_file() else []
    if not controllers and (above / "subsysnqn").is_file():
        controllers = [place for place in _entries(above) if (place / "transport").is_file()]
    if not controllers:
        return {}
    transports = dict.fromkeys(_text(place / "transport") for place in controllers)
    addresses = [_text(place / "address") for place in controllers]
    return _said(
        {
            "transport": f"NVMe over {', '.join(transports)}",
            "address": "; ".join(dict.fromkeys(addresses)),
            "paths": str(len(controllers)) if len(controllers) > 1 else "",
            "queues": _text(controllers[0] / "queue_count"),
            "firmware": _text(controllers[0] / "firmware_rev"),
            "model": _text(controllers[0] / "model"),
        }
    )


def _model(disk: Path) -> Facts:
    names = (_text(disk / "device/vendor"), _text(disk / "device/model"))
    model = " ".join(name for name in names if name and not name.startswith("0x"))  # virtio has a number there
    driver = _name_of(disk / "device/driver")
    is_nvme = (disk / "device/transport").is_file() or (disk / "device/subsysnqn").is_file()
    return _said({} if is_nvme else {"model": model, "driver": driver})


# ---- PCI


def _pci_above(device: Path) -> Path:
    """The PCI device that this one hangs from; a path that does not exist if there is none."""
    place = device.resolve()
    for candidate in (place, *list(place.parents)[:_DEEPEST]):
        if (candidate / "class").is_file() and (candidate / "vendor").is_file() and ":" in candidate.name:
            return candidate
    return place / "none"


def _pci(place: Path) -> Facts:
    link = _link(place, "current")
    most = _link(place, "max")
    numa = _text(place / "numa_node")
    return _said(
        {
            "PCIe": link,
            "PCIe, at most": most if most != link else "",
            "NUMA node": numa if numa.isdecimal() else "",
        }
    )


def _link(place: Path, which: str) -> str:
    """`16.0 GT/s PCIe x4`."""
    speed, width = _text(place / f"{which}_link_speed"), _text(place / f"{which}_link_width")
    return f"{speed} x{width}" if speed and width and "nknown" not in speed else ""


def _nvidia_name(proc: Path, address: str) -> str:
    for line in _text(proc / "driver/nvidia/gpus" / address / "information", "\n").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "Model":
            return value.strip()
    return ""


def _nvidia_memory() -> Facts:
    """By PCI address, as its own tool says: no file does. Empty without the tool, or where it does not answer."""
    command = ("nvidia-smi", "--query-gpu=pci.bus_id,memory.total", "--format=csv,noheader")
    try:
        said = subprocess.run(command, capture_output=True, timeout=_TOOL_LIMIT_S, check=True, text=True).stdout
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return {}
    rows = (line.partition(",") for line in said.splitlines())
    return {address.strip().lower()[-_PCI_ADDRESS:]: memory.strip() for address, _, memory in rows}


# ---- reading


def _entries(folder: Path) -> Iterator[Path]:
    try:
        yield from sorted(folder.iterdir())
    except OSError:
        return


def _text(path: Path, kept: str = "") -> str:
    """The content, without what is no printable text; empty if there is none."""
    try:
        content = path.read_text(errors="replace") if path.is_file() else ""
    except OSError:
        return ""
    return "".join(each for each in content.strip() if each.isprintable() or each in kept)[:_MOST_CHARACTERS]


def _name_of(link: Path) -> str:
    return link.resolve().name if link.exists() else ""


def _with(number: str, unit: str) -> str:
    return number + unit if number else ""


def _said(facts: Facts) -> Facts:
    return {name: value for name, value in facts.items() if value}


def _line(name: str, facts: Facts) -> str:
    return f"{name}: " + ", ".join(f"{what} {value}" for what, value in _said(facts).items())
