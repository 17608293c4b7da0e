"""Algebra of planning: partitions, exact cover, inverse, and merging that never crosses a gap."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_hetero_tp.core.binding import Descriptors, batches, bind
from mooncake_hetero_tp.core.copies import (
    ByteMap,
    Int64,
    Loop,
    StridedCopy,
    concatenate,
    expand,
    join_sorted,
    split_at,
    strided_copy,
)
from mooncake_hetero_tp.core.plan import plan_pulls
from mooncake_hetero_tp.core.regions import RankTable, attention_spans
from mooncake_hetero_tp.core.runs import cut_runs
from mooncake_hetero_tp.types import Rank, TokenRange
from tests.oracle import HEADS, TP_SIZES, allowed, inside_one_buffer
from tests.pull_strategies import DrawnPull, pulls
from tests.tables import DST, Dense, ids, planned, producer_tables

# --- runs ----------------------------------------------------------------------------------------


@st.composite
def ranges(draw: st.DrawFn, most: int = 300) -> TokenRange:
    start = draw(st.integers(0, most))
    return TokenRange(start, draw(st.integers(start, most)))


@given(ranges(), st.integers(1, 40), st.integers(1, 40))
def test_runs_partition_the_range_inside_pages(tokens: TokenRange, producer: int, consumer: int) -> None:
    runs = cut_runs(tokens, producer, consumer)
    starts = runs.producer_page * producer + runs.producer_offset
    assert np.array_equal(starts, runs.consumer_page * consumer + runs.consumer_offset)
    expanded = [token for start, count in zip(starts, runs.count, strict=True) for token in range(start, start + count)]
    assert expanded == list(range(tokens.start, tokens.end))
    assert (runs.count > 0).all()
    assert (runs.producer_offset + runs.count <= producer).all()
    assert (runs.consumer_offset + runs.count <= consumer).all()
    # Maximal: every inner border is a page border of one side.
    assert ((starts[1:] % producer == 0) | (starts[1:] % consumer == 0)).all()


# --- copies --------------------------------------------------------------------------------------


@st.composite
def nested_loops(draw: st.DrawFn) -> tuple[list[Loop], int]:
    """Up to four loops that do not overlap at the destination, and a run length."""
    run = draw(st.integers(1, 4))
    loops, extent = [], run
    for _ in range(draw(st.integers(0, 4))):
        count = draw(st.integers(1, 3))
        stride = extent + draw(st.integers(0, 1))
        loops.append(Loop(count, draw(st.sampled_from([stride, stride, extent, 5])), stride))
        extent = stride * (count - 1) + extent
    return draw(st.permutations(loops)), run


def _bytes(copies: list[StridedCopy]) -> dict[int, int]:
    """Destination byte -> source byte, by nested loops."""
    found: dict[int, int] = {}
    for copy in copies:
        for steps in itertools.product(*(range(loop.count) for loop in copy.loops)):
            src = copy.src_offset + sum(s * loop.src_stride for s, loop in zip(steps, copy.loops, strict=True))
            dst = copy.dst_offset + sum(s * loop.dst_stride for s, loop in zip(steps, copy.loops, strict=True))
            for byte in range(copy.run_bytes):
                assert dst + byte not in found
                found[dst + byte] = src + byte
    return found


def _map_bytes(runs: ByteMap | Descriptors) -> dict[int, int]:
    return _bytes([StridedCopy(s, d, (), n) for s, d, n in zip(runs.src, runs.dst, runs.length, strict=True)])


@given(nested_loops())
def test_normalising_keeps_every_byte(drawn: tuple[list[Loop], int]) -> None:
    loops, run = drawn
    plain, normal = StridedCopy(7, 9, tuple(loops), run), strided_copy(7, 9, loops, run)
    assert _bytes([normal]) == _bytes([plain])
    assert normal.runs <= plain.runs
    assert _map_bytes(expand([normal])) == _bytes([plain])


@given(nested_loops(), st.integers(2, 4), st.integers(0, 1))
def test_concatenating_keeps_every_byte(drawn: tuple[list[Loop], int], parts: int, gap: int) -> None:
    loops, run = drawn
    wide = [Loop(loop.count, loop.src_stride, loop.dst_stride * (parts * 2)) for loop in loops]
    copies = [strided_copy(i * (run + gap), i * run, wide, run) for i in range(parts)]
    joined = concatenate(copies[::-1])
    assert _bytes(list(joined)) == _bytes(copies)
    assert len(joined) <= len(copies)


@st.composite
def sorted_runs(draw: st.DrawFn) -> ByteMap:
    """Runs sorted by destination, often touching on one side or both."""
    src, dst, length = [draw(st.integers(0, 50))], [draw(st.integers(0, 50))], [draw(st.integers(1, 5))]
    for _ in range(draw(st.integers(0, 12))):
        src.append(src[-1] + length[-1] + draw(st.sampled_from([0, 0, 0, 1, -7, 30])))
        dst.append(dst[-1] + length[-1] + draw(st.sampled_from([0, 0, 0, 1, 30])))
        length.append(draw(st.integers(1, 5)))
    return ByteMap(ids(src), ids(dst), ids(length))


@given(sorted_runs())
def test_merging_keeps_every_byte_and_is_maximal(runs: ByteMap) -> None:
    joined = join_sorted(runs)
    assert _map_bytes(joined) == _map_bytes(runs)  # nothing between two runs was added: no gap was crossed
    dst_touch = joined.dst[1:] == joined.dst[:-1] + joined.length[:-1]
    src_touch = joined.src[1:] == joined.src[:-1] + joined.length[:-1]
    assert not (dst_touch & src_touch).any()


@given(sorted_runs(), st.lists(st.integers(0, 150), unique=True).map(sorted))
def test_splitting_keeps_every_byte_and_leaves_no_cut_inside(runs: ByteMap, cuts: list[int]) -> None:
    owner, offset, length = split_at(runs.dst, runs.length, ids(cuts))
    pieces = ByteMap(runs.src[owner] + offset, runs.dst[owner] + offset, length)
    assert _map_bytes(pieces) == _map_bytes(runs)
    assert not any(dst < cut < dst + n for dst, n in zip(pieces.dst, pieces.length, strict=True) for cut in cuts)


@given(sorted_runs(), st.integers(1, 5), st.integers(1, 9))
def test_batches_keep_every_byte_within_their_limits(runs: ByteMap, count: int, size: int) -> None:
    parts = list(batches(Descriptors(runs.src, runs.dst, runs.length), count, size))
    assert all(0 < part.count <= count and part.bytes <= size for part in parts)
    found: dict[int, int] = {}
    for part in parts:
        found |= _map_bytes(part)
    assert found == _map_bytes(runs)
    assert sum(part.bytes for part in parts) == int(runs.length.sum())


# --- plans ---------------------------------------------------------------------------------------


@given(st.sampled_from(HEADS), st.sampled_from(TP_SIZES), st.sampled_from(TP_SIZES), st.integers(0, 9))
def test_every_unit_is_read_from_exactly_one_rank(heads: int, producer: int, consumer: int, prefer: int) -> None:
    if not (allowed(heads, producer) and allowed(heads, consumer)):
        return
    producers = producer_tables(Dense(heads=heads, tp=producer))
    for rank in range(consumer):
        table = Dense(heads=heads, tp=consumer, rank=rank, base=DST).table()
        plans = plan_pulls(table, producers, prefer=prefer)
        (span,) = attention_spans(heads, consumer, rank)
        for component in "kv":
            units = [
                unit
                for plan in plans.values()
                for pair in plan.pairs
                if pair.consumer.component == component
                for cut in pair.cuts
                for unit in range(cut.global_start, cut.global_start + cut.count)
            ]
            assert sorted(units) == list(range(span.global_start, span.global_start + span.count))
        held = max(heads // producer, 1)
        assert len(plans) <= -(-span.count // held) + 1  # no more ranks than the span can touch


def _wanted(table: RankTable, tokens: TokenRange, block_tokens: int, blocks: Int64) -> set[int]:
    """Every destination byte of the range, element by element."""
    found = set()
    for region in table.regions:
        ratio = block_tokens // region.token.count
        for token in range(tokens.start, tokens.end):
            block, inside = int(blocks[token // block_tokens]), token % block_tokens
            page = region.base + (block * ratio + inside // region.token.count) * region.block_stride
            row = page + inside % region.token.count * region.token.stride
            for unit, channel in itertools.product(range(region.unit.count), range(region.channel.count)):
                first = row + unit * region.unit.stride + channel * region.channel.stride
                found |= set(range(first, first + region.item_bytes))
    return found


@settings(max_examples=60)
@given(pulls(), st.integers(0, 3))
def test_a_pull_covers_its_bytes_exactly_once_from_registered_memory(pull: DrawnPull, prefer: int) -> None:
    producer, consumer, tokens, producer_blocks, consumer_blocks = pull
    producers = producer_tables(producer)
    for rank in range(consumer.tp):
        table = replace(consumer, rank=rank).table()
        written: list[int] = []
        for plan in planned(table, producers, prefer).values():
            found = bind(plan, [tokens], [producer_blocks], [consumer_blocks], null_block=None)
            assert inside_one_buffer(found.src, found.length, plan.producer.buffers)
            written += _map_bytes(found)
        assert len(written) == len(set(written))
        assert set(written) == _wanted(table, tokens, consumer.tokens, consumer_blocks)


@settings(max_examples=60)
@given(pulls())
def test_there_and_back_are_inverse(pull: DrawnPull) -> None:
    producer, consumer, tokens, producer_blocks, consumer_blocks = pull
    here, there = (replace(side, tp=1, page_bytes=None).table() for side in (producer, consumer))
    forth = planned(there, {Rank(): here})[Rank()]
    back = planned(here, {Rank(): there})[Rank()]
    sent = bind(forth, [tokens], [producer_blocks], [consumer_blocks], null_block=None)
    returned = bind(back, [tokens], [consumer_blocks], [producer_blocks], null_block=None)
    order = np.argsort(sent.src)
    assert np.array_equal(returned.dst, sent.src[order])
    assert np.array_equal(returned.src, sent.dst[order])
    assert np.array_equal(returned.length, sent.length[order])
