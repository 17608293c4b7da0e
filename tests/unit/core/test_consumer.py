"""The consumer rank's machine, against real producer machines where that is simplest."""

from __future__ import annotations

from typing import Any

import pytest

from mooncake_hetero_tp.core.effects import (
    ExtendRead,
    FenceRead,
    Level,
    Notice,
    ReadId,
    ReadOutcome,
    Report,
    Resolve,
    ResolveFailed,
    StopRead,
)
from mooncake_hetero_tp.core.messages import (
    Claim,
    Gone,
    GoneReason,
    Grant,
    Ready,
    ReleaseAck,
    Waiting,
)
from mooncake_hetero_tp.errors import LocalUsageError
from mooncake_hetero_tp.types import Nonce, PullId, RequestId, SessionId, TransferId
from tests.machines import (
    BOOTSTRAP,
    MISFIT,
    PREFILL,
    Numbers,
    Pair,
    consumer_machine,
    kept,
    only,
    producer_machine,
    pull_request,
    sends,
)

XFER = TransferId("xfer-1")


@pytest.fixture
def pair() -> Pair:
    return Pair()


def two_ranks(**options: Any) -> Pair:
    return Pair(
        consumer_machine(**options),
        {f"p{tp}:1": producer_machine(tp, tp_size=2) for tp in range(2)},
    )


def reading(pair: Pair) -> None:
    """Kept, pulled, granted: every read is running."""
    pair.keep(kept())
    pair.start(pull_request())
    assert len(pair.reads) == len(pair.producers)


def finish(pair: Pair, index: int = 0, *, returned_at: float | None = None, **outcome: Any) -> None:
    """One read returns (well, unless told otherwise)."""
    read = pair.reads[index]
    at = pair.now if returned_at is None else returned_at
    result = ReadOutcome(**{"ok": True, "returned_at": at, **outcome})
    pair.deliver(pair.consumer.read_finished(read.read_id, result, pair.now))


def reason(pair: Pair) -> str:
    (report,) = pair.reports
    assert not report.ok
    return report.reason or ""


# --- the load ---------------------------------------------------------------------------------------


def test_load(pair: Pair) -> None:
    reading(pair)
    (read,) = pair.reads
    assert (read.request_id, read.transport_session, read.deadline) == ("d-1", "10.0.0.1:7000", 10.0)
    assert [blocks.tolist() for blocks in read.producer_blocks] == [[4, 5, 6]]
    assert [blocks.tolist() for blocks in read.consumer_blocks] == [[1, 2, 3]]
    finish(pair)
    assert pair.reports == [Report(RequestId("d-1"), ok=True)]
    assert pair.consumer.drained
    assert pair.consumer.next_deadline() is None


def test_a_load_from_two_ranks_is_reported_when_both_have_returned() -> None:
    pair = two_ranks()
    reading(pair)
    finish(pair, 0)
    assert pair.reports == []
    finish(pair, 1)
    assert [report.ok for report in pair.reports] == [True]


def test_the_second_load_needs_no_handshake(pair: Pair) -> None:
    reading(pair)
    finish(pair)
    pair.carried.clear()
    pair.keep(kept("p-2", "xfer-2"))
    pair.start(pull_request("d-2", "xfer-2"))
    assert [name for name, _ in pair.carried] == ["Pull", "Grant"], "what is there already is granted at once"


def test_a_grant_that_comes_long_after_its_pull_is_asked_for_again(pair: Pair) -> None:
    """It answers a question of which no lease is left; the pull is claimed afresh."""
    pair.keep(kept())
    pair.lose = {"Grant"}
    pair.start(pull_request())
    pair.lose = set()
    (pull,) = pair.consumer._pulls.values()
    late = Grant(
        session=pull.session,
        pull=pull.number,
        nonce=Nonce(max(pull.questions)),
        lease_s=10.0,
        request_tag=1,
        computed_tokens=48,
        blocks=(b"",),
    )
    effects = pair.consumer.receive("p0:1", late, 10.0)
    assert [type(message) for message in sends(effects)] == [Claim]
    assert pair.reads == []


