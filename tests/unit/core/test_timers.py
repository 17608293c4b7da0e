"""Deadlines per key, against a plain dictionary."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mooncake_hetero_tp.core.timers import Timers

steps = st.lists(
    st.one_of(
        st.tuples(st.just("arm"), st.integers(0, 5), st.integers(0, 20)),
        st.tuples(st.just("disarm"), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("expire"), st.just(0), st.integers(0, 20)),
    ),
    max_size=60,
)


@given(steps=steps)
def test_like_a_dictionary(steps: list[tuple[str, int, int]]) -> None:
    timers: Timers[int] = Timers()
    model: dict[int, float] = {}
    for what, key, when in steps:
        if what == "arm":
            timers.arm(key, when)
            model[key] = when
        elif what == "disarm":
            timers.disarm(key)
            model.pop(key, None)
        else:
            expired = list(timers.expired(when))
            assert sorted(expired) == sorted(key for key, due in model.items() if due <= when)
            dues = [model.pop(key) for key in expired]
            assert dues == sorted(dues)
        assert len(timers) == len(model)
        assert timers.next_due() == min(model.values(), default=None)


def test_earliest_first_and_once() -> None:
    timers: Timers[str] = Timers()
    timers.arm("late", 3)
    timers.arm("early", 1)
    timers.arm("moved", 9)
    timers.arm("moved", 2)
    assert list(timers.expired(3)) == ["early", "moved", "late"]
    assert list(timers.expired(99)) == []


def test_moving_a_timer_forever_does_not_grow_the_heap() -> None:
    timers: Timers[str] = Timers()
    for step in range(10_000):
        timers.arm("renewed", step)
    assert len(timers._heap) < 200


def test_a_timer_armed_while_expiring_is_seen() -> None:
    timers: Timers[str] = Timers()
    timers.arm("first", 1)
    seen = []
    for key in timers.expired(2):
        seen.append(key)
        if key == "first":
            timers.arm("second", 2)
    assert seen == ["first", "second"]
