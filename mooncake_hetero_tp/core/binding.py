"""Plan + block ids + addresses -> descriptor arrays, vectorised; merged; in bounded batches.

Per class the addresses are an outer sum of pages, layer bases and template loops. The axes run in
order of falling destination stride, so the natural order is nearly sorted by destination and one
pass joins neighbours over pages, heads, K|V and layers wherever both sides are contiguous.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mooncake_hetero_tp.core.copies import ByteMap, Int64, StridedCopy, join_sorted, outer_sum, split_at
from mooncake_hetero_tp.core.pairing import CopyClass, Geometry, PairPlan, Side
from mooncake_hetero_tp.core.regions import RankTable, Region
from mooncake_hetero_tp.core.runs import check_range, cut_runs
from mooncake_hetero_tp.errors import LocalUsageError, PlanError
from mooncake_hetero_tp.types import TokenRange

Blocks = npt.NDArray[np.integer]
"""Logical block ids of one group, any integer type; position i is page i of the request."""


@dataclass(frozen=True, eq=False, slots=True)
class Descriptors:
    """Reads of `length[i]` bytes from the peer's `src[i]` to our `dst[i]`, sorted by `dst`; int64."""

    src: Int64
    dst: Int64
    length: Int64

    @property
    def count(self) -> int:
        return int(self.length.size)

    @property
    def bytes(self) -> int:
        return int(self.length.sum())


@dataclass(frozen=True, eq=False, slots=True)
class PageRuns:
    """Runs with kernel page ids in place of page numbers, sorted by destination; int64 columns."""

    src_page: Int64
    src_token: Int64
    dst_page: Int64
    dst_token: Int64
    count: Int64


def bind(
    plan: PairPlan,
    ranges: Sequence[TokenRange],
    producer_blocks: Sequence[Blocks],
    consumer_blocks: Sequence[Blocks],
    *,
    null_block: int | None = 0,
) -> Descriptors:
    """The descriptors of one request: maximally merged, never across a gap or a buffer's end.

    `ranges` and `consumer_blocks` are per consumer group, `producer_blocks` per producer group;
    block lists are complete, position i being logical page i of the request. Pages outside the
    ranges are not looked at. `null_block` is vLLM's placeholder id, which no range may touch (None:
    no id is special). Groups that the plan does not read are ignored; empty ranges are legal.

    Raises:
        PlanError: block ids out of range, a null page, too short a list, a consumer page given
            twice, a range that an opaque encoding cannot take. Nothing has been written.
        LocalUsageError: a missing or reversed range, a missing block list.
    """
    known: dict[tuple[Side, Side, bool], PageRuns] = {}
    parts: list[ByteMap] = []
    expected = 0
    for members in plan.classes:
        geometry = members.geometry
        key = (_without_strides(geometry.src), _without_strides(geometry.dst), geometry.whole_pages)
        runs = known.get(key)
        if runs is None:
            runs = _page_runs(geometry, ranges, producer_blocks, consumer_blocks, null_block)
            known[key] = runs
        parts.extend(_bind_class(members, runs))
        expected += int(runs.count.sum()) * members.token_bytes * len(members.members)
    found = _merged(parts, plan)
    if found.bytes != expected:
        raise PlanError(f"{found.bytes} bytes bound, {expected} planned; nothing was written; please report")
    return found


def _without_strides(side: Side) -> Side:
    return Side(side.group, 0, 0, side.page_tokens, side.num_blocks)


def _merged(parts: Sequence[ByteMap], plan: PairPlan) -> Descriptors:
    if not parts:
        empty = np.empty(0, np.int64)
        return Descriptors(empty, empty, empty)
    src, dst, length = (
        np.concatenate([getattr(part, column) for part in parts]) if len(parts) > 1 else getattr(parts[0], column)
        for column in ("src", "dst", "length")
    )
    if dst.size > 1 and not bool((dst[1:] > dst[:-1]).all()):
        order = np.argsort(dst, kind="stable")
        src, dst, length = src[order], dst[order], length[order]
    runs = join_sorted(ByteMap(src, dst, length))
    return _within_buffers(Descriptors(runs.src, runs.dst, runs.length), plan)


def _within_buffers(found: Descriptors, plan: PairPlan) -> Descriptors:
    """Splits where one buffer ends and the next begins: a descriptor lies inside one registration.

    Two allocations may happen to touch on both sides; merging and folded layers then run across.
    """
    if plan.src_seams.size:
        found = _pieces(found, *split_at(found.src, found.length, plan.src_seams))
    if plan.dst_seams.size:
        found = _pieces(found, *split_at(found.dst, found.length, plan.dst_seams))
    return found


