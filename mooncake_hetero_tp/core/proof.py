"""The exactness proof of a plan, made before the first byte moves.

A plan that leaves out 196,608 of 262,144 bytes and still reports "ready" (vllm#52516) must not
exist here. So each plan is compared with the region tables themselves: every destination byte of a
run is written exactly once and from the right source byte, nothing else is written, and every page
of every region lies inside a registered buffer. The templates are expanded and compared byte range
by byte range; that binding only adds page and base addresses to them is what makes this cover all
requests.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

import numpy as np

from mooncake_hetero_tp.core.copies import ByteMap, canonical
from mooncake_hetero_tp.core.pairing import CopyClass, PairPlan, RegionPair, pair_elements
from mooncake_hetero_tp.core.regions import Buffer, RankTable, Region, extent, unserved_drafts
from mooncake_hetero_tp.core.tables import validate_table
from mooncake_hetero_tp.errors import PeerProtocolError, PlanError
from mooncake_hetero_tp.types import Rank


def prove(consumer: RankTable, plans: Mapping[Rank, PairPlan]) -> None:
    """Proves that the plans together fill the consumer rank's regions exactly; only a draft layer may stay unread.

    Raises:
        PlanError: a unit that nobody or two read, a copy that is not exactly the elements of its
            regions, regions that share bytes or leave the registered buffers. Nothing has been written.
    """
    try:
        validate_table(consumer)
    except PeerProtocolError as error:
        raise PlanError(f"the consumer's own table: {error}") from error
    _prove_units(consumer, plans)
    for rank, plan in plans.items():
        for pair in plan.pairs:
            _prove_inside(pair.consumer, plan.consumer.buffers, "the consumer")
            _prove_inside(pair.producer, plan.producer.buffers, f"producer rank {rank}")
        for members in plan.classes:
            _prove_class(members, rank)
        _prove_classes_hold(plan, rank)


def _prove_units(consumer: RankTable, plans: Mapping[Rank, PairPlan]) -> None:
    """Each local unit of each consumer region is read exactly once over all plans, or nothing of a draft layer."""
    read: dict[Region, list[tuple[int, int, Rank]]] = defaultdict(list)
    for rank, plan in plans.items():
        for pair in plan.pairs:
            read[pair.consumer].extend((cut.consumer_local, cut.count, rank) for cut in pair.cuts)
    unread = set(unserved_drafts(consumer, (plan.producer for plan in plans.values())))
    for region in consumer.regions:
        if region.layer in unread:
            continue
        _prove_once(region, sorted(read.pop(region, [])))
    for region in read:
        raise PlanError(f"{region.name}: the plan writes a region that is not in the consumer's table")


def _prove_once(region: Region, cuts: Iterable[tuple[int, int, Rank]]) -> None:
    done = 0
    for start, count, rank in cuts:
        if start != done:
            word = "missing" if start > done else "read twice"
            raise PlanError(
                f"{region.name}: unit {min(start, done)} of {region.unit.count} is {word} "
                f"(next read: units {start}..{start + count - 1} from producer rank {rank})"
            )
        done += count
    if done != region.unit.count:
        raise PlanError(f"{region.name}: {done} of {region.unit.count} units are read, unit {done} is missing")


def _prove_inside(region: Region, buffers: Iterable[Buffer], whose: str) -> None:
    end = region.base + extent(region)
    if not any(buffer.address <= region.base and end <= buffer.end for buffer in buffers):
        raise PlanError(
            f"{region.name}: bytes [{region.base}, {end}) leave every registered buffer of {whose}; "
            f"register the allocation that holds them"
        )


def _prove_classes_hold(plan: PairPlan, rank: Rank) -> None:
    """The classes hold exactly the plan's pairs."""
    held = [pair for members in plan.classes for member in members.members for pair in member]
    if Counter(held) != Counter(plan.pairs):
        raise PlanError(f"producer rank {rank}: the plan's copy classes do not hold each of its pairs once")


def _prove_class(members: CopyClass, rank: Rank) -> None:
    """Templates equal the elements of every member, on the first and last page and token."""
    geometry = members.geometry
    shortest = min(geometry.src.page_tokens, geometry.dst.page_tokens)
    counts = {shortest} if geometry.whole_pages or geometry.is_state else {1, shortest}
    for index, member in enumerate(members.members):
        for count in sorted(counts):
            if not _placed(members, index, count).same_as(_wanted(member, count)):
                raise PlanError(
                    f"{', '.join(pair.consumer.name for pair in member)} from producer rank {rank}: a run "
                    f"of {count} tokens would not copy exactly its elements; nothing was written"
                )


def _placed(members: CopyClass, index: int, count: int) -> ByteMap:
    """What binding makes of the template: the last run of `count` tokens in the last page."""
    src, dst = members.geometry.src, members.geometry.dst
    members.template(count)  # raises unless it is this run for every member
    runs = members.one_member(count)
    source = int(members.src_bases[index]) + (src.num_blocks - 1) * src.block_stride
    target = int(members.dst_bases[index]) + (dst.num_blocks - 1) * dst.block_stride
    source += (src.page_tokens - count) * src.token_stride
    target += (dst.page_tokens - count) * dst.token_stride
    return ByteMap(runs.src + source, runs.dst + target, runs.length)


def _wanted(member: tuple[RegionPair, ...], count: int) -> ByteMap:
    """The same run from the regions' own numbers, element by element."""
    maps = []
    for pair in member:
        source, target = pair.producer, pair.consumer
        src_page = (source.num_blocks - 1) * source.block_stride
        dst_page = (target.num_blocks - 1) * target.block_stride
        for cut in pair.cuts:
            part = pair_elements(
                pair,
                cut,
                range(source.token.count - count, source.token.count),
                range(target.token.count - count, target.token.count),
            )
            maps.append(ByteMap(part.src + src_page, part.dst + dst_page, part.length))
    return canonical(
        np.concatenate([part.src for part in maps]),
        np.concatenate([part.dst for part in maps]),
        np.concatenate([part.length for part in maps]),
    )
