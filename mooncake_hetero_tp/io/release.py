"""The consumer scheduler's small I/O thread: one Release per transfer to every producer rank."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterable

from mooncake_hetero_tp.core.codec import decode_from_producer, encode
from mooncake_hetero_tp.core.effects import Notice, ReleaserEffect, Resolve, ResolvedEngine, ResolveFailed, Send
from mooncake_hetero_tp.core.messages import ReleaseAck
from mooncake_hetero_tp.core.releaser import ReleaserConfig, ReleaserMachine
from mooncake_hetero_tp.errors import PeerProtocolError
from mooncake_hetero_tp.io import bootstrap_client
from mooncake_hetero_tp.io.control import ControlChannel, Inbox
from mooncake_hetero_tp.io.loop import Loop
from mooncake_hetero_tp.io.pool import WorkerPool
from mooncake_hetero_tp.types import EngineId, TransferId

logger = logging.getLogger(__name__)

_RESOLVERS = 4
_QUERY_JOIN_S = 5.0


class ReleaseClient:
    """Sends releases in the background, repeated until every rank has acknowledged or it is given up."""

    def __init__(
        self,
        own_engine: EngineId,
        config: ReleaserConfig | None = None,
        *,
        connector_timeout_s: float = 30.0,
        close_timeout_s: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], int] = lambda: secrets.randbits(63),
    ) -> None:
        """Nothing runs before `start`.

        Args:
            own_engine: the consumer engine's id.
            config: times and bounds.
            connector_timeout_s: of one bootstrap query (VLLM_MOONCAKE_CONNECTOR_TIMEOUT).
            close_timeout_s: how long `close` waits for acknowledgements.
            clock: monotonic seconds.
            draw: random 63-bit numbers.
        """
        self._machine = ReleaserMachine(own_engine, config or ReleaserConfig(), draw=draw)
        self._connector_timeout_s = connector_timeout_s
        self._close_timeout_s = close_timeout_s
        self._clock = clock
        self._resolvers = WorkerPool("mht-release-resolve", _RESOLVERS)
        self._actor: _Releaser | None = None
        self._loop: Loop | None = None

    def start(self) -> None:
        """Start the thread. Idempotent."""
        if self._loop is not None:
            return
        channel = ControlChannel()
        self._actor = _Releaser(self._machine, channel, self._resolve, self._close_timeout_s)
        self._loop = Loop("mht-release", channel, self._actor, self._clock)
        self._loop.start()

    def release(self, transfer_id: TransferId, engine_id: EngineId, bootstrap: str) -> None:
        """Tell every rank of the producer engine that this engine will not read the transfer (again).

        Never blocks and never raises: where the thread is gone the producer's own expiry frees the blocks.
        """
        actor, loop = self._actor, self._loop
        if actor is None or loop is None:
            logger.error("release of transfer %s: the release thread is not started", transfer_id)
        elif not loop.post(lambda now: actor.release(transfer_id, engine_id, bootstrap, now)):
            logger.error("release of transfer %s: the release thread has ended", transfer_id)

    def close(self) -> None:
        """Wait a little for what is outstanding, send the rest once more, end the thread. Bounded; idempotent."""
        if self._loop is not None and not self._loop.stop(self._close_timeout_s + 1.0):
            logger.error("the release thread did not end in time")
        self._resolvers.close(_QUERY_JOIN_S, drop_queued=True)

    def wake(self) -> None:
        """Look at the clock now; for clocks that jump."""
        if self._loop is not None:
            self._loop.wake()

    def _resolve(self, effect: Resolve) -> None:
        self._resolvers.submit(lambda: self._query(effect))

    def _query(self, effect: Resolve) -> None:
        answer = bootstrap_client.query(effect.bootstrap, effect.engine_id, timeout_s=self._connector_timeout_s)
        actor, loop = self._actor, self._loop
        if actor is not None and loop is not None:
            loop.post(lambda now: actor.resolved(answer, now))


class _Releaser:
    """The loop's actor around the ReleaserMachine."""

    def __init__(
        self,
        machine: ReleaserMachine,
        channel: ControlChannel,
        resolve: Callable[[Resolve], None],
        close_timeout_s: float,
    ) -> None:
        self._close_timeout_s = close_timeout_s
        self._give_up_at: float | None = None
        self._machine = machine
        self._channel = channel
        self._resolve = resolve

    def release(self, transfer_id: TransferId, engine_id: EngineId, bootstrap: str, now: float) -> None:
        self._perform(self._machine.release(transfer_id, engine_id, bootstrap, now), now)

    def resolved(self, answer: ResolvedEngine | ResolveFailed, now: float) -> None:
        self._perform(self._machine.resolved(answer, now), now)

    def received(self, inbox: Inbox, now: float) -> None:
        for address, frame in inbox.from_producers:
            try:
                message = decode_from_producer(frame)
            except PeerProtocolError as error:
                logger.warning("message of %s is ignored: %s", address, error)
                continue
            if isinstance(message, ReleaseAck):
                self._perform(self._machine.receive(address, message, now), now)

    def tick(self, now: float) -> None:
        self._perform(self._machine.tick(now), now)
        if self._give_up_at is not None and now >= self._give_up_at:
            self._perform(self._machine.close(now), now)

    def next_deadline(self) -> float | None:
        dues = [due for due in (self._machine.next_deadline(), self._give_up_at) if due is not None]
        return min(dues, default=None)

    def closing(self, now: float) -> None:
        self._give_up_at = now + self._close_timeout_s

    def drained(self) -> bool:
        return self._machine.drained

    def crashed(self, error: BaseException) -> None:
        """The loop has logged it; producers free unreleased blocks when their keep time is over."""

    def _perform(self, effects: Iterable[ReleaserEffect], now: float) -> None:
        for effect in effects:
            match effect:
                case Send(address, message):
                    self._channel.send(address, encode(message), now)
                case Resolve():
                    self._resolve(effect)
                case Notice(level, text):
                    logger.log(logging.getLevelNamesMapping()[level.value.upper()], "%s", text)
