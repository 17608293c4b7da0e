"""Chunk + block ids -> the copy table of one side: what the producer gathers, what the consumer scatters.

The segments of a chunk have one order on both sides: a piece's copies one after the other, and in each the axes
(runs, members, the loops of the proven template) by falling destination stride, so that the consumer writes its
memory as it lies. Everything in that order is known to both ranks. Then each side joins what is contiguous in *its*
memory, which leaves the order of the bytes as it was: a token-major producer gathers 256-byte pieces where the
head-major consumer scatters whole pages.

That order, and how `core/chunks.py` cuts, are part of the protocol: a side that packs in another order needs another
`PROTOCOL_VERSION`, for a chunk of the right length in the wrong order is nothing that the other side could see.

Bytes are right because the templates are (`CopyClass.template` is checked against the regions' elements): a table
only adds the same run and member offsets that `bind` adds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from mooncake_hetero_tp.core.binding import TailView
from mooncake_hetero_tp.core.chunks import Chunks, Piece, Strip
from mooncake_hetero_tp.core.copies import Int64, Loop, StridedCopy, outer_sum, split_at
from mooncake_hetero_tp.core.copy_table import Axis, CopyTable, MemoryCopy, Strided, make_table
from mooncake_hetero_tp.core.pages import Blocks, PageKind, consumer_pages, producer_pages
from mooncake_hetero_tp.core.pairing import CopyClass

SideName = Literal["src", "dst"]


def pack(chunks: Chunks, index: int, producer_blocks: Sequence[Blocks], *, null_block: int | None = 0) -> CopyTable:
    """The gather of chunk `index` from the producer's memory; see `gathers` for several chunks of a pull."""
    return gathers(chunks, producer_blocks, null_block=null_block).table(index)


def unpack(chunks: Chunks, index: int, consumer_blocks: Sequence[Blocks], *, null_block: int | None = 0) -> CopyTable:
    """The scatter of chunk `index` into the consumer's memory; see `scatters` for several chunks of a pull."""
    return scatters(chunks, consumer_blocks, null_block=null_block).table(index)


def gathers(chunks: Chunks, producer_blocks: Sequence[Blocks], *, null_block: int | None = 0) -> SideTables:
    """The producer's tables of a pull; block lists as for `bind`, all of them checked here.

    Raises:
        PlanError: too short a block list, an id outside the cache, a null page.
        LocalUsageError: a missing block list.
    """
    pages = {
        kind: producer_pages(runs.producer_page, producer_blocks, kind.src, null_block)
        for kind, runs in chunks.runs.items()
    }
    return SideTables(chunks, pages, "src")


def scatters(chunks: Chunks, consumer_blocks: Sequence[Blocks], *, null_block: int | None = 0) -> SideTables:
    """The consumer's tables of a pull; block lists as for `bind`, all of them checked here.

    That two groups which share memory were not given one block is for `bind` to see, which a consumer calls anyway.

    Raises:
        PlanError: too short a block list, an id outside the cache, a null page, a block given for two pages.
        LocalUsageError: a missing block list.
    """
    pages = {
        kind: consumer_pages(runs.consumer_page, consumer_blocks, kind.dst, null_block)
        for kind, runs in chunks.runs.items()
    }
    return SideTables(chunks, pages, "dst")


@dataclass(frozen=True, eq=False)
class SideTables:
    """A pull's chunks with the page ids of one side, checked once for all chunks."""

    chunks: Chunks
    pages: dict[PageKind, Int64]
    side: SideName

    def table(self, index: int) -> CopyTable:
        """The copies of one chunk between this side's memory and a packed buffer.

        Raises:
            PlanError: a template is not exactly the elements of its regions.
        """
        chunk = self.chunks.chunks[index]
        rows = (row for piece in chunk.pieces for row in self._rows(piece))
        return make_table(_within_buffers(rows, self._seams), chunk.packed_bytes)

    @cached_property
    def _seams(self) -> Int64:
        plan = self.chunks.plan
        return plan.src_seams if self.side == "src" else plan.dst_seams

    @cached_property
    def _run_offsets(self) -> tuple[Int64, ...]:
        """Per strip, where each run starts, counted from a member's base."""
        return tuple(self._starts(strip) for strip in self.chunks.strips)

    def _starts(self, strip: Strip) -> Int64:
        runs, geometry = self.chunks.runs[strip.kind], strip.members.geometry
        side = geometry.src if self.side == "src" else geometry.dst
        tokens = runs.producer_offset if self.side == "src" else runs.consumer_offset
        return self.pages[strip.kind][strip.rows] * side.block_stride + tokens[strip.rows] * side.token_stride

    def _rows(self, piece: Piece) -> Iterator[MemoryCopy]:
        members = self.chunks.strips[piece.strip].members
        geometry = members.geometry
        side = geometry.src if self.side == "src" else geometry.dst
        runs = self._run_offsets[piece.strip][piece.first_run : piece.first_run + piece.runs]
        bases = members.src_bases if self.side == "src" else members.dst_bases
        bases = bases[piece.first_member : piece.first_member + piece.members]
        packed_offset = piece.packed_offset
        for copy in members.member_template(piece.tokens):
            offset = copy.src_offset if self.side == "src" else copy.dst_offset
            axes = _ordered(members, copy, runs, bases, self.side)
            yield _row(offset + piece.first_token * side.token_stride, packed_offset, axes, copy.run_bytes)
            packed_offset += piece.runs * piece.members * copy.bytes


