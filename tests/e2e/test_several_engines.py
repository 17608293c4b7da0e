"""Two producers and two consumers behind one router."""

from __future__ import annotations

from pathlib import Path

import pytest
from client import counters
from demo import make_prompts
from deployment import EngineConfig

from tests.e2e.asking import answers, identical
from tests.e2e.cluster import running_cluster

SENDS = "vllm:mht_sends_done_total"
LOADS = "vllm:mht_loads_done_total"
IN_FLIGHT = 8
"""Six workers and four schedulers share two cores."""


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_producers_and_two_consumers_behind_one_router(model: Path, logs: Path) -> None:
    """The router goes round in step: TP1 -> TP2 and TP2 -> TP1, all four engines at work."""
    producers = [
        EngineConfig(name=f"prefill{tp}", model=model, role="kv_producer", tensor_parallel=tp) for tp in (1, 2)
    ]
    consumers = [EngineConfig(name=f"decode{tp}", model=model, role="kv_consumer", tensor_parallel=tp) for tp in (2, 1)]
    with running_cluster(logs, *producers, *consumers) as cluster:
        router = cluster.start_router(producers, consumers)
        prompts = make_prompts(40, seed=4)
        pulled = answers(router.url, prompts, in_flight=IN_FLIGHT)
        assert [answer.error for answer in pulled if answer.error] == []
        assert identical(pulled, answers(consumers[1].url, prompts, in_flight=IN_FLIGHT, salted=True)) == len(prompts)
        assert all(counters(producer.url).get(SENDS, 0) > 0 for producer in producers)
        assert all(counters(consumer.url).get(LOADS, 0) > 0 for consumer in consumers)
        assert cluster.leftovers() == []
