"""The checks of a copy table in numpy, for the reference: what csrc/src/check.cpp finds, in the same order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from mooncake_hetero_tp.core.copies import Int64
from mooncake_hetero_tp.core.copy_table import MAX_AXES, CopyTable
from mooncake_hetero_tp.native._library import Ranges
from mooncake_hetero_tp.native.segments import expand, segment_counts, used_axes
from mooncake_hetero_tp.native.status import TEXTS, Status, StatusError

END: Final = 2**63
"""What a signed 64-bit integer holds ends here."""
SAFE: Final = 2.0**61
"""What float64 finds to be below this fits for certain; the rest is added up exactly."""
CLEAR: Final = "mht_clear"
SCATTER: Final = "mht_scatter"
Flags = npt.NDArray[np.bool_]


def check_table(
    function: str, table: CopyTable, packed_address: int, ranges: Ranges, threads: int, *, check_overlap: bool
) -> None:
    """Refuse what the native `function` refuses.

    Raises:
        StatusError: with the status and the copy at fault.
    """
    for status, row in _faults(function, table, packed_address, ranges, threads, check_overlap=check_overlap):
        raise StatusError(function, status, TEXTS[status], row)


def _faults(
    function: str, table: CopyTable, packed_address: int, ranges: Ranges, threads: int, *, check_overlap: bool
) -> Iterator[tuple[Status, int]]:
    has_packed = function != CLEAR
    yield from ((status, -1) for status in _argument_faults(table, packed_address, threads, has_packed=has_packed))
    given = np.asarray(ranges, np.int64).reshape(-1, 2)
    yield from ((status, -1) for status in _range_faults(given))
    allowed = Allowed.of(given)
    if has_packed and table.packed_bytes and allowed.touch(packed_address, packed_address + table.packed_bytes):
        yield Status.PACKED_IN_RANGES, -1
    yield from _first_row_fault(table, allowed, has_packed=has_packed)
    if has_packed:
        yield from _packed_overlaps(table)
    if function == SCATTER and check_overlap:
        yield from _memory_overlaps(table)


def _argument_faults(table: CopyTable, packed_address: int, threads: int, *, has_packed: bool) -> Iterator[Status]:
    if threads < 1:
        yield Status.INVALID_ARGUMENT
    if has_packed:
        if packed_address < 0 or table.packed_bytes < 0 or (packed_address == 0 and table.packed_bytes > 0):
            yield Status.INVALID_ARGUMENT
        if packed_address + table.packed_bytes >= END:
            yield Status.OVERFLOW


def _range_faults(ranges: Int64) -> Iterator[Status]:
    for address, size in ranges.tolist():
        if address < 0 or size < 0:
            yield Status.INVALID_ARGUMENT
        if address + size >= END:
            yield Status.OVERFLOW


class Allowed(NamedTuple):
    """The ranges, sorted, without neighbours that touch: a segment may run from one allocation into the next."""

    low: Int64
    high: Int64

    @classmethod
    def of(cls, ranges: Int64) -> Allowed:
        ranges = ranges[ranges[:, 1] > 0]
        ranges = ranges[np.argsort(ranges[:, 0], kind="stable")]
        low, reached = ranges[:, 0], np.maximum.accumulate(ranges.sum(axis=1))
        begins = np.append(True, low[1:] > reached[:-1])[: low.size]
        return cls(low[begins], reached[np.append(begins[1:], True)[: low.size]])

    def hold(self, low: Int64, high: Int64) -> Flags:
        """Which intervals [low, high) lie in one of the ranges."""
        if not self.low.size:
            return np.zeros(low.shape, np.bool_)
        at = np.searchsorted(self.low, low, side="right") - 1
        inside: Flags = (at >= 0) & (high <= self.high[at])
        return inside

    def touch(self, low: int, high: int) -> bool:
        return bool(((self.low < high) & (self.high > low)).any())


def _first_row_fault(table: CopyTable, allowed: Allowed, *, has_packed: bool) -> Iterator[tuple[Status, int]]:
    """The first copy with a fault, and its first fault."""
    found = np.zeros(table.copies.size, np.int64)

    def note(status: Status, rows: Int64) -> None:
        found[rows[found[rows] == Status.OK]] = status

    note(Status.BAD_COPY, np.flatnonzero(_bad_shapes(table)))
    note(Status.BAD_LIST, np.flatnonzero(_bad_lists(table)))
    empty = (used_axes(table.copies) & (table.copies["axes"]["count"] == 0)).any(axis=1)
    rows = np.flatnonzero((found == Status.OK) & ~empty)
    hulls = Hulls.of(table, rows)
    note(Status.OVERFLOW, rows[hulls.overflows])
    if has_packed:
        note(Status.OUTSIDE_PACKED, rows[_outside_packed(table, rows, hulls.bytes)])
    outside = rows[~allowed.hold(hulls.low, hulls.high) & (found[rows] == Status.OK)]
    first = int(np.append(np.flatnonzero(found), found.size)[0])
    leaving = _first_leaving(table, outside[outside < first], allowed)
    if leaving is not None:
        yield Status.OUTSIDE_RANGES, leaving
    if first < found.size:
        yield Status(int(found[first])), first


def _bad_shapes(table: CopyTable) -> Flags:
    copies = table.copies
    axes_wrong = (copies["axis_count"] < 0) | (copies["axis_count"] > MAX_AXES)
    counts_wrong = (used_axes(copies) & (copies["axes"]["count"] < 0)).any(axis=1)
    wrong: Flags = (copies["run_bytes"] < 1) | (copies["reserved"] != 0) | axes_wrong | counts_wrong
    return wrong


def _bad_lists(table: CopyTable) -> Flags:
    axes = table.copies["axes"]
    lists = axes["list"].astype(np.int64)
    leaves = (lists < -1) | ((lists >= 0) & (lists + axes["count"] > table.offsets.size))
    wrong: Flags = (used_axes(table.copies) & leaves).any(axis=1)
    return wrong


class Hulls(NamedTuple):
    """Of each copy: [low, high) of all its segments, the bytes it moves, and whether 64 bits cannot hold those."""

    low: Int64
    high: Int64
    bytes: Int64
    overflows: Flags

    @classmethod
    def of(cls, table: CopyTable, rows: Int64) -> Hulls:
        copies = table.copies[rows]
        low, high = _axis_spans(table, rows)
        steps = np.abs(copies["axes"]["stride"].astype(float)) * used_axes(copies) * copies["axes"]["count"]
        widest = np.maximum(np.maximum(np.abs(low.astype(float)), np.abs(high.astype(float))), steps).sum(axis=1)
        counts = segment_counts(copies)
        moved = copies["run_bytes"] * counts.astype(float).prod(axis=1)
        doubtful = (widest + np.abs(copies["base"].astype(float)) + copies["run_bytes"] >= SAFE) | (moved >= SAFE)
        overflows = np.zeros(len(rows), np.bool_)
        for at in np.flatnonzero(doubtful).tolist():
            overflows[at] = _overflows(table, copies[at])
        start = copies["base"] + low.sum(axis=1)
        end = copies["base"] + high.sum(axis=1) + copies["run_bytes"]
        return cls(start, end, copies["run_bytes"] * counts.prod(axis=1), overflows)


def _axis_spans(table: CopyTable, rows: Int64) -> tuple[Int64, Int64]:
    """Lowest and highest offset of every axis of the copies `rows`; 0 where it is not used."""
    copies = table.copies[rows]
    used = used_axes(copies)
    last = np.where(used, copies["axes"]["stride"] * (copies["axes"]["count"] - np.int64(1)), 0)
    low, high = np.minimum(last, 0), np.maximum(last, 0)
    listed = used & (copies["axes"]["list"] >= 0)
    names = np.stack([copies["axes"]["list"][listed], copies["axes"]["count"][listed]], axis=1)
    lists, which = np.unique(names, axis=0, return_inverse=True)
    parts = [table.offsets[start : start + count] for start, count in lists.tolist()]
    low[listed] = np.array([part.min() for part in parts], np.int64)[which.ravel()]
    high[listed] = np.array([part.max() for part in parts], np.int64)[which.ravel()]
    return low, high


def _overflows(table: CopyTable, copy: np.void) -> bool:
    """Exactly, in Python's integers, in the order of csrc/src/check.cpp."""
    moved, low, high = int(copy["run_bytes"]), 0, 0
    for axis in reversed(copy["axes"][: copy["axis_count"]]):
        moved *= int(axis["count"])
        last = int(axis["stride"]) * (int(axis["count"]) - 1)
        span = [0, last]
        if axis["list"] >= 0:
            span = table.offsets[axis["list"] : axis["list"] + axis["count"]].tolist()
        low, high = low + min(span), high + max(span)
        if not _all_fit(moved, *span, low, high):
            return True
    base = int(copy["base"])
    return not _all_fit(base + low, base + high, base + high + int(copy["run_bytes"]))


