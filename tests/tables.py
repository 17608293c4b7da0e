"""Small region tables at made-up addresses, for tests that look at plans and descriptors and move no bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mooncake_hetero_tp.core.binding import Descriptors, bind
from mooncake_hetero_tp.core.layout import KVLayout
from mooncake_hetero_tp.core.plan import PairPlan, plan_pulls, prove
from mooncake_hetero_tp.core.regions import (
    Axis,
    Buffer,
    Group,
    RankTable,
    Region,
    Span,
    attention_spans,
    extent,
    whole_span,
)
from mooncake_hetero_tp.core.tables import validate_table
from mooncake_hetero_tp.types import Rank, TokenRange

SRC, DST = 1 << 40, 1 << 41
"""Base addresses of the producer's and the consumer's memory in these tests."""


@dataclass(frozen=True)
class Dense:
    """Dense attention layers of one shape: `[L, B, H_local, N, 2 * head_size]` in the layout's order."""

    heads: int
    tp: int = 1
    rank: int = 0
    layers: int = 1
    first_layer: int = 0
    layout: str = "LBHNC"
    tokens: int = 4
    kernel_tokens: int | None = None
    blocks: int = 8
    head_size: int = 2
    item: int = 1
    page_bytes: int | None = None
    base: int = SRC

    def regions(self) -> list[Region]:
        spans = attention_spans(self.heads, self.tp, self.rank)
        kernel = self.kernel_tokens or self.tokens
        pages = self.blocks * (self.tokens // kernel)
        counts = {"L": self.layers, "B": pages, "H": spans[0].count, "N": kernel, "C": 2 * self.head_size}
        step = KVLayout.from_name(self.layout).strides(counts, self.item, self.page_bytes)
        half = self.head_size * self.item
        return [
            region(
                f"layers.{self.first_layer + i}",
                name,
                base=self.base + i * step["L"] + place * half,
                pages=(pages, step["B"]),
                spans=spans,
                unit=step["H"],
                token=(kernel, step["N"]),
                channels=self.head_size,
                item=self.item,
            )
            for i in range(self.layers)
            for place, name in enumerate("kv")
        ]

    def table(self) -> RankTable:
        return table(
            self.regions(), self.tp, groups=[Group(0, "attention", self.tokens, self.kernel_tokens or self.tokens)]
        )


def region(
    layer: str,
    component: str,
    *,
    base: int,
    pages: tuple[int, int],
    token: tuple[int, int],
    spans: tuple[Span, ...] | None = None,
    unit: int = 0,
    channels: int = 1,
    channel: int | None = None,
    item: int = 1,
    group: int = 0,
    encoding: str = "packed",
) -> Region:
    """A region; pages and tokens are (count, stride), channels are contiguous unless `channel` says otherwise."""
    held = whole_span(1) if spans is None else spans
    return Region(
        layer=layer,
        component=component,
        group=group,
        base=base,
        block_stride=pages[1],
        num_blocks=pages[0],
        spans=held,
        unit=Axis(sum(span.count for span in held), unit),
        token=Axis(*token),
        channel=Axis(channels, channel or item),
        item_bytes=item,
        dtype=f"uint{8 * item}",
        encoding=encoding,
    )


def table(regions: Iterable[Region], tp: int = 1, *, pp: int = 1, groups: Sequence[Group] = ()) -> RankTable:
    """A valid table of these regions in one buffer that just holds them."""
    listed = tuple(regions)
    first = min(item.base for item in listed)
    buffer = Buffer(first, max(item.base + extent(item) for item in listed) - first)
    known = tuple(groups) or (Group(0, "attention", listed[0].token.count, listed[0].token.count),)
    made = RankTable(tp, pp, "LBHNC", {}, known, listed, (buffer,))
    validate_table(made)
    return made


def producer_tables(like: Dense) -> dict[Rank, RankTable]:
    """The tables of all tensor ranks of an engine, each at its own address."""
    ranks = range(like.tp)
    return {Rank(tp=tp): Dense(**{**vars(like), "rank": tp, "base": SRC + (tp << 34)}).table() for tp in ranks}


def planned(consumer: RankTable, producers: Mapping[Rank, RankTable], prefer: int = 0) -> dict[Rank, PairPlan]:
    """Planned and proven."""
    plans = plan_pulls(consumer, producers, prefer=prefer)
    prove(consumer, plans)
    return plans


def bound(
    plan: PairPlan, tokens: TokenRange, producer: Sequence[int], consumer: Sequence[int]
) -> list[tuple[int, int, int]]:
    """Descriptors of a plan of one group as (src - SRC of that rank, dst - DST, length)."""
    found = bind(plan, [tokens], [ids(producer)], [ids(consumer)], null_block=None)
    return triples(found, plan.producer.buffers[0].address, plan.consumer.buffers[0].address)


def triples(found: Descriptors, src: int = 0, dst: int = 0) -> list[tuple[int, int, int]]:
    """Descriptors as (src, dst, length), less the given addresses."""
    columns = ((found.src - src).tolist(), (found.dst - dst).tolist(), found.length.tolist())
    return list(zip(*columns, strict=True))


def ids(blocks: Iterable[int]) -> npt.NDArray[np.int64]:
    return np.array(list(blocks), np.int64)
