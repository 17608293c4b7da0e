"""Checked functions of the native library: Python types in and out, a status code becomes a `StatusError`."""

from __future__ import annotations

from mooncake_hetero_tp.core.copy_table import CopyTable
from mooncake_hetero_tp.native import _library
from mooncake_hetero_tp.native._library import Ranges
from mooncake_hetero_tp.native.status import StatusError


def abi_version() -> int:
    """The ABI version the library reports; `_library.ABI_VERSION`, or loading it raised."""
    return int(_library.load().mht_abi_version())


def cuda_version() -> int:
    """CUDART_VERSION of the CUDA runtime linked in (13000 for 13.0); 0 in a CPU-only build."""
    return int(_library.load().mht_cuda_version())


def cuda_device_count() -> int:
    """Number of CUDA devices the library can use.

    Raises:
        StatusError: the build has no CUDA part, or CUDA reports an error (35: no driver, or one that is too old).
    """
    count = _library.Int32()
    check(_library.load().mht_cuda_device_count(count), "mht_cuda_device_count")
    return count.value


def gather(
    table: CopyTable, packed_address: int, ranges: Ranges, *, threads: int = 1, check_overlap: bool = False
) -> None:
    """Copy the table's segments, in order, into the packed buffer of `table.packed_bytes`; all in host memory.

    `ranges` are all the (address, bytes) that the segments may touch; the packed buffer lies in none of them.
    `threads` is a bound, the calling thread included; the GIL is released. `check_overlap` is for `scatter`.

    Raises:
        StatusError: the table is wrong, and nothing was written; or the library is short of memory.
        NativeError: there is no usable library.
    """
    _run("mht_gather", table, packed_address, ranges, threads, check_overlap=check_overlap)


def scatter(
    table: CopyTable, packed_address: int, ranges: Ranges, *, threads: int = 1, check_overlap: bool = False
) -> None:
    """Copy the packed buffer out to the table's segments; otherwise as `gather`.

    `check_overlap` proves first that no byte is written twice: exact, and slow where the copies interleave.

    Raises:
        StatusError: as `gather`.
        NativeError: as `gather`.
    """
    _run("mht_scatter", table, packed_address, ranges, threads, check_overlap=check_overlap)


def clear(table: CopyTable, ranges: Ranges, *, threads: int = 1) -> None:
    """Zero the table's segments and nothing between them; packed offsets are not looked at.

    Raises:
        StatusError: as `gather`.
        NativeError: as `gather`.
    """
    _run("mht_clear", table, 0, ranges, threads, check_overlap=False)


def _run(
    function: str, table: CopyTable, packed_address: int, ranges: Ranges, threads: int, *, check_overlap: bool
) -> None:
    row = _library.Int64(-1)
    argument = _library.TableArgument(table, packed_address, ranges, check_overlap=check_overlap)
    status = getattr(_library.load(), function)(argument.struct, threads, row)
    check(status, function, row.value)


def check(status: int, function: str, row: int = -1) -> None:
    """Turn a status other than 0 into an exception.

    Raises:
        StatusError: naming the function, the status, the copy at fault and what it means.
    """
    if status != 0:
        text = _library.load().mht_status_text(status).decode()
        raise StatusError(function, status, text, row)
