"""The class vLLM loads: role split and delegation, nothing else.

By name through the `vllm.general_plugins` entry point, or by
`kv_connector_module_path=mooncake_hetero_tp.connector`. Newcomer's path: here, then
`vllm_adapter/worker.py`, `io/runtime.py`, `core/consumer.py`, `core/plan.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from mooncake_hetero_tp.core.releaser import ReleaserConfig
from mooncake_hetero_tp.errors import LocalUsageError
from mooncake_hetero_tp.io.release import ReleaseClient
from mooncake_hetero_tp.types import EngineId
from mooncake_hetero_tp.vllm_adapter.environment import read_config
from mooncake_hetero_tp.vllm_adapter.logs import adopt_vllm_logging
from mooncake_hetero_tp.vllm_adapter.metadata import StepMetadata
from mooncake_hetero_tp.vllm_adapter.metrics import HeteroTPPromMetrics, HeteroTPStats
from mooncake_hetero_tp.vllm_adapter.plugin import ensure_layout_fallback
from mooncake_hetero_tp.vllm_adapter.scheduler import SchedulerSide
from mooncake_hetero_tp.vllm_adapter.worker import WorkerSide, published_host

logger = logging.getLogger(__name__)

REQUIRED_LAYOUT = "LBHNC"
"""Head-major, each page one run: TP cuts it into few long pieces. Other layouts are carried too."""


class MooncakeHeteroTPConnector(KVConnectorBase_V1, SupportsHMA):
    """KV transfer over Mooncake between engines of unlike TP size, block size, layout and pipeline split."""

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Raises ConfigError for settings, models and libraries that cannot work."""
        super().__init__(vllm_config, role, kv_cache_config)
        adopt_vllm_logging()
        config = read_config(vllm_config)
        self._scheduler_side: SchedulerSide | None = None
        self._worker_side: WorkerSide | None = None
        self._release: ReleaseClient | None = None
        if role is KVConnectorRole.WORKER:
            self._worker_side = WorkerSide(vllm_config, kv_cache_config, config)
            return
        self._release = ReleaseClient(
            EngineId(str(vllm_config.kv_transfer_config.engine_id)),
            ReleaserConfig(deadline_s=config.environment.keep_s),
            connector_timeout_s=config.environment.connector_timeout_s,
        )
        self._scheduler_side = SchedulerSide(vllm_config, kv_cache_config, config, published_host(), self._release)
        if vllm_config.kv_transfer_config.is_kv_consumer:
            self._release.start()

    # --- class methods that vLLM asks before there is an instance --------------------------------

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """A wish, not a demand; None for MLA, whose pages have no heads, and without a model."""
        ensure_layout_fallback()
        if vllm_config.model_config is None or vllm_config.model_config.use_mla:
            return None
        return REQUIRED_LAYOUT

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """False: sleeping frees the memory that peers read from."""
        del kv_transfer_config
        return False

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> HeteroTPStats:
        return HeteroTPStats.from_dict(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> HeteroTPPromMetrics:
        return HeteroTPPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # --- scheduler side --------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        self._scheduler.on_new_request(request)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """All transfer groups: vLLM's zeroing of the others would race the read."""
        del request
        group_ids: tuple[int, ...] = self._kv_cache_config.transfer_group_ids
        return group_ids

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        del scheduler_output
        return self._scheduler.build_connector_meta()

    def update_connector_output(self, connector_output: Any) -> None:
        self._scheduler.update_connector_output(connector_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.request_finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[Sequence[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.request_finished(request, block_ids)

    # --- worker side -----------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._worker.register_kv_caches(kv_caches)

    def unregister_kv_caches(self) -> None:
        self._worker.unregister_kv_caches()

    def restore_kv_caches(self) -> None:
        self._worker.restore_kv_caches()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Enqueue this step's transfers; they run behind the forward pass and are never waited for here."""
        del forward_context, kwargs
        metadata = self._connector_metadata
        if isinstance(metadata, StepMetadata):
            self._worker.start_load_kv(metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: a request runs only after its whole load was reported."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing to save: consumers read the blocks where they are."""

    def wait_for_save(self) -> None:
        """Nothing to wait for, see `save_kv_layer`."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending or None, results.finished_recving or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Failures are named per request, never as block ids, which kill engines with several KV groups."""
        del finished_req_ids
        return self._worker.get_transfer_results()

    def get_kv_connector_stats(self) -> HeteroTPStats | None:
        return None if self._worker_side is None else self._worker_side.get_kv_connector_stats()

    # --- both ------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """End threads, sockets and registrations; bounded and idempotent."""
        if self._worker_side is not None:
            self._worker_side.shutdown()
        if self._release is not None:
            self._release.close()

    @property
    def _scheduler(self) -> SchedulerSide:
        if self._scheduler_side is None:
            raise LocalUsageError("a scheduler-side hook was called on a connector in the worker role")
        return self._scheduler_side

    @property
    def _worker(self) -> WorkerSide:
        if self._worker_side is None:
            raise LocalUsageError("a worker-side hook was called on a connector in the scheduler role")
        return self._worker_side
