"""What of a model decides the bytes of its KV: shape, rope, weights; and which models cannot be served exactly."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from forebay.errors import ConfigError
from forebay.keys import tenant_digest
from forebay.types import Namespace

AXES = "[layer,kv,head,token,dim]"
"""Of a block, outermost first."""
_DIGEST_THREADS = 4
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}
_NOT_OF_THE_KV = {
    # names, bookkeeping of the library, and what only matters after the last layer
    "architectures", "transformers_version", "dtype", "torch_dtype", "use_cache", "initializer_range",
    "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "id2label", "label2id", "problem_type",
    "output_attentions", "output_hidden_states", "return_dict", "chunk_size_feed_forward", "attention_dropout",
}  # fmt: skip


class Tokenizer(Protocol):
    """What this package needs of a tokenizer; the library's own have it."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: list[int]) -> str: ...


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the model's configuration says, as far as KV is concerned."""

    architecture: str
    layers: int
    attention_heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    """Of the KV: `float32`, `bfloat16`, ..."""
    rope: str
    """Rotary embedding in canonical JSON."""
    max_tokens: int
    """The longest context that the model was made for."""
    vocabulary: int
    parameters: int

    @property
    def token_bytes(self) -> int:
        """KV of one token over all layers."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return self.layers * 2 * self.kv_heads * self.head_dim * int(dtype.itemsize)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to run, and its identity."""

    model: Any
    """A `transformers.PreTrainedModel` with a language-model head, in evaluation mode."""
    tokenizer: Tokenizer | None
    name: str
    """For people."""
    weights_digest: str
    """`weights_digest` of the model: equal for equal weights and configuration, wherever they were loaded from."""
    facts: ModelFacts


def adopt_model(model: Any, tokenizer: Tokenizer | None, name: str) -> LoadedModel:
    """Wrap a model that is loaded already. Raises ConfigError for one whose KV cannot be restored exactly."""
    model.eval()
    return LoadedModel(model, tokenizer, name, weights_digest(model), model_facts(model))


def namespace_of(
    loaded: LoadedModel, block_tokens: int, *, tenant_salt: str = "", adapter_digest: str = ""
) -> Namespace:
    """The namespace of this model's blocks of `block_tokens` tokens.

    `adapter_digest` is for adapters that are applied outside the model's parameters; those inside are in its digest.
    """
    facts = loaded.facts
    if block_tokens < 1:
        raise ConfigError(f"a block must have 1 token or more, not {block_tokens}")
    return Namespace(
        model=facts.architecture,
        weights_digest=loaded.weights_digest,
        adapter_digest=adapter_digest,
        kv_dtype=facts.dtype,
        rope=facts.rope,
        layers=facts.layers,
        kv_heads=facts.kv_heads,
        head_dim=facts.head_dim,
        block_tokens=block_tokens,
        block_bytes=facts.token_bytes * block_tokens,
        layout=_layout(loaded.model),
        tenant_digest=_tenant(tenant_salt),
    )


def _layout(model: Any) -> str:
    """How the KV was computed and how it lies, such as `transformers/sdpa/cpu/[layer,kv,head,token,dim]`.

    Attention kernels differ in the last bits of what they give the next layer, so the KV of one is not that of another.
    """
    attention = getattr(model.config, "_attn_implementation", None) or "default"
    return f"transformers/{attention}/{next(model.parameters()).device.type}/{AXES}"


def _tenant(salt: str) -> str:
    try:
        return tenant_digest(salt)
    except UnicodeEncodeError:
        raise ConfigError("tenant_salt holds what is no text (a lone surrogate): give it as UTF-8") from None


def weights_digest(model: Any) -> str:
    """Hex SHA-256 over the model's class, the configuration that shapes its KV, and every parameter and buffer.

    Each tensor gives (name, dtype, shape, SHA-256 of its bytes), in the order of the names. The tensors are hashed
    side by side, so that this runs at the speed of memory rather than of one core.
    """
    tensors = sorted([*model.named_parameters(), *model.named_buffers()], key=lambda item: item[0])
    with ThreadPoolExecutor(_DIGEST_THREADS, thread_name_prefix="forebay-digest") as threads:
        contents = list(threads.map(_content_digest, (tensor for _, tensor in tensors)))
    described = [
        [name, str(tensor.dtype), list(tensor.shape), content]
        for (name, tensor), content in zip(tensors, contents, strict=True)
    ]
    whole = [type(model).__name__, _shaping_config(model.config), described]
    return hashlib.sha256(_canonical(whole).encode()).hexdigest()


