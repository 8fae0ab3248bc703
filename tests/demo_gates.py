"""Run the demonstration of the gates, and read what came out of it: that it is whole, right, and done in time.

    python tests/demo_gates.py        runs `make demo-gates`; exits with 1 and says why, unless all is as it should be

Figures of time may be INVALID, or not repeat, on a machine that is busy with other things. What is right may not.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from forebay.bench.bundle import verify_bundle
from forebay.bench.gates.run import read_record
from forebay.bench.gates.verdicts import Check, GatesRecord, Outcome

ROOT = Path(__file__).parents[1]
RUN = ROOT / "demo-gates/run"
LONGEST_S = 600.0
GATES = ("g1", "g2", "g3", "g4")
LEAST_CHECKS = {
    "g1": {"wrong_bytes", "read_bandwidth", "write_bandwidth"},
    "g2": {"failed_requests", "repeat_drift", "throughput_drift"},
    "g3": {"failed_requests", "tokens_equal", "ttft_p50_change", "throughput_change"},
    "g4": {"roots_on_disk", "wrong_bytes", "unexpected_errors", "rss_growth", "shm_segments_left", "fault_seen"},
}
REPEATS = {"repeat_drift", "throughput_drift"}
"""May fail: the machine did something else in one of the rounds."""
TIMES = REPEATS | {
    "read_bandwidth", "write_bandwidth", "read_latency_p99", "ttft_p50_change", "throughput_change", "requests",
    "p99_drift",
}  # fmt: skip
"""May be INVALID."""


def complaints(record: GatesRecord) -> Iterator[str]:
    """What is not as it should be."""
    results = {each.gate: each for each in record.results}
    for gate in GATES:
        if gate not in results:
            yield f"{gate} has no result"
            continue
        names = {_kind(each) for each in results[gate].checks}
        yield from (f"{gate} has no check {name}" for name in sorted(LEAST_CHECKS[gate] - names))
        for each in results[gate].checks:
            may_be = {Outcome.PASS}
            may_be |= {Outcome.INVALID} if _kind(each) in TIMES else set()
            may_be |= {Outcome.FAIL} if _kind(each) in REPEATS else set()
            if each.outcome not in may_be:
                yield f"{gate}: {each.name} is {each.outcome.name}, with {each.measured}: {each.why}"
    ended = max((datetime.fromisoformat(each.ended) for each in record.results), default=None)
    took_s = (ended - datetime.fromisoformat(record.created)).total_seconds() if ended else 0.0
    if not 0 < took_s < LONGEST_S:
        yield f"it took {took_s:.0f} s: at most {LONGEST_S:.0f} are allowed"


def _kind(check: Check) -> str:
    return check.name.partition("@")[0]


def main() -> int:
    subprocess.run(["make", "demo-gates"], cwd=ROOT, check=False)  # its code is the verdict, which is read below
    record = read_record(RUN)
    if record is None:
        print("there is no record")
        return 1
    verify_bundle(RUN / "gates.zip")
    found = list(complaints(record))
    print("\n".join(found) or f"the four gates are as they should be: {record.outcome.name}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
