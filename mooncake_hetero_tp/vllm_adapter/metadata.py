"""What the scheduler side tells every worker of its engine in one step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from mooncake_hetero_tp.core.effects import Kept, PullRequest
from mooncake_hetero_tp.io.work import Handover
from mooncake_hetero_tp.types import RequestId


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Facts of one step, in the order in which a worker must take them; pickled to the workers."""

    kept: list[Kept] = field(default_factory=list)
    """Producer: prefills that finished; `ready` is the worker's to decide."""
    aborted: list[Handover] = field(default_factory=list)
    """Producer: requests that will never be handed over."""
    pulls: list[PullRequest] = field(default_factory=list)
    """Consumer: loads to start."""
    cancelled: list[RequestId] = field(default_factory=list)
    """Consumer: loads that nobody waits for any more; each is still reported once."""

    @property
    def is_empty(self) -> bool:
        return not (self.kept or self.aborted or self.pulls or self.cancelled)
