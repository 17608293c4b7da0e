"""A stand-in for `mooncake.engine.TransferEngine`: records calls, answers with the codes it was given."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from itertools import count

import numpy as np

from mooncake_hetero_tp.core.binding import Descriptors
from mooncake_hetero_tp.core.regions import Buffer

BUFFERS = (Buffer(0x10000, 0x1000), Buffer(0x20000, 0x2000))


def descriptors(number: int, length: int = 16) -> Descriptors:
    """`number` reads of `length` bytes each, side by side."""
    offsets = np.arange(number, dtype=np.int64) * length
    return Descriptors(0x90000 + offsets, 0x10000 + offsets, np.full(number, length, np.int64))


class FakeForeign:
    """One foreign engine. `codes` are the answers of the next reads; after them every read succeeds."""

    ports = count(20000)

    def __init__(self, codes: Iterable[int] = (), *, fail_registration_of: int | None = None) -> None:
        self.codes = list(codes)
        self.reads: list[int] = []
        self.registered: list[int] = []
        self.unregistered: list[int] = []
        self.port = next(self.ports)
        self.gate: threading.Event | None = None
        self.inside = 0
        self.most_inside = 0
        self._fail_registration_of = fail_registration_of
        self._lock = threading.Lock()
        self._numbers = count(1)
        self._batches: dict[int, tuple[int, int, int]] = {}
        """Number -> place in `reads`, descriptors, code."""
        self._gates: dict[int, threading.Event | None] = {}
        self._rests: dict[int, int] = {}
        """Thread -> its batch that waits for the last descriptor."""

    def get_rpc_port(self) -> int:
        return self.port

    def register_memory(self, buffer_addr: int, capacity: int) -> int:
        if self._fail_registration_of == len(self.registered):
            return -12
        self.registered.append(buffer_addr)
        return 0

    def unregister_memory(self, buffer_addr: int) -> int:
        self.unregistered.append(buffer_addr)
        return 0

    def batch_transfer_async_read(
        self, target: str, buffers: list[int], peer_buffers: list[int], lengths: list[int]
    ) -> int:
        """One read comes as all but its last descriptor and then that one, or as that one alone."""
        with self._lock:
            number = next(self._numbers)
            rest = self._rests.pop(threading.get_ident(), None)
            if rest is None:
                self.reads.append(0)
                code = self.codes.pop(0) if self.codes else 0
                self._batches[number] = (len(self.reads) - 1, len(lengths), code)
            else:
                place, _, code = self._batches[rest]
                self._batches[number] = (place, len(lengths), code)
            self.reads[self._batches[number][0]] += len(lengths)
            if len(lengths) > 1:
                self._rests[threading.get_ident()] = number
            self._gates[number] = self.gate
            self.inside += len(lengths)
            self.most_inside = max(self.most_inside, self.inside)
            return number

    def transfer_check_status(self, batch: int) -> int:
        gate = self._gates[batch]
        if gate is not None and not gate.wait(0.001):
            return 0
        return 1 if self._leave(batch) == 0 else -1

    def get_batch_transfer_status(self, batches: list[int]) -> int:
        return min(self._leave(batch) for batch in batches)

    def _leave(self, batch: int) -> int:
        with self._lock:
            _, length, code = self._batches.pop(batch)
            self.inside -= length
            return code
