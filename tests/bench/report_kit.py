"""Records of a restore benchmark and of gates, made up from a seed: figures that hang together, nothing measured."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

from forebay.bench.environment import Environment
from forebay.bench.evidence import NO_READS, Medium, ReadCounts, Verdict
from forebay.bench.gates.verdicts import Bound, Check, GateResult, GatesRecord, Start, check, worst
from forebay.bench.restore.results import (
    BandwidthSample,
    Cell,
    Comparison,
    Contents,
    Group,
    RequestRecord,
    RestoreRecord,
    Role,
    Spread,
    WaveRecord,
)

SESSION_BYTES = 1_200_000_000
OUTPUT_TOKENS = 64
RATES = {Role.RECOMPUTE: 0.15e9, Role.BASELINE: 1.4e9, Role.CANDIDATE: 2.1e9, Role.SHARED: 2.0e9}
"""Bytes of KV a second that each role makes or reads."""
ENVIRONMENT = Environment(
    cpu_model="A processor",
    cpus=96,
    usable_cpus=48,
    virtual_machine=False,
    memory_bytes=512 * 10**9,
    kernel="Linux 6.8 x86_64",
    python="CPython 3.11.9",
    packages={"forebay": "0.1.0", "torch": "2.13.0", "transformers": "-"},
    transparent_huge_pages="madvise",
)


def group(role: Role, name: str = "") -> Group:
    medium = Medium(
        path=f"/mnt/{role.value}",
        filesystem="ext4",
        source="/dev/md0",
        device="md0",
        device_number="9:0",
        mount_options="rw,noatime",
        hardware={"disk": "md0", "raid": "raid0 of 4", "member 1": "nvme0n1, transport tcp"},
    )
    return Group(
        name=name or role.value,
        role=role,
        instances=2 if role is Role.SHARED else 1,
        target="emulated",
        media=() if role is Role.RECOMPUTE else (medium,),
        contents=None
        if role is Role.RECOMPUTE
        else Contents(sampled_files=200, duplicate_files=0, compressed_share=0.9987),
        facts={"engine": "timed compute of profile 8-gpu", "model": "a model of 62 layers"},
    )


def restore_record(
    seed: int = 7,
    *,
    roles: Sequence[Role] = tuple(Role),
    concurrencies: Sequence[int] = (4, 8, 16, 32),
    rounds: int = 3,
    reasons: tuple[str, ...] = (),
    title: str = "Cold restore, 60,000 tokens",
) -> RestoreRecord:
    chance = random.Random(seed)
    groups = tuple(group(role) for role in roles)
    waves: list[WaveRecord] = []
    requests: list[RequestRecord] = []
    now_s = 0.0
    for concurrency in concurrencies:
        for number in range(rounds):
            for each in groups:
                found = _requests(chance, each, concurrency, number, now_s)
                requests += found
                waves.append(_wave(chance, each, found))
                now_s = waves[-1].ended_s + 1.0
    cells = tuple(
        _cell(each, concurrency, [found for found in requests if (found.group, found.concurrency) == key], rounds)
        for each in groups
        for concurrency in concurrencies
        for key in ((each.name, concurrency),)
    )
    return RestoreRecord(
        created="2026-01-01T00:00:00+00:00",
        title=title,
        verdict=Verdict.of(reasons),
        notes=("Beneath the disk there may be caches that no counter sees.",),
        workload="restore",
        groups=groups,
        cells=cells,
        comparisons=_comparisons(groups, cells),
        waves=tuple(waves),
        requests=tuple(requests),
        environment=ENVIRONMENT,
        options={"sessions": 32, "concurrencies": list(concurrencies), "seed": seed, "block_bytes": 8_126_464},
        command=("forebay", "bench", "restore", "plan.toml"),
    )


def _requests(chance: random.Random, each: Group, concurrency: int, number: int, sent_s: float) -> list[RequestRecord]:
    """One after the other at the role's rate, as whole restores in order are."""
    rate = RATES[each.role] * chance.uniform(0.97, 1.03)
    return [
        RequestRecord(
            group=each.name,
            instance=session % each.instances,
            concurrency=concurrency,
            round=number,
            session=session,
            written_by=0,
            sent_s=sent_s,
            ttft_s=0.05 + (session + 1) * SESSION_BYTES / rate * chance.uniform(0.95, 1.05),
            ended_s=sent_s + 2.0 + (session + 1) * SESSION_BYTES / rate,
            prompt_tokens=60_000,
            output_tokens=OUTPUT_TOKENS,
            stored_tokens=0 if each.role is Role.RECOMPUTE else 59_968,
            hit_tokens=0 if each.role is Role.RECOMPUTE else 59_968,
            hit_source=None if each.role is Role.RECOMPUTE else "file",
            output_digest=f"{session:064x}",
        )
        for session in range(concurrency)
    ]


def _wave(chance: random.Random, each: Group, requests: Sequence[RequestRecord]) -> WaveRecord:
    began_s, ended_s = requests[0].sent_s, max(found.ended_s for found in requests)
    wanted = 0 if each.role is Role.RECOMPUTE else SESSION_BYTES * len(requests)
    steps = 40
    samples = tuple(
        BandwidthSample(
            began_s + (ended_s - began_s) * (step + 1) / steps,
            RATES[each.role] * chance.uniform(0.85, 1.1) if wanted and step < steps * 0.9 else 0.0,
        )
        for step in range(steps)
    )
    return WaveRecord(
        group=each.name,
        concurrency=len(requests),
        round=requests[0].round,
        began_s=began_s,
        ended_s=ended_s,
        wanted_bytes=wanted,
        read=ReadCounts(process_bytes=wanted + 4096, device_bytes=wanted + 8192) if wanted else NO_READS,
        resident_bytes=0,
        foreign_bytes=12_288,
        bandwidth=samples,
        core_s=wanted / 1e9 * 0.1,
        clock_step_s=0.0001,
    )


