"""vLLM with its native tiering over a pool of Forebay's, and without anything."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pool_files import block_hash, file_of

BLOCK_TOKENS = 32
Tokens = tuple[int, ...]


def tier(pool: Path, **options: Any) -> dict[str, Any]:
    return {
        "type": "forebay",
        "module_path": "forebay.connectors.vllm.tier",
        "pool": str(pool),
        "capacity_gib": 1.0,
        "lookup_deadline_s": 30.0,  # a busy machine must not turn a hit into a recompute
        **options,
    }


def prompt(seed: int, tokens: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(512) for _ in range(tokens)]


class Engine:
    """`answers` collects what finished requests said, by their id as the caller gave it."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self.answers: dict[str, Tokens] = {}

    def answer(
        self, prompts: Sequence[list[int]], *, max_tokens: int = 8, lora: Any = None, **fields: Any
    ) -> list[Tokens]:
        """Greedy tokens of all prompts, sent at once. `fields` go into each prompt, such as cache_salt."""
        from vllm import SamplingParams

        greedy = SamplingParams(temperature=0, max_tokens=max_tokens, detokenize=False)
        asked = [{"prompt_token_ids": tokens, **fields} for tokens in prompts]
        outputs = self._llm.generate(asked, greedy, use_tqdm=False, lora_request=lora)
        return [tuple(each.outputs[0].token_ids) for each in outputs]

    def send(self, request_id: str, tokens: list[int], *, max_tokens: int = 8) -> None:
        from vllm import SamplingParams

        greedy = SamplingParams(temperature=0, max_tokens=max_tokens, detokenize=False)
        self._llm.llm_engine.add_request(request_id, {"prompt_token_ids": tokens}, greedy)

    def abort(self, request_id: str) -> None:
        self._llm.llm_engine.abort_request([request_id])

    def step(self) -> None:
        for output in self._llm.llm_engine.step():
            if output.finished:
                self.answers[output.request_id] = tuple(output.outputs[0].token_ids)

    def step_until_loading(self) -> None:
        """Until a block is on its way from the pool to vLLM's DRAM."""
        for _ in range(1000):
            if any(sent.is_load for sent in self.forebay._sent.values()):
                return
            self.step()
        raise AssertionError("nothing is loaded")

    def finish(self) -> None:
        """Step until no request is left."""
        give_up = time.monotonic() + 120
        while self._llm.llm_engine.has_unfinished_requests():
            self.step()
            assert time.monotonic() < give_up, "requests do not come to an end"

    def file_of(self, pool: Path, tokens: list[int], position: int) -> Path:
        """Of a block of a prompt."""
        from vllm.v1.kv_offload.base import make_offload_key

        name = make_offload_key(block_hash(tokens, BLOCK_TOKENS, position), 0)
        return file_of(pool, self.forebay._root_key, name)

    # --- inside

    @property
    def core(self) -> Any:
        return self._llm.llm_engine.engine_core.engine_core

    @property
    def manager(self) -> Any:
        """vLLM's `TieringOffloadingManager`."""
        return self.core.scheduler.connector.connector_scheduler.manager

    @property
    def forebay(self) -> Any:
        """The tier under it."""
        (below,) = self.manager.secondary_tiers
        return below

    def settle(self) -> None:
        """Step until nothing is under way between device, vLLM's DRAM and the pool."""
        self.flush()  # it takes a step for vLLM to start what is left
        give_up = time.monotonic() + 60
        while self.core.scheduler.has_requests() or self.manager._jobs:
            self.core.step_fn()
            self.manager._process_finished_jobs()
            assert time.monotonic() < give_up, "the tiers do not come to rest"

    def check_at_rest(self) -> None:
        """No block, slot, job or pin has leaked, on the device, in vLLM's DRAM and in the tier."""
        self.settle()
        self.forebay._shelf.check_idle()
        assert not self.forebay._sent
        primary = self.manager.primary_tier
        held = primary._num_allocated_chunks - len(primary._free_list)
        assert held == primary._num_evictable_cache_chunks, "chunks that nothing will ever free"
        assert primary._num_write_pending_chunks == 0
        blocks = self.core.scheduler.kv_cache_manager.block_pool
        assert blocks.get_num_free_blocks() == blocks.num_gpu_blocks - 1  # the null block
        assert all(block.ref_cnt == 0 for block in blocks.blocks if not block.is_null)

    def make_cold(self) -> None:
        """The next load of every block comes from the pool's files."""
        self.settle()
        assert self._llm.reset_prefix_cache(reset_connector=True)

    def end_doubts(self) -> None:
        """As if some time had passed since a load failed, or a lookup found nothing."""
        self.forebay._shelf._distrusted._until_ns.clear()
        self.forebay._shelf._absent._until_ns.clear()

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

    @contextmanager
    def growth(self, *names: str) -> Iterator[dict[str, float]]:
        """How much these metrics have grown, when the block has ended: `failed_blocks` is
        `vllm:forebay_tier_failed_blocks`, `failed_blocks outcome=corrupt kind=read` a part of it, `hits` is `hits`."""
        grown: dict[str, float] = {}
        before = {name: self._number(name) for name in names}
        yield grown
        self.settle()
        grown.update({name: self._number(name) - before[name] for name in names})

    def _number(self, name: str) -> float:
        if name == "hits":
            return self.hits
        metric, *labels = name.split()
        return self.metric(f"vllm:forebay_tier_{metric}", **dict(label.split("=") for label in labels))

    @property
    def hits(self) -> float:
        """Blocks that lookups found in the secondary tier."""
        return self.metric("vllm:kv_offload_tiering_chunk_hits", tier="1:forebay")


@contextmanager
def engine(model: Path, *tiers: dict[str, Any], **options: Any) -> Iterator[Engine]:
    from vllm import LLM
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_transfer_state import ensure_kv_transfer_shutdown

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
    try:
        llm = LLM(model=str(model), kv_transfer_config=transfer if tiers else None, **settings)
        try:
            yield Engine(llm)
        finally:
            llm.llm_engine.engine_core.shutdown()
            del llm
    finally:
        ensure_kv_transfer_shutdown()  # vLLM keeps the worker's connector in a global, also of a failed start
        gc.collect()
