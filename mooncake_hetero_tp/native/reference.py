"""The numpy reference of `ops`: the same functions and errors, readable; used where there is no library.

Segments of one length are rows of an array that begins at every byte of memory, so one indexed assignment moves all
of them, whatever copies they belong to.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from mooncake_hetero_tp.core.copies import Int64
from mooncake_hetero_tp.core.copy_table import CopyTable
from mooncake_hetero_tp.native._library import Ranges
from mooncake_hetero_tp.native.segments import Segments, expand
from mooncake_hetero_tp.native.table_checks import check_table

LONG_RUN: Final = 4096
"""From here on a Python loop over the segments costs little beside the bytes, and a row per byte of address space
could be more than numpy counts."""


def gather(
    table: CopyTable, packed_address: int, ranges: Ranges, *, threads: int = 1, check_overlap: bool = False
) -> None:
    """As `ops.gather`, in one thread.

    Raises:
        StatusError: the table is wrong, and nothing was written.
    """
    check_table("mht_gather", table, packed_address, ranges, threads, check_overlap=check_overlap)
    for segments in _alike(table):
        packed = _Rows(packed_address + segments.packed_offset, segments)
        packed.write(_Rows(segments.address, segments).read())


def scatter(
    table: CopyTable, packed_address: int, ranges: Ranges, *, threads: int = 1, check_overlap: bool = False
) -> None:
    """As `ops.scatter`, in one thread.

    Raises:
        StatusError: the table is wrong, and nothing was written.
    """
    check_table("mht_scatter", table, packed_address, ranges, threads, check_overlap=check_overlap)
    for segments in _alike(table):
        memory = _Rows(segments.address, segments)
        memory.write(_Rows(packed_address + segments.packed_offset, segments).read())


def clear(table: CopyTable, ranges: Ranges, *, threads: int = 1) -> None:
    """As `ops.clear`, in one thread.

    Raises:
        StatusError: the table is wrong, and nothing was written.
    """
    check_table("mht_clear", table, 0, ranges, threads, check_overlap=False)
    for segments in _alike(table):
        _Rows(segments.address, segments).write(0)


def _alike(table: CopyTable) -> Iterator[Segments]:
    """Segments of one length, long ones one by one."""
    for segments in expand(table):
        for length in np.unique(segments.bytes):
            alike = segments.where(segments.bytes == length)
            step = 1 if length >= LONG_RUN else alike.row.size
            for first in range(0, alike.row.size, step):
                yield Segments(*(column[first : first + step] for column in alike))


class _Rows:
    """Segments of one length, to be read and assigned as one array."""

    def __init__(self, address: Int64, segments: Segments) -> None:
        length = int(segments.bytes[0])
        self._first = int(address.min())
        self._index = address - self._first
        # A row begins at every byte from the first segment to the last; only those of segments are ever touched.
        self._array = view(self._first, (int(self._index.max()) + 1, length), (1, 1))

    def read(self) -> npt.NDArray[np.uint8]:
        return self._array[self._index]

    def write(self, value: npt.NDArray[np.uint8] | int) -> None:
        self._array[self._index] = value


class _Memory:
    """Bytes of this process as numpy's array interface describes them."""

    def __init__(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "data": (address, False),
            "shape": shape,
            "strides": strides,
        }


def view(address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    """The bytes at `address` as an array that can be written; nothing keeps them alive."""
    return np.asarray(_Memory(address, shape, strides))
