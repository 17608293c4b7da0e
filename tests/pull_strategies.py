"""Pulls between dense caches of all layouts, for property tests."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias

from hypothesis import strategies as st

from mooncake_hetero_tp.core.copies import Int64
from mooncake_hetero_tp.core.layout import VLLM_LAYOUTS
from mooncake_hetero_tp.types import TokenRange
from tests.oracle import allowed
from tests.tables import DST, SRC, Dense, ids


@st.composite
def sides(draw: st.DrawFn, heads: int, base: int) -> Dense:
    layout = draw(st.sampled_from(VLLM_LAYOUTS))
    tokens = draw(st.sampled_from([2, 3, 4, 6]))
    kernels = [size for size in (1, 2, 3) if tokens % size == 0] if layout[:2] == "LB" else [tokens]
    tp = draw(st.sampled_from([tp for tp in (1, 2, 3, 4) if allowed(heads, tp)]))
    made = Dense(
        heads=heads,
        tp=tp,
        layers=draw(st.integers(1, 3)),
        layout=layout,
        tokens=tokens,
        kernel_tokens=draw(st.sampled_from(kernels)),
        blocks=9,
        item=draw(st.sampled_from([1, 2])),
        base=base,
    )
    if layout[:2] in ("LB", "BL") and draw(st.booleans()):
        local = max(heads // tp, 1)
        dense = local * (made.kernel_tokens or tokens) * 2 * made.head_size * made.item
        made = replace(made, page_bytes=dense + draw(st.integers(1, 9)))
    return made


DrawnPull: TypeAlias = tuple[Dense, Dense, TokenRange, Int64, Int64]
"""Producer, consumer, range, the producer's and the consumer's blocks."""


@st.composite
def pulls(draw: st.DrawFn) -> DrawnPull:
    heads = draw(st.sampled_from([1, 2, 4, 6]))
    producer, consumer = draw(sides(heads, SRC)), draw(sides(heads, DST))
    same = replace(producer, layers=consumer.layers, item=consumer.item)
    if producer.page_bytes is not None:
        same = replace(same, page_bytes=producer.page_bytes * 2)
    end = draw(st.integers(1, 12))
    blocks = [draw(st.permutations(range(9)))[: -(-end // side.tokens)] for side in (same, consumer)]
    return same, consumer, TokenRange(draw(st.integers(0, end)), end), ids(blocks[0]), ids(blocks[1])
