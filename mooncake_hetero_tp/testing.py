"""Doubles that behave: an engine that really copies bytes, a clock that only moves when told, a wired pair.

For this package's tests and for those of who builds on it; nothing in the package imports this module.
"""

from __future__ import annotations

import ctypes
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from mooncake_hetero_tp.config import HostPort
from mooncake_hetero_tp.core.binding import Descriptors
from mooncake_hetero_tp.core.consumer import ConsumerConfig
from mooncake_hetero_tp.core.cost import Mode
from mooncake_hetero_tp.core.effects import BlockIds, Kept, PullRequest
from mooncake_hetero_tp.core.producer import ProducerConfig
from mooncake_hetero_tp.core.regions import Buffer, RankTable
from mooncake_hetero_tp.errors import LocalUsageError
from mooncake_hetero_tp.io.release import ReleaseClient
from mooncake_hetero_tp.io.runtime import RuntimeConfig, StepWork, WorkerRuntime
from mooncake_hetero_tp.io.staging import RingSize
from mooncake_hetero_tp.io.transfer import Deadline, ReadFailed, ReadTally, TransferEngine
from mooncake_hetero_tp.types import EngineId, Identity, Incarnation, Rank, RequestId, TokenRange, TransferId

_SPOILED: Final = 0x40
"""What `flip_byte` XORs into the byte."""


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


# --- a wired pair --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """One hand-over through a pair: what every producer rank keeps and every consumer rank loads."""

    transfer_id: TransferId
    computed_tokens: int
    producer_blocks: tuple[BlockIds, ...]
    consumer_blocks: tuple[BlockIds, ...]
    ranges: tuple[TokenRange, ...]

    @property
    def producer_request(self) -> RequestId:
        return RequestId(f"p-{self.transfer_id}")

    @property
    def consumer_request(self) -> RequestId:
        return RequestId(f"d-{self.transfer_id}")


@dataclass(slots=True)
class Ended:
    """What the workers of a pair have reported so far, by rank."""

    sending: dict[Rank, set[RequestId]] = field(default_factory=dict)
    recving: dict[Rank, set[RequestId]] = field(default_factory=dict)
    failed: dict[Rank, set[RequestId]] = field(default_factory=dict)


