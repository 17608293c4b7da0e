"""Which pages a request's runs lie in: runs of page numbers first, block ids checked and put in afterwards.

Numbers come from token ranges alone, so both sides of a staged pull count them alike; ids are known to one
side each. Both executors take their ids from here, so that no check is made in one of them only.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from mooncake_hetero_tp.core.copies import Int64
from mooncake_hetero_tp.core.pairing import Geometry, Side
from mooncake_hetero_tp.core.runs import RunTable, check_range, cut_runs
from mooncake_hetero_tp.errors import LocalUsageError, PlanError
from mooncake_hetero_tp.types import TokenRange

Blocks = npt.NDArray[np.integer]
"""Logical block ids of one group, any integer type; position i is page i of the request."""


class PageKind(msgspec.Struct, frozen=True):
    """What decides the runs of a class of copies, whatever its strides: classes of one kind share them."""

    src: Side
    dst: Side
    whole_pages: bool

    @classmethod
    def of(cls, geometry: Geometry) -> PageKind:
        return cls(_without_strides(geometry.src), _without_strides(geometry.dst), geometry.whole_pages)

    @property
    def slot(self) -> PageKind:
        """Of states, what all components of a group share: one slot, whatever its rows."""
        if not self.dst.group.is_state:
            return self
        return PageKind(replace(self.src, page_tokens=1), replace(self.dst, page_tokens=1), self.whole_pages)


def _without_strides(side: Side) -> Side:
    return Side(side.group, 0, 0, side.page_tokens, side.num_blocks)


def page_runs(kind: PageKind, ranges: Sequence[TokenRange]) -> RunTable:
    """The runs of one kind, in token order, pages counted from the request's first; ranges per consumer group.

    Raises:
        PlanError: a range that starts inside an opaque page.
        LocalUsageError: a missing or reversed range.
    """
    tokens = range_of(ranges, kind.dst.group.index)
    if kind.dst.group.is_state:
        return _slot_run(tokens, kind.src, kind.dst)
    if kind.whole_pages:
        return _whole_page_runs(tokens, kind.src, kind.dst)
    return cut_runs(tokens, kind.src.page_tokens, kind.dst.page_tokens)


def range_of(ranges: Sequence[TokenRange], group: int) -> TokenRange:
    """The checked range of one consumer group.

    Raises:
        LocalUsageError: none was given, or a reversed one.
    """
    if group >= len(ranges):
        raise LocalUsageError(f"{len(ranges)} token ranges given, group {group} has none; give one per consumer group")
    check_range(ranges[group])
    return ranges[group]


def _whole_page_runs(tokens: TokenRange, src: Side, dst: Side) -> RunTable:
    """Opaque pages move whole: the start must be a page border, the last page counts as full."""
    size = dst.page_tokens
    if not tokens.count:
        return cut_runs(tokens, src.page_tokens, size)
    if tokens.start % size:
        raise PlanError(
            f"group {dst.group.index}: tokens from {tokens.start} start inside a kernel page of {size} tokens "
            f"whose encoding is opaque; only whole pages can be read; round the range down to a page border"
        )
    return cut_runs(TokenRange(tokens.start, -(-tokens.end // size) * size), src.page_tokens, size)


def _slot_run(tokens: TokenRange, src: Side, dst: Side) -> RunTable:
    """The one slot that holds the state after `end` tokens: index `cdiv(end, block size) - 1`."""
    slots = 1 if tokens.count else 0
    zero = np.zeros(slots, np.int64)
    src_page = np.full(slots, -(-tokens.end // src.group.block_size) - 1, np.int64)
    dst_page = np.full(slots, -(-tokens.end // dst.group.block_size) - 1, np.int64)
    return RunTable(src_page, zero, dst_page, zero, np.full(slots, dst.page_tokens, np.int64))


def producer_pages(pages: Int64, blocks: Sequence[Blocks], side: Side, null_block: int | None) -> Int64:
    """The producer's kernel page ids of kernel page numbers.

    Raises:
        PlanError: too short a block list, an id outside the cache, a null page.
        LocalUsageError: no block list for the group.
    """
    return _page_ids(pages, _list_of(blocks, side, "producer"), side, "producer", null_block)


def consumer_pages(pages: Int64, blocks: Sequence[Blocks], side: Side, null_block: int | None) -> Int64:
    """The consumer's kernel page ids of kernel page numbers.

    Raises:
        PlanError: too short a block list, an id outside the cache, a null page, a block given for two pages.
        LocalUsageError: no block list for the group.
    """
    own = _list_of(blocks, side, "consumer")
    ids = _page_ids(pages, own, side, "consumer", null_block)
    if pages.size < 2:
        return ids
    touched = np.unique(pages // side.group.kernel_pages)
    if np.unique(own[touched]).size != touched.size:
        where = f"consumer group {side.group.index}"
        raise PlanError(f"{where}: a block is given for two pages; each page needs a block of its own")
    return ids


def _list_of(blocks: Sequence[Blocks], side: Side, whose: str) -> Int64:
    if side.group.index >= len(blocks):
        raise LocalUsageError(
            f"{len(blocks)} {whose} block lists given, group {side.group.index} has none; give one per {whose} group"
        )
    return np.asarray(blocks[side.group.index], dtype=np.int64)


def _page_ids(pages: Int64, blocks: Int64, side: Side, whose: str, null_block: int | None) -> Int64:
    ratio = side.group.kernel_pages
    where = f"{whose} group {side.group.index}"
    number = pages // ratio
    if number.size and int(number.max()) >= blocks.size:
        raise PlanError(
            f"{where}: {blocks.size} blocks given, the range needs {int(number.max()) + 1} of "
            f"{side.group.block_size} tokens; give the complete list, counted from the request's first page"
        )
    block = blocks[number]
    _check_ids(block, side.num_blocks // ratio, where, null_block)
    return block * ratio + pages % ratio


def _check_ids(block: Int64, limit: int, where: str, null_block: int | None) -> None:
    if not block.size:
        return
    low, high = int(block.min()), int(block.max())
    if low < 0 or high >= limit:
        raise PlanError(f"{where}: block id {low if low < 0 else high} is outside the cache of {limit} blocks")
    if null_block is not None and bool((block == null_block).any()):
        raise PlanError(
            f"{where}: the range covers a null page (block id {null_block}), whose content was dropped or never "
            f"written; start the range after it"
        )
