"""`ForebayConnector`: vLLM's KVConnector V1 over Forebay. It only translates; see `scheduler` and `worker`.

    {"kv_connector": "ForebayConnector", "kv_connector_module_path": "forebay.connectors.vllm", "kv_role": "kv_both",
     "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"pool": "/mnt/nvme/kv", "capacity_gib": 500}}

vLLM makes one with the role SCHEDULER in the scheduler's process, and one with the role WORKER in each worker.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # type: ignore[import-not-found,unused-ignore]
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource  # type: ignore[import-not-found,unused-ignore]

from forebay.connectors.vllm.metrics import ForebayMetrics, ForebayStats
from forebay.connectors.vllm.namespace import check_hashing, check_served
from forebay.connectors.vllm.options import read_options
from forebay.connectors.vllm.setup import SchedulerStack, WorkerStack, join_logs
from forebay.connectors.vllm.wire import Handshake, StepPlan, WorkerReport
from forebay.errors import ConfigError

log = logging.getLogger("forebay.connectors.vllm")

# what is sent needs no base class of vLLM's, and so does not import it where it is tested without
KVConnectorMetadata.register(StepPlan)
KVConnectorWorkerMetadata.register(WorkerReport)
KVConnectorHandshakeMetadata.register(Handshake)


class ForebayConnector(KVConnectorBase_V1):  # type: ignore[misc,unused-ignore]
    _cache_hit_source = CacheHitSource.DISK

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Raises ConfigError, with one line, for options, models and settings that do not go together."""
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        join_logs()
        self._options = read_options(self._kv_transfer_config.kv_connector_extra_config)
        self._seed = os.environ.get("PYTHONHASHSEED")  # as vLLM itself reads it
        check_served(vllm_config, kv_cache_config)
        check_hashing(vllm_config, self._seed)
        if self._kv_transfer_config.kv_role != "kv_both":
            raise ConfigError(f"kv_role is {self._kv_transfer_config.kv_role!r}: a cache needs 'kv_both'")
        self._scheduler: SchedulerStack | None = None
        self._worker: WorkerStack | None = None
        self._failed_blocks: set[int] = set()
        if role is KVConnectorRole.SCHEDULER and self._kv_transfer_config.kv_load_failure_policy != "recompute":
            log.warning(
                'kv_load_failure_policy is "fail": a damaged block fails its request; set it to "recompute" '
                "and it costs only the time to compute it"
            )

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a store that does not happen is a later miss

    # --- the scheduler's side

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Handshake]) -> None:
        """Every worker has said whose blocks it stores: from now on there is something to look up."""
        self._scheduler = SchedulerStack(self._options, list(metadata.values()), self._block_tokens)
        if self._kv_cache_manager is not None:
            self._scheduler.side.bind_pool(self._kv_cache_manager.block_pool)

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        if self._scheduler is not None:
            self._scheduler.side.bind_pool(kv_cache_manager.block_pool)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._scheduler is None:
            return 0, False
        tokens = self._scheduler.side.matched_tokens(request, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._scheduler is not None:
            self._scheduler.side.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepPlan:
        if self._scheduler is None:
            return StepPlan()
        state = scheduler_output.kv_connector_block_state

        def block_ids_of(request_id: str) -> list[int] | None:
            tables = state.get_block_ids(request_id)
            return tables[0] if tables else None

        return self._scheduler.side.plan(scheduler_output.num_scheduled_tokens, block_ids_of)

    def update_connector_output(self, connector_output: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.side.apply(
                connector_output.kv_connector_worker_meta,
                connector_output.invalid_block_ids or (),
                connector_output.finished_recving or (),
            )

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Never delays the freeing of blocks: those that are being copied out are held one by one."""
        if self._scheduler is not None:
            self._scheduler.side.finished(request)
        return False, None

    def has_pending_block_frees(self) -> bool:
        return self._scheduler is not None and self._scheduler.side.has_blocks_to_give()

    def has_pending_push_work(self) -> bool:
        """Steps go on until the workers have released what they copy out, and deleted what was to be forgotten."""
        return self._scheduler is not None and self._scheduler.side.needs_steps

    def reset_cache(self) -> bool:
        """From now on nothing is found of what was stored so far. The steps that follow delete it."""
        if self._scheduler is not None:
            self._scheduler.side.forget()
        return True

    # --- a worker's side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._worker = WorkerStack(self._options, self._vllm_config, self._kv_cache_config, kv_caches, self._seed)

    def get_handshake_metadata(self) -> Handshake | None:
        return self._worker.handshake if self._worker is not None else None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.side.begin(self._plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are asynchronous: a request runs when all of its layers are there."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Blocks are stored with all of their layers, after the step."""

    def wait_for_save(self) -> None:
        """Does not wait: blocks stay as they are until they are released."""
        if self._worker is not None:
            self._worker.side.offer_stores()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self._worker is None:
            return KVConnectorTransferResults()
        if self._plan.idle:
            self._worker.side.linger()
        self._worker.side.poll()
        ended = self._worker.side.take_ended_loads()
        self._failed_blocks = set(ended.failed_blocks)
        return KVConnectorTransferResults(finished_recving=set(ended.request_ids))

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Called after `get_transfer_results`, in the same step."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def build_connector_worker_meta(self) -> WorkerReport | None:
        return self._worker.side.take_report() if self._worker is not None else None

    # --- both

    def get_kv_connector_stats(self) -> ForebayStats | None:
        stack = self._worker or self._scheduler
        numbers = stack.take_numbers() if stack is not None else {}
        return ForebayStats(data=numbers) if numbers else None

    def shutdown(self) -> None:
        for stack in (self._worker, self._scheduler):
            if stack is not None:
                stack.close()
        self._worker = self._scheduler = None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ForebayStats:
        return ForebayStats(data=data if data is not None else {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> ForebayMetrics:
        return ForebayMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @property
    def _block_tokens(self) -> int:
        return int(self._kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size)

    @property
    def _plan(self) -> StepPlan:
        plan = self._get_connector_metadata()
        assert isinstance(plan, StepPlan)
        return plan
