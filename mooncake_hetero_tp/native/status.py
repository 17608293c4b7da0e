"""What the checks of a copy table can find, the same for the library and for the numpy reference.

The numbers and their texts are those of csrc/include/mht/abi.h, which a test holds them to.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from mooncake_hetero_tp.errors import NativeError


class Status(IntEnum):
    """Negative statuses of the C ABI; a positive one is CUDA's own error code."""

    OK = 0
    INVALID_ARGUMENT = -1
    NO_CUDA = -2
    WRONG_STRUCT_SIZE = -3
    BAD_COPY = -4
    BAD_LIST = -5
    OVERFLOW = -6
    OUTSIDE_PACKED = -7
    OUTSIDE_RANGES = -8
    PACKED_OVERLAP = -9
    MEMORY_OVERLAP = -10
    PACKED_IN_RANGES = -11
    NO_MEMORY = -12
    NO_CONTEXT = -13
    TABLE_TOO_LARGE = -14
    BUSY = -15
    NOT_READY = -16


TEXTS: Final[dict[Status, str]] = {
    Status.OK: "success",
    Status.INVALID_ARGUMENT: "invalid argument",
    Status.NO_CUDA: "this build of libmht_kernels has no CUDA part",
    Status.WRONG_STRUCT_SIZE: "the table struct has another size than the library's",
    Status.BAD_COPY: "a run length, axis count, count of an axis or reserved field is not allowed",
    Status.BAD_LIST: "a listed axis leaves the offsets",
    Status.OVERFLOW: "a size or an address does not fit into 64 bits",
    Status.OUTSIDE_PACKED: "packed bytes lie outside the packed buffer",
    Status.OUTSIDE_RANGES: "memory lies outside all ranges",
    Status.PACKED_OVERLAP: "two copies have the same packed bytes",
    Status.MEMORY_OVERLAP: "a byte of memory would be written twice",
    Status.PACKED_IN_RANGES: "the packed buffer lies in a range that copies may touch",
    Status.NO_MEMORY: "not enough memory to check the table",
    Status.NO_CONTEXT: "no CUDA context was given",
    Status.TABLE_TOO_LARGE: "the table is larger than the CUDA context or a launch has room for",
    Status.BUSY: "as many calls are in flight as the CUDA context has room for",
    Status.NOT_READY: "the call is still running",
}


class StatusError(NativeError):
    """A native function, or its reference, returned a status other than 0."""

    def __init__(self, function: str, status: int, text: str, row: int = -1) -> None:
        """`row`: the copy at fault, where the status is about one."""
        place = f" at copy {row}" if row >= 0 else ""
        super().__init__(f"{function} returned status {status}{place}: {text}")
        self.status = status
        self.row = row
