"""What is special to the reference; test_executor.py holds it to the library."""

from __future__ import annotations

import numpy as np

from mooncake_hetero_tp.core.copy_table import MemoryCopy, make_table
from mooncake_hetero_tp.native import reference
from tests.unit.native.arena import Arena, address_of


def test_a_view_writes_through() -> None:
    buffer = np.zeros(16, np.uint8)
    reference.view(address_of(buffer) + 1, (2, 3), (8, 1))[...] = 7
    assert np.flatnonzero(buffer).tolist() == [1, 2, 3, 9, 10, 11]


def test_memory_far_apart_is_one_call() -> None:
    """Short and long runs in allocations with terabytes between them."""
    stack, heap = np.ones(8, np.uint8), Arena(10_000, 5008)
    copies = [MemoryCopy(address_of(stack), 0, [], 8), MemoryCopy(heap.base, 8, [], 5000)]
    table = make_table(copies, 5008)
    reference.gather(table, heap.packed_address, [(address_of(stack), 8), *heap.ranges])
    np.testing.assert_array_equal(heap.packed, np.concatenate([stack, heap.memory[:5000]]))
