"""Storage media and the links before them, by name: what a `DeviceModel` is made from when nothing was measured.

    4*nvme-gen4@100gbe@pcie4x16      four drives as one, behind a 100 GbE port, behind 16 lanes of PCIe 4

A name is drives and then links. The slowest part decides the bandwidth, and latencies add up. Bandwidths are
nominal and have their source; what a data sheet doesn't say (latencies, what one read at a time gets) is assumed, and
said to be so. A curve measured by `forebay bench io --export` takes the place of a name (`curve_medium`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from forebay.errors import ConfigError
from forebay.sim.device import DeviceModel

_MOST_PARTS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Medium:
    """A place that blocks are read from, as a reader sees it."""

    name: str
    read_bytes_per_s: float
    """With as many reads in flight as it takes."""
    write_bytes_per_s: float
    latency_ns: int
    """Of a read, beside the time of its bytes."""
    stream_bytes_per_s: float
    """What one read at a time gets."""
    queue_depth: int = 256
    """Reads that it works on at a time."""
    source: str

    def model(self, block_bytes: int, modelled_bytes: int) -> DeviceModel:
        """The device for blocks of `block_bytes`, each stood for by `modelled_bytes`: times are those of full size."""
        scale = modelled_bytes / block_bytes
        alone_s = (
            block_bytes / min(self.stream_bytes_per_s, self.read_bytes_per_s) - block_bytes / self.read_bytes_per_s
        )
        return DeviceModel(
            read_bytes_per_s=self.read_bytes_per_s * scale,
            write_bytes_per_s=self.write_bytes_per_s * scale,
            latency_ns=self.latency_ns + round(alone_s * 1e9),
            queue_depth=self.queue_depth,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What all bytes pass on their way from the drives."""

    bytes_per_s: float
    latency_ns: int
    source: str


PORT_EFFICIENCY = 0.84
"""Share of an Ethernet port's bit rate that arrives as blocks over RoCEv2. Fitted on the published storms over one
100 GbE port (see docs/sizing.md); headers alone would leave 0.93 to 0.98."""
PCIE_EFFICIENCY = 0.87
"""Share of the line rate that is payload: 256 bytes in packets with 26 to 38 bytes of headers, framing and replies
(PCI Express Base Specification 4.0, chapters 2 to 4)."""
_PCIE_LANE_BYTES_PER_S = {3: 8e9 * 128 / 130 / 8, 4: 16e9 * 128 / 130 / 8, 5: 32e9 * 128 / 130 / 8}
"""By generation: transfers a second, 128b/130b, 8 bits a byte."""

_DRIVES = {
    medium.name: medium
    for medium in (
        Medium(
            name="nvme-gen3", read_bytes_per_s=3.2e9, write_bytes_per_s=2.0e9, latency_ns=90_000,
            stream_bytes_per_s=1.7e9, source="Samsung PM983 data sheet: 3,200 / 2,000 MB/s; latency, stream assumed",
        ),
        Medium(
            name="nvme-gen4", read_bytes_per_s=6.9e9, write_bytes_per_s=4.1e9, latency_ns=80_000,
            stream_bytes_per_s=2.5e9, source="Samsung PM9A3 data sheet: 6,900 / 4,100 MB/s; latency, stream assumed",
        ),
        Medium(
            name="nvme-gen5", read_bytes_per_s=14.0e9, write_bytes_per_s=7.1e9, latency_ns=70_000,
            stream_bytes_per_s=3.5e9, source="Samsung PM1743 data sheet: 14,000 / 7,100 MB/s; latency, stream assumed",
        ),
        Medium(
            name="sata-ssd", read_bytes_per_s=0.55e9, write_bytes_per_s=0.52e9, latency_ns=150_000,
            stream_bytes_per_s=0.5e9, queue_depth=32,
            source="Samsung PM893 data sheet: 550 / 520 MB/s; a SATA queue has 32 entries; latency and stream assumed",
        ),
        Medium(
            name="dram", read_bytes_per_s=102e9, write_bytes_per_s=102e9, latency_ns=1_000, stream_bytes_per_s=13e9,
            source="8 channels of DDR4-3200, bytes read and written once; 13 GB/s a copying thread, latency assumed",
        ),
        Medium(
            name="s3", read_bytes_per_s=100e9, write_bytes_per_s=100e9, latency_ns=100_000_000,
            stream_bytes_per_s=87e6,
            source="Amazon S3 performance guidelines: 100-200 ms to the first byte, 85-90 MB/s a request; 100 GB/s "
            "in all and 256 requests at a time assumed",
        ),
    )
}  # fmt: skip


def drive_names() -> tuple[str, ...]:
    return tuple(_DRIVES)


def medium_named(name: str) -> Medium:
    """Raises ConfigError for a name that is not drives and links."""
    drives, *links = name.split("@")
    medium = _drives(drives, name)
    for link in links:
        medium = _behind(medium, _link(link, name))
    return replace(medium, name=name)


def _drives(text: str, name: str) -> Medium:
    count, drive = _counted(text, name)
    if drive not in _DRIVES:
        raise ConfigError(f"{name!a} begins with no medium that is known: there are {', '.join(_DRIVES)}")
    one = _DRIVES[drive]
    source = one.source if count == 1 else f"{count} drives as one: {one.source}"
    return replace(
        one, read_bytes_per_s=count * one.read_bytes_per_s, write_bytes_per_s=count * one.write_bytes_per_s,
        queue_depth=count * one.queue_depth, source=source,
    )  # fmt: skip


