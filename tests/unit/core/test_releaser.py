"""Releases from the consumer's scheduler."""

from __future__ import annotations

from typing import Any

import pytest

from mooncake_hetero_tp.core.codec import engine_tag
from mooncake_hetero_tp.core.effects import Notice, Resolve, ResolvedEngine, ResolveFailed, Send
from mooncake_hetero_tp.core.messages import Release, ReleaseAck
from mooncake_hetero_tp.core.releaser import ReleaserConfig, ReleaserMachine
from mooncake_hetero_tp.types import EngineId, Rank, TransferId
from tests.machines import BOOTSTRAP, DECODE, PREFILL, Numbers, only, sends

CONFIG: dict[str, Any] = {
    "deadline_s": 60.0,
    "resend_s": 0.5,
    "resend_max_s": 4.0,
    "refresh_s": 10.0,
    "cache_s": 20.0,
}


class Bench:
    """A releaser and the effects it has returned."""

    def __init__(self, **options: Any) -> None:
        self.machine = ReleaserMachine(DECODE, ReleaserConfig(**{**CONFIG, **options}), draw=Numbers(7))
        self.now = 0.0
        self.effects: list[Any] = []

    def release(self, transfer: str = "xfer-1", engine: EngineId = PREFILL, bootstrap: str = BOOTSTRAP) -> None:
        self.effects += self.machine.release(TransferId(transfer), engine, bootstrap, self.now)

    def resolve(self, *addresses: str, engine: EngineId = PREFILL, bootstrap: str = BOOTSTRAP) -> None:
        ranks = {Rank(tp=tp): address for tp, address in enumerate(addresses)}
        self.effects += self.machine.resolved(ResolvedEngine(bootstrap, engine, ranks, {}), self.now)

    def ack(self, address: str, number: int = 7) -> None:
        self.effects += self.machine.receive(address, ReleaseAck(number), self.now)

    def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        while (due := self.machine.next_deadline()) is not None and due <= end:
            self.now = due
            self.effects += self.machine.tick(self.now)
        self.now = end

    def sent_to(self) -> list[str]:
        addresses = [effect.address for effect in only(self.effects, Send)]
        self.effects.clear()
        return addresses


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_every_rank_that_is_listed_is_told(bench: Bench) -> None:
    """Read from or not."""
    bench.release()
    assert bench.effects == [Resolve(BOOTSTRAP, PREFILL)]
    bench.resolve("p0", "p1", "p2")
    assert sends(bench.effects) == [Release(7, engine_tag(DECODE), TransferId("xfer-1"))] * 3
    assert sorted(bench.sent_to()) == ["p0", "p1", "p2"]
    for address in ("p0", "p2", "p1"):
        assert not bench.machine.drained
        bench.ack(address)
    assert bench.machine.drained
    assert bench.machine.next_deadline() is None


def test_repeated_to_those_who_have_not_acknowledged(bench: Bench) -> None:
    bench.release()
    bench.resolve("p0", "p1")
    bench.ack("p0")
    bench.sent_to()
    bench.pass_time(0.5)
    assert bench.sent_to() == ["p1"]


def test_addresses_are_used_again_for_a_while(bench: Bench) -> None:
    bench.release()
    bench.resolve("p0")
    bench.ack("p0")
    bench.effects.clear()
    bench.now = 19.0
    bench.release("xfer-2")
    assert only(bench.effects, Resolve) == []
    assert bench.sent_to() == ["p0"]
    bench.ack("p0", 8)
    bench.now = 20.0
    bench.release("xfer-3")
    assert only(bench.effects, Resolve)


def test_one_question_to_the_bootstrap_for_many_releases(bench: Bench) -> None:
    for number in range(5):
        bench.release(f"xfer-{number}")
    assert len(only(bench.effects, Resolve)) == 1
    bench.resolve("p0")
    assert len(only(bench.effects, Send)) == 5


def test_a_release_under_way_stands_for_its_repetition(bench: Bench) -> None:
    bench.release()
    bench.release()
    bench.resolve("p0")
    assert bench.sent_to() == ["p0"]


def test_a_silent_rank_has_its_engine_looked_up_again(bench: Bench) -> None:
    """It may have been restarted at another address."""
    bench.release()
    bench.resolve("p0", "p1")
    bench.ack("p0")
    bench.effects.clear()
    bench.pass_time(14.0)
    assert only(bench.effects, Resolve)
    bench.effects.clear()
    bench.resolve("q0", "q1")
    assert sorted(bench.sent_to()) == ["q0", "q1"]
    bench.ack("q0")
    bench.ack("q1")
    assert bench.machine.drained


def test_a_bootstrap_that_fails_is_asked_again(bench: Bench) -> None:
    bench.release()
    for _ in range(3):
        bench.effects += bench.machine.resolved(ResolveFailed(BOOTSTRAP, PREFILL, "refused"), bench.now)
        bench.pass_time(5.0)
    assert len(only(bench.effects, Resolve)) > 2
    bench.resolve("p0")
    assert bench.sent_to() == ["p0"]


def test_given_up_by_the_deadline_and_said_so(bench: Bench) -> None:
    bench.release()
    bench.resolve("p0")
    bench.pass_time(60.0)
    assert bench.machine.drained
    (notice,) = only(bench.effects, Notice)
    assert all(word in notice.text for word in ("xfer-1", PREFILL, "p0", "60 s"))


def test_given_up_without_an_address(bench: Bench) -> None:
    bench.release()
    bench.resolve()
    bench.pass_time(60.0)
    (notice,) = only(bench.effects, Notice)
    assert "lists no rank" in notice.text
    assert bench.machine.next_deadline() is None


def test_late_and_foreign_acknowledgements_are_ignored(bench: Bench) -> None:
    bench.release()
    bench.ack("p0")
    bench.resolve("p0")
    bench.ack("p9")
    bench.ack("p0", 99)
    assert not bench.machine.drained
    bench.ack("p0")
    bench.ack("p0")
    assert bench.machine.drained


def test_answers_of_the_bootstrap_that_nobody_asked_for_are_ignored(bench: Bench) -> None:
    bench.resolve("p0")
    bench.release()
    bench.resolve("p0")
    bench.resolve("p1")
    assert bench.sent_to() == ["p0"]


def test_releases_are_bounded_oldest_first() -> None:
    bench = Bench(max_releases=2)
    for number in range(3):
        bench.release(f"xfer-{number}")
    (notice,) = only(bench.effects, Notice)
    assert "xfer-0" in notice.text
    bench.resolve("p0")
    assert [message.transfer_id for message in sends(bench.effects)] == ["xfer-1", "xfer-2"]


def test_engines_are_bounded_idle_ones_first() -> None:
    bench = Bench(max_engines=2)
    bench.release(engine=EngineId("a"))
    bench.resolve("p0", engine=EngineId("a"))
    bench.ack("p0")
    bench.release(engine=EngineId("b"))
    bench.release(engine=EngineId("c"))
    assert only(bench.effects, Notice) == []
    bench.release(engine=EngineId("d"))
    (notice,) = only(bench.effects, Notice)
    assert "engine b " in notice.text


def test_close_sends_once_more_and_forgets(bench: Bench) -> None:
    bench.release()
    bench.resolve("p0", "p1")
    bench.ack("p1")
    bench.release("xfer-2", EngineId("unresolved"))
    bench.effects = bench.machine.close(bench.now)
    assert bench.sent_to() == ["p0"]
    assert bench.machine.drained
    bench.pass_time(100.0)
    assert bench.effects == []