def _content_digest(tensor: torch.Tensor) -> str:
    flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy()).hexdigest()


def _shaping_config(config: Any) -> Mapping[str, Any]:
    kept: Mapping[str, Any] = {
        name: value
        for name, value in config.to_dict().items()
        if name not in _NOT_OF_THE_KV and not name.startswith("_") and not _is_spent(name, value)
    }
    return kept


def _is_spent(name: str, value: Any) -> bool:
    """A GGUF file is dequantised when it is read: what it was does not matter to the weights that are."""
    return name == "quantization_config" and isinstance(value, dict) and value.get("quant_method") == "gguf"


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)


def cache_argument(model: Any) -> str:
    """The name under which `forward` takes the cache: it changed within transformers 5."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def model_facts(model: Any) -> ModelFacts:
    """Read the facts, and check them on one token. Raises ConfigError for a model that cannot be served exactly."""
    config = model.config
    reason = _refusal(config)
    if reason:
        raise ConfigError(
            f"{type(model).__name__} cannot be served: {reason}; use a decoder-only model with full attention"
        )
    heads = int(config.num_attention_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    facts = ModelFacts(
        architecture=type(model).__name__,
        layers=int(config.num_hidden_layers),
        attention_heads=heads,
        kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=int(head_dim),
        dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
        rope=_canonical(_rope(config)),
        max_tokens=int(getattr(config, "max_position_embeddings", 0)),
        vocabulary=int(config.vocab_size),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
    )
    _check_on_one_token(model, facts)
    return facts


def _rope(config: Any) -> Mapping[str, Any]:
    """Parameters of the rotary embedding, under the names of transformers 5 or, failing those, of older files."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    theta = getattr(config, "rope_theta", None)
    return dict(parameters) if theta is None else {"rope_theta": theta, **parameters}


def _refusal(config: Any) -> str | None:
    """Why the KV of a prefix in this model is not one fixed block a token range, or None."""
    layer_types = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    rope_type = _rope(config).get("rope_type")
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder model"
    if config.get_text_config() is not config:
        return "it is multimodal, and a block's key holds tokens only"
    if getattr(config, "kv_lora_rank", None) is not None:
        return "it compresses its KV (multi-head latent attention)"
    if layer_types:
        return f"it has layers of other kinds than full attention ({', '.join(sorted(layer_types))})"
    if getattr(config, "layer_types", None) is None and getattr(config, "sliding_window", None) is not None:
        return "it has sliding-window layers"
    if not getattr(config, "is_causal", True):
        return "its attention looks ahead"
    if rope_type in _LENGTH_DEPENDENT_ROPE:
        return f"its {rope_type} rope makes the KV of a prefix depend on the length of the whole"
    return None


def _check_on_one_token(model: Any, facts: ModelFacts) -> None:
    """Run one token and compare the KV it leaves with what the configuration says. Catches what no list foresees."""
    cache = DynamicCache(config=model.config)
    device = next(model.parameters()).device
    with torch.inference_mode():
        token = torch.zeros((1, 1), dtype=torch.long, device=device)
        model(token, use_cache=True, **{cache_argument(model): cache})
    expected = (1, facts.kv_heads, 1, facts.head_dim)
    fits = len(cache.layers) == facts.layers and all(
        type(layer) is DynamicLayer
        and tuple(layer.keys.shape) == tuple(layer.values.shape) == expected
        and str(layer.keys.dtype) == str(layer.values.dtype) == f"torch.{facts.dtype}"
        for layer in cache.layers
    )
    if not fits:
        raise ConfigError(
            f"{facts.architecture} cannot be served: its cache is not one pair of {expected} {facts.dtype} tensors in "
            f"each of {facts.layers} layers; use a decoder-only model with full attention"
        )
