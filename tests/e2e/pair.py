"""A running pair of engines with its router, and the questions that the tests ask it."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from client import Answer, alone, complete, completion_body
from deployment import Deployment, EngineConfig, RouterConfig, Service
from guard import descendants
from serve_1p1d import HEALTHY_WITHIN_S
from tiny_model import TinyModel
from transfers import Transfer, counted

from tests.e2e.residue import Held, eventually, held, is_idle, is_open, kv_state

ANSWER_TOKENS = 12
GIVES_UP_SOON = {"VLLM_MOONCAKE_CONNECTOR_TIMEOUT": "10"}
"""For consumers that are sent to a producer that is not there."""

_salts = itertools.count()
_prompts = random.Random(20_261_201)


def new_prompt(length: int) -> list[int]:
    """Random token ids; token 0 ends the text and is left out."""
    return _prompts.choices(range(1, TinyModel().vocabulary), k=length)


@dataclasses.dataclass
class Pair:
    """Two engines, each of them started once for a whole test module."""

    engines: tuple[EngineConfig, EngineConfig]
    services: dict[str, Service]
    routers: dict[tuple[str, str], RouterConfig]
    """By the names of producer and consumer."""
    logs: Path
    idle: dict[str, Held] = dataclasses.field(default_factory=dict)
    """What each engine held once it had seen one request of each kind."""

    def log_of(self, engine: EngineConfig) -> str:
        return (self.logs / f"{engine.name}.log").read_text(encoding="utf-8", errors="replace")

    def router(self, producer: EngineConfig, consumer: EngineConfig) -> str:
        return self.routers[producer.name, consumer.name].url

    def leftovers(self) -> list[str]:
        """What engines still hold after the last answer: KV blocks, requests, processes, threads, sockets."""
        return [text for engine in self.engines for text in self._leftovers_of(engine)]

    def _leftovers_of(self, engine: EngineConfig) -> Iterator[str]:
        if not eventually(lambda: is_idle(engine.url)):
            yield f"{engine.name}: holds KV blocks or requests: {kv_state(engine.url)}"
        pid, before = self.services[engine.name].pid, self.idle.get(engine.name)
        if before and not eventually(lambda: not held(pid).exceeds(before)):
            yield f"{engine.name}: had {before}, now {held(pid)}"

    def remember_idle(self) -> None:
        """Take what the engines hold now as the measure for `leftovers`."""
        assert self.leftovers() == []
        self.idle = {engine.name: held(self.services[engine.name].pid) for engine in self.engines}


@contextlib.contextmanager
def running_pair(
    engines: tuple[EngineConfig, EngineConfig], directions: Sequence[tuple[EngineConfig, EngineConfig]], logs: Path
) -> Iterator[Pair]:
    """Start both engines at once, then a router per direction; check at the end that nothing is left."""
    with Deployment(logs) as deployment:
        services = {engine.name: deployment.start(engine) for engine in engines}
        deployment.wait_healthy(HEALTHY_WITHIN_S)
        routers = {}
        for producer, consumer in directions:
            name = f"router-{producer.name}-{consumer.name}"
            router = RouterConfig(name=name, prefill=(producer,), decode=(consumer,))
            services[name] = deployment.start(router)
            routers[producer.name, consumer.name] = router
        deployment.wait_healthy(30.0)
        pair = Pair(engines, services, routers, logs)
        yield pair
        tree = [pid for service in services.values() for pid in (service.pid, *descendants(service.pid))]
    assert [pid for pid in tree if Path(f"/proc/{pid}").exists()] == [], "processes outlived their deployment"
    ports = [port for engine in engines for port in (engine.port, engine.bootstrap_port)]
    assert [port for port in ports if is_open(port)] == [], "ports are still open"


def ask(url: str, prompt: Sequence[int], **more: object) -> Answer:
    """A completion through this router or engine."""
    return complete(url, completion_body(prompt, ANSWER_TOKENS, **more))


def ask_alone(engine: EngineConfig, prompt: Sequence[int], **more: object) -> Answer:
    """What this engine answers without any pull and without the prefix cache that pulls have filled."""
    return alone(engine.url, completion_body(prompt, ANSWER_TOKENS, **more), f"alone-{next(_salts)}")


@dataclasses.dataclass
class Counting:
    """What a consumer's workers pulled since this was made."""

    engine: EngineConfig
    before: Transfer

    @classmethod
    def from_now(cls, engine: EngineConfig) -> Counting:
        return cls(engine, counted(engine.url))

    def pulled_bytes(self) -> int:
        return counted(self.engine.url).bytes - self.before.bytes

    def becomes(self, tokens: int) -> bool:
        """Whether exactly the KV of so many tokens is counted, at once or with one of the next engine steps."""
        return eventually(lambda: self.pulled_bytes() == tokens * TinyModel().kv_bytes_per_token, 10.0)
