"""Descriptors of one request: merging, pages, refusals, batches, tails."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import msgspec
import numpy as np
import pytest

from mooncake_hetero_tp.core.binding import Descriptors, TailView, batches, bind, tail_views
from mooncake_hetero_tp.core.pairing import PairPlan
from mooncake_hetero_tp.core.regions import STATE, Buffer, Group, RankTable, Region, extent
from mooncake_hetero_tp.errors import LocalUsageError, PlanError
from mooncake_hetero_tp.types import Rank, TokenRange
from tests.tables import DST, SRC, Dense, bound, ids, planned, region, table, triples


def _plan(producer: Dense, consumer: Dense) -> PairPlan:
    return planned(replace(consumer, base=DST).table(), {Rank(): producer.table()})[Rank()]


# --- merging -------------------------------------------------------------------------------------


def test_adjacent_blocks_are_one_descriptor() -> None:
    # sglang#31208: 16 adjacent blocks, equal on both sides.
    like = Dense(heads=2, blocks=40)
    assert bound(_plan(like, like), TokenRange(0, 64), range(3, 19), range(20, 36)) == [(3 * 32, 20 * 32, 16 * 32)]


def test_order_of_the_request_does_not_matter_for_merging() -> None:
    like = Dense(heads=2, blocks=40)
    falling = bound(_plan(like, like), TokenRange(0, 64), range(18, 2, -1), range(35, 19, -1))
    assert falling == [(3 * 32, 20 * 32, 16 * 32)]


def test_a_gap_on_either_side_is_never_crossed() -> None:
    like = Dense(heads=2, blocks=40)
    plan = _plan(like, like)
    assert bound(plan, TokenRange(0, 12), [3, 4, 6], [1, 2, 3]) == [(96, 32, 64), (192, 96, 32)]
    assert bound(plan, TokenRange(0, 12), [3, 4, 5], [1, 2, 4]) == [(96, 32, 64), (160, 128, 32)]
    padded = replace(like, page_bytes=40)
    assert len(bound(_plan(padded, padded), TokenRange(0, 12), [3, 4, 5], [1, 2, 3])) == 3


def test_head_slices_that_touch_on_both_sides_are_merged() -> None:
    # TP 1 -> TP 2 under BLHNC: K|V of both heads of a page are one run, layers are apart at the producer.
    like = Dense(heads=4, layers=3, layout="BLHNC", blocks=4)
    plan = _plan(like, replace(like, tp=2, rank=1))
    assert bound(plan, TokenRange(0, 4), [2], [1]) == [
        (2 * 192 + 64 * layer + 32, 96 + 32 * layer, 32) for layer in range(3)
    ]


def test_a_block_row_of_all_layers_is_one_descriptor_at_equal_tp() -> None:
    like = Dense(heads=4, layers=3, layout="BLHNC", blocks=8)
    assert bound(_plan(like, like), TokenRange(0, 12), [5, 6, 2], [1, 3, 2]) == [
        (5 * 192, 1 * 192, 192),
        (2 * 192, 2 * 192, 192),
        (6 * 192, 3 * 192, 192),
    ]


def test_pages_of_layers_in_touching_buffers_are_not_merged() -> None:
    # One descriptor must lie in one registered buffer, even where two happen to touch.
    def side(base: int, *cuts: int) -> RankTable:
        made = Dense(heads=1, layers=2, blocks=1, base=base).table()
        borders = [base, *(base + cut for cut in cuts), base + 32]
        pieces = [Buffer(start, stop - start) for start, stop in pairwise(borders)]
        return msgspec.structs.replace(made, buffers=tuple(pieces))

    def lengths(producer: RankTable, consumer: RankTable) -> list[int]:
        plan = planned(consumer, {Rank(): producer})[Rank()]
        return [length for _, _, length in bound(plan, TokenRange(0, 4), [0], [0])]

    assert lengths(side(SRC), side(DST)) == [32]
    assert lengths(side(SRC, 16), side(DST)) == [16, 16]
    assert lengths(side(SRC), side(DST, 16)) == [16, 16]


def test_mixed_page_sizes_in_one_buffer_cover_it_exactly() -> None:
    # vllm#54756: pages of 36,864 and 8,448 bytes, 4 layer pairs, 4 blocks: 724,992 bytes, divisible by neither.
    def side(base: int) -> RankTable:
        made: list[Region] = []
        for layer in range(4):
            at = base + layer * 45_312
            made.append(region(f"l{layer}", "latent", base=at, pages=(4, 181_248), token=(64, 576), channels=576))
            made.append(
                region(f"l{layer}", "index", base=at + 36_864, pages=(4, 181_248), token=(64, 132), channels=132)
            )
        return table(made)

    plan = planned(side(DST), {Rank(): side(SRC)})[Rank()]
    everything = bound(plan, TokenRange(0, 256), range(4), range(4))
    assert everything == [(0, 0, 724_992)]
    pages = [
        bound(plan.only({f"l{layer}"}), TokenRange(0, 64), [block], [block]) for layer in range(4) for block in range(4)
    ]
    assert sorted(page for (page,) in pages) == [(at, at, 45_312) for at in range(0, 724_992, 45_312)]


# --- the field case ------------------------------------------------------------------------------

FIELD = Dense(heads=2, layers=12, tokens=1_568, head_size=256, item=2, blocks=6)
HEAD_PAGE = 1_605_632
"""1,568 tokens x K and V of 256 bf16 values; vllm#59594."""


