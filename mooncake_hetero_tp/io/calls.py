"""One call of the foreign engine that sleeps while it waits.

Mooncake's own wait polls without a pause. That costs a core a call, and on a machine with few cores it can keep the
peer from running at all: with each engine in a session of its own, Linux 6.18 left a whole producer without a core
for 20 s while two such waits ran on two cores, until Mooncake's timeout ended them (perf and /proc/*/schedstat).

The only status that Mooncake gives without waiting is that of a batch's first descriptor. So the last descriptor goes
as a batch of its own and is looked at now and then; the rest was queued before it and is done, or nearly, when it is.
"""

from __future__ import annotations

import time
from typing import Final, Protocol

from mooncake_hetero_tp.core.binding import Descriptors

_FIRST_PAUSE_S: Final = 5e-5
_LONGEST_PAUSE_S: Final = 1e-3
_PAUSE_SHARE: Final = 0.1
"""A pause is this part of the time waited so far: what is late by it is late by a tenth."""
_NO_BATCH: Final = 0
_DONE: Final = 1
_UNDER_WAY: Final = 0
_FAILED: Final = -1


class BatchEngine(Protocol):
    """What is used of `mooncake.engine.TransferEngine`; no method here waits but the last."""

    def batch_transfer_async_read(
        self, target: str, buffers: list[int], peer_buffers: list[int], lengths: list[int]
    ) -> int:
        """Number of the batch; 0: refused."""

    def transfer_check_status(self, batch: int) -> int:
        """Of a batch's first descriptor: 1 done, 0 under way, negative failed. Frees the batch when it is done."""

    def get_batch_transfer_status(self, batches: list[int]) -> int:
        """Spins until all are done (0) or one has failed or run into the engine's timeout (-1)."""


def read_batch(engine: BatchEngine, peer: str, batch: Descriptors, timeout_s: float) -> int:
    """Read all descriptors of a batch: 0, or a negative code. Blocks without spinning; releases the GIL.

    `timeout_s` is the engine's own: whoever waits longer for the last descriptor finds the others timed out.
    """
    rest = _submit(engine, peer, batch, slice(0, -1)) if batch.count > 1 else None
    if rest == _NO_BATCH:
        return _FAILED
    last = _submit(engine, peer, batch, slice(-1, None))
    code = _FAILED if last == _NO_BATCH else _wait(engine, last, timeout_s)
    if rest is not None:
        code = engine.get_batch_transfer_status([rest]) or code
    return code


def _submit(engine: BatchEngine, peer: str, batch: Descriptors, part: slice) -> int:
    return engine.batch_transfer_async_read(
        peer, batch.dst[part].tolist(), batch.src[part].tolist(), batch.length[part].tolist()
    )


def _wait(engine: BatchEngine, batch: int, timeout_s: float) -> int:
    """0 when the batch's only descriptor is done; -1 when it has failed or `timeout_s` are over."""
    began = time.monotonic()
    while (status := engine.transfer_check_status(batch)) == _UNDER_WAY:
        waited = time.monotonic() - began
        if waited >= timeout_s:
            return _FAILED
        time.sleep(min(max(_PAUSE_SHARE * waited, _FIRST_PAUSE_S), _LONGEST_PAUSE_S))
    return 0 if status == _DONE else _FAILED
