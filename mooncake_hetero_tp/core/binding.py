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

from mooncake_hetero_tp.core.copies import ByteMap, Int64, StridedCopy, join_sorted, outer_sum, split_at, steps
from mooncake_hetero_tp.core.pages import Blocks, PageKind, consumer_pages, page_runs, producer_pages, range_of
from mooncake_hetero_tp.core.pairing import CopyClass, PairPlan, Side
from mooncake_hetero_tp.core.regions import RankTable, Region
from mooncake_hetero_tp.errors import LocalUsageError, PlanError
from mooncake_hetero_tp.types import TokenRange


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

    def with_rows(self, rows: int) -> PageRuns:
        """Runs of one slot each, of a component with so many rows."""
        return PageRuns(self.src_page, self.src_token, self.dst_page, self.dst_token, self.count * rows)


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
    known: dict[PageKind, PageRuns] = {}
    parts: list[ByteMap] = []
    expected = 0
    for members in plan.classes:
        kind = PageKind.of(members.geometry).slot
        runs = known.get(kind)
        if runs is None:
            runs = known[kind] = _page_runs(kind, ranges, producer_blocks, consumer_blocks, null_block)
        if members.geometry.is_state:
            runs = runs.with_rows(members.geometry.dst.page_tokens)
        parts.extend(_bind_class(members, runs))
        expected += int(runs.count.sum()) * members.token_bytes * len(members.members)
    found = _merged(parts, plan)
    if found.bytes != expected:
        raise PlanError(f"{found.bytes} bytes bound, {expected} planned; nothing was written; please report")
    return found


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
    if members.spacing is not None:  # the template has the members: one origin on each side
        sources += members.src_bases[0]
        targets += members.dst_bases[0]
    for count, chosen in _by_count(runs):
        pages = _Steps(sources[chosen], targets[chosen], dst.block_stride)
        for copy in members.template(count):
            yield _bind_copy(members, copy, pages)


def _by_count(runs: PageRuns) -> Iterator[tuple[int, slice | npt.NDArray[np.bool_]]]:
    """Run lengths, and which runs have them; one run, that of a state, needs no search."""
    if runs.count.size == 1:
        yield int(runs.count[0]), slice(None)
        return
    for count in np.unique(runs.count):
        yield int(count), runs.count == count


@dataclass(frozen=True, eq=False, slots=True)
class _Steps:
    """One axis of the outer sum; `spacing` is the destination distance that orders the axes."""

    src: Int64
    dst: Int64
    spacing: int


def _bind_copy(members: CopyClass, copy: StridedCopy, pages: _Steps) -> ByteMap:
    axes = [pages]
    if members.spacing is None:
        axes.append(_member_axis(members))
    axes += [_Steps(steps(n.count, n.src_stride), steps(n.count, n.dst_stride), n.dst_stride) for n in copy.loops]
    axes.sort(key=lambda axis: -axis.spacing)
    src = outer_sum([axis.src for axis in axes], copy.src_offset)
    dst = outer_sum([axis.dst for axis in axes], copy.dst_offset)
    return ByteMap(src, dst, np.full(dst.size, copy.run_bytes, np.int64))


def _member_axis(members: CopyClass) -> _Steps:
    src, dst = members.origins
    return _Steps(src, dst, int((dst[1:] - dst[:-1]).min()))


def _page_runs(
    kind: PageKind,
    ranges: Sequence[TokenRange],
    producer_blocks: Sequence[Blocks],
    consumer_blocks: Sequence[Blocks],
    null_block: int | None,
) -> PageRuns:
    runs = page_runs(kind, ranges)
    src_page = producer_pages(runs.producer_page, producer_blocks, kind.src, null_block)
    dst_page = consumer_pages(runs.consumer_page, consumer_blocks, kind.dst, null_block)
    if runs.count.size < 2:
        return PageRuns(src_page, runs.producer_offset, dst_page, runs.consumer_offset, runs.count)
    order = np.lexsort((runs.consumer_offset, dst_page))
    return PageRuns(
        src_page[order], runs.producer_offset[order], dst_page[order], runs.consumer_offset[order], runs.count[order]
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
        tokens = range_of(ranges, group.index)
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
    ids = consumer_pages(pages, consumer_blocks, side, null_block=None)
    for page, page_id in zip(pages.tolist(), ids.tolist(), strict=True):
        yield page_id, max(end - page * side.page_tokens, 0)
