"""The segments of a copy table as arrays, for the numpy reference; the table has been checked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from mooncake_hetero_tp.core.copies import Int64
from mooncake_hetero_tp.core.copy_table import MAX_AXES, CopyTable

BATCH_SEGMENTS: Final = 1 << 18
"""Segments at once: some 20 MB of index arrays."""


class Segments(NamedTuple):
    """Contiguous pieces, in the order of the table; int64 arrays of equal length."""

    row: Int64
    address: Int64
    packed_offset: Int64
    bytes: Int64

    def where(self, chosen: npt.NDArray[np.bool_]) -> Segments:
        return Segments(*(column[chosen] for column in self))


def used_axes(copies: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
    """Which axes of each copy count."""
    return np.arange(MAX_AXES) < copies["axis_count"][:, None]


def segment_counts(copies: npt.NDArray[np.void]) -> Int64:
    """Steps of each axis of each copy, 1 where it is not used."""
    return np.where(used_axes(copies), copies["axes"]["count"], 1).astype(np.int64)


def expand(table: CopyTable, rows: Int64 | None = None) -> Iterator[Segments]:
    """All segments of the copies `rows` (None: of all), in batches."""
    copies = table.copies if rows is None else table.copies[rows]
    used, counts = used_axes(copies), segment_counts(copies)
    segments = counts.prod(axis=1)
    ends = np.cumsum(segments)
    for first in range(0, int(ends[-1]) if ends.size else 0, BATCH_SEGMENTS):
        number = np.arange(first, min(first + BATCH_SEGMENTS, int(ends[-1])))
        at = np.searchsorted(ends, number, side="right")
        within = number - (ends - segments)[at]
        packed_offset = copies["packed_offset"][at] + within * copies["run_bytes"][at]
        address = copies["base"][at]
        for axis in reversed(range(int(copies["axis_count"].max()))):
            within, step = np.divmod(within, counts[at, axis])
            address = address + _offsets(table, copies["axes"][at, axis], step, used[at, axis])
        yield Segments(at if rows is None else rows[at], address, packed_offset, copies["run_bytes"][at])


def _offsets(table: CopyTable, axes: npt.NDArray[np.void], step: Int64, used: npt.NDArray[np.bool_]) -> Int64:
    offsets: Int64 = np.where(used, axes["stride"] * step, 0)
    listed = used & (axes["list"] >= 0)
    if listed.any():
        offsets[listed] = table.offsets[axes["list"][listed] + step[listed]]
    return offsets
