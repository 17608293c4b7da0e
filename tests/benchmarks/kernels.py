"""Packing and unpacking on the CPU beside memcpy of the same bytes, in one process.

64 MiB in segments of one size, at random pages of twice as much memory, which no cache holds: what a slice of the
heads looks like. At 256 B a page is 16 tokens of 512 B, as in a token-major layout. Gather and scatter have memory
of their own, since a scatter's pages are not those that were just read. Run alone: python -m tests.benchmarks.kernels
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from mooncake_hetero_tp.core.copy_table import Axis, CopyTable, MemoryCopy, Strided, make_table
from mooncake_hetero_tp.native import ops
from tests.benchmarks.bind import WrongBytes
from tests.benchmarks.rows import Report, Row, Sample, interleaved

MOVED: Final = 64 << 20
SEGMENTS: Final = {256: "256_b", 4 << 10: "4_kib", 16 << 10: "16_kib", 64 << 10: "64_kib"}
TOKENS: Final = 16
"""Segments of a page at 256 B."""
SCALED: Final = 16 << 10
"""Segment size of the rows with several threads."""
REPEATS: Final = 15
Bytes = npt.NDArray[np.uint8]


def least(segment: int) -> float:
    """The part of memcpy's rate that is wanted of one thread."""
    return 0.5 if segment < 4 << 10 else 0.85


def row_of(operation: str, segment: int) -> Row:
    return Row(
        name=f"cpu_{operation}_{SEGMENTS[segment]}",
        sizes={"segment_bytes": segment, "bytes": MOVED, "memory_bytes": 2 * MOVED, "threads": 1},
        unit="GB/s",
        baseline="memcpy of the same bytes, one thread",
        target=f"ratio >= {least(segment)}",
    )


def threads_row_of(operation: str, threads: int) -> Row:
    return Row(
        name=f"cpu_{operation}_{SEGMENTS[SCALED]}_{threads}_threads",
        sizes={"segment_bytes": SCALED, "bytes": MOVED, "memory_bytes": 2 * MOVED, "threads": threads},
        unit="GB/s",
        baseline="the same with one thread",
    )


def thread_counts() -> list[int]:
    """Powers of two up to the cores that this process has, and those."""
    cores = len(os.sched_getaffinity(0))
    return sorted({threads for threads in (2, 4, 8, 16) if threads < cores} | ({cores} if cores > 1 else set()))


def rows() -> list[Row]:
    """Everything that `measure` fills in."""
    found = [row_of(operation, segment) for segment in SEGMENTS for operation in ("gather", "scatter")]
    return found + [threads_row_of(name, count) for count in thread_counts() for name in ("gather", "scatter")]


@dataclass(frozen=True, eq=False)
class Side:
    """Some memory, and segments of it in a packed buffer."""

    memory: Bytes
    packed: Bytes
    segment: int
    offsets: npt.NDArray[np.int64]
    """Where each segment begins in the memory."""

    @classmethod
    def of(cls, memory: Bytes, packed: Bytes, segment: int, seed: int) -> Side:
        page_segments = TOKENS if segment == min(SEGMENTS) else 1
        pages = MOVED // (segment * page_segments)
        starts = np.random.default_rng(seed).permutation(pages).astype(np.int64) * (2 * segment * page_segments)
        within = np.arange(page_segments, dtype=np.int64) * (2 * segment)
        return cls(memory, packed, segment, np.add.outer(starts, within))

    @property
    def table(self) -> CopyTable:
        page = Strided(self.offsets.shape[1], 2 * self.segment)
        axes: list[Axis] = [self.offsets[:, 0], page]
        return make_table([MemoryCopy(self.memory.ctypes.data, 0, axes, self.segment)], MOVED)

    def run(self, operation: str, threads: int = 1) -> Callable[[], None]:
        call = ops.gather if operation == "gather" else ops.scatter
        ranges = [(self.memory.ctypes.data, self.memory.nbytes)]
        return partial(call, self.table, self.packed.ctypes.data, ranges, threads=threads)

    def check(self, operation: str) -> None:
        """One call, held to numpy.

        Raises:
            WrongBytes: packed buffer and memory differ after it.
        """
        source = self.memory if operation == "gather" else self.packed
        source[:] = np.arange(source.size, dtype=np.uint32) // 3 % 251  # no period that a segment size divides
        self.run(operation)()
        rows = self.memory.reshape(-1, self.segment)[self.offsets.ravel() // self.segment]
        if not np.array_equal(rows, self.packed.reshape(-1, self.segment)):
            raise WrongBytes(f"{operation} of {self.segment} B segments moved other bytes than numpy")


def measure(report: Report, *, quick: bool) -> None:
    """Fill in all rows.

    Raises:
        WrongBytes: a gather or scatter moved wrong bytes.
        NativeError: there is no native library to measure.
    """
    repeats = 5 if quick else REPEATS
    memories = {name: np.ones(2 * MOVED, np.uint8) for name in ("gather", "scatter")}
    packed, flat = np.ones(MOVED, np.uint8), np.ones(MOVED, np.uint8)
    for segment in SEGMENTS:
        sides = {name: Side.of(memory, packed, segment, segment) for name, memory in memories.items()}
        for name, side in sides.items():
            side.check(name)
        runs: dict[str, Callable[[], object]] = {name: side.run(name) for name, side in sides.items()}
        runs["memcpy"] = partial(ctypes.memmove, flat.ctypes.data, packed.ctypes.data, MOVED)
        rates = {name: _rate(times) for name, times in interleaved(runs, repeats).items()}
        for name in sides:
            report.add(row_of(name, segment).measured(rates[name], rates["memcpy"], met=_is_enough))
        if segment == SCALED:
            _scale(report, sides, repeats)


def _scale(report: Report, sides: dict[str, Side], repeats: int) -> None:
    counts = [1, *thread_counts()]
    runs = {f"{name} {count}": side.run(name, count) for name, side in sides.items() for count in counts}
    rates = {name: _rate(times) for name, times in interleaved(runs, repeats).items()}
    for name in sides:
        for count in counts[1:]:
            report.add(threads_row_of(name, count).measured(rates[f"{name} {count}"], rates[f"{name} 1"]))


def _rate(times_ms: Sample) -> Sample:
    return Sample.of(MOVED / 1e6 / time_ms for time_ms in times_ms.values)


def _is_enough(row: Row) -> bool | None:
    return None if row.ratio is None else row.ratio >= least(int(row.sizes["segment_bytes"]))


def lines(report: Report) -> Iterator[str]:
    """The rows as text."""
    for row in report.rows.values():
        figures = f"{row.value} {row.unit}, {row.ratio} of {row.baseline}" if row.value is not None else row.note
        yield f"{row.name:32} {figures}{'' if row.met is None else ', met' if row.met else ', MISSED'}"


def main() -> int:
    """Measure these rows alone."""
    report = Report(Path("build/bench-kernels.json"))
    report.plan(rows())
    measure(report, quick="--quick" in sys.argv[1:])
    print(*lines(report), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
