"""Pairs of real engines, TP1 -> TP2, one per connector: started, warmed up, asked, and their stamps read."""

from __future__ import annotations

import dataclasses
import os
import random
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.benchmarks.baseline import NIXL, mooncake_baseline, nixl_baseline  # first: it puts examples/ on the path

# isort: split
from client import Answer, complete, completion_body
from deployment import Deployment, EngineConfig, RouterConfig
from serve_1p1d import BUILD, decode_engine, prefill_engine
from tiny_model import TinyModel, ensure_tiny_model

from tests.e2e.proxies import decode_body, engine_id, prefill_body

ROOT = Path(__file__).parents[2]
LOGS = BUILD / "bench"
STAMPED_MODULE = "tests.benchmarks.stamped"
STAMPS_FOLDER = "MHT_BENCH_STAMPS"
HEALTHY_WITHIN_S = 480.0
"""Four engines at once on two cores; a minute where nothing else runs."""
ROUTER_WITHIN_S = 60.0
WARM_UP = (40, 700, 40, 700)
"""Prompt lengths of the requests before anything is measured: handshakes, first pulls, first kernels."""

OURS, MOONCAKE, NIXL_NAME = "ours", "mooncake", "nixl"

_prompts = random.Random(20_261_201)


class Stamp(NamedTuple):
    """One line of `stamped.py`."""

    at_ns: int
    event: str
    request: str


@dataclasses.dataclass(frozen=True)
class Pair:
    """One connector's producer, consumer and router."""

    name: str
    prefill: EngineConfig
    decode: EngineConfig
    router: RouterConfig

    def through_router(self, prompt: Sequence[int], max_tokens: int) -> Answer:
        """As `vllm-router` does it: the producer first, then the consumer."""
        return complete(self.router.url, completion_body(prompt, max_tokens))

    def both_at_once(self, prompt: Sequence[int], max_tokens: int) -> Answer:
        """As vLLM's example proxy does it: both at the same time."""
        body, transfer_id = completion_body(prompt, max_tokens), f"xfer-{uuid.uuid4()}"
        halves = {
            self.prefill.url: prefill_body(body, {"transfer_id": transfer_id}),
            self.decode.url: decode_body(body, self.prefill, transfer_id, remote_engine_id=engine_id(self.prefill)),
        }
        with ThreadPoolExecutor(2) as pool:
            prefill, decode = pool.map(complete, halves.keys(), halves.values())
        return dataclasses.replace(decode, error=decode.error or prefill.error)

    def stamps(self, engine: EngineConfig) -> list[Stamp]:
        """All stamps of an engine's processes so far, in order of time."""
        found = []
        for path in stamps_folder(engine).glob("*.stamps"):
            for line in path.read_text(encoding="ascii").splitlines():
                at, event, request = line.split(" ", 2)
                found.append(Stamp(int(at), event, request))
        return sorted(found)


def new_prompt(length: int) -> list[int]:
    """Random token ids: no two prompts share a block. Token 0 ends the text and is left out."""
    return _prompts.choices(range(1, TinyModel().vocabulary), k=length)


def stamps_folder(engine: EngineConfig) -> Path:
    return Path(engine.environment[STAMPS_FOLDER])


def engines_of(name: str, model: Path) -> tuple[EngineConfig, EngineConfig]:
    """Producer and consumer of a pair, stamped where the connector is one of the two that are timed."""
    change = {OURS: ours, MOONCAKE: mooncake_baseline, NIXL_NAME: nixl_baseline}[name]
    prefill, decode = (change(engine(model)) for engine in (prefill_engine, decode_engine))
    named = [dataclasses.replace(engine, name=f"{name}-{engine.name}") for engine in (prefill, decode)]
    if name != NIXL_NAME:
        named = [stamped(engine) for engine in named]
    return named[0], named[1]


def ours(engine: EngineConfig) -> EngineConfig:
    return engine


def stamped(engine: EngineConfig) -> EngineConfig:
    """The same engine, its connector replaced by the subclass that writes stamps."""
    folder = LOGS / "stamps" / engine.name
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.stamps"):
        old.unlink()
    path = engine.environment.get("PYTHONPATH") or os.environ.get("PYTHONPATH", "")
    environment = {
        **engine.environment,
        "PYTHONPATH": f"{ROOT}:{path}" if path else str(ROOT),
        STAMPS_FOLDER: str(folder),
    }
    connector = {"MooncakeHeteroTPConnector": "StampedHeteroTP", "MooncakeConnector": "StampedMooncake"}
    return dataclasses.replace(
        engine,
        connector=connector[engine.connector],
        connector_module=STAMPED_MODULE,
        environment=environment,
    )


@contextmanager
def running(names: Sequence[str]) -> Iterator[Mapping[str, Pair]]:
    """All these pairs at once, healthy and warm; they end with the block.

    Raises:
        DeploymentError: a service ended or did not become healthy.
    """
    model = ensure_tiny_model(BUILD / "models")
    with Deployment(LOGS) as deployment:
        engines = {name: engines_of(name, model) for name in names}
        for pair in engines.values():
            for engine in pair:
                deployment.start(engine)
        deployment.wait_healthy(HEALTHY_WITHIN_S)
        pairs = {}
        for name, (prefill, decode) in engines.items():
            dialect = NIXL_NAME if name == NIXL_NAME else MOONCAKE
            router = RouterConfig(f"{name}-router", (prefill,), (decode,), dialect=dialect)
            deployment.start(router)
            pairs[name] = Pair(name, prefill, decode, router)
        deployment.wait_healthy(ROUTER_WITHIN_S)
        for built in pairs.values():
            for length in WARM_UP:
                built.through_router(new_prompt(length), max_tokens=2)
        yield pairs


def nixl_is_installed() -> bool:
    """Whether `tools/setup_env.sh --bench` has unpacked it."""
    return (NIXL / "nixl").is_dir()
