"""Token ranges cut at both sides' pages."""

from __future__ import annotations

import pytest

from mooncake_hetero_tp.core.runs import RunTable, cut_runs
from mooncake_hetero_tp.errors import LocalUsageError
from mooncake_hetero_tp.types import TokenRange


def _rows(runs: RunTable) -> list[tuple[int, int, int, int, int]]:
    columns = (runs.producer_page, runs.producer_offset, runs.consumer_page, runs.consumer_offset, runs.count)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_small_pages_into_large_ones() -> None:
    # vllm#26744: 70 tokens, block 16 -> 64.
    assert _rows(cut_runs(TokenRange(0, 70), 16, 64)) == [
        (0, 0, 0, 0, 16),
        (1, 0, 0, 16, 16),
        (2, 0, 0, 32, 16),
        (3, 0, 0, 48, 16),
        (4, 0, 1, 0, 6),
    ]


def test_large_pages_into_small_ones_after_a_prefix_hit() -> None:
    # vllm#59592: block 64 -> 16, 32 tokens are there already.
    assert _rows(cut_runs(TokenRange(32, 70), 64, 16)) == [
        (0, 32, 2, 0, 16),
        (0, 48, 3, 0, 16),
        (1, 0, 4, 0, 6),
    ]


def test_sizes_that_do_not_divide() -> None:
    runs = cut_runs(TokenRange(0, 40), 12, 8)
    assert runs.count.tolist() == [8, 4, 4, 8, 8, 4, 4]
    assert _rows(runs)[1:3] == [(0, 8, 1, 0, 4), (1, 0, 1, 4, 4)]


def test_block_sizes_that_depend_on_tp() -> None:
    # vllm#42895: Nemotron-Nano pages of 4192 tokens (TP1) and 2112 (TP4), kernel pages 32 and 64.
    assert (-(-2_134_016 // 512), -(-533_504 // 256)) == (4168, 2084)
    assert _rows(cut_runs(TokenRange(0, 2112), 4192, 2112)) == [(0, 0, 0, 0, 2112)]
    runs = cut_runs(TokenRange(0, 2112), 32, 64)
    assert len(runs) == 66
    assert _rows(runs)[-1] == (65, 0, 32, 32, 32)


@pytest.mark.parametrize("start, end", [(0, 0), (7, 7), (16, 16)])
def test_an_empty_range_has_no_runs(start: int, end: int) -> None:
    assert len(cut_runs(TokenRange(start, end), 16, 16)) == 0


def test_one_token_is_one_run() -> None:
    assert _rows(cut_runs(TokenRange(33, 34), 16, 8)) == [(2, 1, 4, 1, 1)]


@pytest.mark.parametrize("start, end", [(5, 4), (-1, 4)])
def test_a_reversed_or_negative_range_is_our_own_fault(start: int, end: int) -> None:
    with pytest.raises(LocalUsageError, match=r"token range \["):
        cut_runs(TokenRange(start, end), 16, 16)


def test_pages_of_no_tokens_are_our_own_fault() -> None:
    with pytest.raises(LocalUsageError, match="page sizes 0"):
        cut_runs(TokenRange(0, 4), 0, 16)
