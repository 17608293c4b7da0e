"""Carrying out StartRead, StartChunk, ExtendRead, StopRead and FenceRead in worker threads."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias

import numpy as np

from mooncake_hetero_tp.core.binding import Descriptors, TailView, bind, tail_views
from mooncake_hetero_tp.core.cost import Choice
from mooncake_hetero_tp.core.effects import (
    BlockIds,
    ExtendRead,
    FenceRead,
    Plan,
    ReadId,
    ReadOutcome,
    StartChunk,
    StartRead,
    StopRead,
)
from mooncake_hetero_tp.core.forecast import Forecast, forecast
from mooncake_hetero_tp.core.regions import RankTable
from mooncake_hetero_tp.errors import HeteroTPError, LocalUsageError, TransferError
from mooncake_hetero_tp.io.choosing import Chooser, pull_key
from mooncake_hetero_tp.io.packer import Packer, StagedPull
from mooncake_hetero_tp.io.pool import WorkerPool
from mooncake_hetero_tp.io.transfer import Deadline, ReadFailed, ReadTally, TransferEngine
from mooncake_hetero_tp.types import RequestId, TokenRange

logger = logging.getLogger(__name__)

_Arguments: TypeAlias = tuple[Plan, tuple[TokenRange, ...], tuple[BlockIds, ...], tuple[BlockIds, ...]]
ClearTails = Callable[[Iterable[TailView]], None]
"""Zeroes tails; returns only when they are zero for whoever reads the cache next."""


Start: TypeAlias = StartRead | StartChunk
ReadEffect: TypeAlias = StartRead | StartChunk | ExtendRead | StopRead | FenceRead


def _arguments(start: StartRead) -> _Arguments:
    return start.plan, start.ranges, start.producer_blocks, start.consumer_blocks


class ReadDone(NamedTuple):
    """One read that has returned."""

    start: Start
    outcome: ReadOutcome
    tally: ReadTally
    seconds: float
    choice: Choice | None = None
    """How a pull is to be moved, and why; of a StartRead that could be staged."""


@dataclass(slots=True)
class _Running:
    start: Start
    deadline: Deadline


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadTools:
    """What reads need and share."""

    engine: TransferEngine
    table: RankTable
    clear_tails: ClearTails
    clock: Callable[[], float]
    null_block: int | None
    packer: Packer | None = None
    """Our ring; None: nothing is staged."""
    chooser: Chooser | None = None


class _Read(NamedTuple):
    """A read that went well."""

    tally: ReadTally
    returned_at: float
    chunks: int = 0
    choice: Choice | None = None


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
            case StartRead() | StartChunk():
                self._start(effect)
            case ExtendRead(read_id, at):
                if (deadline := self._deadline(read_id)) is not None:
                    deadline.extend(at)
            case StopRead(read_id):
                if (deadline := self._deadline(read_id)) is not None:
                    deadline.stop()
            case FenceRead():
                self.pool.submit(lambda: self._fence(effect))

    def _start(self, start: Start) -> None:
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

    def _run(self, start: Start, deadline: Deadline) -> None:
        began = time.perf_counter()
        outcome, read = self._outcome(start, deadline)
        with self._lock:
            self._running.pop(start.read_id, None)
        self.done(ReadDone(start, outcome, read.tally, time.perf_counter() - began, read.choice))

    def _outcome(self, start: Start, deadline: Deadline) -> tuple[ReadOutcome, _Read]:
        try:
            read = self._chunk(start, deadline) if isinstance(start, StartChunk) else self._read(start, deadline)
        except ReadFailed as error:
            return self._failed(str(error), dead=not error.may_still_write)
        except HeteroTPError as error:
            return self._failed(str(error), dead=True)
        except Exception as error:  # a bug, or memory: whatever it is, the read has an outcome
            logger.exception("read %d of request %s failed unexpectedly", start.read_id, start.request_id)
            return self._failed(repr(error), dead=False)
        tally = read.tally
        return ReadOutcome(True, read.returned_at, tally.bytes, tally.descriptors, chunks=read.chunks), read

    def _read(self, start: StartRead, deadline: Deadline) -> _Read:
        """Read a pull directly, or say in how many chunks it is to be staged."""
        chooser = self.tools.chooser
        expected = self._forecast(start)
        chosen = None if chooser is None else chooser.choose(start, expected, deadline)
        choice = None if chosen is None else chosen.choice
        if chosen is not None and chosen.chunks:
            self._clear_tails(start)
            return _Read(ReadTally(), self.tools.clock(), chosen.chunks, choice)
        tally, returned_at = self._moved(start, expected.bound or self._bound(start), deadline)
        self._clear_tails(start)
        return _Read(tally, returned_at, choice=choice)

    def _forecast(self, start: StartRead) -> Forecast:
        """What reading it directly takes; it is bound at once where it will be read so in any case."""
        if start.staging is not None:
            return forecast(*_arguments(start), null_block=self.tools.null_block)
        bound = self._bound(start)
        return Forecast(bound.count, bound.bytes, bound)

    def _bound(self, start: StartRead) -> Descriptors:
        return bind(*_arguments(start), null_block=self.tools.null_block)

    def _moved(self, start: Start, descriptors: Descriptors, deadline: Deadline) -> tuple[ReadTally, float]:
        """Read, and when the engine call returned."""
        tools, peer = self.tools, start.transport_session
        with ExitStack() as watch:
            chunk = isinstance(start, StartChunk)
            tallies = [] if tools.chooser is None else watch.enter_context(tools.chooser.watching(peer, chunk=chunk))
            tally = tools.engine.read(peer, descriptors, deadline=deadline)
            returned_at = tools.clock()
            tallies.append(tally)
        return tally, returned_at

    def _clear_tails(self, start: StartRead) -> None:
        self.tools.clear_tails(tail_views(self.tools.table, start.ranges, start.consumer_blocks))

    def _chunk(self, start: StartChunk, deadline: Deadline) -> _Read:
        """Read one chunk into its slot and, if it came in time, scatter it."""
        tools, packer = self.tools, self.tools.packer
        if packer is None:
            raise LocalUsageError("a staged chunk for a worker without a staging ring")
        if tools.chooser is not None:
            tools.chooser.answered(start)
        source, target, length = (
            np.array([number], np.int64)
            for number in (start.address, packer.ring.address_of(start.slot), start.length_bytes)
        )
        tally, returned_at = self._moved(start, Descriptors(source, target, length), deadline)
        if deadline.stopped or returned_at >= deadline.at:
            raise ReadFailed(f"chunk {start.chunk} came too late; it is not unpacked")
        pull = StagedPull(start.plan, start.ranges, start.chunk_bytes, start.consumer_blocks)
        packer.prepare_unpack(pull_key(start), pull)  # tables that had to make room take long, and are no scatter
        began = time.perf_counter()
        payload = packer.unpack(pull_key(start), pull, start.chunk, start.slot, start.length_bytes)
        if tools.chooser is not None:
            tools.chooser.unpacked(start, scatter_s=time.perf_counter() - began)
        return _Read(replace(tally, bytes=payload), returned_at)

    def _failed(self, error: str, *, dead: bool) -> tuple[ReadOutcome, _Read]:
        now = self.tools.clock()
        return ReadOutcome(False, now, error=error, transport_dead=dead), _Read(ReadTally(), now)
