"""One worker's runtime: the driver thread around the protocol machines, and what vLLM's worker calls.

    submit  ->  queue  ->  driver thread: machines  ->  effects: ZMQ frames, reads, queries, ledger
    collect <-  ledger <-

`submit`, `collect` and `stats` take a lock for a moment and never touch the network. If the driver
thread fails, everything under way is reported as failed (or freed, after the engine has ended and
nobody can read or write any more), and later submits raise.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from mooncake_hetero_tp.config import HostPort
from mooncake_hetero_tp.core.consumer import ConsumerConfig, ConsumerMachine
from mooncake_hetero_tp.core.cost import Mode
from mooncake_hetero_tp.core.effects import GatherId, GatherOutcome, Plan, ReadId, Resolve
from mooncake_hetero_tp.core.plan import plan_pulls, prove
from mooncake_hetero_tp.core.producer import ProducerConfig, ProducerMachine
from mooncake_hetero_tp.core.regions import RankTable, unserved_drafts
from mooncake_hetero_tp.core.shelf import Ring
from mooncake_hetero_tp.errors import ConfigError, LocalUsageError, TransferError
from mooncake_hetero_tp.io import bootstrap_client
from mooncake_hetero_tp.io.bootstrap import BootstrapServer, Registration
from mooncake_hetero_tp.io.choosing import Chooser
from mooncake_hetero_tp.io.control import ControlChannel
from mooncake_hetero_tp.io.driver import Driver, Machines, Surroundings
from mooncake_hetero_tp.io.gathers import Gathers
from mooncake_hetero_tp.io.ledger import Ledger
from mooncake_hetero_tp.io.loop import Loop
from mooncake_hetero_tp.io.packer import Packer
from mooncake_hetero_tp.io.pool import WorkerPool
from mooncake_hetero_tp.io.reads import ClearTails, ReadDone, Reads, ReadTools
from mooncake_hetero_tp.io.staging import RingSize, StagingRing, host_ring
from mooncake_hetero_tp.io.stats import StatsBook, TransferStats
from mooncake_hetero_tp.io.tails import TailClearer
from mooncake_hetero_tp.io.transfer import TransferEngine
from mooncake_hetero_tp.io.work import Finished, Handover, StepWork
from mooncake_hetero_tp.native.executor import Executor, host_executor
from mooncake_hetero_tp.types import Identity, Rank

__all__ = ["Finished", "Handover", "RuntimeConfig", "StepWork", "WorkerRuntime"]

logger = logging.getLogger(__name__)

_RESOLVERS = 4
_READ_JOIN_S = 20.0
_QUERY_JOIN_S = 5.0
_GATHER_JOIN_S = 5.0
_GATHERERS = max(1, min(4, (os.cpu_count() or 1) // 2))
"""Threads that pack; the engine's own work needs the other cores."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeConfig:
    """How one worker takes part; times in seconds."""

    host: str
    """Address that peers connect to; the control channel binds to it."""
    producer: ProducerConfig | None = None
    """None: this worker hands nothing over."""
    consumer: ConsumerConfig | None = None
    """None: this worker loads nothing."""
    num_workers: int = 10
    """Threads that read."""
    bootstrap_bind: HostPort | None = None
    """Run the bootstrap server here, in this process; None: somebody else runs it."""
    bootstrap_address: HostPort | None = None
    """Where a producer registers; None: at the server of `bootstrap_bind`."""
    connector_timeout_s: float = 30.0
    """Bound of one bootstrap exchange (VLLM_MOONCAKE_CONNECTOR_TIMEOUT)."""
    registration_bound_s: float | None = None
    """Bound of all tries to register; three exchanges by default."""
    close_timeout_s: float = 3.0
    """How long `close` waits for running reads and granted leases."""
    null_block: int | None = 0
    """Block id that stands for a dropped page (vLLM: 0)."""
    transfer_mode: Mode = Mode.AUTO
    """How to read where staging is possible."""
    staging: RingSize | None = None
    """Of the ring of each role; None: every read is direct."""


