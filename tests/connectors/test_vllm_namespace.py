"""What of vLLM's configuration decides whose KV a block is. vLLM itself is not needed: its objects are played."""

from __future__ import annotations

import dataclasses
import itertools
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forebay.connectors.vllm.digests import digest_files, weight_files
from forebay.connectors.vllm.namespace import (
    BlockForm,
    check_hashing,
    check_served,
    namespace_of,
    weights_identity,
)
from forebay.connectors.vllm.options import (
    ConnectorOptions,
    IdentityOptions,
    Part,
    StoredTokens,
    digest_cache_path,
    read_options,
    store_config,
)
from forebay.connectors.vllm.parts import RankGeometry, parts_of
from forebay.errors import ConfigError
from forebay.keys import namespace_key
from forebay.types import BlockKey, Namespace

FORM = BlockForm("connector/1", block_bytes=4096, block_tokens=16, attention="vllm 0.32 CPU_ATTN vec")


class HfConfig:
    """A model's configuration as transformers has it."""

    def __init__(self, **values: Any) -> None:
        self.architectures = ["Qwen3ForCausalLM"]
        self.rope_parameters = {"rope_type": "default", "rope_theta": 1e6}
        vars(self).update(values)

    def to_dict(self) -> dict[str, Any]:
        return {"_name_or_path": "/anywhere", "transformers_version": "5.0", **vars(self)}


class FullAttentionSpec(SimpleNamespace):
    pass


class MLAAttentionSpec(FullAttentionSpec):
    pass


class SlidingWindowSpec(FullAttentionSpec):
    pass


def spec_of(kind: type[FullAttentionSpec] = FullAttentionSpec, **changes: Any) -> FullAttentionSpec:
    values = {
        "block_size": 16, "page_size_bytes": 2048, "num_kv_heads": 2, "head_size": 16, "head_size_v": 16,
        "dtype": "torch.float32", "kv_quant_mode": SimpleNamespace(name="NONE"),
    }  # fmt: skip
    return kind(**values | changes)


def kv_of(*specs: FullAttentionSpec) -> SimpleNamespace:
    groups = [
        SimpleNamespace(kv_cache_spec=spec, layer_names=["layers.0", "layers.1"], is_eagle_group=False)
        for spec in specs or (spec_of(),)
    ]
    return SimpleNamespace(kv_cache_groups=groups, kv_cache_layout="LBHNC", hash_block_size=16)


def kv_with_layers(*names: str) -> SimpleNamespace:
    kv = kv_of()
    kv.kv_cache_groups[0].layer_names = list(names)
    return kv


def config_of(model_dir: Path | str = "/nowhere", **changes: Any) -> SimpleNamespace:
    """Names with a double underscore reach into a part: `model__dtype`."""
    hf_config = HfConfig()
    config = SimpleNamespace(
        model=SimpleNamespace(
            model=str(model_dir), revision=None, hf_config=hf_config, hf_text_config=hf_config, dtype="torch.float32",
            quantization=None, model_class_overrides={}, max_model_len=4096,
        ),
        cache=SimpleNamespace(
            prefix_caching_hash_algo="sha256_cbor", kv_cache_layout=None, cache_dtype="auto", block_size=16
        ),
        parallel=SimpleNamespace(
            tensor_parallel_size=1, pipeline_parallel_size=1,
            decode_context_parallel_size=1, prefill_context_parallel_size=1,
        ),
        load=SimpleNamespace(load_format="auto", download_dir=None),
        device=SimpleNamespace(device_type="cpu"),
    )  # fmt: skip
    for name, value in changes.items():
        part, _, attribute = name.partition("__")
        setattr(getattr(config, part), attribute, value)
    parts = {f"{name}_config": part for name, part in vars(config).items()}
    return SimpleNamespace(**parts, speculative_config=None)


def namespace(
    config: Any, kv: Any, part: Part | None = None, seed: str | None = None, form: BlockForm = FORM
) -> Namespace:
    return namespace_of(config, kv, weights_digest="ab" * 32, form=form, part=part, seed=seed)


