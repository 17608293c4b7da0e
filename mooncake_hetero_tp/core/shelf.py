"""A producer rank's ring: which chunks of which pulls lie in its slots, and which wait for one. No I/O.

Its promises, which the simulation holds it to:

- a slot is filled again only when its consumer has said that it will not read it any more, or when the lease
  under which it was told of it is over; and never while a gather still writes into it;
- Staged is sent only while the lease is live, and a chunk that was told of stays where it is as long as that;
- every Stage is answered: by Staged, at once or when its gather has returned, by Waiting, or by Gone.

States and transitions are in `core/states.py`, shares and turns in `core/slots.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import count

from mooncake_hetero_tp.core.effects import Gather, GatherId, GatherOutcome, Level, Notice, ProducerEffect, Reply
from mooncake_hetero_tp.core.leases import PullEntry, PullKey, Transfer
from mooncake_hetero_tp.core.messages import Gone, GoneReason, Offer, ProducerMessage, Stage, Staged, Waiting
from mooncake_hetero_tp.core.regions import RankTable
from mooncake_hetero_tp.core.slots import Slot, SlotTable
from mooncake_hetero_tp.core.states import SHELVED, Shelved, ShelvedEvent, after
from mooncake_hetero_tp.errors import LocalUsageError


@dataclass(frozen=True, slots=True)
class Ring:
    """A producer rank's registered ring."""

    offer: Offer
    address_of: Callable[[int], int]
    """Where a slot begins, in the memory that consumers read."""


@dataclass(slots=True, eq=False)
class ShelfChunk:
    """One chunk of a staged pull."""

    number: int
    state: Shelved = Shelved.WANTED
    slot: Slot | None = None
    length_bytes: int = 0
    gather_us: int = 0

    def step(self, event: ShelvedEvent) -> bool:
        """Make a transition; False: refused."""
        state = after(SHELVED, self.state, event)
        if state is not None:
            self.state = state
        return state is not None


@dataclass(slots=True, eq=False)
class StagedPull:
    """A pull of which chunks were asked for."""

    pull: PullEntry
    transfer: Transfer
    consumer_table: RankTable
    chunk_bytes: int
    asked: Stage
    """The latest."""
    chunks: dict[int, ShelfChunk] = field(default_factory=dict)
    refused: bool = False
    """Told that it cannot be staged."""

    @property
    def waiting(self) -> list[ShelfChunk]:
        return [chunk for chunk in self.chunks.values() if chunk.state is Shelved.WANTED]


