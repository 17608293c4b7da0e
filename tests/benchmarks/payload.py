"""Bytes of all control messages of one request between one consumer rank and one producer rank.

Real machines and the real codec, ids as long as vLLM's and the router's, in the order that costs most: the
consumer asks before the producer knows the request. Counted from the first Pull to the last ReleaseAck;
the handshake is over by then, and nothing is renewed.
"""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from itertools import starmap
from typing import Any

import numpy as np

from mooncake_hetero_tp.core.codec import decode_from_producer, encode
from mooncake_hetero_tp.core.consumer import ConsumerConfig, ConsumerMachine
from mooncake_hetero_tp.core.effects import Kept, PullRequest, ReadOutcome, Reply, Resolve, Send
from mooncake_hetero_tp.core.producer import ProducerConfig, ProducerMachine
from mooncake_hetero_tp.core.releaser import ReleaserConfig, ReleaserMachine
from mooncake_hetero_tp.types import EngineId, Identity, Incarnation, Rank, RequestId, TokenRange, TransferId
from tests.benchmarks.rows import Report, Row, Sample
from tests.machines import BOOTSTRAP, DECODE, PREFILL, Pair, only, plan_all, rank_table

BLOCK_TOKENS = 16
BLOCKS = (1, 250, 2_048)
"""Of the producer: prompts of 16, 4,000 and 32,768 tokens."""
ALLOWED = 256
ALLOWED_PER_BLOCK = 8


def allowed(blocks: int) -> int:
    """Bytes that one request's messages may take."""
    return ALLOWED + ALLOWED_PER_BLOCK * blocks


def row_of(blocks: int) -> Row:
    return Row(
        name=f"control_bytes_{blocks}_blocks",
        sizes={"producer_blocks": blocks, "consumer_ranks": 1, "producer_ranks": 1},
        unit="bytes",
        baseline="vLLM MooncakeConnector, MooncakeXferMetadata and its answer, 80 layers",
        target=f"value <= {ALLOWED} + {ALLOWED_PER_BLOCK} per producer block = {allowed(blocks)}",
    )


def rows() -> list[Row]:
    """Everything that `measure` fills in."""
    return [row_of(blocks) for blocks in BLOCKS]


@dataclass(frozen=True)
class Names:
    """Ids as a router and vLLM make them."""

    transfer: TransferId
    producer: RequestId
    consumer: RequestId

    @classmethod
    def new(cls) -> Names:
        def request() -> RequestId:
            return RequestId(f"cmpl-{uuid.uuid4()}-0-{secrets.token_hex(4)}")

        return cls(TransferId(f"xfer-{uuid.uuid4()}"), request(), request())


def linked() -> Pair:
    """Both machines, shaken hands, with drawn numbers as wide as in production."""

    def who(engine: EngineId) -> Identity:
        return Identity(engine, Incarnation(secrets.token_hex(8)), Rank())

    producer = ProducerMachine(
        who(PREFILL),
        rank_table(),
        "10.0.0.1:12345",
        ProducerConfig(keep_s=480.0, lease_s=30.0),
        draw=_draw,
        compare=lambda _mine, _theirs: (),
        validate=lambda _table: None,
    )
    consumer = ConsumerMachine(
        who(DECODE),
        rank_table(),
        ConsumerConfig(),
        draw=_draw,
        planner=plan_all,
        validate=lambda _table: None,
    )
    pair = Pair(consumer=consumer, producers={"tcp://10.0.0.1:41234": producer})
    load(pair, Names.new(), blocks=1)
    return pair


def load(pair: Pair, names: Names, blocks: int) -> dict[str, int]:
    """One request from Pull to ReleaseAck: bytes of each message that was carried."""
    pair.carried.clear()
    pair.effects.clear()
    tokens = BLOCK_TOKENS * blocks
    ids = np.random.default_rng(1).permutation(1_000_000)[:blocks].astype(np.int32)
    asked = PullRequest(names.consumer, names.transfer, PREFILL, BOOTSTRAP, (TokenRange(0, tokens - 1),), (ids,))
    pair.start(asked)
    pair.now += 1.0
    pair.keep(Kept(names.producer, names.transfer, (ids,), tokens, ready=True))
    (read,) = pair.reads
    pair.now += 1.0
    pair.deliver(pair.consumer.read_finished(read.read_id, ReadOutcome(True, pair.now, 1, 1), pair.now))
    if [report.ok for report in pair.reports] != [True]:
        raise RuntimeError(f"the machines did not load the request: {pair.effects}")
    _release(pair, names.transfer)
    totals: dict[str, int] = {}
    for name, length in pair.carried:
        totals[name] = totals.get(name, 0) + length
    return totals


def _release(pair: Pair, transfer: TransferId) -> None:
    """What the consumer's scheduler says once all its ranks are done."""
    releaser = ReleaserMachine(DECODE, ReleaserConfig(deadline_s=480.0), draw=_draw)
    effects: list[Any] = list(releaser.release(transfer, PREFILL, BOOTSTRAP, pair.now))
    while effects:
        effect = effects.pop(0)
        if isinstance(effect, Resolve):
            effects += releaser.resolved(pair.listing(), pair.now)
        elif isinstance(effect, Send):
            pair.carried.append((type(effect.message).__name__, len(encode(effect.message))))
            answers = only(pair.producers[effect.address].receive(b"s", effect.message, pair.now), Reply)
            for answer in answers:
                frame = encode(answer.message)
                pair.carried.append((type(answer.message).__name__, len(frame)))
                effects += releaser.receive(effect.address, _ack(frame), pair.now)


def _ack(frame: bytes) -> Any:
    return decode_from_producer(frame)


def _draw() -> int:
    return secrets.randbits(63)


def vllm_bytes(blocks: int) -> float:
    """The same exchange in vLLM's own messages: the consumer sends its memory map with every request."""
    import msgspec
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector as theirs

    names, layers, page = Names.new(), 80, 32_768
    asked = theirs.MooncakeXferMetadata(
        remote_hostname="10.0.0.2",
        remote_port=12345,
        remote_tp_size=2,
        remote_tp_rank=1,
        req_blocks={names.consumer: (names.transfer, [list(range(100_000, 100_000 + blocks))])},
        kv_caches_base_addr=[0x7F00_0000_0000 + layer * 4096 * page for layer in range(layers)],
        block_lens=[page] * layers,
        kv_block_lens=[page] * layers,
        registered_layer_names=[f"model.layers.{layer}.self_attn.attn" for layer in range(layers)],
        registered_layer_indices=list(range(layers)),
        registered_group_indices=[0] * layers,
        registered_shared_group_ids=[[0]] * layers,
        registered_row_offsets=[0] * layers,
    )
    done = theirs.MooncakeXferResponse(status=theirs.MooncakeXferResponseStatus.FINISH, ok_reqs=[names.consumer])
    return float(sum(len(msgspec.msgpack.encode(message)) for message in (asked, done)))


def measure(report: Report) -> None:
    """Fill in all rows."""
    for blocks in BLOCKS:
        pair = linked()
        carried = load(pair, Names.new(), blocks)
        limit = allowed(blocks)
        report.add(
            row_of(blocks).measured(
                Sample.of([float(sum(carried.values()))]),
                Sample.of([vllm_bytes(blocks)]),
                met=_within(limit),
                note=", ".join(starmap("{} {}".format, carried.items())),
            )
        )


def _within(limit: int) -> Callable[[Row], bool | None]:
    return lambda row: None if row.value is None else row.value <= limit
