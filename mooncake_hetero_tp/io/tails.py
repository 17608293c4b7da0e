"""Clearing what lies past the end of a loaded range, through the region's strides: an operation of its own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mooncake_hetero_tp.core.binding import TailView
from mooncake_hetero_tp.core.packing import tail_table
from mooncake_hetero_tp.core.regions import RankTable
from mooncake_hetero_tp.native.executor import Executor


@dataclass(frozen=True, slots=True)
class TailClearer:
    """Zeroes each tail's elements and nothing between them, in one call, in memory that `executor` reaches.

    vLLM does not zero blocks that a connector loads, so what another request left past the end could be
    attended (vllm#51527, vllm#54875).
    """

    table: RankTable
    executor: Executor

    def __call__(self, tails: Iterable[TailView]) -> None:
        """Returns when they are zero.

        Raises:
            NativeError: a tail leaves the registered buffers; nothing was written.
        """
        copies = tail_table(tails)
        if copies.copies.size:
            buffers = [(buffer.address, buffer.length_bytes) for buffer in self.table.buffers]
            self.executor.clear(copies, buffers)
