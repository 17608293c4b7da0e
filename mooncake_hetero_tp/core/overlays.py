"""Whether consumer groups that share memory were given blocks of their own, without looking at single bytes.

vLLM lays the layers of several KV cache groups over one another: they share an allocation and draw their blocks from
one pool. A block that two groups were given would be written twice. `bind` finds that in the descriptors it makes;
what is too large to be bound is looked at here, page by page.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from mooncake_hetero_tp.core.copies import Int64
from mooncake_hetero_tp.core.pages import Blocks, PageKind, consumer_pages, page_runs
from mooncake_hetero_tp.core.pairing import CopyClass, PairPlan
from mooncake_hetero_tp.core.regions import page_extent
from mooncake_hetero_tp.types import TokenRange


def groups_apart(
    plan: PairPlan, ranges: Sequence[TokenRange], consumer_blocks: Sequence[Blocks], *, null_block: int | None = 0
) -> bool:
    """Whether no page that one consumer group writes reaches into one of another; False: look at the bytes.

    Pages of layouts that nest layers inside heads or tokens reach over one another without sharing a byte.

    Raises:
        PlanError, LocalUsageError: as `bind`, of the consumer's blocks.
    """
    known: dict[PageKind, Int64] = {}
    for kind in map(PageKind.of, (members.geometry for members in plan.classes)):
        if kind not in known:
            known[kind] = consumer_pages(page_runs(kind, ranges).consumer_page, consumer_blocks, kind.dst, null_block)
    return not any(
        _touch(one, known[PageKind.of(one.geometry)], other, known[PageKind.of(other.geometry)])
        for one, other in combinations(plan.classes, 2)
        if one.geometry.dst.group != other.geometry.dst.group
    )


def _touch(one: CopyClass, pages: Int64, other: CopyClass, other_pages: Int64) -> bool:
    """Whether any written page of a member of `one` reaches into one of a member of `other`."""
    if not pages.size or not other_pages.size:
        return False
    (low, high), (other_low, other_high) = _hull(one), _hull(other)
    starts = np.unique(pages) * one.geometry.dst.block_stride + low
    other_starts = np.unique(other_pages) * other.geometry.dst.block_stride + other_low
    ends, other_ends = starts + (high - low), other_starts + (other_high - other_low)
    distances = np.unique(one.dst_bases[:, None] - other.dst_bases[None, :])
    near = (distances + starts[0] < other_ends[-1]) & (distances + ends[-1] > other_starts[0])
    for distance in distances[near].tolist():  # few: of layers that lie over one another most have the same
        first = np.searchsorted(other_ends, starts + distance, side="right")
        reached = np.append(other_starts, np.iinfo(np.int64).max)[first]
        if bool((reached < ends + distance).any()):
            return True
    return False


def _hull(members: CopyClass) -> tuple[int, int]:
    """[low, high) of one page of one member, relative to its base."""
    regions = [pair.consumer for pair in members.members[0]]
    base = regions[0].base
    return min(region.base for region in regions) - base, max(
        region.base + page_extent(region) for region in regions
    ) - base
