"""Forebay's file tier beside its peers: the same blocks, the same device, one interleaved run, each in its own process.

    python bench/peers/run.py DIRECTORY --environments DIR [--block-bytes N] [--depth N] [--rounds N] [--bytes N]
                              [--peer NAME ...] [--json FILE] [--svg FILE]

`bench/peers/install.sh DIR` makes the environments. Every peer writes its blocks anew in each round and reads them back
cold: what the system's cache holds of them is dropped before, and the device's counters say how much was read from it,
and how much had been written to it when a write was said to be done. A first round, which opens files and imports
modules, does not count.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from forebay.bench.evidence import Kernel

WORKER = Path(__file__).parent / "worker.py"
HOMES = {
    "vLLM fs": "vllm", "LMCache fs_native, O_DIRECT": "lmcache", "LMCache fs_native": "lmcache",
    "LMCache local disk, O_DIRECT": "lmcache", "LMCache local disk": "lmcache", "LMCache raw_block": "lmcache",
    "SGLang HiCacheFile": "sglang", "NIXL POSIX": "nixl", "AIBrix SHFS": "aibrix",
}  # fmt: skip
OURS = ("forebay", "forebay, pure Python")


class Worker:
    """One peer's process."""

    def __init__(self, name: str, chosen: argparse.Namespace, blocks: int) -> None:
        self.name, self.failure = name, ""
        self.directory = (
            chosen.directory / f"forebay-peers-{os.getpid()}" / hashlib.sha256(name.encode()).hexdigest()[:8]
        )
        self.directory.mkdir(parents=True)
        python = sys.executable if name in OURS else str(chosen.environments / HOMES[name] / "bin/python")
        environment = {**os.environ, **({} if name in OURS else {"PYTHONPATH": ""})}
        self._process = None
        if not Path(python).exists():
            self.failure = "its environment was not made"
            return
        self._process = subprocess.Popen(
            [python, str(WORKER), name, str(self.directory), str(chosen.block_bytes), str(blocks)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment,
        )  # fmt: skip
        self._hear()

    def ask(self, **order: object) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._hear()

    def _hear(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"failed": "its process ended"}
        self.failure = answer.get("failed", "")
        return answer

    def drop_cache(self) -> None:
        os.sync()
        for place, _, files in os.walk(self.directory):
            for file in files:
                descriptor = os.open(f"{place}/{file}", os.O_RDONLY)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)

    def clear(self) -> None:
        """Remove its blocks, but not the files that make a pool of its directory."""
        for pattern in ("*.kv", "*.bin", "*.data", "*.pt"):
            for path in self.directory.rglob(pattern):
                path.unlink()
        if self.name in ("NIXL POSIX", "AIBrix SHFS"):
            for path in [each for each in self.directory.rglob("*") if each.is_file()]:
                path.unlink()

    def close(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, help="an existing directory on the disk to measure")
    parser.add_argument("--environments", type=Path, required=True)
    parser.add_argument("--block-bytes", type=int, default=2 * 2**20)
    parser.add_argument("--depth", type=int, default=8, help="blocks in flight")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bytes", type=int, default=256 * 2**20, help="moved in each pass")
    parser.add_argument("--peer", action="append", choices=[*OURS, *HOMES], help="default: all")
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--svg", type=Path, help="where to write the plot")
    chosen = parser.parse_args()
    chosen.directory = chosen.directory.resolve()
    blocks = -(-chosen.bytes // chosen.block_bytes)
    workers = [Worker(name, chosen, blocks) for name in chosen.peer or [*OURS, *HOMES]]
    try:
        rows = measure(workers, chosen, blocks)
    finally:
        for worker in workers:
            worker.close()
        shutil.rmtree(chosen.directory / f"forebay-peers-{os.getpid()}", ignore_errors=True)
    report = {
        "block_bytes": chosen.block_bytes, "depth": chosen.depth, "rounds": chosen.rounds, "pass_bytes": chosen.bytes,
        "peers": rows,
    }  # fmt: skip
    if chosen.json:
        chosen.json.write_text(json.dumps(report, indent=1) + "\n")
    if chosen.svg:
        chosen.svg.write_text(draw(report))
    print(words(report))


def measure(workers: list[Worker], chosen: argparse.Namespace, blocks: int) -> list[dict[str, Any]]:
    kernel = Kernel()
    medium = kernel.medium_of(chosen.directory)
    found: dict[str, dict[str, list[float]]] = {
        worker.name: {"read": [], "write": [], "read_core": [], "write_core": [], "cold": [], "sent": []}
        for worker in workers
    }
    moved_gb = blocks * chosen.block_bytes / 1e9
    for turn in range(chosen.rounds + 1):
        first = turn % len(workers)
        for worker in workers[first:] + workers[:first]:
            if worker.failure:
                continue
            names = [hashlib.sha256(f"{turn} {i}".encode()).hexdigest() for i in range(blocks)]
            os.sync()
            for what in ("write", "read"):
                worker.drop_cache()
                before, sent_before = kernel.read_counts(medium).device_bytes, kernel.written_bytes(medium)
                answer = worker.ask(do=what, names=names, depth=chosen.depth)
                if worker.failure:
                    break
                if turn == 0:
                    continue
                after, sent_after = kernel.read_counts(medium).device_bytes, kernel.written_bytes(medium)
                found[worker.name][what].append(moved_gb / answer["wall_s"])
                found[worker.name][f"{what}_core"].append(answer["core_s"] / moved_gb)
                if what == "read" and before is not None and after is not None:
                    found[worker.name]["cold"].append((after - before) / 1e9 / moved_gb)
                if what == "write" and sent_before is not None and sent_after is not None:
                    found[worker.name]["sent"].append((sent_after - sent_before) / 1e9 / moved_gb)
            worker.clear()
        print(f"[{turn}/{chosen.rounds}]", file=sys.stderr)
    return [row(worker, found, workers[0].name) for worker in workers]


def row(worker: Worker, found: dict[str, dict[str, list[float]]], ours: str) -> dict[str, Any]:
    mine, base = found[worker.name], found[ours]
    if worker.failure or not mine["read"]:
        return {"peer": worker.name, "failed": worker.failure or "no round was measured"}
    return {
        "peer": worker.name,
        "read_gb_per_s": statistics.median(mine["read"]),
        "write_gb_per_s": statistics.median(mine["write"]),
        "read_core_s_per_gb": statistics.median(mine["read_core"]),
        "write_core_s_per_gb": statistics.median(mine["write_core"]),
        "read_to_first": statistics.median(a / b for a, b in zip(mine["read"], base["read"], strict=True)),
        "write_to_first": statistics.median(a / b for a, b in zip(mine["write"], base["write"], strict=True)),
        "read_from_device": min(mine["cold"], default=0.0),
        "written_to_device": statistics.median(mine["sent"]) if mine["sent"] else 0.0,
        "rounds": mine,
    }


def words(report: dict[str, Any]) -> str:
    lines = [
        f"{report['block_bytes']} bytes a block, {report['depth']} in flight, {report['rounds']} rounds; medians",
        f"{'':30} read GB/s  to first  core-s/GB  write GB/s  to first  core-s/GB",
    ]
    for each in report["peers"]:
        if "failed" in each:
            lines.append(f"{each['peer']:30} not measured: {each['failed']}")
            continue
        cold = (
            "" if each["read_from_device"] >= 0.95 else f"  NOT COLD ({each['read_from_device']:.0%} from the device)"
        )
        if each["written_to_device"] < 0.95:
            cold += f"  {each['written_to_device']:.0%} of the writes had reached the device"
        lines.append(
            f"{each['peer']:30} {each['read_gb_per_s']:9.2f}  {each['read_to_first']:8.2f}  "
            f"{each['read_core_s_per_gb']:9.3f}  {each['write_gb_per_s']:10.2f}  {each['write_to_first']:8.2f}  "
            f"{each['write_core_s_per_gb']:9.3f}{cold}"
        )
    return "\n".join(lines)


def draw(report: dict[str, Any]) -> str:
    """Two bars a peer, reads over writes, from 0."""
    rows = [each for each in report["peers"] if "failed" not in each]
    top = max(max(each["read_gb_per_s"], each["write_gb_per_s"]) for each in rows) * 1.4
    height = 50 + 46 * len(rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 760 {height}" width="760" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="13" fill="#1d2730">',
        "<title>Cold reads and writes of Forebay and its peers, GB/s</title>",
        f'<rect width="760" height="{height}" fill="#fff"/>',
        f'<text x="10" y="24" font-weight="600">Cold reads (dark) and writes (light), GB/s: '
        f"{report['block_bytes'] / 2**20:g} MiB, {report['depth']} in flight</text>",
    ]
    for at, each in enumerate(rows):
        y = 44 + 46 * at
        parts.append(f'<text x="220" y="{y + 22}" text-anchor="end">{escape(each["peer"])}</text>')
        for what, offset, opacity in (("read", 2, 1.0), ("write", 20, 0.45)):
            rate = each[f"{what}_gb_per_s"]
            width = 470 * rate / top
            parts.append(f'<rect x="230" y="{y + offset}" width="{width:.1f}" height="16" fill="#0b6e99" '
                         f'fill-opacity="{opacity}"/>')  # fmt: skip
            in_memory = what == "write" and each["written_to_device"] < 0.95
            note = " to the system's cache" if in_memory else ""
            parts.append(f'<text x="{235 + width:.1f}" y="{y + offset + 13}">{rate:.2f}{note}</text>')
    return "\n".join((*parts, "</svg>", ""))


if __name__ == "__main__":
    main()
