"""A model's KV, read from its Hugging Face config.json. The file is not trusted, and nothing in it is guessed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec

from forebay.errors import ConfigError
from forebay.sim.files import read_small
from forebay.sim.sizing import (
    FORMATS,
    FullAttention,
    KvModel,
    LatentAttention,
    Layer,
    LinearAttention,
    NoKv,
    SlidingAttention,
)  # fmt: skip

_MOST_BYTES = 1 << 20
Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
_STRANGERS = (
    "hybrid_override_pattern",
    "mamba_d_state",
    "ssm_state_size",
    "attn_layer_period",
    "index_topk",
    "ssm_cfg",
)
"""Signs of a cache that is neither KV nor one of the states known here."""


class _Config(msgspec.Struct):
    """What matters of it, under the names that models use."""

    num_hidden_layers: Count
    num_attention_heads: Count
    hidden_size: Count | None = None
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    kv_lora_rank: Count | None = None
    qk_rope_head_dim: Count | None = None
    layer_types: list[str] | None = None
    sliding_window: Count | None = None
    use_sliding_window: bool | None = None
    max_window_layers: int | None = None
    sliding_window_pattern: Count | None = None
    _sliding_window_pattern: Count | None = None
    full_attention_interval: Count | None = None
    num_kv_shared_layers: int | None = None
    linear_num_key_heads: Count | None = None
    linear_num_value_heads: Count | None = None
    linear_key_head_dim: Count | None = None
    linear_value_head_dim: Count | None = None
    linear_conv_kernel_dim: Count | None = None
    model_type: str = ""


def read_model(path: Path) -> KvModel:
    """Raises ConfigError for what cannot be read, or describes a cache that this arithmetic does not know."""
    file = path / "config.json" if path.is_dir() else path
    text = read_small(file, _MOST_BYTES, "a model's config.json")
    try:
        found = msgspec.json.decode(text, type=dict[str, Any])
        inner = found.get("text_config", found)
        return parse_model(inner, name=file.resolve().parent.name, source=str(file))
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise ConfigError(f"{file}: {error}") from None


def parse_model(config: dict[str, Any], *, name: str, source: str) -> KvModel:
    """Raises ConfigError, or msgspec.ValidationError for a value of a wrong kind."""
    strange = [key for key in _STRANGERS if isinstance(config, dict) and config.get(key) is not None]
    if strange:
        raise ConfigError(f"{source}: {strange[0]} means a cache besides KV, of which this arithmetic knows nothing")
    found = msgspec.convert(config, _Config)
    layers = _layers(found, source)
    shared = found.num_kv_shared_layers or 0
    if not 0 <= shared < len(layers):
        raise ConfigError(f"{source}: num_kv_shared_layers must be from 0 to the number of layers, not {shared}")
    kept = (*layers[: len(layers) - shared], *(NoKv(),) * shared)
    dtype = found.dtype or found.torch_dtype or "bfloat16"
    if dtype not in FORMATS:
        raise ConfigError(f"{source}: dtype {dtype[:40]!a} is none of {', '.join(FORMATS)}")
    return KvModel(name, source, kept, FORMATS[dtype])


def _layers(found: _Config, source: str) -> tuple[Layer, ...]:
    count = found.num_hidden_layers
    if found.kv_lora_rank is not None:
        if found.qk_rope_head_dim is None:
            raise ConfigError(f"{source}: kv_lora_rank without qk_rope_head_dim")
        return (LatentAttention(found.kv_lora_rank, found.qk_rope_head_dim),) * count
    full = _full(found, source)
    kinds = _kinds(found)
    if len(kinds) != count:
        raise ConfigError(f"{source}: {len(kinds)} layer_types for {count} layers")
    made: dict[str, Layer] = {"full_attention": full}
    if "sliding_attention" in kinds:
        if found.sliding_window is None:
            raise ConfigError(f"{source}: sliding layers without a sliding_window")
        made["sliding_attention"] = SlidingAttention(full, found.sliding_window)
    if "linear_attention" in kinds:
        made["linear_attention"] = _linear(found, source)
    unknown = sorted(set(kinds) - set(made))
    if unknown:
        raise ConfigError(f"{source}: layers of type {unknown[0][:40]!a} are not known here")
    return tuple(made[kind] for kind in kinds)


def _full(found: _Config, source: str) -> FullAttention:
    heads = found.num_key_value_heads or found.num_attention_heads
    elements = found.head_dim
    if elements is None:
        if found.hidden_size is None or found.hidden_size % found.num_attention_heads:
            raise ConfigError(f"{source}: no head_dim, and hidden_size is no multiple of num_attention_heads")
        elements = found.hidden_size // found.num_attention_heads
    return FullAttention(heads, elements, elements)


def _kinds(found: _Config) -> list[str]:
    """The kind of each layer: named, by a pattern, or all alike."""
    count = found.num_hidden_layers
    if found.layer_types is not None:
        return found.layer_types
    if found.full_attention_interval is not None:
        return [_every(at, found.full_attention_interval, "linear_attention") for at in range(count)]
    if found.sliding_window is None or found.use_sliding_window is False:
        return ["full_attention"] * count
    pattern = found.sliding_window_pattern or found._sliding_window_pattern
    if pattern is None and found.model_type.startswith("gemma3"):
        pattern = 6  # of Gemma 3, where its config.json says nothing of it
    if pattern is not None:
        return [_every(at, pattern, "sliding_attention") for at in range(count)]
    if found.use_sliding_window:  # Qwen2: the first ones look back all the way
        first = found.max_window_layers or 0
        return ["full_attention" if at < first else "sliding_attention" for at in range(count)]
    return ["sliding_attention"] * count


def _every(at: int, interval: int, otherwise: str) -> str:
    return otherwise if (at + 1) % interval else "full_attention"


def _linear(found: _Config, source: str) -> LinearAttention:
    match (
        found.linear_num_key_heads,
        found.linear_num_value_heads,
        found.linear_key_head_dim,
        found.linear_value_head_dim,
        found.linear_conv_kernel_dim,
    ):
        case (int(keys), int(values), int(key_elements), int(value_elements), int(width)):
            return LinearAttention(keys, values, key_elements, value_elements, width, element_bytes=2)
    raise ConfigError(f"{source}: linear layers without all of linear_num_*_heads, linear_*_head_dim, linear_conv_*")