def test_a_full_local_hit_is_reported_at_once_and_asks_nobody(pair: Pair) -> None:
    effects = pair.consumer.start(pull_request(tokens=(40, 40)), 0.0)
    assert effects == [Report(RequestId("d-1"), ok=True)]


def test_a_rank_that_needs_nothing_is_done_when_that_is_known() -> None:
    pair = Pair(consumer_machine(planner=lambda _own, _tables: {}))
    pair.start(pull_request())
    assert [report.ok for report in pair.reports] == [True]


def test_siblings_share_a_transfer(pair: Pair) -> None:
    """N > 1: two requests, one transfer id."""
    pair.keep(kept())
    pair.start(pull_request("d-1"))
    pair.start(pull_request("d-2"))
    finish(pair, 0)
    finish(pair, 1)
    assert [(report.request_id, report.ok) for report in pair.reports] == [("d-1", True), ("d-2", True)]


def test_a_finished_request_may_come_again(pair: Pair) -> None:
    reading(pair)
    finish(pair)
    pair.start(pull_request())
    assert len(pair.reads) == 2


# --- losses: each message is asked for again (vllm#35943) ---------------------------------------------


def load_without(pair: Pair, lost: str) -> None:
    """A load in which every `lost` message is lost; a Claim is of a pull that had to wait."""
    pair.lose = {lost}
    if lost == "Claim":
        pair.start(pull_request())
        pair.keep(kept())
    else:
        pair.keep(kept())
        pair.start(pull_request())


@pytest.mark.parametrize("lost", ["Hello", "Welcome", "Pull", "Claim", "Grant"])
def test_a_lost_message_delays_the_load_a_little(pair: Pair, lost: str) -> None:
    load_without(pair, lost)
    assert pair.reads == []
    pair.lose = set()
    pair.pass_time(1.0)
    finish(pair)
    assert [report.ok for report in pair.reports] == [True]


def test_a_ready_that_is_lost_is_made_up_for_by_the_heartbeat(pair: Pair) -> None:
    pair.start(pull_request())
    pair.lose = {"Ready"}
    pair.keep(kept())
    pair.pass_time(4.9)
    assert pair.reads == []
    pair.pass_time(0.2)
    finish(pair)
    assert [report.ok for report in pair.reports] == [True]


@pytest.mark.parametrize("lost", ["Hello", "Welcome", "Pull", "Claim", "Grant"])
def test_messages_lost_for_good_end_in_a_report_that_names_the_rank(pair: Pair, lost: str) -> None:
    load_without(pair, lost)
    pair.pass_time(40.0)
    assert "p0:1" in reason(pair)


def test_a_waiting_pull_shows_that_it_is_there(pair: Pair) -> None:
    """Producer orphans are dropped after 20 s here; the heartbeat comes every 5."""
    pair.start(pull_request())
    pair.pass_time(60.0)
    pair.keep(kept())
    assert len(pair.reads) == 1
    assert [name for name, _ in pair.carried].count("Pull") == 13


def test_an_overloaded_producer_is_asked_again_later() -> None:
    pair = Pair(producers={"p0:1": producer_machine(max_waiting=0)})
    pair.start(pull_request())
    pair.pass_time(30.0)
    assert pair.reports == []
    pair.keep(kept())
    pair.pass_time(2.0)
    assert len(pair.reads) == 1


def test_a_grant_that_comes_too_late_is_asked_for_again(pair: Pair) -> None:
    """The consumer was stopped: the lease it was given is over before it looks at the answer."""
    pair.keep(kept())
    pair.lose = {"Grant"}
    pair.start(pull_request())
    late = Grant(SessionId(1000), PullId(50), Nonce(1), 10.0, 1, 48, (b"\4\0\0\0\5\0\0\0\6\0\0\0",))
    effects = pair.consumer.receive("p0:1", late, 10.0)
    assert [type(message) for message in sends(effects)] == [Claim]
    assert pair.reads == []


