"""One peer's storage code, in the peer's own environment, told what to do on standard input, a JSON object a line.

Not run by hand: `run.py` starts it. Uses nothing but the standard library, numpy and the peer's package, so that it
runs in any environment. Every peer moves the same blocks between the same kind of memory, a slab in huge pages, and
files in a directory of its own. How many blocks are in flight is set in the way that the peer offers.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

ALIGNMENT = 2 * 2**20
BATCH_BLOCKS = 32
"""Blocks in one request to a peer, as Forebay's engine makes them."""


class Peer(Protocol):
    def write(self, names: Sequence[str], views: Sequence[memoryview], depth: int) -> None: ...

    def read(self, names: Sequence[str], views: Sequence[memoryview], depth: int) -> None: ...

    def close(self) -> None: ...


def shares(count: int, depth: int) -> list[slice]:
    """Work for `depth` threads, in batches of at most BATCH_BLOCKS."""
    step = max(1, min(BATCH_BLOCKS, -(-count // depth)))
    return [slice(at, at + step) for at in range(0, count, step)]


def in_threads(depth: int, parts: list[slice], work: Callable[[slice], None]) -> None:
    left, errors = list(reversed(parts)), list[BaseException]()

    def serve() -> None:
        try:
            while left:
                with contextlib.suppress(IndexError):
                    work(left.pop())
        except BaseException as error:  # told to the caller
            errors.append(error)

    threads = [threading.Thread(target=serve) for _ in range(depth)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


class Forebay:
    """The file tier, called as the engine calls it: batches, two at a time."""

    def __init__(self, directory: str, block_bytes: int, io: str) -> None:
        from forebay.bench.io.setting import Setting
        from forebay.tiers.file import Io

        self._setting, self._io = Setting(block_bytes, (Path(directory),), (), ()), Io(io)
        self._tiers: dict[int, Any] = {}

    def _tier(self, depth: int) -> Any:
        if depth not in self._tiers:
            self._tiers[depth] = self._setting.open_tier(depth, self._io)
        return self._tiers[depth]

    def _move(self, move: Callable[..., Any], names: Sequence[str], views: Sequence[memoryview]) -> None:
        keys = [bytes.fromhex(name) for name in names]
        parts = [slice(at, at + BATCH_BLOCKS) for at in range(0, len(keys), BATCH_BLOCKS)]

        def one(part: slice) -> None:
            outcomes = move(keys[part], views[part])
            assert all(outcome.value == "ok" for outcome in outcomes), outcomes

        in_threads(2, parts, one)

    def write(self, names: Sequence[str], views: Sequence[memoryview], depth: int) -> None:
        self._move(self._tier(depth).write, names, views)

    def read(self, names: Sequence[str], views: Sequence[memoryview], depth: int) -> None:
        self._move(self._tier(depth).read, names, views)

    def close(self) -> None:
        for tier in self._tiers.values():
            tier.close()


class VllmFs:
    """vLLM's fs tier I/O, `batch_load_block` and `batch_store_block`: a job is one call on one thread."""

    def __init__(self, directory: str, block_bytes: int) -> None:
        from vllm.v1.kv_offload.tiering.fs import io

        self._io, self._directory, self._block_bytes = io, directory, block_bytes
        self._direct = io.probe_o_direct(directory)

    def _move(self, move: Callable[..., Any], names: Sequence[str], views: Sequence[memoryview], depth: int) -> None:
        slab = memoryview(views[0].obj)
        first = np.frombuffer(slab, np.uint8).ctypes.data
        offsets = [np.frombuffer(view, np.uint8).ctypes.data - first for view in views]
        paths = [f"{self._directory}/{name[:3]}/{name[3:5]}/{name}.bin" for name in names]
        in_threads(
            depth,
            shares(len(names), depth),
            lambda part: move(paths[part], slab, offsets[part], self._block_bytes, self._direct),
        )

    def write(self, names: Sequence[str], views: Sequence[memoryview], depth: int) -> None:
        self._move(self._io.batch_store_block, names, views, depth)

    def read(self, names: Sequence[str], views: Sequence[memoryview], depth: int) -> None:
        self._move(self._io.batch_load_block, names, views, depth)

    def close(self) -> None: ...


class LmcacheFs:
    """LMCache's native file-system adapter (`fs_native`): a C++ client with its own worker threads."""

    def __init__(self, directory: str, block_bytes: int, use_odirect: bool) -> None:
        import torch  # noqa: F401  (the extension needs its libraries)
        from lmcache.lmcache_fs import LMCacheFSClient

        self._make = lambda depth: LMCacheFSClient(directory, depth, "", use_odirect, 0)
        self._clients: dict[int, Any] = {}

    def _move(self, name: str, names: Sequence[str], views: Sequence[memoryview], depth: int) -> None:
        if depth not in self._clients:
            self._clients[depth] = self._make(depth)
        client = self._clients[depth]
        names = [f"bench@00000000@0@{name}" for name in names]  # the form of its keys: model, rank, group, hash
        waiting = {
            int(getattr(client, name)(list(names[at : at + BATCH_BLOCKS]), list(views[at : at + BATCH_BLOCKS])))
            for at in range(0, len(names), BATCH_BLOCKS)
        }
        while waiting:
            select.select([client.event_fd()], [], [])
            for future, ok, error, found in client.drain_completions():
                assert ok, error
                assert found is None or all(found), "a block was not found"
                waiting.discard(int(future))

    def write(self, names: Sequence[str], views: Sequence[memoryview], depth: int) -> None:
        self._move("submit_batch_set", names, views, depth)

    def read(self, names: Sequence[str], views: Sequence[memoryview], depth: int) -> None:
        self._move("submit_batch_get", names, views, depth)

    def close(self) -> None:
        for client in self._clients.values():
            client.close()


class LmcacheLocalDisk:
    """LMCache's local disk backend: its `read_file` and `write_file`, on as many threads as blocks in flight."""

    def __init__(self, directory: str, block_bytes: int, use_odirect: bool) -> None:
        from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend

        self._backend = object.__new__(LocalDiskBackend)  # without the engine around it
        self._backend.use_odirect, self._backend.os_disk_bs = use_odirect, os.statvfs(directory).f_bsize
        self._backend.dict = {}
        self._directory = directory

    def write(self, names: Sequence[str], views: Sequence[memoryview], depth: int) -> None:
        def one(part: slice) -> None:
            for name, view in zip(names[part], views[part], strict=True):
                self._backend.write_file(view, f"{self._directory}/{name}.pt")

        in_threads(depth, [slice(i, i + 1) for i in range(len(names))], one)

    def read(self, names: Sequence[str], views: Sequence[memoryview], depth: int) -> None:
        def one(part: slice) -> None:
            for name, view in zip(names[part], views[part], strict=True):
                path = f"{self._directory}/{name}.pt"
                assert os.path.exists(path), path  # noqa: PTH110 (what is not there is only logged)
                self._backend.read_file(name, view, path)

        in_threads(depth, [slice(i, i + 1) for i in range(len(names))], one)

    def close(self) -> None: ...


class LmcacheRawBlock:
    """LMCache's raw block core over a file of its full length, with O_DIRECT, on as many threads as blocks in flight.

    Its device module is a Rust extension that has to be built from LMCache's repository: PyPI has neither it nor its
    source, so without such a build this is a row that says so.
    """

    def __init__(self, directory: str, block_bytes: int) -> None:
        import lmcache_rust_raw_block_io  # noqa: F401  (not in the package on PyPI)
        from lmcache.v1.storage_backend import raw_block

        self._module = raw_block
        self._path, self._block_bytes = f"{directory}/device.raw", block_bytes
        self._core: Any = None
        self._held: list[str] = []

    def _open(self, blocks: int) -> Any:
        slot_bytes, meta_bytes = self._block_bytes + 4096, 8 * 2**20
        with Path(self._path).open("wb") as device:
            os.posix_fallocate(device.fileno(), 0, meta_bytes + blocks * slot_bytes)
        config = self._module.RawBlockCoreConfig(
            device_path=self._path, capacity_bytes=0, block_align=4096, header_bytes=4096, slot_bytes=slot_bytes,
            use_odirect=True, enable_zero_copy=True, meta_total_bytes=meta_bytes, meta_magic=b"LMCBLK01",
            meta_version=1, meta_checkpoint_interval_sec=3600, meta_idle_quiet_ms=1000, meta_enable_periodic=False,
            meta_verify_on_load=False, load_checkpoint_on_init=False,
        )  # fmt: skip
        return self._module.RawBlockCore(config, key_namespace="object")

    def _object(self, view: memoryview) -> Any:
        address = np.frombuffer(view, np.uint8).ctypes.data

        class Memory:
            """What the core asks of a memory object."""

            byte_array, data_ptr = view, address

            class metadata:  # noqa: N801
                shape, dtype, fmt, cached_positions = (len(view),), None, None, None

        return Memory()

    def write(self, names: Sequence[str], views: Sequence[memoryview], depth: int) -> None:
        if self._core is None:
            self._core = self._open(len(names))
        if self._held:
            self._core.delete_many(self._held)
        self._held = list(names)
        keys = [self._module.RawBlockKeySpec(name, int(name[:15], 16)) for name in names]
        objects = [self._object(view) for view in views]

        def one(part: slice) -> None:
            assert all(self._core.put_many(keys[part], objects[part]).results)

        in_threads(depth, shares(len(names), depth), one)

    def read(self, names: Sequence[str], views: Sequence[memoryview], depth: int) -> None:
        objects = [self._object(view) for view in views]

        def one(part: slice) -> None:
            assert all(self._core.load_many_into(list(names[part]), objects[part]))

        in_threads(depth, shares(len(names), depth), one)

    def close(self) -> None:
        if self._core is not None:
            self._core.close()


class SglangHiCacheFile:
    """SGLang's HiCacheFile: `batch_get` and `batch_set` on as many threads as blocks in flight."""

    def __init__(self, directory: str, block_bytes: int) -> None:
        import torch
        from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig

        self._torch = torch
        fields = HiCacheStorageConfig.__dataclass_fields__
        known = {
            "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1,
            "is_mla_model": False, "is_page_first_layout": True, "enable_storage_metrics": False, "model_name": "bench",
        }  # fmt: skip
        config = HiCacheStorageConfig(**{name: value for name, value in known.items() if name in fields})
        self._store = HiCacheFile(config, file_path=directory)

    def _tensors(self, views: Sequence[memoryview]) -> list[Any]:
        return [self._torch.frombuffer(view, dtype=self._torch.uint8) for view in views]

    def write(self, names: Sequence[str], views: Sequence[memoryview], depth: int) -> None:
        tensors = self._tensors(views)

        def one(part: slice) -> None:
            assert self._store.batch_set(list(names[part]), tensors[part])

        in_threads(depth, shares(len(names), depth), one)

    def read(self, names: Sequence[str], views: Sequence[memoryview], depth: int) -> None:
        tensors = self._tensors(views)

        def one(part: slice) -> None:
            assert all(found is not None for found in self._store.batch_get(list(names[part]), tensors[part]))

        in_threads(depth, shares(len(names), depth), one)

    def close(self) -> None: ...


class NixlPosix:
    """NIXL's POSIX plugin: files of the caller's making, transferred in one request a batch."""

    def __init__(self, directory: str, block_bytes: int) -> None:
        from nixl._api import nixl_agent, nixl_agent_config

        self._agent = nixl_agent("bench", nixl_agent_config(backends=[]))
        self._agent.create_backend("POSIX")
        self._directory, self._block_bytes = directory, block_bytes
        self._registered: Any = None

    def _move(self, operation: str, names: Sequence[str], views: Sequence[memoryview], flags: int) -> None:
        if self._registered is None:
            slab = np.frombuffer(views[0].obj, np.uint8)
            self._registered = self._agent.register_memory([(slab.ctypes.data, slab.nbytes, 0, "slab")], "DRAM")
        for at in range(0, len(names), BATCH_BLOCKS):
            self._one(operation, names[at : at + BATCH_BLOCKS], views[at : at + BATCH_BLOCKS], flags)

    def _one(self, operation: str, names: Sequence[str], views: Sequence[memoryview], flags: int) -> None:
        files = [os.open(f"{self._directory}/{name}", flags | os.O_DIRECT, 0o600) for name in names]
        try:
            held = self._agent.register_memory([(0, self._block_bytes, file, "block") for file in files], "FILE")
            memory = [(np.frombuffer(view, np.uint8).ctypes.data, self._block_bytes, 0) for view in views]
            local = self._agent.get_xfer_descs(memory, "DRAM")
            transfer = self._agent.initialize_xfer(operation, local, held.trim(), "bench")
            state = self._agent.transfer(transfer)
            while state not in ("DONE", "ERR"):
                state = self._agent.check_xfer_state(transfer)
            assert state == "DONE", state
            self._agent.release_xfer_handle(transfer)
            self._agent.deregister_memory(held)
        finally:
            for file in files:
                os.close(file)

    def write(self, names: Sequence[str], views: Sequence[memoryview], depth: int) -> None:
        self._move("WRITE", names, views, os.O_WRONLY | os.O_CREAT)

    def read(self, names: Sequence[str], views: Sequence[memoryview], depth: int) -> None:
        self._move("READ", names, views, os.O_RDONLY)

    def close(self) -> None: ...


class AibrixShfs:
    """AIBrix's shared-file-system connector: `_get` and `_put` of one block, on as many threads as blocks in flight."""

    def __init__(self, directory: str, block_bytes: int) -> None:
        from concurrent.futures import ThreadPoolExecutor

        import torch
        from aibrix_kvcache.l2.connectors.shfs import SHFSConnector

        self._torch = torch
        self._store = SHFSConnector(directory, ThreadPoolExecutor(1))
        self._store.open()

    def _region(self, view: memoryview) -> Any:
        from aibrix_kvcache.memory.external_memory_region import ExternalMemoryRegion

        return ExternalMemoryRegion(self._torch.frombuffer(view, dtype=self._torch.uint8), 0, len(view))

    def _each(self, call: str, names: Sequence[str], views: Sequence[memoryview], depth: int) -> None:
        def one(part: slice) -> None:
            for name, view in zip(names[part], views[part], strict=True):
                status = getattr(self._store, call)(bytes.fromhex(name), self._region(view))
                assert status.is_ok(), status

        in_threads(depth, [slice(i, i + 1) for i in range(len(names))], one)

    def write(self, names: Sequence[str], views: Sequence[memoryview], depth: int) -> None:
        self._each("_put", names, views, depth)

    def read(self, names: Sequence[str], views: Sequence[memoryview], depth: int) -> None:
        self._each("_get", names, views, depth)

    def close(self) -> None: ...


PEERS: dict[str, Callable[[str, int], Peer]] = {
    "forebay": lambda directory, block_bytes: Forebay(directory, block_bytes, "native"),
    "forebay, pure Python": lambda directory, block_bytes: Forebay(directory, block_bytes, "python"),
    "vLLM fs": VllmFs,
    "LMCache fs_native, O_DIRECT": lambda directory, block_bytes: LmcacheFs(directory, block_bytes, True),
    "LMCache fs_native": lambda directory, block_bytes: LmcacheFs(directory, block_bytes, False),
    "LMCache local disk, O_DIRECT": lambda directory, block_bytes: LmcacheLocalDisk(directory, block_bytes, True),
    "LMCache local disk": lambda directory, block_bytes: LmcacheLocalDisk(directory, block_bytes, False),
    "LMCache raw_block": LmcacheRawBlock,
    "SGLang HiCacheFile": SglangHiCacheFile,
    "NIXL POSIX": NixlPosix,
    "AIBrix SHFS": AibrixShfs,
}


def slab_views(blocks: int, block_bytes: int, seed: int) -> list[memoryview]:
    region = mmap.mmap(-1, blocks * block_bytes + ALIGNMENT, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    region.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(region, dtype=np.uint8)
    start = -whole.ctypes.data % ALIGNMENT
    slab = whole[start : start + blocks * block_bytes]
    chance = np.random.default_rng(seed)
    for at in range(0, slab.nbytes, block_bytes):
        slab[at : at + block_bytes] = np.frombuffer(chance.bytes(block_bytes), np.uint8)
    return [memoryview(slab)[at : at + block_bytes] for at in range(0, slab.nbytes, block_bytes)]


def checked(views: Sequence[memoryview]) -> list[int]:
    """A sum of every block, to see that what comes back is what was written."""
    return [int(np.frombuffer(view, np.uint64).sum(dtype=np.uint64)) for view in views]


def main() -> None:
    told = sys.stdout.fileno()
    answers = os.fdopen(os.dup(told), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), told)  # a peer may print what it likes
    name, directory, block_bytes, blocks = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    try:
        peer = PEERS[name](directory, block_bytes)
        views = slab_views(blocks, block_bytes, seed=1)
    except Exception as error:
        print(json.dumps({"failed": f"{type(error).__name__}: {error}"[:300]}), file=answers)
        return
    sums = checked(views)
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        order = json.loads(line)
        try:
            if order["do"] == "read":
                for view in views:
                    view[:4096] = bytes(4096)
            move = peer.read if order["do"] == "read" else peer.write
            began_s, began_core_s = time.perf_counter(), time.process_time()
            move(order["names"], views, order["depth"])
            answer: dict[str, object] = {
                "wall_s": time.perf_counter() - began_s, "core_s": time.process_time() - began_core_s,
            }  # fmt: skip
            if checked(views) != sums:
                answer = {"failed": "wrong bytes came back"}
        except Exception as error:
            answer = {"failed": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps(answer), file=answers)
    peer.close()


if __name__ == "__main__":
    main()