class Shelf:
    """The staged pulls of one producer rank and its ring; without a ring it refuses all."""

    def __init__(self, ring: Ring | None, table: RankTable, out: list[ProducerEffect]) -> None:
        self._ring = ring
        self._table = table
        self._out = out
        self._slots: SlotTable[StagedPull] = SlotTable(ring.offer.slots if ring else 0)
        self._pulls: dict[PullKey, StagedPull] = {}
        self._gathers: dict[GatherId, tuple[StagedPull, ShelfChunk]] = {}
        self._counter = count(1)

    def __len__(self) -> int:
        return len(self._pulls)

    @property
    def gathering(self) -> bool:
        """Whether any gather has not returned."""
        return bool(self._gathers)

    def overdue(self, now: float) -> list[PullEntry]:
        """Pulls that hold slots which others need, and whose leases are over."""
        if not self._slots.starved:
            return []
        return [staged.pull for staged in self._slots.holders if staged.pull.lease_until <= now]

    def next_due(self) -> float | None:
        """When a slot that others need may be taken from its pull; None: nobody needs one, or none is held."""
        if not self._slots.starved:
            return None
        return min((staged.pull.lease_until for staged in self._slots.holders), default=None)

    # --- inputs ----------------------------------------------------------------------------------

    def ask(self, pull: PullEntry, transfer: Transfer, message: Stage) -> None:
        """A Stage of a pull whose lease is live."""
        known = self._pulls.get(pull.key)
        staged = known or self._new(pull, transfer, message)
        if staged is None:
            self._answer(pull, Gone(*pull.key, GoneReason.NO_STAGING))
        elif _differs(staged.asked, message) if known else self._beyond_pull(staged):
            self._answer(pull, Gone(*pull.key, GoneReason.BAD_RANGES))
        elif message.serial >= staged.asked.serial:
            self._pulls[pull.key] = staged
            self._want(staged, message)

    def gathered(self, gather_id: GatherId, outcome: GatherOutcome, now: float) -> None:
        """A gather has returned.

        Raises:
            LocalUsageError: no such gather is running; nothing changes.
        """
        found = self._gathers.pop(gather_id, None)
        if found is None:
            raise LocalUsageError(f"gather {gather_id}: expected one that runs")
        staged, chunk = found
        if chunk.state is Shelved.DOOMED:
            self._free_doomed(chunk, outcome)
        elif outcome.error is not None:
            self._notice(staged, chunk, outcome.error)
            self._give_up(staged, chunk, now)
        else:
            chunk.step(ShelvedEvent.FILLED)
            chunk.length_bytes, chunk.gather_us = outcome.length_bytes, outcome.gather_us
            if staged.pull.holds_lease(now):
                self._tell(staged, chunk)
        self._serve()

    def drop(self, pull: PullEntry) -> None:
        """The pull is over: its slots go back, those that are being filled when their gathers have returned."""
        staged = self._pulls.pop(pull.key, None)
        if staged is not None:
            self._clear(staged)
            self._serve()

    # --- chunks ----------------------------------------------------------------------------------

    def _new(self, pull: PullEntry, transfer: Transfer, message: Stage) -> StagedPull | None:
        """What its first Stage makes of a pull; None: one side has no ring."""
        theirs, table = pull.session.staging, pull.session.table
        if self._ring is None or theirs is None or table is None:
            return None
        return StagedPull(pull, transfer, table, min(self._ring.offer.slot_bytes, theirs.slot_bytes), message)

    def _beyond_pull(self, staged: StagedPull) -> bool:
        """Whether it asks for what its Pull did not, and so for what nobody has checked."""
        ranges, consumer = staged.asked.ranges, staged.consumer_table
        if len(ranges) != len(consumer.groups):
            return True
        for theirs, ours in {(cut.consumer_region, cut.producer_region) for cut in staged.asked.cuts}:
            if theirs >= len(consumer.regions) or ours >= len(self._table.regions):
                return True
            group = self._table.groups[self._table.regions[ours].group]
            wanted, granted = ranges[consumer.regions[theirs].group], staged.pull.ranges[group.index]
            other_state = group.is_state and wanted.end != granted.end
            if wanted.count and (wanted.start < granted.start or wanted.end > granted.end or other_state):
                return True
        return False

    def _want(self, staged: StagedPull, message: Stage) -> None:
        repeated = staged.asked is not message and staged.asked.serial == message.serial
        staged.asked = message
        self._drop_chunks(staged, [number for number in staged.chunks if number not in message.wanted])
        if staged.refused:
            self._refuse(staged)
            self._serve()
        else:
            self._add_chunks(staged, message, repeated=repeated)

    def _add_chunks(self, staged: StagedPull, message: Stage, *, repeated: bool) -> None:
        for number in message.wanted:
            staged.chunks.setdefault(number, ShelfChunk(number))
        told = repeated and self._tell_again(staged)
        if staged not in self._serve(staged) and not told:
            self._answer(staged.pull, Waiting(*staged.pull.key))

    def _tell_again(self, staged: StagedPull) -> bool:
        """Whether there was anything to tell."""
        ready = [chunk for chunk in staged.chunks.values() if chunk.state is Shelved.STAGED]
        for chunk in ready:
            self._tell(staged, chunk)
        return bool(ready)

    def _serve(self, fresh: StagedPull | None = None) -> set[StagedPull]:
        """Hand out what slots there are; the pulls that got any."""
        if fresh is not None:
            self._slots.want(fresh, len(fresh.waiting))
        served = set()
        while (taken := self._slots.take()) is not None:
            self._gather(*taken)
            served.add(taken[0])
        return served

    def _gather(self, staged: StagedPull, slot: Slot) -> None:
        chunk = staged.waiting[0]
        chunk.step(ShelvedEvent.SLOT)
        chunk.slot = slot
        gather_id = GatherId(next(self._counter))
        self._gathers[gather_id] = (staged, chunk)
        self._out.append(
            Gather(
                gather_id=gather_id,
                request_id=staged.transfer.request_id,
                consumer=staged.pull.session.consumer,
                consumer_table=staged.consumer_table,
                cuts=staged.asked.cuts,
                ranges=staged.asked.ranges,
                chunk=chunk.number,
                chunk_bytes=staged.chunk_bytes,
                blocks=staged.transfer.blocks,
                slot=slot,
            )
        )

    def _tell(self, staged: StagedPull, chunk: ShelfChunk) -> None:
        if self._ring is None or chunk.slot is None:
            return
        address = self._ring.address_of(chunk.slot)
        message = Staged(*staged.pull.key, chunk.number, address, chunk.length_bytes, chunk.gather_us)
        self._answer(staged.pull, message)

    def _give_up(self, staged: StagedPull, failed: ShelfChunk, now: float) -> None:
        """One chunk cannot be gathered: the consumer reads the whole pull directly.

        What it was told of stays until it says so: it may be reading it, and does not know yet.
        """
        failed.step(ShelvedEvent.FAILED)
        del staged.chunks[failed.number]
        self._give_back(failed)
        staged.refused = True
        self._slots.want(staged, 0)
        unread = [number for number, chunk in staged.chunks.items() if chunk.state is not Shelved.STAGED]
        self._drop_chunks(staged, unread)
        if staged.pull.holds_lease(now):
            self._refuse(staged)

    def _refuse(self, staged: StagedPull) -> None:
        if staged.asked.wanted:
            self._answer(staged.pull, Gone(*staged.pull.key, GoneReason.NO_STAGING))

    def _clear(self, staged: StagedPull) -> None:
        self._drop_chunks(staged, list(staged.chunks))
        self._slots.want(staged, 0)

    def _drop_chunks(self, staged: StagedPull, numbers: Collection[int]) -> None:
        for number in numbers:
            chunk = staged.chunks.pop(number)
            filling = chunk.state is Shelved.FILLING
            chunk.step(ShelvedEvent.DROP)
            if filling and chunk.slot is not None:
                self._slots.quarantine(chunk.slot)
            else:
                self._give_back(chunk)

    def _give_back(self, chunk: ShelfChunk) -> None:
        if chunk.slot is not None:
            self._slots.give_back(chunk.slot)

    def _free_doomed(self, chunk: ShelfChunk, outcome: GatherOutcome) -> None:
        chunk.step(ShelvedEvent.FILLED if outcome.error is None else ShelvedEvent.FAILED)
        if chunk.slot is not None:
            self._slots.end_quarantine(chunk.slot)

    def _notice(self, staged: StagedPull, chunk: ShelfChunk, error: str) -> None:
        text = f"request {staged.transfer.request_id}: chunk {chunk.number} cannot be staged: {error}"
        self._out.append(Notice(Level.WARNING, f"{text}; {staged.pull.session.consumer} is told to read directly"))

    def _answer(self, pull: PullEntry, message: ProducerMessage) -> None:
        self._out.append(Reply(pull.peer, message))


def _differs(first: Stage, later: Stage) -> bool:
    """Whether they are of two ways to cut the pull; a number would not name one chunk any more."""
    return (first.ranges, first.cuts) != (later.ranges, later.cuts)