def _pieces(whole: Descriptors, owner: Int64, offset: Int64, length: Int64) -> Descriptors:
    return Descriptors(whole.src[owner] + offset, whole.dst[owner] + offset, length)


def _bind_class(members: CopyClass, runs: PageRuns) -> Iterator[ByteMap]:
    """Descriptors of all members, one part per distinct run length and template copy."""
    src, dst = members.geometry.src, members.geometry.dst
    sources = runs.src_page * src.block_stride + runs.src_token * src.token_stride
    targets = runs.dst_page * dst.block_stride + runs.dst_token * dst.token_stride
    for count in np.unique(runs.count):
        chosen = runs.count == count
        pages = _Steps(sources[chosen], targets[chosen], dst.block_stride)
        for copy in members.template(int(count)):
            yield _bind_copy(members, copy, pages)


@dataclass(frozen=True, eq=False, slots=True)
class _Steps:
    """One axis of the outer sum; `spacing` is the destination distance that orders the axes."""

    src: Int64
    dst: Int64
    spacing: int


def _bind_copy(members: CopyClass, copy: StridedCopy, pages: _Steps) -> ByteMap:
    axes = [pages, _member_axis(members)]
    for loop in copy.loops:
        steps = np.arange(loop.count, dtype=np.int64)
        axes.append(_Steps(steps * loop.src_stride, steps * loop.dst_stride, loop.dst_stride))
    axes.sort(key=lambda axis: -axis.spacing)
    src = outer_sum([axis.src for axis in axes]) + copy.src_offset
    dst = outer_sum([axis.dst for axis in axes]) + copy.dst_offset
    return ByteMap(src, dst, np.full(dst.size, copy.run_bytes, np.int64))


def _member_axis(members: CopyClass) -> _Steps:
    src, dst = members.origins
    gaps = np.diff(dst)
    return _Steps(src, dst, int(gaps.min()) if gaps.size else 0)


def _page_runs(
    geometry: Geometry,
    ranges: Sequence[TokenRange],
    producer_blocks: Sequence[Blocks],
    consumer_blocks: Sequence[Blocks],
    null_block: int | None,
) -> PageRuns:
    src, dst = geometry.src, geometry.dst
    tokens = _range_of(ranges, dst.group.index)
    cut = _slot_run if geometry.is_state else _whole_page_runs if geometry.whole_pages else _token_runs
    runs = cut(tokens, src, dst)
    src_page = _page_ids(runs.src_page, _list_of(producer_blocks, src, "producer"), src, "producer", null_block)
    dst_page = _page_ids(runs.dst_page, _list_of(consumer_blocks, dst, "consumer"), dst, "consumer", null_block)
    order = np.lexsort((runs.dst_token, dst_page))
    return PageRuns(src_page[order], runs.src_token[order], dst_page[order], runs.dst_token[order], runs.count[order])


def _range_of(ranges: Sequence[TokenRange], group: int) -> TokenRange:
    if group >= len(ranges):
        raise LocalUsageError(f"{len(ranges)} token ranges given, group {group} has none; give one per consumer group")
    check_range(ranges[group])
    return ranges[group]


def _list_of(blocks: Sequence[Blocks], side: Side, whose: str) -> Int64:
    if side.group.index >= len(blocks):
        raise LocalUsageError(
            f"{len(blocks)} {whose} block lists given, group {side.group.index} has none; give one per {whose} group"
        )
    return np.asarray(blocks[side.group.index], dtype=np.int64)


def _token_runs(tokens: TokenRange, src: Side, dst: Side) -> PageRuns:
    runs = cut_runs(tokens, src.page_tokens, dst.page_tokens)
    return PageRuns(runs.producer_page, runs.producer_offset, runs.consumer_page, runs.consumer_offset, runs.count)


