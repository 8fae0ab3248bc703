"""Common models, by what decides their KV. Each from the model's public config.json, and by whom that is shown.

What could not be looked up is not here: give the model's own config.json instead (`forebay.sim.hfconfig`).
"""

from __future__ import annotations

from forebay.errors import ConfigError
from forebay.sim.sizing import (
    FullAttention,
    KvModel,
    LatentAttention,
    Layer,
    LinearAttention,
    SlidingAttention,
)  # fmt: skip

_LITGPT = "as in Lightning-AI/litgpt, litgpt/config.py"
_TRANSFORMERS = "as in huggingface/transformers, the defaults of its configuration class"
_AICONFIGURATOR = "as in ai-dynamo/aiconfigurator, model_configs"


def _heads(kv_heads: int, elements: int) -> FullAttention:
    return FullAttention(kv_heads, elements, elements)


def _grouped(name: str, seen: str, layers: int, kv_heads: int, elements: int) -> KvModel:
    return KvModel(name, _source(name, seen), (_heads(kv_heads, elements),) * layers)


def _latent(name: str, seen: str, layers: int) -> KvModel:
    return KvModel(name, _source(name, seen), (LatentAttention(512, 64),) * layers)


def _windowed(name: str, seen: str, layers: int, heads: FullAttention, window_tokens: int, every: int) -> KvModel:
    """Every so-manyth layer looks back all the way, the others over the window."""
    windowed: Layer = SlidingAttention(heads, window_tokens)
    return KvModel(
        name, _source(name, seen), tuple(windowed if (at + 1) % every else heads for at in range(layers))
    )  # fmt: skip


def _qwen3_next() -> KvModel:
    linear, full = LinearAttention(16, 32, 128, 128, 4, element_bytes=2), _heads(2, 256)
    name = "Qwen/Qwen3-Next-80B-A3B-Thinking"
    return KvModel(name, _source(name, _AICONFIGURATOR), tuple(linear if (at + 1) % 4 else full for at in range(48)))


def _source(name: str, seen: str) -> str:
    return f"config.json of {name}, {seen}"


MODELS = (
    KvModel(
        "Qwen/Qwen3-Coder-480B-A35B-Instruct",
        "config.json of Qwen/Qwen3-Coder-480B-A35B-Instruct, and the 253,952 B a token of published measurements of it",
        (_heads(8, 128),) * 62,
    ),
    _grouped("Qwen/Qwen3-VL-235B-A22B-Thinking", _AICONFIGURATOR, 94, 4, 128),
    KvModel(
        "Qwen/Qwen3-235B-A22B",
        "config.json of Qwen/Qwen3-235B-A22B; its text layers are those of Qwen/Qwen3-VL-235B-A22B-Thinking, "
        + _AICONFIGURATOR,
        (_heads(4, 128),) * 94,
    ),
    _qwen3_next(),
    _grouped("Qwen/Qwen2.5-7B", _LITGPT, 28, 4, 128),
    _grouped("Qwen/Qwen2.5-14B", _LITGPT, 48, 8, 128),
    _grouped("Qwen/Qwen2.5-32B", _LITGPT, 64, 8, 128),
    _grouped("Qwen/Qwen2.5-72B", _LITGPT, 80, 8, 128),
    KvModel(
        "meta-llama/Meta-Llama-3-8B",
        "config.json of meta-llama/Meta-Llama-3-8B: 32 layers, 32 heads of 4096 elements, 8 KV heads",
        (_heads(8, 128),) * 32,
    ),
    _grouped("meta-llama/Llama-3.3-70B-Instruct", _AICONFIGURATOR, 80, 8, 128),
    _latent("deepseek-ai/DeepSeek-V3", _TRANSFORMERS, 61),
    _latent("moonshotai/Kimi-K2-Instruct", _AICONFIGURATOR, 61),
    _windowed("openai/gpt-oss-120b", _TRANSFORMERS, 36, _heads(8, 64), 128, 2),
    _windowed(
        "openai/gpt-oss-20b", "as in EchoCog/gpt-oss-20b, docs/gpt-oss-20b-architecture.md", 24, _heads(8, 64), 128, 2
    ),
    _windowed("google/gemma-3-1b-it", _LITGPT, 26, _heads(1, 256), 512, 6),
    _windowed("google/gemma-3-4b-it", _LITGPT, 34, _heads(4, 256), 1024, 6),
    _windowed("google/gemma-3-12b-it", _LITGPT, 48, _heads(8, 256), 1024, 6),
    _windowed("google/gemma-3-27b-it", _LITGPT, 62, _heads(16, 128), 1024, 6),
    _grouped("mistralai/Mistral-7B-v0.3", _LITGPT, 32, 8, 128),
    _grouped("mistralai/Mistral-Large-Instruct-2407", _LITGPT, 88, 8, 128),
    _grouped("HuggingFaceTB/SmolLM2-135M", _LITGPT, 30, 3, 64),
    _grouped("HuggingFaceTB/SmolLM2-360M-Instruct", _LITGPT, 32, 5, 64),
)


def find_model(name: str) -> KvModel:
    """By its whole name or the part behind the slash, in any case. Raises ConfigError with the names there are."""
    wanted = name.lower()
    for model in MODELS:
        if wanted in (model.name.lower(), model.name.lower().rpartition("/")[2]):
            return model
    known = ", ".join(model.name.rpartition("/")[2] for model in MODELS)
    raise ConfigError(f"no model {name[:80]!a} is built in: give its config.json, or one of {known}")
