"""KV arithmetic: known figures, layouts, formats, and config.json as models have it and as nobody should."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import ConfigError
from forebay.sim.hfconfig import read_model
from forebay.sim.models import MODELS, find_model
from forebay.sim.sizing import (
    BF16,
    FORMATS,
    FullAttention,
    KvModel,
    LatentAttention,
    Layer,
    Layout,
    LinearAttention,
    SlidingAttention,
    stage_layers,
    stored_shares,
    units_text,
)  # fmt: skip

CODER, DEEPSEEK, OSS = (
    find_model("Qwen3-Coder-480B-A35B-Instruct"),
    find_model("DeepSeek-V3"),
    find_model("gpt-oss-120b"),
)


LAYERS: dict[str, tuple[int, Layer]] = {
    "Qwen/Qwen3-Coder-480B-A35B-Instruct": (62, FullAttention(8, 128, 128)),
    "Qwen/Qwen3-VL-235B-A22B-Thinking": (94, FullAttention(4, 128, 128)),
    "Qwen/Qwen3-235B-A22B": (94, FullAttention(4, 128, 128)),
    "Qwen/Qwen3-Next-80B-A3B-Thinking": (48, FullAttention(2, 256, 256)),
    "Qwen/Qwen2.5-7B": (28, FullAttention(4, 128, 128)),
    "Qwen/Qwen2.5-14B": (48, FullAttention(8, 128, 128)),
    "Qwen/Qwen2.5-32B": (64, FullAttention(8, 128, 128)),
    "Qwen/Qwen2.5-72B": (80, FullAttention(8, 128, 128)),
    "meta-llama/Meta-Llama-3-8B": (32, FullAttention(8, 128, 128)),
    "meta-llama/Llama-3.3-70B-Instruct": (80, FullAttention(8, 128, 128)),
    "deepseek-ai/DeepSeek-V3": (61, LatentAttention(512, 64)),
    "moonshotai/Kimi-K2-Instruct": (61, LatentAttention(512, 64)),
    "openai/gpt-oss-120b": (36, FullAttention(8, 64, 64)),
    "openai/gpt-oss-20b": (24, FullAttention(8, 64, 64)),
    "google/gemma-3-1b-it": (26, FullAttention(1, 256, 256)),
    "google/gemma-3-4b-it": (34, FullAttention(4, 256, 256)),
    "google/gemma-3-12b-it": (48, FullAttention(8, 256, 256)),
    "google/gemma-3-27b-it": (62, FullAttention(16, 128, 128)),
    "mistralai/Mistral-7B-v0.3": (32, FullAttention(8, 128, 128)),
    "mistralai/Mistral-Large-Instruct-2407": (88, FullAttention(8, 128, 128)),
    "HuggingFaceTB/SmolLM2-135M": (30, FullAttention(3, 64, 64)),
    "HuggingFaceTB/SmolLM2-360M-Instruct": (32, FullAttention(5, 64, 64)),
}
"""By each model's config.json: its layers, and the kind of those that look back all the way."""
WINDOWS = {"openai/gpt-oss": (128, 2), "google/gemma-3-1b": (512, 6), "google/gemma-3-": (1024, 6)}
"""Tokens that the other layers look back, and every which one looks back all the way; the first that fits counts."""


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_every_model_of_the_table_has_the_layers_of_its_config(model: KvModel) -> None:
    layers, whole = LAYERS[model.name]
    assert len(model.layers) == layers
    window = next((each for name, each in WINDOWS.items() if model.name.startswith(name)), None)
    for at, layer in enumerate(model.layers, start=1):
        if "Qwen3-Next" in model.name and at % 4:
            assert isinstance(layer, LinearAttention)
        elif window is not None and at % window[1]:
            assert isinstance(whole, FullAttention)
            assert layer == SlidingAttention(whole, window[0])
        else:
            assert layer == whole


@pytest.mark.parametrize(
    ("name", "token_bytes"),
    [
        ("Qwen3-Coder-480B-A35B-Instruct", 253_952),
        ("DeepSeek-V3", 61 * 576 * 2),
        ("Qwen3-235B-A22B", 94 * 4 * 128 * 2 * 2),
        ("Qwen2.5-32B", 262_144),
        ("Meta-Llama-3-8B", 131_072),
        ("Llama-3.3-70B-Instruct", 327_680),
        ("gpt-oss-120b", 36 * 8 * 64 * 2 * 2),
        ("gpt-oss-20b", 24 * 8 * 64 * 2 * 2),
        ("gemma-3-27b-it", 62 * 16 * 128 * 2 * 2),
        ("Mistral-7B-v0.3", 131_072),
        ("SmolLM2-135M", 30 * 3 * 64 * 2 * 2),
        ("Qwen3-Next-80B-A3B-Thinking", 12 * 2 * 256 * 2 * 2),
    ],
)
def test_bytes_a_token_of_known_models(name: str, token_bytes: int) -> None:
    assert find_model(name).token_bytes(BF16) == token_bytes


