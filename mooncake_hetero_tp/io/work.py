"""What passes between vLLM's worker and the runtime: one step's work in, ended requests out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mooncake_hetero_tp.core.effects import Kept, PullRequest
from mooncake_hetero_tp.types import RequestId, TransferId


class Handover(NamedTuple):
    """A producer's request and the transfer it serves."""

    transfer_id: TransferId
    request_id: RequestId


@dataclass(frozen=True, kw_only=True, slots=True)
class StepWork:
    """What one engine step asks of the runtime."""

    kept: Sequence[Kept] = ()
    """Producer: requests that finished; their blocks stay until `Finished.sending` names them."""
    ready: Sequence[Handover] = ()
    """Producer: the GPU has written the blocks of these (kept with `ready=False`)."""
    aborted: Sequence[Handover] = ()
    """Producer: these will not be handed over."""
    pulls: Sequence[PullRequest] = ()
    """Consumer: load these."""
    cancelled: Sequence[RequestId] = ()
    """Consumer: these were aborted while loading; each is still reported once."""


@dataclass(slots=True)
class Finished:
    """What ended since the last `collect`."""

    sending: set[RequestId] = field(default_factory=set)
    """Producer: the blocks of these requests may be freed."""
    recving: set[RequestId] = field(default_factory=set)
    """Consumer: the loads of these ended, well or badly; nothing writes into their blocks any more."""
    failed: set[RequestId] = field(default_factory=set)
    """Those of `recving` whose bytes did not come and that nobody cancelled."""
