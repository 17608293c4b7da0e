"""What vLLM waits for, and what it has not yet been told: every request in exactly once, out exactly once."""

from __future__ import annotations

import threading
from collections.abc import Collection

from mooncake_hetero_tp.io.work import Finished
from mooncake_hetero_tp.types import RequestId


class Ledger:
    """Open requests and ended ones; any thread, never blocks for longer than a set operation."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: set[RequestId] = set()
        self._loading: set[RequestId] = set()
        self._finished = Finished()

    def open(self, kept: Collection[RequestId], loading: Collection[RequestId]) -> None:
        """From now on vLLM waits for these."""
        with self._lock:
            self._kept.update(kept)
            self._loading.update(loading)

    def withdraw(self, kept: Collection[RequestId], loading: Collection[RequestId]) -> None:
        """Take an `open` back, for what could not be handed over: these are never reported."""
        with self._lock:
            self._kept.difference_update(kept)
            self._loading.difference_update(loading)
            self._finished.sending.difference_update(kept)
            self._finished.recving.difference_update(loading)
            self._finished.failed.difference_update(loading)

    def sent(self, request_id: RequestId) -> bool:
        """A kept request may be freed; False: nobody waits for it."""
        with self._lock:
            if request_id not in self._kept:
                return False
            self._kept.discard(request_id)
            self._finished.sending.add(request_id)
            return True

    def loaded(self, request_id: RequestId, *, failed: bool) -> bool:
        """A load has ended; False: nobody waits for it."""
        with self._lock:
            if request_id not in self._loading:
                return False
            self._loading.discard(request_id)
            self._finished.recving.add(request_id)
            if failed:
                self._finished.failed.add(request_id)
            return True

    def loading(self) -> set[RequestId]:
        """Loads that have not ended."""
        with self._lock:
            return set(self._loading)

    def kept(self) -> set[RequestId]:
        """Requests whose blocks are still kept."""
        with self._lock:
            return set(self._kept)

    def collect(self) -> Finished:
        """What ended since the last call."""
        with self._lock:
            finished, self._finished = self._finished, Finished()
        return finished
