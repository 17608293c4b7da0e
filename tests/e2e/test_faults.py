"""A consumer that can be told to corrupt a pull, policy `recompute`: the comparison has power, failures heal."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from client import complete, completion_body
from demo import Display, make_prompts, measure
from deployment import HOST, EngineConfig, free_port
from rich.console import Console

from tests.e2e.flipping import ORDER_SETTING
from tests.e2e.pair import ANSWER_TOKENS, GIVES_UP_SOON, Counting, Pair, ask, ask_alone, new_prompt, running_pair
from tests.e2e.proxies import decode_body, new_transfer_id

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def order(logs: Path) -> Path:
    """The file whose appearance makes the consumer flip a byte of its next read."""
    return logs / "flip-one-byte"


def flipping_environment(order: Path) -> dict[str, str]:
    """Lets an engine process import `tests.e2e.flipping` and find its orders."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {ORDER_SETTING: str(order), "PYTHONPATH": path}


@pytest.fixture(scope="module")
def started(model: Path, logs: Path, order: Path) -> Iterator[Pair]:
    producer = EngineConfig(name="prefill", model=model, role="kv_producer", tensor_parallel=1)
    consumer = EngineConfig(
        name="decode",
        model=model,
        role="kv_consumer",
        tensor_parallel=2,
        failure_policy="recompute",
        connector="FlippingConnector",
        connector_module="tests.e2e.flipping",
        environment={**GIVES_UP_SOON, **flipping_environment(order)},
    )
    with running_pair((producer, consumer), [(producer, consumer)], logs) as pair:
        assert ask(pair.router(producer, consumer), new_prompt(40)).error is None
        pair.remember_idle()
        yield pair


@pytest.fixture
def pair(started: Pair) -> Iterator[Pair]:
    yield started
    assert started.leftovers() == []


@pytest.mark.parametrize("flips", [0, 1])
def test_one_flipped_byte_is_one_answer_less_that_is_identical(pair: Pair, order: Path, flips: int) -> None:
    producer, consumer = pair.engines
    prompts = make_prompts(6, seed=10 + flips)
    if flips:
        order.touch()
    display = Display(Console(file=io.StringIO()))
    log = pair.logs / f"{consumer.name}.log"
    rows, summary = measure(display, pair.router(producer, consumer), consumer.url, log, prompts=prompts, in_flight=3)
    assert not order.exists()
    assert [row.error for row in rows] == [None] * 6
    assert summary.identical == 6 - flips


def test_unreachable_producer_means_the_prompt_is_computed_here(pair: Pair) -> None:
    producer, consumer = pair.engines
    prompt, counting = new_prompt(100), Counting.from_now(consumer)
    body = completion_body(prompt, ANSWER_TOKENS)
    away = {"remote_bootstrap_addr": f"http://{HOST}:{free_port()}", "remote_engine_id": "gone"}
    answer = complete(consumer.url, decode_body(body, producer, new_transfer_id(), **away))
    assert answer.error is None
    assert answer.tokens == ask_alone(consumer, prompt).tokens
    assert counting.becomes(tokens=0)