# --- leases -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", ["Pull", "Claim"])
def test_the_deadline_counts_from_the_question_that_was_answered(pair: Pair, lost: str) -> None:
    load_without(pair, lost)
    pair.lose = set()
    pair.pass_time(0.5)
    assert pair.reads[0].deadline == 10.5


def test_a_long_read_is_renewed_from_half_of_its_lease_on(pair: Pair) -> None:
    reading(pair)
    pair.pass_time(34.0)
    deadlines = [effect.deadline for effect in only(pair.effects, ExtendRead)]
    assert deadlines == [15.0, 20.0, 25.0, 30.0, 35.0, 40.0]
    finish(pair)
    assert [report.ok for report in pair.reports] == [True]


def test_a_lost_renewal_is_repeated(pair: Pair) -> None:
    reading(pair)
    pair.lose = {"Renew"}
    pair.pass_time(6.0)
    pair.lose = set()
    pair.pass_time(3.0)
    assert only(pair.effects, ExtendRead)
    assert only(pair.effects, StopRead) == []


def test_a_read_is_stopped_when_its_lease_ends_and_reported_when_it_has_returned(pair: Pair) -> None:
    reading(pair)
    pair.lose = {"Renew"}
    pair.pass_time(10.0)
    assert [effect.read_id for effect in only(pair.effects, StopRead)] == [pair.reads[0].read_id]
    assert pair.reports == []
    finish(pair, ok=False, error="stopped", transport_dead=True)
    assert "the read failed: stopped" in reason(pair)


def test_a_late_read_is_a_failed_load(pair: Pair) -> None:
    reading(pair)
    finish(pair, returned_at=10.001)
    assert "returned 0.001 s after its lease ended" in reason(pair)


def test_a_late_failure_tells_both(pair: Pair) -> None:
    reading(pair)
    finish(pair, returned_at=12.0, ok=False, error="timed out", transport_dead=True)
    assert "the read failed: timed out; the read returned 2.000 s after its lease ended" in reason(pair)


def test_a_read_that_returned_in_time_counts_however_late_it_is_told(pair: Pair) -> None:
    reading(pair)
    pair.lose = {"Renew"}
    pair.pass_time(30.0)
    finish(pair, returned_at=9.9)
    assert [report.ok for report in pair.reports] == [True]


def test_a_renewal_that_comes_after_the_end_does_not_bring_the_read_back(pair: Pair) -> None:
    reading(pair)
    pair.lose = {"Grant"}
    pair.pass_time(10.0)
    late = Grant(SessionId(1000), PullId(50), Nonce(2), 10.0, 1, 48, ())
    pair.deliver(pair.consumer.receive("p0:1", late, pair.now))
    assert only(pair.effects, ExtendRead) == []
    finish(pair, returned_at=10.5)
    assert not pair.reports[0].ok


# --- reads that fail ----------------------------------------------------------------------------------


def test_a_failed_read_of_a_dead_session_is_reported_at_once(pair: Pair) -> None:
    reading(pair)
    finish(pair, ok=False, error="transfer engine returned -1", transport_dead=True)
    assert "transfer engine returned -1" in reason(pair)
    assert [type(message) for message in sends(pair.effects)] == []


def test_a_failed_read_that_may_still_write_is_fenced_first(pair: Pair) -> None:
    reading(pair)
    finish(pair, ok=False, error="timed out")
    (read,) = pair.reads
    assert only(pair.effects, FenceRead) == [FenceRead(read.read_id, read.transport_session)]
    assert pair.reports == []
    pair.deliver(pair.consumer.read_fenced(read.read_id, pair.now))
    assert "timed out" in reason(pair)


def test_one_failed_read_stops_the_others_and_waits_for_them() -> None:
    pair = two_ranks()
    reading(pair)
    finish(pair, 0, ok=False, error="reset", transport_dead=True)
    assert [effect.read_id for effect in only(pair.effects, StopRead)] == [pair.reads[1].read_id]
    assert pair.reports == []
    finish(pair, 1)
    assert "reset" in reason(pair)


