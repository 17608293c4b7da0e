"""A fixture that sees what a test leaves behind: threads of this package, file descriptors."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

_PATIENCE_S = 5.0


def our_threads() -> set[str]:
    """Names of live threads that this package started."""
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("mht-")}


def open_files() -> int:
    """File descriptors of this process, sockets included."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.fixture
def leaves_nothing() -> Iterator[None]:
    """No thread of this package and no file descriptor more than before."""
    before = open_files()
    yield
    end = time.monotonic() + _PATIENCE_S
    while (our_threads() or open_files() > before) and time.monotonic() < end:
        time.sleep(0.01)
    assert our_threads() == set()
    assert open_files() <= before
