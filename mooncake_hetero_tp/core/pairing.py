"""Pairs of regions and the copies between their pages, for one (consumer rank, producer rank).

Pairs of equal geometry (the same layer shape over and over) form one `CopyClass` that differs only
in base addresses. Evenly spaced layers are one more loop of the copies, others an axis of bases, so
that binding broadcasts over layers either way. Within a class the copies of one run of `count`
tokens form a template; it is made once per count and checked against the regions' own elements
when it is made.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np

from mooncake_hetero_tp.core.copies import (
    ByteMap,
    Int64,
    Loop,
    StridedCopy,
    canonical,
    concatenate,
    expand,
    outer_sum,
    steps,
    strided_copy,
)
from mooncake_hetero_tp.core.regions import Buffer, Group, RankTable, Region, UnitCut
from mooncake_hetero_tp.errors import PlanError
from mooncake_hetero_tp.types import TokenRange


class RegionPair(msgspec.Struct, frozen=True):
    """One layer component on both sides, and the global units to copy."""

    consumer: Region
    producer: Region
    cuts: tuple[UnitCut, ...]

    @property
    def whole_pages(self) -> bool:
        """Whether only whole kernel pages may move (opaque encodings)."""
        return self.consumer.is_opaque or self.producer.is_opaque

    @property
    def units(self) -> int:
        return sum(cut.count for cut in self.cuts)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token (or state row) in all cut units."""
        return self.units * self.consumer.channel.count * self.consumer.item_bytes


class Part(msgspec.Struct, frozen=True):
    """One unit cut of one component, relative to its member's bases (page 0, token 0)."""

    src_offset: int
    dst_offset: int
    units: Loop
    channels: Loop
    item_bytes: int


class Side(msgspec.Struct, frozen=True):
    """What all members of a class have in common on one side."""

    group: Group
    block_stride: int
    token_stride: int
    page_tokens: int
    num_blocks: int


class Geometry(msgspec.Struct, frozen=True):
    """What makes pairs members of one class: everything but base addresses."""

    src: Side
    dst: Side
    whole_pages: bool
    parts: tuple[Part, ...]

    @property
    def is_state(self) -> bool:
        """Whether one slot maps to one slot."""
        return self.dst.group.is_state


class Templates(NamedTuple):
    """Copies of a run of so many tokens, of all members (by their spacing) and of one; filled as counts turn up."""

    whole: dict[tuple[Loop | None, int], tuple[StridedCopy, ...]]
    member: dict[int, tuple[StridedCopy, ...]]


@dataclass(frozen=True, eq=False)
class CopyClass:
    """Members (one layer each, one pair per component) of equal geometry, in order of `dst_bases`."""

    geometry: Geometry
    members: tuple[tuple[RegionPair, ...], ...]
    src_bases: Int64
    dst_bases: Int64
    templates: Templates = field(default_factory=lambda: Templates({}, {}), repr=False)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token (or state row) of one member."""
        return sum(pair.token_bytes for pair in self.members[0])

    @cached_property
    def spacing(self) -> Loop | None:
        """The members as a loop, where they are evenly spaced on both sides (layers of one allocation)."""
        src, dst = self.src_bases.tolist(), self.dst_bases.tolist()
        if len(src) == 1:
            return Loop(1, 0, 0)
        strides = src[1] - src[0], dst[1] - dst[0]
        for bases, step in zip((src, dst), strides, strict=True):
            if any(after - before != step for before, after in pairwise(bases)):
                return None
        return Loop(len(src), *strides)

    @cached_property
    def origins(self) -> tuple[Int64, Int64]:
        """(src, dst) addresses that `template` counts from: the first member's where they are a loop, else all."""
        few = slice(0, 1 if self.spacing else None)
        return self.src_bases[few], self.dst_bases[few]

    def template(self, count: int) -> tuple[StridedCopy, ...]:
        """Copies of a run of `count` tokens (state rows), from page 0 and token 0 of each origin.

        Made once per count and then checked: one member against its regions' elements, all members
        against that one.

        Raises:
            PlanError: the copies are not exactly the elements of the regions.
        """
        known = self.templates.whole.get((self.spacing, count))
        if known is None:
            known = concatenate(self._copies(count, self.spacing or Loop(1, 0, 0)))
            self._check(known, count)
            self.templates.whole[self.spacing, count] = known
        return known

    def member_template(self, count: int) -> tuple[StridedCopy, ...]:
        """The same of one member, relative to its own bases: for chunks that take a part of the members.

        Raises:
            PlanError: the copies are not exactly the elements of the regions.
        """
        known = self.templates.member.get(count)
        if known is None:
            self.template(count)  # raises unless one member's copies are its elements
            known = self.templates.member[count] = concatenate(self._copies(count, Loop(1, 0, 0)))
        return known

    def _copies(self, count: int, members: Loop) -> Iterable[StridedCopy]:
        tokens = Loop(count, self.geometry.src.token_stride, self.geometry.dst.token_stride)
        for part in self.geometry.parts:
            loops = (members, part.units, tokens, part.channels)
            yield strided_copy(part.src_offset, part.dst_offset, loops, part.item_bytes)

    def _check(self, copies: Iterable[StridedCopy], count: int) -> None:
        one = self.one_member(count)
        src, dst = self.src_bases - self.src_bases[0], self.dst_bases - self.dst_bases[0]
        every = slice(None if self.spacing else 1)
        wanted = canonical(
            outer_sum([src[every], one.src]),
            outer_sum([dst[every], one.dst]),
            np.tile(one.length, src[every].size),
        )
        if not (expand(copies).same_as(wanted) and one.same_as(self._elements(count))):
            names = ", ".join(pair.consumer.name for pair in self.members[0])
            raise PlanError(
                f"{names}: the copies of a run of {count} tokens are not exactly its elements; "
                f"nothing was written; please report this with both region tables"
            )

    def one_member(self, count: int) -> ByteMap:
        """A run of `count` tokens of one member, relative to its bases."""
        return expand(self._copies(count, Loop(1, 0, 0)))

    def _elements(self, count: int) -> ByteMap:
        """The same from the first member's regions, element by element: what the template must equal."""
        maps = [pair_elements(pair, cut, range(count), range(count)) for pair in self.members[0] for cut in pair.cuts]
        src = np.concatenate([part.src for part in maps]) - int(self.src_bases[0])
        dst = np.concatenate([part.dst for part in maps]) - int(self.dst_bases[0])
        return canonical(src, dst, np.concatenate([part.length for part in maps]))


