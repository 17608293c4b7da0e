"""A consumer and a producer machine with rings, wired by hand, and drivers that gather and read when told to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mooncake_hetero_tp.core.effects import Gather, GatherOutcome, ReadId, ReadOutcome, StartChunk
from mooncake_hetero_tp.core.messages import Offer
from tests.machines import Pair, consumer_machine, kept, only, producer_machine, pull_request, ring


class StagedPair(Pair):
    """Every load asks to be staged in `chunks` chunks; gathers return well at once unless `slow`."""

    def __init__(self, *, slots: int = 4, our_slots: int = 4, window: int = 3, chunks: int = 6) -> None:
        consumer = consumer_machine(staging=Offer(64, our_slots), staging_window=window)
        super().__init__(consumer, {"p0:1": producer_machine(ring=ring(100, slots))})
        self.chunks = chunks
        self.slow = False
        self.fails: set[int] = set()
        """Chunks whose gather fails."""

    def load(self, request: str = "d-1", transfer: str = "xfer-1") -> None:
        """Kept, pulled, granted, and its read has asked for chunks."""
        self.keep(kept(request.replace("d", "p"), transfer))
        self.start(pull_request(request, transfer))
        self.finish(self.reads[-1].read_id, chunks=self.chunks)

    def finish(self, read_id: ReadId, *, returned_at: float | None = None, **outcome: Any) -> None:
        """A read or chunk returns (well, unless told otherwise)."""
        at = self.now if returned_at is None else returned_at
        result = ReadOutcome(**{"ok": True, "returned_at": at, **outcome})
        self.deliver(self.consumer.read_finished(read_id, result, self.now))

    def deliver_replies(self, address: str, effects: Sequence[Any]) -> None:
        super().deliver_replies(address, effects)
        if not self.slow:
            self.gather()

    def gather(self) -> None:
        """Every gather returns."""
        while gathers := only(self.told, Gather):
            self.told.remove(gathers[0])
            error = "no kernel" if gathers[0].chunk in self.fails else None
            outcome = GatherOutcome(60, 7, error)
            super().deliver_replies("p0:1", self.producers["p0:1"].gathered(gathers[0].gather_id, outcome, self.now))

    @property
    def started(self) -> list[StartChunk]:
        return only(self.effects, StartChunk)

    @property
    def running(self) -> list[StartChunk]:
        """Chunks whose reads have not returned."""
        reads = self.consumer._reader.stagings
        return [start for start in self.started if reads.running(start.read_id) is not None]

    def finish_all(self) -> list[int]:
        """Let every chunk return well, the oldest first; their numbers."""
        numbers = []
        while running := self.running:
            numbers.append(running[0].chunk)
            self.finish(running[0].read_id)
        return numbers

    def names(self) -> list[str]:
        return [name for name, _ in self.carried]

    @property
    def slots_are_home(self) -> bool:
        producer = self.producers["p0:1"]
        return bool(self.consumer._reader.stagings._slots.all_home and producer._shelf._slots.all_home)
