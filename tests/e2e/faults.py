"""A connector for test engines that obeys orders: hold a read, or poison its session first.

Loaded by `kv_connector_module_path=tests.e2e.faults`; the package itself has no such hook. An order is
a file in the engine's folder `E2E_ORDERS`:

- `hold-before`, `hold-after`: while it exists, every read waits before, or after, its bytes move; each
  waiting read leaves a mark beside the order;
- `poison`: the next read takes it away and breaks its session by oversized batches past the adapter.
"""

from __future__ import annotations

import os
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from mooncake_hetero_tp.connector import MooncakeHeteroTPConnector
from mooncake_hetero_tp.core.binding import Descriptors
from mooncake_hetero_tp.io.engine import Deadline, MooncakeEngine, ReadTally

FOLDER_SETTING = "E2E_ORDERS"
HOLD_BEFORE, HOLD_AFTER, POISON = "hold-before", "hold-after", "poison"
LONGEST_HOLD_S = 90.0

_read = MooncakeEngine.read


def order(name: str) -> Path:
    return Path(os.environ[FOLDER_SETTING]) / name


def wait_while_ordered(name: str) -> None:
    """Wait as long as the order stands, but not for ever."""
    if not order(name).exists():
        return
    mark = order(f"{name}.{os.getpid()}.{uuid.uuid4().hex}")
    mark.touch()
    end = time.monotonic() + LONGEST_HOLD_S
    while order(name).exists() and time.monotonic() < end:
        time.sleep(0.02)
    mark.unlink()


def take_order(name: str) -> bool:
    """Whether there was an order; exactly one caller gets it."""
    try:
        order(name).unlink()
    except FileNotFoundError:
        return False
    return True


def break_session(engine: MooncakeEngine, peer: str, descriptors: Descriptors) -> None:
    """Oversized batches past the adapter, of one right byte again and again, until the session is broken.

    Raises:
        AssertionError: it does not break.
    """
    session = engine._sessions.current(peer)
    for _ in range(60):
        if session.read(peer, _first_byte(descriptors, 8000)) != 0:
            time.sleep(0.2)
            if session.read(peer, _first_byte(descriptors, 1)) != 0:
                return
    raise AssertionError("the session did not break")


def _first_byte(descriptors: Descriptors, count: int) -> Descriptors:
    first = (descriptors.src[0], descriptors.dst[0], 1)
    return Descriptors(*(np.full(count, value, np.int64) for value in first))


def read_as_ordered(
    self: MooncakeEngine, transport_session: str, descriptors: Descriptors, *, deadline: Deadline
) -> ReadTally:
    """The read, and what the orders say of it."""
    wait_while_ordered(HOLD_BEFORE)
    if descriptors.count and take_order(POISON):
        break_session(self, transport_session, descriptors)
    tally = _read(self, transport_session, descriptors, deadline=deadline)
    wait_while_ordered(HOLD_AFTER)
    return tally


class ObedientConnector(MooncakeHeteroTPConnector):
    """The connector under test, in a process whose engine takes orders from the first connector on."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        MooncakeEngine.read = read_as_ordered  # type: ignore[method-assign]
        super().__init__(vllm_config, role, kv_cache_config)
