"""Checks of a rank's whole region table, our own or a peer's, before anything is planned with it.

A peer's table is untrusted: it may be absurd, overlap or leave its allocation. After `validate_table`
all of it is plain: strides nest, pages stay in their buffers, no two components share a byte.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np

from mooncake_hetero_tp.core.copies import Int64, outer_sum
from mooncake_hetero_tp.core.regions import Axis, Group, RankTable, Region, extent
from mooncake_hetero_tp.errors import PeerProtocolError

MAX_REGIONS = 65_536
MAX_BUFFERS = 65_536
MAX_ADDRESS = 1 << 62
"""Addresses and byte counts beyond this would overflow the int64 arithmetic of binding."""
MAX_PAGE_ELEMENTS = 1 << 26
"""Elements of one page of one component; far above any cache, far below what exhausts memory."""
MAX_PAGE_RUNS = 1 << 24
"""Separate byte runs of one page over all components of a group; bounds the overlap check."""


def validate_table(table: RankTable) -> None:
    """Checks everything about a table that does not depend on the other side.

    Raises:
        PeerProtocolError: naming the region, what was expected and what was seen.
    """
    _bounded("regions", len(table.regions), MAX_REGIONS)
    _bounded("buffers", len(table.buffers), MAX_BUFFERS)
    for position, group in enumerate(table.groups):
        _check_group(group, position)
    for buffer in table.buffers:
        if buffer.address < 0 or buffer.length_bytes < 1 or buffer.end > MAX_ADDRESS:
            raise PeerProtocolError(f"buffer {buffer}: expected address >= 0, length >= 1, end <= {MAX_ADDRESS}")
    for region in table.regions:
        _check_counts(region)
        _check_group_fit(region, table.groups)
        _check_spans(region)
        _check_nesting(region)
    _check_unique(table.regions)
    _check_inside(table)
    _check_disjoint(table)


def _bounded(what: str, seen: int, most: int) -> None:
    if seen > most:
        raise PeerProtocolError(f"table with {seen} {what}: expected at most {most}; the peer's table is damaged")


def _fail(region: Region, expected: str, seen: object) -> PeerProtocolError:
    return PeerProtocolError(
        f"region {region.name}: expected {expected}, seen {seen}; the table is damaged or of another encoding"
    )


def _check_group(group: Group, position: int) -> None:
    if group.index != position:
        raise PeerProtocolError(f"KV cache group at position {position} has index {group.index}: list groups in order")
    sizes = (group.block_size, group.kernel_block_size)
    if min(sizes) < 1 or max(sizes) > MAX_ADDRESS or group.block_size % group.kernel_block_size:
        raise PeerProtocolError(
            f"KV cache group {position}: logical block of {group.block_size} tokens, kernel block of "
            f"{group.kernel_block_size}: expected positive sizes, the kernel block dividing the logical one"
        )


def _check_counts(region: Region) -> None:
    counts = {
        "num_blocks": region.num_blocks,
        "units": region.unit.count,
        "tokens": region.token.count,
        "channels": region.channel.count,
        "item_bytes": region.item_bytes,
    }
    for what, count in counts.items():
        if not 1 <= count <= MAX_ADDRESS:
            raise _fail(region, f"{what} of at least 1", count)
    elements = region.unit.count * region.token.count * region.channel.count
    if elements > MAX_PAGE_ELEMENTS:
        raise _fail(region, f"at most {MAX_PAGE_ELEMENTS} elements a page", elements)
    strides = (region.block_stride, region.unit.stride, region.token.stride, region.channel.stride)
    if min(strides) < 0 or max(strides) > MAX_ADDRESS:
        raise _fail(region, f"strides from 0 to {MAX_ADDRESS}", strides)
    if not 0 <= region.base <= MAX_ADDRESS:
        raise _fail(region, f"0 <= base <= {MAX_ADDRESS}", region.base)


def _check_group_fit(region: Region, groups: Sequence[Group]) -> None:
    if not 0 <= region.group < len(groups):
        raise _fail(region, f"a group below {len(groups)}", region.group)
    group = groups[region.group]
    if not group.is_state and region.token.count != group.kernel_block_size:
        raise _fail(region, f"pages of {group.kernel_block_size} tokens (kernel block size)", region.token.count)
    if region.num_blocks % group.kernel_pages:
        raise _fail(region, f"a multiple of {group.kernel_pages} kernel pages", region.num_blocks)


def _check_spans(region: Region) -> None:
    """Spans give each local unit one global unit, and no global unit twice."""
    by_local = sorted(region.spans)
    done = 0
    for span in by_local:
        if span.count < 1 or span.local_start != done or not 0 <= span.global_start <= MAX_ADDRESS:
            raise _fail(region, f"spans that cover units 0..{region.unit.count - 1} once", region.spans)
        done += span.count
    if done != region.unit.count:
        raise _fail(region, f"spans that cover units 0..{region.unit.count - 1} once", region.spans)
    by_global = sorted(region.spans, key=lambda span: span.global_start)
    for left, right in pairwise(by_global):
        if left.global_start + left.count > right.global_start:
            raise _fail(region, "each global unit at most once", region.spans)


def _check_nesting(region: Region) -> None:
    """Axes nest (no element overlaps another); pages never innermost, units only where they have no channels.

    A layout whose C is not innermost ends here. Conv state in SD order has units innermost, rightly.
    """
    axes = {
        "page": Axis(region.num_blocks, region.block_stride),
        "unit": region.unit,
        "token": region.token,
        "channel": region.channel,
    }
    inner, size = "item", region.item_bytes
    for name, axis in sorted(axes.items(), key=lambda item: item[1].stride):
        if axis.count == 1:
            continue
        if axis.stride < size:
            raise _fail(region, f"a {name} stride of at least {size} bytes (all of its {inner}s)", axis.stride)
        if inner == "item" and (name == "page" or (name == "unit" and region.channel.count > 1)):
            raise _fail(region, "channels or tokens innermost (C last in the layout)", f"{name}s innermost")
        inner, size = name, size + (axis.count - 1) * axis.stride


def _check_unique(regions: Iterable[Region]) -> None:
    seen: set[tuple[str, str]] = set()
    for region in regions:
        key = (region.layer, region.component)
        if key in seen:
            raise _fail(region, "each layer component once", "it twice")
        seen.add(key)


def _check_inside(table: RankTable) -> None:
    buffers = sorted(table.buffers, key=lambda buffer: buffer.address)
    starts = np.array([buffer.address for buffer in buffers], np.int64)
    for region in table.regions:
        end = region.base + extent(region)
        place = int(np.searchsorted(starts, region.base, side="right")) - 1
        if place < 0 or end > buffers[place].end:
            raise _fail(region, "all pages inside one registered buffer", f"bytes [{region.base}, {end})")


def _check_disjoint(table: RankTable) -> None:
    """No two components of a group share a byte of the first or the last page."""
    grouped: dict[int, list[Region]] = defaultdict(list)
    for region in table.regions:
        grouped[region.group].append(region)
    for regions in grouped.values():
        _bounded("page runs", sum(_run_count(region) for region in regions), MAX_PAGE_RUNS)
        for last in (False, True):
            _check_page(regions, last=last)


def _run_count(region: Region) -> int:
    return int(np.prod([axis.count for axis in _outer_axes(region)], dtype=np.int64))


def _outer_axes(region: Region) -> list[Axis]:
    """Axes of a page that are not part of its contiguous innermost runs."""
    axes = sorted((region.unit, region.token, region.channel), key=lambda axis: axis.stride)
    run = region.item_bytes
    while axes and (axes[0].count == 1 or axes[0].stride == run):
        run *= axes.pop(0).count
    return axes


def _page_runs(region: Region, *, last: bool) -> tuple[Int64, int]:
    outer = _outer_axes(region)
    elements = region.unit.count * region.token.count * region.channel.count * region.item_bytes
    run = elements // _run_count(region)
    page = region.base + (region.num_blocks - 1) * region.block_stride * last
    steps = [np.arange(axis.count, dtype=np.int64) * axis.stride for axis in outer]
    return outer_sum([*steps, np.array([page], np.int64)]), run


def _check_page(regions: Sequence[Region], *, last: bool) -> None:
    starts, ends, owner = [], [], []
    for index, region in enumerate(regions):
        start, run = _page_runs(region, last=last)
        starts.append(start)
        ends.append(start + run)
        owner.append(np.full(start.size, index))
    start, end, who = np.concatenate(starts), np.concatenate(ends), np.concatenate(owner)
    order = np.argsort(start, kind="stable")
    start, end, who = start[order], end[order], who[order]
    clash = np.flatnonzero(start[1:] < end[:-1])
    if clash.size:
        left, right = regions[int(who[clash[0]])], regions[int(who[clash[0] + 1])]
        raise _fail(right, f"bytes of its own beside {left.name}", f"both at address {int(start[clash[0] + 1])}")
