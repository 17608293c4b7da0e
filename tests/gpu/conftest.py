"""An executor for tests in device memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from mooncake_hetero_tp.core.copy_table import CopyTable
from mooncake_hetero_tp.native._library import Ranges
from mooncake_hetero_tp.native.cuda import CudaCopies, Ticket
from mooncake_hetero_tp.native.reference import view

ALIGNED = 256


class Mirror:
    """Host memory and a copy of it on the device, at the same place within 256 bytes."""

    def __init__(self, address: int, size: int) -> None:
        self.host = view(address, (size,), (1,))
        self._whole = torch.empty(size + 2 * ALIGNED, dtype=torch.uint8, device="cuda")
        start = (address - self._whole.data_ptr()) % ALIGNED
        self._inside = self._whole[start : start + size]
        self._inside.copy_(torch.from_numpy(self.host))
        self.address = self._inside.data_ptr()

    def bring_back(self) -> None:
        self.host[:] = self._inside.cpu().numpy()


class DeviceExecutor:
    """`Executor` on tables of host memory: what they name is copied to the device, copied there, and brought back."""

    def __init__(self, copies: CudaCopies) -> None:
        self._copies = copies

    def gather(
        self, table: CopyTable, packed_address: int, ranges: Ranges, *, threads: int = 1, check_overlap: bool = False
    ) -> None:
        self._on_device(self._copies.gather, table, packed_address, ranges, check_overlap=check_overlap)

    def scatter(
        self, table: CopyTable, packed_address: int, ranges: Ranges, *, threads: int = 1, check_overlap: bool = False
    ) -> None:
        self._on_device(self._copies.scatter, table, packed_address, ranges, check_overlap=check_overlap)

    def clear(self, table: CopyTable, ranges: Ranges, *, threads: int = 1) -> None:
        def run(moved: CopyTable, packed: int, allowed: Ranges, stream: int, *, check_overlap: bool) -> Ticket:
            return self._copies.clear(moved, allowed, stream)

        self._on_device(run, table, 0, ranges, check_overlap=False)

    def _on_device(
        self,
        run: Callable[..., Ticket],
        table: CopyTable,
        packed_address: int,
        ranges: Ranges,
        *,
        check_overlap: bool,
    ) -> None:
        spans = np.asarray(ranges, np.int64).reshape(-1, 2)
        low, high = (int(spans[:, 0].min()), int(spans.sum(axis=1).max())) if len(spans) else (0, 0)
        memory = Mirror(low, high - low) if high > low else None
        packed = Mirror(packed_address, table.packed_bytes) if packed_address and table.packed_bytes else None
        shift = memory.address - low if memory else 0
        copies = table.copies.copy()
        copies["base"] += shift
        moved = CopyTable(copies, table.offsets, table.packed_bytes)
        stream = torch.cuda.current_stream().cuda_stream
        allowed = [(address + shift, size) for address, size in spans.tolist()]
        self._copies.wait(run(moved, packed.address if packed else 0, allowed, stream, check_overlap=check_overlap))
        for side in (memory, packed):
            if side is not None:
                side.bring_back()


@pytest.fixture(scope="session", params=[0, 3], ids=["all-sms", "3-sms"])
def copies(request: pytest.FixtureRequest) -> Iterator[CudaCopies]:
    """Room for one large table at a time."""
    with CudaCopies(torch.cuda.current_device(), max_table_bytes=1 << 28, max_calls=2, max_sms=request.param) as made:
        yield made


@pytest.fixture
def executor(copies: CudaCopies) -> DeviceExecutor:
    return DeviceExecutor(copies)
