"""A fixture that sees what a test leaves behind: threads of this package, file descriptors."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

_PATIENCE_S = 20.0


def our_threads() -> set[threading.Thread]:
    """Live threads that this package started."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("mht-")}


def open_files() -> int:
    """File descriptors of this process, sockets included."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.fixture
def leaves_nothing() -> Iterator[None]:
    """No thread of this package and no file descriptor more than before."""
    threads, files = our_threads(), open_files()
    yield
    end = time.monotonic() + _PATIENCE_S
    while (our_threads() - threads or open_files() > files) and time.monotonic() < end:
        time.sleep(0.01)
    assert our_threads() <= threads
    assert open_files() <= files
