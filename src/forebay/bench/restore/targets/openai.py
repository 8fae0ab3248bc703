"""Servers that speak OpenAI's API: vLLM, SGLang, anything that streams `/v1/completions`.

An instance is a server that runs already, known by its address, or one that is started from a command. What makes it
cold is said by `cold`: a restart, the server's own reset, or nothing. Whether it was, the evidence says.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec

from forebay.bench.restore.options import GroupOptions
from forebay.bench.restore.pagecache import files_below
from forebay.bench.restore.pools import throttled_fact
from forebay.bench.restore.results import Role
from forebay.bench.restore.serving.accounts import cached_since, cached_so_far
from forebay.bench.restore.serving.endpoint import Endpoint, Unanswered
from forebay.bench.restore.serving.exchange import Completion, Exchange, Limits, run_all
from forebay.bench.restore.serving.instances import Recipe, Running, Started, check_recipe
from forebay.bench.restore.sessions import Populated, Prompt, Question
from forebay.bench.restore.target import Answer, Description, Wave
from forebay.errors import ConfigError

COLD = "file"
"""What the benchmark calls cold storage."""
_SYLLABLES = tuple(consonant + vowel for consonant in "bdfghklmnprstvwz" for vowel in "aeio")
"""Words of which tokenizers make a token each, or two."""
_ASK_LIMIT_S = 30.0
_RESET_LIMIT_S = 60.0
_POLL_S = 0.2
_SETTLE_LIMIT_S = 600.0


class Cold(Enum):
    """How what was computed leaves a server's memory."""

    RESTART = "restart"
    """The server is ended, and started again before each wave: for one that is started from a command."""
    RESET = "reset"
    """It is asked to, by a POST to `reset_path`."""
    NONE = "none"
    """Nothing is done: the sessions that others ask for in between are to push it out. The evidence says whether."""


class PromptForm(Enum):
    TOKENS = "tokens"
    """Token ids."""
    TEXT = "text"
    """Words of a syllable, for servers that take no ids: how many tokens they make, the server says."""


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    urls: tuple[str, ...] = ()
    """Of servers that run already, one for each instance, such as `http://127.0.0.1:8000`."""
    command: tuple[str, ...] = ()
    """Or: what starts an instance. See `forebay.bench.restore.serving.instances` for what is filled in."""
    environment: dict[str, str] = {}
    """For the command, in addition to this process's own."""
    files: dict[str, str] = {}
    """Texts of files for the command by their names; they lie in {files}."""
    cold: Cold = Cold.RESTART
    reset_path: str = "/reset_prefix_cache"
    """vLLM's, where it was started with VLLM_SERVER_DEV_MODE=1; `/flush_cache` for SGLang."""
    health_path: str = "/health"
    model: str = ""
    """As the server calls it. Empty: the first that it lists."""
    api_key_file: str = ""
    """File with a key for servers that want one: a plan is evidence, and no place for keys."""
    prompts: PromptForm = PromptForm.TOKENS
    vocabulary: tuple[int, int] = (1000, 30_000)
    """Token ids from the first up to, not including, the second: ordinary tokens of the model."""
    block_tokens: int = 16
    """Of the engine: what is restored comes in whole blocks."""
    kv_bytes_per_token: float = 0.0
    """Of KV in the roots, over all ranks. 0: what the roots grew by, over the tokens stored."""
    cold_sources: tuple[str, ...] = ("disk", "storage")
    """What the server's accounts call cold storage, in vLLM and in SGLang."""
    body: dict[str, Any] = msgspec.field(default_factory=lambda: {"ignore_eos": True, "return_token_ids": True})
    """More fields of each request: by default, to the full length, and with token ids where the server knows that."""
    populate_in_flight: int = 1
    """Of each instance."""
    warmup_tokens: int = 64
    """Of a prompt that nobody asks again, sent to an instance that was just started or is asked for the first time."""
    flush_tokens: int = 0
    """Of a prompt that nobody asks again either, sent to each instance after a reset: what it stores on its way
    pushes older blocks out of DRAM tiers that cannot be asked to forget."""
    settle_s: float = 2.0
    """The roots must not have grown for so long before all is taken as stored."""
    start_limit_s: float = 900.0
    stop_limit_s: float = 60.0
    """After it a server that was asked to end is killed."""
    first_token_limit_s: float = 300.0
    answer_limit_s: float = 900.0
    processes: tuple[int, ...] = ()
    """Process ids, on this machine, of servers that run already: what they read is evidence."""
    log_directory: str = ""
    """For what started servers say. Empty: thrown away at the end."""


