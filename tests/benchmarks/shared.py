"""One Mooncake engine under several of ours, so that what is compared has the same connections and threads.

Over loopback a pair of connected threads runs at 1.4 or at 3 to 4 GB/s, by the cores that Linux has them on, and stays
so for seconds. Of two engines one is then often twice as fast as the other, whatever is read through them.
"""

from __future__ import annotations

from mooncake_hetero_tp.io.engine import MooncakeEngine, load_mooncake, set_transfer_timeout
from mooncake_hetero_tp.io.reading import EngineLimits
from mooncake_hetero_tp.io.sessions import ForeignEngine
from tests.benchmarks.producer import HOST, LEASE_S


class SharedEngine:
    """A foreign engine that outlives the sessions of those who share it. Memory stays registered to its end."""

    def __init__(self, foreign: ForeignEngine) -> None:
        self._foreign = foreign
        self._registered: dict[int, int] = {}

    @classmethod
    def start(cls) -> SharedEngine:
        """Over Mooncake TCP.

        Raises:
            RuntimeError: it does not start.
        """
        set_transfer_timeout(LEASE_S)
        foreign = load_mooncake()()
        code = foreign.initialize(HOST, "P2PHANDSHAKE", "tcp", "")
        if code != 0:
            raise RuntimeError(f"Mooncake Transfer Engine does not start on {HOST}: initialize returned {code}")
        return cls(foreign)

    def opened(self, limits: EngineLimits | None = None) -> MooncakeEngine:
        """An engine of ours, with credits of its own, that reads through this one."""
        return MooncakeEngine(
            HOST, lease_s=LEASE_S, protocol="tcp", serves=False, limits=limits, make_foreign=lambda: self
        )

    def get_rpc_port(self) -> int:
        return self._foreign.get_rpc_port()

    def register_memory(self, buffer_addr: int, capacity: int) -> int:
        """Once for all who register the same buffer."""
        if self._registered.get(buffer_addr) == capacity:
            return 0
        code = self._foreign.register_memory(buffer_addr, capacity)
        if code == 0:
            self._registered[buffer_addr] = capacity
        return code

    def unregister_memory(self, _buffer_addr: int) -> int:
        """Not while others may read into it: the foreign engine forgets it when it ends."""
        return 0

    def batch_transfer_async_read(
        self, target: str, buffers: list[int], peer_buffers: list[int], lengths: list[int]
    ) -> int:
        return self._foreign.batch_transfer_async_read(target, buffers, peer_buffers, lengths)

    def transfer_check_status(self, batch: int) -> int:
        return self._foreign.transfer_check_status(batch)

    def get_batch_transfer_status(self, batches: list[int]) -> int:
        return self._foreign.get_batch_transfer_status(batches)
