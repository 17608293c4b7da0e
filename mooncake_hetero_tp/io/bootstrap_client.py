"""Clients of the bootstrap service: register a worker, ask where an engine's ranks are.

Plain `http.client`: no proxies, no redirects, one deadline over the whole exchange, bounded answers.
"""

from __future__ import annotations

import http.client
import logging
import re
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

import msgspec

from mooncake_hetero_tp.config import HostPort
from mooncake_hetero_tp.core.effects import ResolvedEngine, ResolveFailed
from mooncake_hetero_tp.errors import ConfigError
from mooncake_hetero_tp.io.bootstrap import PORT_SETTING, Registration
from mooncake_hetero_tp.types import EngineId, Incarnation, Rank

logger = logging.getLogger(__name__)

_MAX_ANSWER = 16 * 2**20
_SHORTEST_TRY_S = 0.1
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 5.0
_MAX_RANKS = 65536
_ADDRESS = re.compile(r"tcp://(\[[0-9a-fA-F:.%\w]+\]|[\w.-]+):\d{1,5}")


class _Answer(NamedTuple):
    status: int
    body: bytes


class _Entry(msgspec.Struct):
    """One value of `/query`'s answer; what else it holds is ignored."""

    engine_id: EngineId
    worker_addr: dict[int, dict[int, str]]
    incarnations: dict[int, dict[int, Incarnation]] = {}


def register(
    bootstrap: HostPort,
    worker: Registration,
    *,
    timeout_s: float,
    bound_s: float | None = None,
    stopped: threading.Event | None = None,
) -> None:
    """Tell the bootstrap server where this worker is; blocks until it knows.

    Tried again while nothing answers, with growing pauses: the server's process may be busy registering
    memory for tens of seconds (vllm#55114), and an answer that came too late is repeated harmlessly.

    Args:
        bootstrap: the server.
        worker: what to register.
        timeout_s: for one exchange (VLLM_MOONCAKE_CONNECTOR_TIMEOUT).
        bound_s: for all of them; three exchanges by default, as vLLM's connector has.
        stopped: ends the tries early.

    Raises:
        ConfigError: no answer in time, or a refusal; names the server, the worker and the remedy.
    """
    end = time.monotonic() + (3 * timeout_s if bound_s is None else bound_s)
    pause = _FIRST_PAUSE_S
    while True:
        left = max(end - time.monotonic(), _SHORTEST_TRY_S)
        try:
            answer = _exchange(
                "POST", f"http://{bootstrap}/register", msgspec.json.encode(worker), min(timeout_s, left)
            )
        except OSError as error:
            if time.monotonic() + pause >= end or (stopped is not None and stopped.is_set()):
                raise ConfigError(_unreachable(bootstrap, worker, error)) from error
            logger.warning("bootstrap server %s does not answer (%s); next try in %.1f s", bootstrap, error, pause)
        else:
            _check_registered(bootstrap, worker, answer)
            return
        (stopped or threading.Event()).wait(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)


def _check_registered(bootstrap: HostPort, worker: Registration, answer: _Answer) -> None:
    if answer.status == http.HTTPStatus.OK:
        return
    said = answer.body[:500].decode(errors="replace")
    if answer.status == http.HTTPStatus.BAD_REQUEST:
        raise ConfigError(
            f"the bootstrap server at {bootstrap} refuses {worker.engine_id} {worker.rank} at {worker.addr}: {said}. "
            "It holds a stale registration of an earlier process and, not being ours, does not let a new incarnation "
            "replace it: restart that server, or let this engine run its own (remove bootstrap_server_address). If "
            "the other engine is alive, two engines share one server and dp_rank: give each its own "
            f"{PORT_SETTING}"
        )
    raise ConfigError(
        f"the bootstrap server at {bootstrap} answers {answer.status} to a registration: {said}; "
        f"check that a Mooncake bootstrap server listens there ({PORT_SETTING}, bootstrap_server_address)"
    )


def _unreachable(bootstrap: HostPort, worker: Registration, error: OSError) -> str:
    return (
        f"{worker.engine_id} {worker.rank} could not register with the Mooncake bootstrap server at {bootstrap}: "
        f"{error}. Check that the engine's first worker runs and listens there "
        f"({PORT_SETTING}, or bootstrap_server_address for a server elsewhere); a slow start needs a larger "
        "VLLM_MOONCAKE_CONNECTOR_TIMEOUT"
    )


def query(bootstrap: str, engine_id: EngineId, *, timeout_s: float) -> ResolvedEngine | ResolveFailed:
    """Ask where the ranks of an engine are; never raises.

    `bootstrap` is what the proxy sent: a URL, with or without scheme and path.
    """
    try:
        return _pick(bootstrap, engine_id, _entries(bootstrap, timeout_s))
    except ConfigError as error:
        return ResolveFailed(bootstrap, engine_id, str(error))


def list_engines(bootstrap: str, *, timeout_s: float) -> dict[int, ResolvedEngine]:
    """Every engine the bootstrap server knows, by data-parallel rank; one may have no worker yet.

    Raises:
        ConfigError: no answer in time, or one that is no list of workers; names the server.
    """
    return {dp: _resolved(bootstrap, dp, entry) for dp, entry in sorted(_entries(bootstrap, timeout_s).items())}


