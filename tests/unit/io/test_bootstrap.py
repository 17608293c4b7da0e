from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any

import pytest

from mooncake_hetero_tp.config import HostPort
from mooncake_hetero_tp.errors import ConfigError, LocalUsageError
from mooncake_hetero_tp.io.bootstrap import BootstrapServer, Conflict, Registration, Registry, check_registration
from mooncake_hetero_tp.types import EngineId, Identity, Incarnation, Rank


def worker(tp: int = 0, addr: str = "tcp://10.0.0.1:1", *, engine: str = "e", dp: int = 0, **more: Any) -> Registration:
    return Registration(EngineId(engine), dp, tp, more.get("pp", 0), addr, more.get("incarnation"))


# --- the registry --------------------------------------------------------------------------------


def test_a_registration_may_be_repeated() -> None:
    registry = Registry()
    registry.register(worker())
    registry.register(worker())
    assert registry.snapshot() == {"0": {"engine_id": "e", "worker_addr": {"0": {"0": "tcp://10.0.0.1:1"}}}}


def test_16_workers_with_repeated_local_ranks_are_16_places() -> None:
    """vllm#51531: identity is the global data-parallel rank, not the node's."""
    registry = Registry()
    for dp in range(16):
        registry.register(worker(engine=f"e_dp{dp}", dp=dp, addr=f"tcp://10.0.0.{dp // 8}:{1 + dp % 8}"))
    answer = registry.snapshot()
    assert [answer[str(dp)]["engine_id"] for dp in range(16)] == [f"e_dp{dp}" for dp in range(16)]


def test_without_incarnations_contradictions_are_refused_in_vllms_words() -> None:
    registry = Registry()
    registry.register(worker())
    with pytest.raises(Conflict, match=r"is already registered at tcp://10\.0\.0\.1:1, but still want to register at"):
        registry.register(worker(addr="tcp://10.0.0.2:1"))
    with pytest.raises(Conflict, match="Engine ID mismatch for dp_rank=0: expected e, got f"):
        registry.register(worker(engine="f"))


def test_a_new_incarnation_replaces_its_ranks_entry_only() -> None:
    registry = Registry()
    registry.register(worker(0, "tcp://10.0.0.1:1", incarnation="aa"))
    registry.register(worker(1, "tcp://10.0.0.1:2", incarnation="bb"))
    registry.register(worker(0, "tcp://10.0.0.1:9", incarnation="cc"))
    assert registry.snapshot()["0"] == {
        "engine_id": "e",
        "worker_addr": {"0": {"0": "tcp://10.0.0.1:9"}, "1": {"0": "tcp://10.0.0.1:2"}},
        "incarnations": {"0": {"0": "cc"}, "1": {"0": "bb"}},
    }


def test_a_new_incarnation_at_the_same_address_is_seen() -> None:
    registry = Registry()
    registry.register(worker(incarnation="aa"))
    registry.register(worker(incarnation="bb"))
    assert registry.snapshot()["0"]["incarnations"] == {"0": {"0": "bb"}}


def test_a_new_engine_id_drops_all_that_the_old_engine_registered() -> None:
    registry = Registry()
    for tp in range(2):
        registry.register(worker(tp, f"tcp://10.0.0.1:{tp}", incarnation=f"a{tp}"))
    registry.register(worker(dp=1, engine="other", incarnation="dd"))
    registry.register(worker(0, "tcp://10.0.0.1:7", engine="new", incarnation="b0"))
    answer = registry.snapshot()
    assert answer["0"]["engine_id"] == "new"
    assert answer["0"]["worker_addr"] == {"0": {"0": "tcp://10.0.0.1:7"}}
    assert answer["1"]["engine_id"] == "other"


def test_one_incarnation_has_one_address() -> None:
    registry = Registry()
    registry.register(worker(incarnation="aa"))
    with pytest.raises(Conflict, match="already registered"):
        registry.register(worker(addr="tcp://10.0.0.2:1", incarnation="aa"))


def test_the_registry_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mooncake_hetero_tp.io.bootstrap._MAX_WORKERS", 2)
    registry = Registry()
    registry.register(worker(0))
    registry.register(worker(1))
    with pytest.raises(Conflict, match="already holds 2 workers"):
        registry.register(worker(2))


def test_a_registration_of_an_identity() -> None:
    identity = Identity(EngineId("e"), Incarnation("aa"), Rank(dp=1, pp=2, tp=3))
    made = Registration.of(identity, "tcp://h:1")
    assert made == Registration(EngineId("e"), 1, 3, 2, "tcp://h:1", Incarnation("aa"))
    assert made.rank == identity.rank


