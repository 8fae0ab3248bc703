"""Time to the first token under vLLM: computing a prompt against restoring its KV from cold disk.

    python bench/vllm_restore.py [--tokens 8192 16384] [--rounds 5] [--lmcache-python PYTHON] [--json]

Needs the environment of `make test-engines`. One way is a vLLM (Qwen3 shape of 23 million parameters, float32, on the
CPU) with: nothing (`recompute`), Forebay's connector, Forebay's tier under vLLM's native offloading (`native`), vLLM's
own `fs` tier there, and with --lmcache-python, an interpreter made by bench/peers/install_lmcache.sh, LMCache.

A vLLM process of each way fills its pool and ends. Then one new process a way takes the same prompts in turn, each way
first in some rounds, so that all meet the same state of the machine. A prompt is new to its process, and the page cache
of all pools is dropped before each answer, so its KV comes from the disk or is computed; whether the disk or a
hypervisor caches cannot be told from here. Not counted: starting a process, and one prompt to warm it up.

For each way: seconds to the first token, and processor time (core-seconds, of all its processes) of that answer. The
ratios are those of one round each. Exit code 1 when first tokens differ, when a prompt was not restored, or when a way
of Forebay's is less than --goal times as fast as computing.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from multiprocessing import get_context
from pathlib import Path

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

from forebay.bench.environment import describe_environment
from forebay.bench.markup import axis_end
from forebay.testing.small_models import RESTORE, save_model
from vllm_engine import BLOCK_TOKENS, Answer, EngineProcess, Task, drop_page_cache

WAYS = {
    "recompute": "recompute",
    "connector": "Forebay, connector",
    "native": "Forebay, native tier",
    "fs": "vLLM fs tier",
    "lmcache": "LMCache",
}
OWN = ("connector", "native")
COLOURS = {"recompute": "#b5502b", "connector": "#1f6f8b", "native": "#3b8f5a", "fs": "#7a6a9b", "lmcache": "#8a8a8a"}
FILLED = "filled.json"
WARM, LAST = 10**6, 10**6 + 1
"""Numbers of the prompts that are not measured. (A seed and its negative give the same prompt.)"""


@dataclass(frozen=True)
class Sample:
    way: str
    prompt_tokens: int
    round: int
    first_token: int
    restored_tokens: int
    ttft_s: float
    processor_s: float


@dataclass(frozen=True)
class Spread:
    median: float
    lowest: float
    highest: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        return Spread(statistics.median(values), min(values), max(values))

    def text(self, digits: int = 3) -> str:
        return f"{self.median:.{digits}f} [{self.lowest:.{digits}f} .. {self.highest:.{digits}f}]"


@dataclass(frozen=True)
class Row:
    """A way at one length."""

    way: str
    prompt_tokens: int
    ttft_s: Spread
    processor_s: Spread
    speedup: Spread
    """Computing over this, round by round."""
    least_restored_tokens: int
    most_restored_tokens: int


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 16384], metavar="N", help="prompt lengths")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS)[1:], help="default: all that can be had")
    parser.add_argument("--lmcache-python", help="an interpreter with vLLM and LMCache")
    parser.add_argument(
        "--directory", type=Path, help="where the pools go, and stay for the next run; default: nowhere"
    )
    parser.add_argument("--fill", action="store_true", help="only fill the pools of --directory")
    parser.add_argument("--goal", type=float, default=8.0, help="least speed-up of Forebay's ways (default: 8)")
    parser.add_argument("--picture", type=Path, default=Path("vllm_restore.svg"), help="the picture (SVG)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    ways = options.ways or [way for way in WAYS if way in OWN or way == "fs" or options.lmcache_python]
    ways = ["recompute", *(way for way in ways if way != "recompute")]
    if "lmcache" in ways and not options.lmcache_python:
        parser.error("--ways lmcache needs --lmcache-python")
    if options.fill and not options.directory:
        parser.error("--fill needs --directory, where the pools stay")
    with tempfile.TemporaryDirectory(prefix="forebay-bench-") as scratch:
        bench = Bench(options.directory or Path(scratch), ways, options.tokens, options.rounds, options.lmcache_python)
        bench.fill()
        if options.fill:
            return 0
        samples = bench.measure()
    return report(samples, options.goal, options.picture, as_json=options.json)


class Bench:
    def __init__(
        self, directory: Path, ways: Sequence[str], lengths: Sequence[int], rounds: int, lmcache_python: str | None
    ) -> None:
        self._directory, self._ways, self._lengths, self._rounds = directory, ways, lengths, rounds
        self._pythons = {"lmcache": lmcache_python or sys.executable}
        self._longest = max(lengths)
        self._console = Console(stderr=True)
        self._model = directory / "model"

    def fill(self) -> None:
        """Each way's pool, where it does not hold these prompts already."""
        self._directory.mkdir(parents=True, exist_ok=True)
        if not self._model.exists():
            making = get_context("spawn").Process(target=save_model, args=(self._model, RESTORE))
            making.start()
            making.join()
        wanted = {"lengths": list(self._lengths), "rounds": self._rounds}
        for way in self._ways:
            done = self._directory / way / FILLED
            if way == "recompute" or (done.exists() and json.loads(done.read_text()) == wanted):
                continue
            with self._start(way) as engine, self._progress() as progress:
                for number, tokens in progress.track(self._prompts(), description=f"fill: {WAYS[way]}"):
                    engine.ask(prompt(number, tokens))
                engine.ask(prompt(LAST, 3), max_tokens=3)  # with more steps, the last blocks go out
            done.write_text(json.dumps(wanted))

    def measure(self) -> list[Sample]:
        engines: list[EngineProcess] = []
        samples: list[Sample] = []
        try:
            with self._progress() as progress:
                for way in progress.track(self._ways, description="start"):
                    engines.append(self._start(way))
                    engines[-1].ask(prompt(WARM, self._longest))  # warm: in no pool
                work = [(number, tokens, turn) for number, tokens in self._prompts() for turn in range(len(engines))]
                for number, tokens, turn in progress.track(work, description="measure"):
                    engine = engines[(number + turn) % len(engines)]
                    drop_page_cache(self._directory)
                    answer = engine.ask(prompt(number, tokens))
                    samples.append(sample(engine.task.kind, tokens, number, answer))
        finally:
            for engine in engines:
                engine.close()
        return samples

    def _prompts(self) -> list[tuple[int, int]]:
        """Number and length of each. A round is one prompt, at one length."""
        return [(at * 1000 + each, tokens) for at, tokens in enumerate(self._lengths) for each in range(self._rounds)]

    def _start(self, way: str) -> EngineProcess:
        pool = self._directory / way
        pool.mkdir(exist_ok=True)
        task = Task(way, str(self._model), str(pool), self._longest)
        return EngineProcess(task, self._pythons.get(way, sys.executable))

    def _progress(self) -> Progress:
        columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
        return Progress(*columns, console=self._console)