def test_after_a_failed_read_the_next_load_shakes_hands_afresh(pair: Pair) -> None:
    reading(pair)
    finish(pair, ok=False, error="reset", transport_dead=True)
    pair.carried.clear()
    pair.start(pull_request("d-2"))
    assert [name for name, _ in pair.carried][:2] == ["Hello", "Welcome"]
    assert len(pair.reads) == 2


def test_the_producer_may_free_at_once_what_failed() -> None:
    """Cancel goes out with the failure; what the scheduler releases is free although the other read runs."""
    pair = two_ranks()
    reading(pair)
    finish(pair, 0, ok=False, error="reset", transport_dead=True)
    assert [name for name, _ in pair.carried].count("Cancel") == 2


# --- cancel (sglang#24527, vllm#50425) ------------------------------------------------------------------


def test_cancel_before_anything_was_read_is_reported_at_once(pair: Pair) -> None:
    pair.start(pull_request())
    pair.deliver(pair.consumer.cancel(RequestId("d-1"), 1.0))
    assert pair.reports == [Report(RequestId("d-1"), ok=False, reason="cancelled", cancelled=True)]
    assert [name for name, _ in pair.carried].count("Cancel") == 1
    assert all(machine.drained for machine in pair.producers.values())


def test_cancel_under_a_read_waits_for_the_read_but_tells_the_producer(pair: Pair) -> None:
    reading(pair)
    pair.deliver(pair.consumer.cancel(RequestId("d-1"), 1.0))
    assert pair.reports == []
    assert only(pair.effects, StopRead)
    assert [name for name, _ in pair.carried].count("Cancel") == 1
    finish(pair)
    assert [(report.ok, report.cancelled) for report in pair.reports] == [(False, True)]
    assert only(pair.effects, Notice) == []


def test_cancel_of_unknown_requests_is_ignored(pair: Pair) -> None:
    assert pair.consumer.cancel(RequestId("nobody"), 0.0) == []


def test_cancel_while_connecting(pair: Pair) -> None:
    effects = pair.consumer.start(pull_request(), 0.0)
    assert effects == [Resolve(BOOTSTRAP, PREFILL)]
    pair.deliver(pair.consumer.cancel(RequestId("d-1"), 0.0))
    assert len(pair.reports) == 1
    pair.deliver(pair.consumer.resolved(pair.listing(), 0.0))
    assert len(pair.reports) == 1


# --- what the producer says -----------------------------------------------------------------------------


def test_an_abort_is_heard_at_once(pair: Pair) -> None:
    pair.start(pull_request())
    machine = pair.producers["p0:1"]
    pair.deliver_replies("p0:1", machine.abort(XFER, RequestId("p-1"), 0.0))
    assert "aborted before it was handed over" in reason(pair)


def test_an_abort_under_a_read_fails_it(pair: Pair) -> None:
    reading(pair)
    pair.deliver_replies("p0:1", pair.producers["p0:1"].abort(XFER, RequestId("p-1"), 0.0))
    assert [effect.request_id for effect in pair.told] == ["p-1"], "its reader has cancelled, so it is free"
    finish(pair)
    assert "aborted" in reason(pair)


def test_a_refused_pair_is_told_why() -> None:
    pair = Pair(producers={"p0:1": producer_machine(compare=lambda _mine, _theirs: (MISFIT,))})
    pair.start(pull_request())
    assert "bfloat16" in reason(pair)
    assert "float32" in reason(pair)
    (notice,) = only(pair.effects, Notice)
    assert notice.level is Level.WARNING


def test_parts_of_two_prefills_are_not_mixed() -> None:
    """Two ranks that hold different requests under one transfer id."""
    pair = two_ranks()
    for number, (address, machine) in enumerate(pair.producers.items()):
        pair.deliver_replies(address, machine.keep(kept(f"p-{number}"), 0.0))
    pair.start(pull_request())
    finish(pair)
    assert "another request than its fellow rank" in reason(pair)


