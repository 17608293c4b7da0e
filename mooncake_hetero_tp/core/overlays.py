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
    (bases, length), (other_bases, other_length) = _parts(one), _parts(other)
    starts = np.unique(pages) * one.geometry.dst.block_stride
    other_starts = np.unique(other_pages) * other.geometry.dst.block_stride
    distances = (bases[:, None] - other_bases[None, :]).ravel()
    near = (distances + starts[0] < other_starts[-1] + other_length) & (
        distances + starts[-1] + length > other_starts[0]
    )
    for distance in np.unique(distances[near]).tolist():  # few: most of what lies over one another does so at none
        first = np.searchsorted(other_starts + other_length, starts + distance, side="right")
        reached = np.append(other_starts, np.iinfo(np.int64).max)[first]
        if bool((reached < starts + distance + length).any()):
            return True
    return False


def _parts(members: CopyClass) -> tuple[Int64, int]:
    """Where the parts of page 0 of all members begin, and the length of the longest.

    A page is one part for each component, and for each unit where other pages lie between its units.
    """
    offsets: list[int] = []
    longest = 0
    for region in (pair.consumer for pair in members.members[0]):
        nested = region.unit.stride < region.block_stride
        offset, units = region.base - members.members[0][0].consumer.base, 1 if nested else region.unit.count
        offsets.extend(offset + unit * region.unit.stride for unit in range(units))
        longest = max(longest, page_extent(region) - (units - 1) * region.unit.stride)
    return (members.dst_bases[:, None] + np.array(offsets, np.int64)[None, :]).ravel(), longest
