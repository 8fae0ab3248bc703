"""Time per output token under vLLM while blocks go to the pool, beside a vLLM that stores nothing.

    python bench/vllm_step.py [--tokens 4096] [--output 64] [--rounds 10] [--json]

Needs the environment of `make test-engines`. The model (Qwen3 shape of 23 million parameters, float32, on the CPU) and
the ways are those of bench/vllm_restore.py. Each round is a new prompt, which every way computes and answers in turn,
each first in some rounds. What a prompt has left to store when its first token is there (as a rule nearly all of it)
goes to the pool while the tokens behind it are computed. Before the next answer everything has reached the pool, so
that no way pays for another's writes.

For each way: the time per token after the first, and the longest step. The ratios are those of one round each. On a CPU
the copies and checksums take cores from the model, which they do not where a GPU computes: this is the worst case.
Exit code 1 when tokens differ, when not everything was stored, or when the median ratio of a way is above --goal.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

from forebay.bench.environment import describe_environment
from forebay.bench.markup import axis_end
from forebay.testing.small_models import RESTORE, save_model
from vllm_engine import BLOCK_TOKENS, EngineProcess, Task
from vllm_restore import COLOURS, OWN, WARM, WAYS, Spread, prompt

NOTHING = "recompute"
FLUSHES = 1000
"""Requests of a few tokens after an answer, at most, until all of its blocks are in the pool."""


@dataclass(frozen=True)
class Sample:
    way: str
    round: int
    tokens: tuple[int, ...]
    per_token_s: float
    longest_step_s: float
    stored_blocks: int
    """Of this prompt, when everything had come to rest."""


@dataclass(frozen=True)
class Row:
    way: str
    per_token_ms: Spread
    longest_step_ms: Spread
    ratio: Spread
    """Time per token over that without a pool, round by round."""
    least_stored_blocks: int


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096, help="prompt length")
    parser.add_argument("--output", type=int, default=64, help="tokens of each answer, at least 2")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--ways", nargs="+", choices=OWN, default=list(OWN))
    parser.add_argument("--goal", type=float, default=1.25, help="highest median ratio (default: 1.25)")
    parser.add_argument("--picture", type=Path, default=Path("vllm_step.svg"), help="the picture (SVG)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    if options.output < 2 or options.rounds < 1 or options.tokens < BLOCK_TOKENS:
        parser.error(f"--output is at least 2, --rounds 1 and --tokens {BLOCK_TOKENS}")
    with tempfile.TemporaryDirectory(prefix="forebay-bench-") as scratch:
        samples = measure(Path(scratch), [NOTHING, *options.ways], options)
    return report(samples, options)


def measure(scratch: Path, ways: Sequence[str], options: argparse.Namespace) -> list[Sample]:
    making = get_context("spawn").Process(target=save_model, args=(scratch / "model", RESTORE))
    making.start()
    making.join()
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
    engines: list[EngineProcess] = []
    samples: list[Sample] = []
    try:
        with Progress(*columns, console=Console(stderr=True)) as progress:
            for way in progress.track(ways, description="start"):
                (scratch / way).mkdir()
                engines.append(
                    EngineProcess(Task(way, str(scratch / "model"), str(scratch / way), options.tokens + 512))
                )
                engines[-1].ask(prompt(WARM, options.tokens), options.output)
                flush(engines[-1], 0, options.tokens // BLOCK_TOKENS)
            work = [(number, turn) for number in range(options.rounds) for turn in range(len(engines))]
            for number, turn in progress.track(work, description="measure"):
                samples.append(sample(engines[(number + turn) % len(engines)], number, options))
    finally:
        for engine in engines:
            engine.close()
    return samples


def sample(engine: EngineProcess, number: int, options: argparse.Namespace) -> Sample:
    stored = stored_blocks(engine)
    answer = engine.ask(prompt(number, options.tokens), options.output)
    steps_s = [later - earlier for earlier, later in pairwise(answer.token_s)]
    return Sample(
        engine.task.kind, number, answer.tokens, sum(steps_s) / len(steps_s), max(steps_s),
        flush(engine, stored, options.tokens // BLOCK_TOKENS),
    )  # fmt: skip


def stored_blocks(engine: EngineProcess) -> int:
    return sum(1 for _ in Path(engine.task.pool).glob("pool/*/??/*.kv"))


def flush(engine: EngineProcess, before: int, blocks: int) -> int:
    """Have it take steps until so many more blocks are in its pool. Returns how many came."""
    if engine.task.kind == NOTHING:
        return 0
    for _ in range(FLUSHES):
        if stored_blocks(engine) >= before + blocks:
            break
        engine.ask(prompt(WARM + 1, 3), max_tokens=3)
    return stored_blocks(engine) - before


# --- what comes of it


def rows_of(samples: Sequence[Sample]) -> list[Row]:
    without = {each.round: each.per_token_s for each in samples if each.way == NOTHING}
    rows = []
    for way in dict.fromkeys(each.way for each in samples):
        own = [each for each in samples if each.way == way]
        rows.append(
            Row(
                way,
                Spread.of([1e3 * each.per_token_s for each in own]),
                Spread.of([1e3 * each.longest_step_s for each in own]),
                Spread.of([each.per_token_s / without[each.round] for each in own]),
                min(each.stored_blocks for each in own),
            )
        )
    return rows


def findings(samples: Sequence[Sample], rows: Sequence[Row], options: argparse.Namespace) -> list[str]:
    """What is wrong, a line each."""
    wrong = []
    for number in range(options.rounds):
        if len({each.tokens for each in samples if each.round == number}) > 1:
            wrong.append(f"prompt {number}: tokens differ")
    for row in (row for row in rows if row.way != NOTHING):
        if row.least_stored_blocks < options.tokens // BLOCK_TOKENS:
            wrong.append(f"{WAYS[row.way]}: only {row.least_stored_blocks} blocks of a prompt were stored")
        if row.ratio.median > options.goal:
            wrong.append(
                f"{WAYS[row.way]}: {row.ratio.median:.2f} times the time per token, more than {options.goal:g}"
            )
    return wrong


def report(samples: Sequence[Sample], options: argparse.Namespace) -> int:
    rows = rows_of(samples)
    wrong = findings(samples, rows, options)
    options.picture.write_text(svg(rows, samples))
    if options.json:
        result = {
            "prompt_tokens": options.tokens,
            "output_tokens": options.output,
            "rows": [asdict(row) for row in rows],
            "samples": [asdict(each) for each in samples],
            "findings": wrong,
            "environment": {name: getattr(describe_environment(), name) for name in ("cpu_model", "cpus", "kernel")},
        }
        print(json.dumps(result, indent=1))
        return 1 if wrong else 0
    print(f"prompts of {options.tokens} tokens, answers of {options.output}; medians [lowest .. highest]")
    print("| way | time per token, ms | times that without a pool | longest step, ms | blocks stored a prompt |")
    print("|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {name_of(row.way)} | {row.per_token_ms.text(2)} | {row.ratio.text(2)} "
            f"| {row.longest_step_ms.text(1)} | {row.least_stored_blocks} |"
        )
    print("\n".join(wrong) if wrong else "tokens equal, everything stored, goal met")
    print(f"picture: {options.picture}")
    return 1 if wrong else 0


def name_of(way: str) -> str:
    return "no pool" if way == NOTHING else WAYS[way]


ROW_PIXELS, BAR_PIXELS, NAME_PIXELS, PLOT_PIXELS = 28, 16, 170, 520


def svg(rows: Sequence[Row], samples: Sequence[Sample]) -> str:
    """A bar a way (median time per token, linear, from 0), and a point for each round."""
    top_ms = axis_end(max(row.per_token_ms.highest for row in rows))
    parts: list[str] = []

    def x(milliseconds: float) -> float:
        return NAME_PIXELS + PLOT_PIXELS * milliseconds / top_ms

    for at, row in enumerate(rows):
        colour, y = COLOURS[row.way], 10 + ROW_PIXELS * at
        label = f"{row.per_token_ms.median:.2f} ms" + ("" if row.way == NOTHING else f", {row.ratio.median:.2f}x")
        parts += [
            f'<text x="0" y="{y + 13}">{escape(name_of(row.way))}</text>',
            f'<rect x="{NAME_PIXELS}" y="{y}" width="{x(row.per_token_ms.median) - NAME_PIXELS:.1f}" '
            f'height="{BAR_PIXELS}" fill="{colour}" fill-opacity="0.4" />',
            *(
                f'<circle cx="{x(1e3 * each.per_token_s):.1f}" cy="{y + BAR_PIXELS / 2}" r="3" fill="{colour}" />'
                for each in samples
                if each.way == row.way
            ),
            f'<text x="{x(row.per_token_ms.highest) + 8:.1f}" y="{y + 13}">{label}</text>',
        ]
    bottom = 10 + ROW_PIXELS * len(rows)
    parts += [
        f'<text x="{x(top_ms * quarter / 4):.1f}" y="{bottom + 10}" text-anchor="middle" fill="#55636f">'
        f"{top_ms * quarter / 4:g} ms</text>"
        for quarter in range(5)
    ]
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {NAME_PIXELS + PLOT_PIXELS + 140} '
            f'{bottom + 20}" font-family="system-ui, sans-serif" font-size="13" fill="#1d2730">',
            "<title>Time per token under vLLM while blocks are stored: medians, and a point for each prompt</title>",
            '<rect width="100%" height="100%" fill="#fff" />',
            *parts,
            "</svg>",
            "",
        )
    )


if __name__ == "__main__":
    sys.exit(main())
