"""What a worker does about its device: order after the forward pass, clearing tails; on a CPU, permissions.

vLLM captures graphs after `register_kv_caches`, so nothing here touches the device from another thread
before the first metadata; the stream is made in the main thread, in the constructor.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from mooncake_hetero_tp.core.binding import TailView
from mooncake_hetero_tp.errors import LocalUsageError
from mooncake_hetero_tp.io.work import Handover

logger = logging.getLogger(__name__)


def permit_amx() -> None:
    """Ask the kernel for the AMX tile registers, where the CPU has them.

    vLLM's AMX attention kernel uses them without asking and lives on what some larger matrix product asked
    for before. After a pull a consumer's first forward is one token, no product asks, and the process dies
    of SIGILL (seen with vLLM 0.32, bfloat16).
    """
    supported, init = (getattr(torch.cpu, name, None) for name in ("_is_amx_tile_supported", "_init_amx"))
    if supported is not None and init is not None and supported() and not init():
        logger.warning("the kernel refuses the AMX tile registers; attention in bfloat16 may die of SIGILL")


class ForwardGate:
    """Tells which kept requests the device has finished writing; main thread only.

    The copy of a prefill must wait for the event of the forward that wrote it (sglang#33970: all but
    the last chunk damaged). One event a step covers all requests that finished with it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pending: deque[tuple[Any, list[Handover]]] = deque()

    @property
    def is_needed(self) -> bool:
        """Whether the device runs behind the main thread."""
        return self._device.type != "cpu"

    def wait_for(self, handovers: Sequence[Handover]) -> None:
        """Record an event on the current stream; `passed` names these once it has completed."""
        event = torch.Event(self._device.type)
        event.record()
        self._pending.append((event, list(handovers)))

    def passed(self) -> list[Handover]:
        """Handovers whose event has completed since the last call; never blocks."""
        done: list[Handover] = []
        while self._pending and self._pending[0][0].query():
            done.extend(self._pending.popleft()[1])
        return done


class DeviceTails:
    """Zeroes tails in device memory, on a stream of its own, and waits for it."""

    def __init__(self, views: Iterable[torch.Tensor]) -> None:
        """`views`: all tensors that may be cleared; whole allocations are kept alive by them."""
        self._storages = {
            view.untyped_storage().data_ptr(): torch.empty(0, dtype=torch.uint8, device=view.device).set_(
                view.untyped_storage()
            )
            for view in views
        }
        device = next(iter(self._storages.values())).device
        self._stream = torch.Stream(device) if device.type != "cpu" else None

    def __call__(self, tails: Iterable[TailView]) -> None:
        with self._on_stream():
            for tail in tails:
                self._view(tail).zero_()
        if self._stream is not None:
            self._stream.synchronize()

    def _on_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else self._stream

    def _view(self, tail: TailView) -> torch.Tensor:
        region = tail.region
        start = region.base + tail.page * region.block_stride + tail.first_token * region.token.stride
        for address, bytes_ in self._storages.items():
            if address <= start < address + bytes_.numel():
                return bytes_.as_strided(
                    (region.unit.count, region.token.count - tail.first_token, region.channel.count, region.item_bytes),
                    (region.unit.stride, region.token.stride, region.channel.stride, 1),
                    start - address,
                )
        raise LocalUsageError(f"{region.name}: page {tail.page} lies in no registered tensor")
