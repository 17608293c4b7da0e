"""Where a worker's staging rings lie and who fills and empties them, by the device of its KV cache."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from mooncake_hetero_tp.config import HeteroTPConfig
from mooncake_hetero_tp.core.copy_table import CopyTable
from mooncake_hetero_tp.core.cost import Mode
from mooncake_hetero_tp.errors import NativeError
from mooncake_hetero_tp.io.staging import RingSize, StagingRing, host_ring
from mooncake_hetero_tp.native._library import Ranges
from mooncake_hetero_tp.native.cuda import CudaCopies, table_bytes
from mooncake_hetero_tp.native.executor import Executor, host_executor

logger = logging.getLogger(__name__)

_MIB: Final = 1 << 20
_COPIES, _OFFSETS = 4096, 1 << 18
"""Room of a call's table: rows, and pages listed in them; a chunk has some hundred rows."""
_SPARE_CALLS: Final = 8
"""Calls at once beyond those of the threads that read: gathers."""


@dataclass(frozen=True, slots=True)
class Staging:
    """What `WorkerRuntime` needs for staging."""

    size: RingSize
    make_ring: Callable[[RingSize], StagingRing]
    executor: Executor


class CudaExecutor:
    """`native.executor.Executor` for device memory: one kernel a call, on a stream of its own.

    Made in the main thread, which is where CUDA may allocate; a call returns when its event has completed, so what
    it wrote may be read by a network card or the next forward.
    """

    def __init__(self, device: torch.device, *, max_sms: int, max_calls: int) -> None:
        """Raises StatusError: a build without CUDA, or CUDA's own error."""
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._copies = CudaCopies(
            self._stream.device.index,
            max_table_bytes=table_bytes(_COPIES, _OFFSETS),
            max_calls=max_calls,
            max_sms=max_sms,
        )

    def gather(
        self, table: CopyTable, packed_address: int, ranges: Ranges, *, threads: int = 1, check_overlap: bool = False
    ) -> None:
        """See `native.ops.gather`; `threads` are the host's, and not used."""
        del threads
        copies, stream = self._copies, self._stream.cuda_stream
        copies.wait(copies.gather(table, packed_address, ranges, stream, check_overlap=check_overlap))

    def scatter(
        self, table: CopyTable, packed_address: int, ranges: Ranges, *, threads: int = 1, check_overlap: bool = False
    ) -> None:
        """See `native.ops.scatter`; `threads` are the host's, and not used."""
        del threads
        copies, stream = self._copies, self._stream.cuda_stream
        copies.wait(copies.scatter(table, packed_address, ranges, stream, check_overlap=check_overlap))

    def clear(self, table: CopyTable, ranges: Ranges, *, threads: int = 1) -> None:
        """See `native.ops.clear`; `threads` are the host's, and not used."""
        del threads
        copies = self._copies
        copies.wait(copies.clear(table, ranges, self._stream.cuda_stream))


def device_ring(device: torch.device) -> Callable[[RingSize], StagingRing]:
    """Makes rings in device memory; the tensor lives until the ring is closed."""

    def make(size: RingSize) -> StagingRing:
        memory = [torch.zeros(size.bytes, dtype=torch.uint8, device=device)]
        return StagingRing(memory[0].data_ptr(), size, memory.clear)

    return make


def staging_for(config: HeteroTPConfig, device: torch.device) -> Staging | None:
    """How this worker stages; None: every read is direct.

    In device memory only where it is asked for: these kernels are proven on the host and wait for their first GPU.
    """
    if not config.staging_mib or config.transfer_mode == Mode.DIRECT:
        return None
    size = RingSize(config.staging_slot_mib * _MIB, config.staging_mib // config.staging_slot_mib)
    if device.type == "cpu":
        return Staging(size, host_ring, host_executor())
    if device.type != "cuda" or config.transfer_mode != Mode.STAGED:
        logger.info("reads into %s memory are direct; transfer_mode 'staged' is for host and CUDA memory", device.type)
        return None
    try:
        calls = config.num_workers + _SPARE_CALLS
        executor = CudaExecutor(device, max_sms=config.staging_max_sms, max_calls=calls)
        return Staging(size, device_ring(device), executor)
    except NativeError as error:
        logger.warning("reads are direct, because the CUDA kernels cannot be used: %s", error)
        return None
