"""Packing chunks of pulls into the slots of a ring, and unpacking them.

The tables of one pull are made once and kept for its next chunks; block lists are checked when they are made.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Final

from mooncake_hetero_tp.core.chunks import Chunks, cut_chunks
from mooncake_hetero_tp.core.messages import Offer
from mooncake_hetero_tp.core.packing import SideTables, gathers, scatters
from mooncake_hetero_tp.core.pages import Blocks
from mooncake_hetero_tp.core.pairing import PairPlan
from mooncake_hetero_tp.core.regions import RankTable
from mooncake_hetero_tp.core.slots import Slot
from mooncake_hetero_tp.errors import PlanError
from mooncake_hetero_tp.io.staging import StagingRing
from mooncake_hetero_tp.native.executor import Executor
from mooncake_hetero_tp.types import TokenRange

_KEPT_PULLS: Final = 256


@dataclass(frozen=True, eq=False, slots=True)
class StagedPull:
    """One pull as this side packs or unpacks it. `blocks` are this side's, one list per group of its table."""

    plan: PairPlan
    ranges: tuple[TokenRange, ...]
    chunk_bytes: int
    blocks: tuple[Blocks, ...]


@dataclass(slots=True)
class Packer:
    """One side's ring and cache. Thread-safe."""

    table: RankTable
    ring: StagingRing
    executor: Executor
    null_block: int | None
    threads: int = 1
    _known: OrderedDict[Hashable, tuple[StagedPull, SideTables]] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def offer(self) -> Offer:
        """What the handshake says of the ring."""
        return Offer(self.ring.size.slot_bytes, self.ring.size.slots)

    def chunks(self, plan: PairPlan, ranges: Sequence[TokenRange], chunk_bytes: int) -> Chunks:
        """How the pull is cut.

        Raises:
            PlanError: a range that starts inside an opaque page.
            LocalUsageError: a piece that cannot be cut is longer than a chunk.
        """
        return cut_chunks(plan, ranges, chunk_bytes)

    def pack(self, key: Hashable, pull: StagedPull, chunk: int, slot: Slot) -> int:
        """Gather one chunk into a slot; the bytes that it takes there.

        Raises:
            PlanError: block ids that do not fit, or no such chunk. Nothing has been written.
            NativeError: the copy was refused. Nothing has been written.
        """
        tables = self._tables(key, pull, gathers)
        table = tables.table(_checked(tables.chunks, chunk))
        self.executor.gather(table, self.ring.address_of(slot), self._memory, threads=self.threads)
        return table.packed_bytes

    def unpack(self, key: Hashable, pull: StagedPull, chunk: int, slot: Slot, length_bytes: int) -> int:
        """Scatter one chunk from a slot that holds `length_bytes` of it; the bytes written.

        Raises:
            PlanError: block ids that do not fit, no such chunk, or a chunk of another length. Nothing has been written.
            NativeError: the copy was refused. Nothing has been written.
        """
        tables = self._tables(key, pull, scatters)
        table = tables.table(_checked(tables.chunks, chunk))
        if table.packed_bytes != length_bytes:
            raise PlanError(
                f"chunk {chunk}: the producer packed {length_bytes} bytes, expected {table.packed_bytes}; nothing was "
                "written; run the same mooncake-hetero-tp version on both sides"
            )
        self.executor.scatter(table, self.ring.address_of(slot), self._memory, threads=self.threads)
        return table.bytes

    @property
    def _memory(self) -> list[tuple[int, int]]:
        return [(buffer.address, buffer.length_bytes) for buffer in self.table.buffers]

    def _tables(self, key: Hashable, pull: StagedPull, make: Callable[..., SideTables]) -> SideTables:
        """The tables of a pull, made at its first chunk; a key that was used for another pull is used anew."""
        with self._lock:
            known = self._known.get(key)
        if known is not None and _same(known[0], pull):
            return known[1]
        tables = make(cut_chunks(pull.plan, pull.ranges, pull.chunk_bytes), pull.blocks, null_block=self.null_block)
        with self._lock:
            self._known[key] = (pull, tables)
            self._known.move_to_end(key)
            while len(self._known) > _KEPT_PULLS:
                self._known.popitem(last=False)
        return tables


def _same(one: StagedPull, other: StagedPull) -> bool:
    return (
        one.plan is other.plan
        and one.blocks is other.blocks
        and (one.ranges, one.chunk_bytes) == (other.ranges, other.chunk_bytes)
    )


def _checked(chunks: Chunks, chunk: int) -> int:
    if not 0 <= chunk < chunks.count:
        raise PlanError(
            f"chunk {chunk} of a pull of {chunks.count}; run the same mooncake-hetero-tp version on both sides"
        )
    return chunk