def build(options: Options, group: GroupOptions, seed: int) -> OpenAITarget:
    """Raises ConfigError for options that make no sense. Starts nothing yet."""
    _check(options, group)
    if not options.command:
        key = _key(options.api_key_file)
        return OpenAITarget(options, group, seed, Running([Endpoint.of(url, key) for url in options.urls], group.roots))
    recipe = Recipe(
        command=options.command,
        environment=options.environment,
        files=options.files,
        health_path=options.health_path,
        start_limit_s=options.start_limit_s,
        stop_limit_s=options.stop_limit_s,
    )
    check_recipe(recipe, group)
    return OpenAITarget(options, group, seed, Started(recipe, group, options.log_directory))


class OpenAITarget:
    """A `Target`. Its servers see one wave at a time."""

    def __init__(self, options: Options, group: GroupOptions, seed: int, instances: Running | Started) -> None:
        self._options, self._group, self._seed, self._instances = options, group, seed, instances
        self._limits = Limits(first_token_s=options.first_token_limit_s, answer_s=options.answer_limit_s)
        self._model = options.model
        self._facts: dict[str, str] = {}
        self._kv_bytes_per_token = options.kv_bytes_per_token
        self._unasked = 0
        self._tokens_per_word = 1.0
        """Of text; measured where it is populated."""

    def describe(self) -> Description:
        return Description(
            facts=self._facts,
            roots=self._instances.roots,
            pools=self._instances.pools,
            processes=self._options.processes,
        )

    def populate(self, prompts: Sequence[Populated]) -> None:
        self._instances.start()
        self._find_model()
        self._facts = self._describe()
        self._send_unasked(self._options.warmup_tokens)
        if self._group.role is Role.RECOMPUTE:
            return
        self._await_settled()
        before_bytes = self._stored_bytes()
        self._compute(prompts)
        self._await_settled()
        if self._instances.roots and not self._kv_bytes_per_token:
            self._kv_bytes_per_token = self._measured(prompts, self._stored_bytes() - before_bytes)

    def forget(self) -> None:
        match self._options.cold:
            case Cold.RESTART:
                self._instances.stop()
            case Cold.RESET:
                self._ready()
                self._reset()
                if self._options.flush_tokens:
                    self._send_unasked(self._options.flush_tokens)
                    self._reset()
            case Cold.NONE:
                pass
        self._ready()

    def wave(self, questions: Sequence[Question]) -> Wave:
        endpoints = self._instances.endpoints
        exchanges = [
            self._exchange(endpoints[each.instance], each.prompt, each.output_tokens) for each in questions
        ]  # fmt: skip
        before = [cached_so_far(endpoint) for endpoint in endpoints]
        completions = run_all(exchanges)
        counted = [
            cached_since(earlier, cached_so_far(endpoint)) for earlier, endpoint in zip(before, endpoints, strict=True)
        ]
        return Wave(
            answers=tuple(
                self._answer(question, completion, counted[question.instance])
                for question, completion in zip(questions, completions, strict=True)
            ),
            wanted_bytes=round(self._wanted_tokens(questions) * self._kv_bytes_per_token),
        )

    def rest(self) -> None:
        if self._options.cold is Cold.RESTART:
            self._instances.stop()

    def close(self) -> None:
        self._instances.close()

    # ---- its parts

    def _ready(self) -> None:
        if self._instances.start():
            self._send_unasked(self._options.warmup_tokens)

    def _reset(self) -> None:
        for endpoint in self._instances.endpoints:
            _reset(endpoint, self._options.reset_path)

    def _find_model(self) -> None:
        if not self._model:
            listed = self._ask(self._instances.endpoints[0], "/v1/models")
            try:
                self._model = msgspec.json.decode(listed, type=_Models).data[0].id
            except (msgspec.DecodeError, IndexError):
                raise ConfigError(f"group {self._group.name}: the server lists no model: give model") from None

    def _describe(self) -> dict[str, str]:
        options = self._options
        facts = {
            "target": "a server with OpenAI's API",
            "model": self._model,
            "engine": _engine_of(self._instances.endpoints[0]),
            "instances": ", ".join(e.url for e in self._instances.endpoints) if options.urls else "started for this",
            "made cold by": options.cold.value + (f" ({options.reset_path})" if options.cold is Cold.RESET else ""),
            "prompts": options.prompts.value,
        }
        if options.command:
            facts["command"] = " ".join(options.command)
        return facts | throttled_fact(self._group)

    def _ask(self, endpoint: Endpoint, path: str) -> bytes:
        try:
            return endpoint.ask("GET", path, limit_s=_ASK_LIMIT_S)
        except Unanswered as error:
            raise ConfigError(f"group {self._group.name}: {error}: is the server up, and the address right?") from None

    def _send_unasked(self, tokens: int) -> None:
        """A prompt of its own to every instance, so that what an engine does once is not in the measurement."""
        if tokens < 1:
            return
        self._unasked += 1
        prompt = Prompt((2**40 + self._unasked,), tokens, tokens, self._seed)
        self._succeed([self._exchange(endpoint, prompt, 2) for endpoint in self._instances.endpoints])

    def _compute(self, prompts: Sequence[Populated]) -> None:
        """A few of each instance at a time, all instances at once."""
        step, tokens = self._options.populate_in_flight, 0
        mine = [[each.prompt for each in prompts if each.instance == n] for n in range(self._group.instances)]
        for first in range(0, max(map(len, mine)), step):
            some = [
                (endpoint, prompt)
                for endpoint, its in zip(self._instances.endpoints, mine, strict=True)
                for prompt in its[first : first + step]
            ]
            done = self._succeed([self._exchange(endpoint, prompt, 1) for endpoint, prompt in some])
            for (_, prompt), completion in zip(some, done, strict=True):
                tokens += prompt.tokens if completion.prompt_tokens is None else completion.prompt_tokens
        self._tokens_per_word = tokens / max(1, sum(each.prompt.tokens for each in prompts))

    def _succeed(self, exchanges: Sequence[Exchange]) -> tuple[Completion, ...]:
        done = run_all(exchanges)
        error = next((each.error for each in done if each.error), "")
        if error:
            hint = (
                "" if self._options.prompts is PromptForm.TEXT else "; does it take token ids? if not: prompts = 'text'"
            )
            raise ConfigError(f"group {self._group.name}: a prompt could not be computed beforehand: {error}{hint}")
        return done

    def _exchange(self, endpoint: Endpoint, prompt: Prompt, output_tokens: int) -> Exchange:
        asked: dict[str, Any] = {"model": self._model, "prompt": self._spoken(prompt), "temperature": 0}
        body = {**self._options.body, **asked, "max_tokens": output_tokens}
        return Exchange(endpoint, body, prompt.tokens, self._limits)

    def _spoken(self, prompt: Prompt) -> list[int] | str:
        if self._options.prompts is PromptForm.TEXT:
            return " ".join(_SYLLABLES[word] for word in prompt.token_ids(range(len(_SYLLABLES))))
        return [int(token) for token in prompt.token_ids(range(*self._options.vocabulary))]

    def _await_settled(self) -> None:
        """Until the roots have not grown for a while: servers store after they have answered."""
        due_s = time.monotonic() + _SETTLE_LIMIT_S
        stored_bytes, quiet_since_s = self._stored_bytes(), time.monotonic()
        while time.monotonic() < quiet_since_s + self._options.settle_s:
            time.sleep(_POLL_S)
            now_bytes = self._stored_bytes()
            if now_bytes != stored_bytes:
                stored_bytes, quiet_since_s = now_bytes, time.monotonic()
            if time.monotonic() > due_s:
                raise ConfigError(f"group {self._group.name}: the roots still grow after {_SETTLE_LIMIT_S:g} s")

    def _stored_bytes(self) -> int:
        return sum(_length_bytes(path) for path in files_below(self._instances.roots))

    def _measured(self, prompts: Sequence[Populated], grown_bytes: int) -> float:
        """KV bytes a token in the roots."""
        tokens = self._tokens_in_pools((each.instance, each.prompt, each.prompt.tokens) for each in prompts)
        if grown_bytes <= 0 or not tokens:
            raise ConfigError(
                f"group {self._group.name}: nothing new was stored in the roots: are they where the server stores? if "
                "all was there before, give kv_bytes_per_token"
            )
        return grown_bytes / tokens

    def _tokens_in_pools(self, stored: Iterable[tuple[int, Prompt, int]]) -> float:
        """Of instances, prompts and their stored tokens: each block once in a pool, and once for each instance where
        they share none."""
        is_shared = self._group.role is Role.SHARED
        held: dict[tuple[int, int], float] = {}
        for instance, prompt, stored_tokens in stored:
            for block, tokens in self._tokens_by_block(prompt, stored_tokens).items():
                place = (0 if is_shared else instance, block)
                held[place] = max(held.get(place, 0.0), tokens)
        return sum(held.values())

    def _tokens_by_block(self, prompt: Prompt, stored_tokens: int) -> dict[int, float]:
        """Tokens that a restore can bring, in whole blocks of the engine, by the prompt's own blocks."""
        block_tokens = prompt.block_tokens * self._tokens_per_word
        left, found = float(self._whole_blocks(stored_tokens)), dict[int, float]()
        for block in prompt.chain:
            if left <= 0:
                break
            found[block] = min(left, block_tokens)
            left -= block_tokens
        return found

    def _whole_blocks(self, tokens: int) -> int:
        block_tokens = self._options.block_tokens
        return int(tokens * self._tokens_per_word) // block_tokens * block_tokens

    def _wanted_tokens(self, questions: Sequence[Question]) -> float:
        if self._group.role is Role.RECOMPUTE:
            return 0
        return self._tokens_in_pools((each.instance, each.prompt, each.stored_tokens) for each in questions)

    def _answer(self, question: Question, completion: Completion, counted: Mapping[str, int] | None) -> Answer:
        """`counted`: cached tokens by place that the instance gave during the wave, by its own accounts."""
        hit_tokens = completion.cached_tokens
        if hit_tokens is None and counted is not None and not counted:
            hit_tokens = 0  # servers that leave out a nought
        prompt_tokens = completion.prompt_tokens
        return Answer(
            session=question.session,
            sent_ns=completion.sent_ns,
            first_token_ns=completion.first_token_ns,
            ended_ns=completion.ended_ns,
            prompt_tokens=question.prompt.tokens if prompt_tokens is None else prompt_tokens,
            output_tokens=completion.output_tokens,
            stored_tokens=0 if self._group.role is Role.RECOMPUTE else self._whole_blocks(question.stored_tokens),
            hit_tokens=hit_tokens,
            hit_source=self._source(completion.cached_from or counted) if hit_tokens else None,
            output_digest=completion.output_digest,
            error=completion.error,
        )

    def _source(self, places: Mapping[str, int] | None) -> str | None:
        """From the server's names for places to the benchmark's. Nobody's word, but a restart and roots of its own:
        what a new process finds it can only have from there, and whether it was read the block layer says."""
        if places:
            return "+".join(sorted({COLD if place in self._options.cold_sources else place for place in places}))
        is_new = self._options.cold is Cold.RESTART and bool(self._instances.roots)
        return COLD if is_new and places is None else None


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class _Version(msgspec.Struct):
    version: str


