"""The tiny model and a folder for logs; each test module starts the one pair of engines that it needs."""

from __future__ import annotations

from pathlib import Path

import pytest
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
