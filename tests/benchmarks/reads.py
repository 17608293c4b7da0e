"""What a descriptor costs over Mooncake TCP on this machine's loopback: the rates behind the other rows.

A producer process serves 32 MiB; this process reads them whole and in pieces, each in one engine call of as
many pieces as our adapter puts into a batch. Medians of calls taken in turns.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from mooncake_hetero_tp.core.binding import Descriptors
from mooncake_hetero_tp.core.regions import Buffer
from mooncake_hetero_tp.io.engine import MooncakeEngine
from mooncake_hetero_tp.io.reading import EngineLimits
from mooncake_hetero_tp.io.transfer import Deadline
from tests.benchmarks.bind import WrongBytes
from tests.benchmarks.rows import Report, Row, Sample
from tests.integration.mooncake_peer import SIZE, pattern

HOST = "127.0.0.1"
PIECES = (4 * 2**10, 16 * 2**10, 32 * 2**10, 256 * 2**10)
REPEATS = 9
READ_WITHIN_S = 30.0


def row_of(piece: int) -> Row:
    return Row(
        name=f"tcp_read_{piece // 2**10}_kib_pieces",
        sizes={"piece_bytes": piece, "bytes": SIZE, "descriptors_a_call": EngineLimits().batch_descriptors},
        unit="MB/s",
        baseline="one 32 MiB descriptor",
    )


def rows() -> list[Row]:
    """Everything that `measure` fills in."""
    return [row_of(piece) for piece in PIECES]


class Served(NamedTuple):
    """Memory of the other process."""

    session: str
    address: int


@contextmanager
def peer() -> Iterator[Served]:
    """A process that serves `pattern()`."""
    command = [sys.executable, "-m", "tests.integration.mooncake_peer"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            line = process.stdout.readline() if process.stdout else ""
            session, address = line.split()
            yield Served(session, int(address))
        finally:
            process.kill()


def measure(report: Report, *, quick: bool) -> None:
    """Fill in all rows.

    Raises:
        WrongBytes: what was read is not what is served.
    """
    repeats = 3 if quick else REPEATS
    memory = np.ones(SIZE, np.uint8)  # touched: page faults are no part of a transfer
    engine = MooncakeEngine(HOST, lease_s=30, protocol="tcp", serves=False)
    try:
        engine.register([Buffer(memory.ctypes.data, memory.nbytes)])
        with peer() as served:
            rates: dict[int, list[float]] = {piece: [] for piece in (SIZE, *PIECES)}
            _read(engine, served, memory, SIZE)
            for _ in range(repeats):
                for piece, found in rates.items():
                    found.append(SIZE / 1e6 / _read(engine, served, memory, piece))
    finally:
        engine.close()
    if not np.array_equal(memory, pattern()):
        raise WrongBytes("the bytes that were read over TCP are not those that are served")
    whole = Sample.of(rates[SIZE])
    for piece in PIECES:
        report.add(row_of(piece).measured(Sample.of(rates[piece]), whole))


def _read(
    engine: MooncakeEngine, served: Served, memory: np.ndarray[tuple[int], np.dtype[np.uint8]], piece: int
) -> float:
    offsets = np.arange(0, SIZE, piece, dtype=np.int64)
    lengths = np.full(offsets.size, piece, np.int64)
    descriptors = Descriptors(served.address + offsets, memory.ctypes.data + offsets, lengths)
    began = time.perf_counter()
    engine.read(served.session, descriptors, deadline=Deadline(time.monotonic() + READ_WITHIN_S))
    return time.perf_counter() - began
