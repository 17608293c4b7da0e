"""Segments as arrays equal the definition of a table."""

from __future__ import annotations

import numpy as np
import pytest

from mooncake_hetero_tp.core.copy_table import Axis, CopyTable, MemoryCopy, Strided, make_table
from mooncake_hetero_tp.native import segments
from tests.unit.native.arena import Segment, listed, segments_of

AXES: list[Axis] = [listed(500, 100), Strided(3, 7), listed(0, 30, 20)]


def table() -> CopyTable:
    return make_table(
        [MemoryCopy(1000, 0, AXES, 2), MemoryCopy(50, 36, [], 9), MemoryCopy(0, 45, [Strided(2, -4)], 5)], 55
    )


def found(table: CopyTable, rows: list[int] | None = None) -> list[Segment]:
    chosen = None if rows is None else np.array(rows, np.int64)
    return [
        Segment(*triple)
        for batch in segments.expand(table, chosen)
        for triple in zip(batch.address.tolist(), batch.packed_offset.tolist(), batch.bytes.tolist(), strict=True)
    ]


@pytest.mark.parametrize("batch", [1, 4, 1000])
def test_all_segments_in_batches_of_any_size(monkeypatch: pytest.MonkeyPatch, batch: int) -> None:
    monkeypatch.setattr(segments, "BATCH_SEGMENTS", batch)
    assert found(table()) == list(segments_of(table()))


def test_chosen_copies() -> None:
    assert found(table(), [1, 2]) == list(segments_of(table()))[18:]
    assert found(table(), []) == []
    assert np.concatenate([batch.row for batch in segments.expand(table(), np.array([2, 1]))]).tolist() == [2, 2, 1]


def test_unused_axes_do_not_count() -> None:
    wild = table()
    wild.copies["axes"]["count"][1] = 7
    assert segments.segment_counts(wild.copies)[1].tolist() == [1] * 6
    assert found(wild) == list(segments_of(table()))
