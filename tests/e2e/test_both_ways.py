"""One pair of `kv_both` engines, TP1 and TP2, equal blocks: every dialect and every odd prompt, both ways."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from client import Answer, completion_body
from deployment import HOST, EngineConfig
from tiny_model import TinyModel

from mooncake_hetero_tp.cli import main
from mooncake_hetero_tp.cli.decoder import build_decoder
from mooncake_hetero_tp.cli.hello import read_hello
from mooncake_hetero_tp.cli.wish import read_wish
from mooncake_hetero_tp.core.regions import RankTable, Region
from tests.e2e.pair import ANSWER_TOKENS, Counting, Pair, ask, ask_alone, new_prompt, running_pair
from tests.e2e.proxies import both_at_once, producer_first

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

TP1, TP2 = 0, 1
BOTH_WAYS = pytest.mark.parametrize(
    "source,target", [pytest.param(TP1, TP2, id="TP1->TP2"), pytest.param(TP2, TP1, id="TP2->TP1")]
)
BLOCK = 32
PATIENT = ("--timeout", "60")
END_OF_TEXT = 0


@pytest.fixture(scope="module")
def started(model: Path, logs: Path) -> Iterator[Pair]:
    one = EngineConfig(name="tp1", model=model, role="kv_both", tensor_parallel=1)
    two = EngineConfig(name="tp2", model=model, role="kv_both", tensor_parallel=2)
    with running_pair((one, two), [(one, two), (two, one)], logs) as pair:
        for producer, consumer in ((one, two), (two, one)):
            assert ask(pair.router(producer, consumer), new_prompt(40)).error is None
        pair.remember_idle()
        yield pair


@pytest.fixture
def pair(started: Pair) -> Iterator[Pair]:
    yield started
    assert started.leftovers() == []


def assert_identical(answer: Answer, reference: Answer) -> None:
    assert answer.error is None
    assert reference.error is None
    assert answer.tokens == reference.tokens
    assert answer.tokens


@BOTH_WAYS
def test_answers_through_the_router_are_those_of_the_decode_engine_alone(pair: Pair, source: int, target: int) -> None:
    producer, consumer = pair.engines[source], pair.engines[target]
    prompts = [new_prompt(length) for length in (2, 31, 32, 33, 64, 65, 127, 250, 400, 513, 700, 900)]
    counting = Counting.from_now(consumer)
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda prompt: ask(pair.router(producer, consumer), prompt), prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert_identical(answer, ask_alone(consumer, prompt))
    assert counting.becomes(tokens=sum(len(prompt) - 1 for prompt in prompts))


@BOTH_WAYS
def test_both_engines_asked_at_once(pair: Pair, source: int, target: int) -> None:
    producer, consumer = pair.engines[source], pair.engines[target]
    for length in (5, 97, 600):
        prompt = new_prompt(length)
        counting = Counting.from_now(consumer)
        answer = both_at_once(producer, consumer, completion_body(prompt, ANSWER_TOKENS))
        assert_identical(answer, ask_alone(consumer, prompt))
        assert counting.becomes(tokens=length - 1)


def test_producer_first_with_what_it_returned(pair: Pair) -> None:
    producer, consumer = pair.engines
    prompt = new_prompt(333)
    counting = Counting.from_now(consumer)
    answer = producer_first(producer, consumer, completion_body(prompt, ANSWER_TOKENS))
    assert_identical(answer, ask_alone(consumer, prompt))
    assert counting.becomes(tokens=332)


def test_prefix_that_decode_already_has_is_not_pulled_again(pair: Pair) -> None:
    producer, consumer = pair.engines
    router, prefix = pair.router(producer, consumer), new_prompt(7 * BLOCK)
    assert ask(router, [*prefix, *new_prompt(3)]).error is None
    longer = [*prefix, *new_prompt(100)]
    counting = Counting.from_now(consumer)
    answer = ask(router, longer)
    assert_identical(answer, ask_alone(consumer, longer))
    assert counting.becomes(tokens=99)


def test_prompt_that_decode_has_whole_pulls_nothing_and_frees_the_producer(pair: Pair) -> None:
    producer, consumer = pair.engines
    router, prompt = pair.router(producer, consumer), new_prompt(4 * BLOCK + 1)
    first = ask(router, prompt)
    counting = Counting.from_now(consumer)
    second = ask(router, prompt)
    assert_identical(second, first)
    assert_identical(second, ask_alone(consumer, prompt))
    assert counting.becomes(tokens=0)


@BOTH_WAYS
def test_prompt_of_one_token(pair: Pair, source: int, target: int) -> None:
    producer, consumer = pair.engines[source], pair.engines[target]
    prompt = new_prompt(1)
    counting = Counting.from_now(consumer)
    assert_identical(ask(pair.router(producer, consumer), prompt), ask_alone(consumer, prompt))
    assert counting.becomes(tokens=0)


def test_first_answer_token_that_ends_the_text(pair: Pair) -> None:
    producer, consumer = pair.engines
    prompt, ends = new_prompt(200), {"logit_bias": {str(END_OF_TEXT): 100}}
    counting = Counting.from_now(consumer)
    answer = ask(pair.router(producer, consumer), prompt, **ends)
    assert answer.finish_reason == "stop"
    assert_identical(answer, ask_alone(consumer, prompt, **ends))
    assert counting.becomes(tokens=199)


@BOTH_WAYS
def test_a_probe_foretells_what_the_other_engine_settles_on(
    pair: Pair, source: int, target: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The decoder that `--as` rebuilds from the producer is, region for region, the one that runs beside it."""
    producer, consumer = pair.engines[source], pair.engines[target]
    files = [str(tmp_path / f"{engine.name}.json") for engine in (producer, consumer)]
    for engine, path in zip((producer, consumer), files, strict=True):
        assert main(["handshake", "dump", bootstrap(engine), "-o", path, *PATIENT]) == 0
    saved = [read_hello(Path(path)).engines[0].tables for path in files]
    tp = consumer.tensor_parallel
    rebuilt = build_decoder(saved[0], read_wish(f"tp={tp},block_size={consumer.block_size}")).tables
    assert {rank: layers_of(table) for rank, table in rebuilt.items()} == {
        rank: layers_of(table) for rank, table in saved[1].items()
    }
    capsys.readouterr()
    assert main(["handshake", "probe", bootstrap(producer), "--as", f"tp={tp}", "--json", *PATIENT]) == 0
    foretold = json.loads(capsys.readouterr().out)
    assert main(["handshake", "diff", *files, "--json"]) == 0
    settled = json.loads(capsys.readouterr().out)
    assert (foretold["agreement"], foretold["mismatches"]) == (settled["agreement"], settled["mismatches"])
    assert foretold["agreement"]["bytes_per_token"] == TinyModel().kv_bytes_per_token


def bootstrap(engine: EngineConfig) -> str:
    return f"http://{HOST}:{engine.bootstrap_port}"


def layers_of(table: RankTable) -> list[Region]:
    """Regions without what each engine chooses by itself: where a layer's memory lies, and how many blocks."""
    first: dict[str, int] = {}
    return [
        msgspec.structs.replace(own, base=own.base - first.setdefault(own.layer, own.base), num_blocks=1)
        for own in table.regions
    ]