class _Reset(msgspec.Struct):
    success: bool = True


def _engine_of(endpoint: Endpoint) -> str:
    """What says its version: vLLM at `/version`, SGLang at `/get_server_info`."""
    for name, path in (("vLLM", "/version"), ("SGLang", "/get_server_info")):
        try:
            told = msgspec.json.decode(endpoint.ask("GET", path, limit_s=_ASK_LIMIT_S), type=_Version)
        except (Unanswered, msgspec.DecodeError):
            continue
        return f"{name} {told.version[:80]}"
    return "unknown: it does not say its version"


def _reset(endpoint: Endpoint, path: str) -> None:
    """Tried again while the server says that it cannot yet. Raises ConfigError when it never can."""
    due_s = time.monotonic() + _RESET_LIMIT_S
    while True:
        try:
            body = endpoint.ask("POST", path, limit_s=_ASK_LIMIT_S)
            if _is_done(body):
                return
            problem = "it says that it could not"
        except Unanswered as error:
            problem = str(error)
        if time.monotonic() > due_s:
            raise ConfigError(f"{endpoint.url} was not reset by POST {path}: {problem}")
        time.sleep(_POLL_S)


def _is_done(body: bytes) -> bool:
    """vLLM says so; others say nothing, or something else."""
    try:
        return msgspec.json.decode(body, type=_Reset).success
    except msgspec.DecodeError:
        return True


