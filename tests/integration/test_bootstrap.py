"""Our bootstrap server beside vLLM's own, and under vLLM's own decoder and the real vllm-router."""

from __future__ import annotations

import asyncio
import http.client
import http.server
import json
import logging
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mooncake_hetero_tp.config import HostPort
from mooncake_hetero_tp.core.effects import ResolvedEngine
from mooncake_hetero_tp.errors import ConfigError
from mooncake_hetero_tp.io.bootstrap import BootstrapServer, Registration
from mooncake_hetero_tp.io.bootstrap_client import query, register
from mooncake_hetero_tp.types import EngineId, Incarnation, Rank

pytestmark = pytest.mark.vllm

ENGINE = EngineId("engine-x")


def worker(tp: int = 0, addr: str = "tcp://127.0.0.1:5555", incarnation: str = "aabb") -> Registration:
    return Registration(ENGINE, 0, tp, 0, addr, Incarnation(incarnation))


@pytest.fixture
def ours() -> Iterator[BootstrapServer]:
    server = BootstrapServer(HostPort("127.0.0.1", 0))
    server.start()
    yield server
    server.close()


@pytest.fixture
def theirs() -> Iterator[HostPort]:
    """The address of vLLM's MooncakeBootstrapServer, in this process."""
    pytest.importorskip("vllm")
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_utils import MooncakeBootstrapServer

    server = MooncakeBootstrapServer("127.0.0.1", 0)
    server.start()
    yield HostPort("127.0.0.1", server.port)
    server.shutdown()


def call(address: HostPort, method: str, path: str, body: object = None) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(address.host, address.port, timeout=10)
    content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    connection.request(method, path, content, {"Content-Type": "application/json", "Connection": "close"})
    response = connection.getresponse()
    answer = response.status, json.loads(response.read())
    connection.close()
    return answer


def test_both_servers_answer_the_same(ours: BootstrapServer, theirs: HostPort) -> None:
    plain = {"engine_id": "e", "dp_rank": 0, "tp_rank": 0, "pp_rank": 0, "addr": "tcp://10.0.0.1:1"}
    requests: list[tuple[str, str, object]] = [
        ("GET", "/query", None),
        ("POST", "/register", plain),
        ("POST", "/register", plain),
        ("POST", "/register", plain | {"unknown": 1}),
        ("POST", "/register", plain | {"addr": "tcp://10.0.0.2:1"}),
        ("POST", "/register", plain | {"engine_id": "f"}),
        ("POST", "/register", plain | {"tp_rank": "1", "addr": "tcp://10.0.0.1:2"}),
        ("POST", "/register", plain | {"dp_rank": 3, "pp_rank": 1, "engine_id": "g"}),
        ("GET", "/query", None),
        ("GET", "/nowhere", None),
        ("GET", "/register", None),
    ]
    for request in requests:
        assert call(ours.address, *request) == call(theirs, *request), request
    malformed: list[object] = [b"{", {}, plain | {"tp_rank": "x"}, plain | {"addr": None}, [plain]]
    for body in malformed:
        statuses = [call(address, "POST", "/register", body)[0] for address in (ours.address, theirs)]
        assert statuses == [422, 422], body


def test_our_workers_register_with_vllms_server_and_are_found_there(theirs: HostPort) -> None:
    register(theirs, worker(0), timeout_s=10)
    register(theirs, worker(1, "tcp://127.0.0.1:5556"), timeout_s=10)
    found = query(f"http://{theirs}", ENGINE, timeout_s=10)
    assert isinstance(found, ResolvedEngine)
    assert found.addresses == {Rank(tp=0): "tcp://127.0.0.1:5555", Rank(tp=1): "tcp://127.0.0.1:5556"}
    assert set(found.incarnations.values()) == {None}


def test_vllms_server_does_not_know_restarts_and_the_error_says_so(theirs: HostPort) -> None:
    register(theirs, worker(), timeout_s=10)
    with pytest.raises(ConfigError, match=r"stale registration.*restart that server"):
        register(theirs, worker(addr="tcp://127.0.0.1:7777", incarnation="ccdd"), timeout_s=10)


def test_vllms_decoder_does_not_mind_incarnations(ours: BootstrapServer) -> None:
    pytest.importorskip("vllm")
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import MooncakeConnectorWorker

    for tp in range(2):
        register(ours.address, worker(tp, f"tcp://127.0.0.1:{5555 + tp}"), timeout_s=10)
    bootstrap = f"http://{ours.address}"
    decoder = SimpleNamespace(_remote_agents={}, _tp_size={}, _pending_bootstrap_queries={bootstrap: asyncio.Event()})
    asyncio.run(MooncakeConnectorWorker._connect_to_prefiller_bootstrap(decoder, bootstrap))
    assert decoder._remote_agents == {ENGINE: {0: {0: "tcp://127.0.0.1:5555"}, 1: {0: "tcp://127.0.0.1:5556"}}}
    assert decoder._tp_size == {ENGINE: 2}


# --- the router ----------------------------------------------------------------------------------


class Engine(http.server.BaseHTTPRequestHandler):
    """As much of an engine's HTTP side as the router wants before it routes."""

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/v1/completions":
            self.server.asked.append(body)  # type: ignore[attr-defined]
        self._answer()

    def _answer(self) -> None:
        content = json.dumps({"id": "1", "data": [{"id": "m"}], "choices": [{"text": "x"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def engines() -> Iterator[list[Any]]:
    servers = [http.server.ThreadingHTTPServer(("127.0.0.1", 0), Engine) for _ in range(2)]
    threads = [threading.Thread(target=server.serve_forever, args=(0.05,)) for server in servers]
    for server, thread in zip(servers, threads, strict=True):
        server.daemon_threads = True
        server.asked = []  # type: ignore[attr-defined]
        thread.start()
    yield servers
    for server, thread in zip(servers, threads, strict=True):
        server.shutdown()
        server.server_close()
        thread.join()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
    return port


def test_the_router_finds_the_engine_and_sends_the_decoder_there(ours: BootstrapServer, engines: list[Any]) -> None:
    found = shutil.which("vllm-router") or shutil.which("vllm-router", path=str(Path(sys.executable).parent))
    if found is None:
        pytest.skip("no vllm-router here")
    register(ours.address, worker(), timeout_s=10)
    prefill, decode = (f"http://127.0.0.1:{server.server_port}" for server in engines)
    port = free_port()
    options = ["--vllm-pd-disaggregation", "--kv-connector", "mooncake", "--host", "127.0.0.1", "--port", str(port)]
    router = subprocess.Popen(
        [found, *options, "--prefill", prefill, str(ours.address.port), "--decode", decode],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _ask(HostPort("127.0.0.1", port))
    finally:
        router.terminate()
        router.wait(10)
    (asked,) = engines[1].asked
    params = asked["kv_transfer_params"]
    assert (params["remote_bootstrap_addr"], params["remote_engine_id"]) == (f"http://{ours.address}", ENGINE)
    assert params["transfer_id"] == engines[0].asked[0]["kv_transfer_params"]["transfer_id"]


def _ask(router: HostPort) -> None:
    end = time.monotonic() + 60
    while True:
        try:
            status, _ = call(router, "POST", "/v1/completions", {"model": "m", "prompt": "hi", "max_tokens": 3})
        except OSError:
            assert time.monotonic() < end, "the router does not come up"
            time.sleep(0.1)
        else:
            assert status == 200
            return


@pytest.fixture(autouse=True)
def quiet_httpx() -> None:
    logging.getLogger("httpx").setLevel(logging.WARNING)
