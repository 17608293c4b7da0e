"""What is special to the numpy checks; test_executor.py holds them to the library's."""

from __future__ import annotations

import numpy as np

from mooncake_hetero_tp.core.copy_table import Axis, MemoryCopy, Strided, make_table
from mooncake_hetero_tp.native.table_checks import Allowed, Hulls
from tests.unit.native.arena import listed


def allowed(*ranges: tuple[int, int]) -> Allowed:
    return Allowed.of(np.array(ranges, np.int64).reshape(-1, 2))


def test_ranges_that_touch_or_overlap_become_one() -> None:
    found = allowed((50, 10), (0, 10), (10, 5), (12, 20), (55, 2), (40, 0))
    assert (found.low.tolist(), found.high.tolist()) == ([0, 50], [32, 60])


def test_intervals_inside() -> None:
    found = allowed((0, 10), (20, 10))
    low, high = np.array([0, 9, 20, 25, -1, 30]), np.array([10, 11, 30, 26, 1, 31])
    assert found.hold(low, high).tolist() == [True, False, True, True, False, False]
    assert not allowed().hold(low, high).any()


def test_intervals_that_touch_a_range() -> None:
    found = allowed((10, 10))
    assert [found.touch(*interval) for interval in ((0, 10), (0, 11), (15, 16), (19, 30), (20, 30))] == [
        False, True, True, True, False,
    ]  # fmt: skip
    assert not allowed().touch(0, 1 << 62)


def test_hulls_near_the_limit_are_exact() -> None:
    axes: list[Axis] = [listed(2**62, 0), Strided(2, -(2**62))]
    table = make_table([MemoryCopy(2**62 - 9, 0, axes, 8), MemoryCopy(2**62 - 8, 0, axes, 8)], 64)
    assert Hulls.of(table, np.arange(2)).overflows.tolist() == [False, True]
