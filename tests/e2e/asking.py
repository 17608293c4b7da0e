"""Completions with a deadline of the test's choice, kept under way, or given up by their client."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from urllib.parse import urlsplit

from client import Answer, complete, completion_body
from deployment import EngineConfig

from tests.e2e.pair import ANSWER_TOKENS
from tests.e2e.proxies import decode_body, prefill_body

IN_FLIGHT = 32
PATIENCE_S = 400.0
"""For prompts of 36,000 tokens on two cores."""

_pool = ThreadPoolExecutor(64, thread_name_prefix="client")
_salts = itertools.count()


def body_of(prompt: Sequence[int], answer_tokens: int = ANSWER_TOKENS, **more: object) -> dict[str, object]:
    return completion_body(prompt, answer_tokens, **more)


def begin(url: str, body: Mapping[str, object]) -> Future[Answer]:
    """Ask, and go on."""
    return _pool.submit(complete, url, body, timeout_s=PATIENCE_S)


def reference(engine: EngineConfig, body: Mapping[str, object]) -> Future[Answer]:
    """What this engine answers by itself, from a prefix cache of its own."""
    return begin(engine.url, {**body, "cache_salt": f"reference-{next(_salts)}"})


def prefilled(producer: EngineConfig, body: Mapping[str, object], transfer_id: str) -> None:
    """Let the producer compute and keep a prompt."""
    answer = begin(producer.url, prefill_body(body, {"transfer_id": transfer_id})).result()
    assert answer.error is None, answer.error


def pulling(producer: EngineConfig, body: Mapping[str, object], transfer_id: str) -> dict[str, object]:
    """The consumer's half; its producer may be unable to answer, so its id is the one it was started with."""
    engine_id = producer.transfer_config()["engine_id"]
    return decode_body(body, producer, transfer_id, remote_engine_id=engine_id)


@contextlib.contextmanager
def client(url: str, body: Mapping[str, object]) -> Iterator[None]:
    """Somebody who has asked and is gone when this is left, without having read an answer."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=PATIENCE_S)
    connection.request("POST", "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        yield
    finally:
        connection.close()


def answers(
    url: str, prompts: Sequence[Sequence[int]], *, in_flight: int = IN_FLIGHT, salted: bool = False
) -> list[Answer]:
    """All of them, `in_flight` at a time; salted, each with a prefix cache of its own."""

    def ask(number: int) -> Answer:
        salt = {"cache_salt": f"alone-{number}"} if salted else {}
        return complete(url, {**body_of(prompts[number]), **salt}, timeout_s=PATIENCE_S)

    with ThreadPoolExecutor(in_flight) as pool:
        return list(pool.map(ask, range(len(prompts))))


def identical(answers: Sequence[Answer], references: Sequence[Answer]) -> int:
    """How many answers are the reference's; an error in either is not."""
    pairs = zip(answers, references, strict=True)
    return sum(a.error is None and b.error is None and a.tokens == b.tokens for a, b in pairs)
