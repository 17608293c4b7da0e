"""Scheduler side of a consumer: what is loaded, once, and when the producer may let go."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import numpy as np

from mooncake_hetero_tp.core.effects import PullRequest
from mooncake_hetero_tp.types import EngineId, RequestId, TokenRange, TransferId
from mooncake_hetero_tp.vllm_adapter.metadata import StepMetadata
from mooncake_hetero_tp.vllm_adapter.params import RemotePrefill
from mooncake_hetero_tp.vllm_adapter.prompts import Prompt, is_turned_away

logger = logging.getLogger(__name__)

MAX_RELEASED = 65536
"""Released transfers remembered, so that a sibling that arrives late computes its prompt itself."""


class Releaser(Protocol):
    """Sends Releases in the background (`io.release.ReleaseClient`)."""

    def release(self, transfer_id: TransferId, engine_id: EngineId, bootstrap: str) -> None: ...


class _Phase(StrEnum):
    """Life of one remote load; it moves only downwards."""

    UNUSED = "unused"
    """The remote KV may still be loaded."""
    LOADING = "loading"
    """The workers have been told."""
    ABANDONED = "abandoned"
    """The request was finished while it was loading; the workers' report is still due."""
    USED = "used"
    """Loaded, failed, or not needed: from here on the request is local (a remote load is single-use)."""


@dataclass(slots=True)
class _Load:
    """One request whose prompt was prefilled elsewhere."""

    request_id: RequestId
    prompt: Prompt
    remote: RemotePrefill
    phase: _Phase = _Phase.UNUSED
    local_tokens: int = 0
    """Tokens already here when vLLM last asked."""


class ConsumerSide:
    """Tracks remote loads from arrival to Release.

    Children of one `n > 1` request share a transfer; the Release goes out when the last child that
    vLLM has told us of is done with it. A child that arrives after that computes its prompt itself.
    """

    def __init__(
        self,
        ranges: Callable[[int, int], tuple[TokenRange, ...]],
        transfer_blocks: Callable[[Sequence[Sequence[int]]], Sequence[Sequence[int]]],
        releaser: Releaser,
    ) -> None:
        """`ranges(start, end)`: tokens to load per transfer group; `transfer_blocks`: those groups' lists."""
        self._ranges = ranges
        self._transfer_blocks = transfer_blocks
        self._releaser = releaser
        self._loads: dict[RequestId, _Load] = {}
        self._users: dict[TransferId, set[RequestId]] = {}
        self._released: OrderedDict[TransferId, None] = OrderedDict()

    def arrived(self, request: Any, remote: RemotePrefill) -> None:
        """A request with a remote prefill; repeats change nothing."""
        request_id = RequestId(request.request_id)
        if request_id in self._loads:
            return
        load = _Load(request_id, Prompt.of(request), remote)
        if remote.transfer_id in self._released:
            logger.info(
                "request %s: transfer %s was released before; nothing is loaded", *(request_id, remote.transfer_id)
            )
            self._release(remote)
            return
        if (rival := self._rival(load)) is not None:
            logger.log(
                logging.DEBUG if is_turned_away(request) else logging.ERROR,
                "request %s: transfer id %s is in use by request %s with another prompt; its prompt is computed "
                "here. Transfer ids must be unique among live requests; correct the proxy",
                *(request_id, remote.transfer_id, rival.request_id),
            )
            return
        self._loads[request_id] = load
        self._users.setdefault(remote.transfer_id, set()).add(request_id)

    def matched_tokens(self, request: Any, local_tokens: int) -> int:
        """External tokens beyond `local_tokens`: all of the prompt but its last token, which runs here."""
        load = self._loads.get(RequestId(request.request_id))
        if load is None or load.phase is not _Phase.UNUSED:
            return 0
        load.local_tokens = local_tokens
        return max(int(request.num_prompt_tokens) - 1 - local_tokens, 0)

    def allocated(self, request: Any, blocks: Any, external_tokens: int, step: StepMetadata) -> None:
        """Blocks are there: load `external_tokens`, or nothing (a full local hit)."""
        load = self._loads.get(RequestId(request.request_id))
        if load is None or load.phase is not _Phase.UNUSED:
            return  # called again for the blocks after the load
        if external_tokens <= 0:
            self._used(load)
            return
        load.phase = _Phase.LOADING
        start = load.local_tokens
        lists = self._transfer_blocks(blocks.get_block_ids())
        step.pulls.append(
            PullRequest(
                request_id=load.request_id,
                transfer_id=load.remote.transfer_id,
                engine_id=load.remote.engine_id,
                bootstrap=load.remote.bootstrap,
                ranges=self._ranges(start, start + external_tokens),
                blocks=tuple(np.asarray(ids, dtype=np.int32) for ids in lists),
            )
        )

    def loaded(self, request_id: str, step: StepMetadata) -> None:
        """All ranks have reported the load, well or badly."""
        load = self._loads.get(RequestId(request_id))
        if load is None:
            return
        if load.phase is _Phase.ABANDONED:
            del self._loads[load.request_id]
            step.cancelled = [other for other in step.cancelled if other != load.request_id]
            return
        self._used(load)

    def finished(self, request: Any, step: StepMetadata) -> None:
        """The request was finished or aborted, at any point of its life.

        While it is loading, the producer's blocks are free at once, for nothing that a running read still
        brings will count; our own pages are free when the workers have reported (sglang#24527).
        """
        load = self._loads.get(RequestId(request.request_id))
        if load is None:
            return
        if load.phase is _Phase.LOADING:
            self._used(load)
            load.phase = _Phase.ABANDONED
            step.cancelled.append(load.request_id)
            return
        if load.phase is _Phase.UNUSED:
            self._used(load)
        del self._loads[load.request_id]

    def _used(self, load: _Load) -> None:
        load.phase = _Phase.USED
        users = self._users.get(load.remote.transfer_id, set())
        users.discard(load.request_id)
        if not users and self._users.pop(load.remote.transfer_id, None) is not None:
            self._release(load.remote)

    def _release(self, remote: RemotePrefill) -> None:
        self._released[remote.transfer_id] = None
        self._released.move_to_end(remote.transfer_id)
        while len(self._released) > MAX_RELEASED:
            self._released.popitem(last=False)
        self._releaser.release(remote.transfer_id, remote.engine_id, remote.bootstrap)

    def _rival(self, load: _Load) -> _Load | None:
        """Another live request that uses the same transfer id for a different prompt."""
        others = (self._loads[user] for user in self._users.get(load.remote.transfer_id, ()))
        return next((other for other in others if not other.prompt.same_as(load.prompt)), None)
