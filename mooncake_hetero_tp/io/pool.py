"""A fixed number of daemon threads that run jobs in order of arrival, with an end that is bounded.

Not `concurrent.futures`: its threads are joined without a bound when the interpreter ends, and a
transfer that hangs would then keep a dying engine alive.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from mooncake_hetero_tp.errors import LocalUsageError

logger = logging.getLogger(__name__)

Job = Callable[[], None]


class WorkerPool:
    """`size` threads; a job that raises is logged and the thread goes on."""

    def __init__(self, name: str, size: int) -> None:
        self._name = name
        self._size = size
        self._jobs: deque[Job] = deque()
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._closing = False

    def submit(self, job: Job) -> None:
        """Queue a job; never blocks.

        Raises:
            LocalUsageError: the pool is closed.
        """
        with self._changed:
            if self._closing:
                raise LocalUsageError(f"{self._name}: a job for a pool that is closed")
            self._jobs.append(job)
            self._start_threads()
            self._changed.notify()

    def _start_threads(self) -> None:
        while len(self._threads) < self._size:
            name = f"{self._name}-{len(self._threads)}"
            thread = threading.Thread(target=self._work, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def _work(self) -> None:
        while (job := self._next()) is not None:
            try:
                job()
            except Exception:
                logger.exception("%s: a job failed", self._name)
            del job  # or its buffers live until the next one comes

    def _next(self) -> Job | None:
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._closing)
            return self._jobs.popleft() if self._jobs else None

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
