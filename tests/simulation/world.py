"""Time, clocks, processes and the network of one simulated schedule. Everything is drawn from one seed."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mooncake_hetero_tp.core.codec import decode_from_consumer, decode_from_producer, encode

Action = Callable[..., Any]

CLOCK_ERROR = 0.0009
"""Largest relative error of a process's clock; two of them stay within `ProducerConfig.clock_drift`."""
MAX_EVENTS = 30_000


class Violation(AssertionError):
    """An invariant did not hold."""


@dataclass(frozen=True, slots=True)
class Weather:
    """How bad the network and the machines are; probabilities per message, read or job, times in seconds."""

    loss: float = 0.0
    duplicate: float = 0.0
    stray: float = 0.0
    """Messages that come up to `stray_s` late, and so out of order."""
    stray_s: float = 8.0
    read_slow: float = 0.0
    read_fail: float = 0.0
    gather_slow: float = 0.0
    gather_fail: float = 0.0
    abort_producer: float = 0.0
    abort_consumer: float = 0.0
    pauses: int = 0
    producer_restarts: int = 0
    consumer_restarts: int = 0
    partitions: int = 0
    stale_listing: float = 0.0
    misfit: float = 0.0
    """A life of the prefill engine whose rank 1 refuses every decode rank."""
    tight: float = 0.0
    """A life of the prefill engine with tables of one or two entries."""


CALM = Weather()


def draw_weather(rng: random.Random) -> Weather:
    """A quarter calm; the rest a mix in which each kind of trouble is on or off, or slow reads on a bad day."""
    kind = rng.random()
    if kind < 0.25:
        return CALM
    if kind < 0.4:
        trouble = rng.randrange(4)
        return Weather(
            read_slow=0.8,
            duplicate=0.1,
            pauses=trouble == 0,
            partitions=trouble < 3,
            producer_restarts=trouble == 3,
        )

    def some(most: float) -> float:
        return rng.random() * most if rng.random() < 0.5 else 0.0

    def few(chance: float) -> int:
        return 1 if rng.random() < chance else 0

    return Weather(
        loss=some(0.3),
        duplicate=some(0.3),
        stray=some(0.15),
        read_slow=some(0.5),
        read_fail=some(0.4),
        gather_slow=some(0.3),
        gather_fail=some(0.2),
        abort_producer=some(0.3),
        abort_consumer=some(0.4),
        pauses=few(0.3),
        producer_restarts=few(0.3),
        consumer_restarts=few(0.2),
        partitions=few(0.2),
        stale_listing=some(0.5),
        misfit=some(0.2),
        tight=some(0.4),
    )


class World:
    """A heap of timed actions, the log of what happened, and the network between processes."""

    def __init__(self, seed: int, weather: Weather, *, drop_nth: int | None = None) -> None:
        self.rng = random.Random(seed)
        self.weather = weather
        self.now = 0.0
        self.log: list[tuple[Any, ...]] = []
        self.dark_until = {"request": 0.0, "answer": 0.0}
        """End of a partition in each direction: every message sent before it is lost."""
        self.sent = 0
        self.steps = 0
        self._drop_nth = drop_nth
        self._through_codec = seed % 8 == 0
        self._heap: list[tuple[float, int, Action, tuple[Any, ...]]] = []
        self._order = 0

    def at(self, when: float, action: Action, *args: Any) -> None:
        self._order += 1
        heapq.heappush(self._heap, (when, self._order, action, args))

    def later(self, delay: float, action: Action, *args: Any) -> None:
        self.at(self.now + delay, action, *args)

    def run(self) -> None:
        """Until nothing is left to do."""
        heap = self._heap
        while heap:
            self.now, _, action, args = heapq.heappop(heap)
            action(*args)
            self.steps += 1
            if self.steps > MAX_EVENTS:
                raise Violation(f"does not come to rest: {MAX_EVENTS} events at {self.now:.1f} s")

    def note(self, *parts: Any) -> None:
        self.log.append((self.now, *parts))

    def transmit(self, way: str, message: Any, deliver: Action, *args: Any) -> None:
        """Deliver a request or an answer once, later, twice or not at all."""
        rng, weather = self.rng, self.weather
        self.sent += 1
        if self.sent == self._drop_nth or self.now < self.dark_until[way] or rng.random() < weather.loss:
            self.note("lost", message)
            return
        if self._through_codec:
            frame = encode(message)
            message = decode_from_consumer(frame) if way == "request" else decode_from_producer(frame)
        self.later(self._delay(), deliver, *args, message)
        if weather.duplicate and rng.random() < weather.duplicate:
            self.note("duplicated", message)
            self.later(self._delay(), deliver, *args, message)

    def _delay(self) -> float:
        if self.weather.stray and self.rng.random() < self.weather.stray:
            return self.rng.random() * self.weather.stray_s
        return 0.0005 + 0.003 * self.rng.random()

    def story(self) -> str:
        """The log, one line an event."""
        return "\n".join(f"{when:9.4f}  " + "  ".join(map(str, parts)) for when, *parts in self.log)


class Process:
    """A machine with a clock of its own; it may be paused, and it may die."""

    machine: Any

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.dead = False
        self.paused_until = 0.0
        self._rate = 1 + CLOCK_ERROR * (2 * world.rng.random() - 1)
        self._offset = 1000 * world.rng.random()
        self._wake = math.inf
        self._orders_at = 0.0

    def clock(self) -> float:
        return self._offset + self._rate * self.world.now

    def true_time(self, local: float) -> float:
        """When this process's clock shows `local`."""
        return (local - self._offset) / self._rate

    def perform(self, effect: Any) -> None:
        raise NotImplementedError

    def order(self, method: Action, *args: Any) -> None:
        """A call from this process's own scheduler: a little later, in the order given."""
        self._orders_at = max(self._orders_at, self.world.now + 0.004 * self.world.rng.random())
        self.world.at(self._orders_at, self.call, method, *args)

    def call(self, method: Action, *args: Any) -> None:
        """Feed the machine and carry out what it says."""
        world = self.world
        if self.dead:
            return
        if world.now < self.paused_until:
            world.at(self.paused_until, self.call, method, *args)
            return
        self._carry_out(method(*args, self.clock()))

    def _carry_out(self, effects: list[Any]) -> None:
        for effect in effects:
            self.perform(effect)
        due = self.machine.next_deadline()
        if due is not None and (when := self.true_time(due) + 1e-6) < self._wake:
            self._wake = when
            self.world.at(max(when, self.world.now), self._tick)

    def _tick(self) -> None:
        if self.dead:
            return
        if self.world.now < self.paused_until:
            self.world.at(self.paused_until, self._tick)
            return
        self._wake = math.inf
        self._carry_out(self.machine.tick(self.clock()))
