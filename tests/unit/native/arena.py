"""Memory for copy tables, and what a table must do to it, spelled out segment by segment."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mooncake_hetero_tp.core.copies import Int64
from mooncake_hetero_tp.core.copy_table import CopyTable, MemoryCopy, make_table

Bytes = npt.NDArray[np.uint8]
GUARD = 64


class Segment(NamedTuple):
    """`bytes` at `address`, and at `packed` in the packed buffer."""

    address: int
    packed: int
    bytes: int


def segments_of(table: CopyTable) -> Iterator[Segment]:
    """The definition of a table, one Python loop per axis."""
    for copy in table.copies:
        steps = []
        for axis in copy["axes"][: copy["axis_count"]]:
            count, stride, listed = int(axis["count"]), int(axis["stride"]), int(axis["list"])
            steps.append([int(table.offsets[listed + i]) if listed >= 0 else i * stride for i in range(count)])
        run = int(copy["run_bytes"])
        for number, step in enumerate(itertools.product(*steps)):
            yield Segment(int(copy["base"]) + sum(step), int(copy["packed_offset"]) + number * run, run)


class Arena:
    """Some memory and a packed buffer, random bytes, both at a chosen place within 64 bytes, with guards around."""

    def __init__(self, memory_bytes: int, packed_bytes: int, *, at: int = 0, packed_at: int = 0, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self._held = [_aligned(memory_bytes, at), _aligned(packed_bytes, packed_at)]
        for whole in self._held:
            whole[:] = rng.integers(1, 256, whole.size, np.uint8)
        self.memory = self._held[0][GUARD + at : GUARD + at + memory_bytes]
        self.packed = self._held[1][GUARD + packed_at : GUARD + packed_at + packed_bytes]
        self._before = [whole.copy() for whole in self._held]

    @property
    def base(self) -> int:
        return address_of(self.memory)

    @property
    def ranges(self) -> list[tuple[int, int]]:
        return [(self.base, self.memory.size)]

    @property
    def packed_address(self) -> int:
        return address_of(self.packed)

    def table(self, *copies: MemoryCopy) -> CopyTable:
        """Copies whose bases are places in `memory`, into all of `packed`."""
        placed = [MemoryCopy(self.base + copy.base, copy.packed_offset, copy.axes, copy.run_bytes) for copy in copies]
        return make_table(placed, self.packed.size)

    def gathered(self, table: CopyTable) -> Bytes:
        """What `packed` must be after a gather."""
        packed = self.packed.copy()
        for segment in segments_of(table):
            start = segment.address - self.base
            packed[segment.packed : segment.packed + segment.bytes] = self.memory[start : start + segment.bytes]
        return packed

    def scattered(self, table: CopyTable) -> Bytes:
        """What `memory` must be after a scatter."""
        memory = self.memory.copy()
        for segment in segments_of(table):
            start = segment.address - self.base
            memory[start : start + segment.bytes] = self.packed[segment.packed : segment.packed + segment.bytes]
        return memory

    def cleared(self, table: CopyTable) -> Bytes:
        """What `memory` must be after a clear."""
        memory = self.memory.copy()
        for segment in segments_of(table):
            start = segment.address - self.base
            memory[start : start + segment.bytes] = 0
        return memory

    def is_untouched(self) -> bool:
        return all(np.array_equal(now, before) for now, before in zip(self._held, self._before, strict=True))

    def guards_hold(self) -> bool:
        """Whether nothing before or behind the two buffers was written."""
        for inner, now, before in zip((self.memory, self.packed), self._held, self._before, strict=True):
            start = address_of(inner) - address_of(now)
            outside = np.ones(now.size, np.bool_)
            outside[start : start + inner.size] = False
            if not np.array_equal(now[outside], before[outside]):
                return False
        return True


def _aligned(size: int, at: int) -> Bytes:
    """An array that begins at a multiple of 64, with room for guards."""
    whole = np.empty(size + at + 2 * GUARD + 64, np.uint8)
    start = -address_of(whole) % 64
    return whole[start : start + size + at + 2 * GUARD]


def address_of(array: npt.NDArray[np.generic]) -> int:
    """Where an array's bytes begin."""
    return int(array.__array_interface__["data"][0])


def listed(*offsets: int) -> Int64:
    """A listed axis."""
    return np.array(offsets, np.int64)