def _link(text: str, name: str) -> Link:
    count, link = _counted(text, name)
    if (match := re.fullmatch(r"(\d{1,3})gbe", link, re.ASCII)) and int(match[1]):
        rate = count * int(match[1]) * 1e9 / 8 * PORT_EFFICIENCY
        return Link(bytes_per_s=rate, latency_ns=20_000, source=f"{count} x {link}, {PORT_EFFICIENCY:.0%} of line rate")
    if (match := re.fullmatch(r"pcie([345])x(1|2|4|8|16)", link, re.ASCII)) is not None:
        rate = count * int(match[2]) * _PCIE_LANE_BYTES_PER_S[int(match[1])] * PCIE_EFFICIENCY
        return Link(bytes_per_s=rate, latency_ns=1_000, source=f"{count} x {link}, {PCIE_EFFICIENCY:.0%} of line rate")
    if link == "bounced":
        return Link(bytes_per_s=_DRIVES["dram"].read_bytes_per_s, latency_ns=20_000, source="a copy in host memory")
    if link == "direct":
        return Link(bytes_per_s=float("inf"), latency_ns=0, source="straight into GPU memory")
    raise ConfigError(f"{name!a}: {link!a} is no link: give 25gbe, 100gbe, 200gbe, pcie4x16, bounced or direct")


def _counted(text: str, name: str) -> tuple[int, str]:
    """`4*nvme-gen4` -> 4, nvme-gen4."""
    match = re.fullmatch(r"(?:(\d{1,3})\*)?([a-z0-9-]+)", text, re.ASCII)
    count = int(match[1] or 1) if match else 0
    if match is None or not 1 <= count <= _MOST_PARTS:
        raise ConfigError(
            f"{name!a} names no medium: give drives and links such as 4*nvme-gen4@100gbe, "
            f"with 1 to {_MOST_PARTS} of each"
        )
    return count, match[2]


def _behind(medium: Medium, link: Link) -> Medium:
    return replace(
        medium,
        read_bytes_per_s=min(medium.read_bytes_per_s, link.bytes_per_s),
        write_bytes_per_s=min(medium.write_bytes_per_s, link.bytes_per_s),
        stream_bytes_per_s=min(medium.stream_bytes_per_s, link.bytes_per_s),
        latency_ns=medium.latency_ns + link.latency_ns,
        source=f"{medium.source}; {link.source}",
    )


class _Point(msgspec.Struct, frozen=True):
    direction: Literal["reads", "writes"]
    block_bytes: Annotated[int, msgspec.Meta(ge=1)]
    depth: Annotated[int, msgspec.Meta(ge=1)]
    gb_per_s: Annotated[float, msgspec.Meta(gt=0, le=1e6)]


class _Curve(msgspec.Struct, frozen=True):
    schema: Literal["forebay-device-curve/1"]
    device: str
    points: list[_Point]


def curve_medium(path: Path, block_bytes: int) -> Medium:
    """The medium of a curve that `forebay bench io --export` has measured, at the nearest block size in it.

    One read at a time gives the stream's rate, the best depth the bandwidth, and it works on no more than that at a
    time; depths between follow from Little's law. `source` says at which measured depth that is off most, and by how
    much: also where a device gets slower with more in flight than at its best.
    Raises ConfigError for a file that is none, or has no reads.
    """
    try:
        content = path.read_bytes()
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the curve {path}: {getattr(error, 'strerror', None) or error}") from None
    try:
        curve = msgspec.json.decode(content, type=_Curve)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is no curve of 'forebay bench io --export': {error}") from None
    reads = _nearest([point for point in curve.points if point.direction == "reads"], block_bytes)
    writes = _nearest([point for point in curve.points if point.direction == "writes"], block_bytes)
    if not reads:
        raise ConfigError(f"{path} has no reads: measure with 'forebay bench io --export', reads included")
    deep = max(reads, key=lambda point: (point.gb_per_s, -point.depth))
    shallow, best = min(reads, key=lambda point: point.depth), deep.gb_per_s * 1e9
    stream = min(best, shallow.gb_per_s * 1e9 / shallow.depth)
    off = max(reads, key=lambda point: abs(_modelled(point, stream, best) / point.gb_per_s - 1))
    modelled = _modelled(off, stream, best)
    return Medium(
        name=f"measured: {curve.device}",
        read_bytes_per_s=best,
        write_bytes_per_s=max((point.gb_per_s for point in writes), default=best / 1e9) * 1e9,
        latency_ns=0,  # the stream's rate has it
        stream_bytes_per_s=stream,
        queue_depth=deep.depth,
        source=f"measured at blocks of {reads[0].block_bytes} bytes; of {len(reads)} depths the model is most off at "
        f"{off.depth} in flight: {modelled:.2f} GB/s, measured {off.gb_per_s:.2f} ({modelled / off.gb_per_s - 1:+.0%})",
    )


def _modelled(point: _Point, stream_bytes_per_s: float, best_bytes_per_s: float) -> float:
    """GB/s at a point's depth, by Little's law."""
    return min(best_bytes_per_s, point.depth * stream_bytes_per_s) / 1e9


def _nearest(points: list[_Point], block_bytes: int) -> list[_Point]:
    """Those of the block size that is nearest, by ratio."""
    if not points:
        return []
    chosen = min({point.block_bytes for point in points}, key=lambda each: max(each / block_bytes, block_bytes / each))
    return [point for point in points if point.block_bytes == chosen]
