"""What a producer rank remembers of transfers that have ended, bounded in number and time."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from mooncake_hetero_tp.core.messages import GoneReason
from mooncake_hetero_tp.types import TransferId

MAX_RELEASED: Final = 64
"""Consumer engines remembered per transfer as having released it; one is the rule, a retry makes two."""


@dataclass(slots=True)
class Tombstone:
    """A transfer that has ended here, or was released before it was kept."""

    reason: GoneReason
    until: float
    early: bool
    """Released before the producer finished: what is kept under this id goes at once."""
    released_by: set[int]
    """Tags of consumer engines that released it; see `engine_tag`."""

    def add_release(self, tag: int) -> None:
        if len(self.released_by) < MAX_RELEASED:
            self.released_by.add(tag)


class Tombstones:
    """At most `limit` ended transfers, each for `seconds`; the oldest makes room."""

    def __init__(self, limit: int, seconds: float) -> None:
        self._limit = limit
        self._seconds = seconds
        self._stones: OrderedDict[TransferId, Tombstone] = OrderedDict()

    def __len__(self) -> int:
        return len(self._stones)

    def get(self, transfer_id: TransferId) -> Tombstone | None:
        return self._stones.get(transfer_id)

    def put(
        self, transfer_id: TransferId, reason: GoneReason, now: float, *, released_by: set[int], early: bool = False
    ) -> None:
        """Remember the end of a transfer; replaces an older one of the same id."""
        self._stones.pop(transfer_id, None)
        self._stones[transfer_id] = Tombstone(reason, now + self._seconds, early, released_by)
        if len(self._stones) > self._limit:
            self._stones.popitem(last=False)

    def pop(self, transfer_id: TransferId) -> Tombstone | None:
        return self._stones.pop(transfer_id, None)

    def expire(self, now: float) -> None:
        while self._stones and next(iter(self._stones.values())).until <= now:
            self._stones.popitem(last=False)

    def next_due(self) -> float | None:
        return next(iter(self._stones.values())).until if self._stones else None
