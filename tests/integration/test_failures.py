"""Peers that stop, die and come back, and clients that go, on a clock that the test moves; real ZMQ, HTTP and threads.

Every one of them in pulls that are read directly, and in pulls that are staged in more chunks than they may have slots.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from mooncake_hetero_tp.config import HostPort
from mooncake_hetero_tp.core.consumer import ConsumerConfig
from mooncake_hetero_tp.core.cost import Mode
from mooncake_hetero_tp.core.producer import ProducerConfig
from mooncake_hetero_tp.io.runtime import StepWork, WorkerRuntime
from mooncake_hetero_tp.io.staging import RingSize
from mooncake_hetero_tp.testing import FakeClock, Load, LoopbackEngine, LoopbackFabric
from mooncake_hetero_tp.types import Identity, Incarnation, Rank
from tests.handovers import Handovers

pytestmark = pytest.mark.usefixtures("leaves_nothing")

LEASE_S = 30.0
KEEP_S = 100.0
DEADLINE_S = 80.0
DRIFT = ProducerConfig().clock_drift


class Bench(Handovers):
    """Hand-overs TP1 -> TP2 on a fake clock; time passes in steps that let the threads act."""

    def __init__(self, **options: Any) -> None:
        self.clock = FakeClock()
        self.fabric = LoopbackFabric()
        self.serving: list[LoopbackEngine] = []
        self.reading: list[LoopbackEngine] = []
        super().__init__(
            self._make,
            clock=self.clock,
            producer_config=ProducerConfig(keep_s=KEEP_S, lease_s=LEASE_S),
            consumer_config=ConsumerConfig(deadline_s=DEADLINE_S),
            close_timeout_s=0.1,
            **options,
        )

    def _make(self, serves: bool) -> LoopbackEngine:
        engine = LoopbackEngine(self.fabric, clock=self.clock)
        (self.serving if serves else self.reading).append(engine)
        return engine

    @contextmanager
    def held_reads(self) -> Iterator[None]:
        """No read moves a byte before this is left."""
        with ExitStack() as holds:
            for engine in self.reading:
                holds.enter_context(engine.hold())
            yield

    def begin(self, load: Load) -> None:
        """Keep and pull it, until every consumer rank reads."""
        self.pair.keep(load)
        self.pair.pull(load)
        until(lambda: all(engine.running for engine in self.reading))

    def pass_time(self, seconds: float, done: Callable[[], bool] = lambda: False) -> float:
        """Let time pass until `done`; how much did."""
        passed = 0.0
        while passed < seconds and not done():
            self.clock.advance(0.5)
            passed += 0.5
            time.sleep(0.01)
        return passed

    def successor(self, old: WorkerRuntime) -> WorkerRuntime:
        """Another process in the place of a killed one."""
        place = HostPort("127.0.0.1", int(self.pair.bootstrap.rpartition(":")[2]))
        config = dataclasses.replace(old._config, bootstrap_bind=place)
        identity = Identity(self.pair.producer_id, Incarnation("f" * 16), old._identity.rank)
        runtime = WorkerRuntime(config, identity, old._table, self._make(serves=True), clock=self.clock)
        self.clock.subscribe(runtime.wake)
        return runtime

    def freed(self, load: Load) -> bool:
        return all(load.producer_request in sent for sent in self.pair.collect().sending.values())

    def reported(self, load: Load) -> bool:
        return all(load.consumer_request in ended for ended in self.pair.collect().recving.values())

    def loaded(self, load: Load) -> bool:
        """Keep, pull and release another one, as if nothing had been."""
        self.pair.keep(load)
        self.pair.pull(load)
        well = self.pair.wait_loaded(load)
        self.pair.release(load)
        self.pair.wait_freed(load)
        return well


def until(done: Callable[[], bool], timeout_s: float = 10.0) -> None:
    end = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < end, "not reached in time"
        time.sleep(0.002)


@contextmanager
def stopped(*runtimes: WorkerRuntime) -> Iterator[None]:
    """Their driver threads do nothing at all until this is left, as under SIGSTOP; frames wait in the sockets."""
    go_on = threading.Event()
    asleep = [threading.Event() for _ in runtimes]

    def sleep_in(event: threading.Event) -> Callable[[float], None]:
        def sleep(_now: float) -> None:
            event.set()
            go_on.wait()

        return sleep

    for runtime, event in zip(runtimes, asleep, strict=True):
        assert runtime._loop is not None
        assert runtime._loop.post(sleep_in(event))
    for event in asleep:
        assert event.wait(10)
    try:
        yield
    finally:
        go_on.set()


@contextmanager
def killed(bench: Bench, rank: Rank) -> Iterator[None]:
    """A producer worker whose process is gone: no driver, no bootstrap server, no memory to read from."""
    runtime = bench.pair.producers[rank]
    with stopped(runtime):
        assert runtime._server is not None
        runtime._server.close()
        bench.serving[0].close()
        yield


WAYS: dict[str, dict[str, Any]] = {
    "direct": {"transfer_mode": Mode.DIRECT},
    "staged": {"transfer_mode": Mode.STAGED, "staging": RingSize(slot_bytes=1024, slots=8)},
}


@pytest.fixture(params=WAYS)
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    bench = Bench(**WAYS[request.param])
    with bench.pair:
        yield bench


directly = pytest.mark.parametrize("bench", ["direct"], indirect=True)
"""Nothing is read."""

# --- clients that go -----------------------------------------------------------------------------


@directly
def test_release_before_any_pull_frees_at_once(bench: Bench) -> None:
    load = bench.load("a", 27)
    bench.pair.keep(load)
    bench.pair.release(load)
    bench.pair.wait_freed(load)
    assert bench.loaded(bench.load("b", 27))


@directly
def test_nobody_comes_and_the_blocks_are_free_at_their_expiry(bench: Bench) -> None:
    load = bench.load("a", 27)
    bench.pair.keep(load)
    assert KEEP_S - 1 <= bench.pass_time(2 * KEEP_S, lambda: bench.freed(load)) <= KEEP_S + 1
    assert bench.loaded(bench.load("b", 27))


def test_abort_while_reads_are_held_frees_the_producer_but_not_the_pages(bench: Bench) -> None:
    """What the scheduler side does on an abort: Release at once, Cancel to the workers."""
    load = bench.load("a", 27)
    with bench.held_reads():
        bench.begin(load)
        bench.pair.release(load)
        for runtime in bench.pair.consumers.values():
            runtime.submit(StepWork(cancelled=[load.consumer_request]))
        bench.pair.wait_freed(load)
        bench.pass_time(2 * DEADLINE_S)
        assert not any(bench.pair.collect().recving.values())
    bench.pair.wait_loaded(load)
    assert not any(bench.pair.ended.failed.values()), "cancelled, which is no failure"
    assert bench.loaded(bench.load("b", 27))


# --- leases that end -----------------------------------------------------------------------------


def test_producer_that_is_stopped_during_reads_makes_them_fail(bench: Bench) -> None:
    load = bench.load("a", 27)
    with bench.held_reads():
        bench.begin(load)
        with stopped(*bench.pair.producers.values()):
            bench.pass_time(LEASE_S + 1)
            assert not bench.freed(load)
        bench.pair.wait_freed(load)
    assert not bench.pair.wait_loaded(load)
    assert bench.loaded(bench.load("b", 27))


def test_consumer_that_is_stopped_or_dead_during_reads_costs_the_producer_a_lease(bench: Bench) -> None:
    """And its reads fail, should it come back: vllm#52234, bytes of blocks that the producer has freed meanwhile were taken for the prompt's."""
    load = bench.load("a", 27)
    with bench.held_reads():
        bench.begin(load)
        with stopped(*bench.pair.consumers.values()):
            passed = bench.pass_time(2 * LEASE_S, lambda: bench.freed(load))
            assert LEASE_S * (1 + DRIFT) <= passed <= LEASE_S * (1 + DRIFT) + 1
    assert not bench.pair.wait_loaded(load)
    assert bench.loaded(bench.load("b", 27))


