"""Runs of page numbers: equal for classes that differ in strides only; their ids."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from mooncake_hetero_tp.core.pages import PageKind, consumer_pages, page_runs, producer_pages
from mooncake_hetero_tp.core.pairing import PairPlan, Side
from mooncake_hetero_tp.core.regions import STATE, Group
from mooncake_hetero_tp.errors import LocalUsageError, PlanError
from mooncake_hetero_tp.types import Rank, TokenRange
from tests.tables import DST, SRC, Dense, ids, planned, region, table


def _side(block: int, kernel: int, kind: str = "attention") -> Side:
    return Side(Group(0, kind, block, kernel), 100, 4, kernel, 8 * block // kernel)


def _plan(encoding: str = "packed") -> PairPlan:
    made = [
        table([region(name, "k", base=base + at, pages=(4, 64), token=(4, stride), channels=4, encoding=encoding)
               for name, at, stride in (("a", 0, 4), ("b", 32, 8))])
        for base in (SRC, DST)
    ]  # fmt: skip
    return planned(made[1], {Rank(): made[0]})[Rank()]


def test_classes_that_differ_in_strides_share_their_runs() -> None:
    kinds = {PageKind.of(members.geometry) for members in _plan().classes}
    assert (len(_plan().classes), len(kinds)) == (2, 1)
    assert kinds != {PageKind.of(members.geometry) for members in _plan("opaque:X").classes}


def test_runs_are_in_token_order() -> None:
    runs = page_runs(PageKind(_side(12, 4), _side(8, 8), whole_pages=False), [TokenRange(3, 14)])
    assert runs.producer_page.tolist() == [0, 1, 2, 3]
    assert runs.consumer_page.tolist() == [0, 0, 1, 1]
    assert runs.count.tolist() == [1, 4, 4, 2]


def test_opaque_pages_count_as_full() -> None:
    kind = PageKind(_side(4, 4), _side(4, 4), whole_pages=True)
    assert page_runs(kind, [TokenRange(4, 9)]).count.tolist() == [4, 4]
    assert len(page_runs(kind, [TokenRange(2, 2)])) == 0
    with pytest.raises(PlanError, match="start inside a kernel page of 4 tokens"):
        page_runs(kind, [TokenRange(2, 9)])


def test_a_state_is_one_run_of_all_its_rows() -> None:
    sides = [replace(_side(size, size, STATE), page_tokens=3) for size in (4, 8)]
    runs = page_runs(PageKind(sides[0], sides[1], whole_pages=False), [TokenRange(3, 11)])
    assert [column.tolist() for column in (runs.producer_page, runs.consumer_page, runs.count)] == [[2], [1], [3]]


def test_a_range_is_needed() -> None:
    with pytest.raises(LocalUsageError, match="group 0 has none"):
        page_runs(PageKind(_side(4, 4), _side(4, 4), whole_pages=False), [])


def test_kernel_pages_of_logical_blocks() -> None:
    pages = np.array([0, 1, 2, 5], np.int64)
    assert producer_pages(pages, [ids([3, 3])], _side(12, 4), None).tolist() == [9, 10, 11, 11]
    with pytest.raises(PlanError, match="a block is given for two pages"):
        consumer_pages(pages, [ids([3, 3])], _side(12, 4), None)
    assert consumer_pages(pages[:3], [ids([3, 3])], _side(12, 4), None).tolist() == [
        9,
        10,
        11,
    ]  # nobody reads the second
    assert Dense(heads=1).table().groups[0].kernel_pages == 1
