"""Repetition of one question."""

from __future__ import annotations

from mooncake_hetero_tp.core.backoff import Backoff


def test_intervals_double_up_to_the_bound() -> None:
    backoff = Backoff(0.25, 1.0)
    now, gaps = 0.0, []
    for _ in range(5):
        due = backoff.sent(now)
        gaps.append(due - now)
        now = due
    assert gaps == [0.25, 0.5, 1.0, 1.0, 1.0]


def test_silence_counts_from_the_oldest_unanswered_question() -> None:
    backoff = Backoff(0.25, 1.0)
    assert backoff.silent_for(5.0) == 0.0
    backoff.sent(1.0)
    backoff.sent(2.0)
    assert backoff.silent_for(5.0) == 4.0


def test_an_answer_ends_silence_and_starts_small_again() -> None:
    backoff = Backoff(0.25, 1.0)
    backoff.sent(1.0)
    backoff.sent(2.0)
    backoff.heard(9.0)
    assert (backoff.silent_for(5.0), backoff.next_at) == (0.0, 9.0)
    assert backoff.sent(9.0) == 9.25


def test_a_changed_question_is_repeated_soon_but_its_addressee_is_as_silent_as_before() -> None:
    backoff = Backoff(0.25, 1.0)
    backoff.sent(1.0)
    backoff.sent(1.25)
    backoff.restart()
    assert backoff.sent(2.0) == 2.25
    assert backoff.silent_for(2.0) == 1.0
