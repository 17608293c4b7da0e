"""Start, watch and stop vLLM engines and a router as children of this process.

Everything here is plain configuration and processes: what matters for a real deployment is the
command line that `EngineConfig.command` builds. Every child runs under `guard.py`, so that nothing
outlives this process, however it ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import NoReturn, Self

from client import MODEL_NAME, fetch

HOST = "127.0.0.1"
GUARD = Path(__file__).with_name("guard.py")
ENGINE_SITE = Path(__file__).with_name("engine_site")
"""On the engines' PYTHONPATH; `patient_waits.py` there says why."""
STOP_GRACE_S = 10.0
"""How long a service may take to end by itself before its processes are killed."""

CPU_ENVIRONMENT = {
    # Without these two the engines' OpenMP threads spin against each other: 95 s instead of 7 s for 24 requests on
    # two cores.
    "OMP_NUM_THREADS": "1",
    "KMP_BLOCKTIME": "0",
    # vLLM compiles one small function even with --enforce-eager: seconds in the first request, and a C++ compiler.
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB per rank
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # "auto" refuses TP2 on one NUMA node
    "VLLM_HOST_IP": HOST,
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "NO_COLOR": "1",
    "NO_PROXY": f"{HOST},localhost",
    "no_proxy": f"{HOST},localhost",
}
CPU_ARGUMENTS = ("--enforce-eager", "--dtype", "float32")
"""float32 keeps greedy answers comparable between tensor-parallel sizes; random bfloat16 weights flip near-ties."""


