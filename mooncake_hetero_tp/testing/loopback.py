"""Transfer engines of one process: they really copy bytes, and fail, wait and spoil them when told."""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Final

import numpy as np
import numpy.typing as npt

from mooncake_hetero_tp.core.binding import Descriptors
from mooncake_hetero_tp.core.regions import Buffer
from mooncake_hetero_tp.errors import LocalUsageError
from mooncake_hetero_tp.io.transfer import Deadline, ReadFailed, ReadTally

_SPOILED: Final = 0x40
"""What `flip_byte` XORs into the byte."""


class LoopbackFabric:
    """The engines that can reach each other, by session."""

    def __init__(self) -> None:
        self._engines: dict[str, LoopbackEngine] = {}
        self._numbers = count(1)
        self._lock = threading.Lock()

    def join(self, engine: LoopbackEngine) -> str:
        """A session name for an engine."""
        with self._lock:
            name = f"loopback:{next(self._numbers)}"
            self._engines[name] = engine
            return name

    def leave(self, session: str) -> None:
        with self._lock:
            self._engines.pop(session, None)

    def find(self, session: str) -> LoopbackEngine | None:
        with self._lock:
            return self._engines.get(session)


@dataclass(slots=True)
class _Faults:
    """What the next reads suffer."""

    fail: int = 0
    keep_writing: bool = False
    flips: int = 0
    delay_s: float = 0.0
    shuffle: random.Random | None = None
    gate: threading.Event | None = None


@dataclass(slots=True)
class _Leftover:
    """Copies of a failed read that go on until it is fenced."""

    session: str
    descriptors: Descriptors


class LoopbackEngine:
    """A `TransferEngine` that copies by address inside this process, and fails when told to.

    Sources must lie in the peer's registered memory and destinations in our own, as with RDMA.
    """

    def __init__(self, fabric: LoopbackFabric, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._fabric = fabric
        self._clock = clock
        self._session = fabric.join(self)
        self._buffers: list[Buffer] = []
        self._faults = _Faults()
        self._leftovers: list[_Leftover] = []
        self._lock = threading.Lock()
        self._running = 0
        self._closed = False
        self.calls = 0
        """Engine calls so far, failed ones included."""

    # --- faults ----------------------------------------------------------------------------------

    def fail(self, times: int = 1, *, keep_writing: bool = False) -> None:
        """Let the next calls fail.

        With `keep_writing` nothing is copied before the failure; `write_leftovers` copies it until the
        read is fenced, as Mooncake goes on with what a failed batch has queued.
        """
        with self._lock:
            self._faults.fail, self._faults.keep_writing = times, keep_writing

    def flip_byte(self, times: int = 1) -> None:
        """Let the next calls succeed with one wrong byte, the last one."""
        with self._lock:
            self._faults.flips = times

    def delay(self, seconds: float) -> None:
        """Let every call take so much longer, in real time."""
        with self._lock:
            self._faults.delay_s = seconds

    def reorder(self, seed: int | None) -> None:
        """Copy the descriptors of a call in a random order; None: in theirs."""
        with self._lock:
            self._faults.shuffle = None if seed is None else random.Random(seed)  # noqa: S311 - a test's dice

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Let calls hang before they copy anything, until the block is left."""
        gate = threading.Event()
        with self._lock:
            self._faults.gate = gate
        try:
            yield
        finally:
            with self._lock:
                self._faults.gate = None
            gate.set()

    @property
    def running(self) -> int:
        """Calls that have not returned."""
        return self._running

    def write_leftovers(self) -> int:
        """Do the copies that failed calls left behind; how many."""
        with self._lock:
            leftovers = list(self._leftovers)
        for leftover in leftovers:
            _copy(leftover.descriptors)
        return len(leftovers)

    # --- TransferEngine --------------------------------------------------------------------------

    @property
    def transport_session(self) -> str:
        return self._session

    @property
    def registered(self) -> tuple[Buffer, ...]:
        """What is registered now."""
        return tuple(self._buffers)

    def register(self, buffers: Sequence[Buffer]) -> None:
        if self._closed:
            raise LocalUsageError("register: the engine is closed")
        self._buffers = list(buffers)

    def read(self, transport_session: str, descriptors: Descriptors, *, deadline: Deadline) -> ReadTally:
        self._check(deadline)
        with self._lock:
            self._running += 1
            self.calls += 1
        try:
            self._call(transport_session, descriptors)
        finally:
            with self._lock:
                self._running -= 1
        self._check(deadline)
        tally = ReadTally()
        tally.count(descriptors, retries=0)
        return tally

    def _check(self, deadline: Deadline) -> None:
        if deadline.stopped:
            raise ReadFailed("the read was stopped")
        if self._clock() >= deadline.at:
            raise ReadFailed("the read is past its deadline")

    def _call(self, session: str, descriptors: Descriptors) -> None:
        peer = self._fabric.find(session)
        if peer is None or self._closed:
            raise ReadFailed(f"no engine with session {session}")
        _require(peer.registered, descriptors.src, descriptors.length, f"sources of {session}")
        _require(self.registered, descriptors.dst, descriptors.length, "destinations")
        faults = self._take_faults()
        if faults.gate is not None:
            faults.gate.wait()
        if self._closed:
            raise ReadFailed("the engine was closed")
        time.sleep(faults.delay_s)
        if faults.fail:
            if faults.keep_writing:
                with self._lock:
                    self._leftovers.append(_Leftover(session, descriptors))
            raise ReadFailed("the loopback engine was told to fail", may_still_write=faults.keep_writing)
        _copy(_shuffled(descriptors, faults.shuffle))
        if faults.flips and descriptors.count:
            last = int(descriptors.dst[-1] + descriptors.length[-1]) - 1
            ctypes.c_ubyte.from_address(last).value ^= _SPOILED

    def _take_faults(self) -> _Faults:
        with self._lock:
            now = self._faults
            taken = _Faults(now.fail, now.keep_writing, now.flips, now.delay_s, now.shuffle, now.gate)
            now.fail = max(now.fail - 1, 0)
            now.flips = max(now.flips - 1, 0)
        return taken

    def fence(self, transport_session: str) -> None:
        with self._lock:
            self._leftovers = [left for left in self._leftovers if left.session != transport_session]

    def close(self) -> bool:
        with self._lock:
            self._closed = True
            self._leftovers.clear()
            self._buffers = []
        self._fabric.leave(self._session)
        return True


def _require(
    buffers: Sequence[Buffer], starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], what: str
) -> None:
    inside = np.zeros(starts.size, dtype=bool)
    for buffer in buffers:
        inside |= (starts >= buffer.address) & (starts + lengths <= buffer.address + buffer.length_bytes)
    if not inside.all():
        first = int(np.argmin(inside))
        raise ReadFailed(f"{what}: {lengths[first]} bytes at {starts[first]:#x} are not in registered memory")


def _shuffled(descriptors: Descriptors, dice: random.Random | None) -> Descriptors:
    if dice is None:
        return descriptors
    order = list(range(descriptors.count))
    dice.shuffle(order)
    return Descriptors(descriptors.src[order], descriptors.dst[order], descriptors.length[order])


def _copy(descriptors: Descriptors) -> None:
    columns = (descriptors.dst.tolist(), descriptors.src.tolist(), descriptors.length.tolist())
    for dst, src, length in zip(*columns, strict=True):
        ctypes.memmove(dst, src, length)