def test_field_case_under_blhnc_is_one_descriptor_a_page_and_layer() -> None:
    like = replace(FIELD, layout="BLHNC")
    found = bound(_plan(like, replace(like, tp=2, rank=1)), TokenRange(0, 3 * 1_568), [4, 1, 2], [1, 3, 5])
    row = 12 * 2 * HEAD_PAGE
    assert len(found) == 3 * 12
    assert {length for _, _, length in found} == {HEAD_PAGE}
    assert found[:2] == [
        (4 * row + HEAD_PAGE, 12 * HEAD_PAGE, HEAD_PAGE),
        (4 * row + 3 * HEAD_PAGE, 13 * HEAD_PAGE, HEAD_PAGE),
    ]
    assert row + 1_204_224 == 39_739_392  # the opaque row that was refused; the rest is index cache


def test_field_case_under_blnhc_on_both_sides_is_exact_row_by_row() -> None:
    like = replace(FIELD, layout="BLNHC")
    found = bound(_plan(like, replace(like, tp=2, rank=1)), TokenRange(1_560, 1_570), [4, 1], [1, 3])
    assert len(found) == 12 * 10
    assert {length for _, _, length in found} == {1_024}
    assert sum(length for _, _, length in found) == 10 * 12 * 1_024


# --- pages and blocks ----------------------------------------------------------------------------


def test_tokens_map_between_unlike_block_sizes() -> None:
    # vllm#26744: 70 tokens, block 16 -> 64; one byte a token so that offsets are tokens.
    def side(base: int, tokens: int) -> RankTable:
        return table([region("l", "k", base=base, pages=(8, tokens), token=(tokens, 1))])

    plan = planned(side(DST, 64), {Rank(): side(SRC, 16)})[Rank()]
    found = bound(plan, TokenRange(0, 70), [3, 5, 7, 1, 2], [6, 4])
    assert found == [(32, 256, 6), (48, 384, 16), (80, 400, 16), (112, 416, 16), (16, 432, 16)]
    back = planned(side(DST, 16), {Rank(): side(SRC, 64)})[Rank()]
    assert bound(back, TokenRange(32, 70), [1, 2], [0, 0, 2, 4, 6]) == [(96, 32, 16), (112, 64, 16), (128, 96, 6)]


def test_a_range_inside_a_page_starts_by_each_sides_own_row() -> None:
    # Token-major rows of 16 bytes at the producer, head-major rows of 4 at the consumer.
    plan = _plan(Dense(heads=4, layout="LBNHC"), Dense(heads=4, tp=4, rank=2))
    assert bound(plan, TokenRange(2, 4), [3], [1]) == [
        (3 * 64 + 2 * 16 + 8, 16 + 8, 4),
        (3 * 64 + 3 * 16 + 8, 16 + 12, 4),
    ]


