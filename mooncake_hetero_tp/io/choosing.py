"""Direct or staged, for each pull, by what was measured of the path to its producer rank.

A path is measured when its first pull is about to begin: a few reads in pieces as long as that pull's and a few large
ones, of the peer's registered memory into the scratch space of our own ring. Every transfer refines it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec
import numpy as np

from mooncake_hetero_tp.core.binding import Descriptors
from mooncake_hetero_tp.core.chunks import smallest_slot
from mooncake_hetero_tp.core.cost import Choice, Measured, Mode, Rates, choose
from mooncake_hetero_tp.core.effects import StartChunk, StartRead
from mooncake_hetero_tp.core.forecast import Forecast
from mooncake_hetero_tp.core.regions import Buffer
from mooncake_hetero_tp.errors import TransferError
from mooncake_hetero_tp.io.packer import Packer, StagedPull
from mooncake_hetero_tp.io.staging import SCRATCH_BYTES
from mooncake_hetero_tp.io.transfer import Deadline, ReadTally, TransferEngine

logger = logging.getLogger(__name__)

_MOST_PIECES: Final = 64
_FEWEST_PIECES: Final = 4
"""Longer pieces than a fourth of the scratch space are bound by their bytes."""
_REMEMBERED: Final = 1024
_TRIES: Final = 5
"""The fastest of so many: over TCP, connections take two or three to come up to speed, and any may meet a busy moment."""
_ENDED_PER_RUNNING: Final = 8
"""A path that is never idle is looked at when what still runs, and counts later, is a small part of what it moved."""


def pull_key(start: StartRead | StartChunk) -> Hashable:
    """What the tables of a pull are kept under, from the choice to its last chunk."""
    return start.request_id, start.producer


class Chosen(NamedTuple):
    """How a pull is moved."""

    choice: Choice
    chunks: int
    """0: it is read directly."""


class _Pieces(NamedTuple):
    """Bytes that lie behind each other, cut into descriptors of equal length."""

    number: int
    length_bytes: int

    @property
    def bytes(self) -> int:
        return self.number * self.length_bytes


@dataclass(slots=True)
class _Busy:
    """A time in which at least one read of a path ran; the sums are of those that have ended."""

    since: float
    running: int = 0
    ended: int = 0
    chunks: int = 0
    """Of those that have ended."""
    descriptors: int = 0
    bytes: int = 0

    def end(self, tallies: Iterable[ReadTally], *, chunk: bool) -> None:
        self.running -= 1
        self.ended += 1
        self.chunks += chunk
        for tally in tallies:
            self.descriptors += tally.descriptors
            self.bytes += tally.bytes

    def begin(self, now: float) -> None:
        """Count anew."""
        self.since = now
        self.ended = self.chunks = self.descriptors = self.bytes = 0

    def teach(self, known: Measured, seconds: float) -> Measured:
        """What is known after reads that took so long together; chunks and others at once tell of neither."""
        if not self.chunks:
            return known.read(self.descriptors, self.bytes, seconds)
        return known.staged(self.chunks, self.bytes, seconds) if self.chunks == self.ended else known


@dataclass(slots=True)
class Chooser:
    """Knows the rates of every path of this rank. Thread-safe."""

    mode: Mode
    engine: TransferEngine
    packer: Packer
    _paths: dict[str, Measured] = field(default_factory=dict)
    _busy: dict[str, _Busy] = field(default_factory=dict)
    _asked: OrderedDict[Hashable, float] = field(default_factory=OrderedDict)
    """Staged pulls of which no chunk has come -> when they were about to be asked for."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def choose(self, start: StartRead, expected: Forecast, deadline: Deadline) -> Chosen:
        """How to move a pull; measures the path first where nothing is known of it.

        Raises:
            PlanError: it is to be staged, and our block ids do not fit.
        """
        peer, staging = start.transport_session, start.staging
        if self.mode is Mode.AUTO and staging is not None:
            self._measure(peer, start.plan.producer.buffers[0], expected, deadline)
        chunk_bytes = 0 if staging is None else staging.slot_bytes
        choice = choose(
            self.rates(peer),
            self.mode,
            descriptors=expected.descriptors,
            length_bytes=expected.length_bytes,
            chunks=-(-expected.length_bytes // max(chunk_bytes, 1)),
            slots=0 if staging is None else staging.slots,
            obstacle=_obstacle(start),
        )
        if not expected.length_bytes:
            return Chosen(choice, 0)
        if choice.mode is not Mode.STAGED:
            self._not_staged(peer, choice)
            return Chosen(choice, 0)
        pull = StagedPull(start.plan, start.ranges, chunk_bytes, start.consumer_blocks)
        chunks = self.packer.prepare_unpack(pull_key(start), pull)
        with self._lock:
            self._asked[pull_key(start)] = time.perf_counter()
            while len(self._asked) > _REMEMBERED:  # pulls that ended before their first chunk came
                self._asked.popitem(last=False)
        return Chosen(choice, chunks)

    def _not_staged(self, peer: str, choice: Choice) -> None:
        if self.mode is Mode.AUTO and choice.staged_s is not None:
            with self._lock:
                self._refine_locked(peer, Measured.not_staged)

    def answered(self, chunk: StartChunk) -> None:
        """A chunk is about to be read: the first of a pull tells how long asking takes, waiting for slots included."""
        with self._lock:
            asked = self._asked.pop(pull_key(chunk), None)
            if asked is not None:
                seconds = time.perf_counter() - asked - 1e-6 * chunk.gather_us
                self._refine_locked(chunk.transport_session, lambda known: known.answered(seconds))

    def rates(self, peer: str) -> Rates:
        """What is believed of the path to a peer."""
        with self._lock:
            return self._paths.get(peer, Measured()).rates

    @contextmanager
    def watching(self, peer: str, *, chunk: bool = False) -> Iterator[list[ReadTally]]:
        """Around one read, of a chunk or directly: what it puts into the list counts with all else the path moves then.

        Reads overlap, so what one of them takes says little; what all of them took together is the path's rate.
        """
        with self._lock:
            busy = self._busy.setdefault(peer, _Busy(time.perf_counter()))
            busy.running += 1
        tallies: list[ReadTally] = []
        try:
            yield tallies
        finally:
            with self._lock:
                busy.end(tallies, chunk=chunk)
                self._look_locked(peer, busy)

    def _look_locked(self, peer: str, busy: _Busy) -> None:
        """A read has ended."""
        if busy.ended < _ENDED_PER_RUNNING * busy.running:
            return
        now = time.perf_counter()
        self._refine_locked(peer, lambda known: busy.teach(known, now - busy.since))
        busy.begin(now)
        if not busy.running:
            del self._busy[peer]

    def unpacked(self, chunk: StartChunk, scatter_s: float) -> None:
        """A chunk was packed there and unpacked here."""
        length = chunk.length_bytes
        with self._lock:
            self._refine_locked(
                chunk.transport_session,
                lambda known: known.gathered(length, 1e-6 * chunk.gather_us).scattered(length, scatter_s),
            )

    def _refine_locked(self, peer: str, change: Callable[[Measured], Measured]) -> None:
        self._paths[peer] = change(self._paths.get(peer, Measured()))

    def _measure(self, peer: str, source: Buffer, expected: Forecast, deadline: Deadline) -> None:
        with self._lock:
            if peer in self._paths or not expected.descriptors:
                return
            self._paths[peer] = Measured()  # who comes meanwhile takes the defaults
        try:
            found = self._probe(peer, source, expected.length_bytes // expected.descriptors, deadline)
        except TransferError as error:
            logger.debug("the path to %s was not measured: %s", peer, error)
            return
        with self._lock:
            self._paths[peer] = Measured(found)
        logger.info("path to %s: %s", peer, found)

    def _probe(self, peer: str, source: Buffer, piece_bytes: int, deadline: Deadline) -> Rates:
        """What a descriptor of such pieces takes beyond its call, and how fast the bytes of one long descriptor pass."""
        room = min(SCRATCH_BYTES, source.length_bytes)
        piece = max(min(piece_bytes, SCRATCH_BYTES // _FEWEST_PIECES), 1)
        pieces = min(_MOST_PIECES, room // piece)
        self._timed(peer, source.address, _Pieces(1, 1), deadline)  # connects
        rates = Rates()
        if pieces >= _FEWEST_PIECES:
            call_s, seconds = (self._fastest(peer, source, _Pieces(n, piece), deadline) for n in (1, pieces))
            each = max(seconds - call_s, seconds / 2) / (pieces - 1)  # noise may leave nothing
            rates = msgspec.structs.replace(rates, descriptor_s=each)
        if room == SCRATCH_BYTES:
            seconds = self._fastest(peer, source, _Pieces(1, room), deadline)
            rates = msgspec.structs.replace(rates, bytes_per_s=room / seconds)
        return rates

    def _fastest(self, peer: str, source: Buffer, pieces: _Pieces, deadline: Deadline) -> float:
        """Of a few reads of bytes that lie behind each other, for those that were read before are in a cache."""
        last = source.length_bytes - pieces.bytes
        starts = (source.address + min(turn * pieces.bytes, last) for turn in range(_TRIES))
        return min(self._timed(peer, start, pieces, deadline) for start in starts)

    def _timed(self, peer: str, source: int, pieces: _Pieces, deadline: Deadline) -> float:
        """Seconds to read so many pieces, each as a descriptor of its own."""
        steps = np.arange(pieces.number, dtype=np.int64) * pieces.length_bytes
        lengths = np.full(pieces.number, pieces.length_bytes, np.int64)
        into = self.packer.ring.scratch + steps
        began = time.perf_counter()
        self.engine.read(peer, Descriptors(source + steps, into, lengths), deadline=deadline)
        return max(time.perf_counter() - began, 1e-9)


def _obstacle(start: StartRead) -> str | None:
    """Why a pull cannot be staged."""
    if start.staging is None:
        return "one of the two sides has no staging memory, or could not pack it"
    needed = smallest_slot(start.plan)
    if needed > start.staging.slot_bytes:
        return f"a piece of {needed} bytes cannot be cut and slots have {start.staging.slot_bytes}"
    return None
