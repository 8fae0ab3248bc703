"""Models of other families than the one of most tests, and adapters."""

from __future__ import annotations

import json
from pathlib import Path


def write_adapter(path: Path, seed: int) -> Path:
    """A LoRA adapter for the model of `make_model`, of random weights."""
    import torch
    from safetensors.torch import save_file

    path.mkdir(exist_ok=True)
    draw = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(2):
        for name, outputs in (("q_proj", 128), ("v_proj", 64)):
            base = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{base}.lora_A.weight"] = torch.randn(8, 128, generator=draw)
            weights[f"{base}.lora_B.weight"] = torch.randn(outputs, 8, generator=draw)
    save_file(weights, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def save_model(family: str, path: Path) -> Path:
    """A tiny model of random weights of another family than `make_model`'s.

    vLLM starts "latent" on a processor with AMX in bfloat16 only.
    """
    import torch
    from transformers import (
        DeepseekV2Config,
        DeepseekV2ForCausalLM,
        FalconH1Config,
        FalconH1ForCausalLM,
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        MistralConfig,
        MistralForCausalLM,
    )

    torch.manual_seed(0)
    shape = {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 8192,
        "initializer_range": 0.3,
    }  # fmt: skip
    latent = {
        "num_key_value_heads": 4, "head_dim": 64, "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 64, "v_head_dim": 32, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1,
        "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 2, "moe_intermediate_size": 32,
    }  # fmt: skip
    states = {
        "pad_token_id": None, "eos_token_id": 1, "mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32,
        "mamba_n_groups": 1, "mamba_d_state": 16,
    }  # fmt: skip
    layers = ["sliding_attention", "full_attention"]
    model = {
        "sliding and full": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**shape, sliding_window=64, layer_types=layers)),
        "sliding": lambda: MistralForCausalLM(MistralConfig(**shape, sliding_window=64)),
        "states and full": lambda: FalconH1ForCausalLM(FalconH1Config(**shape | states)),
        "latent": lambda: DeepseekV2ForCausalLM(DeepseekV2Config(**shape | latent)),
    }[family]()
    model.save_pretrained(path)
    return path
