"""Connectors that write down when vLLM called them: ours and vLLM's own, for the latency rows only.

Loaded into the engines by `kv_connector_module_path`. Each process appends lines `nanoseconds event
request` to one file of its own under $MHT_BENCH_STAMPS; CLOCK_MONOTONIC is one clock for all processes
of a machine.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import MooncakeConnector

from mooncake_hetero_tp.connector import MooncakeHeteroTPConnector

FOLDER = "MHT_BENCH_STAMPS"

FINISHED = "finished"
"""The producer's scheduler calls `request_finished`."""
ASKED = "asked"
"""The consumer's scheduler calls `update_state_after_alloc` with tokens to load."""
STARTED = "started"
"""A worker's `start_load_kv` with something in it."""
READY = "ready"
"""A consumer worker's `get_finished` names the request."""
LOADED = "loaded"
"""The consumer's scheduler hears of it from all workers."""


def _stamp(event: str, requests: Iterable[str]) -> None:
    now = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    text = "".join(f"{now} {event} {request}\n" for request in requests)
    if not text:
        return
    path = Path(os.environ[FOLDER]) / f"{os.getpid()}.stamps"
    with path.open("a", encoding="ascii") as file:
        file.write(text)


class Stamps:
    """Comes before the connector in the order of calls."""

    def request_finished(self, request: Any, block_ids: list[int]) -> Any:
        _stamp(FINISHED, [request.request_id])
        return super().request_finished(request, block_ids)  # type: ignore[misc]

    def request_finished_all_groups(self, request: Any, block_ids: tuple[Sequence[int], ...]) -> Any:
        _stamp(FINISHED, [request.request_id])
        return super().request_finished_all_groups(request, block_ids)  # type: ignore[misc]

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            _stamp(ASKED, [request.request_id])
        super().update_state_after_alloc(request, blocks, num_external_tokens)  # type: ignore[misc]

    def update_connector_output(self, connector_output: Any) -> None:
        _stamp(LOADED, connector_output.finished_recving or ())
        super().update_connector_output(connector_output)  # type: ignore[misc]

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)  # type: ignore[misc]
        _stamp(STARTED, self.in_step())

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)  # type: ignore[misc]
        _stamp(READY, results.finished_recving - results.failed_recving)
        return results

    def in_step(self) -> list[str]:
        """Requests that this step's metadata hands over or loads."""
        raise NotImplementedError


class StampedHeteroTP(Stamps, MooncakeHeteroTPConnector):
    """Ours."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)

    def in_step(self) -> list[str]:
        step = self._connector_metadata
        return [str(fact.request_id) for facts in (step.kept, step.pulls) for fact in facts]


class StampedMooncake(Stamps, MooncakeConnector):  # type: ignore[misc]  # vLLM is Any to mypy
    """vLLM's own."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)

    def in_step(self) -> list[str]:
        step = self._connector_metadata
        sent = [request for request, (_, blocks) in step.reqs_to_send.items() if blocks]
        return [*sent, *(request for requests in step.reqs_to_recv.values() for request in requests)]
