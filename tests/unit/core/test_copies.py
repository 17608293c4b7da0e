"""Normalised copies and canonical byte maps."""

from __future__ import annotations

import numpy as np
import pytest

from mooncake_hetero_tp.core.copies import (
    ByteMap,
    Loop,
    StridedCopy,
    canonical,
    concatenate,
    expand,
    join_sorted,
    outer_sum,
    split_at,
    strided_copy,
)
from mooncake_hetero_tp.errors import PlanError
from tests.tables import ids


def _runs(found: ByteMap) -> list[tuple[int, int, int]]:
    return list(zip(found.src.tolist(), found.dst.tolist(), found.length.tolist(), strict=True))


def _map(*runs: tuple[int, int, int]) -> ByteMap:
    src, dst, length = zip(*runs, strict=True)
    return ByteMap(ids(src), ids(dst), ids(length))


def test_a_page_contiguous_on_both_sides_is_one_run_whatever_the_order_of_loops() -> None:
    heads, tokens, channels = Loop(4, 128, 128), Loop(16, 8, 8), Loop(4, 2, 2)
    assert strided_copy(0, 64, (tokens, channels, heads), 2) == StridedCopy(0, 64, (), 512)


def test_loops_fuse_only_where_both_sides_continue() -> None:
    # Token-major source, head-major target: nothing continues on both sides but the channels.
    heads, tokens = Loop(2, 8, 32), Loop(4, 16, 8)
    assert strided_copy(0, 0, (tokens, heads), 8) == StridedCopy(0, 0, (heads, tokens), 8)
    # Rows 16 apart on both sides: heads and tokens are one loop of 8.
    both = (Loop(2, 64, 64), Loop(4, 16, 16))
    assert strided_copy(0, 0, both, 8) == StridedCopy(0, 0, (Loop(8, 16, 16),), 8)


def test_trivial_loops_vanish() -> None:
    assert strided_copy(3, 5, (Loop(1, 999, 1), Loop(1, 0, 0)), 7) == StridedCopy(3, 5, (), 7)


def test_a_copy_counts_its_runs_and_bytes() -> None:
    copy = strided_copy(0, 0, (Loop(3, 100, 50), Loop(2, 20, 10)), 4)
    assert (copy.runs, copy.bytes) == (6, 24)


def test_packed_halves_concatenate_into_one_run() -> None:
    rows = (Loop(4, 16, 16),)
    halves = [strided_copy(8, 8, rows, 8), strided_copy(0, 0, rows, 8)]
    assert concatenate(halves) == (StridedCopy(0, 0, (), 64),)


def test_halves_packed_on_one_side_only_stay_apart() -> None:
    key, value = strided_copy(0, 0, (Loop(4, 16, 8),), 8), strided_copy(8, 32, (Loop(4, 16, 8),), 8)
    assert concatenate([value, key]) == (key, value)


def test_copies_with_unlike_loops_stay_apart() -> None:
    left, right = strided_copy(0, 0, (Loop(2, 32, 32),), 8), strided_copy(8, 8, (Loop(3, 32, 32),), 8)
    assert concatenate([left, right]) == (left, right)


def test_expansion_is_canonical() -> None:
    found = expand([strided_copy(100, 40, (Loop(2, 8, 8),), 8), strided_copy(0, 0, (Loop(2, 30, 20),), 10)])
    assert _runs(found) == [(0, 0, 10), (30, 20, 10), (100, 40, 16)]
    assert expand([]).length.size == 0


def test_a_byte_written_twice_is_an_error() -> None:
    with pytest.raises(PlanError, match="destination byte 9 would be written twice"):
        expand([StridedCopy(0, 0, (), 10), StridedCopy(50, 9, (), 4)])


def test_canonical_maps_are_equal_exactly_when_each_byte_goes_to_the_same_place() -> None:
    halves = canonical(ids([4, 0]), ids([14, 10]), ids([4, 4]))
    assert halves.same_as(_map((0, 10, 8)))
    assert not halves.same_as(_map((1, 10, 8)))
    assert not halves.same_as(_map((0, 10, 7)))


@pytest.mark.parametrize(
    "second, joined",
    [((8, 108, 4), True), ((9, 108, 4), False), ((8, 109, 4), False), ((4, 108, 4), False)],
)
def test_neighbours_join_only_without_a_gap_on_either_side(second: tuple[int, int, int], *, joined: bool) -> None:
    found = join_sorted(_map((0, 100, 8), second))
    assert _runs(found) == ([(0, 100, 12)] if joined else [(0, 100, 8), second])


def test_intervals_split_at_the_cuts_inside_of_them() -> None:
    owner, offset, length = split_at(ids([0, 10, 30]), ids([10, 15, 4]), ids([0, 10, 12, 20, 25, 31]))
    assert list(zip(owner.tolist(), offset.tolist(), length.tolist(), strict=True)) == [
        (0, 0, 10),  # a cut at either end is none
        (1, 0, 2),
        (1, 2, 8),
        (1, 10, 5),
        (2, 0, 1),
        (2, 1, 3),
    ]


def test_outer_sum_runs_fastest_over_the_last_vector() -> None:
    found = outer_sum([ids([0, 100]), ids([0, 10, 20]), np.arange(2)])
    assert found.tolist() == [0, 1, 10, 11, 20, 21, 100, 101, 110, 111, 120, 121]
