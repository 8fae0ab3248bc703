"""Loading, identity, and the models that are refused."""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from connector_kit import TINY, tiny_model  # noqa: E402

from forebay.assemble import StoreConfig  # noqa: E402
from forebay.connectors.transformers import (  # noqa: E402
    ByteTokenizer,
    Directory,
    Packaged,
    RunnerOptions,
    adopt_model,
    load_model,
    namespace_of,
    weights_digest,
)
from forebay.connectors.transformers.runner import Runner  # noqa: E402
from forebay.errors import ConfigError  # noqa: E402
from forebay.keys import block_keys, namespace_key  # noqa: E402

pytestmark = pytest.mark.model
SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
}  # fmt: skip


def test_a_saved_model_comes_back_with_the_same_identity(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    made = load_model(TINY)
    made.model.save_pretrained(tmp_path / "anywhere")
    capfd.readouterr()
    again = load_model(Directory(tmp_path / "anywhere"))
    assert again.weights_digest == made.weights_digest
    assert namespace_of(again, 16) == namespace_of(made, 16)  # wherever the files lie
    assert again.name == "anywhere"
    assert again.tokenizer is None
    assert capfd.readouterr() == ("", "")


def test_the_digest_sees_every_weight_and_the_configuration() -> None:
    digests = {tiny_model().weights_digest, tiny_model(replace(TINY, seed=1)).weights_digest}
    model = load_model(TINY).model
    assert weights_digest(model) in digests
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 5] += 1e-3
    digests.add(weights_digest(model))
    digests.add(weights_digest(model.double()))
    model.config.rope_parameters["rope_theta"] = 12345.0
    digests.add(weights_digest(model))
    assert len(digests) == 5


def test_the_namespace_is_filled_from_the_model() -> None:
    loaded = tiny_model()
    namespace = namespace_of(loaded, 16)
    assert namespace.block_bytes == 2 * 2 * 2 * 16 * 16 * 4  # layers, K and V, heads, tokens, dim, bytes
    assert (namespace.layers, namespace.kv_heads, namespace.head_dim, namespace.kv_dtype) == (2, 2, 16, "float32")
    assert namespace.rope == '{"rope_theta":10000.0,"rope_type":"default"}'
    assert namespace.weights_digest == loaded.weights_digest
    salted = namespace_of(loaded, 16, tenant_salt="one")
    assert "one" not in str(salted)
    assert namespace_key(salted) != namespace_key(namespace)
    with pytest.raises(ConfigError, match="1 token"):
        namespace_of(loaded, 0)


def test_two_ways_to_compute_attention_share_no_key() -> None:
    """Their KV differs in the last bits, so that what one left would not be what the other computes."""
    loaded = load_model(TINY)
    tokens = torch.arange(200)[None]
    layouts, keys, layers = [], [], []
    for attention in ("sdpa", "eager"):
        loaded.model.set_attn_implementation(attention)
        namespace = namespace_of(loaded, 16)
        layouts.append(namespace.layout)
        keys.append(set(block_keys(namespace, tokens[0].numpy())))
        with torch.inference_mode():
            layers.append(loaded.model(tokens, use_cache=True).past_key_values.layers[1].keys)
    assert layouts == [f"transformers/{each}/cpu/[layer,kv,head,token,dim]" for each in ("sdpa", "eager")]
    assert not keys[0] & keys[1]
    assert layers[0].shape == layers[1].shape
    assert not torch.equal(*layers)


def test_a_salt_that_is_no_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="tenant_salt"):
        namespace_of(tiny_model(), 16, tenant_salt="\udcff")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"half_life": 0.0}, "half_life"),
        ({"half_life": float("nan")}, "half_life"),
        ({"half_life": float("inf")}, "half_life"),
        ({"load_deadline_s": float("nan")}, "load_deadline_s"),
        ({"load_deadline_s": float("inf")}, "load_deadline_s"),
        ({"load_deadline_s": 1e300}, "load_deadline_s"),
        ({"load_deadline_s": -1.0}, "load_deadline_s"),
        ({"window_bytes": 0}, "window_bytes"),
        ({"backlog_bytes": -1}, "backlog_bytes"),
    ],
)
def test_options_that_cannot_work_are_refused_in_one_line(options: dict[str, float], says: str, tmp_path: Path) -> None:
    loaded = tiny_model()
    config = StoreConfig.embedded([tmp_path / "pool"], host_bytes=2**20, capacity_bytes=2**20)
    with pytest.raises(ConfigError, match=says) as caught:
        Runner.open(loaded, namespace_of(loaded, 16), config, RunnerOptions(**options))
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_block_of_no_tokens_is_refused(tmp_path: Path) -> None:
    loaded = tiny_model()
    config = StoreConfig.embedded([tmp_path / "pool"], host_bytes=2**20, capacity_bytes=2**20)
    with pytest.raises(ConfigError, match="1 token or more"):
        Runner.open(loaded, replace(namespace_of(loaded, 16), block_tokens=0), config)


def test_bytes_are_tokens() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode("Grüße, 世界")) == "Grüße, 世界"
    assert tokenizer.decode([256 + 65]) == "A"


