"""The actor alone, with recording machines in place of the real ones: who is fed, what is carried out."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from mooncake_hetero_tp.core.codec import decode_from_consumer, decode_from_producer, encode
from mooncake_hetero_tp.core.effects import (
    ExtendRead,
    FenceRead,
    FinishedSending,
    Kept,
    Level,
    Notice,
    PullRequest,
    ReadId,
    ReadOutcome,
    Reply,
    Report,
    Resolve,
    ResolveFailed,
    Send,
    StartRead,
    StopRead,
)
from mooncake_hetero_tp.core.messages import Cancel, Ready, ReleaseAck
from mooncake_hetero_tp.errors import LocalUsageError
from mooncake_hetero_tp.io.control import ChannelCounts, FromConsumer, FromProducer, Inbox
from mooncake_hetero_tp.io.driver import Driver, Machines, Surroundings
from mooncake_hetero_tp.io.ledger import Ledger
from mooncake_hetero_tp.io.reads import ReadDone
from mooncake_hetero_tp.io.stats import StatsBook
from mooncake_hetero_tp.io.transfer import ReadTally
from mooncake_hetero_tp.io.work import Finished, Handover, StepWork
from mooncake_hetero_tp.types import (
    EngineId,
    Identity,
    Incarnation,
    PullId,
    Rank,
    RequestId,
    SessionId,
    TokenRange,
    TransferId,
)

READY = Ready(SessionId(1), PullId(2))
CANCEL = Cancel(SessionId(1), PullId(2))


class Machine:
    """Notes every input and answers with the effects it was given for it."""

    def __init__(self) -> None:
        self.inputs: list[tuple[Any, ...]] = []
        self.answers: dict[str, list[Any]] = {}
        self.error: dict[str, Exception] = {}
        self.drained = True
        self.due: float | None = None

    def __getattr__(self, name: str) -> Any:
        def take(*given: Any) -> list[Any]:
            if name != "tick":
                self.inputs.append((name, *given))
            if name in self.error:
                raise self.error[name]
            return self.answers.get(name, [])

        return take

    def next_deadline(self) -> float | None:
        return self.due


class Channel:
    def __init__(self) -> None:
        self.out: list[tuple[Any, ...]] = []
        self.counts = ChannelCounts()

    def reply(self, peer: bytes, frame: bytes) -> bool:
        self.out.append((peer, decode_from_producer(frame)))
        return True

    def send(self, address: str, frame: bytes, now: float) -> bool:
        self.out.append((address, decode_from_consumer(frame)))
        return True


class Carrier:
    def __init__(self) -> None:
        self.effects: list[Any] = []

    def carry_out(self, effect: Any) -> None:
        self.effects.append(effect)

    start = carry_out


class Bench:
    def __init__(self, *, producer: bool = True, consumer: bool = True) -> None:
        self.producer, self.consumer = Machine(), Machine()
        self.channel, self.reads, self.ledger, self.book = Channel(), Carrier(), Ledger(), StatsBook()
        self.gathers = Carrier()
        self.resolves: list[Resolve] = []
        self.failed: list[BaseException] = []
        machines: Any = Machines(
            self.producer if producer else None,  # type: ignore[arg-type]
            self.consumer if consumer else None,  # type: ignore[arg-type]
        )
        around: Any = Surroundings(
            self.channel,  # type: ignore[arg-type]
            self.reads,  # type: ignore[arg-type]
            self.gathers,  # type: ignore[arg-type]
            self.ledger,
            self.book,
            self.resolves.append,
            self.failed.append,
        )
        self.driver = Driver(machines, around)


def kept(name: str = "p1") -> Kept:
    return Kept(RequestId(name), TransferId("t"), (np.array([1]),), 4, ready=True)


def asked(name: str = "d1") -> PullRequest:
    return PullRequest(
        RequestId(name), TransferId("t"), EngineId("e"), "http://b", (TokenRange(0, 70),), (np.array([1]),)
    )


def started(number: int = 1, request: str = "d1") -> StartRead:
    producer = Identity(EngineId("e"), Incarnation("aa"), Rank(tp=number))
    return StartRead(ReadId(number), RequestId(request), producer, "s", None, (), (), (), 9.0)


def done(start: StartRead, *, ok: bool = True) -> ReadDone:
    return ReadDone(start, ReadOutcome(ok, 5.0, 100, 3), ReadTally(100, 3, 1, 0, 2), 0.5)


def test_one_steps_work_goes_to_the_machines_in_order() -> None:
    bench = Bench()
    handover = Handover(TransferId("t"), RequestId("p1"))
    work = StepWork(kept=[kept()], ready=[handover], aborted=[handover], pulls=[asked()], cancelled=[RequestId("d0")])
    bench.driver.step(work, 7.0)
    assert [given[0] for given in bench.producer.inputs] == ["keep", "mark_ready", "abort"]
    assert bench.producer.inputs[1:] == [("mark_ready", "t", "p1", 7.0), ("abort", "t", "p1", 7.0)]
    assert [given[0] for given in bench.consumer.inputs] == ["start", "cancel"]


def test_blocks_that_the_machine_does_not_take_are_free_at_once(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.ledger.open([RequestId("p1")], [])
    bench.producer.error["keep"] = LocalUsageError("one list per group")
    bench.driver.step(StepWork(kept=[kept()]), 7.0)
    assert bench.ledger.collect() == Finished(sending={RequestId("p1")})
    assert "one list per group" in caplog.text


def test_a_load_that_the_machine_does_not_take_has_failed(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.ledger.open([], [RequestId("d1")])
    bench.consumer.error["start"] = LocalUsageError("wrong groups")
    bench.driver.step(StepWork(pulls=[asked()]), 7.0)
    assert bench.ledger.collect().failed == {"d1"}
    assert "wrong groups" in caplog.text


def test_a_second_load_of_one_request_leaves_the_first_alone() -> None:
    bench = Bench()
    bench.ledger.open([], [RequestId("d1")])
    bench.driver.step(StepWork(pulls=[asked()]), 7.0)
    bench.consumer.error["start"] = LocalUsageError("one is under way")
    bench.driver.step(StepWork(pulls=[asked()]), 7.0)
    assert bench.ledger.collect() == Finished()


def test_every_effect_is_carried_out() -> None:
    bench = Bench()
    bench.ledger.open([RequestId("p1")], [])
    fence, resolve = FenceRead(ReadId(1), "s"), Resolve("http://b", EngineId("e"))
    bench.producer.answers["receive"] = [Reply(b"peer", READY), FinishedSending(RequestId("p1"))]
    effects = [Send("tcp://a:1", CANCEL), started(), ExtendRead(ReadId(1), 9.0), StopRead(ReadId(1)), fence, resolve]
    bench.consumer.answers["receive"] = effects
    inbox = Inbox([FromConsumer(b"peer", encode(CANCEL))], [FromProducer("tcp://a:1", encode(READY))])
    bench.driver.received(inbox, 7.0)
    assert bench.producer.inputs == [("receive", b"peer", CANCEL, 7.0)]
    assert bench.consumer.inputs == [("receive", "tcp://a:1", READY, 7.0)]
    assert bench.channel.out == [(b"peer", READY), ("tcp://a:1", CANCEL)]
    assert bench.reads.effects == effects[1:5]
    assert bench.resolves == [resolve]
    assert bench.ledger.collect().sending == {"p1"}


def test_answers_of_other_threads_reach_the_consumer() -> None:
    bench = Bench()
    answer = ResolveFailed("http://b", EngineId("e"), "down")
    bench.driver.resolved(answer, 1.0)
    read = done(started())
    bench.driver.read_done(read, 2.0)
    bench.driver.read_fenced(ReadId(1), 3.0)
    assert bench.consumer.inputs == [
        ("resolved", answer, 1.0),
        ("read_finished", 1, read.outcome, 2.0),
        ("read_fenced", 1, 3.0),
    ]
    assert bench.book.take().replaced_sessions == 2


def test_a_loads_pulls_are_logged_per_producer_rank(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.ledger.open([], [RequestId("d1")])
    bench.driver.step(StepWork(pulls=[asked()]), 7.0)
    bench.driver.read_done(done(started(1)), 8.0)
    bench.consumer.answers["read_finished"] = [Report(RequestId("d1"), ok=True)]
    with caplog.at_level(logging.INFO):
        bench.driver.read_done(done(started(2)), 9.0)
    assert bench.ledger.collect() == Finished(recving={RequestId("d1")})
    lines = [line for line in caplog.messages if line.startswith("pulled request=d1 bytes=100 descriptors=3 tokens=70")]
    assert len(lines) == 2
    taken = bench.book.take()
    assert (taken.loads_done, taken.bytes_pulled, [pull.producer.rank.tp for pull in taken.pulls]) == (1, 200, [1, 2])
    assert taken.pulls[0].total_s == 2.0


@pytest.mark.parametrize(
    "cancelled,counter,failed", [(False, "loads_failed", {"d1"}), (True, "loads_cancelled", set())]
)
def test_failed_and_cancelled_loads_are_told_apart(cancelled: bool, counter: str, failed: set[str]) -> None:
    bench = Bench()
    bench.ledger.open([], [RequestId("d1")])
    bench.consumer.answers["start"] = [Report(RequestId("d1"), ok=False, reason="why", cancelled=cancelled)]
    bench.driver.step(StepWork(pulls=[asked()]), 7.0)
    finished = bench.ledger.collect()
    assert finished.recving == {"d1"}
    assert finished.failed == failed
    taken = bench.book.take()
    assert getattr(taken, counter) == 1
    assert taken.pulls == []


def test_expired_blocks_are_counted_apart() -> None:
    bench = Bench()
    bench.producer.answers["tick"] = [FinishedSending(RequestId("p1"))]
    bench.driver.tick(1.0)
    bench.producer.answers = {"receive": [FinishedSending(RequestId("p2"))]}
    bench.driver.received(Inbox([FromConsumer(b"x", encode(CANCEL))]), 2.0)
    taken = bench.book.take()
    assert (taken.sends_done, taken.sends_expired) == (2, 1)


def test_bad_frames_are_counted_and_logged_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bad = [FromConsumer(b"x", b"\x07garbage")] * 5
    bench.driver.received(Inbox(bad, [FromProducer("tcp://a:1", b"")]), 1.0)
    assert bench.producer.inputs == bench.consumer.inputs == []
    assert bench.book.take().bad_frames == 6
    assert len([line for line in caplog.messages if "is ignored" in line]) == 3
    assert bench.failed == []


def test_an_acknowledgement_for_the_scheduler_is_not_the_workers() -> None:
    bench = Bench()
    bench.driver.received(Inbox([], [FromProducer("tcp://a:1", encode(ReleaseAck(5)))]), 1.0)
    assert bench.consumer.inputs == []


def test_a_role_that_is_absent_is_not_fed() -> None:
    bench = Bench(producer=False, consumer=False)
    driver = bench.driver
    driver.step(StepWork(kept=[kept()], pulls=[asked()]), 1.0)
    driver.received(Inbox([FromConsumer(b"x", encode(CANCEL))], [FromProducer("tcp://a:1", encode(READY))]), 1.0)
    driver.resolved(ResolveFailed("b", EngineId("e"), "x"), 1.0)
    driver.read_done(done(started()), 1.0)
    driver.read_fenced(ReadId(1), 1.0)
    driver.tick(1.0)
    driver.closing(1.0)
    assert driver.drained()
    assert driver.next_deadline() is None
    assert bench.producer.inputs == bench.consumer.inputs == []


def test_timers_and_the_end_are_those_of_both_machines() -> None:
    bench = Bench()
    bench.producer.due, bench.consumer.due = 9.0, 4.0
    assert bench.driver.next_deadline() == 4.0
    bench.consumer.due = None
    assert bench.driver.next_deadline() == 9.0
    bench.driver.closing(2.0)
    assert bench.producer.inputs == bench.consumer.inputs == [("close", 2.0)]
    bench.consumer.drained = False
    assert not bench.driver.drained()
    error = ValueError()
    bench.driver.crashed(error)
    assert bench.failed == [error]


def test_notices_go_to_the_log_at_their_level(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.consumer.answers["tick"] = [Notice(Level.WARNING, "100% wrong"), Notice(Level.ERROR, "worse")]
    bench.driver.tick(1.0)
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("WARNING", "100% wrong"),
        ("ERROR", "worse"),
    ]


def test_dropped_frames_are_counted_once() -> None:
    bench = Bench()
    bench.channel.counts.dropped = 3
    bench.driver.count_frames()
    bench.driver.count_frames()
    assert bench.book.take().frames_dropped == 3
