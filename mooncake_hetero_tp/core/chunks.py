"""A pull cut into chunks, each of which fits one staging slot.

Both ranks cut for themselves and must come to the same chunks, so nothing here knows a block id: runs come in token
order, layers and components in the order of the consumer's table, and the only sizes are those of the plan.

All runs of one length of one copy class form a strip: its cells, one per (run, layer), take equally many bytes and
are dealt out run by run, so a chunk's share of a strip is at most three rectangles (a started run, whole runs, a run
that the next chunk goes on with). Strips follow one another without a new chunk, so first, middle and last pages
and components of several kinds share one. A cell that is longer than a slot is cut over its tokens instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeAlias

import msgspec
import numpy as np

from mooncake_hetero_tp.core.copies import Int64
from mooncake_hetero_tp.core.pages import PageKind, page_runs
from mooncake_hetero_tp.core.pairing import CopyClass, PairPlan
from mooncake_hetero_tp.core.runs import RunTable
from mooncake_hetero_tp.errors import LocalUsageError
from mooncake_hetero_tp.types import TokenRange

ALIGN_BYTES = 64
"""Pieces start at multiples of it in the packed buffer: a cache line, and whole vectors for every kernel."""

LONGEST_READ_BYTES = 64 << 20
"""What goes to the engine in one descriptor (`io/reading.py`); a longer slot is read in several."""

_LENGTHS_PER_SLOT = 8
"""Tokens of a cell that is cut move in eighths of a slot: few distinct lengths, for each has a template of its own."""


Rectangle: TypeAlias = tuple[int, int, int, int]
"""First run, runs, first member, members."""
Slice: TypeAlias = tuple[int, int]
"""First token of a run, tokens."""


class Piece(msgspec.Struct, frozen=True):
    """Tokens of every run and member of a rectangle of one strip; they start `packed_offset` into the chunk."""

    strip: int
    first_run: int
    runs: int
    first_member: int
    members: int
    first_token: int
    tokens: int
    packed_offset: int


class Chunk(msgspec.Struct, frozen=True):
    """What one slot carries; `packed_bytes` of it are used, the gaps between pieces included."""

    pieces: tuple[Piece, ...]
    packed_bytes: int


@dataclass(frozen=True, eq=False, slots=True)
class Strip:
    """All runs of `tokens` tokens of one copy class; `rows` are their places in the runs of their kind."""

    members: CopyClass
    kind: PageKind
    rows: Int64
    tokens: int

    @property
    def cell_bytes(self) -> int:
        """Bytes of one run of one member."""
        return self.tokens * self.members.token_bytes


@dataclass(frozen=True, eq=False, slots=True)
class Chunks:
    """All chunks of one pull, in the order in which they are staged."""

    plan: PairPlan
    runs: dict[PageKind, RunTable]
    strips: tuple[Strip, ...]
    chunks: tuple[Chunk, ...]

    @property
    def count(self) -> int:
        return len(self.chunks)

    def packed_bytes(self, index: int) -> int:
        """Bytes to read of chunk `index`, from the start of its slot."""
        return self.chunks[index].packed_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes to read of all chunks."""
        return sum(chunk.packed_bytes for chunk in self.chunks)

    @property
    def reads(self) -> int:
        """Descriptors that all chunks take: one each, unless slots are very large."""
        return sum(-(-chunk.packed_bytes // LONGEST_READ_BYTES) for chunk in self.chunks)


def smallest_slot(plan: PairPlan) -> int:
    """Bytes that a slot must hold at least, or the plan cannot be staged: the longest piece that stays whole.

    That is one token (or state row) of one layer, or a whole page whose inner order is not known.
    """
    return max((_uncut_bytes(members) for members in plan.classes), default=0)


def _uncut_bytes(members: CopyClass) -> int:
    tokens = members.geometry.dst.page_tokens if members.geometry.whole_pages else 1
    return tokens * members.token_bytes


def cut_chunks(plan: PairPlan, ranges: Sequence[TokenRange], slot_bytes: int) -> Chunks:
    """Cuts the pull of `ranges`, one per consumer group, into chunks of at most `slot_bytes`.

    Raises:
        PlanError: a range that starts inside an opaque page.
        LocalUsageError: slots below `smallest_slot`; a missing or reversed range.
    """
    if slot_bytes < smallest_slot(plan):
        raise LocalUsageError(
            f"slots of {slot_bytes} bytes, one piece of this plan takes {smallest_slot(plan)}; read it directly or "
            f"set larger slots on both sides"
        )
    runs: dict[PageKind, RunTable] = {}
    strips = tuple(_strips(plan, ranges, runs))
    return Chunks(plan, runs, strips, tuple(_fill(strips, slot_bytes)))


def _strips(plan: PairPlan, ranges: Sequence[TokenRange], known: dict[PageKind, RunTable]) -> Iterator[Strip]:
    """Long runs before short ones, so that what first and last pages leave over ends in one chunk."""
    for members in plan.classes:
        kind = PageKind.of(members.geometry)
        if kind not in known:
            known[kind] = page_runs(kind, ranges)
        count = known[kind].count
        for tokens in np.unique(count)[::-1]:
            yield Strip(members, kind, np.flatnonzero(count == tokens), int(tokens))


def _fill(strips: Sequence[Strip], slot_bytes: int) -> Iterator[Chunk]:
    slot = _Slot(slot_bytes)
    for place, strip in enumerate(strips):
        deal = _deal_tokens if strip.cell_bytes > slot_bytes else _deal_cells
        yield from deal(place, strip, slot)
    if slot.pieces:
        yield slot.close()


class _Slot:
    """The chunk that is being filled."""

    def __init__(self, slot_bytes: int) -> None:
        self.bytes = slot_bytes
        self.pieces: list[Piece] = []
        self.used = 0
        self.start = 0
        """Where the next piece begins."""

    @property
    def room(self) -> int:
        return self.bytes - self.start

    def add(self, strip: int, cells: Rectangle, tokens: Slice, cell_bytes: int) -> None:
        self.pieces.append(Piece(strip, *cells, *tokens, self.start))
        self.used = self.start + cells[1] * cells[3] * cell_bytes
        self.start = -(-self.used // ALIGN_BYTES) * ALIGN_BYTES

    def close(self) -> Chunk:
        chunk = Chunk(tuple(self.pieces), self.used)
        self.pieces, self.used, self.start = [], 0, 0
        return chunk


def _deal_cells(place: int, strip: Strip, slot: _Slot) -> Iterator[Chunk]:
    """Whole cells, as many as fit."""
    members, tokens, cell_bytes = len(strip.members.members), (0, strip.tokens), strip.cell_bytes
    done, cells = 0, strip.rows.size * members
    while done < cells:
        count = min(_cells_in(slot.room, cell_bytes, members), cells - done)
        if not count:
            yield slot.close()
            continue
        for rectangle in _rectangles(done, done + count, members):
            slot.add(place, rectangle, tokens, cell_bytes)
        done += count


def _cells_in(room: int, cell_bytes: int, members: int) -> int:
    """Cells that fit into `room`, with what aligning their second and third rectangle may take."""
    gaps = 2 * ALIGN_BYTES if cell_bytes % ALIGN_BYTES and members > 1 else 0
    return max((room - gaps) // cell_bytes, int(room >= cell_bytes))


def _rectangles(first: int, last: int, members: int) -> Iterator[Rectangle]:
    """Cells `[first, last)`, counted run by run: what is left of a started run, whole runs, a part of a run."""
    run, member = divmod(first, members)
    if member:
        taken = min(members - member, last - first)
        yield run, 1, member, taken
        first, run = first + taken, run + 1
    whole, part = divmod(last - first, members)
    if whole:
        yield run, whole, 0, members
    if part:
        yield run + whole, 1, 0, part


def _deal_tokens(place: int, strip: Strip, slot: _Slot) -> Iterator[Chunk]:
    """Cells longer than a slot, one after the other, cut between tokens (or state rows)."""
    token_bytes = strip.members.token_bytes
    step = max(slot.bytes // token_bytes // _LENGTHS_PER_SLOT, 1)
    for run, member in product(range(strip.rows.size), range(len(strip.members.members))):
        done = 0
        while done < strip.tokens:
            count = min(max(slot.room // token_bytes // step * step, 0), strip.tokens - done)
            if not count:
                yield slot.close()
                continue
            slot.add(place, (run, 1, member, 1), (done, count), count * token_bytes)
            done += count
