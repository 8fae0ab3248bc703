"""What the demo is played on: the model, the prompts, the pool and the memory, and whether there is room for it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.assemble import StoreConfig, open_tiers
from forebay.bench.demo.options import DemoOptions
from forebay.bench.demo.prompts import Chat, Prompt
from forebay.bench.demo.texts import documents
from forebay.bench.environment import available_memory_bytes
from forebay.bench.units import bytes_text
from forebay.errors import ConfigError
from forebay.events import EventSink
from forebay.hostpool import slot_bytes
from forebay.keys import block_keys
from forebay.tiers.file import FileTier
from forebay.types import BlockKey, Namespace

if TYPE_CHECKING:
    from forebay.connectors.transformers import LoadedModel, Runner, RunnerOptions

TIER = "file"
"""The tier's name, and so the source of what comes from disk."""
_CHUNK_TOKENS = 512
_SPARE_BLOCKS = 4
_HOST_SHARE = 0.8
"""Of the host pool, what one session may take: the engine keeps some of the rest for stores."""


@dataclass(frozen=True, slots=True)
class Setting:
    loaded: LoadedModel
    namespace: Namespace
    chat: Chat
    prompts: tuple[Prompt, ...]
    keys: tuple[tuple[BlockKey, ...], ...]
    """Of the full blocks of each document."""
    longest_tokens: int
    """Of a prompt and its answer."""
    root: Path
    store: StoreConfig
    runner_options: RunnerOptions
    tier: FileTier
    """Over the same pool as the runner's own: to look at it, and to empty the page cache."""

    @property
    def restorable_tokens(self) -> int:
        """Of each document: those in full blocks."""
        return len(self.keys[0]) * self.namespace.block_tokens

    @property
    def document_blocks(self) -> int:
        return sum(len(keys) for keys in self.keys)

    def found_blocks(self) -> int:
        """How many blocks of the documents the pool holds now."""
        return sum(sum(self.tier.contains(keys)) for keys in self.keys)


RunnerOpener = Callable[[Setting, EventSink], "Runner"]
"""The seam at which tests put a runner that errs."""


def open_runner(setting: Setting, emit: EventSink) -> Runner:
    """A runner over the setting's pool, with nothing in device memory or DRAM. The caller closes it."""
    runner: Runner = _connector().Runner.open(
        setting.loaded, setting.namespace, setting.store, setting.runner_options, emit=emit
    )
    runner.reserve(setting.longest_tokens)
    return runner


def load(options: DemoOptions) -> LoadedModel:
    """The model that the options name. Raises ConfigError when it or torch is not there."""
    connector = _connector()
    if options.threads is not None:
        connector.set_compute_threads(options.threads)
    source = connector.Packaged()
    if options.random_weights:
        source = connector.RandomWeights(seed=options.seed)
    elif options.model is not None:
        source = connector.Directory(options.model)
    loaded: LoadedModel = connector.load_model(source)
    return loaded


def compute_threads() -> int:
    """Threads that the model runs on."""
    return int(_connector().compute_threads())


def prepare(options: DemoOptions, loaded: LoadedModel, root: Path) -> Setting:
    """Prompts, and a pool at `root`, which is made if it is not there. The caller closes `tier`.

    Raises ConfigError for what the model, the memory or the disk cannot do.
    """
    connector, chat = _connector(), Chat(loaded)
    prompts = tuple(
        chat.prompt(document, options.tokens) for document in documents(options.sessions, first=options.seed)
    )
    namespace: Namespace = connector.namespace_of(loaded, options.block_tokens)
    longest_tokens = max(len(prompt.ids) for prompt in prompts) + options.answer_tokens
    _check_context(loaded, longest_tokens)
    session_blocks = -(-longest_tokens // options.block_tokens) + _SPARE_BLOCKS
    host_bytes = _host_bytes(options, namespace, session_blocks)
    runner_options: RunnerOptions = connector.RunnerOptions(
        device_bytes=session_blocks * namespace.block_bytes,
        chunk_tokens=options.block_tokens * max(1, _CHUNK_TOKENS // options.block_tokens),
    )
    _check_memory(host_bytes, 2 * runner_options.device_bytes)  # the cache, and the session that it feeds
    store = StoreConfig.embedded(
        # never evicts what others keep in this pool: the disk is the limit
        [root], host_bytes=host_bytes, capacity_bytes=shutil.disk_usage(root if root.exists() else root.parent).total,
        name=TIER,
    )  # fmt: skip
    tier = open_tiers(store, namespace)[TIER]
    assert isinstance(tier, FileTier)
    keys = tuple(block_keys(namespace, prompt.document_ids) for prompt in prompts)
    setting = Setting(loaded, namespace, chat, prompts, keys, longest_tokens, root, store, runner_options, tier)
    try:
        _check_disk(setting, session_blocks)
    except BaseException:
        tier.close()
        raise
    return setting


def _connector() -> Any:
    """The transformers connector, imported late: it brings torch, and most commands do without."""
    try:
        from forebay.connectors import transformers
    except ImportError as error:
        raise ConfigError(f"the demo needs torch and transformers ({error}): pip install 'forebay[demo]'") from None
    return transformers


def _check_context(loaded: LoadedModel, longest_tokens: int) -> None:
    limit_tokens = loaded.facts.max_tokens
    if limit_tokens and longest_tokens > limit_tokens:
        raise ConfigError(
            f"document, question and answer make {longest_tokens:,} tokens, and {loaded.name} takes "
            f"{limit_tokens:,}: ask for fewer --tokens"
        )


def _host_bytes(options: DemoOptions, namespace: Namespace, session_blocks: int) -> int:
    """The host pool has to hold a whole session, or a restore from DRAM would be none."""
    needed_bytes = (int(session_blocks / _HOST_SHARE) + 2) * slot_bytes(namespace.block_bytes)
    if options.host_memory_bytes is None:
        return needed_bytes
    if options.host_memory_bytes < needed_bytes:
        raise ConfigError(
            f"--host-memory {bytes_text(options.host_memory_bytes)} does not hold one session: "
            f"give {bytes_text(needed_bytes)} or more, or ask for shorter documents"
        )
    return options.host_memory_bytes


def _check_memory(host_bytes: int, other_bytes: int) -> None:
    available_bytes = available_memory_bytes()
    if available_bytes is not None and host_bytes + other_bytes > available_bytes:
        raise ConfigError(
            f"the host pool ({bytes_text(host_bytes)}) and the device cache and session ({bytes_text(other_bytes)}) "
            f"need more memory than the {bytes_text(available_bytes)} that are free: ask for fewer --tokens"
        )


def _check_disk(setting: Setting, session_blocks: int) -> None:
    """What the pool lacks has to fit beside it, with the few blocks that questions and answers add."""
    tail_blocks = session_blocks - len(setting.keys[0])
    missing = setting.document_blocks - setting.found_blocks() + tail_blocks * len(setting.prompts)
    needed_bytes, free_bytes = missing * setting.tier.spec.stored_bytes, shutil.disk_usage(setting.root).free
    if needed_bytes > free_bytes:
        raise ConfigError(
            f"the blocks need {bytes_text(needed_bytes)} and {setting.root} has {bytes_text(free_bytes)} free: "
            "make room, name another --pool, or ask for fewer --sessions or --tokens"
        )