def test_late_and_foreign_answers_are_ignored(pair: Pair) -> None:
    reading(pair)
    before = len(pair.effects)
    session, pull = SessionId(1000), PullId(50)
    strangers: list[tuple[str, Any]] = [
        ("p0:1", Ready(session, pull)),
        ("p0:1", Waiting(session, pull)),
        ("p0:1", Grant(session, pull, Nonce(999), 10.0, 1, 48, ())),
        ("p0:1", Gone(SessionId(7), pull, GoneReason.ABORTED)),
        ("p9:1", Gone(session, pull, GoneReason.ABORTED)),
        ("p0:1", Gone(session, PullId(9), GoneReason.ABORTED)),
        ("p0:1", ReleaseAck(5)),
    ]
    for address, message in strangers:
        pair.deliver(pair.consumer.receive(address, message, pair.now))
    assert len(pair.effects) == before
    finish(pair)
    assert pair.reports[0].ok


# --- restarts (vllm#49238) ------------------------------------------------------------------------------


def restart(pair: Pair, address: str = "p0:1", number: int = 1) -> None:
    """The producer comes back with another incarnation, at `address`."""
    pair.producers = {address: producer_machine(incarnation=f"reborn-{number}", draw=Numbers(5000 * number))}


def test_a_restarted_producer_is_found_by_one_fresh_handshake(pair: Pair) -> None:
    reading(pair)
    finish(pair)
    restart(pair)
    pair.keep(kept("p-2", "xfer-2"))
    pair.carried.clear()
    pair.start(pull_request("d-2", "xfer-2"))
    names = [name for name, _ in pair.carried if name != "Cancel"]
    assert names == ["Pull", "Gone", "Hello", "Welcome", "Pull", "Grant"]
    finish(pair, 1)
    assert [report.ok for report in pair.reports] == [True, True]


def test_a_producer_that_came_back_at_another_address_is_found_when_the_old_one_is_silent(pair: Pair) -> None:
    reading(pair)
    finish(pair)
    restart(pair, "p0:2")
    pair.keep(kept("p-2", "xfer-2"))
    pair.start(pull_request("d-2", "xfer-2"))
    pair.pass_time(5.9)
    assert len(pair.reads) == 1
    pair.pass_time(0.2)
    assert len(pair.reads) == 2


def test_one_fresh_handshake_and_no_more(pair: Pair) -> None:
    reading(pair)
    finish(pair)
    restart(pair)
    pair.lose = {"Pull"}
    pair.start(pull_request("d-2", "xfer-2"))
    pair.pass_time(6.0)
    restart(pair, number=2)
    pair.lose = set()
    pair.pass_time(8.0)
    assert [report.ok for report in pair.reports] == [True, False]
    assert "does not know our session" in (pair.reports[1].reason or "")


def test_what_was_promised_dies_with_its_process(pair: Pair) -> None:
    pair.lose = {"Grant"}
    pair.start(pull_request())
    pair.keep(kept())
    restart(pair)
    pair.lose = set()
    pair.pass_time(0.5)
    assert "does not know our session" in reason(pair)


def test_what_was_waited_for_dies_with_its_process(pair: Pair) -> None:
    """The new process has never heard of the prefill: no need to wait for the deadline."""
    pair.start(pull_request())
    restart(pair)
    pair.pass_time(5.0)
    assert "was restarted, and what it had computed is lost" in reason(pair)


def test_a_restart_under_a_read_fails_it_at_the_next_renewal(pair: Pair) -> None:
    reading(pair)
    restart(pair)
    pair.pass_time(5.0)
    assert only(pair.effects, StopRead)
    finish(pair)
    assert "does not know our session" in reason(pair)


