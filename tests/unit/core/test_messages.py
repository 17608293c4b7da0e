"""Wire messages: distinct types, and the size of one hand-over."""

from __future__ import annotations

import uuid
from typing import get_args

import pytest

from mooncake_hetero_tp.core.codec import encode
from mooncake_hetero_tp.core.effects import Kept, PullRequest, ReadOutcome
from mooncake_hetero_tp.core.messages import ConsumerMessage, GoneReason, ProducerMessage
from mooncake_hetero_tp.core.pulls import EXPLANATIONS
from mooncake_hetero_tp.core.regions import STATE, Group
from mooncake_hetero_tp.core.releaser import ReleaserConfig, ReleaserMachine
from mooncake_hetero_tp.types import EngineId, RequestId, TokenRange, TransferId
from tests.machines import (
    BOOTSTRAP,
    PREFILL,
    Numbers,
    Pair,
    block_ids,
    consumer_machine,
    producer_machine,
    rank_table,
    sends,
)


def test_every_message_of_either_direction_has_its_own_one_byte_tag() -> None:
    tags = [kind.__struct_config__.tag for kind in (*get_args(ConsumerMessage), *get_args(ProducerMessage))]
    assert len(set(tags)) == len(tags)
    assert all(0 <= tag < 128 for tag in tags)


def test_every_reason_is_explained_to_people() -> None:
    assert set(EXPLANATIONS) == set(GoneReason)


def realistic_pair(groups: int) -> Pair:
    """Ids of the lengths that vLLM and its router use, numbers of full width."""
    kinds = [Group(0, "attention", 16, 16)] + [Group(i, STATE, 65536, 65536) for i in range(1, groups)]
    table = rank_table(1, kinds)
    return Pair(
        consumer_machine(table=table, draw=Numbers(2**32 - 9)),
        {"192.168.100.101:45678": producer_machine(table=table, draw=Numbers(2**32 - 9))},
    )


@pytest.mark.parametrize("early", [False, True], ids=["producer first", "consumer first"])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("tokens", [1, 33, 900, 36_000])
def test_payload_of_one_hand_over(tokens: int, groups: int, early: bool) -> None:
    """After the handshake: at most 256 bytes + 8 per producer block, Release and its answer included."""
    pair = realistic_pair(groups)
    transfer, request = TransferId(f"xfer-{uuid.uuid4()}"), RequestId(f"cmpl-{uuid.uuid4()}-0")
    pages = -(-tokens // 16)
    blocks = (block_ids(*range(100_000, 100_000 + pages)), *(block_ids(7) for _ in range(groups - 1)))
    ranges = tuple(TokenRange(0, tokens) for _ in range(groups))
    kept = Kept(RequestId(f"cmpl-{uuid.uuid4()}-0"), transfer, blocks, tokens, ready=True)
    if not early:
        pair.keep(kept)
    pair.start(PullRequest(request, transfer, PREFILL, BOOTSTRAP, ranges, blocks))
    if early:
        pair.keep(kept)
    (read,) = pair.reads
    pair.deliver(pair.consumer.read_finished(read.read_id, ReadOutcome(ok=True, returned_at=0.0), 0.0))
    (report,) = pair.reports
    assert report.ok

    releaser = ReleaserMachine(EngineId(str(uuid.uuid4())), ReleaserConfig(), draw=Numbers(2**32 - 2))
    releaser.release(transfer, PREFILL, BOOTSTRAP, 0.0)
    (release,) = sends(releaser.resolved(pair.listing(), 0.0))
    address, producer = next(iter(pair.producers.items()))
    pair.carried.append(("Release", len(encode(release))))
    pair.deliver_replies(address, producer.receive(b"scheduler", release, 0.0))

    counted = [(name, size) for name, size in pair.carried if name not in ("Hello", "Welcome")]
    names = [name for name, _ in counted]
    assert names == ["Pull", *(["Waiting", "Ready", "Claim"] if early else []), "Grant", "Release", "ReleaseAck"]
    total_blocks = pages + groups - 1
    assert sum(size for _, size in counted) <= 256 + 8 * total_blocks
