"""The producer rank's machine, event by event."""

from __future__ import annotations

from typing import Any

import pytest

from mooncake_hetero_tp.core.codec import engine_tag
from mooncake_hetero_tp.core.effects import FinishedSending, Level, Notice, Reply
from mooncake_hetero_tp.core.messages import (
    Cancel,
    Claim,
    Gone,
    GoneReason,
    Grant,
    Hello,
    Pull,
    Ready,
    Refuse,
    Release,
    ReleaseAck,
    Renew,
    Waiting,
    Welcome,
)
from mooncake_hetero_tp.core.regions import STATE, Group
from mooncake_hetero_tp.errors import LocalUsageError
from mooncake_hetero_tp.types import Nonce, PullId, RequestId, SessionId, TokenRange, TransferId
from tests.machines import DECODE, MISFIT, PREFILL, identity, kept, only, producer_machine, rank_table, replies

XFER = TransferId("xfer-1")
OTHER = "other-decode-engine"
DRIFTED = 10.0 * 1.002
"""A lease of `producer_machine` as the producer counts it."""


class Bench:
    """One producer machine and consumers' sessions on it."""

    def __init__(self, **options: Any) -> None:
        self.machine = producer_machine(**options)
        self.now = 0.0
        self.session = self.greet()

    def greet(self, engine: str = DECODE, tp: int = 0) -> SessionId:
        hello = Hello(1, 1, (), identity(engine, tp), PREFILL, None, 1, rank_table())  # type: ignore[arg-type]
        (welcome,) = self.receive(hello)
        assert isinstance(welcome, Welcome)
        return welcome.session

    def receive(self, message: Any, peer: bytes = b"d0") -> list[Any]:
        return replies(self.do("receive", peer, message))

    def do(self, method: str, *args: Any) -> list[Any]:
        effects: list[Any] = getattr(self.machine, method)(*args, self.now)
        return effects

    def pull(
        self,
        number: int = 1,
        transfer: str = XFER,
        session: SessionId | None = None,
        end: int = 40,
        nonce: int | None = None,
    ) -> list[Any]:
        ids = (session or self.session, PullId(number), TransferId(transfer), RequestId("d-1"))
        return self.receive(Pull(*ids, (TokenRange(0, end),), None if nonce is None else Nonce(nonce)))

    def claim(self, number: int = 1, nonce: int = 9, session: SessionId | None = None) -> list[Any]:
        return self.receive(Claim(session or self.session, PullId(number), Nonce(nonce)))

    def renew(self, number: int = 1, nonce: int = 10) -> list[Any]:
        return self.receive(Renew(self.session, PullId(number), Nonce(nonce)))

    def release(self, engine: str = DECODE, number: int = 77) -> list[str]:
        """Requests that are finished by a Release."""
        effects = self.do("receive", b"scheduler", Release(number, engine_tag(engine), XFER))  # type: ignore[arg-type]
        assert Reply(b"scheduler", ReleaseAck(number)) in effects
        return finished(effects)

    def leased(self) -> None:
        """Kept, pulled and granted."""
        self.do("keep", kept())
        self.pull()
        (grant,) = self.claim()
        assert isinstance(grant, Grant)


def finished(effects: list[Any]) -> list[str]:
    return [effect.request_id for effect in only(effects, FinishedSending)]


def gone(reason: GoneReason, number: int = 1, session: int | None = None) -> Any:
    return Gone(SessionId(1000 if session is None else session), PullId(number), reason)


@pytest.fixture
def bench() -> Bench:
    return Bench()


# --- the hand-over ----------------------------------------------------------------------------------


def test_pull_claim_grant(bench: Bench) -> None:
    bench.do("keep", kept(blocks=(4, 5, 6), tokens=48))
    assert bench.pull() == [Ready(bench.session, PullId(1))]
    (grant,) = bench.claim(nonce=9)
    assert (grant.nonce, grant.lease_s, grant.computed_tokens) == (9, 10.0, 48)
    assert grant.blocks == (b"\4\0\0\0\5\0\0\0\6\0\0\0",)


def test_a_pull_with_a_nonce_claims_what_is_there(bench: Bench) -> None:
    """One round trip instead of two where the prefill is done."""
    bench.do("keep", kept())
    (grant,) = bench.pull(nonce=9)
    assert grant == bench.claim(nonce=9)[0]
    bench.now = 9.9
    assert finished(bench.do("tick")) == []
    bench.now = 10.1
    assert finished(bench.do("tick")) == ["p-1"], "its lease counts from when the Pull came"


