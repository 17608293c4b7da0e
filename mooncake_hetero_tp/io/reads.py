"""Carrying out StartRead, ExtendRead, StopRead and FenceRead in worker threads."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from mooncake_hetero_tp.core.binding import TailView, bind, tail_views
from mooncake_hetero_tp.core.effects import ExtendRead, FenceRead, ReadId, ReadOutcome, StartRead, StopRead
from mooncake_hetero_tp.core.regions import RankTable
from mooncake_hetero_tp.errors import HeteroTPError, TransferError
from mooncake_hetero_tp.io.pool import WorkerPool
from mooncake_hetero_tp.io.transfer import Deadline, ReadFailed, ReadTally, TransferEngine
from mooncake_hetero_tp.types import RequestId

logger = logging.getLogger(__name__)

ClearTails = Callable[[Iterable[TailView]], None]
"""Zeroes tails; returns only when they are zero for whoever reads the cache next."""


ReadEffect: TypeAlias = StartRead | ExtendRead | StopRead | FenceRead


class ReadDone(NamedTuple):
    """One read that has returned."""

    start: StartRead
    outcome: ReadOutcome
    tally: ReadTally
    seconds: float


@dataclass(slots=True)
class _Running:
    start: StartRead
    deadline: Deadline


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadTools:
    """What reads need and share."""

    engine: TransferEngine
    table: RankTable
    clear_tails: ClearTails
    clock: Callable[[], float]
    null_block: int | None


@dataclass(slots=True)
class Reads:
    """Reads under way. Methods return at once; `done` and `fenced` are called in worker threads."""

    tools: ReadTools
    pool: WorkerPool
    done: Callable[[ReadDone], None]
    fenced: Callable[[ReadId], None]
    _running: dict[ReadId, _Running] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def carry_out(self, effect: ReadEffect) -> None:
        """Queue, extend, stop or fence a read; one that has returned is neither extended nor stopped."""
        match effect:
            case StartRead():
                self._start(effect)
            case ExtendRead(read_id, at):
                if (deadline := self._deadline(read_id)) is not None:
                    deadline.extend(at)
            case StopRead(read_id):
                if (deadline := self._deadline(read_id)) is not None:
                    deadline.stop()
            case FenceRead():
                self.pool.submit(lambda: self._fence(effect))

    def _start(self, start: StartRead) -> None:
        deadline = Deadline(start.deadline)
        with self._lock:
            self._running[start.read_id] = _Running(start, deadline)
        self.pool.submit(lambda: self._run(start, deadline), key=start.transport_session)

    def _deadline(self, read_id: ReadId) -> Deadline | None:
        with self._lock:
            running = self._running.get(read_id)
        return None if running is None else running.deadline

    def stop_all(self) -> None:
        """Start no further engine call at all."""
        with self._lock:
            for running in self._running.values():
                running.deadline.stop()

    def requests(self) -> set[RequestId]:
        """Requests of which a read is queued or running."""
        with self._lock:
            return {running.start.request_id for running in self._running.values()}

    def _fence(self, effect: FenceRead) -> None:
        """Make sure that a failed read cannot write any more, then call `fenced`.

        Every call in the way ends by the transport's own timeout, so this comes to an end.
        """
        while True:
            try:
                self.tools.engine.fence(effect.transport_session)
            except TransferError as error:
                logger.warning("read %d is not fenced yet: %s", effect.read_id, error)
            else:
                break
        self.fenced(effect.read_id)

    def _run(self, start: StartRead, deadline: Deadline) -> None:
        began = time.perf_counter()
        outcome, tally = self._outcome(start, deadline)
        with self._lock:
            self._running.pop(start.read_id, None)
        self.done(ReadDone(start, outcome, tally, time.perf_counter() - began))

    def _outcome(self, start: StartRead, deadline: Deadline) -> tuple[ReadOutcome, ReadTally]:
        try:
            tally, returned_at = self._read(start, deadline)
        except ReadFailed as error:
            return self._failed(str(error), dead=not error.may_still_write), ReadTally()
        except HeteroTPError as error:
            return self._failed(str(error), dead=True), ReadTally()
        except Exception as error:  # a bug, or memory: whatever it is, the read has an outcome
            logger.exception("read %d of request %s failed unexpectedly", start.read_id, start.request_id)
            return self._failed(repr(error), dead=False), ReadTally()
        return ReadOutcome(True, returned_at, tally.bytes, tally.descriptors), tally

    def _read(self, start: StartRead, deadline: Deadline) -> tuple[ReadTally, float]:
        tools = self.tools
        descriptors = bind(
            start.plan, start.ranges, start.producer_blocks, start.consumer_blocks, null_block=tools.null_block
        )
        tally = tools.engine.read(start.transport_session, descriptors, deadline=deadline)
        returned_at = tools.clock()
        tools.clear_tails(tail_views(tools.table, start.ranges, start.consumer_blocks))
        return tally, returned_at

    def _failed(self, error: str, *, dead: bool) -> ReadOutcome:
        return ReadOutcome(False, self.tools.clock(), error=error, transport_dead=dead)
