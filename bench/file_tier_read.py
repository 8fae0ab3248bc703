"""Cold reads of the file tier against a plain control: threads that open and os.preadv the same files, no checks.

    python bench/file_tier_read.py DIRECTORY [--blocks 512] [--block-bytes 2097152] [--rounds 7] [--json]

Both read the same files into the same pinned huge-page slots with the same number of threads, in turns, so that the
drift of a device cancels in the ratio. The data is incompressible. The page cache of this system is dropped before
every pass; a hypervisor or a disk may still cache, so absolute numbers are an upper bound.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from forebay.hostpool import HostPool
from forebay.tiers.file import FileTier, Options, RootOptions, Verify, build
from forebay.tiers.file.layout import walk_blocks, walk_namespaces
from forebay.types import BlockKey, Namespace, Outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, help="an existing directory on the disk to measure")
    parser.add_argument("--blocks", type=int, default=512)
    parser.add_argument("--block-bytes", type=int, default=2 * 2**20)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--verify", choices=[verify.value for verify in Verify], default=Verify.PAYLOAD.value)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    chosen = parser.parse_args()
    root = chosen.directory / "forebay-bench-read"
    namespace = Namespace(
        model="bench", weights_digest="bench", kv_dtype="bfloat16", rope="none", layers=1, kv_heads=1, head_dim=1,
        block_tokens=1, block_bytes=chosen.block_bytes, layout="bytes",
    )  # fmt: skip
    options = Options(
        roots=(RootOptions(path=str(root)),),
        capacity_bytes=2**50,
        reads_in_flight=chosen.threads,
        verify=Verify(chosen.verify),
    )
    tier = build(options, namespace, hashlib.sha256(b"bench").digest())
    try:
        report = measure(tier, root, chosen)
    finally:
        tier.close()
        shutil.rmtree(root)
    print(json.dumps(report, indent=1) if chosen.json else words(report))


def measure(tier: FileTier, root: Path, chosen: argparse.Namespace) -> dict[str, object]:
    pool = HostPool(chosen.blocks, chosen.block_bytes)
    views = [pool.view(slot) for slot in (pool.take() for _ in range(chosen.blocks)) if slot is not None]
    keys = [BlockKey(hashlib.sha256(b"block %d" % i).digest()) for i in range(chosen.blocks)]
    chance = np.random.default_rng(1)
    for view in views:
        view[: chosen.block_bytes] = chance.bytes(chosen.block_bytes)
    assert all(outcome is Outcome.OK for outcome in tier.write(keys, views))
    by_key = {block.key: block.path for name in walk_namespaces(str(root)) for block in walk_blocks(str(root), name)}
    paths = [by_key[key] for key in keys]

    def through_the_tier() -> None:
        assert all(outcome is Outcome.OK for outcome in tier.read(keys, views))

    passes = {"control": lambda: control(paths, views, chosen.threads), "tier": through_the_tier}
    rates: dict[str, list[float]] = {name: [] for name in passes}
    cores: dict[str, list[float]] = {name: [] for name in passes}
    for turn in range(chosen.rounds):
        for name in sorted(passes, reverse=turn % 2 == 1):  # each goes first in half of the rounds
            tier.drop_page_cache()
            wall_s, cpu_s = timed(passes[name])
            moved_gb = chosen.blocks * chosen.block_bytes / 1e9
            rates[name].append(moved_gb / wall_s)
            cores[name].append(cpu_s / moved_gb)
    ratios = [ours / plain for ours, plain in zip(rates["tier"], rates["control"], strict=True)]
    return {
        "blocks": chosen.blocks,
        "block_bytes": chosen.block_bytes,
        "threads": chosen.threads,
        "rounds": chosen.rounds,
        "verify": chosen.verify,
        "access": tier.describe()[0].io.access.value,
        "tier_gb_per_s": statistics.median(rates["tier"]),
        "control_gb_per_s": statistics.median(rates["control"]),
        "tier_cpu_s_per_gb": statistics.median(cores["tier"]),
        "control_cpu_s_per_gb": statistics.median(cores["control"]),
        "ratio_median": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
    }


def control(paths: list[str], views: list[memoryview], threads: int) -> None:
    """Each thread takes every `threads`-th file: open directly, read the payload after the header page, close."""

    def work(first: int) -> None:
        for i in range(first, len(paths), threads):
            descriptor = os.open(paths[i], os.O_RDONLY | os.O_DIRECT)
            got_bytes = os.preadv(descriptor, [views[i]], 4096)
            os.close(descriptor)
            assert got_bytes == len(views[i])

    workers = [threading.Thread(target=work, args=(first,)) for first in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def timed(work: Callable[[], None]) -> tuple[float, float]:
    """Wall and CPU seconds."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall_s, time.process_time() - cpu_s


def words(report: dict[str, object]) -> str:
    return (
        f"{report['blocks']} blocks of {report['block_bytes']} bytes, {report['access']}, {report['threads']} threads, "
        f"{report['rounds']} rounds in turns, verify {report['verify']}\n"
        f"tier     {report['tier_gb_per_s']:.2f} GB/s  {report['tier_cpu_s_per_gb']:.3f} core-s/GB\n"
        f"control  {report['control_gb_per_s']:.2f} GB/s  {report['control_cpu_s_per_gb']:.3f} core-s/GB\n"
        f"ratio    {report['ratio_median']:.2f} (rounds {report['ratio_min']:.2f} to {report['ratio_max']:.2f})"
    )


if __name__ == "__main__":
    main()
