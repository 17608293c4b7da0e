"""TP1 -> TP2 under load: long prompts, many prompts, a broken session; no error, every answer the decoder's own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from client import complete, counters
from demo import make_prompts
from deployment import EngineConfig

from tests.e2e.asking import answers, begin, body_of, identical, reference
from tests.e2e.cluster import Cluster, Orders, running_cluster
from tests.e2e.pair import Counting, new_prompt
from tests.e2e.residue import eventually

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

LONG = (24_000, 36_000)
SHORT = (1, 33, 700)
REQUESTS = 200
SESSIONS = "vllm:mht_replaced_sessions_total"
TROUBLES = (
    SESSIONS,
    *(f"vllm:mht_{name}_total" for name in ("retries", "reads_failed", "frames_dropped", "bad_frames")),
)


@pytest.fixture(scope="module")
def orders(logs: Path) -> Orders:
    return Orders.fresh(logs / "orders")


@pytest.fixture(scope="module")
def producer(model: Path) -> EngineConfig:
    return EngineConfig(name="prefill", model=model, role="kv_producer")


@pytest.fixture(scope="module")
def consumer(model: Path, orders: Orders) -> EngineConfig:
    return EngineConfig(
        name="decode",
        model=model,
        role="kv_consumer",
        tensor_parallel=2,
        connector="ObedientConnector",
        connector_module="tests.e2e.faults",
        environment=orders.environment(),
    )


@pytest.fixture(scope="module")
def started(logs: Path, producer: EngineConfig, consumer: EngineConfig) -> Iterator[Cluster]:
    with running_cluster(logs, producer, consumer) as cluster:
        router = cluster.start_router([producer], [consumer])
        assert complete(router.url, body_of(new_prompt(40))).error is None
        cluster.remember_idle()
        yield cluster


@pytest.fixture
def router(started: Cluster) -> Iterator[str]:
    yield started.services["router"].url
    assert started.leftovers() == []


def troubles(consumer: EngineConfig) -> float:
    """Everything that went wrong and was mended; none of it while the credits per peer hold over all threads."""
    samples = counters(consumer.url)
    return sum(samples.get(name, 0.0) for name in TROUBLES)


@pytest.mark.timeout(600)
def test_long_prompts_and_short_ones_after_them(router: str, consumer: EngineConfig) -> None:
    """From 24,000 tokens on vLLM's own connector answers HTTP 500, and in one run to all that followed too."""
    for length in (*LONG, *SHORT):
        body, counting = body_of(new_prompt(length)), Counting.from_now(consumer)
        answer = begin(router, body).result()
        assert answer.error is None
        assert counting.becomes(tokens=length - 1)
        assert answer.tokens == reference(consumer, body).result().tokens
    assert troubles(consumer) == 0


@pytest.mark.timeout(400)
def test_two_hundred_requests_at_thirty_two_in_flight(router: str, consumer: EngineConfig) -> None:
    prompts, began = make_prompts(REQUESTS, seed=3), time.monotonic()
    pulled = answers(router, prompts)
    print(f"{REQUESTS} requests in {time.monotonic() - began:.1f} s")
    own = answers(consumer.url, prompts, salted=True)
    assert [answer.error for answer in pulled if answer.error] == []
    assert identical(pulled, own) == REQUESTS
    assert troubles(consumer) == 0


@pytest.mark.timeout(300)
def test_poisoned_session_is_replaced_without_a_restart(router: str, consumer: EngineConfig, orders: Orders) -> None:
    """One batch beyond what the transport takes breaks its session for good (Mooncake#4209)."""
    before, poison = counters(consumer.url).get(SESSIONS, 0), orders.poison()
    for body in (body_of(new_prompt(500)), body_of(new_prompt(500))):
        assert begin(router, body).result().tokens == reference(consumer, body).result().tokens
        assert not poison.exists()
    assert eventually(lambda: counters(consumer.url).get(SESSIONS, 0) == before + 1)
