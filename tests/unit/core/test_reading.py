"""Granted pulls: staged, stopped, renewed, given up and read directly after all. Direct ones are in test_consumer.py."""

from __future__ import annotations

import pytest

from mooncake_hetero_tp.core.effects import ExtendRead, FenceRead, Notice, ReadId, StopRead
from mooncake_hetero_tp.core.messages import Gone, GoneReason, Offer, Staged
from mooncake_hetero_tp.errors import LocalUsageError
from mooncake_hetero_tp.types import PullId, RequestId, SessionId
from tests.machines import kept, only, pull_request
from tests.staged_pair import StagedPair

SESSION, PULL = SessionId(1000), PullId(50)


@pytest.fixture
def pair() -> StagedPair:
    return StagedPair()


def reason(pair: StagedPair) -> str:
    (report,) = pair.reports
    assert not report.ok
    return report.reason or ""


# --- the staged load ------------------------------------------------------------------------------------------------


def test_a_staged_load(pair: StagedPair) -> None:
    pair.load()
    assert pair.reads[0].staging == Offer(64, 3)
    first = pair.started[0]
    assert (first.request_id, first.producer, first.transport_session) == (
        "d-1",
        pair.reads[0].producer,
        "10.0.0.1:7000",
    )
    assert (first.address, first.length_bytes, first.gather_us) == (1000, 60, 7)
    assert (first.slot, first.chunk, first.chunk_bytes, first.deadline) == (0, 0, 64, 10.0)
    assert (first.plan, first.ranges) == (pair.reads[0].plan, pair.reads[0].ranges)
    assert [blocks.tolist() for blocks in first.consumer_blocks] == [[1, 2, 3]]
    assert pair.finish_all() == [0, 1, 2, 3, 4, 5]
    assert [report.ok for report in pair.reports] == [True]
    assert pair.slots_are_home
    assert pair.consumer.drained
    assert pair.consumer.next_deadline() is None


def test_a_load_that_wants_no_chunks_is_read_directly(pair: StagedPair) -> None:
    pair.keep(kept())
    pair.start(pull_request())
    pair.finish(pair.reads[0].read_id)
    assert [report.ok for report in pair.reports] == [True]
    assert "Stage" not in pair.names()


@pytest.mark.parametrize("read_id,words", [(1, "expected bytes"), (99, "expected a read that runs")])
def test_a_wish_for_chunks_needs_an_offer_and_a_read(read_id: int, words: str) -> None:
    pair = StagedPair()
    pair.consumer._reader.stagings._config = type(pair.consumer._config)()
    pair.keep(kept())
    pair.start(pull_request())
    assert pair.reads[0].staging is None
    with pytest.raises(LocalUsageError, match=words):
        pair.finish(ReadId(read_id), chunks=3)
    pair.finish(pair.reads[0].read_id)
    assert [report.ok for report in pair.reports] == [True]


def test_a_late_wish_for_chunks_is_a_late_read(pair: StagedPair) -> None:
    pair.keep(kept())
    pair.start(pull_request())
    pair.finish(pair.reads[0].read_id, chunks=3, returned_at=10.1)
    assert "returned 0.100 s after its lease ended" in reason(pair)


def test_a_wish_that_is_heard_when_the_lease_is_over_comes_to_nothing(pair: StagedPair) -> None:
    pair.keep(kept())
    pair.start(pull_request())
    pair.lose = {"Renew"}
    pair.pass_time(11.0)
    pair.finish(pair.reads[0].read_id, chunks=3, returned_at=9.0)
    assert "the lease ended before all chunks were read" in reason(pair)
    assert pair.consumer._reader.stagings._slots.all_home


# --- leases ---------------------------------------------------------------------------------------------------------


def test_a_renewal_extends_every_chunk_that_is_being_read(pair: StagedPair) -> None:
    pair.load()
    pair.pass_time(5.0)
    extended = only(pair.effects, ExtendRead)
    assert [effect.read_id for effect in extended] == [start.read_id for start in pair.started]
    assert {effect.deadline for effect in extended} == {15.0}
    pair.pass_time(60.0)
    pair.finish_all()
    assert [report.ok for report in pair.reports] == [True]


def test_the_end_of_the_lease_fails_a_load_whose_chunks_are_not_all_under_way(pair: StagedPair) -> None:
    pair.load()
    pair.lose = {"Renew"}
    pair.pass_time(10.0)
    assert len(only(pair.effects, StopRead)) == 3
    assert pair.reports == [], "its chunks are still being scattered, maybe"
    for start in pair.running:
        pair.finish(start.read_id, ok=False, error="stopped", transport_dead=True)
    assert "the lease ended before all chunks were read" in reason(pair)
    assert pair.consumer._reader.stagings._slots.all_home


def test_last_chunks_that_returned_in_time_count_however_late_they_are_told() -> None:
    pair = StagedPair(chunks=3)
    pair.load()
    pair.lose = {"Renew"}
    pair.pass_time(11.0)
    for start in pair.running:
        pair.finish(start.read_id, returned_at=9.9)
    assert [report.ok for report in pair.reports] == [True]


def test_a_late_chunk_is_a_failed_load(pair: StagedPair) -> None:
    pair.load()
    pair.finish(pair.started[0].read_id, returned_at=10.2)
    assert [effect.read_id for effect in only(pair.effects, StopRead)] == [s.read_id for s in pair.started[1:3]]
    for start in pair.running:
        pair.finish(start.read_id)
    assert "returned 0.200 s after its lease ended" in reason(pair)
    assert pair.slots_are_home


# --- failures -------------------------------------------------------------------------------------------------------