def test_renewals_carry_a_read_over_many_leases_but_not_over_its_deadline(bench: Bench) -> None:
    short, long = bench.load("a", 27), bench.load("b", 27)
    with bench.held_reads():
        bench.begin(short)
        bench.pass_time(DEADLINE_S - 10)
    assert bench.pair.wait_loaded(short)
    with bench.held_reads():
        bench.begin(long)
        bench.pass_time(DEADLINE_S + LEASE_S)
    assert not bench.pair.wait_loaded(long)


def test_chunks_that_wait_for_a_slot_end_with_their_lease_and_every_slot_comes_home() -> None:
    bench = Bench(transfer_mode=Mode.STAGED, staging=RingSize(slot_bytes=1024, slots=1))
    with bench.pair:
        first, second = bench.load("a", 27), bench.load("b", 27)
        with bench.held_reads():
            for load in (first, second):
                bench.pair.keep(load)
                bench.pair.pull(load)
            until(lambda: any(engine.running for engine in bench.reading))
            with stopped(*bench.pair.producers.values()):
                bench.pass_time(LEASE_S + 1)
                assert sum(engine.running for engine in bench.reading) == 1, "the one slot of the producer's ring"
        assert not any(bench.pair.wait_loaded(load) for load in (first, second))
        assert bench.loaded(bench.load("c", 27))
        for runtime in bench.pair.producers.values():
            assert runtime._driver is not None
            assert runtime._driver._producer is not None
            assert runtime._driver._producer._shelf._slots.all_home


# --- engines that die ----------------------------------------------------------------------------


def test_producer_that_is_not_there_any_more_is_noticed_before_the_deadline(bench: Bench) -> None:
    """Killed after one load, with another waiting for it and a third during its reads."""
    done, waiting, reading = (bench.load(name, 27) for name in "abc")
    assert bench.loaded(done)
    bench.pair.pull(waiting)
    with bench.held_reads():
        bench.begin(reading)
        with killed(bench, Rank()):
            passed = bench.pass_time(DEADLINE_S, lambda: bench.reported(waiting))
            assert passed < DEADLINE_S
            bench.pass_time(LEASE_S)
            assert not bench.reported(reading), "its reads are held"
    assert not bench.pair.wait_loaded(waiting)
    assert not bench.pair.wait_loaded(reading)


def test_restart_of_a_producer_in_its_place_is_found_without_being_told(bench: Bench) -> None:
    """vllm#49238: same address, same engine id, another process."""
    first, second = bench.load("a", 27), bench.load("b", 27)
    assert bench.loaded(first)
    with killed(bench, Rank()):
        old = bench.pair.producers[Rank()]
        bench.pair.producers[Rank()] = new = bench.successor(old)
        new.start()
        bench.pair.keep(second)
        bench.pair.pull(second)
        bench.pass_time(DEADLINE_S, lambda: bench.reported(second))
        assert bench.pair.wait_loaded(second)
    old.close()
    assert bench.wrong_bytes(first, second) == 0