def _all_fit(*values: int) -> bool:
    return all(-END <= value < END for value in values)


def _outside_packed(table: CopyTable, rows: Int64, moved: Int64) -> Flags:
    offset = table.copies["packed_offset"][rows]
    outside: Flags = (offset < 0) | (moved > table.packed_bytes) | (offset > table.packed_bytes - moved)
    return outside


def _first_leaving(table: CopyTable, rows: Int64, allowed: Allowed) -> int | None:
    """The first of these copies with a segment outside the ranges."""
    for segments in expand(table, rows):
        outside = np.flatnonzero(~allowed.hold(segments.address, segments.address + segments.bytes))
        if outside.size:
            return int(segments.row[outside[0]])
    return None


def _packed_overlaps(table: CopyTable) -> Iterator[tuple[Status, int]]:
    moved = segment_counts(table.copies).prod(axis=1) * table.copies["run_bytes"]
    rows = np.flatnonzero(moved)
    yield from _first_overlap(Status.PACKED_OVERLAP, rows, table.copies["packed_offset"][rows], moved[rows])


def _memory_overlaps(table: CopyTable) -> Iterator[tuple[Status, int]]:
    batches = list(expand(table))
    if batches:
        rows, address, _, size = (np.concatenate(columns) for columns in zip(*batches, strict=True))
        yield from _first_overlap(Status.MEMORY_OVERLAP, rows, address, size)


def _first_overlap(status: Status, rows: Int64, start: Int64, size: Int64) -> Iterator[tuple[Status, int]]:
    order = np.argsort(start, kind="stable")
    overlaps = np.flatnonzero(start[order][1:] < (start + size)[order][:-1])
    if overlaps.size:
        yield status, int(rows[order][overlaps[0] + 1])