def _length_bytes(path: Path) -> int:
    try:
        return path.stat(follow_symlinks=False).st_size
    except OSError:
        return 0  # just now renamed or removed


def _key(path: str) -> str:
    if not path:
        return ""
    try:
        return Path(path).read_text().strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"api_key_file: cannot read {path!a} ({error})") from None


def _check(options: Options, group: GroupOptions) -> None:
    name = group.name
    if bool(options.urls) == bool(options.command):
        raise ConfigError(f"group {name}: give either urls of servers that run, or a command that starts one")
    if options.urls and len(options.urls) != group.instances:
        raise ConfigError(f"group {name}: {len(options.urls)} urls for {group.instances} instances: give one for each")
    if options.urls and (options.environment or options.files or group.limit):
        raise ConfigError(f"group {name}: environment, files and limit are for a command that starts a server")
    if options.urls and options.cold is Cold.RESTART:
        raise ConfigError(f"group {name}: only what a command started can be restarted: give cold = 'reset' or 'none'")
    if group.role is Role.RECOMPUTE and group.roots:
        raise ConfigError(f"group {name}: what is recomputed is not stored: leave out its roots")
    low, high = options.vocabulary
    if not 0 <= low < high <= 2**31:
        raise ConfigError(f"group {name}: vocabulary must be two token ids, the smaller one first")
    for field in ("block_tokens", "populate_in_flight"):
        if not 1 <= getattr(options, field) <= 2**20:
            raise ConfigError(f"group {name}: {field} must be 1 or more, not {getattr(options, field)}")
    for field in ("settle_s", "start_limit_s", "stop_limit_s", "first_token_limit_s", "answer_limit_s"):
        if not 0 < getattr(options, field) <= 86_400:
            raise ConfigError(f"group {name}: {field} must be above 0 and a day at most, not {getattr(options, field)}")
    for field in ("reset_path", "health_path"):
        path = getattr(options, field)
        if not path.startswith("/") or not path.isascii() or not path.isprintable() or " " in path:
            raise ConfigError(f"group {name}: {field} must be a path such as /health, not {path[:80]!a}")
    if not 0 <= options.kv_bytes_per_token < float("inf"):
        raise ConfigError(f"group {name}: kv_bytes_per_token must be 0 or more, not {options.kv_bytes_per_token}")
    for field in ("warmup_tokens", "flush_tokens"):
        if not 0 <= getattr(options, field) <= 2**24:
            raise ConfigError(f"group {name}: {field} must be 0 or more, not {getattr(options, field)}")
