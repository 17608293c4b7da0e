"""Frames: one version byte and the msgpack of a message, checked against bounds in both directions.

Whatever a peer sends either decodes to a message within bounds or raises PeerProtocolError, which
names what it was, what was expected, what was seen and what to do. Nothing else is ever raised.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Final, NoReturn, TypeVar

import msgspec
import numpy as np

from mooncake_hetero_tp.core.effects import BlockIds
from mooncake_hetero_tp.core.messages import (
    MAX_GROUPS,
    MAX_NAME,
    MAX_NUMBER,
    MAX_TEXT,
    PROTOCOL_VERSION,
    ConsumerMessage,
    Grant,
    Hello,
    ProducerMessage,
    Pull,
    Refuse,
    Stage,
    Welcome,
)
from mooncake_hetero_tp.core.regions import RankTable
from mooncake_hetero_tp.errors import LocalUsageError, PeerProtocolError
from mooncake_hetero_tp.types import EngineId, Identity

MAX_TABLE_FRAME: Final = 64 * 2**20
"""Bytes of a frame that carries a region table (Hello, Welcome)."""
MAX_FRAME: Final = 16 * 2**20
"""Bytes of any other frame; a Grant of 4 million blocks fits."""
MAX_REGIONS: Final = 262_144
MAX_BUFFERS: Final = 65_536
MAX_SPANS: Final = 65_536
MAX_FIELDS: Final = 1_024

_TABLE_TAGS: Final = (b"\x01", b"\x21")
"""Type tags of Hello and Welcome: the third byte of a frame, after version and array header."""
_SAME_VERSION: Final = "run the same mooncake-hetero-tp version on both sides"
_BLOCK_TYPE: Final = np.dtype("<i4")

_encoder: Final = msgspec.msgpack.Encoder()
_from_consumer: Final = msgspec.msgpack.Decoder(ConsumerMessage)
_from_producer: Final = msgspec.msgpack.Decoder(ProducerMessage)
_VERSION_BYTE: Final = bytes((PROTOCOL_VERSION,))

Message = TypeVar("Message")


def encode(message: ConsumerMessage | ProducerMessage) -> bytes:
    """One frame.

    Raises:
        LocalUsageError: the frame would be longer than a peer may accept.
    """
    frame = _VERSION_BYTE + _encoder.encode(message)
    limit = MAX_TABLE_FRAME if isinstance(message, Hello | Welcome) else MAX_FRAME
    if len(frame) > limit:
        raise LocalUsageError(
            f"{type(message).__name__}: expected at most {limit} bytes, got {len(frame)}; fewer regions or blocks"
        )
    return frame


def decode_from_consumer(frame: bytes) -> ConsumerMessage:
    """Decode and check what a producer received.

    Raises:
        PeerProtocolError: anything but one message within bounds.
    """
    return _decode(frame, _from_consumer.decode)


def decode_from_producer(frame: bytes) -> ProducerMessage:
    """Decode and check what a consumer or releaser received.

    Raises:
        PeerProtocolError: anything but one message within bounds.
    """
    return _decode(frame, _from_producer.decode)


def pack_blocks(blocks: BlockIds) -> bytes:
    """Block ids of one group as Grant carries them: little-endian int32.

    Raises:
        LocalUsageError: not one-dimensional, or an id outside [0, 2**31).
    """
    ids = np.asarray(blocks)
    if ids.ndim != 1 or (ids.size and (ids.min() < 0 or ids.max() >= 2**31)):
        raise LocalUsageError(
            f"block ids: expected a one-dimensional array of ids in [0, 2**31), got shape {ids.shape}"
            + (f" with values {ids.min()}..{ids.max()}" if ids.size else "")
        )
    return ids.astype(_BLOCK_TYPE).tobytes()


def unpack_blocks(data: bytes) -> BlockIds:
    """The inverse of `pack_blocks` (read-only); the codec has checked the length."""
    return np.frombuffer(data, _BLOCK_TYPE)


def engine_tag(engine_id: EngineId) -> int:
    """32 bits that stand for a consumer engine in a Release.

    Two engines of one tag would end each other's leases on a transfer that both read; one transfer is
    read by two engines only where a proxy retries a request elsewhere.
    """
    return zlib.crc32(engine_id.encode())


def _decode(frame: bytes, decode: Callable[[bytes], Message]) -> Message:
    _check_frame(frame)
    try:
        message = decode(frame[1:])
        check = _CHECKS.get(type(message))
        if check is not None:
            check(message)
    except msgspec.ValidationError as error:
        _refuse("message", "a known type with its fields in bounds", str(error), error)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        _refuse("message", "msgpack", f"{error} ({len(frame)} bytes)", error)
    return message


def _check_frame(frame: bytes) -> None:
    if not frame:
        _refuse("frame", "a version byte and a message", "nothing")
    if frame[0] != PROTOCOL_VERSION:
        _refuse("frame", f"protocol version {PROTOCOL_VERSION}", f"version byte {frame[0]}")
    limit = MAX_TABLE_FRAME if frame[2:3] in _TABLE_TAGS else MAX_FRAME
    if len(frame) > limit:
        _refuse("frame", f"at most {limit} bytes", f"{len(frame)}")


def _check_ranges(message: Pull | Stage) -> None:
    for group, tokens in enumerate(message.ranges):
        if not 0 <= tokens.start <= MAX_NUMBER or not 0 <= tokens.end <= MAX_NUMBER:
            what = f"{type(message).__name__}, group {group}"
            _refuse(what, "a token range of non-negative numbers", str(tokens))


def _check_grant(grant: Grant) -> None:
    for group, blocks in enumerate(grant.blocks):
        if len(blocks) % _BLOCK_TYPE.itemsize:
            _refuse(f"Grant, blocks of group {group}", "a multiple of 4 bytes", f"{len(blocks)} bytes")


def _check_refuse(refuse: Refuse) -> None:
    _check_identity("Refuse", refuse.identity)
    for number, mismatch in enumerate(refuse.mismatches):
        texts = (mismatch.field, mismatch.producer, mismatch.consumer, mismatch.effect, mismatch.remedy)
        if max(map(len, (*texts, mismatch.layer or ""))) > MAX_TEXT:
            _refuse(f"Refuse, mismatch {number}", f"texts of at most {MAX_TEXT} characters", "a longer one")


def _check_hello(hello: Hello) -> None:
    _check_identity("Hello", hello.identity)
    if hello.expected_incarnation is not None:
        _check_name("Hello, expected incarnation", hello.expected_incarnation)
    _check_table("Hello", hello.table)


def _check_welcome(welcome: Welcome) -> None:
    _check_identity("Welcome", welcome.identity)
    _check_table("Welcome", welcome.table)


def _check_identity(what: str, identity: Identity) -> None:
    _check_name(f"{what}, engine id", identity.engine_id)
    _check_name(f"{what}, incarnation", identity.incarnation)
    rank = identity.rank
    if min(rank.dp, rank.pp, rank.tp) < 0 or max(rank.dp, rank.pp, rank.tp) >= 2**31:
        _refuse(f"{what}, rank", "numbers in [0, 2**31)", str(rank))


def _check_name(what: str, name: str) -> None:
    if not 1 <= len(name) <= MAX_NAME:
        _refuse(what, f"1 to {MAX_NAME} characters", f"{len(name)}")


def _check_table(what: str, table: RankTable) -> None:
    """Sizes and number ranges only; what the numbers mean is for `core/tables.py`."""
    counts = (
        ("groups", len(table.groups), MAX_GROUPS),
        ("regions", len(table.regions), MAX_REGIONS),
        ("buffers", len(table.buffers), MAX_BUFFERS),
        ("model fields", len(table.model), MAX_FIELDS),
        ("draft layers", len(table.draft_layers), MAX_REGIONS),
        ("declared encodings", len(table.declared_encodings), MAX_FIELDS),
    )
    for name, count, limit in counts:
        if count > limit:
            _refuse(f"{what}, {name}", f"at most {limit}", str(count))
    for region in table.regions:
        if len(region.spans) > MAX_SPANS:
            _refuse(f"{what}, spans of region {region.layer}", f"at most {MAX_SPANS}", str(len(region.spans)))
    for number in _numbers(table):
        if not -MAX_NUMBER <= number <= MAX_NUMBER:
            _refuse(f"{what}, region table", "numbers of 64 signed bits", str(number))


def _numbers(table: RankTable) -> Iterator[int]:
    yield from (table.tp_size, table.pp_size)
    for group in table.groups:
        yield from (group.index, group.block_size, group.kernel_block_size)
    for buffer in table.buffers:
        yield from (buffer.address, buffer.length_bytes)
    for region in table.regions:
        yield from (region.group, region.base, region.block_stride, region.num_blocks, region.item_bytes)
        for axis in (region.unit, region.token, region.channel):
            yield from (axis.count, axis.stride)
        for span in region.spans:
            yield from (span.local_start, span.global_start, span.count)


_CHECKS: Final[dict[type, Callable[..., None]]] = {
    Hello: _check_hello,
    Welcome: _check_welcome,
    Refuse: _check_refuse,
    Pull: _check_ranges,
    Stage: _check_ranges,
    Grant: _check_grant,
}


def _refuse(what: str, expected: str, seen: str, cause: Exception | None = None) -> NoReturn:
    seen = seen if len(seen) <= MAX_NAME else seen[:MAX_NAME] + "..."
    raise PeerProtocolError(f"{what} from a peer: expected {expected}, got {seen}; {_SAME_VERSION}") from cause
