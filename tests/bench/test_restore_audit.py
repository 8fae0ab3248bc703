"""Runs that are not what they say they are: each planted by one thing, and each found out."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from forebay.assemble import Named
from forebay.bench.evidence import Kernel, Validity
from forebay.bench.restore.host import Host, Reading
from forebay.bench.restore.options import GroupOptions, Limits, RestoreOptions
from forebay.bench.restore.pagecache import files_below
from forebay.bench.restore.results import RestoreRecord, Role
from forebay.bench.restore.run import run_restore

EMULATED = {"block_tokens": 256, "kv_scale": 0.004, "time_scale": 0.001, "host_bytes": 8_000_000}
"""Blocks of 260 kB."""
UNWATCHED = Limits(rounds=1, control_drift=1e9, foreign_share=1e9)
"""The machine may have other work while tests run: only the test that plants some looks for it."""


def measure(
    root: Path,
    target: str = "emulated",
    *,
    role: Role = Role.CANDIDATE,
    limits: Limits = UNWATCHED,
    host: Host | None = None,
    **options: object,
) -> RestoreRecord:
    """One group, one wave of two sessions of four blocks."""
    kind = target if target == "emulated" else f"restore_plants.{target}"
    group = GroupOptions(name="it", role=role, target=kind, roots=(root,), options=EMULATED | options)
    workload = Named(kind="cold", options={"sessions": 2, "prefix_tokens": 1024, "output_tokens": 2})
    chosen = RestoreOptions(group=(group,), workload=workload, concurrency=(2,), rounds=1, limits=limits)
    return run_restore(chosen, host=host)


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """A directory in which physical reads can be shown."""
    if doubt := Kernel().medium_of(tmp_path).doubt:
        pytest.skip(doubt)
    return tmp_path


def reasons(record: RestoreRecord) -> str:
    assert (record.verdict.validity is Validity.VALID) == (not record.verdict.reasons)
    return "\n".join(record.verdict.reasons)


class TestPlantedRuns:
    def test_a_sound_run_is_valid(self, disk: Path) -> None:
        record = measure(disk)
        assert reasons(record) == ""
        [wave] = record.waves
        assert wave.read.process_bytes is not None
        assert wave.read.process_bytes >= wave.wanted_bytes == 8 * 260_048
        assert wave.resident_bytes == 0
        assert sum(sample.bytes_per_s for sample in wave.bandwidth) > 0

    def test_a_warm_page_cache(self, disk: Path) -> None:
        class Forgetful(Host):
            def drop_page_cache(self, roots: Sequence[Path]) -> None:
                for path in files_below(roots):
                    path.read_bytes()

        assert "warm page cache" in reasons(measure(disk, host=Forgetful()))
        unread = reasons(measure(disk, host=Forgetful(), file={"direct": "never"}))
        assert "the cold reads were not physical: this process read 0%" in unread
        assert "warm page cache" in unread

    def test_a_dram_tier_that_is_left_warm(self, disk: Path) -> None:
        found = reasons(measure(disk, "warm_dram"))
        assert "2 of 2 requests were restored from elsewhere than cold storage: host" in found
        assert "the cold reads were not physical" in found

    def test_duplicate_blocks(self, disk: Path) -> None:
        assert "7 of 8 stored blocks that were looked at have the bytes of another" in reasons(
            measure(disk, "duplicates")
        )

    def test_blocks_that_compress(self, disk: Path) -> None:
        assert "what is stored compresses to 0%" in reasons(measure(disk, "dull"))

    def test_failed_requests(self, disk: Path) -> None:
        record = measure(disk, silence_limit_s=1e-9)
        assert "2 of 2 requests failed, the first with: nothing was heard for 1e-09 s" in reasons(record)
        assert "there is no sample at concurrency 2" in reasons(record)
        assert record.cells[0].failed == 2
        assert record.cells[0].ttft_p50_s is None

    def test_empty_samples(self, disk: Path) -> None:
        record = measure(disk, "mute")
        assert "there is no sample at concurrency 2" in reasons(record)
        assert "2 of 2 requests gave no token" in reasons(record)

    def test_clock_jumps(self, disk: Path) -> None:
        class Jumping(Host):
            """Its wall clock is set an hour back between two readings."""

            jumps = itertools.count()

            def read(self, processes: Sequence[int], devices: Sequence[str]) -> Reading:
                reading = super().read(processes, devices)
                return dataclasses.replace(reading, wall_ns=reading.wall_ns - 3600 * 10**9 * next(self.jumps))

        assert "the clock jumped during 1 of 1 waves, by up to -3600.0" in reasons(measure(disk, host=Jumping()))

    def test_another_process_that_hammers_the_disk(self, disk: Path) -> None:
        strict = msgspec.structs.replace(UNWATCHED, foreign_share=5.0)  # of 2 MB, where the plant moves 67
        found = reasons(measure(disk, "hammered", limits=strict))
        assert "others used the device during 1 of 1 waves" in found

    def test_wrong_bytes_give_other_outputs(self, disk: Path) -> None:
        sound, flipped = measure(disk), measure(disk, "flipped", file={"verify": "header"})
        for one, other in zip(sound.requests, flipped.requests, strict=True):
            assert one.session == other.session
            assert other.hit_tokens == 1024
            assert one.output_digest != other.output_digest

    def test_damaged_blocks_that_a_checksum_finds_are_not_restored_in_full(self, disk: Path) -> None:
        assert "2 of 2 requests were not restored in full, such as session 0: 0 of 1,024 tokens" in reasons(
            measure(disk, "flipped")
        )