def pair_elements(pair: RegionPair, cut: UnitCut, src_tokens: range, dst_tokens: range) -> ByteMap:
    """Absolute addresses in page 0 of each element of one unit cut (not canonical).

    Inner axes that are dense on both sides count as one element.
    """
    source, target = pair.producer, pair.consumer
    all_axes = (
        Loop(cut.count, source.unit.stride, target.unit.stride),
        Loop(len(src_tokens), source.token.stride, target.token.stride),
        Loop(target.channel.count, source.channel.stride, target.channel.stride),
    )
    axes = [axis for axis in all_axes if axis.count > 1]
    axes.sort(key=lambda axis: -axis.dst_stride)  # outermost first: then there is nothing left to sort
    item = target.item_bytes
    while axes and axes[-1].src_stride == axes[-1].dst_stride == item:
        item *= axes.pop().count
    src_first = source.base + cut.producer_local * source.unit.stride + src_tokens.start * source.token.stride
    dst_first = target.base + cut.consumer_local * target.unit.stride + dst_tokens.start * target.token.stride
    src = outer_sum([steps(axis.count, axis.src_stride) for axis in axes], src_first)
    dst = outer_sum([steps(axis.count, axis.dst_stride) for axis in axes], dst_first)
    return ByteMap(src, dst, np.full(src.size, item, np.int64))


@dataclass(frozen=True, eq=False)
class PairPlan:
    """All that one consumer rank reads from one producer rank; bound to blocks per request."""

    consumer: RankTable
    producer: RankTable
    pairs: tuple[RegionPair, ...]
    classes: tuple[CopyClass, ...]

    @property
    def layers(self) -> tuple[str, ...]:
        """Layers read from this producer rank, in the consumer's order."""
        return tuple(dict.fromkeys(pair.consumer.layer for pair in self.pairs))

    @cached_property
    def dst_seams(self) -> Int64:
        """Addresses where two of the consumer's buffers touch."""
        return seams(self.consumer.buffers)

    @cached_property
    def src_seams(self) -> Int64:
        """Addresses where two of the producer's buffers touch."""
        return seams(self.producer.buffers)

    def bytes_per_token(self, group: int) -> int:
        """Bytes read for one token of the consumer's `group`; 0 for a state group."""
        if self.consumer.groups[group].is_state:
            return 0
        return sum(pair.token_bytes for pair in self.pairs if pair.consumer.group == group)

    def bytes_per_slot(self, group: int) -> int:
        """Bytes read for one slot of the consumer's `group`; 0 for a token group."""
        if not self.consumer.groups[group].is_state:
            return 0
        chosen = [pair for pair in self.pairs if pair.consumer.group == group]
        return sum(pair.token_bytes * pair.consumer.token.count for pair in chosen)

    def only(self, layers: Collection[str]) -> PairPlan:
        """The same plan for some of its layers."""
        chosen = [pair for pair in self.pairs if pair.consumer.layer in layers]
        return make_pair_plan(self.consumer, self.producer, chosen)

    def producer_ranges(self, ranges: Sequence[TokenRange]) -> tuple[TokenRange, ...]:
        """The consumer's ranges (one per its group) in the order of the producer's groups.

        Groups that this plan does not read get the empty range; a producer group that several
        consumer groups read gets the hull of theirs.
        """
        wanted: dict[int, TokenRange] = {}
        for consumer, producer in {(pair.consumer.group, pair.producer.group) for pair in self.pairs}:
            if (tokens := ranges[consumer]).count:
                held = wanted.get(producer, tokens)
                wanted[producer] = TokenRange(min(held.start, tokens.start), max(held.end, tokens.end))
        return tuple(wanted.get(group.index, TokenRange(0, 0)) for group in self.producer.groups)