def prompt(number: int, tokens: int) -> list[int]:
    draw = random.Random(number)
    return [draw.randrange(RESTORE.vocabulary) for _ in range(tokens)]


def sample(way: str, tokens: int, number: int, answer: Answer) -> Sample:
    return Sample(way, tokens, number, answer.tokens[0], answer.restored_tokens, answer.wall_s, answer.processor_s)


# --- what comes of it


def rows_of(samples: Sequence[Sample]) -> list[Row]:
    computed = {(each.prompt_tokens, each.round): each for each in samples if each.way == "recompute"}
    rows = []
    for tokens in sorted({each.prompt_tokens for each in samples}):
        for way in dict.fromkeys(each.way for each in samples):
            own = [each for each in samples if (each.way, each.prompt_tokens) == (way, tokens)]
            rows.append(
                Row(
                    way,
                    tokens,
                    Spread.of([each.ttft_s for each in own]),
                    Spread.of([each.processor_s for each in own]),
                    Spread.of([computed[tokens, each.round].ttft_s / each.ttft_s for each in own]),
                    min(each.restored_tokens for each in own),
                    max(each.restored_tokens for each in own),
                )
            )
    return rows


def findings(samples: Sequence[Sample], rows: Sequence[Row], goal: float) -> list[str]:
    """What is wrong, a line each."""
    wrong = []
    for number in sorted({each.round for each in samples}):
        tokens = {each.way: each.first_token for each in samples if each.round == number}
        if len(set(tokens.values())) > 1:
            wrong.append(f"prompt {number}: first tokens differ: {tokens}")
    for row in rows:
        name = f"{WAYS[row.way]}, {row.prompt_tokens} tokens"
        expected = 0 if row.way == "recompute" else row.prompt_tokens - BLOCK_TOKENS
        if row.way == "recompute" and row.most_restored_tokens:
            wrong.append(f"{name}: not computed")
        if row.least_restored_tokens < expected:
            wrong.append(f"{name}: only {row.least_restored_tokens} tokens were restored")
        if row.way in OWN and row.speedup.median < goal:
            wrong.append(f"{name}: {row.speedup.median:.1f} times as fast as computing, less than {goal:g}")
    return wrong


