"""A connector for one test engine: on order, one byte of what it has pulled is changed.

Loaded by `kv_connector_module_path=tests.e2e.flipping`; the package itself has no such hook. An order
is a file at `E2E_FLIP_ORDER`; the first read that ends after it appears takes it away.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from mooncake_hetero_tp.connector import MooncakeHeteroTPConnector
from mooncake_hetero_tp.core.binding import Descriptors
from mooncake_hetero_tp.io.engine import Deadline, MooncakeEngine, ReadTally

ORDER_SETTING = "E2E_FLIP_ORDER"
LARGE = 0x4B
"""As the last byte of a little-endian float32: some 1e7. Not an infinity or a NaN, which would outlive its request:
vLLM's CPU attention multiplies what a page holds past its tokens by zero, and the next user of the page would suffer."""

_read = MooncakeEngine.read


def take_order() -> bool:
    """Whether there was an order; exactly one caller in one process gets it."""
    try:
        Path(os.environ[ORDER_SETTING]).unlink()
    except FileNotFoundError:
        return False
    return True


def read_and_flip(
    self: MooncakeEngine, transport_session: str, descriptors: Descriptors, *, deadline: Deadline
) -> ReadTally:
    """Read, then change the last byte that was read, if there is an order."""
    tally = _read(self, transport_session, descriptors, deadline=deadline)
    if descriptors.count and take_order():
        last = int(descriptors.dst[-1]) + int(descriptors.length[-1]) - 1
        byte = ctypes.c_ubyte.from_address(last)
        byte.value = LARGE if byte.value != LARGE else LARGE - 1
    return tally


class FlippingConnector(MooncakeHeteroTPConnector):
    """The connector under test, in a process whose engine flips from the first connector on."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        MooncakeEngine.read = read_and_flip  # type: ignore[method-assign]
        super().__init__(vllm_config, role, kv_cache_config)
