"""Handshakes as a producer rank answers them: who may pull from it, and the sessions it has drawn."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from mooncake_hetero_tp.core.codec import engine_tag
from mooncake_hetero_tp.core.messages import PROBE, PROTOCOL_VERSION, Hello, Offer, Refuse, Welcome
from mooncake_hetero_tp.core.regions import RankTable
from mooncake_hetero_tp.errors import PeerProtocolError
from mooncake_hetero_tp.types import Identity, Mismatch, SessionId, Severity

Compare = Callable[[RankTable, RankTable], tuple[Mismatch, ...]]
"""`core.handshake.compare(producer, consumer)`."""
Validate = Callable[[RankTable], None]
"""`core.tables.validate_table`; raises PeerProtocolError."""

OLDEST_VERSION: Final = 1
"""Oldest protocol version this package still speaks."""
_SESSION_BITS: Final = 32
"""With the 32 random bits of a pull number this makes 64: no stale message meets a live pull by chance."""


@dataclass(slots=True, eq=False)
class Session:
    """What a producer rank knows of one consumer rank's process."""

    id: SessionId
    consumer: Identity
    tag: int
    """`engine_tag` of the consumer's engine; names it in a Release."""
    pulls: int = 0
    """Live pulls; a session that has any is not evicted."""
    table: RankTable | None = None
    """The consumer's, where `staging` is not None: a chunk is cut by both tables."""
    staging: Offer | None = None
    """The consumer's ring; None: its pulls are never staged."""


class SessionTable:
    """At most `limit` sessions, one per consumer process and rank; idle ones make room, oldest use first.

    A session is not bound to a ZMQ peer: a reconnected socket has another routing id.
    """

    def __init__(self, limit: int, draw: Callable[[], int]) -> None:
        self._limit = limit
        self._draw = draw
        self._by_id: OrderedDict[SessionId, Session] = OrderedDict()
        self._by_consumer: dict[Identity, Session] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def open(self, consumer: Identity) -> Session | None:
        """The session of this process and rank, a new one if need be; None: all are in use."""
        known = self._by_consumer.get(consumer)
        if known is not None:
            self._by_id.move_to_end(known.id)
            return known
        if len(self._by_id) >= self._limit and not self._evict():
            return None
        session = Session(self._unused_id(), consumer, engine_tag(consumer.engine_id))
        self._by_id[session.id] = self._by_consumer[consumer] = session
        return session

    def use(self, session_id: SessionId) -> Session | None:
        """The session a message names, marked as used; None: evicted, or of another incarnation."""
        session = self._by_id.get(session_id)
        if session is not None:
            self._by_id.move_to_end(session_id)
        return session

    def _unused_id(self) -> SessionId:
        while True:
            drawn = SessionId(self._draw() % 2**_SESSION_BITS)
            if drawn and drawn not in self._by_id:
                return drawn

    def _evict(self) -> bool:
        idle = next((session for session in self._by_id.values() if not session.pulls), None)
        if idle is None:
            return False
        del self._by_id[idle.id], self._by_consumer[idle.consumer]
        return True


@dataclass(frozen=True, slots=True)
class Desk:
    """What a producer rank says of itself, and how it judges others."""

    identity: Identity
    table: RankTable
    transport_session: str
    lease_s: float
    compare: Compare
    validate: Validate
    staging: Offer | None = None


class Reception:
    """Answers Hello: Welcome with a session, or Refuse with every reason at once."""

    def __init__(self, desk: Desk, sessions: SessionTable) -> None:
        self._desk = desk
        self._sessions = sessions

    def answer(self, hello: Hello) -> Welcome | Refuse:
        """A probe gets a Welcome whatever it is, and leaves nothing behind."""
        if PROBE in hello.features:
            return self._welcome(hello, SessionId(0))
        found = objections(hello, self._desk)
        session = None if found else self._sessions.open(hello.identity)
        if session is not None:
            session.staging = hello.staging if self._desk.staging else None
            session.table = hello.table if session.staging else None
            return self._welcome(hello, session.id)
        return Refuse(self._desk.identity, hello.attempt, found or (self._all_in_use(),))

    def _welcome(self, hello: Hello, session: SessionId) -> Welcome:
        return Welcome(
            version=min(hello.max_version, PROTOCOL_VERSION),
            features=(),
            identity=self._desk.identity,
            attempt=hello.attempt,
            session=session,
            transport_session=self._desk.transport_session,
            lease_s=self._desk.lease_s,
            table=self._desk.table,
            staging=self._desk.staging,
        )

    def _all_in_use(self) -> Mismatch:
        return _refusal(
            "sessions",
            f"all {len(self._sessions)} in use",
            "one more",
            "no pull can be served",
            "run fewer consumer ranks per producer",
        )


def objections(hello: Hello, desk: Desk) -> tuple[Mismatch, ...]:
    """Every reason to refuse this Hello, with the harmless differences beside them; empty: welcome.

    Who is addressed comes first: a stale address is no reason to compare geometry.
    """
    wrong = _wrong_address(hello, desk.identity) or _wrong_version(hello)
    if wrong:
        return wrong
    try:
        desk.validate(hello.table)
    except PeerProtocolError as error:
        remedy = "run the same mooncake-hetero-tp version on both sides"
        return (_refusal("region table", "expects a valid one", str(error), "nothing can be planned with it", remedy),)
    found = desk.compare(desk.table, hello.table)
    return found if any(mismatch.severity is Severity.REFUSE for mismatch in found) else ()


def _wrong_address(hello: Hello, identity: Identity) -> tuple[Mismatch, ...]:
    pairs: list[tuple[str, str, str]] = [("engine id", identity.engine_id, hello.expected_engine)]
    if hello.expected_incarnation is not None:
        pairs.append(("incarnation", identity.incarnation, hello.expected_incarnation))
    remedy = "query the bootstrap server again; if it repeats this, its registration is stale"
    return tuple(
        _refusal(name, own, expected, "another process answers at this address", remedy)
        for name, own, expected in pairs
        if own != expected
    )


def _wrong_version(hello: Hello) -> tuple[Mismatch, ...]:
    if hello.min_version <= PROTOCOL_VERSION and hello.max_version >= OLDEST_VERSION:
        return ()
    own = f"{OLDEST_VERSION} to {PROTOCOL_VERSION}"
    theirs = f"{hello.min_version} to {hello.max_version}"
    remedy = "install mooncake-hetero-tp of one protocol version on both sides"
    return (_refusal("protocol version", own, theirs, "the sides do not understand each other", remedy),)


def _refusal(name: str, producer: str, consumer: str, effect: str, remedy: str) -> Mismatch:
    return Mismatch(name, producer, consumer, Severity.REFUSE, effect, remedy)