def test_kernel_pages_of_a_logical_block() -> None:
    # vllm#54272, vllm#28677: logical 12, kernel 4: block 2 is kernel pages 6, 7, 8.
    split = Dense(heads=2, tokens=12, kernel_tokens=4, blocks=4)
    whole = Dense(heads=2, tokens=4, blocks=12)
    found = bound(_plan(split, whole), TokenRange(0, 12), [2], [1, 3, 5])
    assert found == [(6 * 32, 1 * 32, 32), (7 * 32, 3 * 32, 32), (8 * 32, 5 * 32, 32)]


def test_prefix_hits_take_the_suffix_by_token() -> None:
    # vllm-ascend#12781: the producer keeps three blocks, two are here already.
    like = Dense(heads=2, blocks=40)
    assert bound(_plan(like, like), TokenRange(8, 12), [10, 11, 12], [0, 0, 31]) == [(12 * 32, 31 * 32, 32)]


def _state(base: int, block_size: int) -> RankTable:
    return table(
        [region("s", "ssm", base=base, pages=(8, 32), token=(2, 16), channels=16)],
        groups=[Group(0, STATE, block_size, block_size)],
    )


def test_the_final_state_slot_is_taken() -> None:
    # vllm-ascend#12781: null ids before it are ignored, on either side.
    plan = planned(_state(DST, 8), {Rank(): _state(SRC, 4)})[Rank()]
    found = bind(plan, [TokenRange(3, 11)], [ids([0, 0, 4])], [ids([0, 7])])
    assert triples(found, SRC, DST) == [(4 * 32, 7 * 32, 32)]
    full = bind(plan, [TokenRange(0, 8)], [ids([0, 3, 4])], [ids([5])])  # the last block is just full
    assert triples(full, SRC, DST) == [(3 * 32, 5 * 32, 32)]
    assert bind(plan, [TokenRange(5, 5)], [ids([])], [ids([])]).count == 0


def test_a_missing_state_slot_is_named() -> None:
    plan = planned(_state(DST, 4), {Rank(): _state(SRC, 4)})[Rank()]
    with pytest.raises(PlanError, match="producer group 0: 2 blocks given, the range needs 3 of 4 tokens"):
        bind(plan, [TokenRange(0, 9)], [ids([1, 2])], [ids([1, 2, 3])])


def test_an_empty_range_needs_no_blocks() -> None:
    like = Dense(heads=2)
    found = bind(_plan(like, like), [TokenRange(4, 4)], [ids([])], [ids([])])
    assert (found.count, found.bytes) == (0, 0)
    assert found.src.dtype == np.int64


def test_groups_the_plan_does_not_read_are_ignored() -> None:
    like = Dense(heads=2)
    found = bind(_plan(like, like), [TokenRange(0, 4), TokenRange(0, 99)], [ids([1]), ids([])], [ids([2]), ids([])])
    assert found.count == 1


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32])
def test_block_ids_may_be_of_any_integer_type(dtype: type[np.integer]) -> None:
    like = Dense(heads=2)
    found = bind(_plan(like, like), [TokenRange(0, 4)], [np.array([1], dtype)], [np.array([2], dtype)])
    assert triples(found, SRC, DST) == [(32, 64, 32)]


