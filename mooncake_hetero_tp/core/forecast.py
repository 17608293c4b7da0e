"""How many descriptors a direct read would take, without making them all.

Token-major pages fall into millions of pieces: binding 32,768 tokens of 80 layers takes seconds and hundreds of
megabytes, which is no price for a choice that such a pull is never read directly by. So where there may be many, the
first pages are bound and stand for the rest; descriptors are then right to within what later block ids join or part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from mooncake_hetero_tp.core.binding import Descriptors, bind
from mooncake_hetero_tp.core.overlays import groups_apart
from mooncake_hetero_tp.core.pages import Blocks, PageKind, page_runs
from mooncake_hetero_tp.core.pairing import CopyClass, PairPlan
from mooncake_hetero_tp.types import TokenRange

EXACT_SEGMENTS: Final = 16_384
"""Up to so many are bound in about 2 ms, and counted rather than estimated: more would show in a staged pull of 50 ms."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a direct read takes: bytes exactly, descriptors so many or about so many."""

    descriptors: int
    length_bytes: int
    bound: Descriptors | None = None
    """All of them, where they were counted; None: they were estimated."""


def forecast(
    plan: PairPlan,
    ranges: Sequence[TokenRange],
    producer_blocks: Sequence[Blocks],
    consumer_blocks: Sequence[Blocks],
    *,
    null_block: int | None = 0,
    exact_segments: int = EXACT_SEGMENTS,
) -> Forecast:
    """Arguments as for `bind`.

    Raises:
        PlanError, LocalUsageError: as `bind`; of the producer's blocks that are not looked at, when they are bound or
            packed.
    """
    length_bytes, segments = _sizes(plan, ranges)
    if segments <= exact_segments or not groups_apart(plan, ranges, consumer_blocks, null_block=null_block):
        found = bind(plan, ranges, producer_blocks, consumer_blocks, null_block=null_block)
        return Forecast(found.count, length_bytes, found)
    looked_at = [_head(plan, group, tokens, exact_segments / segments) for group, tokens in enumerate(ranges)]
    share = _sizes(plan, looked_at)[0] / length_bytes
    found = bind(plan, looked_at, producer_blocks, consumer_blocks, null_block=null_block)
    return Forecast(round(found.count / share), length_bytes)


def _sizes(plan: PairPlan, ranges: Sequence[TokenRange]) -> tuple[int, int]:
    """(bytes, descriptors if no two runs join) of a pull."""
    length_bytes = segments = 0
    tokens: dict[PageKind, tuple[int, int, int]] = {}
    for members in plan.classes:
        kind = PageKind.of(members.geometry)
        if kind not in tokens:
            count = page_runs(kind, ranges).count
            tokens[kind] = (count.size, int(count.sum()), int(count.max(initial=0)))
        runs, total, longest = tokens[kind]
        length_bytes += total * members.token_bytes * len(members.members)
        segments += runs * _segments(members, longest)
    return length_bytes, segments


def _segments(members: CopyClass, tokens: int) -> int:
    """Descriptors of a run of so many tokens of all members."""
    if not tokens:
        return 0
    return sum(copy.runs for copy in members.template(tokens)) * members.origins[0].size


def _head(plan: PairPlan, group: int, tokens: TokenRange, share: float) -> TokenRange:
    """The first part of a consumer group's range, a page at least; all of a state group's, which is one slot."""
    sides = [
        (members.geometry.src, members.geometry.dst)
        for members in plan.classes
        if members.geometry.dst.group.index == group and not members.geometry.is_state
    ]
    if not sides:
        return tokens
    page = max(side.page_tokens for pair in sides for side in pair)
    return TokenRange(tokens.start, min(tokens.start + max(int(tokens.count * share), page), tokens.end))
