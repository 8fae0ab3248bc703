"""An emulated accelerator: timed compute from a profile, and real KV bytes through the real engine, file tier and disk.

What is real: blocks of the model's size, unique and incompressible, written to and read from disk by the engine that
serves vLLM and transformers, with its host pool, checksums and order of transfers. What is timed: prefills, decode
steps and their queue on a serial accelerator, by the profile. An output is a digest of the prompt and of every byte of
KV that it stands on, so that one wrong byte is another output.

Two scales make a large machine fit a small disk: `kv_scale`, of the bytes that a token has in the model, and
`time_scale`, of the times in the profile.
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from forebay.assemble import StoreConfig, open_engine
from forebay.bench.restore.options import GroupOptions
from forebay.bench.restore.pools import Pools, throttled_fact
from forebay.bench.restore.results import Role
from forebay.bench.restore.sessions import Populated, Prompt, Question
from forebay.bench.restore.target import Answer, Description, Wave
from forebay.bench.storm.device import Stamp, fold
from forebay.bench.storm.wave import store
from forebay.bench.units import bytes_text
from forebay.choice import ChoiceOptions, LoadOrCompute
from forebay.engine import Engine, EngineOptions
from forebay.errors import ConfigError
from forebay.events import Event, Planned
from forebay.hostpool import HostPool, slot_bytes
from forebay.keys import block_keys
from forebay.sim.host import FAR_NS, Session, SimHost
from forebay.sim.profiles import EngineProfile, profile_named
from forebay.types import BlockKey, DeviceBlock, Job, JobKind, JobResult, Namespace, Outcome

_VOCABULARY = range(151_936)
"""Of the Qwen3 tokenizer."""
_PATIENCE_NS = 50_000_000


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    profile: str = "qwen3-coder-480b-fp8/8xmi308x"
    """What computing takes, and how many bytes of KV a token has: a name of `forebay.sim.profiles`."""
    block_tokens: int = 32
    """32 tokens of the default profile are 8,126,464 bytes: a block of 256 tokens on one of its 8 ranks."""
    kv_scale: float = 1.0
    """Bytes of KV a token here, to those in the profile; a block is rounded to whole words of 8 bytes."""
    time_scale: float = 1.0
    """Times here, to those in the profile."""
    host_bytes: int = 2**30
    """Host pool of each instance. Past it nothing is in flight."""
    load_or_compute: LoadOrCompute = LoadOrCompute.OFF
    """Off: all that is stored is loaded, so that media are compared and not decisions."""
    file: dict[str, Any] = {}
    """More options of the file tier, such as `reads_in_flight`."""
    silence_limit_s: float = 120.0
    """A request of which nothing is heard for so long has failed."""


def build(options: Options, group: GroupOptions, seed: int) -> EmulatedTarget:
    """Raises ConfigError for options that make no sense. Makes a pool in each root, which `close` removes."""
    profile = profile_named(options.profile)
    for name in ("kv_scale", "time_scale", "silence_limit_s"):
        if not 0 < getattr(options, name) < float("inf"):
            raise ConfigError(f"emulated target: {name} must be above 0, not {getattr(options, name)}")
    if options.block_tokens < 1:
        raise ConfigError(f"emulated target: block_tokens must be 1 or more, not {options.block_tokens}")
    block_bytes = round(profile.kv_bytes_per_token * options.block_tokens * options.kv_scale / 8) * 8
    if block_bytes < 4096:
        raise ConfigError(f"emulated target: a block has {block_bytes} bytes, and needs 4096: raise kv_scale")
    if group.role is Role.RECOMPUTE and group.roots:
        raise ConfigError(f"group {group.name}: what is recomputed is not stored: leave out its roots")
    if group.role is not Role.RECOMPUTE and not group.roots:
        raise ConfigError(f"group {group.name}: give one or more roots to store in")
    if options.host_bytes < 16 * slot_bytes(block_bytes):
        raise ConfigError(
            f"emulated target: host_bytes {bytes_text(options.host_bytes)} holds less than 16 blocks of "
            f"{bytes_text(block_bytes)}: give more, or smaller blocks"
        )
    return EmulatedTarget(options, group, profile, block_bytes)


class EmulatedTarget:
    """A `Target`. An instance is one engine with its own host pool and accelerator; each has a thread during waves."""

    def __init__(self, options: Options, group: GroupOptions, profile: EngineProfile, block_bytes: int) -> None:
        self._options, self._group, self._profile = options, group, profile
        scale = options.time_scale
        self._scaled = dataclasses.replace(
            profile, token_s=profile.token_s * scale, step_s=profile.step_s * scale,
            kv_bytes_per_s=profile.kv_bytes_per_s / scale,
        )  # fmt: skip
        self._namespace = _namespace(profile, options.block_tokens, block_bytes)
        self._stamp = Stamp(slot_bytes(block_bytes))
        self._keys: dict[Prompt, tuple[BlockKey, ...]] = {}
        self._instances: dict[int, Instance] = {}
        self._is_ending = threading.Event()
        self._pools = Pools(group)

    def describe(self) -> Description:
        block_bytes, options = self._namespace.block_bytes, self._options
        facts = {
            "target": "emulated accelerator: timed compute, real KV bytes on disk",
            "profile": f"{self._profile.name} ({self._profile.source})",
            "block": f"{options.block_tokens} tokens, {block_bytes:,} bytes",
            "time scale": f"{options.time_scale:g}",
            "KV scale": f"{options.kv_scale:g}",
            "load or compute": options.load_or_compute.value,
        }
        if self._group.roots:
            facts["host pool"] = f"{bytes_text(options.host_bytes)} an instance"
            facts["populated"] = "blocks are written as an engine writes them; computing them is not timed"
        return Description(
            facts=facts | throttled_fact(self._group), roots=tuple(self._pools.roots), pools=self._pools.directories
        )

    def populate(self, prompts: Sequence[Populated]) -> None:
        if self._group.role is Role.RECOMPUTE:
            return
        blocks = len({(each.instance, key) for each in prompts for key in self._keys_of(each.prompt)})
        host_bytes = self._group.instances * self._options.host_bytes
        self._pools.check_room(blocks, self._namespace.block_bytes, host_bytes)
        for instance in self._open():
            for each in prompts:
                if each.instance == instance.number:
                    instance.populate(self._keys_of(each.prompt))

    def forget(self) -> None:
        """As after a restart: new engines with empty host pools, which find again what is on disk."""
        self.rest()
        self._open()

    def rest(self) -> None:
        """Host pools and accelerators are for the group whose turn it is."""
        for instance in self._instances.values():
            instance.close()
        self._instances.clear()
        gc.collect()  # the host pools are to be free before new ones are made

    def wave(self, questions: Sequence[Question]) -> Wave:
        instances = self._open()
        asked = [[each for each in questions if each.instance == instance.number] for instance in instances]
        keys = {each.session: self._keys_of(each.prompt) for each in questions}
        self._is_ending.clear()
        with ThreadPoolExecutor(len(instances)) as threads:
            try:
                running = [
                    threads.submit(instance.wave, mine, keys, self._is_ending)
                    for instance, mine in zip(instances, asked, strict=True)
                    if mine
                ]
                answers = {answer.session: answer for future in running for answer in future.result()}
            except BaseException:  # a signal, or one instance: the others are not waited for
                self._is_ending.set()
                raise
        return Wave(
            answers=tuple(answers[each.session] for each in questions),
            wanted_bytes=self._wanted_blocks(questions) * self._namespace.block_bytes,
        )

    def close(self) -> None:
        try:
            self.rest()
        finally:
            self._pools.close()

    # ---- its parts

    def _open(self) -> list[Instance]:
        for number in range(self._group.instances):
            if number not in self._instances:
                self._instances[number] = Instance(number, self._store(number), self._namespace, self._scaled,
                                                   self._stamp, self._options)  # fmt: skip
        return [self._instances[number] for number in range(self._group.instances)]

    def _store(self, number: int) -> StoreConfig:
        engine = EngineOptions(
            load_deadline_s=3600.0, read_deadline_s=60.0, hedge_share=0.0,
            load_or_compute=ChoiceOptions(mode=self._options.load_or_compute),
        )  # fmt: skip
        tiers = self._pools.tiers(number, self._options.file)
        host_bytes = self._options.host_bytes if tiers else 2 * slot_bytes(self._namespace.block_bytes)
        return StoreConfig(host_bytes=host_bytes, tiers=tiers, engine=engine)

    def _keys_of(self, prompt: Prompt) -> tuple[BlockKey, ...]:
        if prompt not in self._keys:
            self._keys[prompt] = block_keys(self._namespace, prompt.token_ids(_VOCABULARY))
        return self._keys[prompt]

    def _wanted_blocks(self, questions: Sequence[Question]) -> int:
        """Those that are stored, each once in a pool: instances that share none have one each."""
        if self._group.role is Role.RECOMPUTE:
            return 0
        is_shared = self._group.role is Role.SHARED
        return len(
            {
                (0 if is_shared else each.instance, key)
                for each in questions
                for key in self._keys_of(each.prompt)[: each.stored_tokens // self._options.block_tokens]
            }
        )


class Instance:
    """One engine and its accelerator. Used by one thread at a time."""

    def __init__(
        self,
        number: int,
        store: StoreConfig,
        namespace: Namespace,
        profile: EngineProfile,
        stamp: Stamp,
        options: Options,
    ) -> None:
        self.number = number
        self._profile, self._options, self._block_tokens = profile, options, namespace.block_tokens
        self._is_storing = bool(store.tiers)
        self._sources: dict[str, tuple[tuple[str, int], ...]] = {}
        """Of each request, by its name: the places that its blocks were planned to come from."""
        devices: list[FoldingDevice] = []

        def make_device(pool: HostPool) -> FoldingDevice:
            devices.append(FoldingDevice(pool, stamp, namespace.block_bytes))
            return devices[0]

        self._engine: Engine = open_engine(store, namespace, make_device, emit=self._note)
        self._device = devices[0]

    def populate(self, keys: Sequence[BlockKey]) -> None:
        store(self._engine, keys)

    def wave(
        self, questions: Sequence[Question], keys: Mapping[int, Sequence[BlockKey]], is_ending: threading.Event
    ) -> list[Answer]:
        host = SimHost(self._engine, self._profile, self._block_tokens)
        sent_ns = self._engine.now_ns()
        sessions = {
            f"{sent_ns}/{each.session:06}": (each, Session(
                f"{sent_ns}/{each.session:06}", tuple(keys[each.session]), each.prompt.tokens, each.output_tokens,
                sent_ns,
            ))
            for each in questions
        }  # fmt: skip
        self._device.arrived.clear()
        host.arrive([session for _, session in sessions.values()])
        self._run(host, len(sessions), is_ending)
        return [self._answer(question, session) for question, session in sessions.values()]

    def close(self) -> None:
        self._engine.close()

    def _run(self, host: SimHost, sessions: int, is_ending: threading.Event) -> None:
        """Until all have ended, nothing has been heard for too long, or nobody waits any more."""
        engine, limit_ns = self._engine, int(self._options.silence_limit_s * 1e9)
        heard_ns, ended, arrived = engine.now_ns(), 0, 0
        while ended < sessions and engine.now_ns() < heard_ns + limit_ns and not is_ending.is_set():
            host.advance(engine.now_ns())
            if host.ended or host.wakes_ns < FAR_NS or len(self._device.arrived) > arrived:
                ended, arrived, heard_ns = ended + len(host.ended), len(self._device.arrived), engine.now_ns()
                host.ended.clear()
            if ended < sessions:
                engine.wait(min(host.wakes_ns, engine.now_ns() + _PATIENCE_NS))

    def _answer(self, question: Question, session: Session) -> Answer:
        loaded = session.keys[: session.loaded_blocks]
        sources = [place for place, _ in self._sources.pop(session.name, ())]
        has_ended = session.ended_ns > 0
        return Answer(
            session=question.session,
            sent_ns=session.arrived_ns,
            first_token_ns=session.first_token_ns or None,
            ended_ns=session.ended_ns if has_ended else self._engine.now_ns(),
            prompt_tokens=session.prompt_tokens,
            output_tokens=session.emitted_tokens,
            stored_tokens=question.stored_tokens // self._block_tokens * self._block_tokens if self._is_storing else 0,
            hit_tokens=len(loaded) * self._block_tokens,
            hit_source="+".join(sorted(sources)) or None if loaded else None,
            output_digest=self._device.output(session.keys, loaded, session.emitted_tokens) if has_ended else "",
            error="" if has_ended else f"nothing was heard for {self._options.silence_limit_s:g} s",
        )

    def _note(self, event: Event) -> None:
        if isinstance(event, Planned):
            self._sources[event.request_id] = event.hits


class FoldingDevice:
    """A `DevicePort` without memory: it writes each block's own bytes, and folds those that arrive into 8.

    The fold is the exclusive or of a block's 64-bit words. Another block, or one flipped bit, gives another one.
    """

    def __init__(self, pool: HostPool, stamp: Stamp, block_bytes: int) -> None:
        self._pool, self._stamp, self._block_bytes = pool, stamp, block_bytes
        self._ended: list[JobResult] = []
        self.arrived: dict[BlockKey, int] = {}
        """Folds of the blocks that were copied in."""

    def submit(self, job: Job, blocks: Sequence[DeviceBlock]) -> None:
        started_ns = time.monotonic_ns()
        for key, slot in zip(job.keys, job.slots, strict=True):
            view = self._pool.view(slot)
            if job.kind is JobKind.COPY_OUT:
                self._stamp.fill(view, key)
            else:
                self.arrived[key] = fold(view[: self._block_bytes])
        outcomes = dict.fromkeys(job.keys, Outcome.OK)
        self._ended.append(JobResult(job, outcomes, started_ns, time.monotonic_ns()))

    def poll(self) -> Sequence[JobResult]:
        ended, self._ended = self._ended, []
        return ended

    def output(self, keys: Sequence[BlockKey], loaded: Sequence[BlockKey], tokens: int) -> str:
        """What the model says, with these blocks of the prompt loaded and the others computed."""
        digest = hashlib.sha256(tokens.to_bytes(8))
        for at, key in enumerate(keys):
            fold = self.arrived[key] if at < len(loaded) else self._stamp.fold(key, self._block_bytes)
            digest.update(key + fold.to_bytes(8))
        return digest.hexdigest()


def _namespace(profile: EngineProfile, block_tokens: int, block_bytes: int) -> Namespace:
    return Namespace(
        model=profile.name,
        weights_digest="emulated",
        kv_dtype="uint8",
        rope="none",
        layers=1,
        kv_heads=1,
        head_dim=1,
        block_tokens=block_tokens,
        block_bytes=block_bytes,
        layout="random bytes",
    )
