"""Does a tier serve KV of other weights, or damaged KV? vLLM's own `fs` tier and Forebay's, asked the same.

    python bench/vllm_same_path.py [--json]

Needs the environment of `make test-engines`. A vLLM with a small model, whose answers depend on every token, fills the
pool. Then a new one answers the same prompts, after (1) the weights at the model's path were replaced by others, and
(2) one bit of every stored file was flipped. Right answers are those of a vLLM without any tier. Reported for each:
tokens that came from the pool and wrong answers. Exit code 1 when Forebay gives a wrong one.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich.console import Console

from forebay.testing.small_models import TELLING, save_model
from vllm_engine import EngineProcess, Task

PROMPT_TOKENS, PROMPTS, ANSWER_TOKENS = 1307, 4, 8
HEADER_BYTES = 4096


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    console = Console(stderr=True)
    rows: list[dict[str, Any]] = []
    for way in ("fs", "native", "connector"):
        for change in (other_weights, flipped_bits):
            with (
                console.status(f"{way}: {change.__name__.replace('_', ' ')}"),
                tempfile.TemporaryDirectory(prefix="forebay-bench-") as scratch,
            ):
                rows.append(
                    {"way": way, "change": change.__name__.replace("_", " ")} | judge(way, change, Path(scratch))
                )
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        print(f"{PROMPTS} prompts of {PROMPT_TOKENS} tokens")
        print("| way | change | tokens from the pool before | after | wrong answers |\n|---|---|---|---|---|")
        for row in rows:
            print("| " + " | ".join(str(value) for value in row.values()) + " |")
    return 1 if any(row["wrong"] for row in rows if row["way"] != "fs") else 0


def judge(way: str, change: Any, scratch: Path) -> dict[str, Any]:
    model = scratch / "model"
    write_weights(model, seed=1)
    run(way, scratch)  # fills
    before = run(way, scratch)
    change(model, scratch / way)
    after, right = run(way, scratch), run("recompute", scratch)
    return {
        "restored_before": sum(answer.restored_tokens for answer in before),
        "restored_after": sum(answer.restored_tokens for answer in after),
        "wrong": sum(own.tokens != other.tokens for own, other in zip(after, right, strict=True)),
    }


def run(way: str, scratch: Path) -> Sequence[Any]:
    pool = scratch / way
    pool.mkdir(exist_ok=True)
    with EngineProcess(Task(way, str(scratch / "model"), str(pool), 2048, host_bytes=2**26)) as engine:
        answers = [engine.ask(prompt(seed), ANSWER_TOKENS) for seed in range(PROMPTS)]
        engine.ask([1, 2, 3], ANSWER_TOKENS)  # with more steps, the last blocks go out
    return answers


def prompt(seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(TELLING.vocabulary) for _ in range(PROMPT_TOKENS)]


def write_weights(model: Path, seed: int) -> None:
    """In a process of its own, so that this one stays small."""
    making = get_context("spawn").Process(target=save_model, args=(model, TELLING, seed))
    making.start()
    making.join()


def other_weights(model: Path, pool: Path) -> None:
    write_weights(model, seed=2)


def flipped_bits(model: Path, pool: Path) -> None:
    """One a file: the highest of a value's exponent, behind what could be a header."""
    for path in pool.rglob("*"):
        if path.is_file() and path.stat().st_size > 2 * HEADER_BYTES:
            whole = bytearray(path.read_bytes())
            whole[HEADER_BYTES + 3] ^= 0x40
            path.write_bytes(whole)


if __name__ == "__main__":
    sys.exit(main())
