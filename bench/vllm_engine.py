"""One vLLM process of a benchmark: what it keeps KV with, and both ends of the pipe through which it is asked.

A benchmark starts it with `EngineProcess`; it runs as `python vllm_engine.py TASK_AS_JSON`, with the interpreter whose
vLLM is to be measured. It answers each line of its standard input with one line.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

BLOCK_TOKENS = 128
TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
NUMBERS = itertools.count()
"""Of requests."""
LMCACHE_READY = "cache server is running..."


@dataclass(frozen=True)
class Task:
    kind: str
    """What KV is kept with: `recompute` (nothing), `connector`, `native`, `fs` or `lmcache`."""
    model: str
    pool: str
    """An existing directory for it."""
    longest_tokens: int
    host_bytes: int = 2**30
    """DRAM of the tier between device and disk."""


@dataclass(frozen=True)
class Answer:
    tokens: tuple[int, ...]
    restored_tokens: int
    """Of the prompt, not computed."""
    wall_s: float
    processor_s: float
    """Of the engine's process, and of the cache's own server where it has one."""
    token_s: tuple[float, ...]
    """When each token was there, from the start."""


class EngineProcess:
    """The benchmark's end."""

    def __init__(self, task: Task, python: str = sys.executable) -> None:
        environment = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "LMCACHE_TRACK_USAGE": "false",
            "PYTHONHASHSEED": "0",
        }
        read_end, write_end = os.pipe()
        self.task = task
        self._log = Path(task.pool).with_name(f"{task.kind}.log").open("ab")
        self._process = subprocess.Popen(
            [python, __file__, json.dumps(asdict(task)), str(write_end)],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            pass_fds=(write_end,),
            env=environment,
        )
        os.close(write_end)
        self._answers = os.fdopen(read_end)

    def ask(self, prompt: list[int], max_tokens: int = 1) -> Answer:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"prompt": prompt, "max_tokens": max_tokens}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._fail()
        line = self._answers.readline()
        if not line:
            self._fail()
        said = json.loads(line)
        return Answer(tokens=tuple(said.pop("tokens")), token_s=tuple(said.pop("token_s")), **said)

    def _fail(self) -> None:
        self._process.wait()
        end = "\n".join(Path(self._log.name).read_text(errors="replace").splitlines()[-15:])
        raise SystemExit(f"the engine with {self.task.kind} has ended ({self._process.returncode}):\n{end}")

    def close(self) -> None:
        """Its stores are on disk when this returns."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._answers.close()
        self._log.close()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def drop_page_cache(directory: Path) -> None:
    """Of all files beneath. Dirty pages stay, so they are written first."""
    for path in directory.rglob("*"):
        if path.is_file() and not path.is_symlink():
            descriptor = os.open(path, os.O_RDONLY)
            os.fdatasync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


# --- the engine's end


def main() -> None:
    task, answers = Task(**json.loads(sys.argv[1])), os.fdopen(int(sys.argv[2]), "w")
    with lmcache_server(task) as server:
        extra_pids = [server.pid] if server is not None else []
        llm = start(task, server)
        for line in sys.stdin:
            answers.write(json.dumps(asdict(answer(llm, json.loads(line), extra_pids))) + "\n")
            answers.flush()
        if server is not None:
            await_quiet(Path(task.pool))
        llm.llm_engine.engine_core.shutdown()
    answers.close()
    sys.stdout.flush()
    os._exit(0)  # threads of what was measured may keep the process from ending


def start(task: Task, server: Server | None) -> Any:
    if server is not None:
        spare_foreign_objects()
    from vllm import LLM
    from vllm.config import KVTransferConfig

    transfer = transfer_config(task, server)
    llm = LLM(
        model=task.model,
        dtype="float32",
        max_model_len=task.longest_tokens + 64,
        block_size=BLOCK_TOKENS,
        num_gpu_blocks_override=2 * task.longest_tokens // BLOCK_TOKENS + 32,
        enforce_eager=True,
        skip_tokenizer_init=True,
        prefix_caching_hash_algo="sha256_cbor",
        kv_transfer_config=KVTransferConfig(**transfer) if transfer else None,
        seed=0,
    )
    llm.collective_rpc(touch_cache)
    return llm


def touch_cache(worker: Any) -> None:
    """Else each prompt pays for the page faults of the part of the KV cache that it is the first to use."""
    for layer in worker.model_runner.kv_caches:
        layer.zero_()


def answer(llm: Any, asked: Mapping[str, Any], extra_pids: list[int]) -> Answer:
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=asked["max_tokens"], ignore_eos=True, detokenize=False)
    engine, tokens, restored_tokens, token_s = llm.llm_engine, (), 0, []
    started_s, started_core_s = time.perf_counter(), processor_s(extra_pids)
    engine.add_request(str(next(NUMBERS)), {"prompt_token_ids": asked["prompt"]}, greedy)
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens, restored_tokens = tuple(output.outputs[0].token_ids), output.num_cached_tokens or 0
            token_s += [time.perf_counter() - started_s] * (len(tokens) - len(token_s))
    wall_s, core_s = time.perf_counter() - started_s, processor_s(extra_pids) - started_core_s
    return Answer(tokens, restored_tokens, wall_s, core_s, tuple(token_s))


def processor_s(extra_pids: list[int]) -> float:
    others = 0.0
    for pid in extra_pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        others += (int(fields[11]) + int(fields[12])) / TICKS_A_SECOND
    return time.process_time() + others


def transfer_config(task: Task, server: Server | None) -> dict[str, Any]:
    both = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    match task.kind:
        case "recompute":
            return {}
        case "connector":
            return both | {
                "kv_connector": "ForebayConnector",
                "kv_connector_module_path": "forebay.connectors.vllm",
                "kv_connector_extra_config": {
                    "pool": f"{task.pool}/pool", "capacity_gib": 64, "host_gib": task.host_bytes / 2**30,
                },
            }  # fmt: skip
        case "native":
            tier = {
                "type": "forebay", "module_path": "forebay.connectors.vllm.tier", "pool": f"{task.pool}/pool",
                "capacity_gib": 64,
            }  # fmt: skip
            return both | offloading(task, tier)
        case "fs":
            return both | offloading(task, {"type": "fs", "root_dir": f"{task.pool}/fs"})
        case "lmcache":
            assert server is not None
            return both | {
                "kv_connector": "LMCacheMPConnector",
                "kv_connector_extra_config": {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": server.port},
            }
    raise ValueError(f"no such kind: {task.kind}")


def offloading(task: Task, tier: dict[str, Any]) -> dict[str, Any]:
    """vLLM's native offloading; on a CPU, with a stand-in for its copies between device and DRAM."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_connector_extra_config": {
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "forebay.testing.vllm_cpu_spec",
            "cpu_bytes_to_use": task.host_bytes,
            "secondary_tiers": [tier],
        },
    }