def report(samples: Sequence[Sample], goal: float, picture: Path, *, as_json: bool) -> int:
    rows = rows_of(samples)
    wrong = findings(samples, rows, goal)
    picture.write_text(svg(rows, samples))
    if as_json:
        result = {
            "rows": [asdict(row) for row in rows],
            "samples": [asdict(each) for each in samples],
            "findings": wrong,
            "environment": {name: getattr(describe_environment(), name) for name in ("cpu_model", "cpus", "kernel")},
        }
        print(json.dumps(result, indent=1))
        return 1 if wrong else 0
    print("medians [lowest .. highest]")
    print("| tokens | way | TTFT, s | times as fast as computing | core-s | restored |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row.prompt_tokens} | {WAYS[row.way]} | {row.ttft_s.text()} | {row.speedup.text(1)} "
            f"| {row.processor_s.text()} | {row.least_restored_tokens} |"
        )
    print("\n".join(wrong) if wrong else "first tokens equal, all restored, goal met")
    print(f"picture: {picture}")
    return 1 if wrong else 0


ROW_PIXELS, BAR_PIXELS, NAME_PIXELS, PLOT_PIXELS = 26, 16, 170, 520


def svg(rows: Sequence[Row], samples: Sequence[Sample]) -> str:
    """A bar a way and length (median TTFT, linear, from 0), and a point for each round."""
    top_s = axis_end(max(each.ttft_s for each in samples))
    parts, y = [], 10

    def x(seconds: float) -> float:
        return NAME_PIXELS + PLOT_PIXELS * seconds / top_s

    for tokens in sorted({row.prompt_tokens for row in rows}):
        parts.append(f'<text x="0" y="{y + 14}" font-weight="600">{tokens:,} tokens</text>')
        y += ROW_PIXELS
        for row in (row for row in rows if row.prompt_tokens == tokens):
            colour, middle = COLOURS[row.way], y + BAR_PIXELS / 2
            label = f"{row.ttft_s.median:.3f} s" + ("" if row.way == "recompute" else f", {row.speedup.median:.1f}x")
            parts += [
                f'<text x="8" y="{y + 13}">{escape(WAYS[row.way])}</text>',
                f'<rect x="{NAME_PIXELS}" y="{y}" width="{x(row.ttft_s.median) - NAME_PIXELS:.1f}" '
                f'height="{BAR_PIXELS}" fill="{colour}" fill-opacity="0.4" />',
                *(
                    f'<circle cx="{x(each.ttft_s):.1f}" cy="{middle}" r="3" fill="{colour}" />'
                    for each in samples
                    if (each.way, each.prompt_tokens) == (row.way, tokens)
                ),
                f'<text x="{x(row.ttft_s.highest) + 8:.1f}" y="{y + 13}">{label}</text>',
            ]
            y += ROW_PIXELS
        y += 8
    ticks = [
        f'<text class="tick" x="{x(top_s * quarter / 4):.1f}" y="{y + 10}" text-anchor="middle" fill="#55636f">'
        f"{top_s * quarter / 4:g} s</text>"
        for quarter in range(5)
    ]
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {NAME_PIXELS + PLOT_PIXELS + 110} '
            f'{y + 20}" font-family="system-ui, sans-serif" font-size="13" fill="#1d2730">',
            "<title>Time to the first token under vLLM: medians, and a point for each prompt</title>",
            '<rect width="100%" height="100%" fill="#fff" />',
            *parts,
            *ticks,
            "</svg>",
            "",
        )
    )


if __name__ == "__main__":
    sys.exit(main())