class WorkerRuntime:
    """Owns the driver thread, the worker threads, the bootstrap server and the engine of one worker."""

    def __init__(
        self,
        config: RuntimeConfig,
        identity: Identity,
        table: RankTable,
        engine: TransferEngine,
        *,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], int] = lambda: secrets.randbits(63),
        clear_tails: ClearTails | None = None,
        make_ring: Callable[[RingSize], StagingRing] = host_ring,
        executor: Executor | None = None,
    ) -> None:
        """Nothing runs before `start`.

        Args:
            config: how this worker takes part.
            identity: engine, incarnation and rank.
            table: its KV memory.
            engine: the transfer engine; registered and closed by this runtime.
            clock: monotonic seconds; the engine's deadlines use the same one.
            draw: random 63-bit numbers.
            clear_tails: zeroes what lies past a loaded range; by default, what `executor` reaches.
            make_ring: allocates a staging ring where the engine and `executor` can reach it.
            executor: packs, unpacks and clears; by default, in host memory.
        """
        if config.producer is None and config.consumer is None:
            raise LocalUsageError(
                "a runtime that neither produces nor consumes; give a ProducerConfig, ConsumerConfig or both"
            )
        self._config = config
        self._identity = identity
        self._table = table
        self._engine = engine
        self._clock = clock
        self._draw = draw
        self._ledger = Ledger()
        self._book = StatsBook()
        self._server = None if config.bootstrap_bind is None else BootstrapServer(config.bootstrap_bind)
        self._resolvers = WorkerPool("mht-resolve", _RESOLVERS)
        self._read_pool = WorkerPool("mht-read", config.num_workers, per_key=max(2, config.num_workers // 2))
        self._make_ring = make_ring
        self._executor = executor or host_executor()
        self._clear_tails = clear_tails or TailClearer(table, self._executor)
        self._rings: list[StagingRing] = []
        self._gather_pool = WorkerPool("mht-gather", _GATHERERS)
        self._reads: Reads | None = None
        self._driver: Driver | None = None
        self._loop: Loop | None = None
        self._control_address: str | None = None
        self._ending = threading.Event()
        self._close_lock = threading.Lock()

    # --- start and end ---------------------------------------------------------------------------

    @property
    def control_address(self) -> str | None:
        """`tcp://host:port` of the control channel of a producer that has started."""
        return self._control_address

    @property
    def bootstrap(self) -> HostPort | None:
        """Where this worker's bootstrap server listens, if it runs one."""
        return None if self._server is None else self._server.address

    def start(self) -> None:
        """Register the memory, open the channel, tell the bootstrap server; blocks until that knows. Idempotent.

        Raises:
            ConfigError, TransferError: what went wrong and what to do; everything is closed again.
            LocalUsageError: it was closed; a runtime starts once.
        """
        if self._ending.is_set():
            raise LocalUsageError("start: this runtime was closed; make a new one, with a new incarnation")
        if self._loop is not None:
            return
        try:
            into, out_of = self._packer(self._config.consumer), self._packer(self._config.producer)
            self._engine.register([*self._table.buffers, *(ring.buffer for ring in self._rings)])
            self._open(into, out_of)
            if self._server is not None:
                self._server.start()
            if self._config.producer is not None:
                self._register()
        except BaseException:
            self.close()
            raise

    def _packer(self, role: ProducerConfig | ConsumerConfig | None) -> Packer | None:
        """The ring of a role and what fills or empties it; None: the role is not ours, or nothing is staged."""
        size = self._config.staging
        if role is None or size is None or self._config.transfer_mode is Mode.DIRECT:
            return None
        ring = self._make_ring(size)
        self._rings.append(ring)
        return Packer(self._table, ring, self._executor, self._config.null_block)

    def _open(self, into: Packer | None, out_of: Packer | None) -> None:
        channel = ControlChannel(self._config.host if self._config.producer is not None else None)
        self._control_address = channel.address
        machines = Machines(self._make_producer(out_of), self._make_consumer(into))
        self._reads = Reads(self._read_tools(into), self._read_pool, self._read_done, self._read_fenced)
        gathers = None if out_of is None else Gathers(out_of, self._gather_pool, self._gathered)
        around = Surroundings(
            channel, self._reads, gathers, self._ledger, self._book, self._resolve, self._driver_failed
        )
        self._driver = Driver(machines, around)
        self._loop = Loop(f"mht-driver-{self._identity.rank}", channel, self._driver, self._clock)
        self._loop.start()

    def _read_tools(self, packer: Packer | None) -> ReadTools:
        return ReadTools(
            engine=self._engine,
            table=self._table,
            clear_tails=self._clear_tails,
            clock=self._clock,
            null_block=self._config.null_block,
            packer=packer,
            chooser=None if packer is None else Chooser(self._config.transfer_mode, self._engine, packer),
        )

    def _make_producer(self, packer: Packer | None) -> ProducerMachine | None:
        config = self._config.producer
        if config is None:
            return None
        ring = None if packer is None else Ring(packer.offer, packer.ring.address_of)
        return ProducerMachine(
            self._identity, self._table, self._engine.transport_session, config, draw=self._draw, ring=ring
        )

    def _make_consumer(self, packer: Packer | None) -> ConsumerMachine | None:
        config = self._config.consumer
        if config is None:
            return None
        if packer is not None:
            config = replace(config, staging=packer.offer)
        return ConsumerMachine(self._identity, self._table, config, draw=self._draw, planner=self._plan)

    def _plan(self, consumer: RankTable, producers: Mapping[Rank, RankTable]) -> Mapping[Rank, Plan]:
        plans = plan_pulls(consumer, producers, prefer=self._identity.rank.tp)
        prove(consumer, plans)
        if unserved := unserved_drafts(consumer, producers.values()):
            logger.warning(
                "%s: the producer has no draft layers %s, so they are not loaded: answers stay right, but fewer drafts "
                "are accepted; give both engines the same draft model",
                self._identity,
                ", ".join(unserved),
            )
        return plans

    def _register(self) -> None:
        where = self._config.bootstrap_address or (None if self._server is None else self._server.address)
        if where is None or self._control_address is None:
            raise ConfigError(
                "a producer needs a bootstrap server to register at: set bootstrap_bind or bootstrap_address"
            )
        bootstrap_client.register(
            where,
            Registration.of(self._identity, self._control_address),
            timeout_s=self._config.connector_timeout_s,
            bound_s=self._config.registration_bound_s,
            stopped=self._ending,
        )
        logger.info("%s registered %s at %s", self._identity, self._control_address, where)

    def close(self) -> None:
        """End everything: threads, sockets, registered memory. Bounded; idempotent."""
        self._ending.set()
        with self._close_lock:
            if self._loop is not None and not self._loop.stop(self._config.close_timeout_s):
                logger.error("the driver thread of %s did not end in time", self._identity)
            if self._reads is not None:
                self._reads.stop_all()
            self._resolvers.close(_QUERY_JOIN_S, drop_queued=True)
            read = self._read_pool.close(_READ_JOIN_S)
            packed = self._gather_pool.close(_GATHER_JOIN_S, drop_queued=True)
            if not (read and packed):
                logger.error("a read or a gather of %s did not end in time", self._identity)
            if self._server is not None:
                self._server.close()
            dead = self._engine.close()
            if read and packed and dead:  # else something may still use them, and they go with the process
                for ring in self._rings:
                    ring.close()

    # --- what vLLM's worker calls ----------------------------------------------------------------

    def submit(self, work: StepWork) -> None:
        """Hand over one step's work; never blocks. What it raises for is never reported.

        Raises:
            LocalUsageError: not started, closed, the driver thread has failed, or work for a role that
                this worker does not have.
        """
        if self._loop is None or self._driver is None:
            raise LocalUsageError("submit: the runtime is not started")
        self._loop.check()
        self._check_roles(work)
        kept, loading = [kept.request_id for kept in work.kept], [pull.request_id for pull in work.pulls]
        self._ledger.open(kept, loading)
        driver = self._driver
        if not self._loop.post(lambda now: driver.step(work, now)):
            self._ledger.withdraw(kept, loading)
            self._loop.check()

    def _check_roles(self, work: StepWork) -> None:
        if (work.kept or work.ready or work.aborted) and self._config.producer is None:
            raise LocalUsageError("submit: blocks to hand over, but this worker is no producer (kv_role)")
        if (work.pulls or work.cancelled) and self._config.consumer is None:
            raise LocalUsageError("submit: loads, but this worker is no consumer (kv_role)")

    def collect(self) -> Finished:
        """What ended since the last call; never blocks."""
        return self._ledger.collect()

    def stats(self) -> TransferStats:
        """What was counted since the last call; never blocks."""
        if self._driver is not None:
            self._driver.count_frames()
        return self._book.take()

    def wake(self) -> None:
        """Look at the clock now; for clocks that jump."""
        if self._loop is not None:
            self._loop.wake()

    # --- in other threads ------------------------------------------------------------------------

    def _resolve(self, effect: Resolve) -> None:
        self._resolvers.submit(lambda: self._query(effect))

    def _query(self, effect: Resolve) -> None:
        answer = bootstrap_client.query(effect.bootstrap, effect.engine_id, timeout_s=self._config.connector_timeout_s)
        driver, loop = self._driver, self._loop
        if driver is not None and loop is not None:
            loop.post(lambda now: driver.resolved(answer, now))

    def _read_done(self, done: ReadDone) -> None:
        driver, loop = self._driver, self._loop
        if driver is None or loop is None or not loop.post(lambda now: driver.read_done(done, now)):
            self._orphan_read_done(done)

    def _read_fenced(self, read_id: ReadId) -> None:
        driver, loop = self._driver, self._loop
        if driver is not None and loop is not None:
            loop.post(lambda now: driver.read_fenced(read_id, now))

    def _gathered(self, gather_id: GatherId, outcome: GatherOutcome) -> None:
        driver, loop = self._driver, self._loop
        if driver is not None and loop is not None:
            loop.post(lambda now: driver.gathered(gather_id, outcome, now))

    def _orphan_read_done(self, done: ReadDone) -> None:
        """The driver thread is gone: the last read of a request ends it, once it cannot write any more."""
        if not (done.outcome.ok or done.outcome.transport_dead):
            try:
                self._engine.fence(done.start.transport_session)
            except TransferError:
                logger.exception("request %s may still be written; it is not reported", done.start.request_id)
                return
        if self._reads is not None and done.start.request_id not in self._reads.requests():
            self._ledger.loaded(done.start.request_id, failed=True)

    def _driver_failed(self, error: BaseException) -> None:
        """Nothing will be answered any more: end the engine, fail loads, free what was kept.

        In this order, for only then can nobody write into the one or read from the other.
        """
        reads = self._reads
        if reads is not None:
            reads.stop_all()
        self._engine.close()
        running = reads.requests() if reads is not None else set()
        for request_id in self._ledger.loading() - running:
            self._ledger.loaded(request_id, failed=True)
        for request_id in self._ledger.kept():
            self._ledger.sent(request_id)
        logger.critical("%s hands over and loads nothing any more: %r", self._identity, error)
