"""A trace of real requests through `vllm serve` on a pool of Forebay's, by vLLM's own load generator.

    python bench/vllm_trace.py TRACE [--requests 20] [--json]

Needs the environment of `make test-engines`. TRACE is a file of JSON lines in Mooncake's form (`timestamp` in ms,
`input_length`, `output_length`, `hash_ids` of 512 tokens each). `vllm bench serve --dataset-name timed_trace` sends
the first requests twice, a server each on the same pool: what the second finds was stored by the first. Requests of
more than --longest tokens are left out, and counted. The model is tiny (float32, on the CPU), so times say little; what
counts is that no request fails. Exit code 1 when one does, or when the second server finds nothing; 2 without a trace
that has so many requests.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console

from forebay.bench.markup import axis_end
from forebay.testing.small_models import TELLING, save_model, save_tokenizer
from forebay.testing.vllm_server import bench_serve, serving

SHAPE = dataclasses.replace(TELLING, longest_tokens=131072)
BLOCK_TOKENS, TRACE_BLOCK_TOKENS = 128, 512
ENVIRONMENT = os.environ | {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "PYTHONHASHSEED": "0",  # the generator makes tokens of hash_ids by Python's own hash
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument(
        "--longest", type=int, default=32768, help="longest request in tokens; longer ones are left out"
    )
    parser.add_argument("--picture", type=Path, default=Path("vllm_trace.svg"), help="the picture (SVG)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="forebay-bench-") as scratch:
        head = Path(scratch, "head.jsonl")
        try:
            left_out = write_head(options.trace, head, options.requests, options.longest)
        except BadTrace as error:
            parser.exit(2, f"{parser.prog}: {error}\n")
        model = Path(scratch, "model")
        model.mkdir()
        save_model(model, SHAPE)
        save_tokenizer(model, SHAPE)
        runs = []
        for name in ("empty pool", "filled pool"):
            with console.status(f"{name}: {options.requests} requests"):
                runs.append({"run": name} | replay(model, Path(scratch), head, options))
    options.picture.write_text(svg(runs))
    failed = sum(run["failed"] for run in runs) or any(run["completed"] != options.requests for run in runs)
    good = not failed and runs[1]["hit_blocks"] > runs[0]["hit_blocks"]
    if options.json:
        print(
            json.dumps({"trace": options.trace.name, "left_out": left_out, "runs": runs, "good": bool(good)}, indent=1)
        )
    else:
        print(words(runs, left_out, options.longest))
        print(f"picture: {options.picture}")
    return 0 if good else 1


class BadTrace(Exception):
    """There is nothing to send. The message is one line."""


def write_head(trace: Path, head: Path, requests: int, longest: int) -> int:
    """The first `requests` that fit, and how many before them did not. Raises BadTrace."""
    try:
        lines = trace.read_text().splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        raise BadTrace(f"cannot read the trace {trace}: {getattr(error, 'strerror', error)}") from None
    taken: list[str] = []
    left_out = 0
    for number, line in enumerate(lines, 1):
        if len(taken) == requests:
            break
        try:
            request = json.loads(line)
            tokens = request["input_length"] + request["output_length"]
        except (ValueError, KeyError, TypeError):
            raise BadTrace(f"{trace}: line {number} is no request in Mooncake's form") from None
        if tokens <= longest:
            taken.append(line)
        else:
            left_out += 1
    if len(taken) < requests:
        raise BadTrace(f"{trace} has {len(taken)} requests of up to {longest} tokens, not {requests}")
    head.write_text("".join(taken))
    return left_out


def replay(model: Path, scratch: Path, head: Path, options: argparse.Namespace) -> dict[str, Any]:
    args = [sys.executable, "-m", "forebay", "vllm-args", str(scratch / "pool"), "--capacity", "8GiB", "--cpu-gib", "1"]
    transfer = subprocess.run([*args, "--json"], capture_output=True, text=True, check=True).stdout.strip()
    settings = {
        "dtype": "float32", "block-size": BLOCK_TOKENS, "max-model-len": options.longest,
        "max-num-batched-tokens": 4096,
        "prefix-caching-hash-algo": "sha256_cbor", "kv-transfer-config": transfer,
        "num-gpu-blocks-override": 2 * options.longest // BLOCK_TOKENS,
    }  # fmt: skip
    arguments = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
    traced = [
        "--dataset-name", "timed_trace", "--dataset-path", str(head), "--num-prompts", str(options.requests),
        "--timed-trace-chunk-hash-size", str(TRACE_BLOCK_TOKENS), "--timed-trace-sec-multiplier", "0.001",
    ]  # fmt: skip
    out = scratch / "report.json"
    out.unlink(missing_ok=True)
    with serving(model, [*arguments, "--enforce-eager"], ENVIRONMENT) as server:
        report = bench_serve(server, traced, out, ENVIRONMENT)
        metrics = server.metrics()
    counted = {name: metrics.total(f"vllm:forebay_{name}") for name in ("hit_blocks", "missed_blocks", "failed_blocks")}
    told = (
        "completed",
        "failed",
        "duration",
        "total_input_tokens",
        "total_output_tokens",
        "mean_ttft_ms",
        "p99_ttft_ms",
    )
    return {name: report[name] for name in told} | counted


def words(runs: list[dict[str, Any]], left_out: int, longest: int) -> str:
    lines = [
        f"| | completed | failed | left out (over {longest} tokens) | input tokens | mean TTFT, s "
        "| blocks found | not found | failed blocks |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        lines.append(
            f"| {run['run']} | {run['completed']} | {run['failed']} | {left_out} | {run['total_input_tokens']} "
            f"| {run['mean_ttft_ms'] / 1e3:.2f} | {run['hit_blocks']:.0f} | {run['missed_blocks']:.0f} "
            f"| {run['failed_blocks']:.0f} |"
        )
    return "\n".join(lines)


def svg(runs: list[dict[str, Any]]) -> str:
    """Two bars: mean TTFT, linear, from 0."""
    top_s = axis_end(max(run["mean_ttft_ms"] for run in runs) / 1e3)
    bars = []
    for at, run in enumerate(runs):
        mean_s, y = run["mean_ttft_ms"] / 1e3, 10 + 30 * at
        bars.append(
            f'<text x="0" y="{y + 14}">{escape(run["run"])}</text><rect x="110" y="{y}" height="18" fill="#1f6f8b" '
            f'width="{400 * mean_s / top_s:.1f}" /><text x="{118 + 400 * mean_s / top_s:.1f}" y="{y + 14}">'
            f"{mean_s:.2f} s mean TTFT, {run['failed']} failed</text>"
        )
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 760 80" font-family="system-ui, sans-serif" '
        'font-size="13"><title>Mean time to the first token of a trace</title>\n' + "\n".join(bars) + "\n</svg>\n"
    )


if __name__ == "__main__":
    sys.exit(main())
