"""Replay a trace as long as an hour of a conversation service under virtual time, or a part of it, and take the time.

    python bench/replay_speed.py [--requests N]

The trace is made here, with a seed: sessions that come back, with longer prompts, in blocks of 512 tokens. Exits with 1
when it takes longer than 12,000 requests in 60 s of one core would.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path

from forebay.bench.progress import Silence
from forebay.bench.replay.options import ReplayOptions
from forebay.bench.replay.run import run_replays

BLOCK_TOKENS, REQUESTS_PER_S, MOST_S_PER_REQUEST = 512, 12_000 / 3600, 60 / 12_000
_TURN_BLOCKS, _MOST_BLOCKS, _COMES_BACK = (4, 20), 60, 0.6


def write_trace(path: Path, requests: int, seed: int = 0) -> None:
    """JSON lines as the Mooncake traces have them: milliseconds, tokens, and an id for each block."""
    rng, fresh = random.Random(seed), 0
    sessions: list[list[int]] = []
    with path.open("w") as file:
        for number in range(requests):
            session = rng.choice(sessions[-200:]) if sessions and rng.random() < _COMES_BACK else []
            if not session or len(session) > _MOST_BLOCKS:
                session = []
                sessions.append(session)
            turn = rng.randint(*_TURN_BLOCKS)
            session.extend(range(fresh, fresh + turn))
            fresh += turn
            line = {
                "timestamp": round(number * 1000 / REQUESTS_PER_S), "input_length": BLOCK_TOKENS * len(session),
                "output_length": 100, "hash_ids": session,
            }  # fmt: skip
            file.write(json.dumps(line) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1500)
    requests = parser.parse_args().requests
    if requests < 1:
        parser.error("--requests must be 1 or more")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        write_trace(path, requests)
        began = time.process_time()
        record = run_replays(ReplayOptions(trace=path), command=(), progress=Silence())
        took_s = time.process_time() - began
    outcome, most_s = record.outcomes[0], requests * MOST_S_PER_REQUEST
    print(
        f"{outcome.requests} requests of {outcome.wanted_blocks / outcome.requests * BLOCK_TOKENS:,.0f} tokens: "
        f"{took_s:.1f} s of one core, at most {most_s:.1f}; hits {outcome.hit_share:.0%}"
    )
    return 0 if took_s <= most_s else 1


if __name__ == "__main__":
    raise SystemExit(main())
