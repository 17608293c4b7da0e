"""How a pull is cut: what shares a chunk, what is split, and over which axis."""

from __future__ import annotations

import time
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from mooncake_hetero_tp.core.chunks import Chunks, cut_chunks, smallest_slot
from mooncake_hetero_tp.core.pairing import PairPlan, make_pair_plan
from mooncake_hetero_tp.core.regions import STATE, Group
from mooncake_hetero_tp.errors import LocalUsageError
from mooncake_hetero_tp.types import Rank, TokenRange
from tests.tables import DST, SRC, Dense, planned, region, table

LIKE = Dense(heads=4, layers=3, tokens=16, head_size=2, blocks=40)
"""A token of one layer takes 8 bytes at TP2, a page 128, a page of all layers 384."""


def _plan(producer: Dense, consumer: Dense | None = None) -> PairPlan:
    target = replace(producer, tp=2) if consumer is None else consumer
    return planned(replace(target, base=DST).table(), {Rank(): producer.table()})[Rank()]


def _pieces(chunks: Chunks) -> list[list[tuple[int, ...]]]:
    """Per chunk, (strip, first run, runs, first member, members, first token, tokens) of each piece."""
    return [[msgspec.structs.astuple(piece)[:-1] for piece in chunk.pieces] for chunk in chunks.chunks]


def test_a_pull_that_fits_is_one_chunk() -> None:
    chunks = cut_chunks(_plan(LIKE), [TokenRange(0, 32)], 1 << 20)
    assert _pieces(chunks) == [[(0, 0, 2, 0, 3, 0, 16)]]
    assert (chunks.count, chunks.packed_bytes(0), chunks.total_bytes) == (1, 2 * 384, 2 * 384)


def test_runs_of_unlike_lengths_share_a_chunk() -> None:
    # Tokens 10..15, 16..31, 32..47, 48..52: long runs first, each strip aligned.
    chunks = cut_chunks(_plan(LIKE), [TokenRange(10, 53)], 1 << 20)
    assert [strip.tokens for strip in chunks.strips] == [16, 6, 5]
    assert _pieces(chunks) == [[(0, 0, 2, 0, 3, 0, 16), (1, 0, 1, 0, 3, 0, 6), (2, 0, 1, 0, 3, 0, 5)]]
    offsets = [piece.packed_offset for piece in chunks.chunks[0].pieces]
    assert offsets == [0, 768, 768 + 192]  # 3 x 6 x 8 = 144 bytes, and the next multiple of 64
    assert chunks.total_bytes == 960 + 3 * 5 * 8


def test_classes_share_a_chunk() -> None:
    made = [
        table([
            region("l", "latent", base=base, pages=(4, 64), token=(4, 12), channels=12),
            region("l", "index", base=base + 48, pages=(4, 64), token=(4, 4), channels=4),
        ])
        for base in (SRC, DST)
    ]  # fmt: skip
    chunks = cut_chunks(planned(made[1], {Rank(): made[0]})[Rank()], [TokenRange(0, 8)], 256)
    assert len({id(strip.members) for strip in chunks.strips}) == 2
    assert [len(chunk.pieces) for chunk in chunks.chunks] == [2]


def test_a_full_chunk_ends_inside_a_run_and_the_next_goes_on_there() -> None:
    chunks = cut_chunks(_plan(LIKE), [TokenRange(0, 16 * 6)], 5 * 128)
    assert _pieces(chunks) == [
        [(0, 0, 1, 0, 3, 0, 16), (0, 1, 1, 0, 2, 0, 16)],
        [(0, 1, 1, 2, 1, 0, 16), (0, 2, 1, 0, 3, 0, 16), (0, 3, 1, 0, 1, 0, 16)],
        [(0, 3, 1, 1, 2, 0, 16), (0, 4, 1, 0, 3, 0, 16)],
        [(0, 5, 1, 0, 3, 0, 16)],
    ]
    assert [chunks.packed_bytes(index) for index in range(4)] == [640, 640, 640, 384]


def test_a_run_longer_than_a_slot_is_split_over_members() -> None:
    chunks = cut_chunks(_plan(LIKE), [TokenRange(0, 32)], 2 * 128)
    assert _pieces(chunks) == [
        [(0, 0, 1, 0, 2, 0, 16)],
        [(0, 0, 1, 2, 1, 0, 16), (0, 1, 1, 0, 1, 0, 16)],
        [(0, 1, 1, 1, 2, 0, 16)],
    ]


