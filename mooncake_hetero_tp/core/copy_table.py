"""The table of one gather or scatter: strided memory on one side, a packed buffer on the other.

The numpy records have the layout of `mht_copy` and `mht_axis` (csrc/include/mht/copy_table.h), so that the arrays
go to the kernels as they are. A packed offset and a run length say where bytes lie in the packed buffer, so the
table of the side that gathers and that of the side that scatters need only agree on the order of the segments.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from mooncake_hetero_tp.core.copies import Int64
from mooncake_hetero_tp.errors import PlanError

MAX_AXES: Final = 6
"""Axes of one copy; layers, pages, units, tokens, channels and one to spare."""

AXIS: Final = np.dtype([("stride", "<i8"), ("count", "<i4"), ("list", "<i4")])
"""One axis: `count` steps of `stride` bytes, or where `list` >= 0 the byte offsets `offsets[list : list + count]`."""

COPY: Final = np.dtype(
    [
        ("base", "<i8"),
        ("packed_offset", "<i8"),
        ("run_bytes", "<i8"),
        ("axis_count", "<i4"),
        ("reserved", "<i4"),
        ("axes", AXIS, (MAX_AXES,)),
    ]
)
"""Segments of `run_bytes` at `base` plus one offset of each axis, outermost axis first; in this order (the last axis
runs fastest) they follow one another in the packed buffer from `packed_offset`."""


@dataclass(frozen=True, eq=False, slots=True)
class CopyTable:
    """All copies of one call; `offsets` are what the listed axes refer to, `packed_bytes` bounds the packed side."""

    copies: npt.NDArray[np.void]
    offsets: Int64
    packed_bytes: int

    @property
    def segments(self) -> int:
        """Contiguous pieces of memory that the call touches."""
        return int(np.prod(self.copies["axes"]["count"], axis=1, dtype=np.int64).sum())

    @property
    def bytes(self) -> int:
        """Bytes that the call copies; less than `packed_bytes` where parts are aligned."""
        segments = np.prod(self.copies["axes"]["count"], axis=1, dtype=np.int64)
        return int((segments * self.copies["run_bytes"]).sum())


@dataclass(frozen=True, slots=True)
class Strided:
    """An axis of equal steps, in bytes."""

    count: int
    stride: int


Axis: TypeAlias = Strided | Int64
"""A strided axis, or a list of byte offsets."""


@dataclass(frozen=True, slots=True)
class MemoryCopy:
    """One row of a table before it is encoded; axes outermost first."""

    base: int
    packed_offset: int
    axes: Sequence[Axis]
    run_bytes: int


def make_table(copies: Iterable[MemoryCopy], packed_bytes: int) -> CopyTable:
    """Encodes copies; unused axes count 1.

    Raises:
        PlanError: more axes than a row has room for.
    """
    copies = tuple(copies)
    rows = np.zeros(len(copies), COPY)
    rows["axes"]["count"] = 1
    rows["axes"]["list"] = -1
    lists: list[Int64] = []
    listed = 0
    for row, copy in zip(rows, copies, strict=True):
        if len(copy.axes) > MAX_AXES:
            raise PlanError(
                f"a copy with {len(copy.axes)} axes, at most {MAX_AXES} fit; please report the region tables"
            )
        row["base"], row["packed_offset"], row["run_bytes"] = copy.base, copy.packed_offset, copy.run_bytes
        row["axis_count"] = len(copy.axes)
        for place, axis in zip(row["axes"], copy.axes, strict=False):
            if isinstance(axis, Strided):
                place["stride"], place["count"] = axis.stride, axis.count
            else:
                place["count"], place["list"] = axis.size, listed
                lists.append(axis)
                listed += axis.size
    offsets = np.concatenate(lists) if lists else np.empty(0, np.int64)
    return CopyTable(rows, offsets, packed_bytes)
