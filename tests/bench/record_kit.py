"""A demo's record made up: two sessions, three ways, figures that are easy to check."""

from __future__ import annotations

from pathlib import Path

from forebay.bench.demo.results import (
    Damage,
    Durations,
    Measurement,
    Model,
    Pool,
    Record,
    Resources,
    Session,
    Way,
    headline,
    summarise,
)
from forebay.bench.environment import describe_environment
from forebay.bench.evidence import Evidence, Medium, ReadCounts, Verdict

TTFT_S = {Way.RECOMPUTE: 10.0, Way.DISK: 0.5, Way.DRAM: 0.25}
SOURCE = {Way.DISK: "file", Way.DRAM: "host"}


def measurement(session: int, way: Way, **changes: object) -> Measurement:
    restored = 0 if way is Way.RECOMPUTE else 960
    given: dict[str, object] = {
        "session": session,
        "way": way,
        "prompt_tokens": 1000,
        "hit_tokens": {SOURCE[way]: restored} if restored else {},
        "computed_tokens": 1000 - restored,
        "tokens": (5, 6, 7),
        "ttft_s": TTFT_S[way] * session,
        "total_s": TTFT_S[way] * session + 1.0,
        "restore_s": 0.1 if restored else 0.0,
        "prefill_s": 0.1,
        "restored_bytes": restored * 1000,
    }
    return Measurement(**(given | changes))  # type: ignore[arg-type]


def measurements() -> tuple[Measurement, ...]:
    return tuple(measurement(session, way) for session in (1, 2) for way in Way)


def record(*, answer: str = "An answer.", reasons: tuple[str, ...] = (), tokens_equal: bool = True) -> Record:
    found = measurements()
    verdict, summaries = Verdict.of(reasons), summarise(found)
    return Record(
        created="2026-01-01T00:00:00+00:00",
        headline=headline(summaries, 960, verdict=verdict, tokens_equal=tokens_equal),
        verdict=verdict,
        tokens_equal=tokens_equal,
        notes=("A note.",),
        summaries=summaries,
        sessions=tuple(
            Session(
                number=number,
                title="A title",
                question="A question?",
                answer=answer,
                document_tokens=980,
                prompt_tokens=1000,
                found_tokens=0,
                populate_s=10.0,
                tokens_equal=tokens_equal,
            )
            for number in (1, 2)
        ),
        measurements=found,
        evidence=Evidence(
            medium=Medium(path="/pool", filesystem="ext4", source="/dev/sda1", device="sda1", device_number="8:1"),
            wanted_bytes=1_920_000,
            read=ReadCounts(process_bytes=1_930_000, device_bytes=1_940_000),
        ),
        damage=Damage(),
        model=Model(
            name="model",
            architecture="Llama",
            parameters=1000,
            kv_dtype="float32",
            token_bytes=1000,
            weights_digest="00",
        ),
        pool=Pool(
            path=str(Path("/pool")),
            kept=False,
            found_blocks=0,
            document_blocks=30,
            block_bytes=64_000,
            access="direct",
            access_reason="a trial worked",
        ),
        resources=Resources(host_pool_bytes=10**9, device_cache_bytes=10**8, huge_page_bytes=0, compute_threads=2),
        durations=Durations(load_model_s=1.0, populate_s=20.0, measure_s=30.0, whole_s=51.0),
        environment=describe_environment(),
        command=("forebay", "demo"),
        options={"sessions": 2, "pool": None},
    )