def spread(value: float, share: float = 0.04) -> Spread:
    return Spread(value=value, low=value - abs(value) * share, high=value + abs(value) * share)


def _cell(each: Group, concurrency: int, requests: Sequence[RequestRecord], rounds: int) -> Cell:
    waits = sorted(found.ttft_s for found in requests if found.ttft_s is not None)
    of_rounds = tuple(
        statistics.median(found.ttft_s or 0.0 for found in requests if found.round == number)
        for number in range(rounds)
    )
    whole_s = max(found.ended_s - found.sent_s for found in requests)
    is_restored = each.role is not Role.RECOMPUTE
    return Cell(
        group=each.name,
        role=each.role,
        concurrency=concurrency,
        rounds=rounds,
        requests=len(requests),
        failed=0,
        ttft_mean_s=spread(statistics.fmean(waits)),
        ttft_p50_s=spread(statistics.median(waits)),
        ttft_p90_s=spread(waits[int(len(waits) * 0.9)]),
        ttft_p99_s=spread(waits[-1]),
        ttft_p50_of_rounds_s=of_rounds,
        tpot_p50_s=spread(0.03),
        end_to_end_p50_s=spread(statistics.median(found.end_to_end_s for found in requests)),
        output_tokens_per_s=spread(OUTPUT_TOKENS * concurrency / whole_s),
        hit_tokens=sum(found.hit_tokens or 0 for found in requests),
        peak_bytes_per_s=RATES[each.role] * 1.1 if is_restored else None,
        busy_mean_bytes_per_s=RATES[each.role] if is_restored else None,
        core_s_per_gb=0.1 if is_restored else None,
        core_s_per_request=0.12 if is_restored else 8.0,
        own_ttft_p50_s=spread(statistics.median(waits) * 0.99) if each.role is Role.SHARED else None,
        others_ttft_p50_s=spread(statistics.median(waits) * 1.01) if each.role is Role.SHARED else None,
    )


def _comparisons(groups: Sequence[Group], cells: Sequence[Cell]) -> tuple[Comparison, ...]:
    of = {(cell.group, cell.concurrency): cell for cell in cells}
    return tuple(
        Comparison(
            group=mine.name,
            against=other.name,
            concurrency=concurrency,
            ttft_p50_change=_change(of[mine.name, concurrency].ttft_p50_s, of[other.name, concurrency].ttft_p50_s),
            throughput_change=_change(
                of[mine.name, concurrency].output_tokens_per_s, of[other.name, concurrency].output_tokens_per_s
            ),
            tokens_equal=True,
        )
        for concurrency in sorted({cell.concurrency for cell in cells})
        for other in groups
        for mine in groups
        if mine is not other
    )


def _change(mine: Spread | None, other: Spread | None) -> Spread | None:
    return None if mine is None or other is None else spread(mine.value / other.value - 1, 0.1)


PLAN = """\
title = "Acceptance of a pool"

[[gate]]
name = "g3"
ttft_p50_change_at_most = -0.25  # a quarter less
throughput_change_at_least = 0.29
concurrencies = [8, 16]
"""


def gates_record(*extra: Check, title: str = "Acceptance of a pool", stopped_early: str = "") -> GatesRecord:
    """G1 to G4, all passed but for `extra`, which G3 has besides its own."""
    checks = {
        "g1": (
            check("read_bandwidth@8 MiB, 16 in flight, /mnt/pool", 13.4e9, Bound.AT_LEAST, 12.0e9, "bytes/s"),
            check("read_latency_p99@8 MiB, 16 in flight, /mnt/pool", 0.0112, Bound.AT_MOST, 0.02, "s"),
        ),
        "g2": (check("repeat_drift@8 baseline", 0.021, Bound.AT_MOST, 0.05, "ratio"),),
        "g3": (
            check("ttft_p50_change@8", -0.334, Bound.AT_MOST, -0.25, "ratio"),
            check("throughput_change@8", 0.49, Bound.AT_LEAST, 0.29, "ratio"),
            check("tokens_equal@8", 1, Bound.EQUAL, 1, "count"),
            *extra,
        ),
        "g4": (
            check("wrong_tokens", 0, Bound.EQUAL, 0, "count"),
            check("fault_seen@full disk", 4, Bound.AT_LEAST, 1, "count"),
        ),
    }
    results = tuple(
        GateResult(
            gate=name,
            outcome=worst(found),
            checks=found,
            stopped_early=stopped_early if name == "g4" else "",
            began=f"2026-01-0{number}T00:00:00+00:00",
            ended=f"2026-01-0{number}T02:03:04+00:00",
            files=(f"{name}/record.json",),
        )
        for number, (name, found) in enumerate(checks.items(), 1)
    )
    return GatesRecord(
        created="2026-01-05T00:00:00+00:00",
        title=title,
        plan_text=PLAN,
        plan_sha256="ab" * 32,
        planned=tuple(checks),
        starts=(
            Start(at="2026-01-01T00:00:00+00:00", boot="a", forebay="0.1.0"),
            Start(at="2026-01-02T03:00:00+00:00", boot="b", forebay="0.1.0"),
        ),
        results=results,
        environment=ENVIRONMENT,
        command=("forebay", "gate", "run", "plan.toml"),
    )