def test_missing_models_are_said_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for source, message in (
        (Directory(tmp_path / "none"), "no model at"),
        (Directory(tmp_path / "empty"), "cannot load"),
        (Packaged(package="no_such_package"), "pip install"),
        (Packaged(package="msgspec", file="none.gguf"), "pip install"),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            load_model(source)
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="floating-point"):
        load_model(TINY, dtype="int8")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "model"
    tiny_model().model.save_pretrained(folder)
    return folder


def _in_config(old: str, new: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        changed = path.read_text().replace(old, new)
        assert changed != path.read_text()
        path.write_text(changed)

    return change


def _cut_weights(kept_bytes: int) -> Callable[[Path], object]:
    return lambda folder: os.truncate(folder / "model.safetensors", kept_bytes)


@pytest.mark.parametrize(
    "damage",
    [
        _cut_weights(0),
        _cut_weights(1000),
        _in_config('"hidden_size": 64', '"hidden_size": 128'),
        _in_config('"hidden_size": 64', '"hidden_size": "x"'),
        _in_config('"vocab_size": 256', '"vocab_size": -5'),
        _in_config('"num_attention_heads": 4', '"num_attention_heads": 0'),
        _in_config('"model_type": "qwen3"', '"model_type": "bert"'),
        lambda folder: (folder / "config.json").write_text("[]"),
        lambda folder: (folder / "config.json").write_text("{"),
        lambda folder: (folder / "tokenizer.json").write_text("garbage"),
    ],
    ids=["empty", "cut", "other size", "no number", "vocabulary", "heads", "bert", "list", "no json", "tokenizer"],
)
def test_a_broken_model_is_one_line_that_names_it(
    saved: Path, tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(saved, folder)
    damage(folder)
    with pytest.raises(ConfigError) as caught:
        load_model(Directory(folder))
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith((f"cannot load {folder}: ", "BertLMHeadModel cannot be served"))


@pytest.mark.parametrize("content", [b"", b"GGUF", bytes(range(256)) * 4])
def test_a_broken_gguf_file_is_one_line_that_names_it(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_model(Directory(file))
    assert str(caught.value).startswith(f"cannot load {file}: ")


def test_chunks_must_hold_whole_blocks(tmp_path: Path) -> None:
    loaded = tiny_model()
    config = StoreConfig.embedded([tmp_path / "pool"], host_bytes=2**20, capacity_bytes=2**20)
    with pytest.raises(ConfigError, match="multiple of the 16 tokens"):
        Runner.open(loaded, namespace_of(loaded, 16), config, RunnerOptions(chunk_tokens=100))


def _refused(kind: str):
    match kind:
        case "sliding-window":
            return transformers.MistralForCausalLM(transformers.MistralConfig(**SMALL, sliding_window=16))
        case "sliding_attention":
            return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SMALL, sliding_window=16))
        case "latent attention":
            shape = {**SMALL, "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "first_k_dense_replace": 2}
            config = transformers.DeepseekV3Config(**shape, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8)
            return transformers.DeepseekV3ForCausalLM(config)
        case "dynamic rope":
            rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
            return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, rope_parameters=rope))
        case "encoder-decoder":
            config = transformers.T5Config(d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2, vocab_size=32)
            return transformers.T5ForConditionalGeneration(config)
        case "linear_attention":
            shape = {**SMALL, "num_experts": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
            shape |= {"linear_num_key_heads": 2, "linear_num_value_heads": 2}
            shape |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts_per_tok": 1}
            return transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**shape))
    raise AssertionError(kind)


@pytest.mark.parametrize(
    "kind",
    ["sliding-window", "sliding_attention", "latent attention", "dynamic rope", "encoder-decoder", "linear_attention"],
)
def test_models_whose_kv_is_not_one_fixed_block_are_refused_by_name(kind: str) -> None:
    with pytest.raises(ConfigError, match=kind):
        adopt_model(_refused(kind), None, kind)


def test_a_cache_that_is_not_what_the_configuration_says_is_refused() -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))
    model.config.num_key_value_heads = 4
    with pytest.raises(ConfigError, match="its cache is not"):
        adopt_model(model, None, "odd")


@pytest.mark.parametrize("family", ["Qwen2", "Mistral", "GPTNeoX", "Phi", "Olmo2", "GPT2"])
def test_other_decoder_models_are_taken(family: str) -> None:
    shape = {**SMALL, "sliding_window": None} if family == "Mistral" else SMALL
    if family == "GPT2":
        shape = {
            "vocab_size": 64,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 256,
            "bos_token_id": 0,
            "eos_token_id": 0,
        }
    if family in ("GPTNeoX", "Phi"):
        shape = {name: value for name, value in SMALL.items() if name not in ("head_dim", "num_key_value_heads")}
    config = getattr(transformers, f"{family}Config")(**shape)
    model_type = transformers.GPT2LMHeadModel if family == "GPT2" else getattr(transformers, f"{family}ForCausalLM")
    loaded = adopt_model(model_type(config), None, family)
    assert loaded.facts.head_dim == 8
    assert loaded.facts.layers == 2
