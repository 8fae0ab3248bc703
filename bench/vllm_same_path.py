"""Does a tier serve KV of other weights, or damaged KV? vLLM's own `fs` tier and Forebay's, asked the same.

    python bench/vllm_same_path.py [--json]

Needs the environment of `make test-engines`. A vLLM with a small model, whose answers depend on every token, fills the
pool. Then a new one answers the same prompts after one bit of every stored file was flipped, and another, on the files
as they were, after the weights at the model's path were replaced by others. Right answers are those of a vLLM without
any tier. Reported for each: tokens that came from the pool and wrong answers. Exit code 1 when Forebay gives a wrong
one.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

from rich.console import Console

from forebay.testing.small_models import TELLING, save_model
from vllm_engine import Answer, EngineProcess, Task

PROMPT_TOKENS, PROMPTS, ANSWER_TOKENS = 1307, 4, 8
HEADER_BYTES = 4096


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="forebay-bench-") as scratch:
        rows = measure(Path(scratch), Console(stderr=True))
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
    else:
        print(f"{PROMPTS} prompts of {PROMPT_TOKENS} tokens, {ANSWER_TOKENS} greedy tokens each")
        print("| tier | change | tokens taken from the pool | wrong answers |\n|---|---|---|---|")
        for row in rows:
            print(f"| {row.tier} | {row.change} | {row.restored_tokens} | {row.wrong_answers} of {PROMPTS} |")
    return 1 if any(row.wrong_answers for row in rows if row.tier != "fs") else 0


@dataclass(frozen=True)
class Row:
    tier: str
    change: str
    restored_tokens: int
    wrong_answers: int


def measure(scratch: Path, console: Console) -> list[Row]:
    tiers, rows = ("fs", "native", "connector"), []

    def answers_of(kind: str, pool: str) -> Sequence[Answer]:
        with console.status(pool):
            return run(kind, scratch / "model", scratch / pool)

    write_weights(scratch / "model", seed=1)
    for tier in tiers:
        answers_of(tier, tier)
        shutil.copytree(scratch / tier, scratch / f"{tier}, flipped")
        flip_bits(scratch / f"{tier}, flipped")
    right = answers_of("recompute", "recompute")
    for tier in tiers:
        rows.append(compare(tier, "one bit of every file", answers_of(tier, f"{tier}, flipped"), right))
    write_weights(scratch / "model", seed=2)
    right = answers_of("recompute", "recompute")
    for tier in tiers:
        rows.append(compare(tier, "other weights at the path", answers_of(tier, tier), right))
    return rows


def compare(tier: str, change: str, given: Sequence[Answer], right: Sequence[Answer]) -> Row:
    wrong = sum(own.tokens != other.tokens for own, other in zip(given, right, strict=True))
    return Row(tier, change, sum(answer.restored_tokens for answer in given), wrong)


def run(kind: str, model: Path, pool: Path) -> Sequence[Answer]:
    pool.mkdir(exist_ok=True)
    with EngineProcess(Task(kind, str(model), str(pool), 2048, host_bytes=2**26)) as engine:
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


def flip_bits(pool: Path) -> None:
    """One a file: the highest of a value's exponent, behind what could be a header."""
    for path in pool.rglob("*"):
        if path.is_file() and path.stat().st_size > 2 * HEADER_BYTES:
            whole = bytearray(path.read_bytes())
            whole[HEADER_BYTES + 3] ^= 0x40
            path.write_bytes(whole)


if __name__ == "__main__":
    sys.exit(main())
