"""Deadlines of many keys, one per key, without a clock."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Timers(Generic[Key]):
    """At most one due time per key. Moving or dropping one is cheap: stale heap entries are skipped."""

    def __init__(self) -> None:
        self._due: dict[Key, float] = {}
        self._heap: list[tuple[float, int, Key]] = []
        self._order = 0

    def __len__(self) -> int:
        return len(self._due)

    def arm(self, key: Key, when: float) -> None:
        """Set or move the due time of `key`."""
        if self._due.get(key) == when:
            return
        self._due[key] = when
        self._order += 1
        heapq.heappush(self._heap, (when, self._order, key))
        if len(self._heap) > 64 + 4 * len(self._due):
            self._rebuild()

    def disarm(self, key: Key) -> None:
        """Forget `key`; unknown keys are ignored."""
        self._due.pop(key, None)

    def next_due(self) -> float | None:
        """The earliest due time; None: nothing is armed."""
        heap, due = self._heap, self._due
        while heap and due.get(heap[0][2]) != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def expired(self, now: float) -> Iterator[Key]:
        """Keys due at or before `now`, earliest first, each disarmed as it is yielded."""
        while (due := self.next_due()) is not None and due <= now:
            key = heapq.heappop(self._heap)[2]
            del self._due[key]
            yield key

    def _rebuild(self) -> None:
        self._heap = [(when, order, key) for order, (key, when) in enumerate(self._due.items())]
        self._order = len(self._heap)
        heapq.heapify(self._heap)
