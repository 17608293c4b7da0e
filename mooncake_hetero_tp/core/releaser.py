"""The consumer scheduler's machine: one idempotent Release per transfer to every producer rank. No I/O.

Nobody counts readers: when this consumer engine will not count any read of a transfer again, every rank
that the bootstrap lists is told so, read from or not. A Release is repeated until its rank acknowledges
it. One that never arrives costs the producer its keep time or lease, nothing else.

A consumer engine must not pull a transfer again that it has released: a repetition that is still under way
would end the new lease. The scheduler side sees to that (a remote load is single-use), and a producer rank
that has seen the Release refuses such a pull.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from mooncake_hetero_tp.core.backoff import Backoff
from mooncake_hetero_tp.core.codec import engine_tag
from mooncake_hetero_tp.core.effects import Level, Notice, ReleaserEffect, Resolve, ResolvedEngine, ResolveFailed, Send
from mooncake_hetero_tp.core.messages import Release, ReleaseAck
from mooncake_hetero_tp.core.timers import Timers
from mooncake_hetero_tp.types import EngineId, TransferId

EngineKey: TypeAlias = tuple[str, EngineId]
"""Bootstrap address and engine id of a producer engine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReleaserConfig:
    """Times and table bounds of one consumer scheduler; times in seconds."""

    deadline_s: float = 480.0
    """When a release that nobody acknowledges is given up (the producer has expired it by then)."""
    resend_s: float = 0.25
    resend_max_s: float = 8.0
    refresh_s: float = 10.0
    """A rank that acknowledges nothing for so long has its engine resolved again."""
    cache_s: float = 60.0
    """How long an engine's addresses are used before they are asked for again."""
    max_releases: int = 65536
    max_engines: int = 1024


@dataclass(slots=True, eq=False)
class EngineAddresses:
    """Where the ranks of one producer engine are, as far as the bootstrap has told."""

    key: EngineKey
    backoff: Backoff
    addresses: tuple[str, ...] = ()
    known_at: float | None = None
    asking: bool = False
    """A Resolve has not been answered."""
    releases: dict[int, None] = field(default_factory=dict)
    """Numbers of the releases that are under way to it."""
    reason: str = "the bootstrap server has not answered"

    def fresh(self, now: float, cache_s: float) -> bool:
        return self.known_at is not None and now < self.known_at + cache_s


@dataclass(slots=True, eq=False)
class Pending:
    """One release that some rank has not acknowledged."""

    message: Release
    engine: EngineAddresses
    deadline: float
    backoff: Backoff
    left: set[str] | None = None
    """Addresses that have not acknowledged it; None: not known yet."""
    acked: set[str] = field(default_factory=set)


