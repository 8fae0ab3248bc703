"""Runs that are not what they say they are: each planted by one thing, and each found out."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import restore_kit

from forebay.assemble import Named
from forebay.bench.evidence import Kernel, Medium, ReadCounts, Validity
from forebay.bench.restore.audit import broken_claims, notes
from forebay.bench.restore.host import Host, Reading
from forebay.bench.restore.options import GroupOptions, Limits, RestoreOptions
from forebay.bench.restore.pagecache import files_below
from forebay.bench.restore.results import Contents, Group, RequestRecord, RestoreRecord, Role, WaveRecord
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
    @pytest.mark.parametrize("kind", ["rag", "chat"])
    def test_shared_prefixes_are_read_once_and_that_is_valid(self, disk: Path, kind: str) -> None:
        workload = Named(kind=kind, options={"requests": 40} if kind == "rag" else {"sessions": 20})
        group = GroupOptions(
            name="it", role=Role.SHARED, instances=2, roots=(disk,), options=EMULATED | {"host_bytes": 30_000_000}
        )
        record = run_restore(
            RestoreOptions(group=(group,), workload=workload, concurrency=(6,), rounds=1, limits=UNWATCHED)
        )
        assert reasons(record) == ""
        [wave] = record.waves
        assert 0 < wave.wanted_bytes <= sum(each.stored_tokens for each in record.requests) // 256 * 260_048

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


# --- made-up runs


def claims(
    *,
    requests: Sequence[RequestRecord] | None = None,
    waves: Sequence[WaveRecord] | None = None,
    groups: Sequence[Group] | None = None,
    limits: Limits | None = None,
) -> str:
    found = broken_claims(
        restore_kit.groups() if groups is None else groups,
        restore_kit.requests() if requests is None else requests,
        restore_kit.waves() if waves is None else waves,
        (4,),
        limits or Limits(),
    )
    return "\n".join(found)


def spoilt(**changes: object) -> list[RequestRecord]:
    """One request of the candidate is another."""
    whole = restore_kit.requests()
    at = next(at for at, each in enumerate(whole) if each.group == "candidate")
    return [*whole[:at], msgspec.structs.replace(whole[at], **changes), *whole[at + 1 :]]


def spoilt_wave(**changes: object) -> list[WaveRecord]:
    return [*restore_kit.waves()[:-1], restore_kit.wave("candidate", round=3, **changes)]


def spoilt_group(**changes: object) -> list[Group]:
    *others, candidate = restore_kit.groups()
    return [*others, msgspec.structs.replace(candidate, **changes)]


def test_a_sound_made_up_run_has_no_objections() -> None:
    assert claims() == ""


def test_without_requests_or_rounds_nothing_can_be_said() -> None:
    assert claims(requests=[], waves=[]).count("there is no sample at concurrency 4") == 3
    one_round = [each for each in restore_kit.requests() if each.round == 1]
    assert "1 of 3 rounds at concurrency 4: too few" in claims(requests=one_round, waves=restore_kit.waves()[:3])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"error": "HTTP 500"}, "1 of 12 requests failed, the first with: HTTP 500"),
        ({"output_tokens": 10}, "output tokens differ in 1 of 4 sessions, such as 0: 10, 11"),
        ({"prompt_tokens": 900}, "prompt tokens differ in 1 of 4 sessions"),
        ({"ttft_s": None}, "1 of 12 requests gave no token"),
        ({"ttft_s": 99.0}, "1 of 12 requests have times that cannot be"),
        ({"ttft_s": -1.0}, "1 of 12 requests have times that cannot be"),
        ({"ttft_s": float("nan")}, "1 of 12 requests have times that cannot be"),
        ({"hit_source": "host"}, "1 of 12 requests were restored from elsewhere than cold storage: host"),
        ({"hit_source": "file+host"}, "restored from elsewhere than cold storage: file+host"),
        ({"hit_source": None}, "of 1 requests it cannot be told which tier"),
        ({"hit_tokens": None}, "of 1 requests it cannot be told how much was restored"),
        ({"hit_tokens": 900}, "1 of 12 requests were not restored in full, such as session 0: 900 of 1,000 tokens"),
        ({"stored_tokens": 0}, "1 of 12 requests had nothing to restore"),
        ({"session": 1}, "round 1 at concurrency 4 read a session more than once"),
    ],
)
def test_one_bad_request_is_enough(changes: dict[str, object], reason: str) -> None:
    assert reason in claims(requests=spoilt(**changes))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"read": ReadCounts(process_bytes=10**9, device_bytes=4 * 10**9)}, "this process read 25% of the working set"),
        ({"read": ReadCounts(process_bytes=4 * 10**9, device_bytes=0)}, "the device read 0% of the working set"),
        ({"read": ReadCounts(process_bytes=None, device_bytes=None)}, "the kernel does not say"),
        ({"wanted_bytes": 0}, "nothing was read from cold disk"),
        ({"resident_bytes": 10**9}, "1 of 3 waves began with a warm page cache: up to 1.00 GB"),
        ({"resident_bytes": None}, "of 1 waves it cannot be told whether the page cache was warm"),
        ({"foreign_bytes": 10**9}, "others used the device during 1 of 3 waves, and moved up to 1.00 GB"),
        ({"foreign_bytes": None}, "of 1 waves it cannot be told whether others used the device"),
        ({"clock_step_s": -0.5}, "the clock jumped during 1 of 3 waves, by up to -0.500 s"),
        ({"ended_s": 0.0}, "1 waves took no time"),
    ],
)
def test_one_bad_wave_is_enough(changes: dict[str, object], reason: str) -> None:
    assert reason in claims(waves=spoilt_wave(**changes))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"contents": Contents(sampled_files=9, duplicate_files=3, compressed_share=1.0)}, "3 of 9 stored blocks"),
        ({"contents": Contents(sampled_files=9, duplicate_files=0, compressed_share=0.1)}, "compresses to 10%"),
        ({"contents": None}, "nothing that is stored was found"),
        ({"media": ()}, "does not lie on this machine"),
        (
            {"media": (restore_kit.MEDIUM, Medium(path="/p", filesystem="x", source="x", doubt="it is memory"))},
            "it is memory",
        ),
    ],
)
def test_what_is_stored_has_to_be_on_a_disk_and_to_be_read_from_it(changes: dict[str, object], reason: str) -> None:
    assert reason in claims(groups=spoilt_group(**changes))


def test_limits_that_were_relaxed_are_said() -> None:
    assert list(notes((), (), (), Limits(), virtual_machine=False)) == []
    lax = Limits(control_drift=0.5, rounds=2, compressed_share=0.9, resident_share=0.0)
    assert list(notes((), (), (), lax, virtual_machine=False)) == [
        "The limit control_drift was laxer than usual: 0.5, and not 0.1.",
        "The limit rounds was laxer than usual: 2, and not 3.",
    ]


def test_sessions_that_were_read_twice_and_tails_of_few_requests_are_said() -> None:
    few = restore_kit.requests()  # 12 of each group, of 4 sessions
    assert list(notes((), few, (), Limits(), virtual_machine=False)) == [
        "At 4 at once p99 stands on 12 requests or little more: below 100 it is hardly another figure than the longest "
        "of them.",
        "A session was read up to 3 times: a device with a cache of its own may have had it from there.",
    ]
    many = [restore_kit.request(session=session) for session in range(100)]
    assert list(notes((), many, (), Limits(), virtual_machine=False)) == []
    computed = [restore_kit.request("recompute", round=number) for number in range(1, 101)]
    assert list(notes((), computed, (), Limits(), virtual_machine=False)) == []


def test_shared_prefixes_may_come_from_a_read_for_another_request() -> None:
    assert claims(requests=spoilt(hit_source="file+host", shared_tokens=512)) == ""


def test_a_control_that_drifts_and_one_that_found_something() -> None:
    whole = [
        msgspec.structs.replace(each, ttft_s=(each.ttft_s or 0) * 1.2, ended_s=each.ended_s + 5)
        if each.group == "baseline" and each.round == 3
        else each
        for each in restore_kit.requests()
    ]
    assert claims(requests=whole) == "baseline: this control drifted by 20.0% at concurrency 4, where 10% is allowed"
    assert claims(requests=whole, limits=Limits(control_drift=0.25)) == ""
    found = [
        msgspec.structs.replace(each, hit_tokens=16) if each.group == "recompute" else each
        for each in restore_kit.requests()
    ]
    assert "recompute: 12 of 12 requests found tokens, where all were to be computed" in claims(requests=found)
