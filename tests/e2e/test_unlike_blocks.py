"""A producer with TP2 and blocks of 32, a consumer with TP1 and blocks of 64, policy `fail`."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from client import complete, completion_body
from deployment import HOST, EngineConfig, free_port

from tests.e2e.pair import ANSWER_TOKENS, GIVES_UP_SOON, Counting, Pair, ask, ask_alone, new_prompt, running_pair
from tests.e2e.proxies import decode_body, new_transfer_id

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def started(model: Path, logs: Path) -> Iterator[Pair]:
    producer = EngineConfig(name="prefill", model=model, role="kv_producer", tensor_parallel=2, block_size=32)
    consumer = EngineConfig(
        name="decode",
        model=model,
        role="kv_consumer",
        tensor_parallel=1,
        block_size=64,
        environment=GIVES_UP_SOON,
    )
    with running_pair((producer, consumer), [(producer, consumer)], logs) as pair:
        assert ask(pair.router(producer, consumer), new_prompt(40)).error is None
        pair.remember_idle()
        yield pair


@pytest.fixture
def pair(started: Pair) -> Iterator[Pair]:
    yield started
    assert started.leftovers() == []


def test_small_blocks_to_large_ones(pair: Pair) -> None:
    producer, consumer = pair.engines
    prompts = [new_prompt(length) for length in (1, 2, 32, 33, 63, 64, 65, 96, 97, 129, 450, 900)]
    counting = Counting.from_now(consumer)
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda prompt: ask(pair.router(producer, consumer), prompt), prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.error is None
        assert answer.tokens == ask_alone(consumer, prompt).tokens
    assert counting.becomes(tokens=sum(len(prompt) - 1 for prompt in prompts))


def test_prefix_of_odd_small_blocks(pair: Pair) -> None:
    producer, consumer = pair.engines
    router, prefix = pair.router(producer, consumer), new_prompt(3 * 64)
    assert ask(router, [*prefix, *new_prompt(40)]).error is None
    longer = [*prefix, *new_prompt(150)]
    counting = Counting.from_now(consumer)
    answer = ask(router, longer)
    assert answer.tokens == ask_alone(consumer, longer).tokens
    assert counting.becomes(tokens=149)


def test_unreachable_producer_fails_the_request_by_name_and_nothing_else(pair: Pair) -> None:
    producer, consumer = pair.engines
    nowhere = f"{HOST}:{free_port()}"
    body = completion_body(new_prompt(100), ANSWER_TOKENS)
    away = {"remote_bootstrap_addr": f"http://{nowhere}", "remote_engine_id": "gone"}
    answer = complete(consumer.url, decode_body(body, producer, new_transfer_id(), **away))
    assert answer.error is not None
    assert answer.error.startswith("HTTP 500")
    assert nowhere in pair.log_of(consumer)
    prompt = new_prompt(100)
    assert ask(pair.router(producer, consumer), prompt).tokens == ask_alone(consumer, prompt).tokens
