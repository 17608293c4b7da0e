"""Pulls through staging slots between two engines, TP1 and TP2, both ways; a ring smaller than any long prompt."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from client import counters
from deployment import EngineConfig

from tests.e2e.pair import Counting, Pair, ask, ask_alone, new_prompt, running_pair

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

TP1, TP2 = 0, 1
BOTH_WAYS = pytest.mark.parametrize(
    "source,target", [pytest.param(TP1, TP2, id="TP1->TP2"), pytest.param(TP2, TP1, id="TP2->TP1")]
)
MODES = {"staged": {"transfer_mode": "staged", "staging_mib": 2, "staging_slot_mib": 1}, "auto": {}}
LENGTHS = (2, 31, 33, 250, 513, 900, 1400, 2000)
ONE_CONNECTION = {"MC_TCP_LANES_PER_PEER": "1"}
"""Mooncake opens up to four, one after the other as chunks happen to overlap; the leftovers of a test are counted."""
BYTES_PER_TOKEN = 4096
"""Of all KV heads and layers of the tiny model in float32: a rank of two has half of it."""


@pytest.fixture(scope="module", params=["staged", pytest.param("auto", marks=pytest.mark.slow)])
def started(model: Path, logs: Path, request: pytest.FixtureRequest) -> Iterator[Pair]:
    extra = {"mooncake_protocol": "tcp", **MODES[request.param]}
    engines = tuple(
        EngineConfig(
            name=f"tp{size}",
            model=model,
            role="kv_both",
            tensor_parallel=size,
            extra_config=extra,
            environment=ONE_CONNECTION,
        )
        for size in (1, 2)
    )
    one, two = engines
    with running_pair((one, two), [(one, two), (two, one)], logs / request.param) as pair:
        for producer, consumer in ((one, two), (two, one)):
            assert ask(pair.router(producer, consumer), new_prompt(40)).error is None
        pair.remember_idle()
        yield pair


@pytest.fixture
def pair(started: Pair) -> Iterator[Pair]:
    yield started
    assert started.leftovers() == []


def chunks_of(engine: EngineConfig) -> float:
    return counters(engine.url).get("vllm:mht_chunks_total", 0.0)


@BOTH_WAYS
def test_answers_are_those_of_the_decode_engine_alone(pair: Pair, source: int, target: int) -> None:
    producer, consumer = pair.engines[source], pair.engines[target]
    prompts = [new_prompt(length) for length in LENGTHS]
    counting, before = Counting.from_now(consumer), chunks_of(consumer)
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda prompt: ask(pair.router(producer, consumer), prompt), prompts))
    for length, prompt, answer in zip(LENGTHS, prompts, answers, strict=True):
        assert answer.error is None, length
        assert answer.tokens == ask_alone(consumer, prompt).tokens, length
    assert counting.becomes(tokens=sum(len(prompt) - 1 for prompt in prompts))
    if consumer.extra_config.get("transfer_mode") == "staged":
        needed = sum(-(-length * BYTES_PER_TOKEN // 2**20) for length in LENGTHS)
        assert chunks_of(consumer) - before >= needed // 2


def test_two_prompts_at_once_through_a_ring_smaller_than_either(pair: Pair) -> None:
    producer, consumer = pair.engines
    prompts = [new_prompt(2000), new_prompt(1990)]
    counting = Counting.from_now(consumer)
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda prompt: ask(pair.router(producer, consumer), prompt), prompts))
    assert [answer.error for answer in answers] == [None, None]
    assert [answer.tokens for answer in answers] == [ask_alone(consumer, prompt).tokens for prompt in prompts]
    assert counting.becomes(tokens=1999 + 1989)