@pytest.mark.parametrize(
    "producer, consumer, message",
    [
        ([1], [1, 2], "producer group 0: 1 blocks given, the range needs 2 of 4 tokens"),
        ([1, 2], [1], "consumer group 0: 1 blocks given, the range needs 2 of 4 tokens"),
        ([1, 8], [1, 2], "producer group 0: block id 8 is outside the cache of 8 blocks"),
        ([1, -1], [1, 2], "producer group 0: block id -1 is outside"),
        ([1, 2], [1, 8], "consumer group 0: block id 8 is outside"),
        ([1, 0], [1, 2], r"producer group 0: the range covers a null page \(block id 0\)"),
        ([1, 2], [0, 2], "consumer group 0: the range covers a null page"),
        ([1, 2], [5, 5], "consumer group 0: a block is given for two pages"),
    ],
)
def test_bad_blocks_are_refused_before_any_write(producer: list[int], consumer: list[int], message: str) -> None:
    like = Dense(heads=2)
    with pytest.raises(PlanError, match=message):
        bind(_plan(like, like), [TokenRange(0, 8)], [ids(producer)], [ids(consumer)])


def test_pages_before_the_range_are_not_looked_at() -> None:
    like = Dense(heads=2)
    found = bind(_plan(like, like), [TokenRange(4, 8)], [ids([0, 2])], [ids([0, 3])])
    assert triples(found, SRC, DST) == [(64, 96, 32)]


def test_one_producer_block_may_serve_two_pages() -> None:
    like = Dense(heads=2)
    assert bind(_plan(like, like), [TokenRange(0, 8)], [ids([2, 2])], [ids([3, 4])]).count == 2


def test_two_groups_must_not_write_the_same_bytes() -> None:
    # Overlaid groups share memory; one block id in both would be written twice.
    def side(base: int) -> RankTable:
        made = [
            region(name, "k", base=base, pages=(4, 16), token=(4, 4), channels=4, group=group)
            for group, name in enumerate(("full", "window"))
        ]
        return table(made, groups=[Group(i, "attention", 4, 4) for i in range(2)])

    plan = planned(side(DST), {Rank(): side(SRC)})[Rank()]
    ranges = [TokenRange(0, 4)] * 2
    assert bind(plan, ranges, [ids([1]), ids([2])], [ids([1]), ids([2])]).bytes == 32
    with pytest.raises(PlanError, match="would be written twice"):
        bind(plan, ranges, [ids([1]), ids([2])], [ids([3]), ids([3])])


