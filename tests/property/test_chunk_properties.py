"""Chunks partition a pull: all (source, destination) bytes of the direct mode, each once, within each slot."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_hetero_tp.core.binding import bind
from mooncake_hetero_tp.core.chunks import ALIGN_BYTES, cut_chunks, smallest_slot
from mooncake_hetero_tp.core.copies import ByteMap, canonical
from mooncake_hetero_tp.core.packing import gathers, scatters
from tests.pull_strategies import DrawnPull, pulls
from tests.staged import Segments, composed
from tests.tables import planned, producer_tables


@settings(max_examples=80)
@given(pulls(), st.integers(0, 3), st.integers(0, 300))
def test_all_chunks_composed_are_what_bind_gives(pull: DrawnPull, prefer: int, spare: int) -> None:
    producer, consumer, tokens, producer_blocks, consumer_blocks = pull
    for rank in range(consumer.tp):
        plans = planned(replace(consumer, rank=rank).table(), producer_tables(producer), prefer)
        for plan in plans.values():
            chunks = cut_chunks(plan, [tokens], smallest_slot(plan) + spare)
            gather = gathers(chunks, [producer_blocks], null_block=None)
            scatter = scatters(chunks, [consumer_blocks], null_block=None)
            parts = [
                composed(Segments.of(gather.table(index)), Segments.of(scatter.table(index)))
                for index in range(chunks.count)
            ]
            direct = bind(plan, [tokens], [producer_blocks], [consumer_blocks], null_block=None)
            assert _union(parts).same_as(canonical(direct.src, direct.dst, direct.length))


def _union(parts: list[ByteMap]) -> ByteMap:
    """Raises PlanError if two parts write one byte."""
    empty = np.empty(0, np.int64)
    columns = [np.concatenate([empty, *(getattr(part, name) for part in parts)]) for name in ("src", "dst", "length")]
    return canonical(*columns)


@given(pulls(), st.integers(0, 300))
def test_chunks_deal_every_token_of_every_member_once(pull: DrawnPull, spare: int) -> None:
    """By counting, without any address: the pieces of a strip cover runs x members x tokens exactly."""
    producer, consumer, tokens, _, _ = pull
    plan = next(iter(planned(consumer.table(), producer_tables(producer)).values()))
    slot_bytes = smallest_slot(plan) + spare
    chunks = cut_chunks(plan, [tokens], slot_bytes)
    covered = [
        np.zeros((strip.rows.size, len(strip.members.members), strip.tokens), np.int64) for strip in chunks.strips
    ]
    for chunk in chunks.chunks:
        end = 0
        for piece in chunk.pieces:
            assert (
                piece.packed_offset == -(-end // ALIGN_BYTES) * ALIGN_BYTES
            )  # no more room between than aligning takes
            cells = covered[piece.strip][
                piece.first_run : piece.first_run + piece.runs,
                piece.first_member : piece.first_member + piece.members,
                piece.first_token : piece.first_token + piece.tokens,
            ]
            assert cells.size == piece.runs * piece.members * piece.tokens
            cells += 1
            end = piece.packed_offset + cells.size * chunks.strips[piece.strip].members.token_bytes
        assert chunk.packed_bytes == end <= slot_bytes
    assert all((strip == 1).all() for strip in covered)