def test_a_pull_with_a_nonce_that_has_to_wait_is_claimed_later(bench: Bench) -> None:
    assert bench.pull(nonce=9) == [Waiting(bench.session, PullId(1))]
    assert replies(bench.do("keep", kept())) == [Ready(bench.session, PullId(1))]
    (grant,) = bench.pull(nonce=10)
    assert grant.nonce == 10, "or by the heartbeat, should Ready be lost"


def test_a_pull_that_comes_first_waits_and_is_told_when_the_blocks_are_kept(bench: Bench) -> None:
    assert bench.pull() == [Waiting(bench.session, PullId(1))]
    assert replies(bench.do("keep", kept())) == [Ready(bench.session, PullId(1))]


def test_ready_waits_for_the_gpu(bench: Bench) -> None:
    """Offered only when the event of the last step has completed (sglang#33970)."""
    bench.pull(1)
    assert bench.do("keep", kept(ready=False)) == []
    assert bench.pull(2) == [Waiting(bench.session, PullId(2))]
    assert bench.claim(1) == []
    ready = bench.do("mark_ready", XFER, RequestId("p-1"))
    assert replies(ready) == [Ready(bench.session, PullId(number)) for number in (1, 2)]
    assert bench.do("mark_ready", XFER, RequestId("p-1")) == []


def test_the_gpu_event_of_another_request_makes_nothing_ready(bench: Bench) -> None:
    bench.do("keep", kept("p-1", ready=False))
    bench.do("keep", kept("p-2", ready=False))
    assert bench.do("mark_ready", XFER, RequestId("p-2")) == []
    assert bench.pull() == [Waiting(bench.session, PullId(1))]


def test_repeated_messages_get_the_same_answers(bench: Bench) -> None:
    bench.do("keep", kept())
    assert bench.pull() == bench.pull()
    first, again = bench.claim(nonce=9), bench.claim(nonce=9)
    assert first == again
    assert bench.pull() == [], "a Pull that repeats after its Grant is a late duplicate"


def test_answers_go_where_the_last_question_came_from(bench: Bench) -> None:
    """A reconnected socket has another routing id."""
    message = Pull(bench.session, PullId(1), XFER, RequestId("d"), (TokenRange(0, 4),))
    bench.do("receive", b"before", message)
    bench.do("receive", b"after", message)
    assert [effect.peer for effect in only(bench.do("keep", kept()), Reply)] == [b"after"]


def test_a_renewal_is_granted_without_blocks(bench: Bench) -> None:
    bench.leased()
    (grant,) = bench.renew(nonce=12)
    assert (grant.nonce, grant.blocks) == (12, ())


@pytest.mark.parametrize("message", [Claim, Renew])
def test_nothing_is_granted_without_a_pull(bench: Bench, message: Any) -> None:
    assert bench.receive(message(bench.session, PullId(5), Nonce(1))) == [gone(GoneReason.EXPIRED, 5)]


def test_a_renewal_of_what_was_not_granted_is_refused(bench: Bench) -> None:
    bench.do("keep", kept())
    bench.pull()
    assert bench.renew() == []
    assert bench.release() == ["p-1"]


# --- refusals by name (vllm#52234) --------------------------------------------------------------------


@pytest.mark.parametrize("message", [Claim, Renew])
def test_an_unknown_session_is_refused(bench: Bench, message: Any) -> None:
    bench.leased()
    stale = SessionId(4242)
    expected = [gone(GoneReason.UNKNOWN_SESSION, 1, 4242)]
    assert bench.receive(message(stale, PullId(1), Nonce(1))) == expected
    assert bench.pull(session=stale) == expected


@pytest.mark.parametrize(
    "end,reason", [(49, GoneReason.BEYOND_COMPUTED), (48, None), (40, None)], ids=["beyond", "all", "part"]
)
@pytest.mark.parametrize("early", [False, True])
def test_ranges_beyond_what_was_computed(bench: Bench, end: int, reason: GoneReason | None, early: bool) -> None:
    if early:
        bench.pull(end=end)
        answers = replies(bench.do("keep", kept(tokens=48)))
    else:
        bench.do("keep", kept(tokens=48))
        answers = bench.pull(end=end)
    assert answers == [gone(reason) if reason else Ready(bench.session, PullId(1))]


def test_null_pages_are_refused(bench: Bench) -> None:
    bench.do("keep", kept(blocks=(0, 5, 6)))
    assert bench.pull() == [gone(GoneReason.NULL_PAGE)]


