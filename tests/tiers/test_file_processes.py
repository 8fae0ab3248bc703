"""Several processes over one pool, and writers that die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from file_tier_kit import BLOCK_BYTES, block_file, namespace_dir, open_tier, unfinished

from forebay.testing.tier_contract import get, key_of, payload_of, put
from forebay.tiers.file import Durability
from forebay.tiers.file.directio import REAL_CALLS
from forebay.types import Outcome

WRITER = """
import dataclasses, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from file_tier_kit import open_tier, write_all
from forebay.tiers.file.directio import REAL_CALLS

def hang(temp, path):  # between the last byte and the publication
    if not path.endswith(".kv"):
        return REAL_CALLS.rename(temp, path)
    print("written", flush=True)
    sys.stdin.read()

tier = open_tier(Path(sys.argv[1]), calls=dataclasses.replace(REAL_CALLS, rename=hang))
write_all(tier, [1])
"""


def start_writer(root: Path) -> subprocess.Popen[str]:
    """A process whose write of block 1 is finished and not yet published."""
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(root), str(Path(__file__).parent)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert writer.stdout is not None
    assert writer.stdout.readline() == "written\n"
    return writer


def test_what_a_killed_writer_left_is_swept_and_a_live_writers_file_is_not(tmp_path: Path) -> None:
    root = tmp_path / "a"
    with start_writer(root) as writer:
        assert len(unfinished(root)) == 1
        open_tier(root).close()
        assert len(unfinished(root)) == 1, "swept under a live writer"
        writer.send_signal(signal.SIGKILL)
    tier = open_tier(root)
    assert unfinished(root) == []
    assert list(tier.scan()) == []
    assert get(tier, 1, BLOCK_BYTES) is Outcome.MISSING
    put(tier, [1], BLOCK_BYTES)
    tier.close()


def test_eight_engines_over_one_pool_for_a_moment(tmp_path: Path) -> None:
    """A short run of the soak that `bench/pool_soak.py` makes for a minute or more."""
    soak = Path(__file__).parents[2] / "bench" / "pool_soak.py"
    ran = subprocess.run(
        [sys.executable, str(soak), str(tmp_path / "a"), str(tmp_path / "b"), "--seconds", "2", "--json"],
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads(ran.stdout)
    assert found["faults"] == []
    assert found["processes"] == 8
    assert min(found["loads"], found["loaded_blocks"], found["offered_blocks"]) > 0
    assert 0 < found["files_bytes"] == found["counted_bytes"] <= found["capacity_bytes"]


def test_a_second_process_sees_the_blocks_of_the_first(tmp_path: Path) -> None:
    root = tmp_path / "a"
    first = open_tier(root)
    put(first, [1, 2], BLOCK_BYTES)
    script = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from file_tier_kit import namespace_dir, block_file, BLOCK_BYTES, open_tier
from forebay.testing.tier_contract import get, key_of, payload_of, put
tier = open_tier(Path(sys.argv[1]))
assert get(tier, 1, BLOCK_BYTES) == payload_of(1, BLOCK_BYTES)
tier.delete([key_of(2)])
put(tier, [3], BLOCK_BYTES)
tier.close()
"""
    subprocess.run([sys.executable, "-c", script, str(root), str(Path(__file__).parent)], check=True)
    assert list(first.contains([key_of(i) for i in (1, 2, 3)])) == [True, False, True]
    assert get(first, 3, BLOCK_BYTES) == payload_of(3, BLOCK_BYTES)
    first.close()


def test_a_sweeper_between_creation_and_lock_costs_only_another_try(tmp_path: Path) -> None:
    """The first temporary file vanishes before its writer has looked at it again."""
    root, thieves = tmp_path / "a", [0]

    def stolen_open(path: str, flags: int, mode: int) -> int:
        descriptor = os.open(path, flags, mode)
        if thieves[0] and path.endswith(".tmp"):
            thieves[0] -= 1
            Path(path).unlink()
        return descriptor

    tier = open_tier(root, calls=replace(REAL_CALLS, open=stolen_open))
    thieves[0] = 2
    put(tier, [1], BLOCK_BYTES)
    assert thieves[0] == 0
    assert get(tier, 1, BLOCK_BYTES) == payload_of(1, BLOCK_BYTES)
    tier.close()


@pytest.mark.parametrize("durability", list(Durability))
def test_durability_decides_what_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durability: Durability
) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def record_fdatasync(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        synced.append(path.suffix if len(path.name) > 64 else path.name)  # a block's, and not the catalogue's
        os.fdatasync(descriptor)

    tier = open_tier(tmp_path / "a", durability=durability, calls=replace(REAL_CALLS, sync=record_fdatasync))

    def record_fsync(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record_fsync)
    fan, other = key_of(1).hex()[:2], key_of(2).hex()[:2]
    assert fan != other
    directories = [namespace_dir(tmp_path / "a").name, "a"]
    put(tier, [1], BLOCK_BYTES)
    first, synced[:] = list(synced), []
    block_file(tmp_path / "a", key_of(1)).unlink()
    put(tier, [1], BLOCK_BYTES)
    again, synced[:] = list(synced), []
    put(tier, [2], BLOCK_BYTES)
    wanted = [[".tmp", fan, *directories], [".tmp", fan], [".tmp", other, *directories]]
    found = [[name for name in names if name in (".tmp", fan, other, *directories)] for names in (first, again, synced)]
    assert found == (wanted if durability is Durability.BLOCK else [[], [], []])
    tier.close()