def _entries(bootstrap: str, timeout_s: float) -> dict[int, _Entry]:
    """What `/query` answers, by data-parallel rank.

    Raises:
        ConfigError: there is no answer, or it is no list of workers.
    """
    try:
        answer = _exchange("GET", _url(bootstrap, "/query"), None, timeout_s)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the bootstrap server at {bootstrap} does not answer: {error}") from error
    if answer.status != http.HTTPStatus.OK:
        raise ConfigError(f"the bootstrap server at {bootstrap} answers {answer.status}")
    try:
        return msgspec.json.decode(answer.body, type=dict[int, _Entry], strict=False)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise ConfigError(_no_list(bootstrap, error)) from error


def _no_list(bootstrap: str, why: object) -> str:
    return f"the bootstrap server at {bootstrap} sends no list of workers: {why}"


def _pick(bootstrap: str, engine_id: EngineId, entries: dict[int, _Entry]) -> ResolvedEngine | ResolveFailed:
    for dp, entry in sorted(entries.items()):
        if entry.engine_id == engine_id:
            found = _resolved(bootstrap, dp, entry)
            if not found.addresses:
                raise ConfigError(_no_list(bootstrap, "expected at least one worker, got 0"))
            return found
    engines = ", ".join(sorted({entry.engine_id for entry in entries.values()})) or "none"
    return ResolveFailed(
        bootstrap,
        engine_id,
        f"the bootstrap server at {bootstrap} does not know engine {engine_id!r}; it knows: {engines[:500]}. "
        "The producer was restarted under another engine id, or the proxy pairs the wrong server",
    )


def _resolved(bootstrap: str, dp: int, entry: _Entry) -> ResolvedEngine:
    """Raises ConfigError for addresses no worker can have."""
    addresses = {
        Rank(dp=dp, pp=pp, tp=tp): address
        for tp, row in sorted(entry.worker_addr.items())
        for pp, address in sorted(row.items())
    }
    try:
        _check_addresses(addresses)
    except ValueError as error:
        raise ConfigError(_no_list(bootstrap, error)) from error
    known = entry.incarnations
    incarnations = {rank: known.get(rank.tp, {}).get(rank.pp) for rank in addresses}
    return ResolvedEngine(bootstrap, entry.engine_id, addresses, incarnations)


def _check_addresses(addresses: dict[Rank, str]) -> None:
    if len(addresses) > _MAX_RANKS:
        raise ValueError(f"expected at most {_MAX_RANKS} workers, got {len(addresses)}")
    for rank, address in addresses.items():
        if len(address) > 512 or not _ADDRESS.fullmatch(address):
            raise ValueError(f"worker {rank}: expected tcp://host:port, got {address[:100]!r}")


def _url(bootstrap: str, path: str) -> str:
    base = bootstrap if "://" in bootstrap else f"http://{bootstrap}"
    return base.rstrip("/") + path


def _exchange(method: str, url: str, body: bytes | None, timeout_s: float) -> _Answer:
    """One request and its answer.

    Raises:
        OSError: nothing listens, the exchange takes longer than `timeout_s`, or the answer is no HTTP.
        ValueError: the URL is none, or the answer is too long.
    """
    end = time.monotonic() + timeout_s
    parts = urllib.parse.urlsplit(url)
    connect: Callable[..., http.client.HTTPConnection] = {
        "http": http.client.HTTPConnection,
        "https": http.client.HTTPSConnection,
    }.get(parts.scheme, _no_scheme)
    if not parts.hostname:
        raise ValueError(f"{url!r} names no host")
    try:
        connection = connect(parts.hostname, parts.port, timeout=timeout_s)
    except http.client.HTTPException as error:
        raise ValueError(f"{url!r}: {error}") from error
    try:
        connection.connect()
        with _cut_off(connection, end):
            connection.request(method, parts.path, body, {"Content-Type": "application/json", "Connection": "close"})
            response = connection.getresponse()
            return _Answer(response.status, _read(response))
    except (OSError, http.client.HTTPException) as error:
        if time.monotonic() >= end:
            raise TimeoutError(f"no answer within {timeout_s:.1f} s") from error
        raise ConnectionError(str(error) or type(error).__name__) from error
    finally:
        connection.close()


@contextmanager
def _cut_off(connection: http.client.HTTPConnection, end: float) -> Iterator[None]:
    """End the connection at `end`, for a socket's timeout bounds one read and not the exchange."""
    opened = connection.sock

    def cut() -> None:
        with suppress(OSError):
            opened.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(max(end - time.monotonic(), 0.0), cut)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def _no_scheme(host: str, *_: object, **__: object) -> http.client.HTTPConnection:
    raise ValueError(f"the bootstrap address of {host} is neither http nor https")


def _read(response: http.client.HTTPResponse) -> bytes:
    body = response.read(_MAX_ANSWER + 1)
    if len(body) > _MAX_ANSWER:
        raise ValueError(f"an answer of more than {_MAX_ANSWER} bytes")
    return body