def test_a_failed_chunk_waits_for_the_others_but_not_for_its_fence(pair: StagedPair) -> None:
    """It may still write into its slot, not into the pages: these are written by scatters only."""
    pair.load()
    failed = pair.started[0]
    pair.finish(failed.read_id, ok=False, error="timed out")
    assert only(pair.effects, FenceRead) == [FenceRead(failed.read_id, failed.transport_session)]
    assert pair.reports == []
    for start in pair.running:
        pair.finish(start.read_id)
    assert "the read failed: timed out" in reason(pair)
    drained = [pair.consumer.drained]
    pair.deliver(pair.consumer.read_fenced(failed.read_id, pair.now))
    assert [*drained, pair.consumer.drained] == [False, True]
    assert pair.slots_are_home


def test_a_slot_in_quarantine_is_not_used() -> None:
    pair = StagedPair(our_slots=2)
    pair.load()
    for start in pair.running:
        pair.finish(start.read_id, ok=False, error="timed out", transport_dead=start.slot == 1)
    pair.load("d-2", "xfer-2")
    assert {start.slot for start in pair.running} == {1}
    pair.deliver(pair.consumer.read_fenced(pair.started[0].read_id, pair.now))
    assert {start.slot for start in pair.running} == {0, 1}
    pair.finish_all()
    assert [report.ok for report in pair.reports] == [False, True]


def test_after_a_failed_chunk_the_next_load_shakes_hands_afresh(pair: StagedPair) -> None:
    pair.load()
    for start in pair.started[:3]:
        pair.finish(start.read_id, ok=False, error="reset", transport_dead=True)
    pair.carried.clear()
    pair.start(pull_request("d-2"))
    assert pair.names()[:2] == ["Hello", "Welcome"]


def test_cancel_waits_for_the_chunks_that_are_being_read(pair: StagedPair) -> None:
    pair.slow = True
    pair.load()
    pair.gather()
    waiting = pair.started[1:]
    pair.finish(pair.started[0].read_id)
    assert len(pair.running) == len(waiting)
    pair.deliver(pair.consumer.cancel(RequestId("d-1"), pair.now))
    assert pair.names().count("Cancel") == 1
    assert (
        pair.consumer._reader.stagings._slots.held_by(next(iter(pair.consumer._reader.stagings._by_pull.values()))) == 2
    )
    for start in waiting:
        pair.finish(start.read_id)
    assert [(report.ok, report.cancelled) for report in pair.reports] == [(False, True)]
    pair.gather()
    assert pair.slots_are_home


def test_cancel_of_what_only_waits_is_reported_at_once(pair: StagedPair) -> None:
    pair.slow = True
    pair.load()
    pair.deliver(pair.consumer.cancel(RequestId("d-1"), pair.now))
    assert [(report.ok, report.cancelled) for report in pair.reports] == [(False, True)]
    pair.gather()
    assert pair.started == []
    assert pair.slots_are_home


def test_an_abort_of_the_producer_fails_a_staged_load(pair: StagedPair) -> None:
    pair.load()
    machine = pair.producers["p0:1"]
    pair.deliver_replies("p0:1", machine.abort(pull_request().transfer_id, RequestId("p-1"), 0.0))
    for start in pair.running:
        pair.finish(start.read_id)
    assert "aborted" in reason(pair)


# --- falling back ---------------------------------------------------------------------------------------------------


def test_a_pull_that_cannot_be_staged_is_read_directly_under_the_same_lease(pair: StagedPair) -> None:
    pair.fails = {0}
    pair.load()
    assert len(pair.reads) == 2
    again = pair.reads[1]
    assert (again.staging, again.deadline, again.read_id) == (None, 10.0, again.read_id)
    assert again.read_id != pair.reads[0].read_id
    assert [blocks.tolist() for blocks in again.producer_blocks] == [[4, 5, 6]]
    assert any("cannot stage" in notice.text for notice in only(pair.effects, Notice))
    pair.pass_time(20.0)
    pair.finish(again.read_id)
    assert [report.ok for report in pair.reports] == [True]
    assert pair.slots_are_home
    assert pair.consumer.next_deadline() is None


def test_a_fallback_waits_for_chunks_that_are_being_scattered(pair: StagedPair) -> None:
    """Two writers of one page would be one too many."""
    pair.fails = {3}
    pair.load()
    pair.finish(pair.started[0].read_id)
    assert len(pair.reads) == 1
    for start in pair.running:
        pair.finish(start.read_id)
    assert len(pair.reads) == 2
    assert pair.slots_are_home
    pair.finish(pair.reads[1].read_id)
    assert [report.ok for report in pair.reports] == [True]


def test_a_chunk_that_fails_during_a_fallback_fails_the_load(pair: StagedPair) -> None:
    pair.fails = {3}
    pair.load()
    pair.finish(pair.started[0].read_id)
    for start in pair.running:
        pair.finish(start.read_id, ok=False, error="reset", transport_dead=True)
    assert "reset" in reason(pair)
    assert len(pair.reads) == 1


def test_a_refusal_is_heard_again_when_it_was_lost(pair: StagedPair) -> None:
    pair.fails = {0}
    pair.lose = {"Gone"}
    pair.load()
    pair.lose = set()
    pair.pass_time(0.5)
    assert len(pair.reads) == 2


def test_late_refusals_and_chunks_are_ignored(pair: StagedPair) -> None:
    pair.fails = {0}
    pair.load()
    late = (Gone(SESSION, PULL, GoneReason.NO_STAGING), Staged(SESSION, PULL, 0, 1000, 60, 7))
    before = len(pair.effects)
    for message in late:
        pair.deliver(pair.consumer.receive("p0:1", message, pair.now))
    assert len(pair.effects) == before
    pair.finish(pair.reads[1].read_id)
    assert [report.ok for report in pair.reports] == [True]
