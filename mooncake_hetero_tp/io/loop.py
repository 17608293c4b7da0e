"""The driver thread: polls the control channel, keeps the timers, feeds one actor and nothing else."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol, TypeAlias

from mooncake_hetero_tp.errors import LocalUsageError
from mooncake_hetero_tp.io.control import ControlChannel, Inbox

logger = logging.getLogger(__name__)

_LONGEST_POLL_S = 1.0
_LINGER_S = 0.5
"""For the last messages after the end."""

Action: TypeAlias = Callable[[float], None]
"""Something to do in the driver thread, with the clock value of that turn."""


class Actor(Protocol):
    """What a loop drives; every method runs in the loop's thread and returns at once."""

    def received(self, inbox: Inbox, now: float) -> None:
        """Frames arrived."""

    def tick(self, now: float) -> None:
        """Do what is due."""

    def next_deadline(self) -> float | None:
        """When `tick` is due at the latest; None: nothing is timed."""

    def closing(self, now: float) -> None:
        """The end begins; called once."""

    def drained(self) -> bool:
        """Whether the loop may end."""

    def crashed(self, error: BaseException) -> None:
        """An exception ended the loop; called once, last."""


class Loop:
    """One thread around one actor and one channel."""

    def __init__(self, name: str, channel: ControlChannel, actor: Actor, clock: Callable[[], float]) -> None:
        self._name = name
        self._channel = channel
        self._actor = actor
        self._clock = clock
        self._lock = threading.Lock()
        self._actions: deque[Action] = deque()
        self._open = True
        self._error: BaseException | None = None
        self._closing = threading.Event()
        self._given_up = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, action: Action) -> bool:
        """Do `action` in the next turn; False: the loop has ended. Never blocks; from any thread."""
        with self._lock:
            if not self._open:
                return False
            self._actions.append(action)
        self._channel.wake()
        return True

    def wake(self) -> None:
        """Look at the clock again."""
        self._channel.wake()

    def check(self) -> None:
        """Raises LocalUsageError if the loop has ended, with what ended it."""
        if not self._open:
            raise LocalUsageError(f"{self._name} has ended: {self._error or 'it was closed'}") from self._error

    def stop(self, timeout_s: float) -> bool:
        """Let the actor come to its end, then end the thread; whether it has ended in time. Idempotent."""
        self._closing.set()
        self._channel.wake()
        if not self._thread.is_alive():
            self._channel.close()
            return True
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._given_up.set()
            self._channel.wake()
            self._thread.join(_LONGEST_POLL_S + 2 * _LINGER_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            self._turns()
        except BaseException as caught:
            error = caught
            logger.critical("%s failed: everything it had under way fails", self._name, exc_info=caught)
        with self._lock:
            self._open = False
            self._error = error
        if error is not None:
            self._actor.crashed(error)
        self._channel.close(_LINGER_S)

    def _turns(self) -> None:
        told = False
        while not self._given_up.is_set():
            inbox = self._channel.poll(self._patience_s())
            now = self._clock()
            self._actor.tick(now)
            for action in self._take():
                action(now)
            self._actor.received(inbox, now)
            if self._closing.is_set() and not told:
                told = True
                self._actor.closing(now)
            if told and self._actor.drained():
                return

    def _take(self) -> list[Action]:
        with self._lock:
            actions = list(self._actions)
            self._actions.clear()
        return actions

    def _patience_s(self) -> float:
        due = self._actor.next_deadline()
        return _LONGEST_POLL_S if due is None else min(max(due - self._clock(), 0.0), _LONGEST_POLL_S)
