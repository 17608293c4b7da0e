"""Both engines short of KV blocks, prompts computed in small chunks: preempted requests still answer rightly."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
from deployment import EngineConfig

from tests.e2e.asking import begin, body_of, prefilled, pulling, reference
from tests.e2e.cluster import Cluster, NamedEngine, running_cluster
from tests.e2e.pair import Counting, new_prompt
from tests.e2e.proxies import new_transfer_id, prefill_body
from tests.e2e.residue import eventually, preemptions, waits

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]

TIMES = {"VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": "60"}
TIGHT = (
    *("--num-gpu-blocks-override", "40"),  # 39 blocks of 32 tokens beside the null block
    *("--max-model-len", "1024"),
    *("--max-num-seqs", "8"),
    *("--max-num-batched-tokens", "128"),
    "--no-scheduler-reserve-full-isl",  # a prompt may begin before all of it fits
)


@dataclasses.dataclass(frozen=True)
class Tight:
    """A producer and a consumer with 39 blocks each."""

    cluster: Cluster
    producer: EngineConfig
    consumer: EngineConfig


@pytest.fixture(scope="module")
def started(model: Path, logs: Path) -> Iterator[Tight]:
    producer = NamedEngine(name="prefill", model=model, role="kv_producer", engine_id="prefill-0")
    producer = dataclasses.replace(producer, arguments=(*producer.arguments, *TIGHT), environment=TIMES)
    consumer = EngineConfig(
        name="decode",
        model=model,
        role="kv_consumer",
        tensor_parallel=2,
        arguments=producer.arguments,
        environment=TIMES,
    )
    with running_cluster(logs, producer, consumer) as cluster:
        cluster.start_router([producer], [consumer])
        assert begin(cluster.services["router"].url, body_of(new_prompt(40))).result().error is None
        cluster.remember_idle()
        yield Tight(cluster, producer, consumer)


@pytest.fixture
def tight(started: Tight) -> Iterator[Tight]:
    yield started
    assert started.cluster.leftovers() == []


def test_prefill_that_is_preempted_beside_kept_blocks(tight: Tight) -> None:
    """The second prompt begins, finds no block, starts again when the first has been pulled, and is pulled whole."""
    first, second = (body_of(new_prompt(900)) for _ in range(2))
    ids = [new_transfer_id() for _ in range(2)]
    before, counting = preemptions(tight.producer.url), Counting.from_now(tight.consumer)
    prefilled(tight.producer, first, ids[0])
    computing = begin(tight.producer.url, prefill_body(second, {"transfer_id": ids[1]}))
    assert eventually(lambda: waits(tight.producer.url)), "it has been thrown out again"
    for body, transfer_id in ((first, ids[0]), (second, ids[1])):
        answer = begin(tight.consumer.url, pulling(tight.producer, body, transfer_id)).result()
        assert answer.tokens == reference(tight.consumer, body).result().tokens
    assert computing.result().error is None
    assert preemptions(tight.producer.url) > before
    assert counting.becomes(tokens=2 * 899)


def test_decodes_that_are_preempted_compute_their_prompt_here(tight: Tight) -> None:
    """A remote prefill is single use (vllm#53250): the blocks that were pulled are gone, and so are the producer's."""
    router = tight.cluster.services["router"].url
    bodies = [body_of(new_prompt(120), 300, ignore_eos=True) for _ in range(6)]
    before, counting = preemptions(tight.consumer.url), Counting.from_now(tight.consumer)
    answers = [answer.result() for answer in [begin(router, body) for body in bodies]]
    assert [answer.error for answer in answers if answer.error] == []
    assert preemptions(tight.consumer.url) > before
    assert counting.becomes(tokens=6 * 119)
    own = [reference(tight.consumer, body) for body in bodies]
    assert [answer.tokens for answer in answers] == [answer.result().tokens for answer in own]
