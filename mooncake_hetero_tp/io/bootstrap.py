"""The bootstrap service: who serves an engine, and where. Server, registration, query.

On the wire this is vLLM's MooncakeBootstrapServer: `POST /register` with engine_id, dp_rank, tp_rank,
pp_rank and addr, `GET /query` with `{dp: {"engine_id", "worker_addr": {tp: {pp: addr}}}}`, errors as
`{"detail": ...}`. Ours adds one optional field: `incarnation`, a random word per worker process. A new
incarnation replaces what an earlier one registered, so a restarted engine needs no restarted service.
`/query` repeats them under `incarnations` inside each entry, which vLLM's decoder and vllm-router
(0.1.17, `query_mooncake_bootstrap`) do not look at.
"""

from __future__ import annotations

import http.server
import logging
import socket
import socketserver
import sys
import threading
from http import HTTPStatus
from typing import Any, ClassVar

import msgspec

from mooncake_hetero_tp.config import HostPort
from mooncake_hetero_tp.errors import ConfigError, LocalUsageError
from mooncake_hetero_tp.types import EngineId, Identity, Incarnation, Rank

logger = logging.getLogger(__name__)

PORT_SETTING = "VLLM_MOONCAKE_BOOTSTRAP_PORT"
_MAX_BODY = 64 * 1024
_MAX_WORKERS = 65536
_SOCKET_TIMEOUT_S = 5.0
_MAX_CONNECTIONS = 128


class Registration(msgspec.Struct, frozen=True):
    """Body of `POST /register`; unknown fields are ignored, as vLLM's server does."""

    engine_id: EngineId
    dp_rank: int
    tp_rank: int
    pp_rank: int
    addr: str
    incarnation: Incarnation | None = None

    @classmethod
    def of(cls, identity: Identity, address: str) -> Registration:
        """What the worker with this identity registers for its control address."""
        rank = identity.rank
        return cls(identity.engine_id, rank.dp, rank.tp, rank.pp, address, identity.incarnation)

    @property
    def rank(self) -> Rank:
        return Rank(dp=self.dp_rank, pp=self.pp_rank, tp=self.tp_rank)


class Conflict(Exception):
    """A registration that contradicts another one; the message is vLLM's."""


class Registry:
    """Who registered what; any number of threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._engines: dict[int, EngineId] = {}
        self._workers: dict[Rank, Registration] = {}

    def register(self, worker: Registration) -> None:
        """Record a worker; repeating a registration is legal (a client's timeout may come first).

        Raises:
            Conflict: another engine or address holds the place and this is no new incarnation.
        """
        with self._lock:
            self._admit_engine(worker)
            self._admit_worker(worker)
            self._workers[worker.rank] = worker

    def _admit_engine(self, worker: Registration) -> None:
        known = self._engines.setdefault(worker.dp_rank, worker.engine_id)
        if known == worker.engine_id:
            return
        if worker.incarnation is None:
            raise Conflict(f"Engine ID mismatch for dp_rank={worker.dp_rank}: expected {known}, got {worker.engine_id}")
        logger.warning("bootstrap: engine %s replaces %s for dp_rank %d", worker.engine_id, known, worker.dp_rank)
        self._workers = {rank: entry for rank, entry in self._workers.items() if rank.dp != worker.dp_rank}
        self._engines[worker.dp_rank] = worker.engine_id

    def _admit_worker(self, worker: Registration) -> None:
        known = self._workers.get(worker.rank)
        if known is None or known.addr == worker.addr:
            if known is None and len(self._workers) >= _MAX_WORKERS:
                raise Conflict(f"The bootstrap server already holds {_MAX_WORKERS} workers")
            return
        if worker.incarnation is None or worker.incarnation == known.incarnation:
            raise Conflict(
                f"Worker with dp_rank={worker.dp_rank}, tp_rank={worker.tp_rank}, pp_rank={worker.pp_rank} "
                f"is already registered at {known.addr}, but still want to register at {worker.addr}"
            )
        logger.info("bootstrap: %s restarted: %s replaces %s", worker.rank, worker.addr, known.addr)

    def snapshot(self) -> dict[str, dict[str, Any]]:
        """The answer to `GET /query`."""
        with self._lock:
            workers, engines = list(self._workers.values()), dict(self._engines)
        answer: dict[str, dict[str, Any]] = {
            str(dp): {"engine_id": engine, "worker_addr": {}} for dp, engine in engines.items()
        }
        for worker in workers:
            entry = answer[str(worker.dp_rank)]
            entry["worker_addr"].setdefault(str(worker.tp_rank), {})[str(worker.pp_rank)] = worker.addr
            if worker.incarnation is not None:
                known = entry.setdefault("incarnations", {})
                known.setdefault(str(worker.tp_rank), {})[str(worker.pp_rank)] = worker.incarnation
        return answer


class BootstrapServer:
    """The HTTP service in daemon threads of this process."""

    def __init__(self, bind: HostPort) -> None:
        self.registry = Registry()
        self._bind = bind
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Bind and serve; does nothing if it serves already.

        Raises:
            ConfigError: the port is taken or the address is not this machine's.
        """
        if self._server is not None:
            return
        try:
            self._server = _Server(self._bind, self.registry)
        except OSError as error:
            raise ConfigError(
                f"the Mooncake bootstrap server cannot listen on {self._bind}: {error.strerror or error}. "
                f"Set {PORT_SETTING} to a free port (the same for this engine and in its router), or stop what "
                "uses this one; to use a bootstrap server that runs elsewhere, set bootstrap_server_address"
            ) from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, name="mht-bootstrap", daemon=True
        )
        self._thread.start()
        logger.info("Mooncake bootstrap server listens on %s", self.address)

    @property
    def address(self) -> HostPort:
        """Where it listens, with the real port.

        Raises:
            LocalUsageError: it is not running.
        """
        if self._server is None:
            raise LocalUsageError("the bootstrap server is not running; call start first")
        return HostPort(self._bind.host, self._server.server_address[1])

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop serving and end all connections; idempotent."""
        server, self._server = self._server, None
        if server is None or self._thread is None:
            return
        server.shutdown()
        server.server_close()
        server.end_connections(timeout_s)
        self._thread.join(timeout_s)


class _Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    """A listener whose connection threads are counted, bounded and ended with it."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, bind: HostPort, registry: Registry) -> None:
        self.registry = registry
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._connections_lock = threading.Lock()
        self.address_family = socket.AF_INET6 if ":" in bind.host else socket.AF_INET
        super().__init__((bind.host, bind.port), _Handler)

    def server_bind(self) -> None:
        """Without HTTPServer's reverse look-up of the host name, which may hang."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        with self._connections_lock:
            admitted = len(self._connections) < _MAX_CONNECTIONS
            if admitted:
                self._connections[request] = threading.current_thread()
        try:
            if admitted:
                super().process_request_thread(request, client_address)
            else:
                self.shutdown_request(request)
        finally:
            with self._connections_lock:
                self._connections.pop(request, None)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 - the base class's signature
        """A client that went away is nobody's problem."""
        logger.debug("bootstrap: connection of %s ended badly: %r", client_address, sys.exception())

    def end_connections(self, timeout_s: float) -> None:
        with self._connections_lock:
            open_ = dict(self._connections)
        for connection, thread in open_.items():
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                logger.debug("bootstrap: a connection was closed already")
            thread.join(timeout_s)


