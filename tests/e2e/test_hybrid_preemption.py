"""A hybrid's engines short of blocks, prompts computed in small chunks: what is loaded is what was kept, byte for byte.

Attention and each group of states draw from one pool of blocks. Answers differ between TP sizes in bfloat16, so the
caches decide (`tests.e2e.test_hybrid`).
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from client import Answer
from deployment import CPU_ARGUMENTS, EngineConfig

from tests.e2e.asking import begin, body_of, prefilled, pulling
from tests.e2e.cluster import ROOT, Cluster, NamedEngine, running_cluster
from tests.e2e.hybrid_caches import differing, transfers
from tests.e2e.pair import new_prompt
from tests.e2e.proxies import new_transfer_id, prefill_body
from tests.e2e.residue import eventually, preemptions, waits
from tests.e2e.tiny_kinds import HYBRID
from tests.e2e.witness import FOLDER_SETTING

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

BLOCK_TOKENS = 288
"""What vLLM makes of `--block-size` here, so that a block of attention holds a state."""
TIGHT = (
    *("--num-gpu-blocks-override", "14"),  # beside the null block: 4 blocks of attention, 3 states, 3 before them, 3
    *("--max-model-len", str(4 * BLOCK_TOKENS)),
    *("--max-num-seqs", "8"),
    *("--max-num-batched-tokens", "128"),  # chunks end inside blocks
    "--no-scheduler-reserve-full-isl",  # a prompt may begin before all of it fits
)
MODES = {
    "one state": ("--no-enable-prefix-caching",),
    "prefix caching": ("--enable-prefix-caching", "--mamba-cache-mode", "align"),
}
TIMES = {"VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": "60"}


@dataclasses.dataclass(frozen=True)
class Tight:
    """A producer and a consumer with 13 blocks each, and what they write down."""

    cluster: Cluster
    producer: EngineConfig
    consumer: EngineConfig
    caches: Path


@pytest.fixture(scope="module", params=MODES)
def started(logs: Path, request: pytest.FixtureRequest) -> Iterator[Tight]:
    folder = logs / request.param.replace(" ", "-")
    caches = folder / "caches"
    shutil.rmtree(caches, ignore_errors=True)
    caches.mkdir(parents=True)
    producer = NamedEngine(
        name="prefill",
        model=HYBRID.ensure(),
        role="kv_producer",
        engine_id="prefill-0",
        connector="WitnessConnector",
        connector_module="tests.e2e.witness",
        arguments=(*CPU_ARGUMENTS, *HYBRID.arguments, *TIGHT, *MODES[request.param]),
        environment={**TIMES, FOLDER_SETTING: str(caches), "PYTHONPATH": str(ROOT)},
    )
    consumer = EngineConfig(
        name="decode",
        model=producer.model,
        role="kv_consumer",
        tensor_parallel=2,
        connector=producer.connector,
        connector_module=producer.connector_module,
        arguments=producer.arguments,
        environment=producer.environment,
    )
    with running_cluster(folder, producer, consumer) as cluster:
        tight = Tight(cluster, producer, consumer, caches)
        cluster.start_router([producer], [consumer])
        assert errors([begin(cluster.services["router"].url, body_of(new_prompt(40))).result()]) == []
        cluster.remember_idle()
        yield tight


@pytest.fixture
def tight(started: Tight) -> Iterator[Tight]:
    yield started
    assert started.cluster.leftovers() == []


def errors(answers: Sequence[Answer]) -> list[str]:
    return [answer.error for answer in answers if answer.error]


def wrong(tight: Tight, transfer_ids: Sequence[str]) -> list[str]:
    """Tensors that were not loaded as they had been kept."""
    sizes = tight.producer.tensor_parallel, tight.consumer.tensor_parallel
    return [name for transfer_id in transfer_ids for name in differing(tight.caches, transfer_id, *sizes)]


def test_prefill_that_is_preempted_beside_kept_blocks(tight: Tight) -> None:
    """The second prompt begins, finds no block, starts again when the first has been pulled, and is pulled whole."""
    bodies = [body_of(new_prompt(1000)) for _ in range(2)]
    ids = [new_transfer_id() for _ in bodies]
    before = preemptions(tight.producer.url)
    prefilled(tight.producer, bodies[0], ids[0])
    computing = begin(tight.producer.url, prefill_body(bodies[1], {"transfer_id": ids[1]}))
    assert eventually(lambda: waits(tight.producer.url)), "it has been thrown out again"
    pulls = [pulling(tight.producer, *each) for each in zip(bodies, ids, strict=True)]
    answers = [begin(tight.consumer.url, pull).result() for pull in pulls]
    assert errors([*answers, computing.result()]) == []
    assert preemptions(tight.producer.url) > before
    assert wrong(tight, ids) == []


def test_decodes_that_are_preempted_are_loaded_once(tight: Tight) -> None:
    """Three requests cross into a second block together; one must go, and computes all of it here afterwards."""
    bodies = [body_of(new_prompt(BLOCK_TOKENS - 8), 60, ignore_eos=True) for _ in range(3)]
    ids = [new_transfer_id() for _ in bodies]
    before, seen = preemptions(tight.consumer.url), transfers(tight.caches, "loaded")
    for body, transfer_id in zip(bodies, ids, strict=True):
        prefilled(tight.producer, body, transfer_id)
    pulls = [pulling(tight.producer, *each) for each in zip(bodies, ids, strict=True)]
    answers = [answer.result() for answer in [begin(tight.consumer.url, pull) for pull in pulls]]
    assert errors(answers) == []
    assert [len(answer.tokens) for answer in answers] == [60] * 3
    assert preemptions(tight.consumer.url) > before
    assert transfers(tight.caches, "loaded") - seen == set(ids)
    assert wrong(tight, ids) == []


def test_more_requests_than_either_engine_has_blocks_for(tight: Tight) -> None:
    router = tight.cluster.services["router"].url
    bodies = [body_of(new_prompt(length), 40, ignore_eos=True) for length in range(100, 1001, 75)]
    seen = transfers(tight.caches, "loaded")
    answers = [answer.result() for answer in [begin(router, body) for body in bodies]]
    assert errors(answers) == []
    loaded = transfers(tight.caches, "loaded") - seen
    assert len(loaded) == len(bodies)
    assert wrong(tight, sorted(loaded)) == []
