"""Versioned, bounded wire messages between a producer rank and consumer ranks (msgpack over ZMQ).

D -> P: Hello, Pull, Claim, Renew, Cancel, Release.   P -> D: Welcome, Refuse, Waiting, Ready, Gone, Grant, ReleaseAck.

After the handshake a message names its session and pull by number, so that all control traffic of
one (consumer rank, producer rank, request) stays under 256 bytes plus 4 bytes a producer block.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final, TypeAlias

import msgspec

from mooncake_hetero_tp.core.regions import RankTable
from mooncake_hetero_tp.types import (
    EngineId,
    Identity,
    Incarnation,
    Mismatch,
    Nonce,
    PullId,
    RequestId,
    SessionId,
    TokenRange,
    TransferId,
)


class GoneReason(IntEnum):
    """Why a producer will not serve a pull."""

    ABORTED = 1
    """The producer's request was aborted before it finished."""
    EXPIRED = 2
    """The producer freed the blocks: keep time or lease over."""
    RELEASED = 3
    """A Release for this transfer arrived before this pull."""
    UNKNOWN_SESSION = 4
    """The session belongs to another incarnation; handshake again."""
    BEYOND_COMPUTED = 5
    """The range ends past the producer's computed tokens."""
    NULL_PAGE = 6
    """The range covers a page the producer has already dropped (null block)."""
    OVERLOADED = 7
    """A table of the producer is full."""
    NEVER_CAME = 8
    """The producer never learnt of this transfer id within the waiting time."""
    CLOSING = 9
    """The producer is shutting down."""


class Hello(msgspec.Struct, frozen=True, tag=1, array_like=True):
    """Opens (or re-opens) a session; idempotent for the same identity and `attempt`."""

    min_version: int
    max_version: int
    features: tuple[str, ...]
    identity: Identity
    expected_engine: EngineId
    expected_incarnation: Incarnation | None
    attempt: int
    table: RankTable


class Welcome(msgspec.Struct, frozen=True, tag=1, array_like=True):
    """The producer rank's table and the session to use."""

    version: int
    features: tuple[str, ...]
    identity: Identity
    attempt: int
    session: SessionId
    transport_session: str
    lease_s: float
    table: RankTable


class Refuse(msgspec.Struct, frozen=True, tag=2, array_like=True):
    """All reasons at once why this pair cannot exchange KV."""

    identity: Identity
    attempt: int
    mismatches: tuple[Mismatch, ...]


class Pull(msgspec.Struct, frozen=True, tag=2, array_like=True):
    """Asks for token ranges (one per KV cache group); may come before the producer knows the transfer."""

    session: SessionId
    pull: PullId
    transfer_id: TransferId
    request_id: RequestId
    ranges: tuple[TokenRange, ...]


class Ready(msgspec.Struct, frozen=True, tag=3, array_like=True):
    """The blocks are computed and kept; a Claim will be granted."""

    session: SessionId
    pull: PullId


class Gone(msgspec.Struct, frozen=True, tag=4, array_like=True):
    """The pull cannot be served, and why."""

    session: SessionId
    pull: PullId
    reason: GoneReason


class Claim(msgspec.Struct, frozen=True, tag=3, array_like=True):
    """Starts the lease; its clock starts when the consumer sends it."""

    session: SessionId
    pull: PullId
    nonce: Nonce


class Renew(msgspec.Struct, frozen=True, tag=4, array_like=True):
    """Extends a granted lease; answered by a Grant without blocks."""

    session: SessionId
    pull: PullId
    nonce: Nonce


class Grant(msgspec.Struct, frozen=True, tag=5, array_like=True):
    """A lease: the producer keeps these blocks for `lease_s` from receipt of the Claim with `nonce`.

    `blocks` holds one little-endian int32 array per group (position i = page i of the request, null
    pages included); empty on a renewal.
    """

    session: SessionId
    pull: PullId
    nonce: Nonce
    lease_s: float
    computed_tokens: int
    blocks: tuple[bytes, ...]


class Cancel(msgspec.Struct, frozen=True, tag=5, array_like=True):
    """The consumer gave this pull up (done or failed): its waiting place or lease may be dropped."""

    session: SessionId
    pull: PullId


class Waiting(msgspec.Struct, frozen=True, tag=6, array_like=True):
    """The pull is known and waits for its transfer; Ready or Gone follows."""

    session: SessionId
    pull: PullId


class Release(msgspec.Struct, frozen=True, tag=6, array_like=True):
    """From a consumer engine's scheduler: nobody *there* will count a read of this transfer again.

    `number` is drawn per release, so that a late duplicate is told from a new release; `consumer_tag`
    is `engine_tag` of the consumer's engine id, so that it ends only that engine's leases.
    """

    number: int
    consumer_tag: int
    transfer_id: TransferId


class ReleaseAck(msgspec.Struct, frozen=True, tag=7, array_like=True):
    """The producer rank has applied the Release with this number."""

    number: int


ConsumerMessage: TypeAlias = Hello | Pull | Claim | Renew | Cancel | Release
ProducerMessage: TypeAlias = Welcome | Refuse | Waiting | Ready | Gone | Grant | ReleaseAck

PROTOCOL_VERSION: Final = 1
"""First byte of every frame."""


def encode(message: ConsumerMessage | ProducerMessage) -> bytes:
    """One frame: the version byte and the msgpack of the message."""
    raise NotImplementedError


def decode_from_consumer(frame: bytes) -> ConsumerMessage:
    """Decode and check what a producer received. Raises PeerProtocolError."""
    raise NotImplementedError


def decode_from_producer(frame: bytes) -> ProducerMessage:
    """Decode and check what a consumer or releaser received. Raises PeerProtocolError."""
    raise NotImplementedError