@pytest.mark.parametrize("ranges, producer, consumer", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_missing_lists_are_our_own_fault(ranges: int, producer: int, consumer: int) -> None:
    like = Dense(heads=2)
    with pytest.raises(LocalUsageError, match="group 0 has none"):
        bind(_plan(like, like), [TokenRange(0, 4)] * ranges, [ids([1])] * producer, [ids([1])] * consumer)


def test_opaque_pages_cannot_be_entered_in_the_middle() -> None:
    def side(base: int) -> RankTable:
        return table([region("l", "kv", base=base, pages=(4, 16), token=(4, 4), channels=4, encoding="opaque:X")])

    plan = planned(side(DST), {Rank(): side(SRC)})[Rank()]
    with pytest.raises(PlanError, match="tokens from 2 start inside a kernel page of 4 tokens"):
        bind(plan, [TokenRange(2, 8)], [ids([1, 2])], [ids([1, 2])])
    assert bind(plan, [TokenRange(2, 2)], [ids([])], [ids([])]).count == 0


# --- batches -------------------------------------------------------------------------------------


def _descriptors(*lengths: int) -> Descriptors:
    starts = np.cumsum([0, *lengths[:-1]])
    return Descriptors(starts + 1_000, starts * 2, ids(lengths))


def test_batches_are_bounded_by_count_and_bytes() -> None:
    found = list(batches(_descriptors(4, 4, 4, 9, 1, 1), max_count=2, max_bytes=10))
    assert [part.length.tolist() for part in found] == [[4, 4], [4], [9, 1], [1]]


def test_long_descriptors_are_split() -> None:
    found = list(batches(_descriptors(3, 25, 5), max_count=100, max_bytes=10))
    assert [triples(part) for part in found] == [
        [(1000, 0, 3)],
        [(1003, 6, 10)],
        [(1013, 16, 10)],
        [(1023, 26, 5), (1028, 56, 5)],
    ]


def test_no_descriptors_no_batches() -> None:
    empty = np.empty(0, np.int64)
    assert not list(batches(Descriptors(empty, empty, empty), 10, 10))


@pytest.mark.parametrize("count, size", [(0, 1), (1, 0)])
def test_batch_limits_below_one_are_our_own_fault(count: int, size: int) -> None:
    with pytest.raises(LocalUsageError, match="batch limits"):
        list(batches(_descriptors(1), count, size))


def test_a_request_beyond_one_queue_goes_in_five_calls() -> None:
    # Mooncake#4209: Qwen3-8B (36 layers, 8 KV heads), 2,048 tokens, block 16: 4,608 descriptors, queue of 1,024.
    like = Dense(heads=8, layers=36, tokens=16, head_size=128, item=2, blocks=300)
    rng = np.random.default_rng(1)
    blocks = [1 + rng.permutation(290)[:128] for _ in range(2)]
    tokens = TokenRange(0, 2_048)
    found = bind(_plan(like, replace(like, tp=2)), [tokens], [blocks[0]], [blocks[1]])
    assert found.count == 4_608
    assert len(list(batches(found, 1_024, 1 << 30))) == 5
    rows = replace(like, layout="LBNHC")
    assert bind(_plan(rows, replace(rows, tp=2)), [tokens], [blocks[0]], [blocks[1]]).count == 73_728


# --- tails ---------------------------------------------------------------------------------------


def test_tails_are_what_the_range_leaves_of_its_last_block() -> None:
    # vllm#51527, vllm#54875: 70 tokens, block 64: tokens 6..63 of the second page.
    made = Dense(heads=2, tokens=64, blocks=9).table()
    views = tail_views(made, [TokenRange(0, 70)], [ids([3, 8])])
    assert [(view.region.component, view.page, view.first_token) for view in views] == [("k", 8, 6), ("v", 8, 6)]


def test_tails_reach_to_the_end_of_the_logical_block() -> None:
    made = Dense(heads=2, tokens=12, kernel_tokens=4, blocks=9).table()
    views = tail_views(made, [TokenRange(0, 17)], [ids([3, 5])])
    key = made.regions[0]
    assert views[:2] == [TailView(key, 5 * 3 + 1, 1), TailView(key, 5 * 3 + 2, 0)]


@pytest.mark.parametrize("end", [0, 12, 24])
def test_full_blocks_and_empty_ranges_have_no_tail(end: int) -> None:
    made = Dense(heads=2, tokens=12).table()
    assert tail_views(made, [TokenRange(0, end)], [ids([1, 2])]) == []


def test_state_slots_and_opaque_pages_have_no_tail() -> None:
    assert tail_views(_state(DST, 4), [TokenRange(0, 3)], [ids([1])]) == []
    opaque = region("l", "kv", base=DST, pages=(4, 16), token=(4, 4), channels=4, encoding="opaque:X")
    assert tail_views(table([opaque]), [TokenRange(0, 3)], [ids([1])]) == []


def test_a_tail_outside_the_cache_is_refused() -> None:
    with pytest.raises(PlanError, match="block id 99 is outside"):
        tail_views(Dense(heads=2).table(), [TokenRange(0, 3)], [ids([99])])


def test_extents_of_the_test_tables_fill_their_buffers() -> None:
    made = Dense(heads=2, layers=2).table()
    assert max(item.base + extent(item) for item in made.regions) == made.buffers[0].end


def test_lengths_are_those_of_kernel_pages() -> None:
    # vllm#54272: 768 tokens are 12 kernel pages of 64; 884,736 bytes a descriptor in place of 73,728 overlapped 12 times.
    like = Dense(heads=1, tokens=768, kernel_tokens=64, head_size=576, blocks=4)
    other = replace(like, tokens=64, kernel_tokens=64, blocks=48)
    found = bound(_plan(like, other), TokenRange(0, 768), [2], list(range(1, 25, 2)))
    assert [length for _, _, length in found] == [73_728] * 12
    assert [src for src, _, _ in found] == [(24 + page) * 73_728 for page in range(12)]
    assert sum(length for _, _, length in found) == 884_736
