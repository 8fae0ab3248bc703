"""vLLM with `ForebayConnector`, in this process, so that tests can look inside and drive it step by step."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pool_files import block_hash, file_of

from forebay.keys import namespace_key

BLOCK_TOKENS = 32
VOCABULARY = 512
MAX_TOKENS = 6
Tokens = tuple[int, ...]


def prompt(seed: int, tokens: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(VOCABULARY) for _ in range(tokens)]


def block_file(running: Engine, pool: Path, tokens: list[int], position: int) -> Path:
    root = namespace_key(running.worker.handshake.parts[0].namespace)
    return file_of(pool, root, block_hash(tokens, BLOCK_TOKENS, position))


@dataclass
class Engine:
    """`answers` collects what finished requests said, by their id as the caller gave it."""

    llm: Any
    answers: dict[str, Tokens] = field(default_factory=dict)

    # --- requests

    def answer(
        self, prompts: Sequence[list[int]], *, max_tokens: int = MAX_TOKENS, lora: Any = None, **fields: Any
    ) -> list[Tokens]:
        """Greedy tokens of all prompts, sent at once. `fields` go into each prompt, such as cache_salt."""
        asked = [{"prompt_token_ids": tokens, **fields} for tokens in prompts]
        outputs = self.llm.generate(asked, _greedy(max_tokens), use_tqdm=False, lora_request=lora)
        return [tuple(each.outputs[0].token_ids) for each in outputs]

    def send(self, request_id: str, tokens: list[int], *, max_tokens: int = MAX_TOKENS) -> None:
        self.llm.llm_engine.add_request(request_id, {"prompt_token_ids": tokens}, _greedy(max_tokens))

    def abort(self, request_id: str) -> None:
        self.llm.llm_engine.abort_request([request_id])

    def step(self) -> None:
        for output in self.llm.llm_engine.step():
            if output.finished:
                self.answers[output.request_id] = tuple(output.outputs[0].token_ids)

    def finish(self) -> None:
        """Step until no request is left."""
        give_up = time.monotonic() + 120
        while self.llm.llm_engine.has_unfinished_requests():
            self.step()
            assert time.monotonic() < give_up, "requests do not come to an end"

    # --- inside

    @property
    def core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def scheduler_side(self) -> Any:
        return self.core.scheduler.connector._scheduler.side

    @property
    def worker(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()._worker

    @property
    def block_pool(self) -> Any:
        return self.core.scheduler.kv_cache_manager.block_pool

    def settle(self) -> None:
        """Step until nothing of the connector's is under way, as an engine process does by itself."""
        give_up = time.monotonic() + 60
        while self.core.scheduler.has_requests() or not all(each.idle for each in self.worker.engines):
            self.core.step_fn()
            self.worker.side.poll()
            assert time.monotonic() < give_up, "the connector does not come to rest"

    def check_at_rest(self) -> None:
        """No block, slot or pin has leaked."""
        self.settle()
        side, worker = self.scheduler_side, self.worker
        assert (len(side._tracked), len(side._loading), len(side._held)) == (0, 0, 0)
        assert {(part.open_loads, part.open_stores) for part in worker.side.parts} == {(0, 0)}
        for each in worker.engines:
            each.check_idle()
        assert self.block_pool.get_num_free_blocks() == self.block_pool.num_gpu_blocks - 1  # the null block
        assert all(block.ref_cnt == 0 for block in self.block_pool.blocks if not block.is_null)

    def make_cold(self) -> None:
        """The next load of every block comes from the pool's files."""
        self.settle()
        assert self.llm.reset_prefix_cache()
        for each in self.worker.engines:
            each.drop_host_copies()

    def end_doubts(self) -> None:
        """As if some time had passed since a load failed."""
        self.scheduler_side._lookup._doubts.clear()

    def step_until_loading(self) -> None:
        for _ in range(1000):
            if any(part.open_loads for part in self.worker.side.parts):
                return
            self.step()
        raise AssertionError("nothing is loaded")

    # --- metrics

    def metric(self, name: str, **labels: str) -> float:
        """Sum over all series `vllm:forebay_{name}` that have these labels. Values of single steps, added up."""
        return sum(
            each.value
            for each in self.llm.get_metrics()
            if each.name == f"vllm:forebay_{name}" and labels.items() <= each.labels.items() and hasattr(each, "value")
        )

    @contextmanager
    def growth(self, *names: str) -> Iterator[dict[str, float]]:
        """How much these metrics have grown, when the block has ended."""
        grown: dict[str, float] = {}
        before = {name: self.metric(name) for name in names}
        yield grown
        self.settle()  # vLLM takes the numbers of a step with it
        grown.update({name: self.metric(name) - before[name] for name in names})

    @property
    def preemptions(self) -> float:
        return float(sum(each.value for each in self.llm.get_metrics() if each.name == "vllm:num_preemptions"))


def _greedy(max_tokens: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)


def settings(**options: Any) -> dict[str, Any]:
    return {
        "dtype": "float32",
        "block_size": BLOCK_TOKENS,
        "max_model_len": 6144,
        "max_num_batched_tokens": 512,  # longer prompts are computed in chunks
        "num_gpu_blocks_override": 640,
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "prefix_caching_hash_algo": "sha256_cbor",
        "disable_log_stats": False,
        "seed": 0,
        **options,
    }


def transfer(pool: Path, extra: Mapping[str, Any]) -> dict[str, Any]:
    patient = {"lookup_deadline_s": 30.0}  # a busy machine must not turn a hit into a recompute
    return {
        "kv_connector": "ForebayConnector",
        "kv_connector_module_path": "forebay.connectors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"pool": str(pool), "capacity_gib": 1.0, "host_gib": 0.05, **patient, **extra},
    }


@contextmanager
def engine(
    model: Path, pool: Path | None = None, *, extra: Mapping[str, Any] | None = None, **options: Any
) -> Iterator[Engine]:
    """Without a pool, a plain vLLM. `extra` goes into kv_connector_extra_config."""
    from vllm import LLM
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_transfer_state import ensure_kv_transfer_shutdown

    config = KVTransferConfig(**transfer(pool, extra or {})) if pool is not None else None
    try:
        llm = LLM(model=str(model), kv_transfer_config=config, **settings(**options))
        try:
            yield Engine(llm)
        finally:
            llm.llm_engine.engine_core.shutdown()
            del llm
    finally:
        ensure_kv_transfer_shutdown()  # vLLM keeps the worker's connector in a global
        gc.collect()
