"""Chunks of staged pulls: windows, slots, and one Stage for every change."""

from __future__ import annotations

from typing import Any

import pytest

from mooncake_hetero_tp.core.effects import Send
from mooncake_hetero_tp.core.messages import Offer, Stage, Staged, Waiting
from mooncake_hetero_tp.types import PullId, SessionId
from tests.machines import consumer_machine, only, producer_machine, pull_request
from tests.staged_pair import StagedPair

SESSION, PULL = SessionId(1000), PullId(50)


@pytest.fixture
def pair() -> StagedPair:
    pair = StagedPair()
    pair.load()
    return pair


def spoken(pair: StagedPair) -> list[Stage]:
    """Stages that were sent from now on; nothing is delivered."""
    stages: list[Stage] = []

    def deliver(effects: Any) -> None:
        stages.extend(e.message for e in only(effects, Send) if isinstance(e.message, Stage))
        pair.effects.extend(effect for effect in effects if not isinstance(effect, Send))

    pair.deliver = deliver  # type: ignore[method-assign]
    return stages


def hear(pair: StagedPair, message: Any) -> None:
    pair.deliver(pair.consumer.receive("p0:1", message, pair.now))


def staged(chunk: int, slot: int = 0, length: int = 60) -> Staged:
    return Staged(SESSION, PULL, chunk, 1000 * (slot + 1), length, 7)


# --- windows and slots ------------------------------------------------------------------------------------------------


def test_the_window_bounds_what_is_asked_for(pair: StagedPair) -> None:
    assert [start.chunk for start in pair.running] == [0, 1, 2]
    stages = spoken(pair)
    pair.finish(pair.started[1].read_id)
    assert [(stage.serial, stage.wanted) for stage in stages] == [(2, (0, 2, 3))]
    assert stages[0].ranges == pull_request().ranges


def test_a_ring_bounds_it_too() -> None:
    pair = StagedPair(our_slots=2)
    pair.load()
    assert [start.chunk for start in pair.running] == [0, 1]
    assert pair.finish_all() == [0, 1, 2, 3, 4, 5]
    assert {start.slot for start in pair.started} == {0, 1}


def test_two_loads_larger_than_either_ring_take_turns_and_both_finish() -> None:
    pair = StagedPair(slots=1, our_slots=1)
    pair.load()
    pair.load("d-2", "xfer-2")
    order = []
    while running := pair.running:
        order.append((running[0].request_id, running[0].chunk))
        pair.finish(running[0].read_id)
    assert order == [(request, chunk) for chunk in range(6) for request in ("d-1", "d-2")]
    assert [report.ok for report in pair.reports] == [True, True]
    assert pair.slots_are_home


def test_whoever_waits_for_a_slot_of_its_own_asks_for_nothing() -> None:
    pair = StagedPair(our_slots=1)
    pair.load()
    pair.carried.clear()
    pair.load("d-2", "xfer-2")
    assert "Stage" not in pair.names()


def test_a_load_in_one_chunk() -> None:
    pair = StagedPair(chunks=1)
    pair.load()
    pair.carried.clear()
    pair.finish_all()
    assert pair.names() == ["Stage", "Waiting"], "the last one gives the producer's slot back"
    assert pair.slots_are_home


@pytest.mark.parametrize("ours,theirs", [(None, Offer(64, 2)), (Offer(64, 2), None)])
def test_both_sides_must_have_a_ring(ours: Offer | None, theirs: Offer | None) -> None:
    pair = StagedPair()
    pair.consumer = consumer_machine(staging=ours)
    if theirs is None:
        pair.producers = {"p0:1": producer_machine()}
    pair.start(pull_request())
    (pull,) = pair.consumer._pulls.values()
    assert pair.consumer._reader.stagings.offer(pull) is None


def test_a_plan_of_too_many_cuts_is_not_staged(pair: StagedPair, monkeypatch: pytest.MonkeyPatch) -> None:
    (pull,) = pair.consumer._pulls.values()
    stagings = pair.consumer._reader.stagings
    assert stagings.offer(pull) == Offer(64, 3), "of its window"
    monkeypatch.setattr(stagings, "_cuts", lambda _plan: (None,) * 65_537)
    assert stagings.offer(pull) is None


# --- what the producer says -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", ["Stage", "Staged"])
def test_a_lost_message_is_asked_for_again(lost: str) -> None:
    pair = StagedPair()
    pair.lose = {lost}
    pair.load()
    assert pair.started == []
    pair.lose = set()
    pair.pass_time(0.5)
    assert [start.chunk for start in pair.running] == [0, 1, 2]


def test_a_lost_giving_back_is_repeated_until_it_is_answered() -> None:
    """Or two loads that share small rings would wait for each other."""
    pair = StagedPair(slots=1, our_slots=1)
    pair.load()
    pair.load("d-2", "xfer-2")
    pair.lose = {"Stage"}
    pair.finish(pair.started[0].read_id)
    pair.lose = set()
    assert pair.running == []
    pair.pass_time(1.1)
    assert [(start.request_id, start.chunk) for start in pair.running] == [("d-2", 0)]


def test_a_producer_that_is_silent_fails_the_load() -> None:
    pair = StagedPair()
    pair.lose = {"Staged", "Waiting"}
    pair.load()
    pair.pass_time(6.0)
    (report,) = pair.reports
    assert "no answer to staging for 6 s" in (report.reason or "")
    assert pair.consumer._reader.stagings._slots.all_home


def test_a_producer_that_lets_us_wait_is_asked_less_often() -> None:
    pair = StagedPair()
    pair.slow = True
    pair.load()
    pair.carried.clear()
    pair.pass_time(4.9)
    assert pair.names().count("Stage") == 1
    pair.pass_time(40.0)
    assert pair.reports == []
    pair.gather()
    pair.slow = False
    pair.finish_all()
    assert [report.ok for report in pair.reports] == [True]


def test_answers_keep_the_silence_away_but_not_the_question(pair: StagedPair) -> None:
    pair = StagedPair()
    pair.slow = True
    pair.load()
    stages = spoken(pair)
    hear(pair, staged(1, slot=1))
    pair.now = 0.5
    pair.deliver(pair.consumer.tick(0.5))
    assert [(stage.serial, stage.wanted) for stage in stages] == [(1, (0, 1, 2))]
    hear(pair, staged(0))
    hear(pair, staged(2, slot=2))
    pair.deliver(pair.consumer.tick(1.5))
    assert len(stages) == 1


def test_a_renewal_says_again_what_is_wanted(pair: StagedPair) -> None:
    """An answer to an older Stage proves nothing about the last one."""
    pair.carried.clear()
    pair.pass_time(5.0)
    assert pair.names()[:3] == ["Renew", "Grant", "Stage"]


def test_chunks_nobody_asked_for_and_repetitions_are_ignored(pair: StagedPair) -> None:
    before = len(pair.started)
    for message in (staged(0), staged(5), staged(99), Waiting(SESSION, PULL)):
        hear(pair, message)
    assert len(pair.started) == before


def test_a_chunk_longer_than_a_slot_is_refused_by_name(pair: StagedPair) -> None:
    hear(pair, staged(0, length=65))
    for start in pair.running:
        pair.finish(start.read_id)
    (report,) = pair.reports
    assert "staged 65 bytes as one chunk, expected at most 64" in (report.reason or "")


def test_a_chunk_that_comes_when_the_lease_is_over_is_not_read() -> None:
    """A stopped process hears the answer before it looks at the clock."""
    pair = StagedPair()
    pair.slow = True
    pair.load()
    spoken(pair)
    pair.now = 10.0
    hear(pair, staged(0))
    assert pair.started == []
