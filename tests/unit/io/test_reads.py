from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mooncake_hetero_tp.core.binding import TailView
from mooncake_hetero_tp.core.effects import ExtendRead, FenceRead, ReadId, StartChunk, StartRead, StopRead
from mooncake_hetero_tp.core.plan import plan_pulls
from mooncake_hetero_tp.core.slots import Slot
from mooncake_hetero_tp.io.pool import WorkerPool
from mooncake_hetero_tp.io.reads import ReadDone, Reads, ReadTools
from mooncake_hetero_tp.io.tails import TailClearer
from mooncake_hetero_tp.native.executor import host_executor
from mooncake_hetero_tp.testing import FakeClock, LoopbackEngine, LoopbackFabric
from mooncake_hetero_tp.types import EngineId, Identity, Incarnation, Rank, RequestId, TokenRange
from tests.oracle_memory import Arena, Layer, SideSpec, build_rank

SPEC = SideSpec(block_size=4, num_blocks=6)
LAYERS = [Layer("a", units=2, channels=4)]
NOTHING = TokenRange(0, 0)


class Bench:
    """One producer's and one consumer's memory, their loopback engines, and reads between them."""

    def __init__(self, workers: int = 2) -> None:
        self.clock = FakeClock()
        fabric = LoopbackFabric()
        self.producer, self.consumer = (build_rank(SPEC, LAYERS, 2, Rank(), Arena(1 << 16)) for _ in range(2))
        self.serving, self.engine = (LoopbackEngine(fabric, clock=self.clock) for _ in range(2))
        self.serving.register(self.producer.table.buffers)
        self.engine.register(self.consumer.table.buffers)
        self.done: dict[ReadId, ReadDone] = {}
        self.fenced: list[ReadId] = []
        self.pool = WorkerPool("mht-test", workers)
        self.cleared = 0
        tools = ReadTools(
            engine=self.engine, table=self.consumer.table, clear_tails=self._clear, clock=self.clock, null_block=0
        )
        self.reads = Reads(tools, self.pool, self._done, self.fenced.append)
        self.plan = plan_pulls(self.consumer.table, {Rank(): self.producer.table})[Rank()]

    def _clear(self, tails: Iterable[TailView]) -> None:
        found = list(tails)
        self.cleared += len(found)
        TailClearer(self.consumer.table, host_executor())(found)

    def _done(self, done: ReadDone) -> None:
        self.done[done.start.read_id] = done

    def start(self, number: int = 1, *, tokens: int = 6, **changes: Any) -> ReadId:
        fields: dict[str, Any] = {
            "read_id": ReadId(number),
            "request_id": RequestId(f"r{number}"),
            "producer": Identity(EngineId("p"), Incarnation("aa"), Rank()),
            "transport_session": self.serving.transport_session,
            "plan": self.plan,
            "ranges": (TokenRange(0, tokens), NOTHING),
            "producer_blocks": (np.array([2, 5]), np.array([1])),
            "consumer_blocks": (np.array([4, 1]), np.array([1])),
            "deadline": self.clock() + 30,
        }
        self.reads.carry_out(StartRead(**(fields | changes)))
        return ReadId(number)

    def wait(self, number: int = 1) -> ReadDone:
        end = time.monotonic() + 30
        while number not in self.done and time.monotonic() < end:
            time.sleep(0.001)
        return self.done[ReadId(number)]

    def wait_running(self) -> None:
        end = time.monotonic() + 30
        while not self.engine.running and time.monotonic() < end:
            time.sleep(0.001)


@pytest.fixture
def bench() -> Any:
    one = Bench()
    yield one
    assert one.pool.close(5)


def test_a_read_binds_reads_and_clears_tails(bench: Bench) -> None:
    bench.producer.fill([np.array([2, 5]), np.array([1])], [TokenRange(0, 6), NOTHING])
    bench.consumer.memory[:] = 0xAB
    bench.start()
    done = bench.wait()
    assert done.outcome.ok
    assert done.outcome.returned_at == bench.clock()
    assert done.outcome.bytes == done.tally.bytes == 6 * 2 * 2 * 4 * 2
    expected = np.full_like(bench.consumer.memory, 0xAB)
    bench.consumer.fill([np.array([4, 1]), np.array([1])], [TokenRange(0, 6), NOTHING], expected)
    changed = bench.consumer.memory != expected
    assert (bench.consumer.memory[changed] == 0).all()
    assert changed.sum() == 2 * 2 * 2 * 4 * 2
    assert bench.cleared == 2
    assert bench.reads.requests() == set()


def test_the_return_is_timed_before_tails_are_cleared(bench: Bench) -> None:
    began = bench.clock()

    def slow(_: Iterable[TailView]) -> None:
        bench.clock.advance(5)

    bench.reads.tools = ReadTools(
        engine=bench.engine, table=bench.consumer.table, clear_tails=slow, clock=bench.clock, null_block=0
    )
    bench.start()
    assert bench.wait().outcome.returned_at == began


def test_a_failed_read_says_whether_it_may_still_write(bench: Bench) -> None:
    bench.engine.fail()
    bench.start(1)
    assert bench.wait(1).outcome.transport_dead
    bench.engine.fail(keep_writing=True)
    bench.start(2)
    outcome = bench.wait(2).outcome
    assert (outcome.ok, outcome.transport_dead) == (False, False)
    assert outcome.error is not None
    assert "told to fail" in outcome.error


