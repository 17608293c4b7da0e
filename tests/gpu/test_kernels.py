"""The kernels on a GPU: the cases of every implementation, and what only a device has: streams, events, bounds."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from mooncake_hetero_tp.core.copy_table import CopyTable, MemoryCopy, Strided, make_table
from mooncake_hetero_tp.native.cuda import CudaCopies, table_bytes
from mooncake_hetero_tp.native.status import Status, StatusError
from tests.unit.native import test_executor

pytestmark = pytest.mark.gpu

SLEEP_CYCLES = 400_000_000
"""Some 0.2 s: longer than any call here takes."""


class TestBytes(test_executor.TestBytes):
    """In device memory."""


class Pages:
    """64 pages of 4 KiB on the device, of which a table moves the first 1 KiB of each, in reverse order."""

    def __init__(self, packed: torch.Tensor | None = None) -> None:
        self.memory = torch.randint(1, 256, (64, 4096), dtype=torch.uint8, device="cuda")
        self.packed = torch.zeros(64, 1024, dtype=torch.uint8, device="cuda") if packed is None else packed
        self.ranges = [(self.memory.data_ptr(), self.memory.numel())]

    @property
    def table(self) -> CopyTable:
        last = self.memory.data_ptr() + 63 * 4096
        return make_table([MemoryCopy(last, 0, [Strided(64, -4096)], 1024)], self.packed.numel())

    @property
    def expected(self) -> torch.Tensor:
        return self.memory.flip(0)[:, :1024]


@pytest.fixture
def stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


@pytest.fixture
def small() -> Iterator[CudaCopies]:
    with CudaCopies(torch.cuda.current_device(), max_table_bytes=table_bytes(2, 8), max_calls=2) as made:
        yield made


def test_order_of_the_stream_is_kept(small: CudaCopies, stream: torch.cuda.Stream) -> None:
    """What was written on the stream before is what is gathered, and a query never waits for it."""
    pages = Pages()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
        pages.memory.random_(1, 256)
        ticket = small.gather(pages.table, pages.packed.data_ptr(), pages.ranges, stream.cuda_stream)
    assert not small.is_done(ticket)
    small.wait(ticket)
    assert small.is_done(ticket)
    assert torch.equal(pages.packed, pages.expected)


def test_more_calls_than_there_is_room_for_are_refused(small: CudaCopies, stream: torch.cuda.Stream) -> None:
    pages = Pages()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
    arguments = (pages.table, pages.packed.data_ptr(), pages.ranges, stream.cuda_stream)
    first, second = small.gather(*arguments), small.gather(*arguments)
    with pytest.raises(StatusError) as caught:
        small.gather(*arguments)
    assert caught.value.status == Status.BUSY
    small.wait(second)
    third = small.gather(*arguments)
    small.wait(third)
    assert [small.is_done(ticket) for ticket in (first, second, third)] == [True] * 3


def test_closing_waits_for_what_is_in_flight(stream: torch.cuda.Stream) -> None:
    pages = Pages()
    torch.cuda.synchronize()
    with CudaCopies(torch.cuda.current_device(), max_table_bytes=1 << 16) as copies:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
        copies.gather(pages.table, pages.packed.data_ptr(), pages.ranges, stream.cuda_stream)
    assert torch.equal(pages.packed, pages.expected)


def test_calls_allocate_nothing_on_the_device(small: CudaCopies, stream: torch.cuda.Stream) -> None:
    pages = Pages()
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()
    for _ in range(20):
        small.wait(small.gather(pages.table, pages.packed.data_ptr(), pages.ranges, stream.cuda_stream))
        small.wait(small.scatter(pages.table, pages.packed.data_ptr(), pages.ranges, stream.cuda_stream))
        small.wait(small.clear(pages.table, pages.ranges, stream.cuda_stream))
    assert torch.cuda.mem_get_info() == before
    assert int(pages.memory[:, :1024].sum()) == 0
    assert int((pages.memory[:, 1024:] == 0).sum()) == 0


def test_a_packed_buffer_in_pinned_memory(small: CudaCopies, stream: torch.cuda.Stream) -> None:
    packed = torch.zeros(64, 1024, dtype=torch.uint8, pin_memory=True)
    pages = Pages(packed)
    torch.cuda.synchronize()
    small.wait(small.gather(pages.table, packed.data_ptr(), pages.ranges, stream.cuda_stream))
    assert torch.equal(packed, pages.expected.cpu())


def test_a_wrong_table_enqueues_nothing(small: CudaCopies, stream: torch.cuda.Stream) -> None:
    pages = Pages()
    before = pages.packed.clone()
    torch.cuda.synchronize()
    table = pages.table
    table.copies["run_bytes"] += 4096
    with pytest.raises(StatusError) as caught:
        small.gather(table, pages.packed.data_ptr(), pages.ranges, stream.cuda_stream)
    assert caught.value.status == Status.OUTSIDE_PACKED
    offsets = np.zeros(64, np.int64)
    large = make_table([MemoryCopy(pages.memory.data_ptr(), 0, [offsets], 16)], pages.packed.numel())
    with pytest.raises(StatusError) as caught:
        small.gather(large, pages.packed.data_ptr(), pages.ranges, stream.cuda_stream)
    assert caught.value.status == Status.TABLE_TOO_LARGE
    torch.cuda.synchronize()
    assert torch.equal(pages.packed, before)


def test_a_device_that_is_not_there() -> None:
    with pytest.raises(StatusError) as caught:
        CudaCopies(torch.cuda.device_count(), max_table_bytes=1 << 16)
    assert caught.value.status == 101  # cudaErrorInvalidDevice