def test_a_state_is_that_of_one_token(bench: Bench) -> None:
    bench = Bench(table=rank_table(1, [Group(0, STATE, 4096, 4096)]))
    bench.do("keep", kept(blocks=(5,), tokens=48))
    assert bench.pull(end=47) == [gone(GoneReason.OTHER_STATE)]


def test_one_range_per_group_and_one_transfer_per_pull(bench: Bench) -> None:
    ids = (bench.session, PullId(1), XFER, RequestId("d"))
    assert bench.receive(Pull(*ids, ())) == [gone(GoneReason.BAD_RANGES)]
    bench.pull()
    assert bench.pull(transfer="xfer-2") == [gone(GoneReason.BAD_RANGES)]
    assert replies(bench.do("keep", kept())) == [Ready(bench.session, PullId(1))]


def test_a_refused_consumer_is_in_the_log_with_the_reasons() -> None:
    machine = producer_machine(compare=lambda _mine, _theirs: (MISFIT,))
    hello = Hello(1, 1, (), identity(DECODE), PREFILL, None, 1, rank_table())
    effects = machine.receive(b"d0", hello, 0.0)
    assert [type(message) for message in replies(effects)] == [Refuse]
    (notice,) = only(effects, Notice)
    assert notice.level is Level.WARNING
    assert "bfloat16" in notice.text
    assert DECODE in notice.text


# --- expiry -------------------------------------------------------------------------------------------


def test_unclaimed_blocks_are_kept_for_the_keep_time(bench: Bench) -> None:
    """Also on a rank that nobody reads from."""
    bench.do("keep", kept())
    assert bench.machine.next_deadline() == 100.0
    bench.now = 99.9
    assert bench.do("tick") == []
    bench.now = 100.0
    assert finished(bench.do("tick")) == ["p-1"]
    assert bench.pull() == [gone(GoneReason.EXPIRED)]


@pytest.mark.parametrize("claimed,words", [(False, "nobody claimed it within 100 s"), (True, "its last lease ended")])
def test_expiry_is_in_the_log(bench: Bench, claimed: bool, words: str) -> None:
    bench.do("keep", kept())
    if claimed:
        bench.pull()
        bench.claim()
    bench.now = 200.0
    (notice,) = only(bench.do("tick"), Notice)
    assert all(word in notice.text for word in ("p-1", XFER, words))


def test_claimed_blocks_are_kept_for_the_lease_and_the_clocks_drift(bench: Bench) -> None:
    bench.now = 50.0
    bench.leased()
    assert bench.machine.next_deadline() == 50.0 + DRIFTED
    bench.now = 60.0
    assert finished(bench.do("tick")) == []
    bench.now = 50.0 + DRIFTED
    assert finished(bench.do("tick")) == ["p-1"]


def test_a_renewal_moves_the_expiry(bench: Bench) -> None:
    bench.leased()
    bench.now = 8.0
    bench.renew()
    bench.now = 17.0
    assert finished(bench.do("tick")) == []
    bench.now = 8.0 + DRIFTED
    assert finished(bench.do("tick")) == ["p-1"]


def test_a_late_message_does_not_bring_expired_blocks_back(bench: Bench) -> None:
    """Even where the timer has not been looked at in between."""
    bench.leased()
    bench.now = 11.0
    effects = bench.do("receive", b"d0", Renew(bench.session, PullId(1), Nonce(3)))
    assert finished(effects) == ["p-1"]
    assert replies(effects) == [gone(GoneReason.EXPIRED)]


def test_a_promise_to_a_second_reader_outlasts_the_first_ones_lease(bench: Bench) -> None:
    bench.leased()
    bench.now = 9.0
    assert bench.pull(2) == [Ready(bench.session, PullId(2))]
    bench.now = 15.0
    (grant,) = bench.claim(2)
    assert isinstance(grant, Grant)


def test_expiry_tells_those_who_wait_and_not_those_who_read(bench: Bench) -> None:
    bench.leased()
    bench.pull(2)
    bench.now = 30.0
    assert replies(bench.do("tick")) == [gone(GoneReason.EXPIRED, 2)]


# --- release ------------------------------------------------------------------------------------------


def test_release_frees_at_once_and_again_does_nothing(bench: Bench) -> None:
    bench.leased()
    assert bench.release() == ["p-1"]
    assert bench.release() == []
    assert bench.pull(3) == [gone(GoneReason.RELEASED, 3)]


def test_release_before_keep_frees_on_arrival(bench: Bench) -> None:
    assert bench.release() == []
    assert finished(bench.do("keep", kept())) == ["p-1"]
    assert bench.pull() == [gone(GoneReason.RELEASED)]


