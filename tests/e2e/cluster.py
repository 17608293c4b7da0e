"""Any number of engines whose trees can be killed, stopped and started again, and orders to their reads."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

from deployment import Deployment, EngineConfig, RouterConfig, Service
from guard import descendants
from serve_1p1d import HEALTHY_WITHIN_S

from tests.e2e.faults import FOLDER_SETTING, HOLD_AFTER, HOLD_BEFORE, POISON
from tests.e2e.residue import Held, eventually, held, is_idle, is_open, kv_state

ROOT = Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True)
class NamedEngine(EngineConfig):
    """An engine that keeps its id over restarts, as a deployment with fixed names has."""

    engine_id: str | None = None

    def transfer_config(self) -> dict[str, object]:
        config = super().transfer_config()
        return {**config, "engine_id": self.engine_id} if self.engine_id else config


@dataclasses.dataclass(frozen=True)
class Orders:
    """Orders to the reads of one consumer engine with `ObedientConnector`."""

    folder: Path

    @classmethod
    def fresh(cls, folder: Path) -> Orders:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return cls(folder)

    def environment(self) -> dict[str, str]:
        path = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        return {FOLDER_SETTING: str(self.folder), "PYTHONPATH": os.pathsep.join(path)}

    @contextlib.contextmanager
    def hold(self, *, after: bool = False) -> Iterator[None]:
        """Reads wait before (or after) their bytes move until this is left."""
        order = self.folder / (HOLD_AFTER if after else HOLD_BEFORE)
        order.touch()
        try:
            yield
        finally:
            order.unlink()

    def held_reads(self) -> int:
        """How many reads wait now."""
        return len(list(self.folder.glob("hold-*.*")))

    def wait_held(self, count: int) -> None:
        assert eventually(lambda: self.held_reads() == count), f"{self.held_reads()} reads are held, not {count}"

    def poison(self) -> Path:
        """The next read breaks its session; the path is there until then."""
        order = self.folder / POISON
        order.touch()
        return order


class Cluster:
    """Engines and routers by name, what they hold, and what happens to them."""

    def __init__(self, deployment: Deployment, logs: Path) -> None:
        self._deployment = deployment
        self._logs = logs
        self.services: dict[str, Service] = {}
        self.engines: list[EngineConfig] = []
        self._idle: dict[str, Held] = {}

    # --- life and death --------------------------------------------------------------------------

    def start(self, *engines: EngineConfig) -> None:
        """Start engines, new ones or killed ones again, and return when all are healthy."""
        for engine in engines:
            self.services[engine.name] = self._deployment.start(engine)
        self._deployment.wait_healthy(HEALTHY_WITHIN_S)
        self.engines += engines

    def start_router(self, prefill: Sequence[EngineConfig], decode: Sequence[EngineConfig]) -> RouterConfig:
        router = RouterConfig(name="router", prefill=tuple(prefill), decode=tuple(decode))
        self.services[router.name] = self._deployment.start(router)
        self._deployment.wait_healthy(30.0)
        return router

    def kill(self, engine: EngineConfig) -> None:
        """SIGKILL to every process of an engine."""
        service = self.services.pop(engine.name)
        for pid in self.processes(service):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        service.process.wait(20)
        self._deployment.services.remove(service)
        self.engines.remove(engine)
        self._idle.pop(engine.name, None)
        log = service.log
        log.rename(log.with_stem(f"{log.stem}-killed"))

    @contextlib.contextmanager
    def stopped(self, engine: EngineConfig) -> Iterator[None]:
        """SIGSTOP to every process of an engine, SIGCONT when this is left."""
        tree = self.processes(self.services[engine.name])
        for pid in tree:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in tree:
                os.kill(pid, signal.SIGCONT)

    @staticmethod
    def processes(service: Service) -> list[int]:
        """Everything below a service's guard."""
        return descendants(service.pid)

    def log_of(self, engine: EngineConfig) -> str:
        return (self._logs / f"{engine.name}.log").read_text(encoding="utf-8", errors="replace")

    # --- what is left ----------------------------------------------------------------------------

    def remember_idle(self) -> None:
        """Take what the engines hold now as the measure for `leftovers`."""
        assert self.leftovers() == []
        self._idle = {engine.name: held(self.services[engine.name].pid) for engine in self.engines}

    def leftovers(self) -> list[str]:
        """What engines still hold: KV blocks, requests, processes, threads, sockets."""
        return [text for engine in self.engines for text in self._leftovers_of(engine)]

    def _leftovers_of(self, engine: EngineConfig) -> Iterator[str]:
        if not eventually(lambda: is_idle(engine.url)):
            yield f"{engine.name}: holds KV blocks or requests: {kv_state(engine.url)}"
        pid, before = self.services[engine.name].pid, self._idle.get(engine.name)
        if before and not eventually(lambda: not held(pid).exceeds(before)):
            yield f"{engine.name}: had {before}, now {held(pid)}"


@contextlib.contextmanager
def running_cluster(logs: Path, *engines: EngineConfig) -> Iterator[Cluster]:
    """Start these engines; at the end nothing of them or of later ones is left."""
    with Deployment(logs) as deployment:
        cluster = Cluster(deployment, logs)
        cluster.start(*engines)
        yield cluster
        tree = [pid for service in cluster.services.values() for pid in (service.pid, *cluster.processes(service))]
    assert [pid for pid in tree if Path(f"/proc/{pid}").exists()] == [], "processes outlived their deployment"
    ports = [port for engine in engines for port in (engine.port, engine.bootstrap_port)]
    assert [port for port in ports if is_open(port)] == [], "ports are still open"