class LinkedPair:
    """A producer engine and a consumer engine in this process, over real ZMQ and HTTP on 127.0.0.1.

    `make_engine(serves)` gives each rank its transfer engine, loopback or Mooncake. A context manager:
    entering starts everything, leaving closes it.
    """

    def __init__(
        self,
        producers: Mapping[Rank, RankTable],
        consumers: Mapping[Rank, RankTable],
        make_engine: Callable[[bool], TransferEngine],
        *,
        producer_config: ProducerConfig | None = None,
        consumer_config: ConsumerConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
        num_workers: int = 2,
        close_timeout_s: float = 3.0,
        transfer_mode: Mode = Mode.AUTO,
        staging: RingSize | None = None,
        stages_for_others: bool = True,
    ) -> None:
        """`stages_for_others`: whether producers have a ring too."""
        self.producer_id = EngineId("producer-engine")
        self.consumer_id = EngineId("consumer-engine")
        self.producers: dict[Rank, WorkerRuntime] = {}
        self.consumers: dict[Rank, WorkerRuntime] = {}
        self.releases = ReleaseClient(self.consumer_id, connector_timeout_s=5.0, clock=clock)
        self.ended = Ended()
        self.bootstrap = ""
        """What a proxy would pass as `remote_bootstrap_addr`; known once started."""
        self._tables = (dict(producers), dict(consumers))
        self._configs = (producer_config or ProducerConfig(), consumer_config or ConsumerConfig())
        self._make_engine = make_engine
        self._producer_staging = staging if stages_for_others else None
        self._clock = clock
        self._options: dict[str, Any] = {
            "host": "127.0.0.1",
            "num_workers": num_workers,
            "connector_timeout_s": 5.0,
            "close_timeout_s": close_timeout_s,
            "transfer_mode": transfer_mode,
            "staging": staging,
        }

    def __enter__(self) -> Self:
        producers, consumers = self._tables
        try:
            for rank, table in sorted(producers.items()):
                self.producers[rank] = self.start_producer(rank, table)
            self.bootstrap = f"http://{self._owner().bootstrap}"
            for rank, table in sorted(consumers.items()):
                config = RuntimeConfig(consumer=self._configs[1], **self._options)
                self.consumers[rank] = self._start(config, self.consumer_id, rank, table)
            self.releases.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _owner(self) -> WorkerRuntime:
        return self.producers[min(self.producers)]

    def start_producer(self, rank: Rank, table: RankTable) -> WorkerRuntime:
        """A started producer worker, a fresh process as far as others can see; the first runs the bootstrap."""
        config = RuntimeConfig(
            producer=self._configs[0],
            bootstrap_bind=None if self.producers else HostPort("127.0.0.1", 0),
            bootstrap_address=self._owner().bootstrap if self.producers else None,
            **(self._options | {"staging": self._producer_staging}),
        )
        return self._start(config, self.producer_id, rank, table)

    def _start(self, config: RuntimeConfig, engine_id: EngineId, rank: Rank, table: RankTable) -> WorkerRuntime:
        identity = Identity(engine_id, Incarnation(secrets.token_hex(8)), rank)
        engine = self._make_engine(config.producer is not None)
        runtime = WorkerRuntime(config, identity, table, engine, clock=self._clock)
        if isinstance(self._clock, FakeClock):
            self._clock.subscribe(runtime.wake)
        runtime.start()
        return runtime

    def keep(self, load: Load, *, ready: bool = True) -> None:
        """Every producer rank keeps the blocks of the load."""
        kept = Kept(load.producer_request, load.transfer_id, load.producer_blocks, load.computed_tokens, ready)
        for runtime in self.producers.values():
            runtime.submit(StepWork(kept=[kept]))

    def pull(self, load: Load) -> None:
        """Every consumer rank begins to load."""
        for runtime in self.consumers.values():
            asked = PullRequest(
                load.consumer_request,
                load.transfer_id,
                self.producer_id,
                self.bootstrap,
                load.ranges,
                load.consumer_blocks,
            )
            runtime.submit(StepWork(pulls=[asked]))

    def release(self, load: Load) -> None:
        """The consumer's scheduler releases the transfer."""
        self.releases.release(load.transfer_id, self.producer_id, self.bootstrap)

    def collect(self) -> Ended:
        """Everything that all workers have reported so far."""
        for rank, runtime in self.producers.items():
            self.ended.sending.setdefault(rank, set()).update(runtime.collect().sending)
        for rank, runtime in self.consumers.items():
            finished = runtime.collect()
            self.ended.recving.setdefault(rank, set()).update(finished.recving)
            self.ended.failed.setdefault(rank, set()).update(finished.failed)
        return self.ended

    def wait(self, done: Callable[[Ended], bool], timeout_s: float = 20.0) -> Ended:
        """Collect until `done`.

        Raises:
            TimeoutError: it does not come, in real time.
        """
        end = time.monotonic() + timeout_s
        while not done(self.collect()):
            if time.monotonic() >= end:
                raise TimeoutError(f"not reached within {timeout_s:g} s; reported so far: {self.ended}")
            time.sleep(0.002)
        return self.ended

    def wait_loaded(self, load: Load, timeout_s: float = 20.0) -> bool:
        """Wait until every consumer rank has reported the load; whether all succeeded."""
        wanted = load.consumer_request
        ended = self.wait(lambda ended: all(wanted in found for found in ended.recving.values()), timeout_s)
        return not any(wanted in found for found in ended.failed.values())

    def wait_freed(self, load: Load, timeout_s: float = 20.0) -> None:
        """Wait until every producer rank has said that the blocks are free."""
        wanted = load.producer_request
        self.wait(lambda ended: all(wanted in found for found in ended.sending.values()), timeout_s)

    def close(self) -> None:
        """Close everything; idempotent."""
        self.releases.close()
        for side in (self.consumers, self.producers):
            threads = [threading.Thread(target=runtime.close) for runtime in side.values()]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