def test_release_before_keep_wakes_its_own_waiters_only(bench: Bench) -> None:
    other = bench.greet(OTHER)
    bench.pull(1)
    bench.pull(2, session=other)
    effects = bench.do("receive", b"s", Release(1, engine_tag(DECODE), XFER))
    assert gone(GoneReason.RELEASED) in replies(effects)
    effects = bench.do("keep", kept())
    assert replies(effects) == [Ready(other, PullId(2))]
    assert finished(effects) == []
    assert bench.release(OTHER) == ["p-1"]


def test_release_of_one_engine_leaves_the_other_its_lease(bench: Bench) -> None:
    """A proxy that gave up on one decode engine may have sent another with the same transfer."""
    bench.leased()
    other = bench.greet(OTHER)
    bench.pull(2, session=other)
    bench.claim(2, session=other)
    assert bench.release(DECODE) == []
    assert bench.pull(3) == [gone(GoneReason.RELEASED, 3)]
    bench.now = DRIFTED
    assert finished(bench.do("tick")) == ["p-1"]


def test_release_while_the_gpu_writes(bench: Bench) -> None:
    bench.do("keep", kept(ready=False))
    assert bench.release() == ["p-1"]
    assert bench.do("mark_ready", XFER, RequestId("p-1")) == []


def test_tombstones_go_after_the_keep_time(bench: Bench) -> None:
    bench.release()
    bench.now = 100.0
    bench.do("tick")
    assert bench.machine.next_deadline() is None
    assert finished(bench.do("keep", kept())) == []


# --- abort (sglang#30233) -----------------------------------------------------------------------------


def test_abort_before_keep_wakes_waiters_at_once(bench: Bench) -> None:
    bench.pull()
    effects = bench.do("abort", XFER, RequestId("p-1"))
    assert replies(effects) == [gone(GoneReason.ABORTED)]
    assert finished(effects) == []
    assert bench.pull(2) == [gone(GoneReason.ABORTED, 2)]


def test_abort_of_kept_blocks_nobody_reads(bench: Bench) -> None:
    bench.do("keep", kept())
    bench.pull()
    effects = bench.do("abort", XFER, RequestId("p-1"))
    assert replies(effects) == [gone(GoneReason.ABORTED)]
    assert finished(effects) == ["p-1"]


def test_abort_under_a_lease_tells_the_reader_and_waits_for_it(bench: Bench) -> None:
    bench.leased()
    effects = bench.do("abort", XFER, RequestId("p-1"))
    assert replies(effects) == [gone(GoneReason.ABORTED)]
    assert finished(effects) == []
    assert bench.claim() == bench.renew() == [gone(GoneReason.ABORTED)]
    assert bench.pull(2) == [gone(GoneReason.ABORTED, 2)]
    assert finished(bench.do("receive", b"d0", Cancel(bench.session, PullId(1)))) == ["p-1"]


def test_abort_under_a_lease_ends_with_the_lease(bench: Bench) -> None:
    bench.leased()
    bench.now = 4.0
    bench.do("abort", XFER, RequestId("p-1"))
    bench.now = DRIFTED
    assert finished(bench.do("tick")) == ["p-1"]


def test_abort_of_unknown_or_other_requests_changes_nothing(bench: Bench) -> None:
    bench.leased()
    assert bench.do("abort", TransferId("unknown"), RequestId("x")) == []
    assert bench.do("abort", XFER, RequestId("p-2")) == []
    assert bench.release() == ["p-1"]


# --- transfer ids (vllm#51236) --------------------------------------------------------------------------


def test_a_transfer_id_in_use_is_refused_and_the_first_use_untouched(bench: Bench) -> None:
    bench.leased()
    effects = bench.do("keep", kept("p-2"))
    assert finished(effects) == ["p-2"]
    (notice,) = only(effects, Notice)
    assert all(word in notice.text for word in (XFER, "p-1", "p-2", "distinct transfer ids"))
    assert bench.release() == ["p-1"]


def test_a_transfer_id_may_be_used_again_after_abort_and_after_the_hand_over(bench: Bench) -> None:
    bench.do("abort", XFER, RequestId("p-1"))
    assert finished(bench.do("keep", kept("p-2"))) == []
    assert bench.pull() == [Ready(bench.session, PullId(1))]
    assert bench.release() == ["p-2"]
    assert finished(bench.do("keep", kept("p-3"))) == []
    assert bench.pull(2, session=bench.greet(OTHER)) == [Ready(SessionId(1001), PullId(2))]


