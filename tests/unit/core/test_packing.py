"""Tables of both sides: what each joins, what it lists, where it must not join; block ids."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import msgspec
import numpy as np
import pytest

from mooncake_hetero_tp.core.chunks import Chunks, cut_chunks
from mooncake_hetero_tp.core.copy_table import CopyTable
from mooncake_hetero_tp.core.packing import gathers, pack, scatters, unpack
from mooncake_hetero_tp.core.pairing import PairPlan
from mooncake_hetero_tp.core.regions import Buffer, RankTable
from mooncake_hetero_tp.errors import LocalUsageError, PlanError
from mooncake_hetero_tp.types import Rank, TokenRange
from tests.staged import Segments
from tests.tables import DST, SRC, Dense, ids, planned

Table = list[tuple[int, int, list[tuple[int, int] | list[int]]]]


def _plan(producer: Dense, consumer: Dense) -> PairPlan:
    return planned(replace(consumer, base=DST).table(), {Rank(): producer.table()})[Rank()]


def _cut(producer: Dense, consumer: Dense, tokens: TokenRange, slot_bytes: int = 1 << 20) -> Chunks:
    return cut_chunks(_plan(producer, consumer), [tokens], slot_bytes)


def _rows(made: CopyTable, address: int) -> Table:
    """(base, run bytes, axes) of each row; an axis is (count, stride) or its list."""
    rows: Table = []
    for row in made.copies:
        axes: list[tuple[int, int] | list[int]] = []
        for stride, count, first in row["axes"][: row["axis_count"]].tolist():
            axes.append(made.offsets[first : first + count].tolist() if first >= 0 else (count, stride))
        rows.append((int(row["base"]) - address, int(row["run_bytes"]), axes))
    return rows


def test_each_side_joins_what_is_contiguous_in_its_own_memory() -> None:
    # Tokens first at the producer: rows of 2 heads x 4 bytes; heads first at the consumer: whole pages of 16 bytes.
    producer, consumer = Dense(heads=2, layout="LBNHC"), Dense(heads=2, tp=2, rank=1)
    chunks = _cut(producer, consumer, TokenRange(0, 8))
    assert _rows(pack(chunks, 0, [ids([5, 2])]), SRC) == [(4, 4, [[5 * 32, 2 * 32], (4, 8)])]
    assert _rows(unpack(chunks, 0, [ids([1, 4])]), DST) == [(16, 32 // 2, [(2, 3 * 16)])]


def test_evenly_rising_pages_are_a_stride_and_touching_ones_a_run() -> None:
    like = Dense(heads=2)
    chunks = _cut(like, like, TokenRange(0, 12))
    assert _rows(pack(chunks, 0, [ids([1, 3, 5])]), SRC) == [(32, 32, [(3, 64)])]
    assert _rows(pack(chunks, 0, [ids([4, 5, 6])]), SRC) == [(4 * 32, 3 * 32, [])]
    assert _rows(pack(chunks, 0, [ids([6, 5, 4])]), SRC) == [(0, 32, [[6 * 32, 5 * 32, 4 * 32]])]


def test_all_layers_of_a_block_row_are_one_run() -> None:
    like = Dense(heads=2, layers=3, layout="BLHNC")
    chunks = _cut(replace(like, layout="LBHNC"), like, TokenRange(0, 8))
    assert _rows(unpack(chunks, 0, [ids([6, 1])]), DST) == [(0, 3 * 32, [[6 * 96, 1 * 96]])]
    assert _rows(pack(chunks, 0, [ids([6, 1])]), SRC) == [(0, 32, [[6 * 32, 1 * 32], (3, 8 * 32)])]


def test_layers_at_uneven_distances_are_listed() -> None:
    def side(base: int, *places: int) -> RankTable:
        made = Dense(heads=1, layers=1, base=base).table()
        regions = [
            msgspec.structs.replace(region, layer=f"l{at}", base=region.base + at)
            for at in places
            for region in made.regions
        ]
        return msgspec.structs.replace(made, regions=tuple(regions), buffers=(Buffer(base, 1 << 20),))

    producer, consumer = side(SRC, 0, 1000, 5000), side(DST, 0, 1000, 5000)
    plan = planned(consumer, {Rank(): producer})[Rank()]
    chunks = cut_chunks(plan, [TokenRange(0, 8)], 1 << 20)
    made = pack(chunks, 0, [ids([3, 1])])
    assert made.copies["axes"]["list"][0, :2].tolist() == [0, 3]  # layers, pages
    assert (Segments.of(made).address - SRC).tolist() == [48, 16, 1048, 1016, 5048, 5016]


def test_a_split_run_starts_at_its_token_on_both_sides() -> None:
    producer, consumer = Dense(heads=2, layout="LBNHC"), Dense(heads=2, tp=2)
    chunks = _cut(producer, consumer, TokenRange(0, 4), slot_bytes=12)
    assert [(piece.first_token, piece.tokens) for chunk in chunks.chunks for piece in chunk.pieces] == [(0, 3), (3, 1)]
    assert _rows(pack(chunks, 1, [ids([5])]), SRC) == [(5 * 32 + 3 * 8, 4, [])]
    assert _rows(unpack(chunks, 1, [ids([2])]), DST) == [(2 * 16 + 3 * 4, 4, [])]


def test_packed_offsets_follow_the_pieces() -> None:
    like = Dense(heads=2)
    chunks = _cut(like, like, TokenRange(2, 8))
    made = pack(chunks, 0, [ids([1, 2])])
    assert made.copies["packed_offset"].tolist() == [0, 64]  # 4 tokens, 32 bytes; 2 tokens, 16 bytes
    assert (made.bytes, made.packed_bytes) == (6 * 8, 64 + 16)


# --- touching buffers ----------------------------------------------------------------------------


def _pieces_of(base: int, *cuts: int) -> RankTable:
    """One page of two layers, 16 bytes each, in buffers that end at `cuts`."""
    made = Dense(heads=1, layers=2, blocks=1, base=base).table()
    borders = [base, *(base + cut for cut in cuts), base + 32]
    return msgspec.structs.replace(made, buffers=tuple(Buffer(a, b - a) for a, b in pairwise(borders)))


@pytest.mark.parametrize("src, dst", [((), ()), ((16,), ()), ((), (16,)), ((16,), (16,))])
def test_segments_end_where_a_buffer_ends(src: tuple[int, ...], dst: tuple[int, ...]) -> None:
    plan = planned(_pieces_of(DST, *dst), {Rank(): _pieces_of(SRC, *src)})[Rank()]
    chunks = cut_chunks(plan, [TokenRange(0, 4)], 1 << 20)
    gather, scatter = pack(chunks, 0, [ids([0])], null_block=None), unpack(chunks, 0, [ids([0])], null_block=None)
    assert Segments.of(gather).length.tolist() == ([16, 16] if src else [32])
    assert Segments.of(scatter).length.tolist() == ([16, 16] if dst else [32])
    assert Segments.of(gather).packed.tolist() == ([0, 16] if src else [0])
    assert (gather.packed_bytes, gather.bytes) == (32, 32)


# --- block ids -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "blocks, message",
    [
        ([1], "group 0: 1 blocks given, the range needs 2 of 4 tokens"),
        ([1, 8], "group 0: block id 8 is outside the cache of 8 blocks"),
        ([1, -1], "group 0: block id -1 is outside"),
        ([1, 0], r"group 0: the range covers a null page \(block id 0\)"),
    ],
)
def test_bad_blocks_are_refused_on_both_sides(blocks: list[int], message: str) -> None:
    like = Dense(heads=2)
    chunks = _cut(like, like, TokenRange(0, 8), slot_bytes=32)
    assert chunks.count == 2  # and so by the table of the chunk that does not touch the bad block, too
    with pytest.raises(PlanError, match=f"producer {message}"):
        pack(chunks, 0, [ids(blocks)])
    with pytest.raises(PlanError, match=f"consumer {message}"):
        unpack(chunks, 0, [ids(blocks)])


def test_only_the_producer_may_give_a_block_for_two_pages() -> None:
    like = Dense(heads=2)
    chunks = _cut(like, like, TokenRange(0, 8), slot_bytes=32)
    assert gathers(chunks, [ids([5, 5])]).table(0).bytes == 32
    with pytest.raises(PlanError, match="consumer group 0: a block is given for two pages"):
        scatters(chunks, [ids([5, 5])])


def test_block_zero_is_a_block_like_any_other_if_none_is_special() -> None:
    like = Dense(heads=2)
    chunks = _cut(like, like, TokenRange(0, 4))
    assert _rows(pack(chunks, 0, [ids([0])], null_block=None), SRC) == [(0, 32, [])]
    assert _rows(unpack(chunks, 0, [ids([0])], null_block=None), DST) == [(0, 32, [])]


def test_missing_lists_are_our_own_fault() -> None:
    like = Dense(heads=2)
    chunks = _cut(like, like, TokenRange(0, 4))
    for make in (gathers, scatters):
        with pytest.raises(LocalUsageError, match="group 0 has none"):
            make(chunks, [])


def test_an_empty_pull_needs_no_blocks() -> None:
    like = Dense(heads=2)
    chunks = _cut(like, like, TokenRange(4, 4))
    assert (
        chunks.count,
        gathers(chunks, [ids([])]).chunks.count,
        scatters(chunks, [ids([])]).pages.popitem()[1].size,
    ) == (0, 0, 0)


def test_tables_stay_small() -> None:
    # A chunk of 8 MiB of 36 layers: a handful of rows and offsets, whatever the number of segments.
    like = Dense(heads=8, layers=36, tokens=16, head_size=128, item=2, blocks=600, layout="LBNHC")
    chunks = _cut(like, replace(like, tp=2, layout="BLHNC"), TokenRange(0, 8_192), 8 << 20)
    blocks = [1 + np.random.default_rng(1).permutation(590)[:512]]
    gather, scatter = gathers(chunks, blocks).table(1), scatters(chunks, blocks).table(1)
    assert gather.segments == (8 << 20) // 512  # K|V of one head and token
    assert scatter.segments <= 10  # block rows of the whole cache
    assert gather.copies.size <= 3
    assert gather.offsets.size <= 16
