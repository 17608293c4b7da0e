"""Valid frames of every kind, and ways to damage them."""

from __future__ import annotations

import random
from typing import Any

import msgspec

from mooncake_hetero_tp.core.codec import encode
from mooncake_hetero_tp.core.messages import (
    Cancel,
    Claim,
    Gone,
    GoneReason,
    Grant,
    Hello,
    Offer,
    PairCut,
    Pull,
    Ready,
    Refuse,
    Release,
    ReleaseAck,
    Renew,
    Stage,
    Staged,
    Waiting,
    Welcome,
)
from mooncake_hetero_tp.types import (
    EngineId,
    Identity,
    Incarnation,
    Nonce,
    PullId,
    Rank,
    RequestId,
    SessionId,
    TokenRange,
    TransferId,
)
from tests.machines import DECODE, MISFIT, PREFILL, identity
from tests.tables import DST, Dense

NUMBERS = (0, 1, 2, 3, 50, 51, 1000, 1001, 2**31, 2**63 - 1)
"""Small ones meet live sessions, pulls and nonces of `tests.machines`; the last is the largest that decodes."""
TRANSFERS = ("xfer-1", "xfer-2", "unknown")

PRODUCER_TABLE = Dense(4, layers=2).table()
CONSUMER_TABLE = Dense(4, tp=2, layers=2, base=DST).table()


def from_consumer(rng: random.Random) -> Any:
    """Any message a producer may receive, with numbers that often hit something."""
    session, pull, nonce = SessionId(rng.choice(NUMBERS)), PullId(rng.choice(NUMBERS)), Nonce(rng.choice(NUMBERS))
    transfer = TransferId(rng.choice(TRANSFERS))
    ends = [
        TokenRange(rng.choice(NUMBERS), rng.choice((0, 1, 4, 7, 2**63 - 1))) for _ in range(rng.choice((0, 1, 1, 1, 2)))
    ]
    expected = rng.choice((None, None, Incarnation("other")))
    version = rng.choice((0, 1, 1, 1, 7))
    staging = rng.choice((None, Offer(64, 2), Offer(2**63 - 1, 1)))
    wanted = tuple(rng.choice(NUMBERS[:6]) for _ in range(rng.randint(0, 4)))
    cuts = tuple(PairCut(rng.choice((0, 1, 1, 5)), rng.choice((0, 1)), 0, 1) for _ in range(rng.choice((0, 1, 2))))
    return rng.choice(
        (
            Hello(
                version, version, (), identity(DECODE, rng.randint(0, 3)), PREFILL, expected, 1, CONSUMER_TABLE, staging
            ),
            Pull(session, pull, transfer, RequestId("d-1"), tuple(ends)),
            Claim(session, pull, nonce),
            Renew(session, pull, nonce),
            Stage(session, pull, rng.choice(NUMBERS), wanted, tuple(ends), cuts),
            Cancel(session, pull),
            Release(rng.choice(NUMBERS), rng.choice(NUMBERS), transfer),
        )
    )


def from_producer(rng: random.Random) -> Any:
    """Any message a consumer may receive, with numbers that often hit something."""
    session, pull, nonce = SessionId(rng.choice(NUMBERS)), PullId(rng.choice(NUMBERS)), Nonce(rng.choice(NUMBERS))
    who = Identity(rng.choice((PREFILL, EngineId("x"))), Incarnation("00000000000000aa"), Rank(tp=rng.choice((0, 9))))
    blocks = tuple(b"\1\0\0\0" * rng.randint(0, 3) for _ in range(rng.randint(0, 2)))
    lease_s = rng.choice((0.1, 10.0, 86_400.0))
    staging = rng.choice((None, Offer(64, 2)))
    return rng.choice(
        (
            Welcome(
                rng.choice((1, 1, 9)), (), who, rng.choice(NUMBERS), session, "t0", lease_s, PRODUCER_TABLE, staging
            ),
            Refuse(who, rng.choice(NUMBERS), (MISFIT,) * rng.randint(0, 2)),
            Waiting(session, pull),
            Ready(session, pull),
            Gone(session, pull, rng.choice(tuple(GoneReason))),
            Grant(session, pull, nonce, lease_s, rng.choice(NUMBERS), rng.choice(NUMBERS), blocks),
            Staged(session, pull, rng.choice(NUMBERS), rng.choice(NUMBERS), rng.choice((1, 64, 65)), 7),
            ReleaseAck(rng.choice(NUMBERS)),
        )
    )


def damaged(rng: random.Random, message: Any) -> bytes:
    """A frame of it, cut, with other bytes in it, or with another value somewhere inside."""
    frame = bytearray(encode(message))
    how = rng.randrange(4)
    if how == 0:
        return bytes(frame[: rng.randrange(len(frame) + 1)])
    if how == 1:
        for _ in range(rng.randint(1, 6)):
            frame[rng.randrange(len(frame))] = rng.randrange(256)
        return bytes(frame)
    if how == 2:
        place = rng.randrange(len(frame) + 1)
        return bytes(frame[:place]) + rng.randbytes(rng.randint(1, 9)) + bytes(frame[place:])
    return bytes(frame[:1]) + msgspec.msgpack.encode(_with_a_wrong_value(rng, msgspec.msgpack.decode(bytes(frame[1:]))))


ABSURD: tuple[Any, ...] = (
    None,
    -1,
    0,
    2**63 - 1,
    2**63,
    2**64 - 1,
    1e300,
    float("nan"),
    "",
    "x" * 600,
    b"\0",
    [],
    {},
    True,
)


def _with_a_wrong_value(rng: random.Random, value: Any) -> Any:
    """The same structure with one leaf (or a whole branch) replaced."""
    if isinstance(value, list) and value and rng.random() < 0.9:
        place = rng.randrange(len(value))
        return [*value[:place], _with_a_wrong_value(rng, value[place]), *value[place + 1 :]]
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        return {**value, key: _with_a_wrong_value(rng, value[key])}
    if isinstance(value, int) and rng.random() < 0.5:
        return max(value + rng.choice((-1, 1, 1000, -1000)), -(2**63))
    return rng.choice(ABSURD)