def test_an_engine_does_not_come_back_to_what_it_released(bench: Bench) -> None:
    bench.leased()
    bench.release()
    bench.do("keep", kept("p-2"))
    assert bench.pull(2) == [gone(GoneReason.RELEASED, 2)]


def test_waiting_holds_up_nobody(bench: Bench) -> None:
    """25 pulls of unknown transfers, then a good one."""
    for number in range(25):
        bench.pull(100 + number, f"unknown-{number}")
    bench.do("keep", kept())
    assert bench.pull() == [Ready(bench.session, PullId(1))]


def test_an_orphan_is_dropped_unless_its_consumer_shows_up(bench: Bench) -> None:
    bench.pull()
    bench.now = 15.0
    bench.pull()
    bench.now = 34.0
    assert bench.do("tick") == []
    bench.now = 35.0
    assert replies(bench.do("tick")) == [gone(GoneReason.NEVER_CAME)]
    assert bench.machine.drained


def test_what_never_comes_ends_whatever_its_consumer_says(bench: Bench) -> None:
    while bench.now < 100.0:
        assert bench.pull() == [Waiting(bench.session, PullId(1))]
        bench.now += 10.0
    assert replies(bench.do("tick")) == [gone(GoneReason.NEVER_CAME)]


# --- bounds -------------------------------------------------------------------------------------------


def test_waiting_pulls_are_bounded_and_kept_ones_still_served() -> None:
    bench = Bench(max_waiting=2)
    bench.do("keep", kept())
    assert [bench.pull(number, f"unknown-{number}") for number in (2, 3)] == [
        [Waiting(bench.session, PullId(2))],
        [Waiting(bench.session, PullId(3))],
    ]
    assert bench.pull(4, "unknown-4") == [gone(GoneReason.OVERLOADED, 4)]
    assert bench.pull(1) == [Ready(bench.session, PullId(1))]
    bench.receive(Cancel(bench.session, PullId(2)))
    assert bench.pull(4, "unknown-4") == [Waiting(bench.session, PullId(4))]


def test_pulls_are_bounded() -> None:
    bench = Bench(max_pulls=1)
    bench.do("keep", kept())
    bench.pull(1)
    assert bench.pull(2) == bench.pull(2, "unknown") == [gone(GoneReason.OVERLOADED, 2)]


def test_overload_is_logged_once_until_something_else_is_refused() -> None:
    bench = Bench(max_pulls=0)
    ids = (bench.session, PullId(1), XFER, RequestId("d"), (TokenRange(0, 4),))
    stale = (SessionId(9), *ids[1:])
    told = [len(only(bench.do("receive", b"d0", Pull(*which)), Notice)) for which in (ids, ids, stale, ids)]
    assert told == [1, 0, 0, 1]


def test_sessions_are_bounded() -> None:
    bench = Bench(max_sessions=1)
    bench.pull()
    hello = Hello(1, 1, (), identity(DECODE, 1), PREFILL, None, 1, rank_table())
    (refusal,) = bench.receive(hello)
    assert isinstance(refusal, Refuse)
    bench.receive(Cancel(bench.session, PullId(1)))
    assert isinstance(bench.receive(hello)[0], Welcome)
    assert bench.pull() == [gone(GoneReason.UNKNOWN_SESSION)]


# --- shutting down, usage -------------------------------------------------------------------------------


def test_close_frees_what_nobody_reads_and_waits_for_leases(bench: Bench) -> None:
    bench.leased()
    bench.do("keep", kept("p-2", "xfer-2"))
    bench.pull(2, "xfer-2")
    bench.pull(3, "unknown")
    effects = bench.do("close")
    assert finished(effects) == ["p-2"]
    assert replies(effects) == [gone(GoneReason.CLOSING, number) for number in (1, 2, 3)]
    assert not bench.machine.drained
    assert bench.pull(4) == [gone(GoneReason.CLOSING, 4)]
    assert finished(bench.do("keep", kept("p-5", "xfer-5"))) == ["p-5"]
    assert bench.receive(Hello(1, 1, (), identity(DECODE, 7), PREFILL, None, 1, rank_table())) == []
    bench.now = DRIFTED
    assert finished(bench.do("tick")) == ["p-1"]
    assert bench.machine.drained


def test_misuse_changes_nothing(bench: Bench) -> None:
    with pytest.raises(LocalUsageError):
        bench.do("keep", kept(blocks=(-1,)))
    assert bench.machine.drained
    assert bench.pull() == [Waiting(bench.session, PullId(1))]


def test_cancel_of_unknown_pulls_is_ignored(bench: Bench) -> None:
    assert bench.receive(Cancel(bench.session, PullId(5))) == []
