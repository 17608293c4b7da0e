"""The few HTTP calls that the examples need: completions and Prometheus counters. Standard library only."""

from __future__ import annotations

import dataclasses
import http.client
import json
import time
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

MODEL_NAME = "tiny"


@dataclasses.dataclass(frozen=True)
class Reply:
    """An HTTP answer, whatever its status."""

    status: int
    body: bytes

    @property
    def ok(self) -> bool:
        return self.status == http.client.OK

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", errors="replace")


def fetch(url: str, body: object = None, headers: Mapping[str, str] | None = None, timeout_s: float = 120.0) -> Reply:
    """GET, or POST of `body` as JSON, past any proxy; raise OSError when nobody answers."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)
    try:
        if body is None:
            connection.request("GET", parts.path or "/", headers=dict(headers or {}))
        else:
            sent = {"Content-Type": "application/json", **(headers or {})}
            connection.request("POST", parts.path, json.dumps(body).encode(), sent)
        response = connection.getresponse()
        return Reply(response.status, response.read())
    except http.client.HTTPException as error:
        raise OSError(f"{url}: {type(error).__name__}: {error}") from error
    finally:
        connection.close()


@dataclasses.dataclass(frozen=True)
class Answer:
    """What came back for one prompt: token ids, or the reason why there are none."""

    tokens: tuple[int, ...]
    seconds: float
    error: str | None = None
    transfer_params: Mapping[str, object] | None = None
    finish_reason: str | None = None
    id: str = ""
    """The decode engine's name for the request; its logs append `-<index>-<random>`."""


def completion_body(prompt: Sequence[int], max_tokens: int, **more: object) -> dict[str, object]:
    """A greedy completion request for token ids, answered with token ids."""
    body: dict[str, object] = {"model": MODEL_NAME, "prompt": list(prompt), "max_tokens": max_tokens}
    return {**body, "temperature": 0, "return_token_ids": True, **more}


def complete(url: str, body: Mapping[str, object], request_id: str | None = None, timeout_s: float = 120.0) -> Answer:
    """POST a completion; an HTTP or connection error becomes an `Answer` with `error`."""
    headers = {"X-Request-Id": request_id} if request_id else {}
    started = time.monotonic()
    try:
        reply = fetch(f"{url}/v1/completions", body, headers, timeout_s)
    except OSError as error:
        return Answer((), time.monotonic() - started, error=str(error))
    seconds = time.monotonic() - started
    if not reply.ok:
        return Answer((), seconds, error=f"HTTP {reply.status}: {reply.text[:500]}")
    answer = json.loads(reply.body)
    choice = answer["choices"][0]
    return Answer(
        tokens=tuple(choice["token_ids"] or ()),
        seconds=seconds,
        transfer_params=answer.get("kv_transfer_params"),
        finish_reason=choice["finish_reason"],
        id=answer["id"],
    )


def alone(url: str, body: Mapping[str, object], salt: str) -> Answer:
    """The same request to one engine alone.

    The salt keeps it out of the prefix cache that a pull has filled: otherwise a corrupted pull
    would be compared with itself.
    """
    return complete(url, {**body, "cache_salt": salt})


def counters(url: str) -> dict[str, float]:
    """All samples of `/metrics`, added up over their labels."""
    totals: dict[str, float] = {}
    for line in fetch(f"{url}/metrics", timeout_s=30.0).text.splitlines():
        if line and not line.startswith("#"):
            sample, _, value = line.rpartition(" ")
            name = sample.partition("{")[0]
            totals[name] = totals.get(name, 0.0) + float(value)
    return totals
