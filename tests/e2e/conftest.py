"""The tiny model and a folder for logs; each test module starts the one pair of engines that it needs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from deployment import Deployment, EngineConfig, RouterConfig, Service
from serve_1p1d import BUILD
from tiny_model import ensure_tiny_model


@pytest.fixture(scope="session")
def model() -> Path:
    return ensure_tiny_model(BUILD / "models")


@pytest.fixture(scope="module")
def logs(request: pytest.FixtureRequest) -> Path:
    """Kept under build/, so that they can be read after a failure."""
    folder = BUILD / "e2e" / request.path.stem
    folder.mkdir(parents=True, exist_ok=True)
    return folder


SERVER = "vllm.entrypoints.openai.api_server"
QUICK_ENGINE_STARTS = 8
"""Engines that the tests not marked `slow` may start in all; each takes half a minute of two cores."""


@pytest.fixture(scope="session", autouse=True)
def engine_starts(request: pytest.FixtureRequest) -> Iterator[None]:
    """Counts them; a session with slow tests may start any number."""
    start, started = Deployment.start, []

    def counted(self: Deployment, config: EngineConfig | RouterConfig) -> Service:
        if SERVER in config.command():  # not a stand-in of tests of the deployment itself
            started.append(config.name)
        return start(self, config)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Deployment, "start", counted)
        yield
    if not any(item.get_closest_marker("slow") for item in request.session.items):
        assert len(started) <= QUICK_ENGINE_STARTS, f"{started}: mark one of their modules slow"
