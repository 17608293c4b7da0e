"""Packing and unpacking on a GPU beside a device-to-device copy of the same bytes: python -m tests.benchmarks.gpu

Correctness first, then GB/s for segments of 256 B to 64 KiB, gather and scatter: 256 MiB in 32 layers with the same
pages, at random places of twice as much memory; at 256 B a page has 16 segments, as in a token-major layout. Well
under three minutes; without a GPU it says so. Bytes are counted once, though each is read and written.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from mooncake_hetero_tp.core.copy_table import Axis, CopyTable, MemoryCopy, Strided, make_table
from mooncake_hetero_tp.errors import NativeError
from mooncake_hetero_tp.native import ops
from mooncake_hetero_tp.native.cuda import CudaCopies, Ticket, table_bytes
from tests.benchmarks.bind import WrongBytes
from tests.benchmarks.rows import Report, Row, Sample

MOVED: Final = 256 << 20
SEGMENTS: Final = tuple(256 << step for step in range(0, 9, 2))
"""256 B, 1, 4, 16 and 64 KiB."""
LAYERS: Final = 32
TOKENS: Final = 16
"""Segments of a page at 256 B."""
CAPPED_SMS: Final = 16
CAPPED: Final = 4 << 10
REPEATS: Final = 20
CALLS: Final = 8
"""Calls between two events: one alone is shorter than what a launch costs the host."""


def row_of(operation: str, segment: int, sms: int = 0) -> Row:
    size = f"{segment >> 10}_kib" if segment >= 1 << 10 else f"{segment}_b"
    return Row(
        name=f"gpu_{operation}_{size}" + (f"_{sms}_sms" if sms else ""),
        sizes={"segment_bytes": segment, "bytes": MOVED, "memory_bytes": 2 * MOVED, "max_sms": sms or "all"},
        unit="GB/s",
        baseline="device-to-device copy of the same bytes",
    )


def rows() -> list[Row]:
    """Everything that `measure` fills in."""
    names = ("gather", "scatter")
    full = [row_of(name, segment) for segment in SEGMENTS for name in names]
    return full + [row_of(name, CAPPED, CAPPED_SMS) for name in names]


def why_not() -> str:
    """Why nothing can be measured here; empty where it can."""
    if not torch.cuda.is_available():
        return f"no GPU here: torch {torch.__version__} finds no CUDA device"
    try:
        return "" if ops.cuda_device_count() else "no GPU here: the native library finds no CUDA device"
    except NativeError as error:
        return f"a GPU is here, but the native library cannot use it: {error}"


@dataclass(frozen=True, eq=False)
class Bench:
    """Memory on the device, and who copies on the current stream."""

    copies: CudaCopies
    memory: torch.Tensor
    packed: torch.Tensor

    @classmethod
    def make(cls, max_sms: int) -> Bench:
        biggest = table_bytes(1, MOVED // min(SEGMENTS) // TOKENS)
        device = torch.cuda.current_device()
        memory = torch.randint(0, 256, (2 * MOVED,), dtype=torch.uint8, device="cuda")
        packed = torch.zeros(MOVED, dtype=torch.uint8, device="cuda")
        copies = CudaCopies(device, max_table_bytes=biggest, max_calls=2 * CALLS, max_sms=max_sms)
        return cls(copies, memory, packed)

    def offsets(self, segment: int) -> npt.NDArray[np.int64]:
        """Where in the memory each segment begins; axes: layer, page, segment of the page."""
        page_segments = TOKENS if segment == min(SEGMENTS) else 1
        pages = MOVED // (LAYERS * segment * page_segments)
        layers = np.arange(LAYERS, dtype=np.int64) * (2 * MOVED // LAYERS)
        starts = np.random.default_rng(segment).permutation(pages).astype(np.int64) * (2 * segment * page_segments)
        within = np.arange(page_segments, dtype=np.int64) * (2 * segment)
        offsets: npt.NDArray[np.int64] = np.add.outer(layers, np.add.outer(starts, within))
        return offsets

    def table(self, segment: int) -> CopyTable:
        offsets = self.offsets(segment)
        axes: list[Axis] = [
            Strided(LAYERS, 2 * MOVED // LAYERS),
            offsets[0, :, 0],
            Strided(offsets.shape[2], 2 * segment),
        ]
        return make_table([MemoryCopy(self.memory.data_ptr(), 0, axes, segment)], MOVED)

    def run(self, operation: str, segment: int) -> Callable[[], Ticket]:
        call = self.copies.gather if operation == "gather" else self.copies.scatter
        ranges = [(self.memory.data_ptr(), 2 * MOVED)]
        stream = torch.cuda.current_stream().cuda_stream
        return partial(call, self.table(segment), self.packed.data_ptr(), ranges, stream)

    def check(self, operation: str, segment: int) -> None:
        """One call, held to torch.

        Raises:
            WrongBytes: packed buffer or memory are not what they should be.
        """
        starts = torch.from_numpy(self.offsets(segment).ravel() // segment).cuda()
        expected = self.memory.clone().view(-1, segment)
        if operation == "scatter":
            self.packed.random_(0, 256)
            expected[starts] = self.packed.view(-1, segment)
        self.copies.wait(self.run(operation, segment)())
        is_packed = torch.equal(self.packed.view(-1, segment), expected[starts])
        if not (is_packed and torch.equal(self.memory.view(-1, segment), expected)):
            raise WrongBytes(f"{operation} of {segment} B segments moved other bytes than torch")


def measure(report: Report, *, quick: bool) -> None:
    """Fill in all rows, or say why they stay empty.

    Raises:
        WrongBytes: a gather or scatter moved wrong bytes.
    """
    reason = why_not()
    if reason:
        report.excuse(rows(), reason)
        return
    cases = [(0, segment) for segment in SEGMENTS] + [(CAPPED_SMS, CAPPED)]
    for max_sms in (0, CAPPED_SMS):
        bench = Bench.make(max_sms)
        with bench.copies:
            for segment in [segment for sms, segment in cases if sms == max_sms]:
                _measure(report, bench, segment, max_sms, 3 if quick else REPEATS)


def _measure(report: Report, bench: Bench, segment: int, max_sms: int, repeats: int) -> None:
    names = ("gather", "scatter")
    for name in names:
        bench.check(name, segment)
    other = torch.empty_like(bench.packed)
    runs: dict[str, Callable[[], Any]] = {name: bench.run(name, segment) for name in names}
    runs["copy"] = partial(other.copy_, bench.packed)
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            rates[name].append(_rate(run))
    note = torch.cuda.get_device_name()
    for name in names:
        filled = row_of(name, segment, max_sms).measured(Sample.of(rates[name]), Sample.of(rates["copy"]), note=note)
        report.add(filled)


def _rate(run: Callable[[], Any]) -> float:
    """GB/s of `CALLS` calls after one that warms up."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    run()
    begin.record()
    for _ in range(CALLS):
        run()
    end.record()
    end.synchronize()
    took_ms: float = begin.elapsed_time(end)
    return CALLS * MOVED / 1e6 / took_ms


def lines(report: Report) -> Iterator[str]:
    """The rows as text."""
    for row in report.rows.values():
        figures = f"{row.value} {row.unit}, {row.ratio} of a {row.baseline}, {row.note}"
        yield f"{row.name:24} {row.note if row.value is None else figures}"


def main() -> int:
    """Measure these rows alone; without a GPU, say so."""
    reason = why_not()
    if reason:
        print(f"nothing measured: {reason}")
        return 0
    report = Report(Path("build/bench-gpu.json"))
    report.plan(rows())
    measure(report, quick="--quick" in sys.argv[1:])
    print(*lines(report), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
