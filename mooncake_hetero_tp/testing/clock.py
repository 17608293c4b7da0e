"""A clock that only moves when told."""

from __future__ import annotations

import threading
from collections.abc import Callable

from mooncake_hetero_tp.errors import LocalUsageError


class FakeClock:
    """Monotonic seconds that move only by `advance`; call it like `time.monotonic`."""

    def __init__(self, start: float = 1000.0) -> None:
        self._now = start
        self._lock = threading.Lock()
        self._watchers: list[Callable[[], None]] = []

    def __call__(self) -> float:
        return self._now

    def advance(self, seconds: float) -> float:
        """Move on and tell the watchers; the new time."""
        if seconds < 0:
            raise LocalUsageError(f"advance by {seconds:g} s: a monotonic clock does not go back")
        with self._lock:
            self._now += seconds
            watchers = list(self._watchers)
        for watcher in watchers:
            watcher()
        return self._now

    def subscribe(self, watcher: Callable[[], None]) -> None:
        """Call `watcher` after every advance (say, a runtime's `wake`)."""
        with self._lock:
            self._watchers.append(watcher)