@pytest.mark.parametrize(
    "wrong,name",
    [
        (worker(-1), "tp_rank"),
        (worker(dp=70000), "dp_rank"),
        (worker(pp=-3), "pp_rank"),
        (worker(engine=""), "engine_id"),
        (worker(addr="x" * 2000), "addr"),
        (worker(incarnation=""), "incarnation"),
    ],
)
def test_absurd_registrations_are_named(wrong: Registration, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        check_registration(wrong)


# --- over HTTP -----------------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[BootstrapServer]:
    one = BootstrapServer(HostPort("127.0.0.1", 0))
    one.start()
    yield one
    one.close()


def call(server: BootstrapServer, method: str, path: str, body: object = None) -> tuple[int, Any]:
    connection = HTTPConnection("127.0.0.1", server.address.port, timeout=5)
    content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    connection.request(method, path, content, {"Content-Type": "application/json"})
    response = connection.getresponse()
    answer = response.status, json.loads(response.read())
    connection.close()
    return answer


BODY = {"engine_id": "e", "dp_rank": 0, "tp_rank": 1, "pp_rank": 0, "addr": "tcp://10.0.0.1:1"}


@pytest.mark.usefixtures("leaves_nothing")
def test_register_and_query(server: BootstrapServer) -> None:
    assert call(server, "GET", "/query") == (200, {})
    assert call(server, "POST", "/register", BODY) == (200, {"status": "ok"})
    assert call(server, "POST", "/register", BODY | {"more": [1]}) == (200, {"status": "ok"})
    assert call(server, "GET", "/query?x=1") == (
        200,
        {"0": {"engine_id": "e", "worker_addr": {"1": {"0": "tcp://10.0.0.1:1"}}}},
    )
    status, answer = call(server, "POST", "/register", BODY | {"addr": "tcp://10.0.0.2:1"})
    assert status == 400
    assert "is already registered at tcp://10.0.0.1:1" in answer["detail"]
    assert call(server, "POST", "/register", BODY | {"addr": "tcp://10.0.0.2:1", "incarnation": "aa"})[0] == 200


@pytest.mark.parametrize(
    "method,path,body,status",
    [
        ("POST", "/register", b"{", 422),
        ("POST", "/register", b"\xff\xfe", 422),
        ("POST", "/register", {}, 422),
        ("POST", "/register", BODY | {"tp_rank": "first"}, 422),
        ("POST", "/register", BODY | {"tp_rank": -1}, 422),
        ("POST", "/register", b"x" * 70000, 413),
        ("GET", "/register", None, 405),
        ("POST", "/query", {}, 405),
        ("GET", "/", None, 404),
    ],
)
def test_wrong_requests_get_one_error_each(
    server: BootstrapServer, method: str, path: str, body: object, status: int
) -> None:
    answered, content = call(server, method, path, body)
    assert answered == status
    assert content["detail"]
    assert call(server, "GET", "/query") == (200, {})


def test_a_length_must_be_given_and_garbage_harms_nobody(server: BootstrapServer) -> None:
    for sent in (b"POST /register HTTP/1.1\r\nHost: x\r\n\r\n", b"\x00\x01\x02\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", server.address.port), timeout=5) as raw:
            raw.sendall(sent)
            assert raw.recv(100)
    assert call(server, "GET", "/query") == (200, {})


@pytest.mark.usefixtures("leaves_nothing")
def test_the_end_does_not_wait_for_clients_that_say_nothing() -> None:
    server = BootstrapServer(HostPort("127.0.0.1", 0))
    server.start()
    with socket.create_connection(("127.0.0.1", server.address.port), timeout=5) as silent:
        call(server, "GET", "/query")
        server.close()
        assert silent.recv(10) == b""
    server.close()


def test_a_second_start_does_nothing(server: BootstrapServer) -> None:
    address = server.address
    server.start()
    assert server.address == address


def test_a_port_in_use_names_the_port_and_the_setting(server: BootstrapServer) -> None:
    """vllm-ascend#10653: producers of one machine collide."""
    second = BootstrapServer(HostPort("127.0.0.1", server.address.port))
    with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{server.address.port}.*in use.*VLLM_MOONCAKE_BOOTSTRAP_PORT"):
        second.start()
    with pytest.raises(LocalUsageError, match="not running"):
        _ = second.address
    second.close()


def test_too_many_connections_are_turned_away(server: BootstrapServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mooncake_hetero_tp.io.bootstrap._MAX_CONNECTIONS", 2)
    address = ("127.0.0.1", server.address.port)
    open_ = [socket.create_connection(address, timeout=5) for _ in range(4)]
    assert [raw.recv(10) for raw in open_[2:]] == [b"", b""]
    for raw in open_:
        raw.close()
