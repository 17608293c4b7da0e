"""The CUDA half where no GPU is: what was compiled, what a call says, and how tickets and statuses are passed on."""

from __future__ import annotations

import ctypes
import re
import struct
from typing import Any

import numpy as np
import pytest

from mooncake_hetero_tp.core.copy_table import MemoryCopy, make_table
from mooncake_hetero_tp.errors import NativeError
from mooncake_hetero_tp.native import _library, cuda, ops
from mooncake_hetero_tp.native.status import Status, StatusError
from tests.unit.native.arena import Arena

FATBIN_MAGIC = struct.pack("<I", 0xBA55ED50)
KINDS = {1: "ptx", 2: "sass"}


def device_code(library: bytes) -> set[tuple[str, int]]:
    """(kind, architecture) of everything for a GPU in the file: what cuobjdump lists, read from the containers."""
    found = set()
    for match in re.finditer(re.escape(FATBIN_MAGIC), library):
        version, header, size = struct.unpack_from("<HHQ", library, match.start() + 4)
        if (version, header) != (1, 16):
            continue  # the number itself, in the runtime's code
        at, end = match.start() + header, match.start() + header + size
        while at < end:
            kind, _, entry_header, entry_size = struct.unpack_from("<HHIQ", library, at)
            (architecture,) = struct.unpack_from("<I", library, at + 28)
            found.add((KINDS[kind], architecture))
            at += entry_header + entry_size
    return found


@pytest.fixture
def without_gpu(library: ctypes.CDLL) -> None:
    try:
        count = ops.cuda_device_count()
    except NativeError:
        return
    if count:
        pytest.skip("a GPU is here: tests/gpu runs on it")


@pytest.mark.usefixtures("library")
def test_architectures() -> None:
    version = ops.cuda_version()
    if version == 0:
        pytest.skip("this library was built without CUDA")
    newer = {("sass", 90), ("ptx", 90)} if version >= 11_080 else {("ptx", 80)}
    newest = {("sass", 100), ("sass", 120)} if version >= 12_080 else set()
    assert device_code(_library.LIBRARY_PATH.read_bytes()) == {("sass", 80)} | newer | newest


@pytest.mark.usefixtures("without_gpu")
def test_a_context_without_a_driver_says_so() -> None:
    with pytest.raises(StatusError, match="mht_cuda_context_create returned status") as caught:
        cuda.CudaCopies(0, max_table_bytes=1 << 20)
    # A build without CUDA, no or an old driver, or a driver that sees no device.
    assert caught.value.status in (Status.NO_CUDA, 35, 100)


@pytest.mark.parametrize("name", ["gather", "scatter", "clear"])
def test_without_a_context_nothing_is_touched(library: ctypes.CDLL, name: str) -> None:
    arena = Arena(64, 8)
    argument = _library.TableArgument(
        arena.table(MemoryCopy(0, 0, [], 8)), arena.packed_address, arena.ranges, check_overlap=False
    )
    ticket, row = _library.Int64(-7), _library.Int64(5)
    assert getattr(library, f"mht_cuda_{name}")(None, argument.struct, None, ticket, row) == Status.NO_CONTEXT
    assert (ticket.value, row.value) == (-7, -1)
    assert arena.is_untouched()
    assert library.mht_cuda_query(None, 0) == library.mht_cuda_wait(None, 0) == Status.NO_CONTEXT
    assert library.mht_cuda_context_destroy(None) == Status.OK


@pytest.mark.parametrize("arguments", [(-1, 64, 1, 0), (0, 0, 1, 0), (0, 64, 0, 0), (0, 64, 1, -1)])
def test_sizes_of_a_context_are_checked_first(library: ctypes.CDLL, arguments: tuple[int, ...]) -> None:
    context = _library.Pointer(1)
    assert library.mht_cuda_context_create(*arguments, context) == Status.INVALID_ARGUMENT
    assert context.value is None


@pytest.mark.usefixtures("library")
def test_table_bytes() -> None:
    assert cuda.table_bytes(0, 0) == 8
    assert cuda.table_bytes(2, 5) - cuda.table_bytes(1, 5) == cuda.table_bytes(1, 0) - cuda.table_bytes(0, 0) > 128
    assert cuda.table_bytes(1, 6) - cuda.table_bytes(1, 5) == 8
    for counts in ((-1, 0), (1 << 62, 0), (0, 1 << 62)):
        with pytest.raises(StatusError, match="the table is larger"):
            cuda.table_bytes(*counts)


class SlowDevice:
    """The library's CUDA functions on a device that finishes a call when it is waited for."""

    def __init__(self) -> None:
        self.calls: list[tuple[int | None, bool]] = []
        self.contexts = 0

    def mht_cuda_context_create(self, device: int, size: int, calls: int, sms: int, context: Any) -> int:
        self.contexts += 1
        context.value = 8
        return 0

    def mht_cuda_context_destroy(self, context: Any) -> int:
        self.contexts -= 1 if context else 0
        return 0

    def mht_cuda_gather(self, context: Any, table: Any, stream: int, ticket: Any, row: Any) -> int:
        if table.copy_count == 0:
            row.value = 3
            return Status.BUSY
        ticket.value = len(self.calls)
        self.calls.append((stream, False))
        return 0

    mht_cuda_scatter = mht_cuda_clear = mht_cuda_gather

    def mht_cuda_query(self, context: Any, ticket: int) -> int:
        return 0 if self.calls[ticket][1] else Status.NOT_READY

    def mht_cuda_wait(self, context: Any, ticket: int) -> int:
        self.calls[ticket] = (self.calls[ticket][0], True)
        return 0

    def mht_status_text(self, status: int) -> bytes:
        return b"words"


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> SlowDevice:
    made = SlowDevice()
    monkeypatch.setattr(_library, "load", lambda: made)
    return made


def test_tickets_tell_when_a_call_is_done(device: SlowDevice) -> None:
    table = make_table([MemoryCopy(8, 0, [], 8)], 8)
    with cuda.CudaCopies(0, max_table_bytes=64) as copies:
        tickets = [copies.gather(table, 64, [], 11), copies.scatter(table, 64, [], 12), copies.clear(table, [], 13)]
        assert tickets == [0, 1, 2]
        copies.wait(tickets[1])
        assert [copies.is_done(ticket) for ticket in tickets] == [False, True, False]
        assert device.contexts == 1
    copies.close()
    assert device.contexts == 0
    assert [stream for stream, _ in device.calls] == [11, 12, 13]


@pytest.mark.usefixtures("device")
def test_a_refusal_names_the_copy() -> None:
    copies = cuda.CudaCopies(0, max_table_bytes=64)
    with pytest.raises(StatusError, match=r"mht_cuda_gather returned status -15 at copy 3: words"):
        copies.gather(make_table([], 0), 64, np.empty((0, 2), np.int64), 0)
