"""vLLM with its native tiering over a pool of Forebay's, and without anything."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BLOCK_TOKENS = 32
Tokens = tuple[int, ...]


def tier(pool: Path, **options: Any) -> dict[str, Any]:
    return {
        "type": "forebay",
        "module_path": "forebay.connectors.vllm.tier",
        "pool": str(pool),
        "capacity_gib": 1.0,
        **options,
    }


def prompt(seed: int, tokens: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(512) for _ in range(tokens)]


class Engine:
    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def answer(self, prompts: Sequence[list[int]], *, max_tokens: int = 8, **fields: Any) -> list[Tokens]:
        """Greedy tokens of all prompts, sent at once. `fields` go into each prompt, such as cache_salt."""
        from vllm import SamplingParams

        greedy = SamplingParams(temperature=0, max_tokens=max_tokens, detokenize=False)
        asked = [{"prompt_token_ids": tokens, **fields} for tokens in prompts]
        return [tuple(each.outputs[0].token_ids) for each in self._llm.generate(asked, greedy, use_tqdm=False)]

    def give_up(self, tokens: list[int], after_steps: int) -> None:
        """Send a request and abort it so many steps later."""
        from vllm import SamplingParams

        running = self._llm.llm_engine
        running.add_request("given up", {"prompt_token_ids": tokens}, SamplingParams(detokenize=False))
        for _ in range(after_steps):
            running.step()
        running.abort_request(["given up"])

    def flush(self) -> None:
        """One more step or two: vLLM starts the last copies to its DRAM only then."""
        self.answer([[1]], max_tokens=3)

    def metric(self, name: str, **labels: str) -> float:
        """Sum over all series of this name that have these labels."""
        return sum(
            each.value
            for each in self._llm.get_metrics()
            if each.name == name and labels.items() <= each.labels.items() and hasattr(each, "value")
        )

    @property
    def hits(self) -> float:
        """Blocks that lookups found in the secondary tier."""
        return self.metric("vllm:kv_offload_tiering_chunk_hits", tier="1:forebay")


@contextmanager
def engine(model: Path, *tiers: dict[str, Any], **options: Any) -> Iterator[Engine]:
    from vllm import LLM
    from vllm.config import KVTransferConfig

    extra = {
        "spec_name": "CpuTieringSpec",
        "spec_module_path": "forebay.testing.vllm_cpu_spec",
        "cpu_bytes_to_use": 2**26,
        "secondary_tiers": list(tiers),
    }
    transfer = KVTransferConfig(
        kv_connector="OffloadingConnector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config=extra,
    )
    settings = {
        "dtype": "float32",
        "block_size": BLOCK_TOKENS,
        "max_model_len": 8192,
        "max_num_batched_tokens": 512,  # longer prompts are computed in chunks
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "prefix_caching_hash_algo": "sha256_cbor",
        "disable_log_stats": False,
        "seed": 0,
        **options,
    }
    llm = LLM(model=str(model), kv_transfer_config=transfer if tiers else None, **settings)
    try:
        yield Engine(llm)
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
