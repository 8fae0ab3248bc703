"""What a host engine needs for prefill and decode, by model and machine.

    prefill of n tokens after a context of c:   token_s * (n + n * (c + n / 2) / half_speed_tokens) + chunk_s a chunk
    one decode step of a batch:                 step_s + KV bytes a rank reads / kv_bytes_per_s
    a step of both:                             the prefill, and the KV that the decodes read

Prefill is linear in tokens, but for attention, which is linear in the pairs of tokens; `half_speed_tokens` follows from
the model's shape. A decode that rides along with a prefill is one token a step: that is the interference of the two.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import msgspec

from forebay.errors import ConfigError
from forebay.sim.files import read_small

_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e3)]
_Rate = Annotated[float, msgspec.Meta(ge=1)]
"""Infinite where there is no such limit."""
_MOST_FILE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProfile:
    """One instance of an engine: a model on so many ranks."""

    name: str
    ranks: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    """Accelerators of the instance."""
    kv_bytes_per_token: Annotated[int, msgspec.Meta(ge=1, le=10**9)]
    """Over all ranks."""
    token_s: _Seconds
    """Of prefill, without context."""
    half_speed_tokens: _Rate
    """After so much context, a token of prefill takes twice as long."""
    step_s: _Seconds
    """Of a decode step without context: weights, launches, communication."""
    kv_bytes_per_s: _Rate
    """At which a rank reads KV in a decode step."""
    chunk_tokens: Annotated[int, msgspec.Meta(ge=1, le=10**9)] = 2048
    """Of prefill in one step, at most: vLLM's default of max_num_batched_tokens."""
    chunk_s: _Seconds = 0.0
    """Of each chunk, however few its tokens: launches, and weights that few tokens do not keep busy."""
    source: str

    def prefill_s(self, tokens: int, context_tokens: int) -> float:
        pairs = tokens * (context_tokens + tokens / 2)
        chunks = -(-tokens // self.chunk_tokens)
        return self.token_s * (tokens + pairs / self.half_speed_tokens) + self.chunk_s * chunks

    def decode_s(self, batch: int, context_tokens: float) -> float:
        """One step; `context_tokens` is the mean of the batch."""
        return self.step_s + self._kv_s(batch, context_tokens)

    def mixed_s(self, tokens: int, context_tokens: int, batch: int, batch_context_tokens: float) -> float:
        """A step that computes a chunk of a prefill and one token for each of a batch."""
        return self.prefill_s(tokens, context_tokens) + self._kv_s(batch, batch_context_tokens)

    def _kv_s(self, batch: int, context_tokens: float) -> float:
        return batch * context_tokens * self.kv_bytes_per_token / self.ranks / self.kv_bytes_per_s


def half_speed_tokens(active_parameters: float, layers: int, query_heads: int, head_dim: int) -> float:
    """Context after which attention costs a token as much as everything else: 2 FLOP a parameter against 4 FLOP a
    layer, head, dimension and earlier token (J. Kaplan et al., "Scaling laws for neural language models", 2020)."""
    return 2 * active_parameters / (4 * layers * query_heads * head_dim)


_QWEN3_CODER_480B = half_speed_tokens(35e9, 62, 96, 128)
"""Qwen3-Coder-480B-A35B: config.json and model card."""
_MI308X = "fitted on published storms of 8 x MI308X, vLLM 0.20 (docs/sizing.md)"

_PROFILES = {
    profile.name: profile
    for profile in (
        EngineProfile(
            name="qwen3-coder-480b-fp8/8xmi308x", ranks=8, kv_bytes_per_token=253_952, token_s=3.17e-4,
            half_speed_tokens=_QWEN3_CODER_480B, step_s=0.0203, kv_bytes_per_s=2.4e12, source=_MI308X,
        ),
        EngineProfile(
            name="qwen3-coder-480b-fp8/4xmi308x", ranks=4, kv_bytes_per_token=253_952, token_s=3.75e-4,
            half_speed_tokens=_QWEN3_CODER_480B, step_s=0.0203, kv_bytes_per_s=2.4e12, source=_MI308X,
        ),
        EngineProfile(
            name="qwen2.5-32b/1xmi308x", ranks=1, kv_bytes_per_token=262_144, token_s=2 * 32.8e9 / (0.5 * 188e12),
            half_speed_tokens=half_speed_tokens(32.8e9, 64, 40, 128), step_s=65.6e9 / 3.0e12, kv_bytes_per_s=2.4e12,
            source="not fitted: half of 188e12 FLOP/s of bf16, weights at 3.0e12 of 5.3e12 B/s of HBM",
        ),
    )
}  # fmt: skip


def profile_names() -> tuple[str, ...]:
    return tuple(_PROFILES)


def profile_named(name: str, folder: Path = Path()) -> EngineProfile:
    """One of the table, or that of a `.toml` file, from `folder` on. Raises ConfigError for a name of neither."""
    if name.endswith(".toml"):
        return read_profile(folder / name)
    if name not in _PROFILES:
        raise ConfigError(
            f"no engine profile is named {name!a}: there are {', '.join(_PROFILES)}, or give a .toml file"
        )
    return _PROFILES[name]


def read_profile(path: Path) -> EngineProfile:
    """A measured one: TOML with the fields of `EngineProfile`. Raises ConfigError for anything else."""
    content = read_small(path, _MOST_FILE_BYTES, "an engine's profile", "the profile ")
    try:
        found: dict[str, Any] = tomllib.loads(content.decode())
        unknown = found.keys() - {each.name for each in fields(EngineProfile)}
        if unknown:
            raise ConfigError(f"{path}: an engine profile has no {min(unknown)[:40]!a}")
        return msgspec.convert(found, EngineProfile)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError, RecursionError) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from None