def test_a_published_session_comes_out_to_the_byte() -> None:
    assert CODER.stored_bytes(118 * 256) == 7_671_382_016
    assert units_text(CODER.stored_bytes(118 * 256)) == "7.67 GB = 7.14 GiB"
    shares = stored_shares(CODER, 256, Layout(tensor_parallel=8))
    assert shares.largest_rank_bytes == 8_126_464  # one of the 944 files of a session
    assert stored_shares(CODER, 256, Layout(tensor_parallel=4)).largest_rank_bytes == 2 * 8_126_464


def test_more_ranks_than_heads_hold_copies_and_a_latent_vector_is_held_by_each() -> None:
    copied = stored_shares(CODER, 1000, Layout(tensor_parallel=16))
    assert copied.largest_rank_bytes == 1000 * 62 * 128 * 2 * 2
    assert copied.copies == 2
    latent = stored_shares(DEEPSEEK, 1000, Layout(tensor_parallel=8))
    assert latent.rank_bytes == (1000 * 61 * 576 * 2,)
    assert latent.total_bytes == 8 * latent.distinct_bytes


def test_stages_are_divided_as_vllm_divides_them() -> None:
    assert stage_layers(62, 4) == [15, 16, 16, 15]
    assert stage_layers(62, 8) == [7, 8, 8, 8, 8, 8, 8, 7]
    shares = stored_shares(CODER, 10, Layout(tensor_parallel=2, pipeline_parallel=4))
    assert [found * 8 for found in shares.rank_bytes] == [10 * 4 * 4096 * layers for layers in (15, 16, 16, 15)]
    with pytest.raises(ConfigError, match="from 1 to the model's 62 layers"):
        stored_shares(CODER, 10, Layout(pipeline_parallel=63))
    with pytest.raises(ConfigError, match="3 tensor-parallel ranks"):
        stored_shares(CODER, 10, Layout(tensor_parallel=3))


def test_a_window_is_stored_whole_and_restored_in_part() -> None:
    layer_bytes = 8 * 64 * 2 * 2
    assert OSS.stored_bytes(10_000) == 36 * 10_000 * layer_bytes
    assert OSS.restored_bytes(10_000) == 18 * 10_000 * layer_bytes + 18 * 128 * layer_bytes
    assert OSS.restored_bytes(100) == OSS.stored_bytes(100)


def test_a_linear_layer_keeps_one_state_whatever_the_length() -> None:
    model = find_model("Qwen3-Next-80B-A3B-Thinking")
    state = 36 * (32 * 128 * 128 + 3 * (2 * 16 * 128 + 32 * 128)) * 2
    assert model.stored_bytes(0) == state
    assert model.stored_bytes(1000) == state + 1000 * model.token_bytes()
    assert stored_shares(model, 1000, Layout(tensor_parallel=2)).copies == 1


def test_formats_count_their_scales() -> None:
    assert CODER.token_bytes(FORMATS["fp8"]) == 253_952 // 2
    assert CODER.token_bytes(FORMATS["fp8_token_head"]) == 253_952 // 2 + 62 * 8 * 2 * 4
    assert CODER.token_bytes(FORMATS["int4_group32"]) == 253_952 // 4 + 62 * 8 * 2 * 4 * 2
    assert DEEPSEEK.token_bytes(FORMATS["fp8_ds_mla"]) == 61 * 656


layers = st.one_of(
    st.builds(FullAttention, st.sampled_from([1, 2, 4, 8]), st.just(64), st.just(128)),
    st.builds(SlidingAttention, st.builds(FullAttention, st.just(4), st.just(64), st.just(64)), st.integers(1, 300)),
    st.builds(LatentAttention, st.just(512), st.just(64)),
    st.builds(LinearAttention, st.just(8), st.just(16), st.just(32), st.just(32), st.just(4), st.just(2)),
)


@given(
    st.lists(layers, min_size=4, max_size=12),
    st.integers(0, 2000),
    st.sampled_from([1, 2, 4, 8, 16]),
    st.integers(1, 4),
)
def test_ranks_hold_everything_once_or_more(found: list[Layer], tokens: int, ranks: int, stages: int) -> None:
    model = KvModel("m", "s", tuple(found))
    shares = stored_shares(model, tokens, Layout(tensor_parallel=ranks, pipeline_parallel=stages))
    assert shares.total_bytes >= shares.distinct_bytes
    assert shares.total_bytes == ranks * sum(shares.rank_bytes)
    if ranks == 1:
        assert shares.total_bytes == shares.distinct_bytes
    assert model.restored_bytes(tokens) <= model.stored_bytes(tokens)
    assert model.stored_bytes(tokens + 1) - model.stored_bytes(tokens) == model.token_bytes()


