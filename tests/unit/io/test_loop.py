from __future__ import annotations

import threading
import time

import pytest

from mooncake_hetero_tp.errors import LocalUsageError
from mooncake_hetero_tp.io.control import ControlChannel, Inbox
from mooncake_hetero_tp.io.loop import Loop
from mooncake_hetero_tp.testing import FakeClock

pytestmark = pytest.mark.usefixtures("leaves_nothing")


class Recorder:
    """An actor that notes what it is told, in order."""

    def __init__(self, due: float | None = None) -> None:
        self.told: list[str] = []
        self.due = due
        self.done = True
        self.crash: BaseException | None = None

    def received(self, inbox: Inbox, now: float) -> None:
        self.told += [f"frame {got.frame.decode()}" for got in inbox.from_consumers]

    def tick(self, now: float) -> None:
        if self.due is not None and now >= self.due:
            self.told.append(f"due at {self.due:g}")
            self.due = None

    def next_deadline(self) -> float | None:
        return self.due

    def closing(self, now: float) -> None:
        self.told.append("closing")

    def drained(self) -> bool:
        return self.done

    def crashed(self, error: BaseException) -> None:
        self.crash = error


def start(actor: Recorder, clock: FakeClock | None = None, host: str | None = None) -> tuple[Loop, ControlChannel]:
    channel = ControlChannel(host)
    loop = Loop("mht-test", channel, actor, clock or time.monotonic)
    loop.start()
    return loop, channel


def wait_for(actor: Recorder, text: str) -> None:
    end = time.monotonic() + 30
    while text not in actor.told and time.monotonic() < end:
        time.sleep(0.001)
    assert text in actor.told


def test_actions_run_in_the_loops_thread_in_order() -> None:
    actor = Recorder()
    loop, _ = start(actor)
    threads: list[threading.Thread] = []
    for number in range(5):
        assert loop.post(lambda _, number=number: actor.told.append(f"action {number}"))  # type: ignore[misc]
    assert loop.post(lambda _: threads.append(threading.current_thread()))
    wait_for(actor, "action 4")
    assert loop.stop(5)
    assert actor.told == [f"action {number}" for number in range(5)] + ["closing"]
    assert threads[0].name == "mht-test"


def test_a_timer_fires_when_its_clock_says_so() -> None:
    clock = FakeClock()
    actor = Recorder(due=clock() + 100)
    loop, _ = start(actor, clock)
    clock.subscribe(loop.wake)
    time.sleep(0.02)
    assert actor.told == []
    clock.advance(100)
    wait_for(actor, "due at 1100")
    assert loop.stop(5)


def test_a_timer_fires_on_the_real_clock() -> None:
    actor = Recorder(due=time.monotonic() + 0.05)
    loop, _ = start(actor)
    wait_for(actor, f"due at {actor.due:g}")
    assert loop.stop(5)


def test_frames_reach_the_actor() -> None:
    actor, sender = Recorder(), ControlChannel()
    loop, channel = start(actor, host="127.0.0.1")
    assert channel.address is not None
    sender.send(channel.address, b"hello", now=0)
    wait_for(actor, "frame hello")
    assert loop.stop(5)
    sender.close()


def test_the_end_waits_for_the_actor_and_is_bounded() -> None:
    actor = Recorder()
    actor.done = False
    loop, _ = start(actor)
    began = time.monotonic()
    assert loop.stop(0.1)
    assert 0.1 <= time.monotonic() - began < 5
    assert loop.stop(0.1)
    assert not loop.post(lambda _: None)
    with pytest.raises(LocalUsageError, match="it was closed"):
        loop.check()


def test_an_exception_is_loud_and_ends_the_loop(caplog: pytest.LogCaptureFixture) -> None:
    actor = Recorder()
    loop, _ = start(actor)
    loop.check()
    loop.post(lambda _: 1 / 0)  # type: ignore[arg-type]
    end = time.monotonic() + 30
    while actor.crash is None and time.monotonic() < end:
        time.sleep(0.001)
    assert isinstance(actor.crash, ZeroDivisionError)
    assert "everything it had under way fails" in caplog.text
    assert not loop.post(lambda _: None)
    with pytest.raises(LocalUsageError, match="division by zero") as caught:
        loop.check()
    assert caught.value.__cause__ is actor.crash
    assert loop.stop(5)


def test_a_loop_that_never_started_can_be_stopped() -> None:
    loop = Loop("mht-test", ControlChannel(), Recorder(), time.monotonic)
    assert loop.stop(1)
