"""Requests and pulls at the consumer rank, as records."""

from __future__ import annotations

import msgspec
import pytest

from mooncake_hetero_tp.core.backoff import Backoff
from mooncake_hetero_tp.core.links import EngineLink, RankLink
from mooncake_hetero_tp.core.messages import Grant, Welcome
from mooncake_hetero_tp.core.pulls import Request, new_pulls, wrong_grant
from mooncake_hetero_tp.core.states import LoadEvent, Stage, StageEvent
from mooncake_hetero_tp.types import Identity, Incarnation, Nonce, PullId, Rank, SessionId, TokenRange
from tests.machines import BOOTSTRAP, PREFILL, WholePlan, identity, pull_request, rank_table

WELCOME = Welcome(1, (), identity(PREFILL), 1, SessionId(5), "t0", 10.0, rank_table())


class NothingPlan(WholePlan):
    def producer_ranges(self, ranges: tuple[TokenRange, ...]) -> tuple[TokenRange, ...]:
        return tuple(TokenRange(0, 0) for _ in ranges)


def request() -> Request:
    link = EngineLink((BOOTSTRAP, PREFILL), Backoff(1, 1))
    link.ranks = {Rank(tp=tp): RankLink(Rank(tp=tp), f"p{tp}", None, tp, WELCOME) for tp in (0, 1)}
    link.plans = {Rank(tp=0): WholePlan(), Rank(tp=1): NothingPlan()}
    made = Request(pull_request(), link, 80.0)
    made.pulls = new_pulls(made, iter([PullId(11), PullId(12)]), 0.5, 2.0)
    return made


GRANT = Grant(SessionId(5), PullId(11), Nonce(1), 10.0, 7, 40, (b"\1\0\0\0",))


def test_ranks_without_a_byte_of_it_are_not_asked() -> None:
    (pull,) = request().pulls
    assert (pull.number, pull.address, pull.ranges) == (11, "p0", (TokenRange(0, 40),))


@pytest.mark.parametrize(
    "changes,words",
    [
        ({}, None),
        ({"blocks": ()}, "granted 0 block lists, expected 1"),
        ({"computed_tokens": 39}, "granted 39 computed tokens, expected at least 40"),
        ({"request_tag": 8}, "another request than its fellow rank"),
    ],
)
def test_grants_that_must_not_be_read(changes: dict[str, object], words: str | None) -> None:
    made = request()
    made.producer_tag = 7
    wrong = wrong_grant(made.pulls[0], msgspec.structs.replace(GRANT, **changes))
    assert (wrong is None) if words is None else (words in str(wrong))


def test_an_answer_settles_its_question_and_older_ones() -> None:
    (pull,) = request().pulls
    pull.questions = {1: 10.0, 2: 11.0, 3: 12.0}
    assert pull.answered(2) == 11.0
    assert pull.questions == {3: 12.0}
    assert pull.answered(1) is None
    assert pull.answered(99) is None


def test_promised_means_more_than_asked() -> None:
    made = request()
    before = made.promised
    made.pulls[0].step(StageEvent.READY)
    assert (before, made.promised) == (False, True)


def test_running_stages_may_write() -> None:
    made = request()
    for stage in Stage:
        made.pulls[0].stage = stage
        assert made.may_be_written == (stage in {Stage.READING, Stage.STAGING, Stage.STOPPING, Stage.FENCING})


OLD = msgspec.structs.replace(identity(PREFILL), incarnation=Incarnation("old"))


@pytest.mark.parametrize(
    "tp,witness,lost",
    [(0, identity(PREFILL), False), (0, OLD, True), (9, identity(PREFILL), True)],
    ids=["still there", "restarted", "rank is gone"],
)
def test_a_process_that_knew_of_it_and_is_gone(tp: int, witness: Identity, lost: bool) -> None:
    made = request()
    made.witnesses = {Rank(tp=tp): witness}
    assert made.lost_with == (witness if lost else None)


def test_refused_events_change_nothing() -> None:
    made = request()
    assert not made.step(LoadEvent.FINISH)
    assert not made.pulls[0].step(StageEvent.READ)
    assert made.pulls[0].stage is Stage.ASKED
