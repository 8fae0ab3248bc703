"""How many bytes of KV a model makes: a token, a session, a rank. Exact, in integers.

    full attention     tokens x KV heads x (key + value) elements, for ever
    sliding window     the same for all tokens when stored, for the last `window_tokens` only when restored
    latent (MLA)       tokens x one vector that all heads share
    linear             one state a sequence, whatever its length

Two lengths of the same KV: `stored_bytes` is what a store writes that keeps every token's KV, so that any prefix can be
resumed; `restored_bytes` is what a sequence of exactly this length needs in order to go on.
A GB is 10**9 bytes, a GiB 2**30; `units_text` shows both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forebay.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class KvFormat:
    """How a vector of KV lies in memory."""

    name: str
    element_bits: int
    group_elements: int = 0
    """Elements that share a scale, within a vector; 0: no scales a token (none, or one a tensor, which is nothing)."""
    scale_bytes: int = 0
    """Of each group."""
    rope_bits: int | None = None
    """Of the rotary part of a latent vector where it has a width of its own, without scales. None: as the rest."""

    def vector_bytes(self, elements: int) -> int:
        """Padded to whole bytes."""
        groups = -(-elements // self.group_elements) if self.group_elements else 0
        return -(-elements * self.element_bits // 8) + groups * self.scale_bytes


BF16 = KvFormat(name="bfloat16", element_bits=16)
FORMATS = {
    each.name: each
    for each in (
        BF16,
        KvFormat(name="float16", element_bits=16),
        KvFormat(name="float32", element_bits=32),
        KvFormat(name="fp8", element_bits=8),
        KvFormat(name="fp8_token_head", element_bits=8, group_elements=1 << 20, scale_bytes=4),
        KvFormat(name="int8_token_head", element_bits=8, group_elements=1 << 20, scale_bytes=4),
        KvFormat(name="int4_group32", element_bits=4, group_elements=32, scale_bytes=2),
        KvFormat(name="fp8_ds_mla", element_bits=8, group_elements=128, scale_bytes=4, rope_bits=16),
    )
}
"""`fp8`: a scale a tensor. `*_token_head`: a float32 scale for each vector of a token and head, keys and values apart.
`int4_group32`: a float16 scale for every 32 elements. `fp8_ds_mla`: 656 B a token and layer of DeepSeek-V3, as vLLM
keeps it: 512 fp8, 4 float32 scales, 64 bfloat16 rotary elements."""


@dataclass(frozen=True, slots=True)
class FullAttention:
    kv_heads: int
    key_elements: int
    value_elements: int

    def token_bytes(self, form: KvFormat) -> int:
        return self.kv_heads * (form.vector_bytes(self.key_elements) + form.vector_bytes(self.value_elements))


@dataclass(frozen=True, slots=True)
class SlidingAttention:
    """Looks back `window_tokens`, its own token among them."""

    heads: FullAttention
    window_tokens: int


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention: one compressed vector a token, and one rotary key that all heads share.

    Source: DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1.
    """

    latent_elements: int
    rope_elements: int

    def token_bytes(self, form: KvFormat) -> int:
        if form.rope_bits is None:
            return form.vector_bytes(self.latent_elements + self.rope_elements)
        return form.vector_bytes(self.latent_elements) + -(-self.rope_elements * form.rope_bits // 8)


@dataclass(frozen=True, slots=True)
class LinearAttention:
    """A gated delta net: a matrix a value head, and the last inputs of a short convolution."""

    key_heads: int
    value_heads: int
    key_elements: int
    value_elements: int
    convolution_tokens: int
    """Width of the convolution; what is kept are the inputs of one token fewer."""
    element_bytes: int

    def state_bytes(self) -> int:
        matrix = self.value_heads * self.key_elements * self.value_elements
        inputs = 2 * self.key_heads * self.key_elements + self.value_heads * self.value_elements
        return (matrix + inputs * (self.convolution_tokens - 1)) * self.element_bytes


@dataclass(frozen=True, slots=True)
class NoKv:
    """Reads the KV of an earlier layer, or has none."""


Layer = FullAttention | SlidingAttention | LatentAttention | LinearAttention | NoKv


@dataclass(frozen=True, slots=True)
class KvModel:
    """What of a model decides its KV."""

    name: str
    source: str
    """Where the figures come from."""
    layers: tuple[Layer, ...]
    """In order."""
    native: KvFormat = BF16
    """Of a KV cache for which nothing else is asked."""

    def token_bytes(self, form: KvFormat | None = None) -> int:
        """By which one more token lets a store grow. A linear layer does not grow."""
        return self.stored_bytes(1, form) - self.stored_bytes(0, form)

    def stored_bytes(self, tokens: int, form: KvFormat | None = None) -> int:
        """KV of every token in every layer, and one state of each linear layer."""
        return sum(_layer_bytes(layer, tokens, form or self.native, is_stored=True) for layer in self.layers)

    def restored_bytes(self, tokens: int, form: KvFormat | None = None) -> int:
        """What a sequence of so many tokens needs in order to go on."""
        return sum(_layer_bytes(layer, tokens, form or self.native, is_stored=False) for layer in self.layers)


def _layer_bytes(layer: Layer, tokens: int, form: KvFormat, *, is_stored: bool) -> int:
    match layer:
        case FullAttention() | LatentAttention():
            return tokens * layer.token_bytes(form)
        case SlidingAttention():
            return (tokens if is_stored else min(tokens, layer.window_tokens)) * layer.heads.token_bytes(form)
        case LinearAttention():
            return layer.state_bytes()
        case NoKv():
            return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One instance of a model over its ranks."""

    tensor_parallel: int = 1
    pipeline_parallel: int = 1

    @property
    def ranks(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel


@dataclass(frozen=True, slots=True)
class Shares:
    """Bytes of one thing over the ranks of an instance."""

    rank_bytes: tuple[int, ...]
    """Of one rank of each pipeline stage; the ranks of a stage hold equally much."""
    total_bytes: int
    """Over all ranks. More than one copy where ranks hold the same."""
    distinct_bytes: int
    """Each element counted once."""

    @property
    def largest_rank_bytes(self) -> int:
        return max(self.rank_bytes)

    @property
    def copies(self) -> float:
        """How often each element is held, on average."""
        return self.total_bytes / self.distinct_bytes if self.distinct_bytes else 1.0


def stored_shares(model: KvModel, tokens: int, layout: Layout, form: KvFormat | None = None) -> Shares:
    """`KvModel.stored_bytes` over ranks.

    KV heads are divided over tensor-parallel ranks; where there are more ranks than heads, each head is held by as many
    ranks as share it. A latent vector has no heads, so that each rank holds all of it. Raises ConfigError where heads
    and ranks do not divide one another, or where there are more stages than layers.
    """
    ranks = layout.tensor_parallel
    stages = stage_layers(len(model.layers), layout.pipeline_parallel)
    chosen, at = form or model.native, 0
    rank_bytes = []
    for count in stages:
        parts = [_rank_layer(layer, ranks, model.name) for layer in model.layers[at : at + count]]
        rank_bytes.append(sum(_layer_bytes(part, tokens, chosen, is_stored=True) for part in parts))
        at += count
    return Shares(tuple(rank_bytes), ranks * sum(rank_bytes), model.stored_bytes(tokens, form))


def stage_layers(layers: int, stages: int) -> Sequence[int]:
    """Layers of each pipeline stage, as vLLM divides them: what does not divide evenly goes before the last stage."""
    if not 1 <= stages <= layers:
        raise ConfigError(f"pipeline_parallel must be from 1 to the model's {layers} layers, not {stages}")
    left = layers % stages
    return [layers // stages + (stages - 1 - left <= stage < stages - 1) for stage in range(stages)]


def _rank_layer(layer: Layer, ranks: int, name: str) -> Layer:
    """What one of so many tensor-parallel ranks holds of a layer."""
    match layer:
        case FullAttention():
            return FullAttention(_rank_heads(layer.kv_heads, ranks, name), layer.key_elements, layer.value_elements)
        case SlidingAttention():
            heads = layer.heads
            count = _rank_heads(heads.kv_heads, ranks, name)
            return SlidingAttention(
                FullAttention(count, heads.key_elements, heads.value_elements), layer.window_tokens
            )  # fmt: skip
        case LinearAttention():
            return LinearAttention(
                _rank_heads(layer.key_heads, ranks, name),
                _rank_heads(layer.value_heads, ranks, name),
                layer.key_elements,
                layer.value_elements,
                layer.convolution_tokens,
                layer.element_bytes,
            )
        case LatentAttention() | NoKv():
            return layer


def _rank_heads(heads: int, ranks: int, name: str) -> int:
    if ranks < 1 or (heads % ranks and ranks % heads):
        raise ConfigError(f"{name} has {heads} KV heads, which {ranks} tensor-parallel ranks cannot divide evenly")
    return max(1, heads // ranks)


def units_text(quantity_bytes: float) -> str:
    """`7.67 GB = 7.14 GiB`: in both kinds of unit, so that nobody takes one for the other."""
    if quantity_bytes < 10_000:
        return f"{quantity_bytes:,.0f} B"
    power = next((power for power in (5, 4, 3, 2, 1) if abs(quantity_bytes) >= 1000**power), 0)
    letter = " kMGTP"[power]
    binary = "K" if letter == "k" else letter
    return f"{quantity_bytes / 1000**power:.2f} {letter}B = {quantity_bytes / 1024**power:.2f} {binary}iB"