def test_a_dropped_session_of_the_same_process_is_no_loss(pair: Pair) -> None:
    """An idle session made room for another; nothing was promised under it."""
    reading(pair)
    finish(pair)
    pair.producers["p0:1"]._sessions._by_id.clear()
    pair.producers["p0:1"]._sessions._by_consumer.clear()
    pair.start(pull_request("d-2"))
    assert len(pair.reads) == 2


# --- time and bounds ------------------------------------------------------------------------------------


def test_every_request_ends_by_its_deadline(pair: Pair) -> None:
    pair.start(pull_request())
    pair.pass_time(79.9)
    assert pair.reports == []
    pair.pass_time(0.1)
    assert "not loaded within 80 s" in reason(pair)
    assert "p0:1: asked" in reason(pair)


def test_a_running_read_delays_the_report_beyond_the_deadline_and_does_not_mend_it(pair: Pair) -> None:
    reading(pair)
    pair.pass_time(85.0)
    assert only(pair.effects, StopRead)
    assert pair.reports == []
    finish(pair, returned_at=79.0)
    assert "not loaded within 80 s" in reason(pair)


def test_a_bootstrap_that_does_not_answer_is_named(pair: Pair) -> None:
    pair.consumer.start(pull_request(), 0.0)
    pair.consumer.resolved(ResolveFailed(BOOTSTRAP, PREFILL, "HTTP 503"), 0.0)
    pair.effects += pair.consumer.tick(12.0)
    assert all(word in reason(pair) for word in (BOOTSTRAP, PREFILL, "HTTP 503", "12 s"))


def test_requests_and_engines_are_bounded() -> None:
    machine = consumer_machine(max_requests=1)
    machine.start(pull_request(), 0.0)
    (report,) = machine.start(pull_request("d-2"), 0.0)
    assert isinstance(report, Report)
    assert not report.ok
    crowded = consumer_machine(max_engines=0)
    (report,) = crowded.start(pull_request(), 0.0)
    assert isinstance(report, Report)
    assert "max_engines" in (report.reason or "")


def test_pull_numbers_are_not_reused_while_they_live() -> None:
    draws = iter([5, 5, 6])
    pair = two_ranks(draw=lambda: next(draws))
    pair.lose = {"Waiting"}
    pair.start(pull_request())
    assert set(pair.consumer._pulls) == {5, 6}


def test_close_ends_everything_once(pair: Pair) -> None:
    reading(pair)
    pair.start(pull_request("d-2", "xfer-2"))
    pair.deliver(pair.consumer.close(1.0))
    assert [report.request_id for report in pair.reports] == ["d-2"]
    drained = [pair.consumer.drained]
    finish(pair)
    assert [report.request_id for report in pair.reports] == ["d-2", "d-1"]
    assert [*drained, pair.consumer.drained] == [False, True]
    pair.start(pull_request("d-3"))
    assert "shutting down" in (pair.reports[2].reason or "")


# --- usage ----------------------------------------------------------------------------------------------


def test_misuse_is_the_callers_fault_and_changes_nothing(pair: Pair) -> None:
    reading(pair)
    with pytest.raises(LocalUsageError, match="one load at a time"):
        pair.consumer.start(pull_request(), 0.0)
    with pytest.raises(LocalUsageError, match="never started or has finished"):
        pair.consumer.read_finished(ReadId(99), ReadOutcome(ok=True, returned_at=0.0), 0.0)
    with pytest.raises(LocalUsageError, match="FenceRead named"):
        pair.consumer.read_fenced(pair.reads[0].read_id, 0.0)
    finish(pair)
    with pytest.raises(LocalUsageError):
        finish(pair)
    assert [report.ok for report in pair.reports] == [True]


def test_lists_must_be_one_per_group(pair: Pair) -> None:
    request = pull_request()
    short = type(request)(request.request_id, XFER, PREFILL, BOOTSTRAP, request.ranges, ())
    with pytest.raises(LocalUsageError, match="expected 1 token ranges and block lists"):
        pair.consumer.start(short, 0.0)
