"""Small Qwen3 models of random weights, for tests and benchmarks with a real engine."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Shape:
    vocabulary: int
    """Tokens 0 up to, not including, this."""
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    longest_tokens: int
    initializer_range: float = 0.02
    query_scale: float = 1.0
    """Of the norm in front of attention: how sharp it is."""


RESTORE = Shape(
    vocabulary=8192, hidden=512, intermediate=1536, layers=6, heads=8, kv_heads=4, head_dim=64, longest_tokens=32768
)
"""23 million parameters, 12 KiB of KV a token in float32: large enough that loading and computing can be timed."""

TELLING = Shape(
    vocabulary=512, hidden=128, intermediate=256, layers=2, heads=4, kv_heads=2, head_dim=32, longest_tokens=8192,
    initializer_range=0.2, query_scale=4.0,
)  # fmt: skip
"""Answers that depend on the whole prompt: weights are large enough, and attention sharp enough, that the residual
stream is not just the last token. With the usual random weights wrong KV would give the right tokens."""


def save_model(path: Path, shape: Shape, seed: int = 0) -> None:
    """Write configuration and weights in float32. Needs torch and transformers."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.longest_tokens,
        initializer_range=shape.initializer_range,
        tie_word_embeddings=False,
    )
    model = Qwen3ForCausalLM(config)
    for layer in model.model.layers:
        layer.self_attn.q_norm.weight.data.fill_(shape.query_scale)
    model.save_pretrained(path)


def save_tokenizer(path: Path, shape: Shape) -> None:
    """A word for each token, `w0 w1 w2 ...`: text and tokens convert into each other exactly."""
    words = [*(f"w{token}" for token in range(shape.vocabulary - 2)), "<unk>", "</s>"]
    special = [
        {
            "id": token, "content": words[token], "special": True, "normalized": False, "single_word": False,
            "lstrip": False, "rstrip": False,
        }
        for token in (shape.vocabulary - 2, shape.vocabulary - 1)
    ]  # fmt: skip
    tokenizer = {
        "version": "1.0",
        "added_tokens": special,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": {word: i for i, word in enumerate(words)}, "unk_token": "<unk>"},
    }
    absent = ("truncation", "padding", "normalizer", "post_processor", "decoder")
    (path / "tokenizer.json").write_text(json.dumps(tokenizer | dict.fromkeys(absent)))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "eos_token": "</s>",
        "model_max_length": shape.longest_tokens, "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
