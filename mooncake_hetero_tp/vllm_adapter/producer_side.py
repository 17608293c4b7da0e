"""Scheduler side of a producer: which finished prefills are kept for whom."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.v1.request import RequestStatus

from mooncake_hetero_tp.core.effects import Kept
from mooncake_hetero_tp.io.work import Handover
from mooncake_hetero_tp.types import EngineId, RequestId, TransferId
from mooncake_hetero_tp.vllm_adapter.metadata import StepMetadata
from mooncake_hetero_tp.vllm_adapter.params import PrefillOrder, answer, mint_transfer_id
from mooncake_hetero_tp.vllm_adapter.prompts import Prompt, is_turned_away, truncate_prompt

logger = logging.getLogger(__name__)

_HANDED_OVER = frozenset({RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED})
"""Statuses with a complete prompt: the cap, and EOS as the first token (vllm#46008)."""


@dataclass(frozen=True, slots=True)
class _Prefill:
    """A request whose prompt somebody else will decode."""

    request_id: RequestId
    prompt: Prompt
    transfer_id: TransferId | None


class ProducerSide:
    """Tracks prefills from arrival to FinishedSending.

    Children of one `n > 1` request share a transfer id and a prompt; the first to finish hands over for
    all of them, the others free their blocks. Two *different* prompts under one id would let a consumer
    read the wrong one, so the later is refused by name and never handed over.
    """

    def __init__(self, engine_id: EngineId, bootstrap: str, *, exact_end: bool) -> None:
        """`exact_end`: the model has groups that drop old pages, so the prompt is truncated by one token."""
        self._engine_id = engine_id
        self._bootstrap = bootstrap
        self._exact_end = exact_end
        self._running: dict[RequestId, _Prefill] = {}
        self._kept: dict[RequestId, _Prefill] = {}
        self._holders: dict[TransferId, dict[RequestId, _Prefill]] = {}

    def arrived(self, request: Any, order: PrefillOrder) -> None:
        """A request to prefill for somebody else; repeats change nothing."""
        request_id = RequestId(request.request_id)
        if request_id in self._running:
            return
        if self._exact_end:
            truncate_prompt(request)
        prefill = _Prefill(request_id, Prompt.of(request), order.transfer_id)
        if (rival := self._rival(prefill)) is not None:
            logger.log(
                logging.DEBUG if is_turned_away(request) else logging.ERROR,
                "request %s: transfer id %s is in use by request %s with another prompt; this request will not "
                "be handed over. Transfer ids must be unique among live requests; correct the proxy",
                *(request_id, order.transfer_id, rival.request_id),
            )
            return
        self._running[request_id] = prefill
        if prefill.transfer_id is not None:
            self._holders.setdefault(prefill.transfer_id, {})[request_id] = prefill

    def finished(
        self, request: Any, block_ids: Sequence[Sequence[int]], step: StepMetadata
    ) -> tuple[bool, dict[str, Any] | None]:
        """For a finished request: whether its blocks stay, and what the response carries."""
        prefill = self._running.pop(RequestId(request.request_id), None)
        if prefill is None:
            return False, None
        complete = request.status in _HANDED_OVER and any(len(blocks) for blocks in block_ids)
        if not complete:
            self._given_up(prefill, step)
            return False, None
        transfer_id = prefill.transfer_id or mint_transfer_id()
        reply = answer(transfer_id, self._engine_id, self._bootstrap)
        if any(holder in self._kept for holder in self._holders.get(transfer_id, {})):
            self._forget(prefill)  # a sibling has handed the same prompt over
            return False, reply
        self._kept[prefill.request_id] = prefill
        step.kept.append(
            Kept(
                request_id=prefill.request_id,
                transfer_id=transfer_id,
                blocks=tuple(np.asarray(blocks, dtype=np.int32) for blocks in block_ids),
                computed_tokens=min(int(request.num_computed_tokens), int(request.num_prompt_tokens)),
                ready=True,
            )
        )
        return True, reply

    def sent(self, request_id: str) -> None:
        """All workers have let go of a kept request."""
        prefill = self._kept.pop(RequestId(request_id), None)
        if prefill is not None:
            self._forget(prefill)

    def _rival(self, prefill: _Prefill) -> _Prefill | None:
        """Another live request with the same transfer id and a different prompt."""
        if prefill.transfer_id is None:
            return None
        holders = self._holders.get(prefill.transfer_id, {}).values()
        return next((holder for holder in holders if not holder.prompt.same_as(prefill.prompt)), None)

    def _given_up(self, prefill: _Prefill, step: StepMetadata) -> None:
        """Tell waiting consumers at once, unless a sibling still hands over."""
        self._forget(prefill)
        if prefill.transfer_id is not None and prefill.transfer_id not in self._holders:
            step.aborted.append(Handover(prefill.transfer_id, prefill.request_id))

    def _forget(self, prefill: _Prefill) -> None:
        if prefill.transfer_id is None:
            return
        holders = self._holders.get(prefill.transfer_id, {})
        holders.pop(prefill.request_id, None)
        if not holders:
            self._holders.pop(prefill.transfer_id, None)