def test_equal_configurations_share_every_key() -> None:
    first, second = namespace(config_of(), kv_of()), namespace(config_of("/elsewhere"), kv_of())
    assert namespace_key(first) == namespace_key(second)
    assert first.block_bytes == 4096
    assert (first.layers, first.kv_heads, first.head_dim, first.block_tokens) == (2, 2, 16, 16)


@pytest.mark.parametrize(
    "other",
    [
        lambda: namespace(config_of(), kv_of(spec_of(dtype="torch.bfloat16"))),
        lambda: namespace(config_of(cache__cache_dtype="fp8"), kv_of()),
        lambda: namespace(config_of(), kv_of(spec_of(num_kv_heads=4))),
        lambda: namespace(config_of(), kv_of(spec_of(block_size=32))),
        lambda: namespace(config_of(), kv_of(spec_of(page_size_bytes=4096))),
        lambda: namespace(config_of(), SimpleNamespace(**vars(kv_of()) | {"kv_cache_layout": "BLHNC"})),
        lambda: namespace(config_of(), kv_with_layers("layers.0", "layers.2")),
        lambda: namespace(config_of(), kv_with_layers("layers.0")),
        lambda: namespace(config_of(), kv_of(), form=dataclasses.replace(FORM, name="connector/2")),
        lambda: namespace(config_of(), kv_of(), form=dataclasses.replace(FORM, attention="vllm 0.33 CPU_ATTN vec")),
        lambda: namespace(config_of(), kv_of(spec_of(head_size=32))),
        lambda: namespace(config_of(parallel__tensor_parallel_size=2), kv_of()),
        lambda: namespace(config_of(parallel__pipeline_parallel_size=2), kv_of()),
        lambda: namespace(config_of(), kv_of(), Part(1, 2, "rank1of2")),
        lambda: namespace(config_of(), kv_of(), seed="7"),
        lambda: namespace(config_of(cache__prefix_caching_hash_algo="sha256"), kv_of()),
        lambda: namespace(config_of(model__hf_text_config=HfConfig(rope_parameters={"rope_theta": 1e4})), kv_of()),
    ],
)  # fmt: skip
def test_whatever_shapes_the_bytes_gives_another_namespace(other: Any) -> None:
    assert namespace_key(other()) != namespace_key(namespace(config_of(), kv_of()))


@pytest.mark.parametrize(("unit", "more_ranks", "fewer_ranks"), [(1, 8, 4), (2, 4, 1), (4, 2, 1)])
def test_parts_of_heads_have_equal_keys_for_every_number_of_ranks(unit: int, more_ranks: int, fewer_ranks: int) -> None:
    more, fewer = (keys_by_heads(ranks, unit) for ranks in (more_ranks, fewer_ranks))
    assert more == fewer
    assert len(set(more.values())) == len(more) == 8 // unit


def keys_by_heads(ranks: int, unit: int) -> dict[str, BlockKey]:
    """What each part of a model of 8 KV heads is stored under by an engine of so many ranks."""
    heads, config = 8 // ranks, config_of(parallel__tensor_parallel_size=ranks)
    kv = kv_of(spec_of(num_kv_heads=heads, page_size_bytes=1024 * heads))
    return {
        part.name: namespace_key(namespace(config, kv, part))
        for rank in range(ranks)
        for part in parts_of(RankGeometry(rank, ranks, 1, heads, 8), unit)
    }


def test_a_rope_that_depends_on_the_longest_context_brings_that_length_along() -> None:
    long_rope = HfConfig(rope_parameters={"rope_type": "longrope"})
    digests = {
        namespace_key(namespace(config_of(model__hf_text_config=long_rope, model__max_model_len=tokens), kv_of()))
        for tokens in (4096, 131072)
    }
    assert len(digests) == 2
    plain = {namespace_key(namespace(config_of(model__max_model_len=tokens), kv_of())) for tokens in (4096, 131072)}
    assert len(plain) == 1


def test_the_seed_is_not_told() -> None:
    assert "secret" not in str(dataclasses.asdict(namespace(config_of(), kv_of(), seed="secret")))


