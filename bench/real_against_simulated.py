"""What the simulator says of this machine, against what this machine does.

    python bench/real_against_simulated.py ROOT [--runs 3] [--tokens 2048] [--keep FILE] [--out DIR] [--json]

A run measures parts, predicts the whole from them, and then measures the whole:

    part                                            whole
    this disk's curve (`forebay bench io`)          `forebay bench storm`: 16 and 32 sessions, both orders
    the same, and                                   `forebay demo`: time to the first token of its three ways
      chunks of a prompt that the model computes
      copies of blocks, memory to memory

Nothing of what is predicted goes into the prediction: the model's profile is fitted to the chunks of the prompts that
the demo recomputes, so its own figure for recomputing is a check of the fit, not a prediction. Exits with 1 when a
prediction of a median over the runs is off by more than 15 %. `--keep` adds the runs of earlier calls. Writes
real_against_simulated.svg. Needs torch and transformers.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

import msgspec

from forebay.bench.demo.options import DemoOptions
from forebay.bench.demo.results import Record as DemoRecord
from forebay.bench.demo.results import Way
from forebay.bench.demo.run import run_demo
from forebay.bench.demo.setting import Setting, open_runner
from forebay.bench.environment import describe_environment
from forebay.bench.evidence import Validity
from forebay.bench.io.fio import FioFound
from forebay.bench.io.options import Direction, IoOptions
from forebay.bench.io.results import curve_of
from forebay.bench.io.run import run_bench
from forebay.bench.markup import axis_end
from forebay.bench.storm.options import StormOptions, session_blocks
from forebay.bench.storm.results import LABELS, percentile
from forebay.bench.storm.run import run_storms
from forebay.bench.storm.simulate import ModelStorm, model_keys, model_wave
from forebay.costs import Fit
from forebay.events import EventSink
from forebay.fairness import Order
from forebay.hostpool import HostPool, slot_bytes
from forebay.sim.media import Medium, curve_medium
from forebay.sim.profiles import EngineProfile
from forebay.sim.storm import StormSpec, run_storm
from forebay.tiers.file import Options
from forebay.types import BlockKey, Job, JobId, JobKind, Slot

LIMIT = 0.15
BLOCK_TOKENS, CHUNK_TOKENS, SESSIONS = 64, 512, 2
"""Of the demo: the first two are its defaults."""
READS_IN_FLIGHT = Options(roots=(), capacity_bytes=1).reads_in_flight
"""Of the file tier, a root: the curve is measured at this depth."""
STORM_SESSIONS = (16, 32)


class Figure(msgspec.Struct, frozen=True):
    """A median time to the first token in one run."""

    name: str
    measured_s: float
    predicted_s: float
    is_fitted: bool = False
    """The parts were measured in the very same work."""


class Run(msgspec.Struct, frozen=True):
    figures: list[Figure]
    parts: dict[str, float]
    """What the predictions were made from."""
    doubts: list[str]
    """Why a measurement may not be what it says it is."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One call of the model."""

    tokens: int
    context_tokens: int
    elapsed_ns: int


# ---- parts


def measure_curve(root: Path, folder: Path, block_bytes: Sequence[int]) -> Path:
    """The disk beneath the tier, one block at a time and at the depth of the tier, for blocks of these sizes."""
    options = IoOptions(
        roots=(root,), block_bytes=tuple(block_bytes), depths=(1, READS_IN_FLIGHT), rounds=3,
        directions=(Direction.READS,), out=folder,
    )  # fmt: skip
    path = folder / "curve.json"
    path.write_bytes(msgspec.json.encode(curve_of(run_bench(options, fio=FioFound(None, "left out")))))
    return path


def medium_of(curve: Path, block_bytes: int) -> Medium:
    return replace(curve_medium(curve, block_bytes), queue_depth=READS_IN_FLIGHT)