# ---- config.json

DENSE = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 512}


def written(folder: Path, config: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (
            {"num_hidden_layers": 62, "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128},
            "Qwen3-Coder-480B-A35B-Instruct",
        ),
        (
            {"num_hidden_layers": 61, "num_attention_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64},
            "DeepSeek-V3",
        ),
        (
            {"num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
             "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 18},
            "gpt-oss-120b",
        ),
        (
            {"text_config": {"model_type": "gemma3_text", "num_hidden_layers": 34, "num_attention_heads": 8,
                             "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 1024}},
            "gemma-3-4b-it",
        ),
        (
            {"num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
             "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
             "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128},
            "Qwen3-Next-80B-A3B-Thinking",
        ),
    ],
)  # fmt: skip
def test_a_config_gives_the_layers_of_the_table(tmp_path: Path, config: dict[str, Any], name: str) -> None:
    model = read_model(written(tmp_path, config))
    assert model.layers == find_model(name).layers
    assert read_model(tmp_path).layers == model.layers  # by its folder


def test_windows_that_are_off_and_layers_that_share_are_taken_for_what_they_are(tmp_path: Path) -> None:
    full = (FullAttention(2, 64, 64),) * 4
    off = {**DENSE, "sliding_window": 64, "use_sliding_window": False}
    assert read_model(written(tmp_path, off)).layers == full
    assert read_model(written(tmp_path, {**DENSE, "torch_dtype": "float32"})).token_bytes() == 4 * 2 * 64 * 2 * 4
    shared = read_model(written(tmp_path, {**DENSE, "num_kv_shared_layers": 2}))
    assert shared.token_bytes() == 2 * 2 * 64 * 2 * 2
    late = {**DENSE, "sliding_window": 64, "use_sliding_window": True, "max_window_layers": 3}
    assert read_model(written(tmp_path, late)).layers == (*full[:3], SlidingAttention(full[0], 64))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ([], "Expected `object`"),
        ({"text_config": 5}, "Expected `object`"),
        ({"num_attention_heads": 8}, "num_hidden_layers"),
        ({**DENSE, "num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({**DENSE, "num_hidden_layers": 0}, "num_hidden_layers"),
        ({**DENSE, "hidden_size": 100}, "no multiple"),
        ({**DENSE, "layer_types": ["full_attention"]}, "1 layer_types for 4 layers"),
        ({**DENSE, "layer_types": ["mamba"] * 4}, "'mamba'"),
        ({**DENSE, "layer_types": ["sliding_attention"] * 4}, "without a sliding_window"),
        ({**DENSE, "layer_types": ["linear_attention"] * 4}, "linear layers"),
        ({**DENSE, "dtype": "int3"}, "'int3'"),
        ({**DENSE, "num_kv_shared_layers": 9}, "num_kv_shared_layers"),
        ({**DENSE, "kv_lora_rank": 512}, "qk_rope_head_dim"),
        ({**DENSE, "mamba_d_state": 16}, "mamba_d_state"),
        ({**DENSE, "index_topk": 2048}, "index_topk"),
    ],
)
def test_a_config_that_is_not_understood_is_refused_by_name(tmp_path: Path, config: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        read_model(written(tmp_path, config))
    assert "\n" not in str(refused.value)


def test_files_that_are_no_config_are_refused(tmp_path: Path) -> None:
    for content in (b"", b"\xff\xfe", b"{", b"[" * 100_000, b" " * (1 << 21)):
        (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(ConfigError):
            read_model(tmp_path)
    with pytest.raises(ConfigError, match="cannot read"):
        read_model(tmp_path / "absent.json")


def test_every_model_of_the_table_has_a_name_of_its_own() -> None:
    assert len(MODELS) == len(LAYERS)
    assert len({model.name.lower() for model in MODELS}) == len(MODELS)
    with pytest.raises(ConfigError, match="Mistral-7B"):
        find_model("gpt-9")


def test_units_are_never_mixed() -> None:
    assert units_text(253_952) == "253.95 kB = 248.00 KiB"
    assert units_text(576) == "576 B"
    assert units_text(4 * 2**30) == "4.29 GB = 4.00 GiB"
    assert units_text(2e18) == "2000.00 PB = 1776.36 PiB"