def make_pair_plan(consumer: RankTable, producer: RankTable, pairs: Iterable[RegionPair]) -> PairPlan:
    """Sorts pairs into classes; a layer's pairs that move in step (packed K|V) become one member.

    The order in which pairs are given does not matter: both ranks of a staged pull make the plan, each from what it
    knows, and must come to the same classes in the same order.
    """
    place = {(region.layer, region.component): index for index, region in enumerate(consumer.regions)}
    pairs = tuple(sorted(pairs, key=lambda pair: place.get((pair.consumer.layer, pair.consumer.component), len(place))))
    bundles: dict[tuple[str, Numbers], list[RegionPair]] = {}
    for pair in pairs:
        bundles.setdefault((pair.consumer.layer, _side_numbers(pair)), []).append(pair)
    alike: dict[tuple[object, ...], list[tuple[RegionPair, ...]]] = {}
    for (_, sides), bundle in bundles.items():
        alike.setdefault((sides, *_part_keys(bundle)), []).append(tuple(bundle))
    templates: dict[object, Templates] = {}
    classes = tuple(_copy_class(consumer, producer, members, templates) for members in alike.values())
    return PairPlan(consumer, producer, pairs, classes)


Numbers: TypeAlias = tuple[int, ...]
"""What makes sides equal, so that pairs are sorted by plain numbers; a record is made once for a class."""


def _side_numbers(pair: RegionPair) -> Numbers:
    """As many of either side as there are fields of `Side`."""
    src, dst = pair.producer, pair.consumer
    theirs = (src.group, src.block_stride, src.token.stride, src.token.count, src.num_blocks)
    return (*theirs, dst.group, dst.block_stride, dst.token.stride, dst.token.count, dst.num_blocks)


def _part_keys(bundle: Sequence[RegionPair]) -> Iterator[tuple[object, ...]]:
    """What makes the parts of two bundles equal (`_part`)."""
    src_base, dst_base = bundle[0].producer.base, bundle[0].consumer.base
    for pair in bundle:
        src, dst = pair.producer, pair.consumer
        offsets = src.base - src_base, dst.base - dst_base
        yield (*offsets, src.unit, dst.unit, src.channel, dst.channel, dst.item_bytes, pair.whole_pages, pair.cuts)


def _side(region: Region, table: RankTable) -> Side:
    return Side(
        group=table.groups[region.group],
        block_stride=region.block_stride,
        token_stride=region.token.stride,
        page_tokens=region.token.count,
        num_blocks=region.num_blocks,
    )


def _geometry(src: Side, dst: Side, bundle: Sequence[RegionPair]) -> Geometry:
    origin = bundle[0]
    return Geometry(
        src=src,
        dst=dst,
        whole_pages=any(pair.whole_pages for pair in bundle),
        parts=tuple(_part(origin, pair, cut) for pair in bundle for cut in pair.cuts),
    )


def _part(origin: RegionPair, pair: RegionPair, cut: UnitCut) -> Part:
    source, target = pair.producer, pair.consumer
    return Part(
        src_offset=source.base - origin.producer.base + cut.producer_local * source.unit.stride,
        dst_offset=target.base - origin.consumer.base + cut.consumer_local * target.unit.stride,
        units=Loop(cut.count, source.unit.stride, target.unit.stride),
        channels=Loop(target.channel.count, source.channel.stride, target.channel.stride),
        item_bytes=target.item_bytes,
    )


def _copy_class(
    consumer: RankTable,
    producer: RankTable,
    members: Sequence[tuple[RegionPair, ...]],
    templates: dict[object, Templates],
) -> CopyClass:
    """Classes that differ only in their groups (states of several groups) share templates, checked once."""
    ordered = tuple(sorted(members, key=lambda member: member[0].consumer.base))
    first = ordered[0][0]
    geometry = _geometry(_side(first.producer, producer), _side(first.consumer, consumer), ordered[0])
    tokens = geometry.src.token_stride, geometry.dst.token_stride
    return CopyClass(
        geometry=geometry,
        members=ordered,
        src_bases=np.array([member[0].producer.base for member in ordered], np.int64),
        dst_bases=np.array([member[0].consumer.base for member in ordered], np.int64),
        templates=templates.setdefault((tokens, geometry.parts), Templates({}, {})),
    )


def seams(buffers: Iterable[Buffer]) -> Int64:
    """Addresses at which one registered buffer ends and the next begins."""
    buffers = tuple(buffers)
    starts = {buffer.address for buffer in buffers}
    return np.array(sorted(starts & {buffer.end for buffer in buffers}), np.int64)
