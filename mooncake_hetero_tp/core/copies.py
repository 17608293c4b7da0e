"""Strided copies between one source page and one destination page, and their byte maps.

A copy is normalised when it is made, so that a page that is contiguous on both sides is one run
whatever the layouts are called. `ByteMap` is the canonical form of "which byte goes where": two
plans are the same if and only if their canonical maps are equal, which is what the proof compares.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import msgspec
import numpy as np
import numpy.typing as npt

from mooncake_hetero_tp.errors import PlanError

Int64 = npt.NDArray[np.int64]


class Loop(msgspec.Struct, frozen=True):
    """`count` repetitions, `src_stride` and `dst_stride` bytes apart."""

    count: int
    src_stride: int
    dst_stride: int


class StridedCopy(msgspec.Struct, frozen=True):
    """Runs of `run_bytes` at every combination of the loops (outermost first, by destination stride)."""

    src_offset: int
    dst_offset: int
    loops: tuple[Loop, ...]
    run_bytes: int

    @property
    def runs(self) -> int:
        return prod(loop.count for loop in self.loops)

    @property
    def bytes(self) -> int:
        return self.runs * self.run_bytes


def strided_copy(src_offset: int, dst_offset: int, loops: Iterable[Loop], run_bytes: int) -> StridedCopy:
    """A normalised copy: trivial loops dropped, contiguous ones folded into the run, nested ones fused."""
    ordered = sorted((loop for loop in loops if loop.count > 1), key=lambda loop: -loop.dst_stride)
    while ordered and ordered[-1].src_stride == ordered[-1].dst_stride == run_bytes:
        run_bytes *= ordered.pop().count
    fused: list[Loop] = []
    for loop in ordered:
        repeats = fused.pop().count if fused and _nests(fused[-1], loop) else 1
        fused.append(Loop(repeats * loop.count, loop.src_stride, loop.dst_stride))
    return StridedCopy(src_offset, dst_offset, tuple(fused), run_bytes)


def _nests(outer: Loop, inner: Loop) -> bool:
    """Whether stepping `outer` continues where `inner` stops, on both sides."""
    return outer.src_stride == inner.count * inner.src_stride and outer.dst_stride == inner.count * inner.dst_stride


def concatenate(copies: Iterable[StridedCopy]) -> tuple[StridedCopy, ...]:
    """Joins copies with equal loops whose runs touch on both sides (packed K|V, neighbouring units)."""
    joined: list[StridedCopy] = []
    for copy in sorted(copies, key=lambda item: item.dst_offset):
        current = copy
        while joined and _touches(joined[-1], current):
            left = joined.pop()
            current = strided_copy(left.src_offset, left.dst_offset, left.loops, left.run_bytes + current.run_bytes)
        joined.append(current)
    return tuple(joined)


def _touches(left: StridedCopy, right: StridedCopy) -> bool:
    return (
        left.loops == right.loops
        and left.src_offset + left.run_bytes == right.src_offset
        and left.dst_offset + left.run_bytes == right.dst_offset
    )


@dataclass(frozen=True, eq=False, slots=True)
class ByteMap:
    """Runs (src, dst, length), int64 arrays of equal length: byte `src + i` goes to byte `dst + i`."""

    src: Int64
    dst: Int64
    length: Int64

    def same_as(self, other: ByteMap) -> bool:
        """Equality of canonical maps."""
        if self.dst.size != other.dst.size:
            return False
        columns = ((self.src, other.src), (self.dst, other.dst), (self.length, other.length))
        return all((ours == theirs).all() for ours, theirs in columns)


def steps(count: int, stride: int) -> Int64:
    """`count` offsets, `stride` apart, from 0."""
    return np.arange(count, dtype=np.int64) * stride


def outer_sum(vectors: Sequence[Int64], origin: int = 0) -> Int64:
    """`origin` plus all sums of one element of each vector, the last vector running fastest; flat, int64."""
    if not vectors:
        return np.array([origin], np.int64)
    total = vectors[-1] + origin
    for vector in reversed(vectors[:-1]):
        total = np.add.outer(vector, total).ravel()
    return total


def expand(copies: Iterable[StridedCopy]) -> ByteMap:
    """Every run of the copies, canonical.

    Raises:
        PlanError: two runs write the same destination byte.
    """
    src, dst, length = [], [], []
    for copy in copies:
        src.append(outer_sum([steps(loop.count, loop.src_stride) for loop in copy.loops], copy.src_offset))
        dst.append(outer_sum([steps(loop.count, loop.dst_stride) for loop in copy.loops], copy.dst_offset))
        length.append(np.full(src[-1].size, copy.run_bytes, np.int64))
    if not src:
        empty = np.empty(0, np.int64)
        return ByteMap(empty, empty, empty)
    return canonical(np.concatenate(src), np.concatenate(dst), np.concatenate(length))


def canonical(src: Int64, dst: Int64, length: Int64) -> ByteMap:
    """The map sorted by destination with all runs that touch on both sides joined.

    Raises:
        PlanError: two runs write the same destination byte.
    """
    if dst.size > 1 and not bool((dst[1:] > dst[:-1]).all()):
        order = np.argsort(dst, kind="stable")  # timsort: nearly linear on concatenated sorted parts
        src, dst, length = src[order], dst[order], length[order]
    return join_sorted(ByteMap(src, dst, length))


def join_sorted(runs: ByteMap) -> ByteMap:
    """Joins neighbours that touch on both sides, never across a gap; `runs` is sorted by destination.

    Raises:
        PlanError: two runs write the same destination byte.
    """
    gaps = runs.dst[1:] - (runs.dst[:-1] + runs.length[:-1])
    if gaps.size and int(gaps.min()) < 0:
        at = int(gaps.argmin())
        raise PlanError(
            f"destination byte {int(runs.dst[at + 1])} would be written twice: runs of {int(runs.length[at])} "
            f"and {int(runs.length[at + 1])} bytes overlap by {-int(gaps.min())}; nothing was written"
        )
    joins = (gaps == 0) & (runs.src[1:] - runs.src[:-1] == runs.length[:-1])
    if not joins.any():
        return runs
    heads = np.flatnonzero(np.concatenate(([True], ~joins)))
    return ByteMap(runs.src[heads], runs.dst[heads], np.add.reduceat(runs.length, heads))


def split_at(starts: Int64, length: Int64, cuts: Int64) -> tuple[Int64, Int64, Int64]:
    """Splits the intervals `[starts, starts + length)` at the sorted addresses `cuts` that lie inside.

    Returns:
        (owner, offset, length) of the pieces in order: which interval, and from where in it.
    """
    first_cut = np.searchsorted(cuts, starts, side="right")
    pieces = np.searchsorted(cuts, starts + length, side="left") - first_cut + 1
    owner = np.repeat(np.arange(starts.size), pieces)
    place = np.arange(owner.size) - (np.cumsum(pieces) - pieces)[owner]
    borders = np.concatenate((cuts, [0]))  # read, and not used, after the last cut
    offset = np.where(place == 0, 0, borders[first_cut[owner] + place - 1] - starts[owner])
    last = place == pieces[owner] - 1
    end = np.where(last, length[owner], borders[first_cut[owner] + place] - starts[owner])
    return owner, offset, end - offset
