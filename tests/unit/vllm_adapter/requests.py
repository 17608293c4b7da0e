"""Real vLLM requests, and a releaser that notes what it was told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request, RequestStatus

from mooncake_hetero_tp.types import EngineId, TransferId

PREFILL = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "t1"}
DECODE = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "transfer_id": "t1",
    "remote_engine_id": "P",
    "remote_bootstrap_addr": "http://p0:8998",
}


def make_request(
    request_id: str, tokens: int | Sequence[int] = 70, params: dict[str, Any] | None = None, **sampling: Any
) -> Request:
    """A request of `tokens` prompt tokens (a count or the ids)."""
    prompt = list(range(1, tokens + 1)) if isinstance(tokens, int) else list(tokens)
    extra = None if params is None else {"kv_transfer_params": params}
    return Request(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(**({"max_tokens": 5} | sampling), extra_args=extra),
        pooling_params=None,
    )


def finish(request: Request, status: RequestStatus, computed: int | None = None) -> Request:
    """The request as vLLM's scheduler would finish it."""
    request.status = status
    request.num_computed_tokens = request.num_prompt_tokens if computed is None else computed
    return request


class Blocks:
    """Stands in for KVCacheBlocks."""

    def __init__(self, *groups: Sequence[int]) -> None:
        self._groups = tuple(list(group) for group in groups)

    def get_block_ids(self) -> tuple[list[int], ...]:
        return self._groups


class NotedReleases:
    """A releaser that only remembers, in order."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, str, str]] = []

    def release(self, transfer_id: TransferId, engine_id: EngineId, bootstrap: str) -> None:
        self.sent.append((transfer_id, engine_id, bootstrap))
