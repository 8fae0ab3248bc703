"""Load or compute with a real model: a prefix half on this disk, and half behind a slow pipe.

    python bench/load_or_compute_demo.py ROOT [--tokens 1024] [--rounds 2] [--out DIR] [--json]

The first half of each prompt's stored prefix lies in a pool in ROOT, the other half in one that is throttled so that
loading it takes 1.2 times as long as computing the whole prompt. Three ways take turns: load all, compute all, and the
engine's choice. Exits with 1 unless the choice beats both ends by 15 % in mean time to the first token, with equal
tokens. Writes load_or_compute_demo.svg. Needs torch and transformers.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from forebay.bench.demo.texts import documents
from forebay.bench.environment import describe_environment
from forebay.bench.markup import axis_end
from forebay.choice import ChoiceOptions, LoadOrCompute
from forebay.connectors.transformers import (
    Generation,
    LoadedModel,
    Packaged,
    Reuse,
    Runner,
    RunnerOptions,
    load_model,
    namespace_of,
)
from forebay.connectors.transformers.runner import device_cache
from forebay.engine import Engine, EngineOptions
from forebay.events import Chosen, Event
from forebay.executor import ThreadExecutor
from forebay.hostpool import HostPool
from forebay.keys import Tokens, block_keys, namespace_key
from forebay.policies.admit_all import AdmitAll
from forebay.policies.lru import LRU
from forebay.ports import AdmissionPolicy, Tier
from forebay.sim.ghosts import AdmitNothing
from forebay.stage import Policies
from forebay.testing.fault import FaultPlan, FaultTier, Pace
from forebay.tiers.file import FileTier, Options, RootOptions
from forebay.types import HOST, Extent, Namespace, Outcome

BLOCK_TOKENS, SLOTS, ANSWER_TOKENS = 64, 128, 4
GAIN, SLOWNESS = 0.15, 1.2
"""SLOWNESS: loading the slow half, to computing all."""
WAYS = {"load all": "#1f6f8b", "compute all": "#b5502b", "choice": "#3b8f5a"}


class Sample(msgspec.Struct, frozen=True):
    way: str
    round: int
    prompt: int
    ttft_s: float
    restored_tokens: dict[str, int]
    """By source."""
    computed_tokens: int
    tokens: tuple[int, ...]


class Bench:
    def __init__(self, root: Path, loaded: LoadedModel, namespace: Namespace) -> None:
        self._loaded, self.namespace = loaded, namespace
        self.fast, self.slow = (self._file_tier(root / name, name) for name in ("fast", "slow"))
        self.decisions: list[Chosen] = []

    def _file_tier(self, path: Path, name: str) -> FileTier:
        options = Options(roots=(RootOptions(path=str(path)),), capacity_bytes=2**34, name=name)
        return FileTier(options, self.namespace, bytes(namespace_key(self.namespace)))

    def open(self, tiers: Mapping[str, Tier], admission: AdmissionPolicy, mode: LoadOrCompute) -> Runner:
        """The engine closes its tiers when the runner is closed."""
        pool = HostPool(SLOTS, self.namespace.block_bytes)
        options = RunnerOptions(
            device_bytes=SLOTS * self.namespace.block_bytes, load_deadline_s=600.0,
            extent=Extent.BEST if mode is LoadOrCompute.ON else Extent.STORED,
        )  # fmt: skip
        device = device_cache(self._loaded, self.namespace, pool, options)
        engine = Engine(
            pool, tiers, Policies({place: LRU() for place in (HOST, *tiers)}, admission), device, ThreadExecutor(),
            self._note,
            EngineOptions(
                batch_blocks=4, read_deadline_s=600.0, load_deadline_s=600.0, load_or_compute=ChoiceOptions(mode=mode)
            ),
            block_tokens=BLOCK_TOKENS,
        )  # fmt: skip
        return Runner(self._loaded, self.namespace, engine, device, options)

    def _note(self, event: Event) -> None:
        if isinstance(event, Chosen):
            self.decisions.append(event)

    def fill(self, prompts: Sequence[Tokens]) -> float:
        """Both halves of every prompt where they belong; returns the mean time to the first token of computing all."""
        with self.open({"fast": self.fast}, AdmitAll(), LoadOrCompute.OFF) as runner:
            computed_s = [runner.generate(prompt, 1).ttft_s for prompt in prompts]
            runner.flush()
            pool = HostPool(2, self.namespace.block_bytes)
            slot = pool.take()
            assert slot is not None
            view = pool.view(slot)
            for prompt in prompts:
                keys = block_keys(self.namespace, prompt)
                for key in keys[len(keys) // 2 :]:
                    for did in (self.fast.read([key], [view]), self.slow.write([key], [view]), self.fast.delete([key])):
                        assert list(did) == [Outcome.OK], did
        self.slow.close()
        return statistics.mean(computed_s)


def measure(root: Path, tokens: int, rounds: int) -> tuple[list[Sample], dict[str, float], list[Chosen]]:
    loaded = load_model(Packaged())
    namespace = namespace_of(loaded, BLOCK_TOKENS)
    assert loaded.tokenizer is not None
    prompts = [loaded.tokenizer.encode(text.text * 8)[: tokens + 7] for text in documents(2, first=0)]
    half_bytes = tokens // BLOCK_TOKENS // 2 * namespace.block_bytes
    whole_s = Bench(root, loaded, namespace).fill(prompts)
    slow_bytes_per_s = half_bytes / (SLOWNESS * whole_s)
    loading, choosing = Bench(root, loaded, namespace), Bench(root, loaded, namespace)

    def tiers(bench: Bench) -> dict[str, Tier]:
        pace = Pace(slow_bytes_per_s, time.monotonic_ns, lambda wait_ns: time.sleep(wait_ns / 1e9))
        return {"fast": bench.fast, "slow": FaultTier(bench.slow, FaultPlan(seed=0), pace)}

    samples: list[Sample] = []
    with (
        loading.open(tiers(loading), AdmitNothing(), LoadOrCompute.OFF) as plain,
        choosing.open(tiers(choosing), AdmitNothing(), LoadOrCompute.ON) as chooser,
    ):

        def answer(runner: Runner, bench: Bench, prompt: Tokens, reuse: Reuse = Reuse.ON) -> Generation:
            runner.flush()
            runner.drop_device()
            runner.drop_host_copies()
            bench.fast.drop_page_cache()
            bench.slow.drop_page_cache()
            return runner.generate(prompt, ANSWER_TOKENS, reuse=reuse)

        for short in (prompts[0][::-1][: tokens // 2], prompts[1][::-1][: tokens // 4]):
            answer(chooser, choosing, short)  # nobody has these: the engine learns what computing takes
        answer(chooser, choosing, prompts[0])  # and by loading all of this one, what reading takes
        for number in range(1, rounds + 1):
            for at, prompt in enumerate(prompts):
                for way in WAYS:
                    if way == "choice":
                        made = answer(chooser, choosing, prompt)
                    else:
                        made = answer(plain, loading, prompt, Reuse.ON if way == "load all" else Reuse.OFF)
                    samples.append(
                        Sample(way, number, at, made.ttft_s, dict(made.hit_tokens), made.computed_tokens, made.tokens)
                    )
                    print(f"round {number}, prompt {at}, {way}: {made.ttft_s:.2f} s", file=sys.stderr)
    return samples, {"compute_s": whole_s, "slow_bytes_per_s": slow_bytes_per_s}, choosing.decisions


def report(
    samples: Sequence[Sample], parts: Mapping[str, float], decisions: Sequence[Chosen], out: Path, *, as_json: bool
) -> int:
    means = {way: statistics.mean(each.ttft_s for each in samples if each.way == way) for way in WAYS}
    gain = 1 - means["choice"] / min(means["load all"], means["compute all"])
    equal = all(
        len({each.tokens for each in samples if each.prompt == prompt}) == 1 for prompt in {s.prompt for s in samples}
    )
    picture = out / "load_or_compute_demo.svg"
    picture.write_text(svg(samples, means))
    if as_json:
        result = {
            "mean_ttft_s": means, "gain": gain, "tokens_equal": equal, "samples": samples, **parts,
            "reasons": [each.reason.value for each in decisions], "environment": describe_environment(),
        }  # fmt: skip
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    else:
        for way, mean_s in means.items():
            own = [each for each in samples if each.way == way]
            print(f"{way}: {mean_s:.2f} s on average of {len(own)}, restored {own[-1].restored_tokens}, computed "
                  f"{own[-1].computed_tokens}")  # fmt: skip
        print(f"the choice is {gain:.0%} sooner than the better end; tokens are {'equal' if equal else 'NOT equal'}")
        print(f"slow pipe: {parts['slow_bytes_per_s'] / 1e6:.1f} MB/s\npicture: {picture}")
    return 0 if gain >= GAIN and equal else 1


def svg(samples: Sequence[Sample], means: Mapping[str, float]) -> str:
    """A bar a way (the mean), and a point for each answer; seconds, from 0."""
    top_s = axis_end(max(each.ttft_s for each in samples))
    parts = []
    for number, (way, colour) in enumerate(WAYS.items()):
        y = 16 + 34 * number
        width = 480 * means[way] / top_s
        parts += [
            f'<text x="0" y="{y + 14}">{way}</text>',
            f'<rect x="110" y="{y}" width="{width:.1f}" height="20" fill="{colour}" fill-opacity="0.4" />',
            f'<text x="600" y="{y + 14}">{means[way]:.2f} s</text>',
            *(
                f'<circle cx="{110 + 480 * each.ttft_s / top_s:.1f}" cy="{y + 10}" r="3" fill="{colour}" />'
                for each in samples
                if each.way == way
            ),
        ]
    return "\n".join(
        (
            '<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 660 130" '
            'font-family="system-ui, sans-serif" font-size="13" fill="#1d2730">',
            "<title>Time to the first token: load all, compute all, the engine's choice</title>",
            '<rect width="100%" height="100%" fill="#fff" />',
            *parts,
            f'<text x="110" y="124" fill="#55636f">0</text><text x="570" y="124" fill="#55636f">{top_s:g} s</text>',
            "</svg>",
            "",
        )
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("root", type=Path, help="an existing directory on the disk")
    parser.add_argument("--tokens", type=int, default=1024, help="of the stored prefix")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path(), help="directory of the picture")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix=".forebay-choice-", dir=arguments.root) as place:
        samples, parts, decisions = measure(Path(place), arguments.tokens, arguments.rounds)
    return report(samples, parts, decisions, arguments.out, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
