"""The built-in engine: a transformers model over the real store, one session at a time.

Its instances are engines of one process that share its processors; each answers its questions one after another, so the
last of a wave waits for all before it. That wait is part of its TTFT, as in any engine's queue.
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from forebay.assemble import StoreConfig
from forebay.bench.restore.options import GroupOptions
from forebay.bench.restore.pools import Pools, throttled_fact
from forebay.bench.restore.results import Role
from forebay.bench.restore.sessions import Populated, Prompt, Question
from forebay.bench.restore.target import Answer, Description, Wave
from forebay.bench.units import bytes_text
from forebay.engine import EngineOptions
from forebay.errors import ConfigError
from forebay.hostpool import slot_bytes
from forebay.keys import block_keys
from forebay.types import BlockKey

if TYPE_CHECKING:
    from forebay.connectors.transformers import Generation, LoadedModel, Runner

_CHUNK_TOKENS = 512
_LEAST_SLOTS = 16


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    model: str = ""
    """A directory made by `save_pretrained`, or a GGUF file. Empty: the packaged model, or a random one."""
    random: dict[str, Any] = {}
    """Instead of a model: shape and seed of one with random weights, by the names of the transformers connector's
    `RandomWeights`, such as `{ layers = 6, hidden = 512 }`."""
    threads: int | None = None
    """Of the model, over all instances. None: what torch takes."""
    block_tokens: int = 64
    host_bytes: int = 2**28
    """Host pool of each instance. Past it nothing is in flight."""
    device_bytes: int = 2**26
    """Of each instance, for blocks that are hot. Longer prompts pass through in windows."""
    file: dict[str, Any] = {}
    """More options of the file tier, such as `reads_in_flight`."""


def build(options: Options, group: GroupOptions, seed: int) -> BuiltinTarget:
    """Loads the model. Raises ConfigError for options that make no sense, and where torch or the model is not there."""
    if group.role is Role.RECOMPUTE and group.roots:
        raise ConfigError(f"group {group.name}: what is recomputed is not stored: leave out its roots")
    if group.role is not Role.RECOMPUTE and not group.roots:
        raise ConfigError(f"group {group.name}: give one or more roots to store in")
    if options.model and options.random:
        raise ConfigError("built-in target: model and random exclude each other: give one")
    for name in ("block_tokens", "host_bytes", "device_bytes"):
        if getattr(options, name) < 1:
            raise ConfigError(f"built-in target: {name} must be 1 or more, not {getattr(options, name)}")
    if options.threads is not None and not 1 <= options.threads <= 4096:
        raise ConfigError(f"built-in target: threads must be from 1 to 4096, not {options.threads}")
    return BuiltinTarget(options, group, _load(options))


class BuiltinTarget:
    """A `Target`. Each instance has a thread during waves, and a runner of its own."""

    def __init__(self, options: Options, group: GroupOptions, loaded: LoadedModel) -> None:
        """Makes a pool in each root, which `close` removes. Raises ConfigError."""
        self._options, self._group, self._loaded = options, group, loaded
        self._namespace = _connector().namespace_of(loaded, options.block_tokens)
        if options.host_bytes < _LEAST_SLOTS * slot_bytes(self._namespace.block_bytes):
            raise ConfigError(
                f"built-in target: host_bytes {bytes_text(options.host_bytes)} holds less than {_LEAST_SLOTS} blocks "
                f"of {bytes_text(self._namespace.block_bytes)}: give more, or smaller blocks"
            )
        self._runners: dict[int, Runner] = {}
        self._is_ending = threading.Event()
        self._pools = Pools(group)

    def describe(self) -> Description:
        facts = self._loaded.facts
        told = {
            "target": "the built-in transformers engine, one session at a time an instance",
            "model": f"{self._loaded.name}, {facts.architecture}, {facts.parameters:,} parameters, {facts.dtype}",
            "block": f"{self._options.block_tokens} tokens, {self._namespace.block_bytes:,} bytes",
            "compute threads": str(_connector().compute_threads()),
        }
        if self._group.roots:
            told["host pool"] = f"{bytes_text(self._options.host_bytes)} an instance"
        return Description(
            facts=told | throttled_fact(self._group), roots=tuple(self._pools.roots), pools=self._pools.directories
        )

    def populate(self, prompts: Sequence[Populated]) -> None:
        self._check_context([each.prompt for each in prompts])
        if self._group.role is Role.RECOMPUTE:
            return
        blocks = len({(each.instance, key) for each in prompts for key in self._keys_of(each.prompt)})
        host_bytes = self._group.instances * (self._options.host_bytes + self._options.device_bytes)
        self._pools.check_room(blocks, self._namespace.block_bytes, host_bytes)
        for number, runner in self._open().items():
            for each in prompts:
                if each.instance == number:
                    runner.generate(self._tokens_of(each.prompt), 1)
            runner.flush()

    def forget(self) -> None:
        """As after a restart: new runners with nothing in device memory or DRAM, which find again what is on disk."""
        self.rest()
        self._open()

    def rest(self) -> None:
        for runner in self._runners.values():
            runner.close()
        self._runners.clear()
        gc.collect()  # their memory is to be free before others ask for as much

    def wave(self, questions: Sequence[Question]) -> Wave:
        self._check_context([each.prompt for each in questions])
        runners = self._open()
        asked = [[each for each in questions if each.instance == number] for number in runners]
        began_ns = time.monotonic_ns()
        self._is_ending.clear()
        with ThreadPoolExecutor(len(runners)) as threads:
            try:
                running = [
                    threads.submit(self._answer_all, runner, mine, began_ns)
                    for runner, mine in zip(runners.values(), asked, strict=True)
                ]
                answers = {answer.session: answer for future in running for answer in future.result()}
            except BaseException:  # a signal, or one instance: the others are not waited for
                self._is_ending.set()
                raise
        is_shared = self._group.role is Role.SHARED
        wanted = {
            (0 if is_shared else each.instance, key)
            for each in questions
            for key in self._keys_of(each.prompt)[: self._stored_blocks(each)]
        }
        return Wave(
            answers=tuple(answers[each.session] for each in questions),
            wanted_bytes=len(wanted) * self._namespace.block_bytes,
        )

    def close(self) -> None:
        try:
            self.rest()
        finally:
            self._pools.close()

    # ---- its parts

    def _open(self) -> dict[int, Runner]:
        connector = _connector()
        block_tokens = self._options.block_tokens
        settings = connector.RunnerOptions(
            device_bytes=max(self._options.device_bytes, 2 * self._namespace.block_bytes),
            chunk_tokens=block_tokens * max(1, _CHUNK_TOKENS // block_tokens),
            load_deadline_s=3600.0,
        )
        for number in range(self._group.instances):
            if number not in self._runners:
                self._runners[number] = connector.Runner.open(
                    self._loaded, self._namespace, self._store(number), settings
                )
        return self._runners

    def _store(self, number: int) -> StoreConfig:
        engine = EngineOptions(load_deadline_s=3600.0, read_deadline_s=60.0, hedge_share=0.0)
        tiers = self._pools.tiers(number, self._options.file)
        return StoreConfig(host_bytes=self._options.host_bytes, tiers=tiers, engine=engine)

    def _answer_all(self, runner: Runner, questions: Sequence[Question], began_ns: int) -> list[Answer]:
        """In the thread of one instance. All were sent when the wave began."""
        answers: list[Answer] = []
        for question in questions:
            if self._is_ending.is_set():
                break
            answers.append(self._answer(runner, question, began_ns))
        return answers

    def _answer(self, runner: Runner, question: Question, began_ns: int) -> Answer:
        reuse = _connector().Reuse
        is_recomputed = self._group.role is Role.RECOMPUTE
        called_ns = time.monotonic_ns()
        said: Generation | None = None
        error = ""
        try:
            said = runner.generate(
                self._tokens_of(question.prompt), question.output_tokens, reuse=reuse.OFF if is_recomputed else reuse.ON
            )
        except (RuntimeError, MemoryError) as raised:  # of the model's library: out of memory and its kin
            error = f"{type(raised).__name__}: {' '.join(str(raised).split())[:200]}"
        ended_ns = time.monotonic_ns()
        sources = {place: tokens for place, tokens in said.hit_tokens.items() if tokens > 0} if said else {}
        return Answer(
            session=question.session,
            sent_ns=began_ns,
            first_token_ns=called_ns + round(said.ttft_s * 1e9) if said else None,
            ended_ns=ended_ns,
            prompt_tokens=question.prompt.tokens,
            output_tokens=len(said.tokens) if said else 0,
            stored_tokens=self._stored_blocks(question) * self._options.block_tokens,
            hit_tokens=sum(sources.values()) if said else None,
            hit_source="+".join(sorted(sources)) or None,
            output_digest=_digest(said.tokens) if said else "",
            error=error,
        )

    def _stored_blocks(self, question: Question) -> int:
        return 0 if self._group.role is Role.RECOMPUTE else question.stored_tokens // self._options.block_tokens

    def _tokens_of(self, prompt: Prompt) -> Any:
        """uint32 [tokens]."""
        return prompt.token_ids(range(self._loaded.facts.vocabulary))

    def _keys_of(self, prompt: Prompt) -> tuple[BlockKey, ...]:
        return block_keys(self._namespace, self._tokens_of(prompt))

    def _check_context(self, prompts: Sequence[Prompt]) -> None:
        limit_tokens = self._loaded.facts.max_tokens
        longest_tokens = max((prompt.tokens for prompt in prompts), default=0)
        if limit_tokens and longest_tokens >= limit_tokens:
            raise ConfigError(
                f"group {self._group.name}: a prompt has {longest_tokens:,} tokens, and {self._loaded.name} takes "
                f"{limit_tokens:,} with its answer: ask for shorter ones"
            )


def _load(options: Options) -> LoadedModel:
    connector = _connector()
    if options.threads is not None:
        connector.set_compute_threads(options.threads)
    source = connector.Directory(Path(options.model)) if options.model else connector.Packaged()
    if options.random:
        known = {field.name for field in dataclasses.fields(connector.RandomWeights)}
        if unknown := sorted(options.random.keys() - known):
            raise ConfigError(f"built-in target: random has no {unknown[0]!a}: give some of {', '.join(sorted(known))}")
        try:
            source = msgspec.convert(options.random, connector.RandomWeights)
        except msgspec.ValidationError as error:
            raise ConfigError(f"built-in target: random: {error}") from None
    loaded: LoadedModel = connector.load_model(source)
    return loaded


def _connector() -> Any:
    """The transformers connector, imported late: it brings torch, and most commands do without."""
    try:
        from forebay.connectors import transformers
    except ImportError as error:
        raise ConfigError(
            f"the built-in engine needs torch and transformers ({error}): pip install 'forebay[demo]'"
        ) from None
    return transformers


def _digest(tokens: Sequence[int]) -> str:
    return hashlib.sha256(b"".join(token.to_bytes(8) for token in tokens)).hexdigest()
