"""vLLM's native offloading on its CPU platform, for tests.

vLLM refuses that platform, since its copies between device and host run on GPU streams. Here the "device" is memory
too, and a copy is a copy: only that part is replaced, so that all the rest, secondary tiers included, is vLLM's own.

    kv_connector_extra_config = {
        "spec_name": "CpuTieringSpec", "spec_module_path": "forebay.testing.vllm_cpu_spec", "cpu_bytes_to_use": ...,
        "secondary_tiers": [...],
    }
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

Pages = npt.NDArray[np.int8]


@dataclass(frozen=True, slots=True)
class _Move:
    """Pages of one tensor, for one cache group: `device[blocks[i]]` and `host[chunks[i], parts[i]]` belong together."""

    tensor: int
    page_bytes: int
    blocks: npt.NDArray[np.int32]
    chunks: npt.NDArray[np.int32]
    parts: npt.NDArray[np.int32]


class MemoryCopyWorker(OffloadingWorker):  # type: ignore[misc,unused-ignore]
    """Copies when a job is submitted; its result is there at the next poll, as on a stream that is very fast."""

    def __init__(self, kv_caches: CanonicalKVCaches, blocks_per_chunk: int, region: SharedOffloadRegion) -> None:
        self._region, self._blocks_per_chunk = region, blocks_per_chunk
        self._group_refs = kv_caches.group_data_refs
        self._device: list[Pages] = []
        """[block, page_bytes], one a tensor."""
        self._host: list[Pages] = []
        """[chunk, block of the chunk, page_bytes], in parallel."""
        for cache in kv_caches.tensors:
            page_bytes = cache.page_size_bytes
            chunks = region.create_next_worker_view(page_bytes * blocks_per_chunk)
            self._device.append(cache.tensor.view(-1, page_bytes).numpy())
            self._host.append(chunks.view(len(chunks), blocks_per_chunk, page_bytes).numpy())
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        started_s, moved_bytes = time.perf_counter(), 0
        for move in self._moves(src_spec, dst_spec):
            device, host = self._device[move.tensor], self._host[move.tensor]
            host[move.chunks, move.parts, : move.page_bytes] = device[move.blocks, : move.page_bytes]
            moved_bytes += len(move.blocks) * move.page_bytes
        return self._finish(job_id, moved_bytes, started_s)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        started_s, moved_bytes = time.perf_counter(), 0
        for move in self._moves(dst_spec, src_spec):
            device, host = self._device[move.tensor], self._host[move.tensor]
            device[move.blocks, : move.page_bytes] = host[move.chunks, move.parts, : move.page_bytes]
            moved_bytes += len(move.blocks) * move.page_bytes
        return self._finish(job_id, moved_bytes, started_s)

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Every submitted job has ended."""

    def shutdown(self) -> None:
        """Let go of the region's memory before it is unmapped."""
        self._device.clear()
        self._host.clear()
        self._region.cleanup()

    def _finish(self, job_id: int, moved_bytes: int, started_s: float) -> bool:
        self._finished.append(TransferResult(job_id, True, moved_bytes, time.perf_counter() - started_s))
        return True

    def _moves(self, device_spec: GPULoadStoreSpec, host_spec: Any) -> Iterator[_Move]:
        """Blocks come group by group. A group's first block may lie in the middle of its first chunk."""
        first_block = first_chunk = 0
        groups = zip(device_spec.group_sizes, device_spec.block_indices, self._group_refs, strict=True)
        for count, block_index, refs in groups:
            if not count:
                continue
            places = np.arange(count) + block_index % self._blocks_per_chunk
            within, parts = np.divmod(places, self._blocks_per_chunk)
            blocks = device_spec.block_ids[first_block : first_block + count]
            chunks = host_spec.block_ids[first_chunk + within]
            first_block += count
            first_chunk += int(within[-1]) + 1
            for ref in refs:
                yield _Move(ref.tensor_idx, ref.page_size_bytes, blocks, chunks, parts)


class CpuTieringSpec(TieringOffloadingSpec):  # type: ignore[misc,unused-ignore]
    _worker: OffloadingWorker | None

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if not self._worker:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = MemoryCopyWorker(kv_caches, self.blocks_per_chunk, region)
        return self._worker