def tail_table(tails: Iterable[TailView]) -> CopyTable:
    """All elements of the tails, to be cleared: a table without a packed side."""
    return make_table((_tail_row(tail) for tail in tails), 0)


def _tail_row(tail: TailView) -> MemoryCopy:
    region = tail.region
    axes = [
        Strided(region.unit.count, region.unit.stride),
        Strided(region.token.count - tail.first_token, region.token.stride),
        Strided(region.channel.count, region.channel.stride),
    ]
    axes.sort(key=lambda axis: -axis.stride)
    start = region.base + tail.page * region.block_stride + tail.first_token * region.token.stride
    return _row(start, 0, axes, region.item_bytes)


def _ordered(members: CopyClass, copy: StridedCopy, runs: Int64, bases: Int64, side: SideName) -> list[Axis]:
    """One side's axes in the order of both: by the distances of the destination, whichever side this is."""
    gaps = np.diff(members.dst_bases)
    axes: list[tuple[int, Axis]] = [
        (members.geometry.dst.block_stride, runs),
        (int(gaps.min()) if gaps.size else 0, bases),
        *((loop.dst_stride, _strided(loop, side)) for loop in copy.loops),
    ]
    return [axis for _, axis in sorted(axes, key=lambda axis: -axis[0])]


def _strided(loop: Loop, side: SideName) -> Strided:
    return Strided(loop.count, loop.src_stride if side == "src" else loop.dst_stride)


def _row(base: int, packed_offset: int, axes: Iterable[Axis], run_bytes: int) -> MemoryCopy:
    """Axes of one step dropped, equal steps told as a stride, and all joined that is contiguous in memory."""
    kept: list[Axis] = []
    for axis in axes:
        start, evened = _evened(axis)
        base += start
        if evened is not None:
            kept.append(evened)
    while kept and isinstance(last := kept[-1], Strided) and last.stride == run_bytes:
        run_bytes *= last.count
        kept.pop()
    return MemoryCopy(base, packed_offset, tuple(_nested(kept)), run_bytes)


def _evened(axis: Axis) -> tuple[int, Axis | None]:
    """(what to add to the base, the axis from there): strided if it rises evenly, None if it has one step."""
    if isinstance(axis, Strided):
        return 0, axis if axis.count > 1 else None
    start, steps = int(axis[0]), np.diff(axis)
    if not steps.size:
        return start, None
    first = int(steps[0])
    if first > 0 and bool((steps == first).all()):
        return start, Strided(axis.size, first)
    return 0, axis


def _nested(axes: Iterable[Axis]) -> list[Axis]:
    """Joins a strided axis with the one inside it where that goes on as it stops."""
    joined: list[Axis] = []
    for axis in axes:
        outer = joined[-1] if joined else None
        if isinstance(outer, Strided) and isinstance(axis, Strided) and outer.stride == axis.count * axis.stride:
            joined[-1] = Strided(outer.count * axis.count, axis.stride)
        else:
            joined.append(axis)
    return joined


def _within_buffers(rows: Iterable[MemoryCopy], seams: Int64) -> Iterator[MemoryCopy]:
    """Cuts segments where one registered buffer ends and the next begins, which touching allocations bring about.

    That takes caches of one page or so; their segments become rows of their own.
    """
    if not seams.size:
        yield from rows
        return
    for row in rows:
        starts = _starts_of(row)
        owner, offset, length = split_at(starts, np.full(starts.size, row.run_bytes, np.int64), seams)
        if owner.size == starts.size:
            yield row
            continue
        places = row.packed_offset + owner * row.run_bytes + offset
        for address, place, size in zip(starts[owner] + offset, places, length, strict=True):
            yield MemoryCopy(int(address), int(place), (), int(size))


def _starts_of(row: MemoryCopy) -> Int64:
    steps = [
        np.arange(axis.count, dtype=np.int64) * axis.stride if isinstance(axis, Strided) else axis for axis in row.axes
    ]
    return outer_sum([*steps, np.array([row.base], np.int64)])