def test_blocks_that_do_not_fit_fail_the_read_before_any_call(bench: Bench) -> None:
    bench.start(consumer_blocks=(np.array([4, 99]), np.array([1])))
    outcome = bench.wait().outcome
    assert (outcome.ok, outcome.transport_dead) == (False, True)
    assert "99" in (outcome.error or "")
    assert bench.engine.calls == 0


def test_a_bug_fails_the_read_and_its_session_is_not_trusted(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.start(plan=None)
    outcome = bench.wait().outcome
    assert (outcome.ok, outcome.transport_dead) == (False, False)
    assert "failed unexpectedly" in caplog.text


def test_a_read_in_a_queue_ends_with_its_deadline_unless_extended() -> None:
    bench = Bench(workers=1)
    with bench.engine.hold():
        bench.start(1)
        bench.wait_running()
        for number in (2, 3):
            bench.start(number)
        bench.reads.carry_out(ExtendRead(ReadId(3), bench.clock() + 100))
        bench.clock.advance(31)
        assert bench.reads.requests() == {"r1", "r2", "r3"}
    assert not bench.wait(1).outcome.ok
    assert "past its deadline" in (bench.wait(2).outcome.error or "")
    assert bench.wait(3).outcome.ok
    assert bench.engine.calls == 2
    assert bench.pool.close(5)


def test_a_stopped_read_makes_no_further_call() -> None:
    bench = Bench(workers=1)
    with bench.engine.hold():
        bench.start(1)
        bench.wait_running()
        bench.start(2)
        bench.reads.carry_out(StopRead(ReadId(2)))
        bench.start(3)
        bench.reads.stop_all()
    assert [bench.wait(number).outcome.ok for number in (1, 2, 3)] == [False] * 3
    assert bench.engine.calls == 1
    assert bench.pool.close(5)


def test_reads_that_have_returned_are_neither_extended_nor_stopped(bench: Bench) -> None:
    bench.start()
    bench.wait()
    bench.reads.carry_out(ExtendRead(ReadId(1), 0.0))
    bench.reads.carry_out(StopRead(ReadId(1)))
    bench.reads.carry_out(StopRead(ReadId(77)))


def test_a_fence_ends_what_a_failed_read_left_behind(bench: Bench) -> None:
    bench.engine.fail(keep_writing=True)
    bench.start()
    bench.wait()
    assert bench.engine.write_leftovers() == 1
    bench.reads.carry_out(FenceRead(ReadId(1), bench.serving.transport_session))
    end = time.monotonic() + 30
    while not bench.fenced and time.monotonic() < end:
        time.sleep(0.001)
    assert bench.fenced == [1]
    assert bench.engine.write_leftovers() == 0


def test_a_fence_that_fails_is_tried_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    from mooncake_hetero_tp.errors import TransferError

    tries: list[str] = []
    gate = threading.Event()

    def fence(session: str) -> None:
        tries.append(session)
        if len(tries) < 3:
            raise TransferError("still running")
        gate.set()

    monkeypatch.setattr(bench.engine, "fence", fence)
    bench.reads.carry_out(FenceRead(ReadId(1), "s"))
    assert gate.wait(5)
    assert tries == ["s"] * 3


@pytest.mark.parametrize("how", ["late", "stopped"])
def test_a_chunk_that_came_too_late_is_not_unpacked(bench: Bench, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The producer may have filled its slot anew by then; what lies in ours must not reach the pages."""
    unpacked: list[int] = []
    ring = SimpleNamespace(address_of=lambda _slot: bench.consumer.table.buffers[0].address)

    def unpack(*_: Any) -> int:
        unpacked.append(1)
        return 0

    packer: Any = SimpleNamespace(ring=ring, prepare_unpack=lambda *_: 1, unpack=unpack)
    bench.reads.tools = replace(bench.reads.tools, packer=packer)
    read, starting = bench.engine.read, chunk_of(bench)

    def read_slowly(*args: Any, **options: Any) -> Any:
        tally = read(*args, **options)
        if how == "late":
            bench.clock.advance(30)
        else:
            bench.reads.carry_out(StopRead(starting.read_id))
        return tally

    monkeypatch.setattr(bench.engine, "read", read_slowly)
    bench.reads.carry_out(starting)
    outcome = bench.wait(7).outcome
    assert (outcome.ok, outcome.transport_dead) == (False, True)
    assert "came too late" in (outcome.error or "")
    assert unpacked == []


def chunk_of(bench: Bench) -> StartChunk:
    return StartChunk(
        read_id=ReadId(7),
        request_id=RequestId("r7"),
        producer=Identity(EngineId("p"), Incarnation("aa"), Rank()),
        transport_session=bench.serving.transport_session,
        address=bench.producer.table.buffers[0].address,
        length_bytes=64,
        gather_us=0,
        slot=Slot(0),
        chunk=0,
        chunk_bytes=64,
        plan=bench.plan,
        ranges=(TokenRange(0, 6), NOTHING),
        consumer_blocks=(np.array([4, 1]), np.array([1])),
        deadline=bench.clock() + 30,
    )
