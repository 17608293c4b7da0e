"""Scheduler side of the connector: vLLM's hooks, spread over the producer's and the consumer's part."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from mooncake_hetero_tp.config import HeteroTPConfig
from mooncake_hetero_tp.types import EngineId, TokenRange
from mooncake_hetero_tp.vllm_adapter.consumer_side import ConsumerSide, Releaser
from mooncake_hetero_tp.vllm_adapter.environment import advertised_bootstrap, refuse_context_parallelism
from mooncake_hetero_tp.vllm_adapter.metadata import StepMetadata
from mooncake_hetero_tp.vllm_adapter.params import Order, PrefillOrder, RemotePrefill, Unusable, parse
from mooncake_hetero_tp.vllm_adapter.producer_side import ProducerSide
from mooncake_hetero_tp.vllm_adapter.ranges import load_ranges, reach_of
from mooncake_hetero_tp.vllm_adapter.specs import refuse_unsupported

logger = logging.getLogger(__name__)

_MAX_TOLD = 64
"""Distinct reasons that are warned about; clients write them, so they are bounded."""


class SchedulerSide:
    """Answers vLLM's scheduler; runs in its thread and never blocks.

    Token rule: a consumer reports N-1 external tokens of an N-token prompt (0 of a one-token prompt)
    and runs the last prompt token itself.
    """

    def __init__(
        self, vllm_config: Any, kv_cache_config: Any, config: HeteroTPConfig, own_host: str, releaser: Releaser
    ) -> None:
        """Raises ConfigError for models and parallel settings that cannot be carried."""
        refuse_unsupported(kv_cache_config)
        refuse_context_parallelism(vllm_config)
        transfer = vllm_config.kv_transfer_config
        self._kv_cache_config = kv_cache_config
        self._groups = [reach_of(group) for group in kv_cache_config.transfer_groups]
        self._whole_pages = bool(vllm_config.cache_config.enable_prefix_caching)
        self._releaser = releaser
        self._step = StepMetadata()
        self._producer = (
            ProducerSide(
                EngineId(transfer.engine_id),
                advertised_bootstrap(vllm_config, config, own_host),
                exact_end=any(group.is_partial for group in self._groups),
            )
            if transfer.is_kv_producer
            else None
        )
        self._consumer = (
            ConsumerSide(self._ranges, self._transfer_blocks, releaser) if transfer.is_kv_consumer else None
        )
        self._told: set[str] = set()

    def on_new_request(self, request: Any) -> None:
        """Take note of a request; may be called more than once."""
        order = parse(request.kv_transfer_params)
        if self._producer is not None and isinstance(order, PrefillOrder):
            self._producer.arrived(request, order)
        elif self._consumer is not None and isinstance(order, RemotePrefill):
            self._consumer.arrived(request, order)
        elif order is not None:
            self._not_transferred(request, order)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        if self._consumer is None:
            return 0, False
        count = self._consumer.matched_tokens(request, num_computed_tokens)
        return count, count > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._consumer is not None:
            self._consumer.allocated(request, blocks, num_external_tokens, self._step)

    def build_connector_meta(self) -> StepMetadata:
        step, self._step = self._step, StepMetadata()
        return step

    def request_finished(self, request: Any, block_ids: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        """Called exactly once per request, before its blocks are freed."""
        if self._consumer is not None:
            self._consumer.finished(request, self._step)
        if self._producer is None:
            return False, None
        return self._producer.finished(request, self._transfer_blocks(block_ids), self._step)

    def update_connector_output(self, output: Any) -> None:
        """Facts that all workers agree on; this may be the last step that runs, so nothing waits for another."""
        for request_id in output.finished_recving or ():
            if self._consumer is not None:
                self._consumer.loaded(request_id, self._step)
        for request_id in output.finished_sending or ():
            if self._producer is not None:
                self._producer.sent(request_id)

    def _ranges(self, start: int, end: int) -> tuple[TokenRange, ...]:
        return load_ranges(self._groups, start, end, whole_pages=self._whole_pages)

    def _transfer_blocks(self, block_ids: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        """The lists of the transfer groups, positions kept (null blocks included)."""
        if len(block_ids) != len(self._kv_cache_config.kv_cache_groups):
            return block_ids
        selected: Sequence[Sequence[int]] = self._kv_cache_config.select_transfer_block_ids(block_ids)
        return selected

    def _not_transferred(self, request: Any, order: Order) -> None:
        """Say once per reason why a request is served without a transfer."""
        if isinstance(order, Unusable):
            reason = f"kv_transfer_params cannot be used: {order.reason}"
        else:
            wanted = "a prefill for another engine" if isinstance(order, PrefillOrder) else "a remote prefill"
            reason = f"kv_transfer_params ask for {wanted}, which this engine's kv_role does not allow"
        new = reason not in self._told and len(self._told) < _MAX_TOLD
        if new:
            self._told.add(reason)
        log = logger.warning if new else logger.debug
        log("request %s: %s; it is served without KV transfer", request.request_id, reason)
