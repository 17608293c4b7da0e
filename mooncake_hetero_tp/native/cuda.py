"""Gather, scatter and clear on a CUDA device: enqueued on a stream, finished when an event says so."""

from __future__ import annotations

from types import TracebackType
from typing import NewType, Self

from mooncake_hetero_tp.core.copy_table import CopyTable
from mooncake_hetero_tp.native import _library
from mooncake_hetero_tp.native._library import Ranges
from mooncake_hetero_tp.native.ops import check
from mooncake_hetero_tp.native.status import Status

Ticket = NewType("Ticket", int)
"""A call of one `CudaCopies`."""


def table_bytes(copies: int, offsets: int) -> int:
    """Bytes that a table of so many copies and listed offsets takes in a `CudaCopies`.

    Raises:
        StatusError: more than can be counted.
        NativeError: there is no usable library.
    """
    found = int(_library.load().mht_cuda_table_bytes(copies, offsets))
    if found < 0:
        check(Status.TABLE_TOO_LARGE, "mht_cuda_table_bytes")
    return found


class CudaCopies:
    """Everything that copies on one device need; nothing is allocated, pinned or loaded after it was made. Thread-safe.

    Make it on the main thread, where allocating is allowed, and close it: calls in flight are waited for.
    """

    def __init__(self, device: int, *, max_table_bytes: int, max_calls: int = 4, max_sms: int = 0) -> None:
        """Room for `max_calls` calls at once, each with a table of up to `max_table_bytes` (see `table_bytes`).

        `max_sms` bounds the multiprocessors that one call occupies, so that prefill and decode keep theirs; 0: all.

        Raises:
            StatusError: a build without CUDA, or CUDA's own error (35: no driver, or one that is too old).
            NativeError: there is no usable library.
        """
        self._library = _library.load()
        self._context = _library.Pointer()
        status = self._library.mht_cuda_context_create(device, max_table_bytes, max_calls, max_sms, self._context)
        check(status, "mht_cuda_context_create")

    def gather(
        self, table: CopyTable, packed_address: int, ranges: Ranges, stream: int, *, check_overlap: bool = False
    ) -> Ticket:
        """Enqueue on `stream` (a cudaStream_t) what `ops.gather` does; addresses are those of the device.

        Raises:
            StatusError: the table is wrong or too large, as many calls are in flight as there is room for (BUSY), or
                CUDA reports an error.
        """
        return self._run("mht_cuda_gather", table, packed_address, ranges, stream, check_overlap=check_overlap)

    def scatter(
        self, table: CopyTable, packed_address: int, ranges: Ranges, stream: int, *, check_overlap: bool = False
    ) -> Ticket:
        """Enqueue on `stream` what `ops.scatter` does.

        Raises:
            StatusError: as `gather`.
        """
        return self._run("mht_cuda_scatter", table, packed_address, ranges, stream, check_overlap=check_overlap)

    def clear(self, table: CopyTable, ranges: Ranges, stream: int) -> Ticket:
        """Enqueue on `stream` what `ops.clear` does.

        Raises:
            StatusError: as `gather`.
        """
        return self._run("mht_cuda_clear", table, 0, ranges, stream, check_overlap=False)

    def is_done(self, ticket: Ticket) -> bool:
        """Whether the call has finished on the device; never blocks.

        Raises:
            StatusError: CUDA reports an error, of this call or of an earlier one on the device.
        """
        status = self._library.mht_cuda_query(self._context, ticket)
        if status == Status.NOT_READY:
            return False
        check(status, "mht_cuda_query")
        return True

    def wait(self, ticket: Ticket) -> None:
        """Sleep until the call has finished on the device; the GIL is released.

        Raises:
            StatusError: as `is_done`.
        """
        check(self._library.mht_cuda_wait(self._context, ticket), "mht_cuda_wait")

    def close(self) -> None:
        """Wait for the calls in flight and free everything; the second time nothing happens.

        Raises:
            StatusError: CUDA reports an error of one of those calls.
        """
        context, self._context = self._context, _library.Pointer()
        check(self._library.mht_cuda_context_destroy(context), "mht_cuda_context_destroy")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(
        self,
        function: str,
        table: CopyTable,
        packed_address: int,
        ranges: Ranges,
        stream: int,
        *,
        check_overlap: bool,
    ) -> Ticket:
        ticket, row = _library.Int64(-1), _library.Int64(-1)
        argument = _library.TableArgument(table, packed_address, ranges, check_overlap=check_overlap)
        status = getattr(self._library, function)(self._context, argument.struct, stream, ticket, row)
        check(status, function, row.value)
        return Ticket(ticket.value)
