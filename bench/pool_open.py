"""How long until 1,000,000 blocks of a pool are known to an engine: by the catalogue, and by walking the directories.

    python bench/pool_open.py ROOT [--blocks N] [--walk] [--json]

Writes a catalogue of N blocks into a new pool at ROOT (no payloads: a start reads none) and opens an engine over it, in
a fresh process each time, with the default eviction policy. With `--walk`, N empty files under blocks' names are made,
and the catalogue is removed, so that the directories are walked; that takes minutes. Exits with 1 when opening by the
catalogue takes 2 s or more.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from forebay.assemble import StoreConfig, open_engine  # noqa: F401  # the script of `timed_open` takes it from here
from forebay.keys import namespace_key
from forebay.tiers import file
from forebay.tiers.file import catalogue, layout
from forebay.tiers.file.directio import REAL_CALLS
from forebay.tiers.file.holdings import Space, packed
from forebay.types import BlockKey, Namespace

LIMIT_S, ROUNDS, BLOCK_BYTES = 2.0, 5, 2**21
NAMESPACE = Namespace(
    model="bench", weights_digest="none", kv_dtype="uint8", rope="none", layers=1, kv_heads=1, head_dim=1,
    block_tokens=256, block_bytes=BLOCK_BYTES, layout="bench",
)  # fmt: skip


def config(root: Path) -> StoreConfig:
    return StoreConfig.embedded([root], host_bytes=4 * BLOCK_BYTES, capacity_bytes=2**50)


def timed_open(root: Path) -> dict[str, float]:
    script = """
import sys, time
from pathlib import Path
sys.path.insert(0, str(Path(sys.argv[1]).parent))
import pool_open
class NoDevice:
    def submit(self, job, blocks): raise AssertionError
    def poll(self): return ()
settings = pool_open.config(Path(sys.argv[2]))
began, cpu = time.perf_counter(), time.process_time()
engine = pool_open.open_engine(settings, pool_open.NAMESPACE, lambda pool: NoDevice())
took, took_cpu = time.perf_counter() - began, time.process_time() - cpu
print(took, took_cpu, engine._index.count("file"))
engine.close()
"""
    ran = subprocess.run(
        [sys.executable, "-c", script, __file__, str(root)], check=True, capture_output=True, text=True
    )  # fmt: skip
    seconds, cpu_seconds, blocks = ran.stdout.split()
    return {"seconds": float(seconds), "cpu_seconds": float(cpu_seconds), "blocks": int(blocks)}


def fill(root: Path, blocks: int) -> list[bytes]:
    """A pool whose catalogue holds so many blocks."""
    digest = bytes(namespace_key(NAMESPACE))
    options = file.Options(roots=(file.RootOptions(path=str(root)),), capacity_bytes=2**50)
    file.build(options, NAMESPACE, digest).close()
    noise = np.random.default_rng(7).bytes(32 * blocks)
    keys = [noise[at : at + 32] for at in range(0, len(noise), 32)]
    settings = catalogue.CatalogueSettings(
        calls=REAL_CALLS, now_s=time.time, boot=catalogue.boot_digest(), tenant=bytes(32), limits={},
        progress=lambda root, blocks: None,
    )  # fmt: skip
    opened = catalogue.Catalogue(root, settings)
    space = Space(digest, bytes(32))
    space.held = {BlockKey(key): packed(BLOCK_BYTES + 4096, 1_700_000_000 + n // 100) for n, key in enumerate(keys)}
    space.held_bytes = blocks * (BLOCK_BYTES + 4096)
    with opened._session():
        opened._holdings.take_over([space])
        opened._replace(opened._journal)  # type: ignore[arg-type]
    opened.close()
    return keys


def make_files(root: Path, keys: list[bytes]) -> None:
    directory = bytes(namespace_key(NAMESPACE)).hex()
    for key in keys:
        path = Path(layout.block_path(str(root), directory, BlockKey(key)))
        path.parent.mkdir(exist_ok=True)
        path.touch()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("root", type=Path, metavar="ROOT")
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--walk", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.root.exists():
        print(f"pool_open: {arguments.root} is there already: name a new directory", file=sys.stderr)
        return 2
    keys = fill(arguments.root, arguments.blocks)
    rounds = [timed_open(arguments.root) for _ in range(ROUNDS)]
    result: dict[str, object] = {
        "blocks": arguments.blocks,
        "known_blocks": [int(found["blocks"]) for found in rounds],
        "catalogue_s": [round(found["seconds"], 3) for found in rounds],
        "catalogue_cpu_s": [round(found["cpu_seconds"], 3) for found in rounds],
        "limit_s": LIMIT_S,
    }
    if arguments.walk:
        make_files(arguments.root, keys)
        (arguments.root / "catalogue").unlink()
        result["walk_s"] = round(timed_open(arguments.root)["seconds"], 3)
    shutil.rmtree(arguments.root)
    median_s = sorted(found["seconds"] for found in rounds)[ROUNDS // 2]
    if arguments.json:
        print(json.dumps(result))
    else:
        print(
            f"{arguments.blocks:,} blocks known to an engine after {median_s:.2f} s "
            f"(median of {ROUNDS}, limit {LIMIT_S:g} s): {result}"
        )
    return 0 if median_s < LIMIT_S and result["known_blocks"] == [arguments.blocks] * ROUNDS else 1


if __name__ == "__main__":
    raise SystemExit(main())
