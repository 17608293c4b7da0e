"""Tables of strided copies and their encoding."""

import numpy as np
import pytest

from mooncake_hetero_tp.core.copy_table import AXIS, COPY, MAX_AXES, MemoryCopy, Strided, make_table
from mooncake_hetero_tp.errors import PlanError


def test_records_are_packed_without_gaps() -> None:
    assert (AXIS.itemsize, COPY.itemsize) == (16, 32 + 16 * MAX_AXES)


def test_lists_and_strides_are_encoded() -> None:
    table = make_table(
        [
            MemoryCopy(100, 0, [np.array([0, 50], np.int64), Strided(3, 10)], 4),
            MemoryCopy(500, 32, [np.array([7, 8, 9], np.int64)], 8),
        ],
        56,
    )
    assert table.copies["axes"]["list"][:, :2].tolist() == [[0, -1], [2, -1]]
    assert table.offsets.tolist() == [0, 50, 7, 8, 9]
    assert (table.segments, table.bytes, table.packed_bytes) == (2 * 3 + 3, 2 * 3 * 4 + 3 * 8, 56)


def test_unused_axes_count_one() -> None:
    table = make_table([MemoryCopy(100, 0, [], 4)], 4)
    assert table.copies["axes"]["count"].tolist() == [[1] * MAX_AXES]
    assert (table.segments, table.bytes) == (1, 4)


def test_too_many_axes_are_refused() -> None:
    with pytest.raises(PlanError, match=rf"{MAX_AXES + 1} axes, at most {MAX_AXES} fit"):
        make_table([MemoryCopy(0, 0, [Strided(2, 8)] * (MAX_AXES + 1), 4)], 64)


def test_an_empty_table_is_legal() -> None:
    table = make_table([], 0)
    assert (table.segments, table.bytes, table.copies.shape) == (0, 0, (0,))
