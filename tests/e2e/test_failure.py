"""Clients, producers and consumers that go away at the worst moment: the others recover by themselves.

One producer and two consumers, policies `fail` (TP2, one request at a time) and `recompute` (TP1). The
tests follow each other as in the file: the producer's death leads to its restart, and the last test
kills a consumer. Times are as short as the settings allow.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path

import pytest
from client import Answer, counters
from deployment import EngineConfig, free_port

from tests.e2e.asking import begin, body_of, client, prefilled, pulling, reference
from tests.e2e.cluster import Cluster, NamedEngine, Orders, running_cluster
from tests.e2e.pair import new_prompt
from tests.e2e.proxies import new_transfer_id, prefill_body
from tests.e2e.residue import BUSY, KV_USAGE, eventually, is_idle

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]

KEEP_S = 20.0
LEASE_S = 8.0
SOON_S = 2.0
"""How soon blocks are free, and consumers told."""
LATE_S = LEASE_S + 3.0
"""A lease has ended by then, on either side."""
PROMPT = 300
TIMES = {"VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": f"{KEEP_S:g}", "VLLM_MOONCAKE_CONNECTOR_TIMEOUT": "3"}
SETTINGS = {"mooncake_protocol": "tcp", "lease_s": LEASE_S}
SMALL_STEPS = ("--max-num-batched-tokens", "512")


class Site:
    """The three engines, and the questions of the tests."""

    cluster: Cluster

    def __init__(self, model: Path, logs: Path) -> None:
        producer = NamedEngine(
            name="prefill", model=model, role="kv_producer", extra_config=SETTINGS, environment=TIMES
        )
        arguments = (*producer.arguments, *SMALL_STEPS)
        self.producer = dataclasses.replace(producer, arguments=arguments, engine_id="prefill-0")
        strict, lenient = (Orders.fresh(logs / f"orders-{name}") for name in ("strict", "lenient"))
        consumer = dataclasses.replace(
            producer, role="kv_consumer", connector="ObedientConnector", connector_module="tests.e2e.faults"
        )
        self.strict = dataclasses.replace(
            consumer,
            name="strict",
            tensor_parallel=2,
            port=free_port(),
            arguments=(*producer.arguments, "--max-num-seqs", "1"),
            environment={**TIMES, **strict.environment()},
        )
        self.lenient = dataclasses.replace(
            consumer,
            name="lenient",
            failure_policy="recompute",
            port=free_port(),
            environment={**TIMES, **lenient.environment()},
        )
        self.orders = {self.strict.name: strict, self.lenient.name: lenient}

    @property
    def consumers(self) -> tuple[NamedEngine, NamedEngine]:
        return self.strict, self.lenient

    def serves(self, *consumers: EngineConfig) -> bool:
        """Whether a new prompt is pulled and answered rightly by these, all of them by default."""
        return all(self._serves(consumer) for consumer in consumers or self.consumers)

    def _serves(self, consumer: EngineConfig) -> bool:
        before = loads(consumer)
        right = Pulled.begun(self, consumer).is_right()
        return right and eventually(lambda: loads(consumer) > before)


def loads(consumer: EngineConfig) -> float:
    return counters(consumer.url).get("vllm:mht_loads_done_total", 0.0)


def usage(engine: EngineConfig) -> float:
    return counters(engine.url)[KV_USAGE]


def running(engine: EngineConfig) -> bool:
    return counters(engine.url)[BUSY[0]] > 0


def failed(answer: Answer) -> bool:
    """What a client of a consumer with policy `fail` gets; the reason is in the consumer's log."""
    return answer.error is not None and answer.error.startswith("HTTP 500")


@dataclasses.dataclass(frozen=True)
class Pulled:
    """A prompt that a consumer was told to pull, and its answer to come."""

    consumer: EngineConfig
    body: Mapping[str, object]
    answer: Future[Answer]

    @classmethod
    def begun(
        cls, site: Site, consumer: EngineConfig, body: Mapping[str, object] | None = None, *, prefill: bool = True
    ) -> Pulled:
        """Ask; without `prefill` the producer knows nothing of it."""
        body, transfer_id = body or body_of(new_prompt(PROMPT)), new_transfer_id()
        if prefill:
            prefilled(site.producer, body, transfer_id)
        return cls(consumer, body, begin(consumer.url, pulling(site.producer, body, transfer_id)))

    def is_right(self) -> bool:
        """Whether the answer is the consumer's own."""
        answer, own = self.answer.result(), reference(self.consumer, self.body).result()
        return answer.error is None and answer.tokens == own.tokens


@pytest.fixture(scope="module")
def started(model: Path, logs: Path) -> Iterator[Site]:
    site = Site(model, logs)
    with running_cluster(logs, site.producer, *site.consumers) as site.cluster:
        assert site.serves()
        site.cluster.remember_idle()
        yield site


@pytest.fixture
def site(started: Site) -> Iterator[Site]:
    yield started
    assert started.cluster.leftovers() == []


# --- clients that go -----------------------------------------------------------------------------