def test_one_member_of_a_run_longer_than_a_slot_is_split_over_tokens() -> None:
    chunks = cut_chunks(_plan(replace(LIKE, layers=1)), [TokenRange(0, 32)], 100)  # room for 12 tokens of 8 bytes
    assert _pieces(chunks) == [
        [(0, 0, 1, 0, 1, 0, 12)],
        [(0, 0, 1, 0, 1, 12, 4), (0, 1, 1, 0, 1, 0, 4)],  # 32 bytes, aligned to 64; 36 are left
        [(0, 1, 1, 0, 1, 4, 12)],
    ]


def test_split_lengths_are_few() -> None:
    # Each length of a run has a template of its own, so a long page is cut at eighths of a slot.
    like = replace(LIKE, layers=7, tokens=1_568, blocks=8)
    chunks = cut_chunks(_plan(like), [TokenRange(0, 5 * 1_568 - 100)], 7_000)
    assert {strip.tokens for strip in chunks.strips} == {1_568, 1_468}
    lengths = {piece.tokens for chunk in chunks.chunks for piece in chunk.pieces}
    assert len(lengths) <= 8 + 2 * 8
    assert chunks.count <= 1.2 * chunks.total_bytes / 7_000


def test_state_rows_are_split_like_tokens() -> None:
    made = [
        table(
            [region("s", "ssm", base=base, pages=(8, 96), token=(6, 16), channels=16)], groups=[Group(0, STATE, 8, 8)]
        )
        for base in (SRC, DST)
    ]
    plan = planned(made[1], {Rank(): made[0]})[Rank()]
    chunks = cut_chunks(plan, [TokenRange(0, 21)], 64)
    assert _pieces(chunks) == [[(0, 0, 1, 0, 1, 0, 4)], [(0, 0, 1, 0, 1, 4, 2)]]


def test_a_slot_must_hold_what_stays_whole() -> None:
    assert smallest_slot(_plan(LIKE)) == 8
    made = [
        table([region("l", "kv", base=base, pages=(4, 64), token=(4, 16), channels=16, encoding="opaque:X")])
        for base in (SRC, DST)
    ]
    opaque = planned(made[1], {Rank(): made[0]})[Rank()]
    assert smallest_slot(opaque) == 64
    assert cut_chunks(opaque, [TokenRange(0, 5)], 64).count == 2  # the half-filled page moves whole
    with pytest.raises(LocalUsageError, match="slots of 63 bytes, one piece of this plan takes 64"):
        cut_chunks(opaque, [TokenRange(0, 5)], 63)
    assert smallest_slot(opaque.only(())) == 0


def test_an_empty_range_has_no_chunks() -> None:
    chunks = cut_chunks(_plan(LIKE), [TokenRange(7, 7)], 1 << 20)
    assert (chunks.count, chunks.total_bytes) == (0, 0)


def test_the_order_of_the_pairs_does_not_matter() -> None:
    plan = _plan(LIKE, replace(LIKE, tp=2, layout="BLNHC"))
    turned = make_pair_plan(plan.consumer, plan.producer, plan.pairs[::-1])
    ranges = [TokenRange(3, 90)]
    assert cut_chunks(plan, ranges, 300).chunks == cut_chunks(turned, ranges, 300).chunks
    for ours, theirs in zip(plan.classes, turned.classes, strict=True):
        assert ours.geometry == theirs.geometry
        assert np.array_equal(ours.dst_bases, theirs.dst_bases)


def test_cutting_takes_no_time_per_page_and_layer() -> None:
    # 80 layers x 2,048 pages in 640 chunks: 2.4 ms measured; one Python step per page and layer would take 100.
    like = Dense(heads=8, layers=80, tokens=16, head_size=128, item=2, blocks=4)
    plan = _plan(like)
    times, counts = [], set()
    for _ in range(5):
        start = time.perf_counter()
        counts.add(cut_chunks(plan, [TokenRange(0, 2_048 * 16)], 8 << 20).count)
        times.append(time.perf_counter() - start)
    assert counts == {640}
    assert min(times) < 0.02


def test_reads_of_the_field_case() -> None:
    # Qwen3-8B, 8,192 tokens, block 16, TP1 -> TP2: 18,432 descriptors directly; slots of 32 MiB and of 8.
    plan = _plan(Dense(heads=8, layers=36, tokens=16, head_size=128, item=2, blocks=4))
    tokens = [TokenRange(0, 8_192)]
    assert [cut_chunks(plan, tokens, size << 20).count for size in (32, 8)] == [18, 72]
