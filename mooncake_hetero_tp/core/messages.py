"""Versioned, bounded wire messages between a producer rank and consumers (msgpack over ZMQ).

D -> P: Hello, Pull, Claim, Renew, Stage, Cancel, Release.
P -> D: Welcome, Refuse, Waiting, Ready, Gone, Grant, Staged, ReleaseAck.

Type tags are one byte and distinct over both directions. After the handshake a message names its session and pull by number, and types by one byte, so that all
control traffic of one (consumer rank, producer rank, request) without renewals, the scheduler's Release
and its answer included, stays under 256 bytes plus 8 bytes a producer block. A staged pull adds a Stage and a
Staged for each chunk.

A field that came later is the last of its message and has a default: whoever does not know it leaves it out, or
skips it.

`core/codec.py` turns messages into frames and back; `Bounds` here are what it holds a peer to.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta

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

PROTOCOL_VERSION: Final = 1
"""First byte of every frame. Hello, Welcome and Refuse keep version 1 forever, so that sides of
unlike versions can tell each other so; what follows uses the version that Welcome names."""

PROBE: Final = "probe"
"""Feature of a Hello that asks who is there and wants no session (`mooncake-hetero-tp handshake probe`)."""

MAX_NAME: Final = 512
MAX_GROUPS: Final = 256
MAX_TEXT: Final = 65_536
MAX_MISMATCHES: Final = 65_536
MIN_LEASE_S: Final = 0.1
"""Shorter ones would be all renewals."""
MAX_LEASE_S: Final = 86_400.0
MAX_NUMBER: Final = 2**63 - 1
MAX_SLOTS: Final = 65_536
MAX_WANTED: Final = 64
"""Chunks that one pull asks for at a time."""
MAX_CUTS: Final = 65_536

Number = Annotated[int, Meta(ge=0, le=MAX_NUMBER)]
_Session = Annotated[SessionId, Meta(ge=0, le=MAX_NUMBER)]
_Pull = Annotated[PullId, Meta(ge=0, le=MAX_NUMBER)]
_Nonce = Annotated[Nonce, Meta(ge=0, le=MAX_NUMBER)]
_Transfer = Annotated[TransferId, Meta(min_length=1, max_length=MAX_NAME)]
_Request = Annotated[RequestId, Meta(min_length=1, max_length=MAX_NAME)]
_Engine = Annotated[EngineId, Meta(max_length=MAX_NAME)]
_Features = Annotated[tuple[Annotated[str, Meta(max_length=MAX_NAME)], ...], Meta(max_length=64)]
_LeaseS = Annotated[float, Meta(ge=MIN_LEASE_S, le=MAX_LEASE_S)]
_Ranges = Annotated[tuple[TokenRange, ...], Meta(max_length=MAX_GROUPS)]


class GoneReason(IntEnum):
    """Why a producer will not serve a pull."""

    ABORTED = 1
    """The producer's request was aborted before it finished."""
    EXPIRED = 2
    """The producer freed the blocks: keep time or lease over."""
    RELEASED = 3
    """A Release for this transfer arrived before this pull."""
    UNKNOWN_SESSION = 4
    """The session belongs to another incarnation or was dropped; handshake again."""
    BEYOND_COMPUTED = 5
    """The range ends past the producer's computed tokens."""
    NULL_PAGE = 6
    """The range covers a page the producer has already dropped (null block)."""
    OVERLOADED = 7
    """A table of the producer is full; asking again later may succeed."""
    NEVER_CAME = 8
    """The producer never learnt of this transfer id within the waiting time."""
    CLOSING = 9
    """The producer is shutting down."""
    BAD_RANGES = 10
    """The Pull does not name one range per KV cache group of the producer, or reuses a pull number."""
    OTHER_STATE = 11
    """The state kept for a state group is not the one after the range's last token."""
    NO_STAGING = 12
    """Only staging is refused; the lease stands, and the blocks can be read directly."""


class Offer(msgspec.Struct, frozen=True, array_like=True):
    """A staging ring: what one side says of its own. A pair's chunks fit into the smaller slot of the two."""

    slot_bytes: Annotated[int, Meta(ge=1, le=MAX_NUMBER)]
    slots: Annotated[int, Meta(ge=1, le=MAX_SLOTS)]


class Hello(msgspec.Struct, frozen=True, tag=1, array_like=True):
    """Opens (or re-opens) a session; idempotent for the same identity."""

    min_version: Number
    max_version: Number
    features: _Features
    identity: Identity
    expected_engine: _Engine
    expected_incarnation: Incarnation | None
    attempt: Number
    """Counted by the consumer; the answer repeats it."""
    table: RankTable
    staging: Offer | None = None
    """None: it has no ring, and asks for no chunks."""


class Welcome(msgspec.Struct, frozen=True, tag=33, array_like=True):
    """The producer rank's table and the session to use."""

    version: Number
    features: _Features
    identity: Identity
    attempt: Number
    session: _Session
    transport_session: Annotated[str, Meta(max_length=MAX_NAME)]
    lease_s: _LeaseS
    table: RankTable
    staging: Offer | None = None
    """None: it has no ring, and stages nothing."""


