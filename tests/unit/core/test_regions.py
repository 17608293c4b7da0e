"""Spans, cuts and extents."""

from __future__ import annotations

import pytest

from mooncake_hetero_tp.core.regions import (
    STATE,
    Group,
    Span,
    UnitCut,
    attention_spans,
    extent,
    intersect,
    page_extent,
    whole_span,
)
from mooncake_hetero_tp.errors import ConfigError
from tests.tables import Dense, region

TP_SIZES = (1, 2, 3, 4, 6, 8)


@pytest.mark.parametrize(
    "heads, tp, firsts, count",
    [
        (4, 1, [0], 4),
        (4, 2, [0, 2], 2),
        (4, 8, [0, 0, 1, 1, 2, 2, 3, 3], 1),  # vllm#52516
        (2, 4, [0, 0, 1, 1], 1),  # sglang#19086: modulo gave 0,1,0,1
        (6, 3, [0, 2, 4], 2),
        (1, 3, [0, 0, 0], 1),
    ],
)
def test_heads_of_each_rank(heads: int, tp: int, firsts: list[int], count: int) -> None:
    assert [attention_spans(heads, tp, rank) for rank in range(tp)] == [(Span(0, first, count),) for first in firsts]


@pytest.mark.parametrize("heads, tp", [(heads, tp) for heads in range(1, 9) for tp in TP_SIZES])
def test_ranks_together_hold_every_head_or_are_refused(heads: int, tp: int) -> None:
    if heads % tp and tp % heads:
        with pytest.raises(ConfigError, match=f"TP size {tp} cannot share {heads} KV heads.*tensor_parallel_size"):
            attention_spans(heads, tp, 0)
        return
    spans = [attention_spans(heads, tp, rank)[0] for rank in range(tp)]
    held = [unit for span in spans for unit in range(span.global_start, span.global_start + span.count)]
    assert set(held) == set(range(heads))
    assert len(held) == max(heads, tp)


@pytest.mark.parametrize("heads, tp, rank", [(0, 1, 0), (4, 0, 0), (4, 2, 2), (4, 2, -1)])
def test_nonsense_sizes_are_refused(heads: int, tp: int, rank: int) -> None:
    with pytest.raises(ConfigError, match=f"KV heads {heads}, TP size {tp}, TP rank {rank}"):
        attention_spans(heads, tp, rank)


def test_intersection_gives_local_places_of_both_sides() -> None:
    # 6 heads, TP 2 -> TP 3: rank 1 of 3 needs heads 2 and 3, one from each producer rank.
    consumer = attention_spans(6, 3, 1)
    assert list(intersect(consumer, attention_spans(6, 2, 0))) == [UnitCut(2, 1, 0, 2)]
    assert list(intersect(consumer, attention_spans(6, 2, 1))) == [UnitCut(3, 1, 1, 0)]


def test_intersection_of_scattered_spans() -> None:
    consumer = (Span(0, 10, 4), Span(4, 0, 2))
    producer = (Span(0, 0, 1), Span(1, 12, 5))
    assert list(intersect(consumer, producer)) == [UnitCut(12, 2, 2, 1), UnitCut(0, 1, 4, 0)]
    assert not list(intersect(whole_span(3), [Span(0, 3, 3)]))


def test_extents_count_padding_between_pages_but_not_after_the_last() -> None:
    padded = Dense(heads=2, tokens=4, head_size=2, blocks=3, page_bytes=48).regions()
    assert [page_extent(item) for item in padded] == [30, 30]  # 32 bytes a page, one half of the last row missing
    assert [extent(item) for item in padded] == [2 * 48 + 30, 2 * 48 + 30]


def test_opaque_is_a_name_alone_or_with_a_backend() -> None:
    def opaque(encoding: str) -> bool:
        return region("l", "kv", base=0, pages=(1, 4), token=(4, 1), encoding=encoding).is_opaque

    assert opaque("opaque")
    assert opaque("opaque:ROCM_ATTN")
    assert not opaque("packed")
    assert not opaque("opaquely")


def test_kernel_pages_of_a_logical_block() -> None:
    assert Group(0, "attention", 768, 64).kernel_pages == 12  # vllm#54272
    assert Group(0, "attention", 16, 16).kernel_pages == 1
    assert Group(0, STATE, 4096, 4096).is_state
