"""Packing chunks of pulls into the slots of a ring, and unpacking them.

The tables of one pull are made once and kept for its next chunks; block lists are checked when they are made. Those of
a long pull take tens of milliseconds, so whoever comes meanwhile waits for them instead of making them again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
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

Make = Callable[..., SideTables]
_MOST_BYTES: Final = 32 << 20
"""About what the kept tables of one side may take: 18 pulls of 131,072 tokens in pages of 16, thousands of short ones."""
_PULL_BYTES: Final = 4096
_CHUNK_BYTES: Final = 500
_RUN_BYTES: Final = 80
_OFFSET_BYTES: Final = 16
"""Measured: a pull's records, a chunk's with its pieces, a run in all columns, a run in a strip."""


@dataclass(frozen=True, eq=False, slots=True)
class StagedPull:
    """One pull as this side packs or unpacks it. `blocks` are this side's, one list per group of its table."""

    plan: PairPlan
    ranges: tuple[TokenRange, ...]
    chunk_bytes: int
    blocks: tuple[Blocks, ...]


@dataclass(eq=False, slots=True)
class _Kept:
    """A pull and, once somebody has made them, its tables."""

    pull: StagedPull
    tables: SideTables | None = None
    size_bytes: int = 0
    making: threading.Lock = field(default_factory=threading.Lock)


class _Tables:
    """The tables of the pulls used last, as many as `_MOST_BYTES` hold. Thread-safe."""

    def __init__(self) -> None:
        self._known: OrderedDict[Hashable, _Kept] = OrderedDict()
        self._size_bytes = 0
        self._lock = threading.Lock()

    def of(self, key: Hashable, pull: StagedPull, make: Make) -> SideTables:
        """Made at the first use; a key that was used for another pull is used anew."""
        kept = self._entry(key, pull)
        with kept.making:
            if kept.tables is not None:
                return kept.tables
            try:
                chunks = cut_chunks(pull.plan, pull.ranges, pull.chunk_bytes)
                tables = kept.tables = make(chunks, pull.blocks)
            except BaseException:
                self._drop(key, kept)  # it weighs nothing, so nothing else would ever let go of it
                raise
        with self._lock:
            if self._known.get(key) is kept:
                self._weigh(kept, chunks)
        return tables

    def plan_of(self, key: Hashable) -> PairPlan | None:
        """By which the pull with this key was cut last."""
        with self._lock:
            kept = self._known.get(key)
        return None if kept is None else kept.pull.plan

    def _entry(self, key: Hashable, pull: StagedPull) -> _Kept:
        with self._lock:
            kept = self._known.get(key)
            if kept is None or not _same(kept.pull, pull):
                self._size_bytes -= kept.size_bytes if kept else 0
                kept = self._known[key] = _Kept(pull)
            self._known.move_to_end(key)
            return kept

    def _drop(self, key: Hashable, kept: _Kept) -> None:
        with self._lock:
            if self._known.get(key) is kept:
                del self._known[key]

    def _weigh(self, kept: _Kept, chunks: Chunks) -> None:
        """Count what was made, and let go of what was not used for longest."""
        kept.size_bytes = _size_bytes(chunks)
        self._size_bytes += kept.size_bytes
        while self._size_bytes > _MOST_BYTES and len(self._known) > 1:
            self._size_bytes -= self._known.popitem(last=False)[1].size_bytes


def _size_bytes(chunks: Chunks) -> int:
    """About what the tables of a pull take."""
    runs = sum(runs.count.size for runs in chunks.runs.values())
    offsets = sum(strip.rows.size for strip in chunks.strips)
    return _PULL_BYTES + _CHUNK_BYTES * chunks.count + _RUN_BYTES * runs + _OFFSET_BYTES * offsets


@dataclass(slots=True)
class Packer:
    """One side's ring and cache. Thread-safe."""

    table: RankTable
    ring: StagingRing
    executor: Executor
    null_block: int | None
    threads: int = 1
    _kept: _Tables = field(default_factory=_Tables)

    @property
    def offer(self) -> Offer:
        """What the handshake says of the ring."""
        return Offer(self.ring.size.slot_bytes, self.ring.size.slots)

    def plan_of(self, key: Hashable) -> PairPlan | None:
        """By which the pull with this key was packed or unpacked last; None: it is not known (any more)."""
        return self._kept.plan_of(key)

    def prepare_pack(self, key: Hashable, pull: StagedPull) -> int:
        """Make the tables that `pack` needs; the number of chunks.

        Raises:
            PlanError: block ids that do not fit, or a range that starts inside an opaque page.
            LocalUsageError: a piece that cannot be cut is longer than a chunk.
        """
        return self._gathers(key, pull).chunks.count

    def prepare_unpack(self, key: Hashable, pull: StagedPull) -> int:
        """Make the tables that `unpack` needs; otherwise as `prepare_pack`."""
        return self._scatters(key, pull).chunks.count

    def pack(self, key: Hashable, pull: StagedPull, chunk: int, slot: Slot) -> int:
        """Gather one chunk into a slot; the bytes that it takes there.

        Raises:
            PlanError: block ids that do not fit, or no such chunk. Nothing has been written.
            NativeError: the copy was refused. Nothing has been written.
        """
        tables = self._gathers(key, pull)
        table = tables.table(_checked(tables.chunks, chunk))
        self.executor.gather(table, self.ring.address_of(slot), self._memory, threads=self.threads)
        return table.packed_bytes

    def unpack(self, key: Hashable, pull: StagedPull, chunk: int, slot: Slot, length_bytes: int) -> int:
        """Scatter one chunk from a slot that holds `length_bytes` of it; the bytes written.

        Raises:
            PlanError: block ids that do not fit, no such chunk, or a chunk of another length. Nothing has been written.
            NativeError: the copy was refused. Nothing has been written.
        """
        tables = self._scatters(key, pull)
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

    def _gathers(self, key: Hashable, pull: StagedPull) -> SideTables:
        return self._kept.of(key, pull, partial(gathers, null_block=self.null_block))

    def _scatters(self, key: Hashable, pull: StagedPull) -> SideTables:
        return self._kept.of(key, pull, partial(scatters, null_block=self.null_block))


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