def copy_bytes_per_s(setting: Setting) -> float:
    """Of a restore on a CPU: each block from its slot to device memory, and from there to the session."""
    from forebay.connectors.transformers.runner import device_cache
    from forebay.connectors.transformers.session import SessionKV

    blocks = len(setting.keys[0])
    pool = HostPool(blocks, setting.namespace.block_bytes)
    device = device_cache(setting.loaded, setting.namespace, pool, setting.runner_options)
    session = SessionKV(device.shape, blocks, device.device)
    slots = [slot for slot in (pool.take() for _ in range(blocks)) if slot is not None]
    keys = [BlockKey(number.to_bytes(32)) for number in range(blocks)]
    window = max(1, setting.runner_options.window_bytes // setting.namespace.block_bytes)
    taken_s = []
    for turn in range(6):
        began_s = time.perf_counter()
        for at in range(0, blocks, window):
            part = slice(at, min(at + window, blocks))
            chosen = device.take(part.stop - part.start)
            moved_bytes = len(chosen) * pool.block_bytes
            job = Job(
                JobId(turn), JobKind.COPY_IN, "host", tuple(keys[part]), tuple(map(Slot, slots[part])), moved_bytes
            )
            device.submit(job, chosen)
            assert all(result.outcomes for result in device.poll())
            session.gather(at, device.blocks, chosen)
            device.give(chosen)
        taken_s.append(time.perf_counter() - began_s)
    device.close()
    return (
        blocks * pool.block_bytes / statistics.median(taken_s[1:])
    )  # the first finds nothing in the processor's tables


def profile_of(chunks: Sequence[Chunk], kv_bytes_per_token: int) -> EngineProfile:
    """Seconds a chunk, a token, and a pair of tokens, that fit best."""
    fit = Fit((1e-6, 1e-9, 1e-8), memory=1e6)
    for chunk in chunks:
        pairs = chunk.tokens * (chunk.context_tokens + chunk.tokens / 2)
        fit.see((1.0, float(chunk.tokens), pairs), chunk.elapsed_ns / 1e9)
    chunk_s, token_s, pair_s = map(float, fit.coefficients())
    return EngineProfile(
        name="measured", ranks=1, kv_bytes_per_token=kv_bytes_per_token, token_s=token_s,
        half_speed_tokens=token_s / pair_s if pair_s else float("inf"), step_s=chunk_s, kv_bytes_per_s=1e12,
        chunk_tokens=CHUNK_TOKENS, chunk_s=chunk_s, source=f"{len(chunks)} chunks of recomputed prompts",
    )  # fmt: skip


class Watch:
    """Notes every call of the demo's model, and the sizes of what it is played on."""

    def __init__(self) -> None:
        self.calls: list[Chunk] = []
        self.copy_bytes_per_s = 0.0
        self.host_bytes = self.block_bytes = 0

    def open_runner(self, setting: Setting, emit: EventSink) -> Any:
        if not self.block_bytes:
            self.block_bytes, self.host_bytes = setting.namespace.block_bytes, setting.store.host_bytes
            self.copy_bytes_per_s = copy_bytes_per_s(setting)
            began: list[int] = []
            setting.loaded.model.register_forward_pre_hook(lambda *_: began.append(time.monotonic_ns()))
            setting.loaded.model.register_forward_hook(self._note(began), with_kwargs=True)
        return open_runner(setting, emit)

    def _note(self, began: list[int]) -> Any:
        def note(module: object, positional: Any, named: Any, output: Any) -> None:
            elapsed_ns = time.monotonic_ns() - began.pop()
            tokens = int(positional[0].shape[1])
            self.calls.append(Chunk(tokens, int(output.past_key_values.get_seq_length()) - tokens, elapsed_ns))

        return note

    def recomputed(self, prompt_tokens: Sequence[int]) -> list[Chunk]:
        """Chunks of the prompts of these lengths that were computed from their first token on."""
        found: list[Chunk] = []
        chunks: list[Chunk] = []
        for call in self.calls:
            if call.context_tokens != sum(chunk.tokens for chunk in chunks):
                chunks = []  # a restored prompt, or a token of an answer
            if call.context_tokens == sum(chunk.tokens for chunk in chunks):
                chunks = [*chunks, call]
            if sum(chunk.tokens for chunk in chunks) in prompt_tokens:
                found += chunks
                chunks = []
        return found


# ---- wholes


def measure_storms(root: Path, folder: Path) -> Iterator[tuple[int, Order, float]]:
    """Sessions, order, and median time to a restored session."""
    record = run_storms(StormOptions(roots=(root,), sessions=STORM_SESSIONS, rounds=1, out=folder))
    for storm in record.storms:
        for wave in storm.waves:
            yield storm.sessions, wave.order, percentile(wave.ttft_s, 0.5)


def predict_storm(medium: Medium, sessions: int, order: Order) -> float:
    options = StormOptions(roots=())
    device = medium.model(options.block_bytes, options.block_bytes)
    model = ModelStorm(
        block_bytes=options.block_bytes, bytes_per_s=device.read_bytes_per_s, latency_ns=device.latency_ns,
        queue_depth=device.queue_depth, host_blocks=options.host_bytes // slot_bytes(options.block_bytes),
    )  # fmt: skip
    keys = model_keys(sessions, session_blocks(options, 2)[0])
    return percentile(model_wave(model, order, keys).ttft_s, 0.5)


def measure_demo(root: Path, folder: Path, tokens: int, watch: Watch) -> DemoRecord:
    with tempfile.TemporaryDirectory(prefix=".forebay-real-", dir=root) as place:
        options = DemoOptions(
            sessions=SESSIONS, tokens=tokens, answer_tokens=2, block_tokens=BLOCK_TOKENS, pool=Path(place) / "pool",
            out=folder,
        )  # fmt: skip
        return run_demo(options, opener=watch.open_runner)


def predict_demo(
    profile: EngineProfile, medium: Medium, watch: Watch, prompt_tokens: int, tokens: int
) -> dict[Way, float]:
    """One session at a time: computed, read from the disk, and read from the DRAM pool that this has filled."""
    stored = tokens // BLOCK_TOKENS * BLOCK_TOKENS
    spec = StormSpec(
        profile=profile, media=(medium,), waves=(1, 1), stored_tokens=stored, new_tokens=prompt_tokens - stored,
        output_tokens=1, block_tokens=BLOCK_TOKENS, host_bytes=watch.host_bytes,
        copy_bytes_per_s=watch.copy_bytes_per_s,
    )  # fmt: skip
    cold, warm = run_storm(spec).waves
    nothing = msgspec.structs.replace(spec, media=(), waves=(1,), stored_tokens=0, new_tokens=prompt_tokens)
    return {Way.RECOMPUTE: run_storm(nothing).last.ttft_mean_s, Way.DISK: cold.ttft_mean_s, Way.DRAM: warm.ttft_mean_s}


def one_run(root: Path, folder: Path, tokens: int) -> Run:
    block_bytes = StormOptions(roots=()).block_bytes
    watch = Watch()
    demo = measure_demo(root, folder, tokens, watch)
    curve = measure_curve(root, folder, (block_bytes, watch.block_bytes))
    storms = list(measure_storms(root, folder))
    prompts = {found.session: found.prompt_tokens for found in demo.measurements}
    profile = profile_of(watch.recomputed(tuple(prompts.values())), demo.model.token_bytes)
    medium, demo_medium = medium_of(curve, block_bytes), medium_of(curve, watch.block_bytes)
    figures = [
        Figure(f"storm of {sessions}, {LABELS[order]}", measured_s, predict_storm(medium, sessions, order))
        for sessions, order, measured_s in sorted(storms, key=lambda storm: (storm[0], storm[1].value))
    ]
    predicted = [predict_demo(profile, demo_medium, watch, each, tokens) for each in prompts.values()]
    for way in Way:
        measured_s = statistics.median(found.ttft_s for found in demo.of(way))
        predicted_s = statistics.median(each[way] for each in predicted)
        figures.append(Figure(f"demo, {way.phrase}", measured_s, predicted_s, is_fitted=way is Way.RECOMPUTE))
    parts = {
        "disk_bytes_per_s": medium.read_bytes_per_s,
        "disk_stream_bytes_per_s": medium.stream_bytes_per_s,
        "copy_bytes_per_s": watch.copy_bytes_per_s,
        "chunk_s": profile.chunk_s,
        "token_s": profile.token_s,
        "half_speed_tokens": profile.half_speed_tokens,
    }
    doubts = [*demo.verdict.reasons] if demo.verdict.validity is Validity.INVALID else []
    return Run(figures, parts, doubts)


# ---- what came of it


class Row(msgspec.Struct, frozen=True):
    """Medians over the runs."""

    name: str
    measured_s: float
    lowest_s: float
    highest_s: float
    predicted_s: float
    errors: list[float]
    """Of each run, against its own measurement."""
    error: float
    """Their median."""
    is_fitted: bool


def rows_of(runs: Sequence[Run]) -> list[Row]:
    rows = []
    for at, figure in enumerate(runs[0].figures):
        own = [run.figures[at] for run in runs]
        measured = [each.measured_s for each in own]
        errors = [each.predicted_s / each.measured_s - 1 for each in own]
        rows.append(
            Row(
                figure.name, statistics.median(measured), min(measured), max(measured),
                statistics.median(each.predicted_s for each in own), errors, statistics.median(errors),
                figure.is_fitted,
            )
        )  # fmt: skip
    return rows


def report(runs: Sequence[Run], out: Path, *, as_json: bool) -> int:
    rows = rows_of(runs)
    missed = [f"{row.name}: {row.error:+.1%}" for row in rows if abs(row.error) > LIMIT]
    doubts = [f"run {number}: {doubt}" for number, run in enumerate(runs, 1) for doubt in run.doubts]
    picture = out / "real_against_simulated.svg"
    picture.write_text(svg(rows))
    if as_json:
        result = {
            "rows": rows, "runs": runs, "missed": missed, "doubts": doubts, "environment": describe_environment()
        }  # fmt: skip
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
        return 1 if missed or doubts else 0
    print(f"medians of {len(runs)} runs [lowest .. highest]\n")
    print("| TTFT p50 | measured, s | predicted, s | error, median | of each run |\n|---|---|---|---|---|")
    for row in rows:
        name = f"{row.name} (fitted)" if row.is_fitted else row.name
        each = ", ".join(f"{error:+.0%}" for error in row.errors)
        print(
            f"| {name} | {row.measured_s:.3f} [{row.lowest_s:.3f} .. {row.highest_s:.3f}] | {row.predicted_s:.3f} "
            f"| {row.error:+.1%} | {each} |"
        )
    print("\nparts: " + "; ".join(
        f"{name} {', '.join(f'{run.parts[name]:.4g}' for run in runs)}" for name in runs[0].parts
    ))  # fmt: skip
    for line in (*missed, *doubts):
        print(f"missed: {line}")
    print(f"picture: {picture}")
    return 1 if missed or doubts else 0


ROW_PIXELS, NAME_PIXELS, PLOT_PIXELS = 34, 190, 520
END_PIXELS = NAME_PIXELS + PLOT_PIXELS


def svg(rows: Sequence[Row]) -> str:
    """A bar a figure, from the lowest to the highest measurement; a line where it was predicted. Seconds, from 0."""
    parts = [
        f'<text x="{NAME_PIXELS}" y="16" fill="#1f6f8b">&#9632; measured (all runs, and the median)</text>'
        f'<text x="{NAME_PIXELS + 290}" y="16" fill="#b5502b">| simulated</text>'
    ]
    for number, row in enumerate(rows):
        top_s = axis_end(1.3 * max(row.highest_s, row.predicted_s))  # each on a scale of its own: they span decades
        y = 30 + ROW_PIXELS * number

        def x(seconds: float, top_s: float = top_s) -> float:
            return round(NAME_PIXELS + PLOT_PIXELS * seconds / top_s, 1)

        left, right, predicted = x(row.lowest_s), x(row.highest_s), x(row.predicted_s)
        parts += [
            f'<text x="0" y="{y + 14}">{escape(row.name)}</text>',
            f'<line x1="{NAME_PIXELS}" x2="{END_PIXELS}" y1="{y + 10}" y2="{y + 10}" stroke="#e3e8ec" />',
            f'<rect x="{left}" y="{y + 2}" width="{max(2.0, right - left):.1f}" height="16" fill="#1f6f8b" '
            'fill-opacity="0.35" />',
            f'<circle cx="{x(row.measured_s)}" cy="{y + 10}" r="4" fill="#1f6f8b" />',
            f'<line x1="{predicted}" x2="{predicted}" y1="{y - 2}" y2="{y + 22}" stroke="#b5502b" stroke-width="3" />',
            f'<text x="{END_PIXELS + 8}" y="{y + 14}" fill="#55636f">{top_s:g} s, {row.error:+.1%}</text>',
        ]
    height = 40 + ROW_PIXELS * len(rows)
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {END_PIXELS + 130} {height}" '
            'font-family="system-ui, sans-serif" font-size="13" fill="#1d2730">',
            "<title>Time to the first token, measured and simulated</title>",
            '<rect width="100%" height="100%" fill="#fff" />',
            *parts,
            "</svg>",
            "",
        )
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("root", type=Path, help="an existing directory on the disk to measure")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=2048, help="of each document of the demo")
    parser.add_argument("--keep", type=Path, help="a file of runs: these are added to it, and all of them count")
    parser.add_argument("--out", type=Path, default=Path(), help="directory of the picture")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    runs: list[Run] = []
    if arguments.keep is not None and arguments.keep.exists():
        runs = msgspec.json.decode(arguments.keep.read_bytes(), type=list[Run])
    for number in range(1, arguments.runs + 1):
        print(f"run {number} of {arguments.runs}", file=sys.stderr)
        with tempfile.TemporaryDirectory(prefix=".forebay-real-", dir=arguments.root) as folder:
            runs.append(one_run(arguments.root, Path(folder), arguments.tokens))
        if arguments.keep is not None:
            arguments.keep.write_bytes(msgspec.json.encode(runs))
    if not runs:
        parser.error("--runs must be 1 or more, unless --keep names a file that has some")
    return report(runs, arguments.out, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