# --- weights


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "model-1.safetensors").write_bytes(os.urandom(3_000_000))
    (directory / "model-2.safetensors").write_bytes(os.urandom(1000))
    (directory / "config.json").write_text("{}")
    return directory


def test_weights_are_known_by_their_content_and_not_by_their_path(model_dir: Path, tmp_path: Path) -> None:
    first = weights_identity(config_of(model_dir), IdentityOptions(), None)
    moved = model_dir.rename(tmp_path / "moved")
    assert weights_identity(config_of(moved), IdentityOptions(), None) == first


def test_one_byte_of_weights_changed_in_place_is_noticed_in_spite_of_the_cache(
    model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="forebay")
    cache = tmp_path / "weights.json"
    first = weights_identity(config_of(model_dir), IdentityOptions(), cache)
    assert "reading 0.00 GB of weights" in caplog.text
    caplog.clear()
    assert weights_identity(config_of(model_dir), IdentityOptions(), cache) == first
    assert "reading" not in caplog.text
    weights = model_dir / "model-1.safetensors"
    before = weights.stat()
    with weights.open("r+b") as file:
        file.seek(2_500_000)
        byte = file.read(1)[0]
        file.seek(2_500_000)
        file.write(bytes([byte ^ 1]))
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert weights_identity(config_of(model_dir), IdentityOptions(), cache) != first


def test_reading_weights_says_how_far_it_is(model_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="forebay")
    seconds = itertools.count(step=11)  # each part of a file takes 11 s
    digest_files(weight_files(model_dir), None, lambda: float(next(seconds)))
    lines = [record.getMessage() for record in caplog.records]
    assert "weights: 0.0 of 0.0 GB read" in lines
    assert lines[-1].startswith("read 0.00 GB of weights in ")


def test_a_damaged_cache_of_digests_is_made_anew(model_dir: Path, tmp_path: Path) -> None:
    cache = tmp_path / "weights.json"
    first = digest_files(weight_files(model_dir), cache)
    cache.write_text("{broken")
    assert digest_files(weight_files(model_dir), cache) == first
    assert digest_files(weight_files(model_dir), tmp_path / "no" / "such" / "weights.json") == first


@pytest.mark.parametrize(
    "changes",
    [
        {"model__dtype": "torch.bfloat16"},
        {"model__quantization": "fp8"},
        {"model__hf_config": HfConfig(hidden_size=64)},
        {"model__hf_config": HfConfig(rope_scaling={"type": "yarn", "factor": 4})},
    ],
)
def test_what_changes_the_results_of_equal_weights_changes_their_identity(
    model_dir: Path, changes: dict[str, Any]
) -> None:
    named = IdentityOptions(identity="v1")
    assert weights_identity(config_of(**changes), named, None) != weights_identity(config_of(), named, None)


def test_an_identity_stands_for_the_weights() -> None:
    """No file is read: there is none."""
    identities = {weights_identity(config_of(), IdentityOptions(identity=name), None) for name in ("v1", "v2")}
    assert len(identities) == 2


def test_weights_that_cannot_be_identified_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no weight files"):
        weights_identity(config_of(tmp_path), IdentityOptions(), None)
    with pytest.raises(ConfigError, match="dummy"):
        weights_identity(config_of(tmp_path, load__load_format="dummy"), IdentityOptions(), None)
    with pytest.raises(ConfigError, match="identity"):
        weights_identity(config_of("no-one/no-model"), IdentityOptions(), None)


# --- what is refused