def test_client_gone_before_the_consumer_schedules(site: Site) -> None:
    """The consumer is busy with its only sequence; vllm#50425 held the producer's blocks for 480 s."""
    body, transfer_id = body_of(new_prompt(PROMPT)), new_transfer_id()
    with client(site.strict.url, body_of(new_prompt(10), 2000, ignore_eos=True)):
        assert eventually(lambda: running(site.strict))
        prefilled(site.producer, body, transfer_id)
        assert usage(site.producer) > 0
        with client(site.strict.url, pulling(site.producer, body, transfer_id)):
            assert eventually(lambda: counters(site.strict.url)[BUSY[1]] > 0)
        assert eventually(lambda: is_idle(site.producer.url), SOON_S)
        assert running(site.strict)
    assert site.serves()


def test_client_gone_while_a_read_is_held(site: Site) -> None:
    """The producer is free at once; the consumer's pages are its own until the read has returned (sglang#24527)."""
    body, transfer_id = body_of(new_prompt(PROMPT)), new_transfer_id()
    prefilled(site.producer, body, transfer_id)
    orders = site.orders[site.strict.name]
    with orders.hold():
        with client(site.strict.url, pulling(site.producer, body, transfer_id)):
            orders.wait_held(2)
            assert usage(site.producer) > 0
        assert eventually(lambda: is_idle(site.producer.url), SOON_S)
        owned = usage(site.strict)
        assert owned > 0
        other = begin(site.strict.url, body_of(new_prompt(40))).result()
        assert other.error is None
        time.sleep(SOON_S)
        assert usage(site.strict) == owned
        assert orders.held_reads() == 2
    assert eventually(lambda: is_idle(site.strict.url), SOON_S + 3)
    assert site.serves()


def test_client_gone_before_the_consumer_ever_saw_the_request(site: Site) -> None:
    prefilled(site.producer, body_of(new_prompt(PROMPT)), new_transfer_id())
    kept_at = time.monotonic()
    while time.monotonic() < kept_at + KEEP_S - SOON_S:
        assert usage(site.producer) > 0
        time.sleep(1.0)
    assert eventually(lambda: is_idle(site.producer.url), 2 * SOON_S)
    assert site.serves()


def test_prefill_that_is_aborted_tells_the_consumer_at_once(site: Site) -> None:
    """Elsewhere consumers waited for minutes (sglang#30233)."""
    body, transfer_id = body_of(new_prompt(16_000)), new_transfer_id()
    with client(site.producer.url, prefill_body(body, {"transfer_id": transfer_id})):
        assert eventually(lambda: running(site.producer))
        waiting = begin(site.strict.url, pulling(site.producer, body, transfer_id))
        time.sleep(1.0)
        assert not waiting.done()
    gone_at = time.monotonic()
    answer = waiting.result()
    assert time.monotonic() - gone_at < SOON_S + 1.0, "and one step of the prefill"
    assert failed(answer), answer
    assert "its request was aborted before it was handed over" in site.cluster.log_of(site.strict)
    assert site.serves()


# --- leases that end -----------------------------------------------------------------------------


@pytest.mark.parametrize("who", ["producer", "consumer"])
def test_lease_that_ends_during_a_read_is_a_failed_load(site: Site, who: str) -> None:
    """All bytes arrive, but nobody can say any more whose they are: never ready."""
    for consumer in site.consumers:
        orders, before = site.orders[consumer.name], loads(consumer)
        with orders.hold(after=True):
            pulled = Pulled.begun(site, consumer)
            orders.wait_held(consumer.tensor_parallel)
            with site.cluster.stopped(site.producer if who == "producer" else consumer):
                time.sleep(LATE_S)
                assert who == "producer" or is_idle(site.producer.url), "the lease has ended for the producer too"
        check_failure(pulled)
        assert loads(consumer) == before
    assert site.serves()


def check_failure(pulled: Pulled) -> None:
    """An error under `fail`; under `recompute` the right tokens."""
    if pulled.consumer.failure_policy == "fail":
        assert failed(pulled.answer.result()), pulled.answer.result()
    else:
        assert pulled.is_right()


# --- engines that die ----------------------------------------------------------------------------


def test_producer_killed_before_during_and_after_reads_and_restarted_in_its_place(site: Site) -> None:
    """Same address, same engine id, another process: nobody has to be told (vllm#49238)."""
    with ExitStack() as holds:
        decoded = Pulled.begun(site, site.lenient, body_of(new_prompt(PROMPT), 400, ignore_eos=True))
        assert eventually(lambda: running(site.lenient))
        for consumer in site.consumers:
            holds.enter_context(site.orders[consumer.name].hold())
        reading = [Pulled.begun(site, consumer) for consumer in site.consumers]
        for consumer in site.consumers:
            site.orders[consumer.name].wait_held(consumer.tensor_parallel)
        waiting = [Pulled.begun(site, consumer, prefill=False) for consumer in site.consumers]
        time.sleep(1.0)
        assert not decoded.answer.done()
        site.cluster.kill(site.producer)
    assert decoded.is_right()
    for pulled in (*reading, *waiting, *(Pulled.begun(site, consumer, prefill=False) for consumer in site.consumers)):
        check_failure(pulled)
    site.cluster.start(site.producer)
    assert site.serves()


def test_consumer_killed_during_a_read(site: Site) -> None:
    """Its lease ends, its blocks are free, the other consumer notices nothing."""
    orders = site.orders[site.strict.name]
    with orders.hold():
        pulled = Pulled.begun(site, site.strict)
        orders.wait_held(2)
        site.cluster.kill(site.strict)
    assert pulled.answer.result().error is not None
    assert site.serves(site.lenient)
    assert eventually(lambda: is_idle(site.producer.url), LATE_S)
    assert site.serves(site.lenient)