class Refuse(msgspec.Struct, frozen=True, tag=34, array_like=True):
    """All reasons at once why this pair cannot exchange KV."""

    identity: Identity
    attempt: Number
    mismatches: Annotated[tuple[Mismatch, ...], Meta(max_length=MAX_MISMATCHES)]


class Pull(msgspec.Struct, frozen=True, tag=2, array_like=True):
    """Asks for token ranges, one per KV cache group *of the producer*; may come before it knows the transfer.

    Repeated as a heartbeat while it waits. `pull` is drawn at random and never used again, so that
    (session, pull) names it beyond the life of either process.
    """

    session: _Session
    pull: _Pull
    transfer_id: _Transfer
    request_id: _Request
    ranges: _Ranges
    nonce: _Nonce | None = None
    """Where the blocks are ready when it arrives, it is the Claim as well, and a Grant with this nonce answers it."""


class Waiting(msgspec.Struct, frozen=True, tag=38, array_like=True):
    """The pull is known and waits, for its transfer or for slots; Ready, Staged or Gone follows.

    Also the answer to a Stage that wants nothing which is not under way already.
    """

    session: _Session
    pull: _Pull


class Ready(msgspec.Struct, frozen=True, tag=35, array_like=True):
    """The blocks are computed and kept; a Claim will be granted."""

    session: _Session
    pull: _Pull


class Gone(msgspec.Struct, frozen=True, tag=36, array_like=True):
    """The pull cannot be served, and why."""

    session: _Session
    pull: _Pull
    reason: GoneReason


class Claim(msgspec.Struct, frozen=True, tag=3, array_like=True):
    """Starts the lease; the consumer's clock for it starts when it sends this."""

    session: _Session
    pull: _Pull
    nonce: _Nonce


class Renew(msgspec.Struct, frozen=True, tag=4, array_like=True):
    """Extends a granted lease; answered by a Grant without blocks."""

    session: _Session
    pull: _Pull
    nonce: _Nonce


class Grant(msgspec.Struct, frozen=True, tag=37, array_like=True):
    """A lease: the producer keeps the blocks for `lease_s` from receipt of the Claim with `nonce`.

    `blocks` holds one little-endian int32 array per group of the producer (position i = page i of the
    request, null pages included); empty on a renewal.
    """

    session: _Session
    pull: _Pull
    nonce: _Nonce
    lease_s: _LeaseS
    request_tag: Number
    """Stands for the producer's request; equal on all its ranks, so that parts of two are not mixed."""
    computed_tokens: Number
    blocks: Annotated[tuple[bytes, ...], Meta(max_length=MAX_GROUPS)]


class PairCut(msgspec.Struct, frozen=True, array_like=True):
    """Global units that a pull reads from one region into another; places in the two region tables."""

    consumer_region: Number
    producer_region: Number
    global_start: Number
    count: Annotated[int, Meta(ge=1, le=MAX_NUMBER)]


class Stage(msgspec.Struct, frozen=True, tag=7, array_like=True):
    """Asks for chunks of a granted pull in the producer's ring, and gives back the slots of all others.

    Sent on every change and repeated until it is answered. From the two region tables, `cuts` and `ranges` both
    sides cut the pull into the same chunks, so that a number is all that names one.
    """

    session: _Session
    pull: _Pull
    serial: Number
    """Grows with every change; older ones are ignored, an equal one is a repetition."""
    wanted: Annotated[tuple[Number, ...], Meta(max_length=MAX_WANTED)]
    """Chunks that the consumer waits for or is reading; no other chunk's slot will be read any more."""
    ranges: _Ranges
    """One per KV cache group *of the consumer*, inside what its Pull asked for."""
    cuts: Annotated[tuple[PairCut, ...], Meta(max_length=MAX_CUTS)]


class Staged(msgspec.Struct, frozen=True, tag=40, array_like=True):
    """A chunk lies packed at `address` and stays until a Stage no longer wants it or the lease is over."""

    session: _Session
    pull: _Pull
    chunk: Number
    address: Number
    length_bytes: Annotated[int, Meta(ge=1, le=MAX_NUMBER)]
    gather_us: Number
    """How long packing it took, for the consumer's choice between direct and staged."""


class Cancel(msgspec.Struct, frozen=True, tag=5, array_like=True):
    """The consumer will not count any read of this pull from now on: its waiting place or lease may go."""

    session: _Session
    pull: _Pull


class Release(msgspec.Struct, frozen=True, tag=6, array_like=True):
    """From a consumer engine's scheduler: nobody *there* will count a read of this transfer again. Idempotent.

    `number` names it in its answer; `consumer_tag` is `engine_tag` of the consumer's engine id: only that
    engine's leases end, because a proxy that gave up on one decode engine may have sent another.
    """

    number: Number
    consumer_tag: Number
    transfer_id: _Transfer


class ReleaseAck(msgspec.Struct, frozen=True, tag=39, array_like=True):
    """The producer rank has applied the Release with this number."""

    number: Number


ConsumerMessage: TypeAlias = Hello | Pull | Claim | Renew | Stage | Cancel | Release
ProducerMessage: TypeAlias = Welcome | Refuse | Waiting | Ready | Gone | Grant | Staged | ReleaseAck