# --- LMCache, whose connector for CPUs needs a server


@dataclass(frozen=True)
class Server:
    pid: int
    port: int


@contextlib.contextmanager
def lmcache_server(task: Task) -> Iterator[Server | None]:
    """For `lmcache`, its cache server with a file tier of direct I/O, as fast as it can be told to be."""
    if task.kind != "lmcache":
        yield None
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    files = {"type": "fs_native", "base_path": task.pool, "use_odirect": True, "num_workers": 8}
    options = {
        "host": "127.0.0.1", "port": port, "chunk-size": BLOCK_TOKENS, "l1-size-gb": task.host_bytes / 2**30,
        "eviction-policy": "LRU", "supported-transfer-mode": "auto", "shm-name": f"lmcache_bench_{os.getpid()}",
        "l2-adapter": json.dumps(files),
    }  # fmt: skip
    arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    process = subprocess.Popen(
        [sys.executable, "-m", "lmcache.v1.multiprocess.server", "--disable-observability", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        for line in process.stdout:
            sys.stderr.write(line)
            if LMCACHE_READY in line:
                break
        subprocess.Popen(["cat"], stdin=process.stdout, stdout=sys.stderr)  # its log goes on
        yield Server(process.pid, port)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()


def spare_foreign_objects() -> None:
    """vLLM looks through all imported modules for kernels and stumbles over an object of llvmlite, which LMCache's
    dependency numba has imported by then; without this its start ends in an AttributeError."""
    import vllm.triton_utils.dispatcher as dispatcher

    dispatcher.vars = lambda value: value.__dict__ if isinstance(value.__dict__, Mapping) else {}


def await_quiet(pool: Path) -> None:
    """LMCache writes to its files in the background, and a server that ends leaves the rest unwritten."""
    before, still = -1, 0
    while still < 4:
        now = sum(1 for _ in pool.iterdir())
        still = still + 1 if now == before else 0
        before = now
        time.sleep(1)


if __name__ == "__main__":
    main()
