"""A whole vLLM engine with its own worker processes: fills or reads a pool, says what it answered, and goes.

python vllm_connector_process.py '{"model": ..., "pool": ..., "ranks": 2, "extra": {...}, "prompts": [[seed, tokens]]}'
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main(task: dict) -> None:
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="1",
        VLLM_CPU_OMP_THREADS_BIND="0-1" if task["ranks"] == 1 else "|".join(str(core) for core in range(task["ranks"])),
    )
    from vllm import LLM
    from vllm.config import KVTransferConfig
    from vllm_connector_kit import Engine, prompt, settings, transfer

    config = KVTransferConfig(**transfer(Path(task["pool"]), task["extra"]))
    options = settings(tensor_parallel_size=task["ranks"])
    running = Engine(LLM(model=task["model"], kv_transfer_config=config, **options))
    answers = running.answer([prompt(seed, tokens) for seed, tokens in task["prompts"]])
    hits, recomputed = running.metric("hit_blocks"), running.metric("recomputed_blocks")
    said = {"answers": answers, "hit_blocks": hits, "recomputed_blocks": recomputed}
    Path(task["out"]).write_text(json.dumps(said))
    running.llm.llm_engine.engine_core.shutdown()
    os._exit(0)  # with several ranks, vLLM's own threads may keep a process from ending


if __name__ == "__main__":  # workers are started by importing this file again
    main(json.loads(sys.argv[1]))
