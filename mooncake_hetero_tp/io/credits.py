"""Credits: how much may be in flight to one peer over all threads, handed out in order of arrival.

Mooncake's TCP transport keeps 1,024 transfers queued and 1,024 more waiting per peer. A waiting one
fails after 1 s, and one refused by full queues can leave the peer's queue without its pump: from then
on every transfer to that peer fails (its tcp_transport_lane_impl.h, and measured with 0.3.13.post1).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from mooncake_hetero_tp.errors import LocalUsageError

_LOOK_AGAIN_S = 0.2
"""How often a waiting read looks whether it was stopped or its deadline moved."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What one engine call holds while it runs."""

    descriptors: int
    bytes: int
    calls: int = 1


@dataclass(slots=True)
class _Peer:
    free_calls: int
    free_descriptors: int
    free_bytes: int
    waiting: deque[object] = field(default_factory=deque)

    def covers(self, cost: Cost) -> bool:
        return (
            cost.calls <= self.free_calls
            and cost.descriptors <= self.free_descriptors
            and cost.bytes <= self.free_bytes
        )

    def take(self, cost: Cost, sign: int = 1) -> None:
        self.free_calls -= sign * cost.calls
        self.free_descriptors -= sign * cost.descriptors
        self.free_bytes -= sign * cost.bytes


class Credits:
    """Bounds calls, descriptors and bytes in flight per peer; first come, first served.

    Serving in order lets a short read pass between two batches of a long one and starves nobody.
    """

    def __init__(self, calls: int, descriptors: int, bytes_: int) -> None:
        if min(calls, descriptors, bytes_) < 1:
            raise LocalUsageError(
                f"credits of {calls} calls, {descriptors} descriptors, {bytes_} bytes: all must be >= 1"
            )
        self._limit = Cost(descriptors, bytes_, calls)
        self._peers: dict[str, _Peer] = {}
        self._changed = threading.Condition()

    @contextmanager
    def hold(self, peer: str, cost: Cost, *, wanted: Callable[[], bool]) -> Iterator[bool]:
        """Wait for the credits for as long as they are `wanted`; yields whether they are held.

        Raises:
            LocalUsageError: the cost is above what a peer may ever hold.
        """
        limit = self._limit
        if cost.calls > limit.calls or cost.descriptors > limit.descriptors or cost.bytes > limit.bytes:
            raise LocalUsageError(f"{cost} is above the credits of a peer, {limit}; use smaller batches")
        held = self._acquire(peer, cost, wanted)
        try:
            yield held
        finally:
            if held:
                self._release(peer, cost)

    def in_flight(self, peer: str) -> Cost:
        """What the peer's running calls hold now."""
        with self._changed:
            state = self._peers.get(peer)
            if state is None:
                return Cost(0, 0, 0)
            return Cost(
                self._limit.descriptors - state.free_descriptors,
                self._limit.bytes - state.free_bytes,
                self._limit.calls - state.free_calls,
            )

    def _acquire(self, peer: str, cost: Cost, wanted: Callable[[], bool]) -> bool:
        ticket = object()
        held = False
        with self._changed:
            limit = self._limit
            state = self._peers.setdefault(peer, _Peer(limit.calls, limit.descriptors, limit.bytes))
            state.waiting.append(ticket)
            while not held and wanted():
                held = self._changed.wait_for(lambda: state.waiting[0] is ticket and state.covers(cost), _LOOK_AGAIN_S)
            state.waiting.remove(ticket)
            if held:
                state.take(cost)
            self._forget_idle(peer, state)
            self._changed.notify_all()
            return held

    def _release(self, peer: str, cost: Cost) -> None:
        with self._changed:
            state = self._peers[peer]
            state.take(cost, sign=-1)
            self._forget_idle(peer, state)
            self._changed.notify_all()

    def _forget_idle(self, peer: str, state: _Peer) -> None:
        if not state.waiting and state.free_calls == self._limit.calls:
            self._peers.pop(peer, None)
