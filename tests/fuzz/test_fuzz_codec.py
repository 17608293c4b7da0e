"""Invariant: whatever bytes arrive, decoding gives a message within bounds or raises PeerProtocolError, at once."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_hetero_tp.core.codec import decode_from_consumer, decode_from_producer, encode
from mooncake_hetero_tp.errors import PeerProtocolError
from tests.fuzz.frames import damaged, from_consumer, from_producer

ROUNDS = 8_000
Decode = Callable[[bytes], Any]
Draw = Callable[[random.Random], Any]

both_ways = pytest.mark.parametrize(
    "decode,draw",
    [(decode_from_consumer, from_consumer), (decode_from_producer, from_producer)],
    ids=["producer receives", "consumer receives"],
)


def take(decode: Decode, frame: bytes) -> bool:
    """Whether it decoded; every refusal names what was expected, what was seen and the remedy."""
    refusal, message = "", None
    try:
        message = decode(frame)
    except PeerProtocolError as error:
        refusal = str(error)
    if message is not None:
        return bool(encode(message))
    assert all(words in refusal for words in ("expected", "got", "run the same mooncake-hetero-tp version"))
    assert len(refusal) < 1_000
    return False


@both_ways
@settings(max_examples=500)
@given(frame=st.binary(max_size=300))
def test_random_bytes(decode: Decode, draw: Draw, frame: bytes) -> None:
    take(decode, frame)
    take(decode, b"\x01" + frame)


@both_ways
def test_damaged_frames(decode: Decode, draw: Draw) -> None:
    rng = random.Random(20_261_201)
    decoded = sum(take(decode, damaged(rng, draw(rng))) for _ in range(ROUNDS))
    assert 0 < decoded < ROUNDS


@both_ways
def test_every_truncation(decode: Decode, draw: Draw) -> None:
    rng = random.Random(1)
    for frame in {encode(draw(rng)) for _ in range(60)}:
        for length in range(min(len(frame), 400)):
            assert not take(decode, frame[:length])


@both_ways
@pytest.mark.parametrize(
    "head", [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff"]
)
def test_lengths_that_nothing_follows_allocate_nothing(decode: Decode, draw: Draw, head: bytes) -> None:
    """Four GiB promised, none sent."""
    for start in (b"\x01", b"\x01\x96\x02\x01\x02", b"\x01\x98\x01\x01\x01"):
        assert not take(decode, start + head)
