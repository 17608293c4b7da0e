"""Handshakes at the producer rank."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from mooncake_hetero_tp.core.codec import engine_tag
from mooncake_hetero_tp.core.messages import PROBE, Hello, Refuse, Welcome
from mooncake_hetero_tp.core.sessions import Desk, Reception, SessionTable
from mooncake_hetero_tp.errors import PeerProtocolError
from mooncake_hetero_tp.types import Incarnation, SessionId, Severity
from tests.machines import DECODE, MISFIT, PREFILL, Numbers, identity, rank_table

HERE = identity(PREFILL)
NOTE = msgspec.structs.replace(MISFIT, field="layout", severity=Severity.NOTE)


def hello(**changes: Any) -> Hello:
    fields: dict[str, Any] = {
        "min_version": 1,
        "max_version": 3,
        "features": (),
        "identity": identity(DECODE),
        "expected_engine": PREFILL,
        "expected_incarnation": HERE.incarnation,
        "attempt": 7,
        "table": rank_table(2),
    }
    return Hello(**{**fields, **changes})


def reception(
    limit: int = 4, compare: Any = lambda _mine, _theirs: (), validate: Any = lambda _table: None
) -> Reception:
    desk = Desk(HERE, rank_table(), "10.0.0.1:7000", 30.0, compare, validate)
    return Reception(desk, SessionTable(limit, Numbers(100)))


def test_welcome_names_us_our_table_and_a_session() -> None:
    answer = reception().answer(hello())
    assert answer == Welcome(1, (), HERE, 7, SessionId(100), "10.0.0.1:7000", 30.0, rank_table())


def test_the_same_process_gets_the_same_session_again() -> None:
    desk = reception()
    first, again = desk.answer(hello()), desk.answer(hello(attempt=8))
    assert isinstance(first, Welcome)
    assert isinstance(again, Welcome)
    assert (again.session, again.attempt) == (first.session, 8)


def test_another_incarnation_gets_another_session() -> None:
    desk = reception()
    reborn = msgspec.structs.replace(identity(DECODE), incarnation=Incarnation("reborn"))
    answers = [desk.answer(hello()), desk.answer(hello(identity=reborn))]
    assert [answer.session for answer in answers if isinstance(answer, Welcome)] == [100, 101]


@pytest.mark.parametrize(
    "changes,field,producer,consumer",
    [
        ({"expected_engine": "other"}, "engine id", PREFILL, "other"),
        ({"expected_incarnation": "gone"}, "incarnation", str(HERE.incarnation), "gone"),
        ({"min_version": 2}, "protocol version", "1 to 1", "2 to 3"),
        ({"min_version": 0, "max_version": 0}, "protocol version", "1 to 1", "0 to 0"),
    ],
)
def test_refused_by_name_with_both_values(changes: dict[str, Any], field: str, producer: str, consumer: str) -> None:
    answer = reception().answer(hello(**changes))
    assert isinstance(answer, Refuse)
    (mismatch,) = answer.mismatches
    assert (mismatch.field, mismatch.producer, mismatch.consumer) == (field, producer, consumer)
    assert mismatch.remedy


def test_an_unknown_incarnation_is_nobodys_fault() -> None:
    """VLLM's own bootstrap server does not know incarnations."""
    assert isinstance(reception().answer(hello(expected_incarnation=None)), Welcome)


def test_a_table_that_is_not_valid_is_refused_and_not_compared() -> None:
    def damaged(_table: Any) -> None:
        raise PeerProtocolError("region a/k: expected 1 or more blocks, seen 0")

    def never(_mine: Any, _theirs: Any) -> Any:
        raise AssertionError

    answer = reception(compare=never, validate=damaged).answer(hello())
    assert isinstance(answer, Refuse)
    assert "region a/k" in answer.mismatches[0].consumer


def test_all_mismatches_are_told_at_once_the_harmless_ones_too() -> None:
    answer = reception(compare=lambda _mine, _theirs: (MISFIT, NOTE)).answer(hello())
    assert isinstance(answer, Refuse)
    assert answer.mismatches == (MISFIT, NOTE)


def test_harmless_differences_do_not_refuse() -> None:
    assert isinstance(reception(compare=lambda _mine, _theirs: (NOTE,)).answer(hello()), Welcome)


def test_a_probe_is_answered_and_leaves_nothing() -> None:
    sessions = SessionTable(4, Numbers())
    desk = Desk(HERE, rank_table(), "t", 30.0, lambda _mine, _theirs: (MISFIT,), lambda _table: None)
    answer = Reception(desk, sessions).answer(hello(features=(PROBE,), expected_engine="anything"))
    assert isinstance(answer, Welcome)
    assert answer.table == rank_table()
    assert len(sessions) == 0


def test_idle_sessions_make_room_and_busy_ones_do_not() -> None:
    sessions = SessionTable(2, Numbers(1))
    first, second = sessions.open(identity(DECODE, 0)), sessions.open(identity(DECODE, 1))
    assert first is not None
    assert second is not None
    first.pulls = 1
    third = sessions.open(identity(DECODE, 2))
    assert third is not None
    assert sessions.use(second.id) is None
    assert sessions.use(first.id) is first
    third.pulls = 1
    assert sessions.open(identity(DECODE, 3)) is None
    assert len(sessions) == 2


def test_when_all_sessions_are_in_use_the_answer_says_so() -> None:
    desk = reception(limit=0)
    answer = desk.answer(hello())
    assert isinstance(answer, Refuse)
    assert answer.mismatches[0].field == "sessions"


def test_session_numbers_are_never_zero_nor_used_twice() -> None:
    draws = iter([0, 2**32, 5, 5, 6])
    sessions = SessionTable(4, lambda: next(draws))
    opened = [sessions.open(identity(DECODE, tp)) for tp in range(2)]
    assert [session.id for session in opened if session] == [5, 6]
    assert all(session.tag == engine_tag(DECODE) for session in opened if session)
