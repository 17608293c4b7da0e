"""Worker side of the connector: KV memory in, steps in, ended transfers out.

Everything slow happens in `io.runtime.WorkerRuntime`'s threads; the hooks vLLM calls in a step only
enqueue and collect.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from typing import Any

import torch
from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.parallel_state import (
    get_pp_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from vllm.utils.network_utils import get_ip
from vllm.v1.attention.backends.utils import NULL_BLOCK_ID

from mooncake_hetero_tp.config import HeteroTPConfig, HostPort
from mooncake_hetero_tp.core.consumer import ConsumerConfig
from mooncake_hetero_tp.core.cost import Mode
from mooncake_hetero_tp.core.effects import Kept
from mooncake_hetero_tp.core.producer import ProducerConfig
from mooncake_hetero_tp.core.regions import RankTable
from mooncake_hetero_tp.errors import HeteroTPError
from mooncake_hetero_tp.io.address import choose_host
from mooncake_hetero_tp.io.engine import MooncakeEngine
from mooncake_hetero_tp.io.runtime import RuntimeConfig, WorkerRuntime
from mooncake_hetero_tp.io.staging import host_ring
from mooncake_hetero_tp.io.work import Handover, StepWork
from mooncake_hetero_tp.types import EngineId, Identity, Incarnation, Rank
from mooncake_hetero_tp.vllm_adapter.device import DeviceTails, ForwardGate, permit_amx
from mooncake_hetero_tp.vllm_adapter.environment import (
    bootstrap_target,
    launches_bootstrap,
    refuse_context_parallelism,
    registered_dp_rank,
)
from mooncake_hetero_tp.vllm_adapter.metadata import StepMetadata
from mooncake_hetero_tp.vllm_adapter.metrics import HeteroTPStats
from mooncake_hetero_tp.vllm_adapter.place import Engine, Place
from mooncake_hetero_tp.vllm_adapter.probe import build_table
from mooncake_hetero_tp.vllm_adapter.specs import refuse_unsupported
from mooncake_hetero_tp.vllm_adapter.staging import Staging, staging_for

logger = logging.getLogger(__name__)


class WorkerSide:
    """One worker of an engine. All methods run in vLLM's main thread and return at once, start-up apart."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, config: HeteroTPConfig) -> None:
        """Check what can be checked before the memory is known: model, settings, Mooncake itself.

        Raises:
            ConfigError: what is wrong and what to do.
            MissingLibraryError: Mooncake does not load; in the loader's own words.
        """
        refuse_unsupported(kv_cache_config)
        refuse_context_parallelism(vllm_config)
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._config = config
        self._transfer = vllm_config.kv_transfer_config
        self._rank = own_rank(vllm_config, config)
        self._host = published_host()
        self._engine: MooncakeEngine | None = self._make_engine()
        self._views: dict[str, torch.Tensor] = {}
        self._runtime: WorkerRuntime | None = None
        self._gate = ForwardGate(torch.device("cpu"))
        self._unserved = KVConnectorTransferResults()

    # --- start and end ---------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Describe and register the KV memory and join the engine's bootstrap; blocks until that is done."""
        self.unregister_kv_caches()
        self._views = dict(kv_caches)
        probe = Engine(
            vllm_config=self._vllm_config,
            kv_cache_config=self._kv_cache_config,
            place=Place(
                tp_size=get_tensor_model_parallel_world_size(),
                tp_rank=self._rank.tp,
                pp_size=self._vllm_config.parallel_config.pipeline_parallel_size,
            ),
            backend_encodings=self._config.backend_encodings,
        )
        table = build_table(probe, kv_caches)
        views = [self._views[name] for name in dict.fromkeys(region.layer for region in table.regions)]
        self._gate = ForwardGate(views[0].device)
        if not self._gate.is_needed:
            permit_amx()
        staging = staging_for(self._config, views[0].device)
        runtime = WorkerRuntime(
            self._runtime_config(staging),
            self._identity(),
            table,
            self._engine or self._make_engine(),
            clear_tails=DeviceTails(views) if self._gate.is_needed and staging is None else None,
            make_ring=host_ring if staging is None else staging.make_ring,
            executor=None if staging is None else staging.executor,
        )
        self._engine = None  # the runtime's now
        runtime.start()
        self._runtime = runtime
        self._log_table(table)

    def restore_kv_caches(self) -> None:
        """After `unregister_kv_caches`: the same memory again, as a new incarnation. Idempotent."""
        if self._runtime is None and self._views:
            self.register_kv_caches(self._views)

    def unregister_kv_caches(self) -> None:
        """End all transfers and let go of the memory. Idempotent."""
        runtime, self._runtime = self._runtime, None
        if runtime is not None:
            runtime.close()

    def shutdown(self) -> None:
        """Bounded; idempotent."""
        self.unregister_kv_caches()
        if self._engine is not None:
            self._engine.close()

    def _make_engine(self) -> MooncakeEngine:
        return MooncakeEngine(
            self._host,
            lease_s=self._config.lease_s,
            protocol=self._config.mooncake_protocol,
            device_name=self._config.device_name,
            serves=self._transfer.is_kv_producer,
            reads=self._transfer.is_kv_consumer,
        )

    def _identity(self) -> Identity:
        return Identity(EngineId(self._transfer.engine_id), Incarnation(secrets.token_hex(8)), self._rank)

    def _runtime_config(self, staging: Staging | None) -> RuntimeConfig:
        config, environment = self._config, self._config.environment
        produces, consumes = self._transfer.is_kv_producer, self._transfer.is_kv_consumer
        serves_bootstrap = produces and launches_bootstrap(self._vllm_config, config, self._rank)
        any_address = "::" if ":" in self._host else "0.0.0.0"  # noqa: S104  # as vLLM's server does
        return RuntimeConfig(
            host=self._host,
            producer=(
                ProducerConfig(keep_s=environment.keep_s, lease_s=config.lease_s, null_block=NULL_BLOCK_ID)
                if produces
                else None
            ),
            consumer=(
                ConsumerConfig(
                    deadline_s=config.load_deadline_s,
                    # A query and a handshake, each answered by a worker whose main thread may be compiling.
                    connect_timeout_s=min(2 * environment.connector_timeout_s, config.load_deadline_s),
                )
                if consumes
                else None
            ),
            num_workers=config.num_workers,
            bootstrap_bind=HostPort(any_address, environment.bootstrap_port) if serves_bootstrap else None,
            bootstrap_address=bootstrap_target(self._vllm_config, config) if produces else None,
            connector_timeout_s=environment.connector_timeout_s,
            null_block=NULL_BLOCK_ID,
            transfer_mode=Mode(config.transfer_mode),
            staging=None if staging is None else staging.size,
        )

    def _log_table(self, table: RankTable) -> None:
        logger.info(
            "%s of engine %s: %d regions in layout %s, encodings %s, blocks of %s tokens, %.1f MiB registered over %s",
            self._rank,
            self._transfer.engine_id,
            len(table.regions),
            table.layout,
            ", ".join(sorted({region.encoding for region in table.regions})),
            ", ".join(str(group.block_size) for group in table.groups),
            sum(buffer.length_bytes for buffer in table.buffers) / 2**20,
            self._config.mooncake_protocol,
        )

    # --- every step ------------------------------------------------------------------------------

    def start_load_kv(self, step: StepMetadata) -> None:
        """Enqueue what the scheduler side decided."""
        if step.is_empty:
            return
        kept = self._gated(step.kept)
        self._submit(StepWork(kept=kept, aborted=step.aborted, pulls=step.pulls, cancelled=step.cancelled))

    def get_transfer_results(self) -> KVConnectorTransferResults:
        """What ended since the last call; a failed load is also a finished one."""
        if ready := self._gate.passed():
            self._submit(StepWork(ready=ready))
        results, self._unserved = self._unserved, KVConnectorTransferResults()
        if self._runtime is not None:
            ended = self._runtime.collect()
            results.finished_sending |= ended.sending
            results.finished_recving |= ended.recving
            results.failed_recving |= ended.failed
        return results

    def get_kv_connector_stats(self) -> HeteroTPStats | None:
        if self._runtime is None:
            return None
        stats = HeteroTPStats.of(self._runtime.stats())
        return None if stats.is_empty() else stats

    def _gated(self, kept: list[Kept]) -> list[Kept]:
        """The kept requests, not ready yet where the device is still writing them."""
        if not kept or not self._gate.is_needed:
            return kept
        self._gate.wait_for([Handover(fact.transfer_id, fact.request_id) for fact in kept])
        return [
            Kept(
                request_id=fact.request_id,
                transfer_id=fact.transfer_id,
                blocks=fact.blocks,
                computed_tokens=fact.computed_tokens,
                ready=False,
            )
            for fact in kept
        ]

    def _submit(self, work: StepWork) -> None:
        """Hand over to the runtime; where that is gone, loads fail and kept blocks are free."""
        try:
            if self._runtime is not None:
                self._runtime.submit(work)
                return
            logger.error("KV transfers are asked for, but no KV cache is registered")
        except HeteroTPError:
            logger.exception("KV transfers are not possible any more; the engine serves on without them")
        pulls = {str(pull.request_id) for pull in work.pulls}
        self._unserved.finished_recving |= pulls
        self._unserved.failed_recving |= pulls
        self._unserved.finished_sending |= {str(fact.request_id) for fact in work.kept}


def own_rank(vllm_config: Any, config: HeteroTPConfig) -> Rank:
    """This worker's rank, the data-parallel part as it goes by at its bootstrap server."""
    return Rank(
        dp=registered_dp_rank(vllm_config, config),
        pp=get_pp_group().rank_in_group,
        tp=get_tensor_model_parallel_rank(),
    )


def published_host() -> str:
    """The address peers use; an explicit VLLM_HOST_IP wins, a doubtful choice is said in the log."""
    choice = choose_host(envs.VLLM_HOST_IP or None, get_ip())
    if choice.warning:
        logger.warning("%s", choice.warning)
    return choice.host
