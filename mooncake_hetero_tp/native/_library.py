"""Loads libmht_kernels.so on first use; the only place that knows ctypes.

`SIGNATURES` and the structs mirror csrc/include/mht and are held to it by a test. The library is optional: `is_built` tells whether it
is there, and callers that can do without use the numpy reference instead.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Final, NamedTuple, TypeAlias

import numpy as np

from mooncake_hetero_tp.core.copies import Int64 as Int64Array
from mooncake_hetero_tp.core.copy_table import AXIS, COPY, CopyTable
from mooncake_hetero_tp.errors import LocalUsageError, NativeError

LIBRARY_PATH: Final = Path(__file__).with_name("libmht_kernels.so")
ABI_VERSION: Final = 3
"""MHT_ABI_VERSION of the header that `SIGNATURES` describes."""
Int32 = ctypes.c_int32
"""For a function that writes an int32_t: pass one, read its `value`."""
Int64 = ctypes.c_int64
"""The same for an int64_t."""
Pointer = ctypes.c_void_p
"""An opaque pointer: a stream, a context; pass one for a function to write."""
CHECK_OVERLAP: Final = 1
"""MHT_CHECK_OVERLAP."""
RANGE: Final = np.dtype([("address", "<i8"), ("bytes", "<i8")])
"""`mht_range`."""
Ranges: TypeAlias = Sequence[tuple[int, int]] | Int64Array
"""(address, bytes) of memory that a call may touch; as an array, of shape (n, 2)."""


class TableStruct(ctypes.Structure):
    """`mht_copy_table`."""

    _fields_: ClassVar = [
        ("struct_bytes", ctypes.c_int64),
        ("flags", ctypes.c_int64),
        ("copies", ctypes.c_void_p),
        ("copy_count", ctypes.c_int64),
        ("offsets", ctypes.c_void_p),
        ("offset_count", ctypes.c_int64),
        ("packed_address", ctypes.c_int64),
        ("packed_bytes", ctypes.c_int64),
        ("ranges", ctypes.c_void_p),
        ("range_count", ctypes.c_int64),
    ]


class TableArgument:
    """A table as the library takes it; keeps the arrays that `struct` points to."""

    def __init__(self, table: CopyTable, packed_address: int, ranges: Ranges, *, check_overlap: bool) -> None:
        """Nothing is copied where the arrays are contiguous.

        Raises:
            LocalUsageError: arrays of another type or shape.
        """
        self._copies = np.ascontiguousarray(table.copies)
        self._offsets = np.ascontiguousarray(table.offsets)
        self._ranges = np.ascontiguousarray(ranges, np.int64).reshape(-1, 2)
        if self._copies.dtype != COPY or self._offsets.dtype != np.int64:
            raise LocalUsageError(
                f"a copy table holds records of core.copy_table.COPY and int64 offsets, "
                f"not {self._copies.dtype} and {self._offsets.dtype}"
            )
        self.struct = TableStruct(
            struct_bytes=ctypes.sizeof(TableStruct),
            flags=CHECK_OVERLAP if check_overlap else 0,
            copies=self._copies.ctypes.data,
            copy_count=self._copies.size,
            offsets=self._offsets.ctypes.data,
            offset_count=self._offsets.size,
            packed_address=packed_address,
            packed_bytes=table.packed_bytes,
            ranges=self._ranges.ctypes.data,
            range_count=len(self._ranges),
        )


STRUCT_BYTES: Final = (AXIS.itemsize, COPY.itemsize, RANGE.itemsize, ctypes.sizeof(TableStruct))
"""What `mht_struct_bytes` has to answer, index by index."""


_TABLE: Final = ctypes.POINTER(TableStruct)
_INT64: Final = ctypes.POINTER(Int64)


class Signature(NamedTuple):
    """What ctypes has to know of one exported function."""

    restype: type
    argtypes: tuple[type, ...]


SIGNATURES: Final[dict[str, Signature]] = {
    "mht_abi_version": Signature(Int32, ()),
    "mht_cuda_version": Signature(Int32, ()),
    "mht_cuda_device_count": Signature(Int32, (ctypes.POINTER(Int32),)),
    "mht_status_text": Signature(ctypes.c_char_p, (Int32,)),
    "mht_struct_bytes": Signature(Int64, (Int32,)),
    "mht_gather": Signature(Int32, (_TABLE, Int32, _INT64)),
    "mht_scatter": Signature(Int32, (_TABLE, Int32, _INT64)),
    "mht_clear": Signature(Int32, (_TABLE, Int32, _INT64)),
    "mht_cuda_table_bytes": Signature(Int64, (Int64, Int64)),
    "mht_cuda_context_create": Signature(Int32, (Int32, Int64, Int32, Int32, ctypes.POINTER(Pointer))),
    "mht_cuda_context_destroy": Signature(Int32, (Pointer,)),
    "mht_cuda_gather": Signature(Int32, (Pointer, _TABLE, Pointer, _INT64, _INT64)),
    "mht_cuda_scatter": Signature(Int32, (Pointer, _TABLE, Pointer, _INT64, _INT64)),
    "mht_cuda_clear": Signature(Int32, (Pointer, _TABLE, Pointer, _INT64, _INT64)),
    "mht_cuda_query": Signature(Int32, (Pointer, Int64)),
    "mht_cuda_wait": Signature(Int32, (Pointer, Int64)),
}


def is_built() -> bool:
    """Whether this installation came with the library; says nothing of whether it loads."""
    return LIBRARY_PATH.exists()


@functools.cache
def load() -> ctypes.CDLL:
    """The library, loaded once, every signature set.

    Raises:
        NativeError: it was not built, the loader refuses it, or it was built from another version of the header.
    """
    return open_library(LIBRARY_PATH)


def open_library(path: Path) -> ctypes.CDLL:
    """`load` for a library at `path`, not remembered.

    Raises:
        NativeError: as `load`.
    """
    if not path.exists():
        raise NativeError(
            f"{path} does not exist: this installation has no native library. "
            "Install CMake and a C++ compiler, then reinstall with MHT_NATIVE=1 to see why it cannot be built"
        )
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeError(f"{path} cannot be loaded: {error}") from error
    _check_abi(library, path)
    for name, signature in SIGNATURES.items():
        function = _symbol(library, path, name)
        function.restype = signature.restype
        function.argtypes = signature.argtypes
    _check_structs(library, path)
    return library


def _check_abi(library: ctypes.CDLL, path: Path) -> None:
    # First of all: with another version no other signature may be trusted.
    version = _symbol(library, path, "mht_abi_version")()
    if version != ABI_VERSION:
        raise NativeError(f"{path} has ABI version {version}, this package needs {ABI_VERSION}: reinstall the package")


def _check_structs(library: ctypes.CDLL, path: Path) -> None:
    found = tuple(library.mht_struct_bytes(index) for index in range(len(STRUCT_BYTES)))
    if found != STRUCT_BYTES:
        raise NativeError(f"{path} has structs of {found} bytes, this package {STRUCT_BYTES}: reinstall the package")


def _symbol(library: ctypes.CDLL, path: Path, name: str) -> ctypes._NamedFuncPointer:
    try:
        # Not library[name]: that makes a new function, without signature, every time.
        function: ctypes._NamedFuncPointer = getattr(library, name)
    except AttributeError as error:
        message = f"{path} lacks {name}: it is another library or an old build, reinstall the package"
        raise NativeError(message) from error
    return function