@contextlib.contextmanager
def ignored(*numbers: signal.Signals) -> Iterator[None]:
    """Let these signals pass without effect, where this thread may decide that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_on_signals() -> None:
    """Make SIGTERM and SIGHUP unwind the program as Ctrl-C does, so that `Deployment` stops its services.

    Ctrl-C itself too: a shell starts what it puts into the background with SIGINT ignored.
    """

    def unwind(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, unwind)
    signal.signal(signal.SIGHUP, unwind)
    signal.signal(signal.SIGINT, signal.default_int_handler)


class DeploymentError(RuntimeError):
    """A service ended or did not become healthy; the message ends with the last lines of its log."""


_given_ports: set[int] = set()


def free_port() -> int:
    """A TCP port nobody listens on, below the range from which the kernel draws ports for others."""
    while True:
        port = random.randint(20_000, 32_000)  # noqa: S311 - no secret
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
        if port not in _given_ports:
            _given_ports.add(port)
            return port


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """One vLLM engine with a Mooncake connector; `command` is what you would type yourself."""

    name: str
    model: Path
    role: str
    """`kv_producer`, `kv_consumer` or `kv_both`."""
    tensor_parallel: int = 1
    block_size: int = 32
    """Tokens of a KV block; CPU attention wants a multiple of 32."""
    failure_policy: str = "fail"
    """`kv_load_failure_policy`: answer an error, or `recompute` the prompt on the decode engine."""
    connector: str = "MooncakeHeteroTPConnector"
    connector_module: str | None = None
    """Only for a connector that is not installed as a vLLM plugin."""
    extra_config: Mapping[str, object] = dataclasses.field(default_factory=lambda: {"mooncake_protocol": "tcp"})
    arguments: tuple[str, ...] = CPU_ARGUMENTS
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    port: int = dataclasses.field(default_factory=free_port)
    bootstrap_port: int = dataclasses.field(default_factory=free_port)
    """Where the producer side tells decode engines who it is (`VLLM_MOONCAKE_BOOTSTRAP_PORT`)."""

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def is_producer(self) -> bool:
        return self.role in {"kv_producer", "kv_both"}

    @property
    def bootstrap(self) -> str:
        return f"http://{HOST}:{self.bootstrap_port}"

    def transfer_config(self) -> dict[str, object]:
        """The value of `--kv-transfer-config`."""
        config: dict[str, object] = {
            "kv_connector": self.connector,
            "kv_role": self.role,
            "kv_load_failure_policy": self.failure_policy,
            "kv_connector_extra_config": dict(self.extra_config),
        }
        if self.connector_module:
            config["kv_connector_module_path"] = self.connector_module
        return config

    def command(self) -> list[str]:
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(self.model), "--served-model-name", MODEL_NAME]
        command += ["--host", HOST, "--port", str(self.port), "--disable-uvicorn-access-log"]
        command += ["--tensor-parallel-size", str(self.tensor_parallel), "--block-size", str(self.block_size)]
        command += ["--kv-transfer-config", json.dumps(self.transfer_config())]
        return [*command, *self.arguments]

    def service_environment(self) -> dict[str, str]:
        own = {"VLLM_MOONCAKE_BOOTSTRAP_PORT": str(self.bootstrap_port)}
        path = self.environment.get("PYTHONPATH") or os.environ.get("PYTHONPATH", "")
        site = {"PYTHONPATH": os.pathsep.join(filter(None, [path, str(ENGINE_SITE)]))}
        return {**CPU_ENVIRONMENT, **own, **self.environment, **site}


@dataclasses.dataclass(frozen=True)
class RouterConfig:
    """`vllm-router` in front of prefill and decode engines."""

    name: str
    prefill: tuple[EngineConfig, ...]
    decode: tuple[EngineConfig, ...]
    dialect: str = "mooncake"
    """`mooncake` or `nixl`: what the router writes into `kv_transfer_params`."""
    port: int = dataclasses.field(default_factory=free_port)
    metrics_port: int = dataclasses.field(default_factory=free_port)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def command(self) -> list[str]:
        command = [str(Path(sys.executable).with_name("vllm-router")), "--vllm-pd-disaggregation"]
        command += ["--kv-connector", self.dialect, "--policy", "round_robin"]
        for engine in self.prefill:
            command += ["--prefill", engine.url, str(engine.bootstrap_port)]
        for engine in self.decode:
            command += ["--decode", engine.url]
        command += ["--host", HOST, "--port", str(self.port), "--prometheus-port", str(self.metrics_port)]
        # An error is to be seen, not repeated until it has gone.
        command += ["--disable-retries", "--disable-circuit-breaker"]
        return [*command, "--worker-startup-check-interval", "1"]

    def service_environment(self) -> dict[str, str]:
        return dict(CPU_ENVIRONMENT)


class Service:
    """One running child: its command under a guard, its log file, its health."""

    def __init__(self, config: EngineConfig | RouterConfig, logs: Path) -> None:
        self.name = config.name
        self.url = config.url
        self.log = logs / f"{config.name}.log"
        self.started_at = time.monotonic()
        guarded = [sys.executable, "-I", str(GUARD), str(os.getpid()), str(STOP_GRACE_S), *config.command()]
        self.log.unlink(missing_ok=True)
        with self.log.open("ab") as log:  # appending: several processes write it at once
            self.process = subprocess.Popen(
                guarded,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **config.service_environment()},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def check_runs(self) -> None:
        """Raise DeploymentError when the process has ended."""
        if self.process.poll() is not None:
            raise DeploymentError(f"{self.name} ended with status {self.process.returncode}\n{self.tail()}")

    def is_healthy(self) -> bool:
        """Ask `/health`; raise DeploymentError when the process has ended."""
        self.check_runs()
        try:
            return fetch(f"{self.url}/health", timeout_s=2.0).status == http.client.OK
        except OSError:
            return False

    def tail(self, lines: int = 30) -> str:
        text = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return f"--- last lines of {self.log}\n" + "\n".join(text[-lines:])

    def ask_to_end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()

    def wait_for_end(self, deadline: float) -> None:
        try:
            self.process.wait(max(deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            self.process.kill()  # the kernel then ends the command: the guard was its parent
            self.process.wait()


class Deployment:
    """A set of services that end together, newest first; use as a context manager."""

    def __init__(self, logs: Path) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self.logs = logs
        self.services: list[Service] = []

    def start(self, config: EngineConfig | RouterConfig) -> Service:
        """Start one child and return at once. Call from the main thread: the guard ends with the calling thread."""
        service = Service(config, self.logs)
        self.services.append(service)
        return service

    def wait_healthy(self, deadline_s: float, waiting: Callable[[list[str]], None] | None = None) -> None:
        """Wait until every service answers; call `waiting` with the names of those that do not yet.

        Raises DeploymentError after `deadline_s` seconds or as soon as a service has ended.
        """
        deadline = time.monotonic() + deadline_s
        while missing := [service for service in self.services if not service.is_healthy()]:
            if waiting:
                waiting([service.name for service in missing])
            if time.monotonic() > deadline:
                tails = "\n".join(service.tail() for service in missing)
                raise DeploymentError(f"not healthy after {deadline_s:.0f} s\n{tails}")
            time.sleep(0.25)

    def watch(self) -> NoReturn:
        """Stay until a signal unwinds this or a service ends, which raises DeploymentError."""
        while True:
            for service in self.services:
                service.check_runs()
            time.sleep(1.0)

    def stop(self) -> None:
        """End all services and return when they are gone; a second Ctrl-C does not cut this short."""
        with ignored(signal.SIGINT, signal.SIGTERM):
            for service in reversed(self.services):
                service.ask_to_end()
            deadline = time.monotonic() + STOP_GRACE_S + 15
            for service in self.services:
                service.wait_for_end(deadline)
            self.services.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