@pytest.mark.parametrize(
    ("config", "kv", "words"),
    [
        (config_of(), kv_of(spec_of(), spec_of(SlidingWindowSpec)), "2 block tables"),
        (config_of(), kv_of(spec_of(SlidingWindowSpec)), "SlidingWindowSpec"),
        (config_of(), kv_of(spec_of(MLAAttentionSpec)), "latent attention on a CPU"),
        (config_of(), kv_of(spec_of(non_causal=True)), "looks ahead"),
        (config_of(parallel__decode_context_parallel_size=2), kv_of(), "context parallelism"),
        (config_of(), SimpleNamespace(**vars(kv_of()) | {"hash_block_size": 8}), "hash block size"),
    ],
)
def test_what_cannot_be_restored_exactly_is_refused(config: Any, kv: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_served(config, kv)


def test_speculation_with_a_model_of_its_own_is_refused_and_without_is_not() -> None:
    config = config_of()
    config.speculative_config = SimpleNamespace(method="eagle")
    with pytest.raises(ConfigError, match="eagle"):
        check_served(config, kv_of())
    config.speculative_config = SimpleNamespace(method="ngram")
    check_served(config, kv_of())


def test_latent_attention_is_served_on_a_gpu() -> None:
    check_served(config_of(device__device_type="cuda"), kv_of(spec_of(MLAAttentionSpec)))


def test_hashes_that_others_cannot_repeat_are_refused_or_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    check_hashing(config_of(), None)
    assert not caplog.records
    check_hashing(config_of(cache__prefix_caching_hash_algo="sha256"), None)
    assert "sha256_cbor" in caplog.text
    caplog.clear()
    random_seed = config_of(cache__prefix_caching_hash_algo="xxhash_cbor")
    with pytest.raises(ConfigError, match="random seed"):
        check_hashing(random_seed, None)
    check_hashing(random_seed, "0")
    assert "forged" in caplog.text


# --- options


def test_options_are_checked_by_name_and_by_sense(tmp_path: Path) -> None:
    options = read_options({"pool": "/pool", "capacity_gib": 3, "stored_tokens": "prompt"})
    assert options.stored_tokens is StoredTokens.PROMPT
    for wrong, words in [
        ({}, "either"),
        ({"pool": "/pool", "config": "/store.toml"}, "either"),
        ({"pool": "/pool"}, "capacity_gib"),
        ({"pool": "/pool", "capacity_gib": 1, "hots_gib": 1}, "hots_gib"),
        ({"pool": "/pool", "capacity_gib": 1, "held_share": 2}, "held_share"),
    ]:
        with pytest.raises(ConfigError, match=words):
            read_options(wrong)


def test_ranks_have_a_directory_and_a_share_of_the_limits_each(tmp_path: Path) -> None:
    options = ConnectorOptions(pool=f"{tmp_path}/pool", capacity_gib=8, host_gib=2)
    alone, third = store_config(options, Part()), store_config(options, Part(2, 4, "rank2of4"))
    assert alone.tiers[0].options["roots"] == [{"path": f"{tmp_path}/pool"}]
    assert third.tiers[0].options["roots"] == [{"path": f"{tmp_path}/pool-rank2of4"}]
    assert third.tiers[0].options["capacity_bytes"] * 4 == alone.tiers[0].options["capacity_bytes"] == 8 * 2**30
    assert third.host_bytes * 4 == alone.host_bytes == 2 * 2**30
    assert digest_cache_path(options, options.pool) == Path(f"{tmp_path}/pool-weights.json")
    assert digest_cache_path(options, "/etc/store.toml") == Path("/etc/store.toml-weights.json")


def test_a_configuration_file_is_filled_in_for_each_rank(tmp_path: Path) -> None:
    path = tmp_path / "store.toml"
    path.write_text(
        'host_bytes = 1000000\n[[tiers]]\nkind = "file"\n[tiers.options]\n'
        'capacity_bytes = 1000\nroots = [{path = "/mnt/{part}"}]\n'
    )
    options = ConnectorOptions(config=str(path))
    assert store_config(options, Part(1, 2, "rank1of2")).tiers[0].options["roots"] == [{"path": "/mnt/rank1of2"}]
    path.write_text("host_bytes = 1000000\n")
    assert store_config(options, Part()).host_bytes == 1000000
    with pytest.raises(ConfigError, match="of its own"):
        store_config(options, Part(1, 2, "rank1of2"))
    path.write_text("hots_bytes = 1")
    with pytest.raises(ConfigError, match="hots_bytes"):
        store_config(options, Part())


def test_importing_the_package_does_not_import_vllm() -> None:
    code = (
        "import sys, forebay.connectors.vllm, forebay.connectors.vllm.namespace; "
        "assert not {'vllm', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
