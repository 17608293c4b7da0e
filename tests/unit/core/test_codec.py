"""Frames: every message comes back as it went; whatever else comes is a PeerProtocolError."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_hetero_tp.core import codec
from mooncake_hetero_tp.core.codec import (
    decode_from_consumer,
    decode_from_producer,
    encode,
    engine_tag,
    pack_blocks,
    unpack_blocks,
)
from mooncake_hetero_tp.core.messages import (
    Claim,
    Gone,
    GoneReason,
    Hello,
    Offer,
    Pull,
    Ready,
    Refuse,
    Release,
    Renew,
    Waiting,
    Welcome,
)
from mooncake_hetero_tp.core.regions import Axis, Buffer, Group, RankTable, Region, Span
from mooncake_hetero_tp.errors import LocalUsageError, PeerProtocolError
from mooncake_hetero_tp.types import EngineId, TokenRange
from tests.machines import DECODE, MISFIT, PREFILL, identity, rank_table
from tests.messages import FROM_CONSUMER, FROM_PRODUCER

REGION = Region(
    layer="model.layers.0.self_attn.attn",
    component="k",
    group=0,
    base=4096,
    block_stride=65536,
    num_blocks=8,
    spans=(Span(0, 2, 2),),
    unit=Axis(2, 8192),
    token=Axis(16, 512),
    channel=Axis(128, 4),
    item_bytes=4,
    dtype="float32",
    encoding="cpu_attn",
)
TABLE = RankTable(2, 1, "LBHNC", {"kv_heads": "4"}, (Group(0, "attention", 32, 16),), (REGION,), (Buffer(0, 10**6),))


def hello(table: RankTable = TABLE, **changes: Any) -> Hello:
    fields: dict[str, Any] = {
        "min_version": 1,
        "max_version": 1,
        "features": ("staging",),
        "identity": identity(DECODE),
        "expected_engine": PREFILL,
        "expected_incarnation": None,
        "attempt": 3,
        "table": table,
    }
    return Hello(**{**fields, **changes})


@given(message=FROM_CONSUMER)
def test_round_trip_from_consumers(message: Any) -> None:
    assert decode_from_consumer(encode(message)) == message


@given(message=FROM_PRODUCER)
def test_round_trip_from_producers(message: Any) -> None:
    assert decode_from_producer(encode(message)) == message


def test_round_trip_of_tables() -> None:
    greeting = hello()
    assert decode_from_consumer(encode(greeting)) == greeting
    welcome = Welcome(1, (), identity(PREFILL), 3, 5, "10.0.0.1:7000", 30.0, TABLE)  # type: ignore[arg-type]
    assert decode_from_producer(encode(welcome)) == welcome
    refusal = Refuse(identity(PREFILL), 3, (MISFIT,))
    assert decode_from_producer(encode(refusal)) == refusal


def test_round_trip_of_offers() -> None:
    greeting = hello(staging=Offer(2**20, 8))
    assert decode_from_consumer(encode(greeting)) == greeting
    welcome = Welcome(1, (), identity(PREFILL), 3, 5, "t", 30.0, TABLE, Offer(2**25, 4))  # type: ignore[arg-type]
    assert decode_from_producer(encode(welcome)) == welcome


def test_a_peer_that_knows_no_staging_is_understood_and_understands() -> None:
    """Its handshakes lack the last field, and it skips ours."""
    old_hello = msgspec.defstruct(
        "OldHello", [(name, Any) for name in Hello.__struct_fields__[:-1]], tag=1, array_like=True, frozen=True
    )
    fields = msgspec.structs.astuple(hello())[:-1]
    assert decode_from_consumer(b"\x01" + msgspec.msgpack.encode(old_hello(*fields))) == hello()
    frame = encode(hello(staging=Offer(2**20, 8)))
    seen: Any = msgspec.msgpack.decode(frame[1:], type=old_hello)
    assert (seen.attempt, hasattr(seen, "staging")) == (3, False)


def raw(*fields: Any) -> bytes:
    """A frame that no encoder of ours would make."""
    return b"\x01" + msgspec.msgpack.encode(fields)


HELLO_FIELDS = (1, *msgspec.structs.astuple(hello())[:-1])


@pytest.mark.parametrize(
    "frame,words",
    [
        (b"", "nothing"),
        (b"\x02\x90", "protocol version 1, got version byte 2"),
        (b"\x01", "msgpack"),
        (b"\x01\xc1", "msgpack"),
        (encode(Claim(1, 2, 3))[:-1], "msgpack"),  # type: ignore[arg-type]
        (raw(99, 1, 2), "known type"),
        (raw(3, 1, 2), "known type"),
        (raw(3, -1, 2, 3), "int` >= 0"),
        (raw(3, 1, 2**63, 3), "int` <= 9223372036854775807"),
        (raw(3, 1.5, 2, 3), "Expected `int`"),
        (raw(2, 1, 2, "", "r", []), "length >= 1"),
        (raw(2, 1, 2, "t" * 513, "r", []), "length <= 512"),
        (raw(2, 1, 2, "t", "r", [[0, 1]] * 257), "length <= 256"),
        (raw(2, 1, 2, "t", "r", [[-1, 4]]), "Pull, group 0"),
        (raw(2, 1, 2, "t", "r", [[0, 2**63]]), "Pull, group 0"),
        (raw(7, 1, 2, 0, [0] * 65, [], []), "length <= 64"),
        (raw(7, 1, 2, 0, [-1], [], []), "int` >= 0"),
        (raw(7, 1, 2, 0, [], [[0, -1]], []), "Stage, group 0"),
        (raw(7, 1, 2, 0, [], [], [[0, 0, 0, 0]]), "int` >= 1"),
        (raw(7, 1, 2, 0, [], [], [[0, 0, 0, 1]] * 65_537), "length <= 65536"),
        (raw(*HELLO_FIELDS, [0, 8]), "int` >= 1"),
        (raw(*HELLO_FIELDS, [1, 65_537]), "int` <= 65536"),
        (b"\x01\x95\x03\x01\x02\x03" + b"\x91" * 100_000, "msgpack"),
        (b"\x01\x92\x02\xdd\xff\xff\xff\xff", "message from a peer"),
    ],
)
def test_bad_frames_of_consumers(frame: bytes, words: str) -> None:
    with pytest.raises(PeerProtocolError, match=r"expected .*, got .*; run the same") as caught:
        decode_from_consumer(frame)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "frame,words",
    [
        (raw(37, 1, 2, 3, math.nan, 0, 16, []), "message from a peer"),
        (raw(37, 1, 2, 3, math.inf, 0, 16, []), "float` <= 86400"),
        (raw(37, 1, 2, 3, -1.0, 0, 16, []), "float` >= 0.1"),
        (
            raw(37, 1, 2, 3, 30.0, 0, 16, [b"\0\0\0"]),
            "blocks of group 0 from a peer: expected a multiple of 4 bytes, got 3",
        ),
        (raw(36, 1, 2, 77), "known type"),
        (raw(40, 1, 2, 0, 4096, 0, 7), "int` >= 1"),
        (raw(40, 1, 2, 0, 2**63, 5, 7), "int` <= 9223372036854775807"),
        (raw(33, 1, [], {"engine_id": "", "incarnation": "i", "rank": {}}, 1, 1, "s", 1.0, TABLE), "engine id"),
        (raw(34, {"engine_id": "e", "incarnation": "i", "rank": {"tp": -1}}, 1, []), "rank"),
        (raw(34, identity(PREFILL), 1, [MISFIT] * 65_537), "length <= 65536"),
    ],
)
def test_bad_frames_of_producers(frame: bytes, words: str) -> None:
    with pytest.raises(PeerProtocolError, match=r"expected .*, got .*; run the same") as caught:
        decode_from_producer(frame)
    assert words in str(caught.value)


def test_a_refusal_with_an_endless_text_is_not_taken() -> None:
    frame = encode(Refuse(identity(PREFILL), 1, (msgspec.structs.replace(MISFIT, effect="x" * 65_537),)))
    with pytest.raises(PeerProtocolError, match="mismatch 0 from a peer: expected texts of at most 65536 characters"):
        decode_from_producer(frame)


@pytest.mark.parametrize(
    "table,words",
    [
        (rank_table(1, [Group(0, "attention", 16, 16)] * 257), "groups from a peer: expected at most 256, got 257"),
        (msgspec.structs.replace(TABLE, model={str(i): "" for i in range(1025)}), "model fields"),
        (msgspec.structs.replace(TABLE, buffers=(Buffer(2**63, 1),)), "numbers of 64 signed bits"),
        (
            msgspec.structs.replace(TABLE, regions=(msgspec.structs.replace(REGION, unit=Axis(1, -(2**63))),)),
            "numbers of 64 signed bits",
        ),
    ],
)
def test_absurd_tables(table: RankTable, words: str) -> None:
    with pytest.raises(PeerProtocolError) as caught:
        decode_from_consumer(encode(hello(table)))
    assert words in str(caught.value)


def test_size_limits_hold_on_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    claim, greeting = Claim(1, 2, 3), hello()  # type: ignore[arg-type]
    monkeypatch.setattr(codec, "MAX_FRAME", 4)
    monkeypatch.setattr(codec, "MAX_TABLE_FRAME", 10_000)
    with pytest.raises(LocalUsageError, match="Claim: expected at most 4 bytes, got 6"):
        encode(claim)
    with pytest.raises(PeerProtocolError, match="expected at most 4 bytes, got 6"):
        decode_from_consumer(b"\x01" + msgspec.msgpack.encode(claim))
    assert decode_from_consumer(encode(greeting)) == greeting
    monkeypatch.setattr(codec, "MAX_TABLE_FRAME", 40)
    with pytest.raises(PeerProtocolError, match="expected at most 40 bytes"):
        decode_from_consumer(b"\x01" + msgspec.msgpack.encode(greeting))


def test_long_error_texts_are_cut() -> None:
    with pytest.raises(PeerProtocolError) as caught:
        decode_from_consumer(raw(*["x" * 10_000] * 3))
    assert len(str(caught.value)) < 1_000


@given(ids=st.lists(st.integers(0, 2**31 - 1), max_size=40))
def test_blocks_round_trip(ids: list[int]) -> None:
    packed = pack_blocks(np.array(ids, np.int64))
    assert len(packed) == 4 * len(ids)
    assert unpack_blocks(packed).tolist() == ids


@pytest.mark.parametrize("ids", [[[1, 2]], [-1], [2**31]])
def test_blocks_that_do_not_fit(ids: list[Any]) -> None:
    with pytest.raises(LocalUsageError, match="expected a one-dimensional array of ids"):
        pack_blocks(np.array(ids))


def test_engine_tags_are_32_bits_and_differ() -> None:
    tags = {engine_tag(EngineId(f"engine-{number}")) for number in range(1000)}
    assert len(tags) == 1000
    assert all(0 <= tag < 2**32 for tag in tags)


def test_messages_of_the_other_direction_are_refused() -> None:
    """Tags are shared by the two directions, so a misrouted message must not pass by its fields."""
    for message in (Ready(1, 2), Waiting(1, 2), Gone(1, 2, GoneReason.ABORTED)):  # type: ignore[arg-type]
        with pytest.raises(PeerProtocolError):
            decode_from_consumer(encode(message))
    pull = Pull(1, 2, "t", "r", (TokenRange(0, 1),))  # type: ignore[arg-type]
    for other in (pull, Renew(1, 2, 3), Release(1, 2, "t")):  # type: ignore[arg-type]
        with pytest.raises(PeerProtocolError):
            decode_from_producer(encode(other))
