"""Latents and sliding windows, TP1 -> TP2: the answers are those of the decode engine alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from client import Answer
from deployment import CPU_ARGUMENTS, EngineConfig

from tests.e2e.pair import Counting, Pair, ask, ask_alone, new_prompt, running_pair
from tests.e2e.tiny_kinds import MLA, WINDOWED, Kind

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(400)]

AT_ONCE = 6


@pytest.fixture(scope="module", params=[MLA, WINDOWED], ids=lambda kind: kind.name)
def started(request: pytest.FixtureRequest, logs: Path) -> Iterator[Pair]:
    kind: Kind = request.param
    engines = (
        engine_of(kind, f"prefill-{kind.name}", "kv_producer", 1),
        engine_of(kind, f"decode-{kind.name}", "kv_consumer", 2),
    )
    with running_pair(engines, [engines], logs) as pair:
        # As many at once as the tests ask: the engines' own thread pools grow with them.
        warm = ask_all(pair, [new_prompt(40 + number) for number in range(2 * AT_ONCE)])
        assert [answer.error for answer in warm if answer.error] == []
        pair.remember_idle()
        yield pair


def ask_all(pair: Pair, prompts: Sequence[list[int]]) -> list[Answer]:
    """Through the router, `AT_ONCE` at a time."""
    router = pair.router(*pair.engines)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(lambda prompt: ask(router, prompt), prompts))


def engine_of(kind: Kind, name: str, role: str, tensor_parallel: int) -> EngineConfig:
    return EngineConfig(
        name=name,
        model=kind.ensure(),
        role=role,
        tensor_parallel=tensor_parallel,
        block_size=kind.block_size,
        arguments=(*CPU_ARGUMENTS, *kind.arguments),
    )


@pytest.fixture
def pair(started: Pair) -> Iterator[Pair]:
    yield started
    assert started.leftovers() == []


def test_answers_are_those_of_the_decode_engine_alone(pair: Pair) -> None:
    _, consumer = pair.engines
    prompts = [new_prompt(length) for length in (1, 2, 16, 17, 31, 33, 64, 65, 66, 129, 300, 500)]
    for prompt, answer in zip(prompts, ask_all(pair, prompts), strict=True):
        assert answer.error is None
        assert answer.tokens
        assert answer.tokens == ask_alone(consumer, prompt).tokens


def test_a_prompt_is_pulled_and_not_computed_again(pair: Pair) -> None:
    producer, consumer = pair.engines
    counting = Counting.from_now(consumer)
    assert ask(pair.router(producer, consumer), new_prompt(300)).error is None
    assert counting.pulled_bytes() > 0
