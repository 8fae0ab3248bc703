"""A restore benchmark's parts made up: sound ones, with figures that are easy to check, to be spoilt one by one."""

from __future__ import annotations

import msgspec

from forebay.bench.evidence import Medium, ReadCounts
from forebay.bench.restore.results import BandwidthSample, Contents, Group, RequestRecord, Role, WaveRecord

MEDIUM = Medium(path="/pool", filesystem="ext4", source="/dev/sda1", device="sda1", device_number="8:1")
TTFT_S = {"recompute": 10.0, "baseline": 3.0, "candidate": 2.0}
WANTED_BYTES = 4_000_000_000


def groups() -> tuple[Group, ...]:
    sound = Contents(sampled_files=100, duplicate_files=0, compressed_share=1.0)
    return tuple(
        Group(
            name=role.value,
            role=role,
            instances=1,
            target="emulated",
            media=() if role is Role.RECOMPUTE else (MEDIUM,),
            contents=None if role is Role.RECOMPUTE else sound,
        )
        for role in (Role.RECOMPUTE, Role.BASELINE, Role.CANDIDATE)
    )


def request(group: str = "candidate", session: int = 0, **changes: object) -> RequestRecord:
    """Sent at 100 s times its round; 11 tokens, 0.1 s apart; a session takes a tenth longer than the one before."""
    number = int(str(changes.get("round", 1)))
    ttft_s = TTFT_S[group] * (1 + session / 10)
    hits = 0 if group == "recompute" else 1000
    made = RequestRecord(
        group=group, instance=0, concurrency=4, round=number, session=session, written_by=0, sent_s=100.0 * number,
        ttft_s=ttft_s, ended_s=100.0 * number + ttft_s + 1.0, prompt_tokens=1010, output_tokens=11,
        stored_tokens=hits, hit_tokens=hits, hit_source="file" if hits else None, output_digest=f"answer {session}",
    )  # fmt: skip
    return msgspec.structs.replace(made, **changes)


def requests() -> list[RequestRecord]:
    return [request(group, session, round=number) for group in TTFT_S for number in (1, 2, 3) for session in range(4)]


def wave(group: str = "candidate", **changes: object) -> WaveRecord:
    """Reads at 2 GB/s for 2 s, then at nothing for 2 s."""
    number = int(str(changes.get("round", 1)))
    began_s, wanted_bytes = 100.0 * number, 0 if group == "recompute" else WANTED_BYTES
    made = WaveRecord(
        group=group, concurrency=4, round=number, began_s=began_s, ended_s=began_s + 5, wanted_bytes=wanted_bytes,
        read=ReadCounts(process_bytes=wanted_bytes, device_bytes=wanted_bytes), resident_bytes=0, foreign_bytes=0,
        bandwidth=tuple(
            BandwidthSample(at_s=began_s + at, bytes_per_s=2e9 if wanted_bytes and at <= 2 else 0.0)
            for at in (1.0, 2.0, 3.0, 4.0)
        ),
        core_s=2.0, clock_step_s=0.0,
    )  # fmt: skip
    return msgspec.structs.replace(made, **changes)


def waves() -> list[WaveRecord]:
    return [wave(group, round=number) for group in TTFT_S for number in (1, 2, 3)]