def _whole_page_runs(tokens: TokenRange, src: Side, dst: Side) -> PageRuns:
    """Opaque pages move whole: the start must be a page border, the last page counts as full."""
    size = dst.page_tokens
    if not tokens.count:
        return _token_runs(tokens, src, dst)
    if tokens.start % size:
        raise PlanError(
            f"group {dst.group.index}: tokens from {tokens.start} start inside a kernel page of {size} tokens "
            f"whose encoding is opaque; only whole pages can be read; round the range down to a page border"
        )
    return _token_runs(TokenRange(tokens.start, -(-tokens.end // size) * size), src, dst)


def _slot_run(tokens: TokenRange, src: Side, dst: Side) -> PageRuns:
    """The one slot that holds the state after `end` tokens: index `cdiv(end, block size) - 1`."""
    slots = 1 if tokens.count else 0
    zero = np.zeros(slots, np.int64)
    src_page = np.full(slots, -(-tokens.end // src.group.block_size) - 1, np.int64)
    dst_page = np.full(slots, -(-tokens.end // dst.group.block_size) - 1, np.int64)
    return PageRuns(src_page, zero, dst_page, zero, np.full(slots, dst.page_tokens, np.int64))


def _page_ids(pages: Int64, blocks: Int64, side: Side, whose: str, null_block: int | None) -> Int64:
    """Kernel page ids of kernel page numbers, all checked."""
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
    if whose == "consumer":
        touched = np.unique(number)
        if np.unique(blocks[touched]).size != touched.size:
            raise PlanError(f"{where}: a block is given for two pages; each page needs a block of its own")
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


def batches(descriptors: Descriptors, max_count: int, max_bytes: int) -> Iterator[Descriptors]:
    """Consecutive parts of at most `max_count` descriptors and `max_bytes` bytes each.

    A descriptor longer than `max_bytes` is split.

    Raises:
        LocalUsageError: a limit below 1.
    """
    if max_count < 1 or max_bytes < 1:
        raise LocalUsageError(f"batch limits {max_count} descriptors, {max_bytes} bytes: expected at least 1 each")
    pieces = _split(descriptors, max_bytes)
    total = np.cumsum(pieces.length)
    start, done = 0, 0
    while start < pieces.count:
        by_bytes = int(np.searchsorted(total, done + max_bytes, side="right"))
        stop = min(by_bytes, start + max_count)
        yield Descriptors(pieces.src[start:stop], pieces.dst[start:stop], pieces.length[start:stop])
        start, done = stop, int(total[stop - 1])


def _split(descriptors: Descriptors, max_bytes: int) -> Descriptors:
    """Descriptors of at most `max_bytes` each, in order."""
    if not descriptors.count or int(descriptors.length.max()) <= max_bytes:
        return descriptors
    pieces = -(-descriptors.length // max_bytes)
    owner = np.repeat(np.arange(descriptors.count), pieces)
    offset = (np.arange(owner.size) - (np.cumsum(pieces) - pieces)[owner]) * max_bytes
    return _pieces(descriptors, owner, offset, np.minimum(descriptors.length[owner] - offset, max_bytes))


@dataclass(frozen=True, slots=True)
class TailView:
    """Units x tokens `[first_token, token.count)` x channels of one kernel page, to be cleared."""

    region: Region
    page: int
    first_token: int


def tail_views(table: RankTable, ranges: Sequence[TokenRange], consumer_blocks: Sequence[Blocks]) -> list[TailView]:
    """What lies past the end of each range in its last logical block (vllm#51527, vllm#54875).

    Opaque regions arrive as whole pages and state slots have no tokens: neither has a tail.

    Raises:
        PlanError: too short a block list or an id outside the cache.
    """
    known: dict[Side, list[tuple[int, int]]] = {}
    tails: list[TailView] = []
    for region in table.regions:
        group = table.groups[region.group]
        tokens = _range_of(ranges, group.index)
        if group.is_state or region.is_opaque or not tokens.count:
            continue
        side = Side(group, 0, 0, region.token.count, region.num_blocks)
        if side not in known:
            known[side] = list(_tail_pages(side, tokens.end, consumer_blocks))
        tails.extend(TailView(region, page, first) for page, first in known[side])
    return tails


def _tail_pages(side: Side, end: int, consumer_blocks: Sequence[Blocks]) -> Iterator[tuple[int, int]]:
    """(kernel page id, first token past the end) of each page that the range leaves unfilled."""
    last_page = -(-end // side.group.block_size) * side.group.kernel_pages
    pages = np.arange(end // side.page_tokens, last_page, dtype=np.int64)
    ids = _page_ids(pages, _list_of(consumer_blocks, side, "consumer"), side, "consumer", null_block=None)
    for page, page_id in zip(pages.tolist(), ids.tolist(), strict=True):
        yield page_id, max(end - page * side.page_tokens, 0)
