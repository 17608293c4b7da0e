"""A fixed number of daemon threads that run jobs in order of arrival, with an end that is bounded.

Jobs may have a key, of which only some run at a time: a peer that hangs then holds a few threads, and
not all of them.

Not `concurrent.futures`: its threads are joined without a bound when the interpreter ends, and a
transfer that hangs would then keep a dying engine alive.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from mooncake_hetero_tp.errors import LocalUsageError

logger = logging.getLogger(__name__)

Job = Callable[[], None]


@dataclass(frozen=True, eq=False, slots=True)
class _Keyed:
    job: Job
    key: Hashable


class WorkerPool:
    """`size` threads; a job that raises is logged and the thread goes on."""

    def __init__(self, name: str, size: int, per_key: int | None = None) -> None:
        """`per_key`: how many jobs of one key (other than None) run at a time; None: any number."""
        self._name = name
        self._size = size
        self._per_key = per_key
        self._jobs: deque[_Keyed] = deque()
        self._running: Counter[Hashable] = Counter()
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._closing = False

    def submit(self, job: Job, key: Hashable = None) -> None:
        """Queue a job; never blocks.

        Raises:
            LocalUsageError: the pool is closed.
        """
        with self._changed:
            if self._closing:
                raise LocalUsageError(f"{self._name}: a job for a pool that is closed")
            self._jobs.append(_Keyed(job, key))
            self._start_threads()
            self._changed.notify()

    def _start_threads(self) -> None:
        while len(self._threads) < self._size:
            name = f"{self._name}-{len(self._threads)}"
            thread = threading.Thread(target=self._work, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def _work(self) -> None:
        while (taken := self._next()) is not None:
            try:
                taken.job()
            except Exception:
                logger.exception("%s: a job failed", self._name)
            with self._changed:
                self._running[taken.key] -= 1
                self._running += Counter()  # drops what is zero
                if self._closing:
                    self._changed.notify_all()
            # Nobody else is woken: the one job that may run now is what this thread looks for next.
            del taken  # or its buffers live until the next one comes

    def _next(self) -> _Keyed | None:
        with self._changed:
            while True:
                for taken in self._jobs:
                    if self._may_run(taken.key):
                        self._jobs.remove(taken)
                        self._running[taken.key] += 1
                        return taken
                if self._closing and not self._jobs:
                    return None
                self._changed.wait()

    def _may_run(self, key: Hashable) -> bool:
        return key is None or self._per_key is None or self._running[key] < self._per_key

    def close(self, timeout_s: float, *, drop_queued: bool = False) -> bool:
        """Run or drop what is queued, then end the threads; whether all have ended in time. Idempotent."""
        with self._changed:
            self._closing = True
            if drop_queued:
                self._jobs.clear()
            self._changed.notify_all()
        end = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(end - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)