class ReleaserMachine:
    """Releases transfers on behalf of one consumer engine (`own_engine`, its own vLLM engine id)."""

    def __init__(self, own_engine: EngineId, config: ReleaserConfig, *, draw: Callable[[], int]) -> None:
        self._tag = engine_tag(own_engine)
        self._config = config
        self._draw = draw
        self._engines: OrderedDict[EngineKey, EngineAddresses] = OrderedDict()
        self._pending: OrderedDict[int, Pending] = OrderedDict()
        self._numbers: dict[tuple[TransferId, EngineKey], int] = {}
        self._timers: Timers[EngineAddresses | Pending] = Timers()
        self._out: list[ReleaserEffect] = []

    # --- inputs ----------------------------------------------------------------------------------

    def release(self, transfer_id: TransferId, engine_id: EngineId, bootstrap: str, now: float) -> list[ReleaserEffect]:
        """Tell every rank of the producer engine that this engine will not count a read of it again.

        A release of the same transfer that is under way already stands for this one.
        """
        key = (bootstrap, engine_id)
        if (transfer_id, key) in self._numbers:
            return self._take()
        engine = self._engine(key)
        number = self._unused_number()
        pending = Pending(
            message=Release(number, self._tag, transfer_id),
            engine=engine,
            deadline=now + self._config.deadline_s,
            backoff=self._new_backoff(),
        )
        if len(self._pending) >= self._config.max_releases:
            self._give_up(next(iter(self._pending.values())), f"{self._config.max_releases} releases are under way")
        self._pending[number] = pending
        self._numbers[transfer_id, key] = number
        engine.releases[number] = None
        if engine.fresh(now, self._config.cache_s):
            self._aim(pending, now)
        else:
            self._timers.arm(pending, pending.deadline)
            self._ask(engine, now)
        return self._take()

    def resolved(self, answer: ResolvedEngine | ResolveFailed, now: float) -> list[ReleaserEffect]:
        """The answer to a Resolve."""
        engine = self._engines.get((answer.bootstrap, answer.engine_id))
        if engine is None or not engine.asking:
            return self._take()
        engine.asking = False
        if isinstance(answer, ResolveFailed) or not answer.addresses:
            engine.reason = answer.reason if isinstance(answer, ResolveFailed) else "it lists no rank of the engine"
            return self._take()
        engine.addresses = tuple(dict.fromkeys(answer.addresses.values()))
        engine.known_at = now
        self._timers.disarm(engine)
        for number in list(engine.releases):
            self._aim(self._pending[number], now)
        return self._take()

    def receive(self, address: str, message: ReleaseAck, now: float) -> list[ReleaserEffect]:
        """An acknowledgement from the rank at `address`; late duplicates are ignored."""
        pending = self._pending.get(message.number)
        if pending is not None and pending.left is not None and address in pending.left:
            pending.left.discard(address)
            pending.acked.add(address)
            pending.backoff.silent_since = now
            if not pending.left:
                self._drop(pending)
        return self._take()

    def tick(self, now: float) -> list[ReleaserEffect]:
        """Do what is due."""
        for due in self._timers.expired(now):
            if isinstance(due, EngineAddresses):
                self._ask(due, now)
            elif now >= due.deadline:
                self._give_up(due, f"not acknowledged within {self._config.deadline_s:g} s")
            else:
                self._send(due, now)
        return self._take()

    def next_deadline(self) -> float | None:
        """When `tick` has something to do; None: nothing is timed."""
        return self._timers.next_due()

    def close(self, now: float) -> list[ReleaserEffect]:  # noqa: ARG002 - called like the other machines
        """Send every outstanding release once more and forget it."""
        for pending in list(self._pending.values()):
            for address in sorted(pending.left or ()):
                self._out.append(Send(address, pending.message))
            self._drop(pending)
        return self._take()

    @property
    def drained(self) -> bool:
        """Whether every release was acknowledged or given up."""
        return not self._pending

    # --- engines ---------------------------------------------------------------------------------

    def _engine(self, key: EngineKey) -> EngineAddresses:
        engine = self._engines.get(key)
        if engine is None:
            self._make_room()
            engine = self._engines[key] = EngineAddresses(key, self._new_backoff())
        self._engines.move_to_end(key)
        return engine

    def _make_room(self) -> None:
        """Forget the idle engine that was used least recently; if none is idle, that engine's releases too."""
        if len(self._engines) < self._config.max_engines:
            return
        engines = self._engines.values()
        oldest = next((engine for engine in engines if not engine.releases), next(iter(engines)))
        for number in list(oldest.releases):
            self._give_up(self._pending[number], f"{self._config.max_engines} producer engines are in use")
        self._timers.disarm(oldest)
        del self._engines[oldest.key]

    def _ask(self, engine: EngineAddresses, now: float) -> None:
        """Ask the bootstrap, and again until it answers, as long as a release needs it."""
        if not engine.releases:
            return
        if not engine.asking:
            engine.asking = True
            self._out.append(Resolve(*engine.key))
        self._timers.arm(engine, engine.backoff.sent(now))

    # --- releases --------------------------------------------------------------------------------

    def _aim(self, pending: Pending, now: float) -> None:
        """Send to all ranks the bootstrap lists now, less those that have acknowledged."""
        pending.left = set(pending.engine.addresses) - pending.acked
        pending.engine.backoff = self._new_backoff()
        if not pending.left:
            self._drop(pending)
            return
        pending.backoff = self._new_backoff()
        self._send(pending, now)

    def _send(self, pending: Pending, now: float) -> None:
        for address in sorted(pending.left or ()):
            self._out.append(Send(address, pending.message))
        if pending.backoff.silent_for(now) >= self._config.refresh_s:
            pending.backoff.silent_since = now
            self._ask(pending.engine, now)
        self._timers.arm(pending, min(pending.backoff.sent(now), pending.deadline))

    def _give_up(self, pending: Pending, reason: str) -> None:
        where = ", ".join(sorted(pending.left)) if pending.left else f"no address known: {pending.engine.reason}"
        self._out.append(
            Notice(
                Level.WARNING,
                f"release of transfer {pending.message.transfer_id} to producer engine {pending.engine.key[1]} given "
                f"up ({where}): {reason}; the producer frees the blocks when its keep time or lease is over",
            )
        )
        self._drop(pending)

    def _drop(self, pending: Pending) -> None:
        del self._pending[pending.message.number]
        del self._numbers[pending.message.transfer_id, pending.engine.key]
        del pending.engine.releases[pending.message.number]
        self._timers.disarm(pending)
        if not pending.engine.releases:
            self._timers.disarm(pending.engine)

    def _unused_number(self) -> int:
        while (number := self._draw() % 2**32) in self._pending:
            pass
        return number

    def _new_backoff(self) -> Backoff:
        return Backoff(self._config.resend_s, self._config.resend_max_s)

    def _take(self) -> list[ReleaserEffect]:
        out, self._out = self._out, []
        return out
