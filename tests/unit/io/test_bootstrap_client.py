from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Self

import pytest

from mooncake_hetero_tp.config import HostPort
from mooncake_hetero_tp.core.effects import ResolvedEngine, ResolveFailed
from mooncake_hetero_tp.errors import ConfigError
from mooncake_hetero_tp.io.bootstrap import BootstrapServer, Registration
from mooncake_hetero_tp.io.bootstrap_client import query, register
from mooncake_hetero_tp.types import EngineId, Incarnation, Rank

WORKER = Registration(EngineId("e"), 0, 1, 0, "tcp://10.0.0.1:7", Incarnation("aa"))


@pytest.fixture
def server() -> Iterator[BootstrapServer]:
    one = BootstrapServer(HostPort("127.0.0.1", 0))
    one.start()
    yield one
    one.close()


class Scripted:
    """A TCP server that answers each connection with the next bytes; None: it never answers."""

    def __init__(self, *answers: bytes | None) -> None:
        self._answers = list(answers)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(0.05)
        self._held: list[socket.socket] = []
        self._end = threading.Event()
        self.connections = 0
        self.address = HostPort("127.0.0.1", self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._end.is_set():
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            self.connections += 1
            answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
            self._held.append(connection)
            if answer is not None:
                connection.settimeout(5)
                connection.recv(65536)
                connection.sendall(answer)
                connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        for connection in (*self._held, self._listener):
            connection.close()


def http(status: str, body: bytes = b"") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


# --- query ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["http://127.0.0.1:{port}", "127.0.0.1:{port}", "http://127.0.0.1:{port}/"])
def test_an_engine_is_found(server: BootstrapServer, form: str) -> None:
    server.registry.register(WORKER)
    server.registry.register(Registration(EngineId("other"), 1, 0, 0, "tcp://10.0.0.2:7"))
    bootstrap = form.format(port=server.address.port)
    rank = Rank(dp=0, pp=0, tp=1)
    assert query(bootstrap, EngineId("e"), timeout_s=5) == ResolvedEngine(
        bootstrap, EngineId("e"), {rank: "tcp://10.0.0.1:7"}, {rank: Incarnation("aa")}
    )
    other = query(bootstrap, EngineId("other"), timeout_s=5)
    assert isinstance(other, ResolvedEngine)
    assert other.incarnations == {Rank(dp=1): None}


def test_an_engine_that_is_not_known_is_told_with_those_that_are(server: BootstrapServer) -> None:
    server.registry.register(WORKER)
    answer = query(f"http://{server.address}", EngineId("f"), timeout_s=5)
    assert isinstance(answer, ResolveFailed)
    assert "does not know engine 'f'; it knows: e." in answer.reason


def test_the_answer_of_vllms_own_server_is_understood() -> None:
    body = b'{"0":{"engine_id":"e","worker_addr":{"0":{"0":"tcp://10.0.0.1:1","1":"tcp://[::1]:2"}}}}'
    with Scripted(http("200 OK", body)) as scripted:
        answer = query(f"http://{scripted.address}", EngineId("e"), timeout_s=5)
    assert isinstance(answer, ResolvedEngine)
    assert answer.addresses == {Rank(tp=0, pp=0): "tcp://10.0.0.1:1", Rank(tp=0, pp=1): "tcp://[::1]:2"}


@pytest.mark.parametrize(
    "answer,reason",
    [
        (http("500 Oops"), "answers 500"),
        (http("200 OK", b"<html>"), "sends no list of workers"),
        (http("200 OK", b'{"zero": {}}'), "sends no list of workers"),
        (http("200 OK", b'{"0": {"engine_id": "e", "worker_addr": {}}}'), "expected at least one worker, got 0"),
        (
            http("200 OK", b'{"0": {"engine_id": "e", "worker_addr": {"0": {"0": "ipc://x"}}}}'),
            "expected tcp://host:port",
        ),
        (b"SSH-2.0-OpenSSH\r\n", "does not answer"),
        (b"", "does not answer"),
    ],
)
def test_a_wrong_answer_is_a_reason_and_no_exception(answer: bytes, reason: str) -> None:
    with Scripted(answer) as scripted:
        got = query(f"http://{scripted.address}", EngineId("e"), timeout_s=5)
    assert isinstance(got, ResolveFailed)
    assert reason in got.reason
    assert str(scripted.address) in got.reason


@pytest.mark.parametrize("bootstrap", ["", "http://", "ftp://127.0.0.1:1", "http://127.0.0.1:port", "\x00"])
def test_a_wrong_address_is_a_reason_and_no_exception(bootstrap: str) -> None:
    assert isinstance(query(bootstrap, EngineId("e"), timeout_s=1), ResolveFailed)


def test_an_answer_that_is_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mooncake_hetero_tp.io.bootstrap_client._MAX_ANSWER", 10)
    with Scripted(http("200 OK", b"x" * 11)) as scripted:
        answer = query(f"http://{scripted.address}", EngineId("e"), timeout_s=5)
    assert isinstance(answer, ResolveFailed)
    assert "more than 10 bytes" in answer.reason


@pytest.mark.usefixtures("leaves_nothing")
@pytest.mark.parametrize("drip", [None, b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nx"])
def test_one_deadline_bounds_the_whole_exchange(drip: bytes | None) -> None:
    began = time.monotonic()
    with Scripted(drip) as scripted:
        answer = query(f"http://{scripted.address}", EngineId("e"), timeout_s=0.3)
    assert isinstance(answer, ResolveFailed)
    assert time.monotonic() - began < 3


# --- register ------------------------------------------------------------------------------------


def test_a_worker_registers(server: BootstrapServer) -> None:
    register(server.address, WORKER, timeout_s=5)
    assert server.registry.snapshot()["0"]["incarnations"] == {"1": {"0": "aa"}}


def test_a_server_that_comes_late_is_waited_for() -> None:
    late = BootstrapServer(HostPort("127.0.0.1", 0))
    late.start()
    port = late.address.port
    late.close()
    late = BootstrapServer(HostPort("127.0.0.1", port))
    timer = threading.Timer(0.3, late.start)
    timer.start()
    register(HostPort("127.0.0.1", port), WORKER, timeout_s=5)
    timer.join()
    assert "0" in late.registry.snapshot()
    late.close()


def test_a_server_that_answers_after_the_client_gave_up_is_asked_again() -> None:
    """vllm#55114: the first worker holds the GIL while it pins memory."""
    with Scripted(None, http("200 OK", b'{"status":"ok"}')) as scripted:
        register(scripted.address, WORKER, timeout_s=0.2)
        assert scripted.connections == 2


def test_a_server_that_never_answers_is_an_error_within_the_bound() -> None:
    began = time.monotonic()
    with Scripted(None) as scripted, pytest.raises(ConfigError, match=r"could not register.*no answer within 0\.2 s"):
        register(scripted.address, WORKER, timeout_s=0.2, bound_s=1.0)
    assert time.monotonic() - began < 5


def test_nothing_there_names_the_address_and_the_settings() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = HostPort("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(ConfigError, match=rf"e dp0.pp0.tp1 .*{address.port}.*refused.*VLLM_MOONCAKE_BOOTSTRAP_PORT"):
        register(address, WORKER, timeout_s=1, bound_s=0.3)


def test_a_stop_ends_the_tries() -> None:
    stopped = threading.Event()
    stopped.set()
    began = time.monotonic()
    with pytest.raises(ConfigError, match="could not register"):
        register(HostPort("127.0.0.1", 1), WORKER, timeout_s=30, stopped=stopped)
    assert time.monotonic() - began < 5


def test_an_external_servers_refusal_is_a_stale_registration() -> None:
    """The server of vLLM itself keeps a restarted worker's first address for ever."""
    body = b'{"detail":"Worker with dp_rank=0, tp_rank=1, pp_rank=0 is already registered at tcp://10.0.0.1:1"}'
    with (
        Scripted(http("400 Bad Request", body)) as scripted,
        pytest.raises(
            ConfigError, match=r"stale registration.*restart that server.*bootstrap_server_address"
        ) as caught,
    ):
        register(scripted.address, WORKER, timeout_s=5)
    assert "already registered at tcp://10.0.0.1:1" in str(caught.value)


def test_another_service_on_the_port_is_named() -> None:
    with Scripted(http("404 Not Found", b"nginx")) as scripted, pytest.raises(ConfigError, match=r"answers 404.*nginx"):
        register(scripted.address, WORKER, timeout_s=5)