class _Handler(http.server.BaseHTTPRequestHandler):
    """One request per connection."""

    server: _Server
    timeout = _SOCKET_TIMEOUT_S
    protocol_version = "HTTP/1.1"
    server_version = "mooncake-hetero-tp"
    routes: ClassVar[dict[str, str]] = {"/register": "POST", "/query": "GET"}

    def do_GET(self) -> None:
        if self._routed("GET"):
            self._answer(HTTPStatus.OK, self.server.registry.snapshot())

    def do_POST(self) -> None:
        if not self._routed("POST"):
            return
        body = self._body()
        if body is not None:
            self._register(body)

    def _routed(self, method: str) -> bool:
        wanted = self.routes.get(self.path.split("?")[0])
        if wanted is None:
            self._answer(HTTPStatus.NOT_FOUND, {"detail": "Not Found"})
        elif wanted != method:
            self._answer(HTTPStatus.METHOD_NOT_ALLOWED, {"detail": "Method Not Allowed"})
        return wanted == method

    def _body(self) -> bytes | None:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal():
            self._answer(HTTPStatus.LENGTH_REQUIRED, {"detail": "Content-Length is required"})
        elif int(length) > _MAX_BODY:
            self._answer(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, {"detail": f"at most {_MAX_BODY} bytes are read"})
        else:
            return self.rfile.read(int(length))
        return None

    def _register(self, body: bytes) -> None:
        try:
            worker = msgspec.json.decode(body, type=Registration, strict=False)
            check_registration(worker)
            self.server.registry.register(worker)
        except (msgspec.DecodeError, UnicodeError, ValueError) as error:
            self._answer(HTTPStatus.UNPROCESSABLE_ENTITY, {"detail": [{"loc": ["body"], "msg": str(error)}]})
        except Conflict as error:
            self._answer(HTTPStatus.BAD_REQUEST, {"detail": str(error)})
        else:
            self._answer(HTTPStatus.OK, {"status": "ok"})

    def _answer(self, status: HTTPStatus, content: dict[str, Any]) -> None:
        body = msgspec.json.encode(content)
        self.close_connection = True
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        logger.debug("bootstrap: %s %s", self.address_string(), format % args)


def check_registration(worker: Registration) -> None:
    """Raises ValueError, naming the field, for ranks and texts no worker can have."""
    for name, rank in (("dp_rank", worker.dp_rank), ("tp_rank", worker.tp_rank), ("pp_rank", worker.pp_rank)):
        if not 0 <= rank < _MAX_WORKERS:
            raise ValueError(f"{name}: expected 0 to {_MAX_WORKERS - 1}, got {rank}")
    for name, text in (("engine_id", worker.engine_id), ("addr", worker.addr), ("incarnation", worker.incarnation)):
        if text is not None and not 1 <= len(text) <= 1024:
            raise ValueError(f"{name}: expected 1 to 1024 characters, got {len(text)}")
