"""Staged pulls in numpy: each rank cuts and packs for itself, bytes go through a packed buffer.

The executor reads copy tables by their documented meaning alone and shares no code with the package.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from mooncake_hetero_tp.core.binding import Descriptors
from mooncake_hetero_tp.core.chunks import ALIGN_BYTES, Chunks, cut_chunks, smallest_slot
from mooncake_hetero_tp.core.copies import ByteMap, canonical
from mooncake_hetero_tp.core.copy_table import CopyTable
from mooncake_hetero_tp.core.packing import gathers, scatters
from mooncake_hetero_tp.core.pairing import PairPlan, make_pair_plan
from tests.oracle import Case, Pull, Reader, build_pulls, inside_one_buffer
from tests.oracle_memory import Arena, Bytes, Ints


@dataclass(frozen=True)
class Segments:
    """Contiguous pieces of a table: memory address, packed offset and length of each."""

    address: Ints
    packed: Ints
    length: Ints

    @classmethod
    def of(cls, table: CopyTable) -> Segments:
        """Row by row, the last axis running fastest."""
        rows = [_row_addresses(row, table.offsets) for row in table.copies]
        sizes = [addresses.size for addresses in rows]
        lengths = np.repeat(table.copies["run_bytes"], sizes)
        places = [
            first + np.arange(count) * size
            for first, size, count in zip(table.copies["packed_offset"], table.copies["run_bytes"], sizes, strict=True)
        ]
        return cls(_joined(rows), _joined(places), lengths)

    def bytes(self) -> tuple[Ints, Ints]:
        """(memory address, packed offset) of every byte."""
        within = np.arange(int(self.length.sum())) - np.repeat(np.cumsum(self.length) - self.length, self.length)
        return np.repeat(self.address, self.length) + within, np.repeat(self.packed, self.length) + within


def _row_addresses(row: np.void, offsets: Ints) -> Ints:
    addresses = np.array([row["base"]], np.int64)
    for stride, count, first in row["axes"][: row["axis_count"]].tolist():
        steps = offsets[first : first + count] if first >= 0 else np.arange(count) * stride
        addresses = np.add.outer(addresses, steps).ravel()
    return addresses


def _joined(parts: Iterable[Ints]) -> Ints:
    return np.concatenate([np.empty(0, np.int64), *parts])


@dataclass
class StagedTally:
    """What staged pulls amounted to; `splits` counts chunks by how their pieces were cut."""

    ranks: int = 0
    chunks: int = 0
    bytes: int = 0
    splits: Counter[str] = field(default_factory=Counter)

    def count(self, chunks: Chunks) -> None:
        self.chunks += chunks.count
        for chunk in chunks.chunks:
            strips = [chunks.strips[piece.strip] for piece in chunk.pieces]
            pairs = list(zip(chunk.pieces, strips, strict=True))
            self.splits["strips"] += len({piece.strip for piece in chunk.pieces}) > 1
            self.splits["classes"] += len({id(strip.members) for strip in strips}) > 1
            self.splits["members"] += any(piece.members < len(strip.members.members) for piece, strip in pairs)
            self.splits["tokens"] += any(piece.tokens < strip.tokens for piece, strip in pairs)
            self.splits["state rows"] += any(
                piece.tokens < strip.tokens and strip.kind.dst.group.is_state for piece, strip in pairs
            )
            self.splits["runs"] += any(piece.runs < strip.rows.size for piece, strip in pairs)


@dataclass(frozen=True)
class Stage:
    """One (consumer rank, producer rank) of a pull, cut for both: the producer makes the plan itself."""

    pull: Pull
    plan: PairPlan
    sent: Chunks
    received: Chunks

    @classmethod
    def of(cls, pull: Pull, plan: PairPlan, slot_bytes: int, rng: random.Random) -> Stage:
        pairs = rng.sample(plan.pairs, len(plan.pairs))  # what it is told comes in any order
        own = make_pair_plan(plan.consumer, plan.producer, pairs)
        chunks = [cut_chunks(one, pull.ranges, slot_bytes) for one in (own, plan)]
        assert chunks[0].chunks == chunks[1].chunks
        assert all(chunk.packed_bytes <= slot_bytes for chunk in chunks[0].chunks)
        assert all(piece.packed_offset % ALIGN_BYTES == 0 for chunk in chunks[0].chunks for piece in chunk.pieces)
        return cls(pull, plan, *chunks)

    def tables(self) -> Iterable[tuple[CopyTable, CopyTable]]:
        gather, scatter = (
            gathers(self.sent, self.pull.producer_blocks),
            scatters(self.received, self.pull.consumer_blocks),
        )
        for index in range(self.sent.count):
            yield gather.table(index), scatter.table(index)

    def move(self, arenas: tuple[Arena, Arena], read: Reader) -> ByteMap:
        """Carries all chunks out, through one dirty slot of each arena; the canonical map of the bytes that moved.

        Raises:
            AssertionError: a chunk whose packed bytes are not written once and read once.
        """
        size = max((chunk.packed_bytes for chunk in self.sent.chunks), default=0)
        slots = [arena.take(size) for arena in arenas]
        maps = [self._move_one(tables, slots, arenas, read) for tables in self.tables()]
        columns = (_joined(getattr(part, name) for part in maps) for name in ("src", "dst", "length"))
        return canonical(*columns)

    def _move_one(
        self,
        tables: tuple[CopyTable, CopyTable],
        slots: Sequence[tuple[int, Bytes]],
        arenas: tuple[Arena, Arena],
        read: Reader,
    ) -> ByteMap:
        gather, scatter = (Segments.of(table) for table in tables)
        assert inside_one_buffer(gather.address, gather.length, self.plan.producer.buffers)
        assert inside_one_buffer(scatter.address, scatter.length, self.plan.consumer.buffers)
        assert int(gather.length.sum()) == tables[0].bytes == tables[1].bytes
        size = tables[0].packed_bytes
        assert max(gather.packed + gather.length) == size == tables[1].packed_bytes
        (source, packed), (target, unpacked) = gather.bytes(), scatter.bytes()
        (from_address, sent), (to_address, received) = slots
        sent[:] = ~sent
        sent[packed] = arenas[0].memory[source - arenas[0].address]
        read(Descriptors(*(np.array([number], np.int64) for number in (from_address, to_address, size))))
        arenas[1].memory[target - arenas[1].address] = received[unpacked]
        return composed(gather, scatter)


def composed(gather: Segments, scatter: Segments) -> ByteMap:
    """(source, destination) of every byte of one chunk, by way of the packed buffer.

    Raises:
        AssertionError: a packed byte that is written twice, or not read exactly once.
    """
    (source, packed), (target, unpacked) = gather.bytes(), scatter.bytes()
    gathered, scattered = np.argsort(packed, kind="stable"), np.argsort(unpacked, kind="stable")
    places = packed[gathered]
    assert (places[1:] > places[:-1]).all()
    assert np.array_equal(places, unpacked[scattered])
    return ByteMap(source[gathered], target[scattered], np.ones(places.size, np.int64))


def draw_slot(rng: random.Random, plan: PairPlan) -> int:
    """As small as the plan allows, a little or much larger."""
    least = smallest_slot(plan)
    return rng.choice(
        (least, least + rng.randint(1, 100), 2 * least + rng.randint(0, 300), least + rng.randint(0, 2_000))
    )


def run_staged(case: Case, arenas: tuple[Arena, Arena], read: Reader, tally: StagedTally, most_ranks: int = 2) -> None:
    """Moves a case through slots of a random size; compares every byte, and the map with that of direct reads.

    Raises:
        AssertionError: a byte differs from the oracle or goes another way than in direct mode.
    """
    run_staged_pulls(build_pulls(case, arenas, most_ranks), random.Random(case.seed), arenas, read, tally)


def run_staged_pulls(
    pulls: Iterable[Pull], rng: random.Random, arenas: tuple[Arena, Arena], read: Reader, tally: StagedTally
) -> None:
    """The same for pulls that are built."""
    for pull in pulls:
        expected = pull.expected()
        for plan in pull.plans().values():
            stage = Stage.of(pull, plan, draw_slot(rng, plan), rng)
            moved, direct = stage.move(arenas, read), pull.bind(plan)
            assert moved.same_as(canonical(direct.src, direct.dst, direct.length))
            tally.count(stage.sent)
            tally.bytes += direct.bytes
        pull.compare(expected)
        tally.ranks += 1
