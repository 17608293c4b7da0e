"""What a consumer rank asks a producer rank about a pull, when it asks again, and the settings of both."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

from mooncake_hetero_tp.core.effects import ConsumerEffect, Send
from mooncake_hetero_tp.core.links import LinkConfig
from mooncake_hetero_tp.core.messages import Cancel, Claim, Offer, Pull, Renew
from mooncake_hetero_tp.core.pulls import PairPull, Request
from mooncake_hetero_tp.core.timers import Timers
from mooncake_hetero_tp.types import Nonce


@dataclass(frozen=True, kw_only=True, slots=True)
class ConsumerConfig:
    """Times and table bounds of one consumer rank; times in seconds."""

    deadline_s: float = 420.0
    """A started request has ended by then; less than the producer's keep time."""
    connect_timeout_s: float = 30.0
    """Bound of resolving an engine and shaking hands with all its ranks."""
    resend_s: float = 0.25
    """First repetition of an unanswered message; doubles up to `resend_max_s`."""
    resend_max_s: float = 4.0
    heartbeat_s: float = 10.0
    """How often a pull that the producer lets wait says that it is still there."""
    silence_s: float = 10.0
    """A producer rank that answers nothing for so long is taken for gone."""
    refuse_cache_s: float = 30.0
    """How long a refusal stands before the engine is asked again."""
    max_requests: int = 65536
    max_engines: int = 1024
    staging: Offer | None = None
    """Our ring; None: every pull is read directly."""
    staging_window: int = 8
    """Chunks of one pull that are asked for or read at a time, where slots and shares allow it; by default all slots
    of the default ring: over TCP loopback on two cores a tenth faster than half of them."""

    def for_links(self) -> LinkConfig:
        """The part that concerns producer engines."""
        return LinkConfig(
            connect_timeout_s=self.connect_timeout_s,
            resend_s=self.resend_s,
            resend_max_s=self.resend_max_s,
            refuse_cache_s=self.refuse_cache_s,
            max_engines=self.max_engines,
            staging=self.staging,
        )


class Asker:
    """Sends the questions of pulls, stamps them, and arms the timer that repeats them."""

    def __init__(self, config: ConsumerConfig, timers: Timers[Request | PairPull], out: list[ConsumerEffect]) -> None:
        self._config = config
        self._timers = timers
        self._out = out
        self._nonces = count(1)

    def ask(self, pull: PairPull, now: float) -> None:
        """Pull, first or again, or as the heartbeat of one that waits; a Claim too, where nothing has to be waited for."""
        asked = pull.request.asked
        nonce = self._stamp(pull, now)
        message = Pull(pull.session, pull.number, asked.transfer_id, asked.request_id, pull.ranges, nonce)
        self._out.append(Send(pull.address, message))
        self._await(pull, now)

    def ask_later(self, pull: PairPull, when: float) -> None:
        """The producer answered that there is nothing yet."""
        pull.backoff.heard(when)
        self._timers.arm(pull, when)

    def claim(self, pull: PairPull, now: float) -> None:
        """Claim, each time with a nonce of its own, because its deadline counts from this sending."""
        self._out.append(Send(pull.address, Claim(pull.session, pull.number, self._stamp(pull, now))))
        self._await(pull, now)

    def renew(self, pull: PairPull, now: float) -> None:
        """Ask for more time; come back at the lease's end at the latest."""
        self._out.append(Send(pull.address, Renew(pull.session, pull.number, self._stamp(pull, now))))
        self._timers.arm(pull, min(pull.backoff.sent(now), pull.deadline))

    def renew_later(self, pull: PairPull, sent: float, now: float) -> None:
        """Half of a lease is for reading in peace, the other half for renewals that get lost."""
        pull.backoff.heard(max(now, sent + pull.lease_s / 2))
        self._timers.arm(pull, pull.backoff.next_at)

    def cancel(self, pull: PairPull) -> None:
        """We will not count any read of it from now on."""
        self._out.append(Send(pull.address, Cancel(pull.session, pull.number)))

    def _stamp(self, pull: PairPull, now: float) -> Nonce:
        nonce = Nonce(next(self._nonces))
        pull.questions[nonce] = now
        return nonce

    def _await(self, pull: PairPull, now: float) -> None:
        """Come back when the question is to be repeated, or its addressee counts as silent."""
        repeat = pull.backoff.sent(now)
        since = now if pull.backoff.silent_since is None else pull.backoff.silent_since
        self._timers.arm(pull, min(repeat, since + self._config.silence_s))
