"""Reading: batches under credits, each tried twice in its session and once in a fresh one.

Finished batches are never repeated. A read in which a call failed comes back, well or badly, only after
every session in which one failed is dead, because what such a call leaves behind goes on writing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from mooncake_hetero_tp.core.binding import Descriptors, batches
from mooncake_hetero_tp.io.credits import Cost, Credits
from mooncake_hetero_tp.io.sessions import Session, SessionTable
from mooncake_hetero_tp.io.transfer import Deadline, ReadFailed, ReadTally

logger = logging.getLogger(__name__)

_ATTEMPTS = 3
_TRIES_PER_SESSION = 2
_BURIAL_S = 15.0
"""How long a read waits for the end of a session in which a call of it failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineLimits:
    """How much is put into Mooncake at once.

    500 descriptors a batch are as fast over TCP as anything larger (one I/O thread does the copying), and
    1,000 in flight stay below the 1,024 that a peer's queue takes: a fuller queue makes transfers wait
    1 s and fail. Over TCP one descriptor uses one of a peer's four connections, so that the single
    descriptors of staged chunks need four calls to use them all; a call that waits sleeps (`calls.py`) and
    needs no core of its own.
    """

    batch_descriptors: int = 500
    batch_bytes: int = 64 * 2**20
    peer_descriptors: int = 1000
    peer_bytes: int = 256 * 2**20
    peer_calls: int = 4
    max_sessions: int = 64
    """Sessions kept for reading over TCP, one a peer; the longest unused one makes room."""


class _Call(NamedTuple):
    """How one engine call ended."""

    code: int
    seconds: float


class Reader:
    """Reads from peers in the sessions of one engine; any number of threads."""

    def __init__(
        self, sessions: SessionTable, limits: EngineLimits, clock: Callable[[], float], timeout_s: float
    ) -> None:
        """`timeout_s`: after which the foreign engine gives a call up."""
        self._timeout_s = timeout_s
        self._sessions = sessions
        self._limits = limits
        self._clock = clock
        self._credits = Credits(limits.peer_calls, limits.peer_descriptors, limits.peer_bytes)

    def read(self, peer: str, descriptors: Descriptors, deadline: Deadline) -> ReadTally:
        """See `TransferEngine.read`."""
        tally = ReadTally()
        failed: list[Session] = []
        try:
            for batch in batches(descriptors, self._limits.batch_descriptors, self._limits.batch_bytes):
                self._move(peer, batch, deadline, tally, failed)
        finally:
            self._bury(peer, failed)
        self._check(peer, deadline)
        return tally

    def in_flight(self, peer: str) -> Cost:
        """What the running calls to this peer hold."""
        return self._credits.in_flight(peer)

    def _move(self, peer: str, batch: Descriptors, deadline: Deadline, tally: ReadTally, failed: list[Session]) -> None:
        """Move one batch.

        A call that ran into the transport's timeout is tried once more, in a fresh session: connections were seen
        to hang over TCP while the peer was well. Where it is the peer that hangs, it answers no
        handshake, which is asked first.

        Raises:
            ReadFailed: late, stopped, timed out, or failed in its session, again in it, and in a fresh one.
        """
        tried: list[Session] = []
        hung = False
        while True:
            session = self._session(peer, tried, tally)
            call = self._call(session, peer, batch, deadline)
            if call is not None and call.code != 0:
                tried.append(session)
                failed.append(session)
                logger.warning("attempt %d of %d: %s", len(tried), _ATTEMPTS, _words(batch, peer, call))
            self._check(peer, deadline)
            if call is None:
                continue
            if call.code == 0:
                tally.count(batch, retries=len(tried))
                return
            if call.seconds >= self._timeout_s and not hung:
                hung = True
                self._replace(peer, session, tally)
            elif call.seconds >= self._timeout_s:
                raise ReadFailed(f"{_words(batch, peer, call)}: the peer does not answer")
            elif len(tried) == _ATTEMPTS:
                raise ReadFailed(
                    f"{_words(batch, peer, call)}, in a fresh session too; check that the peer runs and that its "
                    "address is reachable from here"
                )

    def _session(self, peer: str, tried: list[Session], tally: ReadTally) -> Session:
        """The session of the next attempt; one that failed twice is replaced."""
        session = self._sessions.current(peer)
        if tried.count(session) < _TRIES_PER_SESSION:
            return session
        self._replace(peer, session, tally)
        return self._sessions.current(peer)

    def _replace(self, peer: str, session: Session, tally: ReadTally) -> None:
        """Take a session out of use; the next attempt has a fresh one."""
        self._sessions.retire(peer, session)
        tally.replaced_sessions += 1

    def _call(self, session: Session, peer: str, batch: Descriptors, deadline: Deadline) -> _Call | None:
        """One engine call; None where there was none (no credits in time, session retired)."""

        def wanted() -> bool:
            return not deadline.stopped and self._clock() < deadline.at

        with self._credits.hold(peer, Cost(batch.count, batch.bytes), wanted=wanted) as held:
            if not held or not wanted():
                return None
            began = time.monotonic()
            code = session.read(peer, batch)
            return None if code is None else _Call(code, time.monotonic() - began)

    def _check(self, peer: str, deadline: Deadline) -> None:
        """Raises ReadFailed if the read no longer counts."""
        late_s = self._clock() - deadline.at
        if deadline.stopped:
            raise ReadFailed(f"the read from {peer} was stopped")
        if late_s >= 0:
            raise ReadFailed(
                f"the read from {peer} is {late_s:.3f} s past its deadline; what comes late does not count"
            )

    def _bury(self, peer: str, failed: list[Session]) -> None:
        """Wait until nothing that failed calls left behind can write any more.

        Raises:
            ReadFailed: with `may_still_write`, where that takes too long.
        """
        for session in failed:
            self._sessions.retire(peer, session)
        for session in failed:
            if not session.wait_dead(_BURIAL_S):
                raise ReadFailed(
                    f"a session with {peer} in which a call failed still runs others after {_BURIAL_S:g} s",
                    may_still_write=True,
                )


def _words(batch: Descriptors, peer: str, call: _Call) -> str:
    return (
        f"reading {batch.count} descriptors, {batch.bytes} bytes, from {peer} returned {call.code} "
        f"after {call.seconds:.3f} s"
    )
