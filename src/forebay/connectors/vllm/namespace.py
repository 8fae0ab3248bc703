"""From vLLM's configuration to a `Namespace`: whose KV this is, and in which form.

Every argument called `config` here is vLLM's `VllmConfig`, `kv` its `KVCacheConfig` of one rank. Both are only read by
attribute, and vLLM is imported only by `attention_form`, so that the rest is tested without it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay.connectors.vllm.digests import digest_files, weight_files
from forebay.connectors.vllm.options import IdentityOptions, Part
from forebay.errors import ConfigError
from forebay.types import Namespace

log = logging.getLogger("forebay.connectors.vllm")

_SERVED_SPECS = ("FullAttentionSpec", "MLAAttentionSpec")
_DRAFTLESS = ("ngram", "ngram_gpu", "suffix")
"""Ways of speculation that keep no KV of their own."""
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
_NOT_OF_THE_KV = {
    "_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "initializer_range",
    "id2label", "label2id", "problem_type", "output_attentions", "output_hidden_states", "return_dict",
    "chunk_size_feed_forward", "attention_dropout",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class BlockForm:
    """What one stored block is, in the eyes of whoever stores it."""

    name: str
    """Of the way the bytes were put together, with a version: `connector/1`."""
    block_bytes: int
    block_tokens: int
    attention: str
    """`attention_form`: attention backend, and instruction set where that shapes bytes."""


# --- what cannot be served


def check_served(config: Any, kv: Any) -> None:
    """Raises ConfigError for models and settings whose blocks this connector cannot restore exactly."""
    reason = _refusal(config, kv)
    if reason:
        raise ConfigError(f"Forebay's vLLM connector cannot serve this: {reason}")


def _refusal(config: Any, kv: Any) -> str:
    groups, parallel = kv.kv_cache_groups, config.parallel_config
    if len(groups) != 1:
        kinds = ", ".join(sorted({type(group.kv_cache_spec).__name__ for group in groups}))
        return (
            f"its layers have {len(groups)} block tables ({kinds}), as hybrid models do; "
            "models with one kind of full attention are served"
        )
    group = groups[0]
    spec, kind = group.kv_cache_spec, type(group.kv_cache_spec).__name__
    if kind not in _SERVED_SPECS:
        return f"its KV cache is of kind {kind}; served are {' and '.join(_SERVED_SPECS)}"
    if kind == "MLAAttentionSpec" and config.device_config.device_type == "cpu":
        return "multi-head latent attention on a CPU gives wrong tokens after any load; use a GPU"
    if getattr(spec, "non_causal", False):
        return "its attention looks ahead, so that the KV of a prefix depends on what follows"
    if getattr(group, "is_eagle_group", False):
        return "the draft layers of speculative decoding share its KV cache; switch speculation off"
    speculation = config.speculative_config
    if speculation is not None and speculation.method not in _DRAFTLESS:
        return f"speculation by {speculation.method} keeps KV of another model; use one of {', '.join(_DRAFTLESS)}"
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        return "context parallelism spreads a block over ranks; set its sizes to 1"
    if getattr(kv, "hash_block_size", None) not in (None, spec.block_size):
        return f"blocks of {spec.block_size} tokens are hashed by {kv.hash_block_size}; leave the hash block size alone"
    return ""


def check_hashing(config: Any, seed: str | None) -> None:
    """Warn of, or refuse, prefix hashes that other processes cannot repeat. `seed` is PYTHONHASHSEED, None if unset."""
    algorithm = config.cache_config.prefix_caching_hash_algo
    if algorithm.startswith("xxhash"):
        if seed is None:
            raise ConfigError(
                f"prefix hashes by {algorithm} start from a random seed, so nothing stored would ever be found again: "
                "use --prefix-caching-hash-algo sha256_cbor"
            )
        log.warning(
            "prefix hashes by %s can be forged, and then one prompt is answered with another's KV: "
            "use --prefix-caching-hash-algo sha256_cbor",
            algorithm,
        )
    elif algorithm != "sha256_cbor":
        log.warning(
            "prefix hashes by %s change with the version of Python: use --prefix-caching-hash-algo sha256_cbor "
            "for a pool that outlives it",
            algorithm,
        )


# --- whose KV it is


def weights_identity(config: Any, options: IdentityOptions, cache: Path | None) -> str:
    """Hex digest of the weights, or of the name that the operator gives them, and of what changes their results.

    May read every weight file once, which takes as long as the device needs. Raises ConfigError when the weights
    cannot be found or read.
    """
    model = config.model_config
    weights = f"named {options.identity}" if options.identity else f"files {_files_digest(config, cache)}"
    shaping = [
        weights,
        _shaping_config(model.hf_config),
        str(model.dtype),
        str(model.quantization),
        str(getattr(model, "quantization_config", None)),
        _model_class(model),
    ]
    return hashlib.sha256(_canonical(shaping).encode()).hexdigest()


def _files_digest(config: Any, cache: Path | None) -> str:
    model, load = config.model_config, config.load_config
    name_it = "name the weights with 'identity' in kv_connector_extra_config"
    if str(getattr(load.load_format, "value", load.load_format)) == "dummy":
        raise ConfigError(f"load format 'dummy' has no weight files to tell models apart: {name_it}")
    place = Path(model.model)
    if not place.exists():
        place = _downloaded(model.model, model.revision, load.download_dir, name_it)
    files = weight_files(place)
    if not files:
        raise ConfigError(f"{place} has no weight files that could identify the model: {name_it}")
    if cache is None:
        log.info("digests of weight files are not remembered: give 'digest_cache', a file, to start faster next time")
    return digest_files(files, cache)


def _downloaded(repository: str, revision: str | None, cache_dir: str | None, name_it: str) -> Path:
    try:
        from huggingface_hub import snapshot_download  # comes with vLLM

        return Path(snapshot_download(repository, revision=revision, cache_dir=cache_dir, local_files_only=True))
    except Exception as error:  # a foreign library with many kinds of failure, all of which mean: not here
        raise ConfigError(f"no local files of {repository} ({error}): {name_it}") from None


def _shaping_config(hf_config: Any) -> Mapping[str, Any]:
    return {name: value for name, value in hf_config.to_dict().items() if name not in _NOT_OF_THE_KV}


def _model_class(model: Any) -> list[Any]:
    return [list(getattr(model.hf_config, "architectures", None) or ()), sorted(model.model_class_overrides.items())]


# --- in which form


def namespace_of(
    config: Any, kv: Any, *, weights_digest: str, form: BlockForm, part: Part | None = None, seed: str | None
) -> Namespace:
    """The namespace of the blocks of one part, by default the only one. `seed` is PYTHONHASHSEED, None if unset."""
    part = part or Part()
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    group = kv.kv_cache_groups[0]
    spec = group.kv_cache_spec
    mode = getattr(spec, "kv_quant_mode", None)
    layout = {
        "form": form.name,
        "axes": kv.kv_cache_layout or cache.kv_cache_layout,
        "attention": form.attention,
        "spec": [type(spec).__name__, spec.block_size, getattr(spec, "head_size_v", 0)],
        "page": spec.page_size_bytes if part.heads is None else [part.heads.first, part.heads.end],
        "layers": list(group.layer_names),
        "tp": parallel.tensor_parallel_size if part.heads is None else "any",
        "pp": parallel.pipeline_parallel_size,
        "hash": _hash_form(cache.prefix_caching_hash_algo, seed),
    }
    return Namespace(
        model=", ".join(getattr(model.hf_config, "architectures", None) or ("unknown",)),
        weights_digest=weights_digest,
        kv_dtype=str(spec.dtype).removeprefix("torch."),
        kv_scales="" if cache.cache_dtype == "auto" else f"{cache.cache_dtype}/{getattr(mode, 'name', mode)}",
        rope=_canonical(_rope(config)),
        layers=len(group.layer_names),
        kv_heads=spec.num_kv_heads if part.heads is None else part.heads.end - part.heads.first,
        head_dim=spec.head_size,
        block_tokens=form.block_tokens,
        block_bytes=form.block_bytes,
        layout=_canonical(layout),
        shard=part.index,
        shard_count=part.count,
    )


def attention_form(config: Any, layer_names: Sequence[str]) -> str:
    """vLLM's version (its minor versions change layouts), the attention backends, and on a CPU their instruction set.

    Works in workers, whose layers are loaded, and in the scheduler's process, where vLLM is asked what it would choose.
    """
    import vllm  # type: ignore[import-not-found,unused-ignore]
    from vllm.distributed.kv_transfer.kv_connector.utils import (  # type: ignore[import-not-found,unused-ignore]
        get_current_attn_backends,
    )

    version = ".".join(vllm.__version__.split(".")[:2])
    backends = sorted({backend.get_name() for backend in get_current_attn_backends(config, list(layer_names))})
    parts = [f"vllm {version}", *backends]
    if config.device_config.device_type == "cpu":
        parts.append(_cpu_isa(config))
    return " ".join(parts)


def _cpu_isa(config: Any) -> str:
    from vllm.v1.attention.backends.cpu_attn import (  # type: ignore[import-not-found,unused-ignore]
        _get_attn_isa,
    )

    model, cache = config.model_config, config.cache_config
    return str(_get_attn_isa(model.dtype, cache.block_size, model.get_head_size(), cache.cache_dtype))


def _hash_form(algorithm: str, seed: str | None) -> list[str]:
    """The seed itself may be a secret: it guards hashes that can be forged."""
    python = "" if algorithm.endswith("_cbor") else "python {}.{}".format(*sys.version_info[:2])
    return [algorithm, python, "" if seed is None else hashlib.sha256(seed.encode()).hexdigest()[:16]]


def _rope(config: Any) -> Mapping[str, Any]:
    text = config.model_config.hf_text_config
    parameters = dict(getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {})
    theta = getattr(text, "rope_theta", None)
    if theta is not None:
        parameters.setdefault("rope_theta", theta)
    if any(kind in _LENGTH_DEPENDENT_ROPE for kind in _rope_kinds(parameters)):
        parameters["max_model_len"] = config.model_config.max_model_len  # decides between short and long factors
    return parameters


def _rope_kinds(parameters: Mapping[str, Any]) -> set[str]:
    """Rope types, also of configurations that have one for each kind of layer."""
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return {str(each.get("rope_type", each.get("type", ""))) for each in (parameters, *nested)}


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
