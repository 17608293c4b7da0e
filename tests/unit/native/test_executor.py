"""Gather, scatter and clear: the same cases on every implementation, against the definition of a table."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import pytest

from mooncake_hetero_tp.core.copy_table import Axis, CopyTable, MemoryCopy, Strided, make_table
from mooncake_hetero_tp.errors import NativeError
from mooncake_hetero_tp.native import _library, executor, ops, reference
from mooncake_hetero_tp.native.executor import Executor
from mooncake_hetero_tp.native.status import Status, StatusError
from tests.unit.native.arena import Arena, address_of, listed

MIB = 1 << 20


def check_all(executor: Executor, arena: Arena, table: CopyTable, threads: int = 1) -> None:
    """Gather, scatter other bytes back, clear; nothing but what the table says may change."""
    expected = arena.gathered(table)
    executor.gather(table, arena.packed_address, arena.ranges, threads=threads)
    np.testing.assert_array_equal(arena.packed, expected)
    arena.packed ^= 0x5A
    expected = arena.scattered(table)
    executor.scatter(table, arena.packed_address, arena.ranges, threads=threads)
    np.testing.assert_array_equal(arena.memory, expected)
    arena.memory |= 1
    expected = arena.cleared(table)
    executor.clear(table, arena.ranges, threads=threads)
    np.testing.assert_array_equal(arena.memory, expected)
    assert arena.guards_hold()


class TestBytes:
    """What is moved, and that nothing else is."""

    def test_empty_table(self, executor: Executor) -> None:
        arena = Arena(64, 64)
        table = make_table([], 64)
        executor.gather(table, arena.packed_address, arena.ranges)
        executor.scatter(table, arena.packed_address, [], check_overlap=True)
        executor.clear(table, [])
        assert arena.is_untouched()

    def test_empty_copies(self, executor: Executor) -> None:
        arena = Arena(64, 64)
        table = arena.table(MemoryCopy(1 << 40, 0, [listed(), Strided(3, 8)], 8), MemoryCopy(0, 0, [Strided(0, 1)], 8))
        executor.gather(table, arena.packed_address, arena.ranges)
        executor.clear(table, arena.ranges)
        assert arena.is_untouched()

    @pytest.mark.parametrize("at", range(17))
    @pytest.mark.parametrize("run", [1, 2, 3, 4, 7, 8, 13, 16, 24, 31, 32, 64, 100, 128, 192, 255, 256, 257, 1000])
    def test_alignments(self, executor: Executor, at: int, run: int) -> None:
        for packed_at in range(17) if run <= 64 else (0, 1, 5, 8, at):
            arena = Arena(5 * (run + 16), 5 * run + 8, at=at, packed_at=packed_at)
            table = arena.table(MemoryCopy(3, 8, [Strided(5, run + (at + packed_at) % 13 + 1)], run))
            check_all(executor, arena, table)

    @pytest.mark.parametrize("run", [4095, 4096, 10_000, 65_535, 65_536, MIB])
    def test_long_runs(self, executor: Executor, run: int) -> None:
        arena = Arena(3 * run + 64, 3 * run, at=7, packed_at=3)
        table = arena.table(
            MemoryCopy(0, 0, [listed(2 * run + 9, 0)], run), MemoryCopy(run + 3, 2 * run, [Strided(1, 0)], run)
        )
        check_all(executor, arena, table)

    @pytest.mark.parametrize("threads", [1, 2, 7])
    def test_threads_leave_no_byte_out(self, executor: Executor, threads: int) -> None:
        sizes = [(3000, 700), (40, 70_001), (1, 3 * MIB + 5), (250_000, 8)]
        total = sum(count * run for count, run in sizes)
        arena = Arena(total + sum(count for count, _ in sizes), total, seed=threads)
        copies, place, packed = [], 0, 0
        for count, run in sizes:
            copies.append(MemoryCopy(place, packed, [Strided(count, run + 1)], run))
            place, packed = place + count * (run + 1), packed + count * run
        table = arena.table(*copies)
        executor.gather(table, arena.packed_address, arena.ranges, threads=threads)
        place = packed = 0
        for count, run in sizes:
            rows = arena.memory[place : place + count * (run + 1)].reshape(count, run + 1)
            np.testing.assert_array_equal(
                arena.packed[packed : packed + count * run].reshape(count, run), rows[:, :run]
            )
            rows[:, :run] ^= 0xFF
            place, packed = place + count * (run + 1), packed + count * run
        expected = arena.memory.copy()
        arena.packed ^= 0xFF
        executor.scatter(table, arena.packed_address, arena.ranges, threads=threads)
        np.testing.assert_array_equal(arena.memory, expected)

    def test_axes_of_every_kind(self, executor: Executor) -> None:
        arena = Arena(40_000, 2 * 3 * 4 * 2 * 5 * 6)
        axes: list[Axis] = [Strided(2, 20_000), listed(9_000, 0, 3_000), Strided(4, 700), listed(90, 0), Strided(5, 12)]
        check_all(executor, arena, arena.table(MemoryCopy(17, 0, axes, 6)))

    def test_backward_strides(self, executor: Executor) -> None:
        arena = Arena(1000, 100 + 64)
        table = arena.table(
            MemoryCopy(900, 0, [Strided(5, -100), Strided(5, -8)], 4), MemoryCopy(0, 100, [Strided(8, 16)], 8)
        )
        check_all(executor, arena, table)

    def test_six_axes_of_one_fold_into_a_run(self, executor: Executor) -> None:
        arena = Arena(4096, 64 * 16)
        check_all(executor, arena, arena.table(MemoryCopy(5, 0, [Strided(2, 16 * 2**i) for i in range(5, -1, -1)], 16)))

    @pytest.mark.parametrize("element", [1, 2, 4, 8, 3])
    @pytest.mark.parametrize("rows,columns", [(16, 128), (5, 37), (1, 64), (33, 1), (8, 8), (31, 130)])
    def test_transposes(self, executor: Executor, element: int, rows: int, columns: int) -> None:
        """Memory is [page][column][row], the packed side [page][row][column], as with a transposed K."""
        page = rows * columns * element
        arena = Arena(4 * page + 50, 3 * page, at=element, packed_at=1)
        axes: list[Axis] = [
            listed(2 * page, 0, 3 * page + 50),
            Strided(rows, element),
            Strided(columns, rows * element),
        ]
        check_all(executor, arena, arena.table(MemoryCopy(0, 0, axes, element)))

    def test_transpose_with_an_axis_between(self, executor: Executor) -> None:
        """Token-major on the packed side, [head][channel][token] in memory with heads apart."""
        arena = Arena(3 * 700, 16 * 3 * 20 * 2)
        axes = [Strided(16, 2), Strided(3, 700), Strided(20, 32)]
        check_all(executor, arena, arena.table(MemoryCopy(0, 0, axes, 2)))

    def test_part_of_a_transposed_page(self, executor: Executor) -> None:
        arena = Arena(128 * 32, 5 * 128 * 2)
        check_all(executor, arena, arena.table(MemoryCopy(6, 0, [Strided(5, 2), Strided(128, 32)], 2)))

    def test_a_million_copies(self, executor: Executor) -> None:
        count = 1_000_000
        arena = Arena(count * 12, count * 8)
        table = arena.table(MemoryCopy(0, 0, [], 8))
        copies = np.repeat(table.copies, count)
        order = np.random.default_rng(1).permutation(count)
        copies["base"] += order * 12
        copies["packed_offset"] = np.arange(count) * 8
        table = CopyTable(copies, table.offsets, count * 8)
        executor.gather(table, arena.packed_address, arena.ranges)
        rows = arena.memory.reshape(count, 12)
        np.testing.assert_array_equal(arena.packed.reshape(count, 8), rows[order, :8])
        arena.packed ^= 0xFF
        expected = rows.copy()
        expected[:, :8] ^= 0xFF
        executor.scatter(table, arena.packed_address, arena.ranges, check_overlap=True)
        np.testing.assert_array_equal(rows, expected)

    def test_several_allocations(self, executor: Executor) -> None:
        """A layer axis goes from one allocation to the next, and runs cross where two touch."""
        arena = Arena(3000, 3 * 2 * 100)
        ranges = [(arena.base + 2000, 400), (arena.base, 300), (arena.base + 1000, 150), (arena.base + 1150, 200)]
        table = arena.table(MemoryCopy(20, 0, [listed(2000, 1000, 0), Strided(2, 150)], 100))
        expected = arena.gathered(table)
        executor.gather(table, arena.packed_address, ranges)
        np.testing.assert_array_equal(arena.packed, expected)

    def test_packed_offsets_in_any_order(self, executor: Executor) -> None:
        arena = Arena(1000, 300)
        table = arena.table(
            MemoryCopy(0, 200, [Strided(2, 60)], 50), MemoryCopy(500, 0, [], 90), MemoryCopy(700, 100, [], 50)
        )
        check_all(executor, arena, table)

    def test_interleaved_destinations_pass_the_exact_check(self, executor: Executor) -> None:
        arena = Arena(1000, 200)
        table = arena.table(MemoryCopy(0, 0, [Strided(10, 20)], 10), MemoryCopy(10, 100, [Strided(10, 20)], 10))
        expected = arena.scattered(table)
        executor.scatter(table, arena.packed_address, arena.ranges, check_overlap=True)
        np.testing.assert_array_equal(arena.memory, expected)

    def test_without_the_flag_overlaps_are_the_callers_business(self, executor: Executor) -> None:
        arena = Arena(100, 20)
        table = arena.table(MemoryCopy(0, 0, [Strided(2, 5)], 10))
        executor.scatter(table, arena.packed_address, arena.ranges)
        np.testing.assert_array_equal(arena.memory[:5], arena.packed[:5])


def _spoilt(field: str, value: int, axis: int | None = None) -> Callable[[CopyTable], None]:
    def spoil(table: CopyTable) -> None:
        place = table.copies[1] if axis is None else table.copies[1]["axes"][axis]
        place[field] = value

    return spoil


WRONG = {
    "negative axis count": (_spoilt("axis_count", -1), Status.BAD_COPY),
    "seven axes": (_spoilt("axis_count", 7), Status.BAD_COPY),
    "reserved": (_spoilt("reserved", 1), Status.BAD_COPY),
    "no run": (_spoilt("run_bytes", 0), Status.BAD_COPY),
    "negative run": (_spoilt("run_bytes", -8), Status.BAD_COPY),
    "negative count": (_spoilt("count", -1, 1), Status.BAD_COPY),
    "list before the offsets": (_spoilt("list", -2, 0), Status.BAD_LIST),
    "list behind the offsets": (_spoilt("list", 2, 0), Status.BAD_LIST),
    "list far behind": (_spoilt("list", 2**31 - 1, 0), Status.BAD_LIST),
    "run overflow": (_spoilt("run_bytes", 2**62), Status.OVERFLOW),
    "stride overflow": (_spoilt("stride", 2**63 - 1, 1), Status.OVERFLOW),
    "base overflow": (_spoilt("base", 2**63 - 10), Status.OVERFLOW),
    "packed before": (_spoilt("packed_offset", -1), Status.OUTSIDE_PACKED),
    "packed behind": (_spoilt("packed_offset", 45), Status.OUTSIDE_PACKED),
    "packed far behind": (_spoilt("packed_offset", 2**63 - 1), Status.OUTSIDE_PACKED),
    "null base": (_spoilt("base", 0), Status.OUTSIDE_RANGES),
    "negative base": (_spoilt("base", -(2**62)), Status.OUTSIDE_RANGES),
    "stride outside": (_spoilt("stride", 80, 1), Status.OUTSIDE_RANGES),
    "stride before": (_spoilt("stride", -120, 1), Status.OUTSIDE_RANGES),
    "packed overlap": (_spoilt("packed_offset", 19), Status.PACKED_OVERLAP),
    "writes twice": (_spoilt("stride", 2, 1), Status.MEMORY_OVERLAP),
}


class TestWrongTables:
    """Every kind is refused by its own status, and nothing is written."""

    def arena(self) -> tuple[Arena, CopyTable]:
        arena = Arena(200, 44)
        good = MemoryCopy(0, 0, [Strided(5, 8)], 4)
        return arena, arena.table(good, MemoryCopy(100, 20, [listed(40, 0, 20), Strided(2, 8)], 4))

    def refused(self, call: Callable[[], None], arena: Arena, status: Status, row: int) -> None:
        with pytest.raises(StatusError, match=rf"status {status.value}\b") as caught:
            call()
        assert (caught.value.status, caught.value.row) == (status, row)
        assert arena.is_untouched()

    @pytest.mark.parametrize("wrong", WRONG)
    def test_a_wrong_copy(self, executor: Executor, wrong: str) -> None:
        arena, table = self.arena()
        spoil, status = WRONG[wrong]
        spoil(table)

        def scatter(threads: int = 1) -> None:
            executor.scatter(table, arena.packed_address, arena.ranges, threads=threads, check_overlap=True)

        self.refused(scatter, arena, status, 1)
        self.refused(lambda: scatter(4), arena, status, 1)
        if status != Status.MEMORY_OVERLAP:
            self.refused(lambda: executor.gather(table, arena.packed_address, arena.ranges), arena, status, 1)
        if status not in (Status.MEMORY_OVERLAP, Status.PACKED_OVERLAP, Status.OUTSIDE_PACKED):
            self.refused(lambda: executor.clear(table, arena.ranges), arena, status, 1)

    def test_an_offset_outside(self, executor: Executor) -> None:
        arena, table = self.arena()
        for offset, status in ((90, Status.OUTSIDE_RANGES), (2**63 - 1, Status.OVERFLOW), (-(2**63), Status.OVERFLOW)):
            table.offsets[1] = offset
            if status == Status.OVERFLOW and offset < 0:
                table.copies["base"][1] = -8
            self.refused(lambda: executor.clear(table, arena.ranges), arena, status, 1)

    def test_the_gap_between_two_ranges(self, executor: Executor) -> None:
        arena, table = self.arena()
        ranges = [(arena.base, 121), (arena.base + 122, 78)]
        self.refused(lambda: executor.clear(table, ranges), arena, Status.OUTSIDE_RANGES, 1)

    def test_no_ranges(self, executor: Executor) -> None:
        arena, table = self.arena()
        self.refused(lambda: executor.clear(table, []), arena, Status.OUTSIDE_RANGES, 0)

    @pytest.mark.parametrize(
        "ranges,status",
        [
            ([(-8, 8)], Status.INVALID_ARGUMENT),
            ([(8, -8)], Status.INVALID_ARGUMENT),
            ([(2**63 - 8, 8)], Status.OVERFLOW),
        ],
    )
    def test_wrong_ranges(self, executor: Executor, ranges: list[tuple[int, int]], status: Status) -> None:
        arena, table = self.arena()
        self.refused(lambda: executor.clear(table, ranges), arena, status, -1)

    def test_a_packed_buffer_inside_the_memory(self, executor: Executor) -> None:
        arena, table = self.arena()
        place = arena.base + 150
        self.refused(lambda: executor.gather(table, place, arena.ranges), arena, Status.PACKED_IN_RANGES, -1)

    def test_no_packed_buffer(self, executor: Executor) -> None:
        arena, table = self.arena()
        self.refused(lambda: executor.gather(table, 0, arena.ranges), arena, Status.INVALID_ARGUMENT, -1)

    def test_no_threads(self, executor: Executor) -> None:
        arena, table = self.arena()
        self.refused(lambda: executor.clear(table, arena.ranges, threads=0), arena, Status.INVALID_ARGUMENT, -1)

    def test_two_copies_write_one_byte(self, executor: Executor) -> None:
        arena = Arena(200, 40)
        table = arena.table(MemoryCopy(0, 0, [Strided(2, 100)], 10), MemoryCopy(109, 20, [], 10))
        self.refused(
            lambda: executor.scatter(table, arena.packed_address, arena.ranges, check_overlap=True),
            arena,
            Status.MEMORY_OVERLAP,
            1,
        )

    def test_the_first_wrong_copy_is_named(self, executor: Executor) -> None:
        arena, table = self.arena()
        copies = np.concatenate([table.copies[:1], table.copies])
        copies["base"][1] = 0
        copies["run_bytes"][2] = 0
        table = CopyTable(copies, table.offsets, table.packed_bytes)
        self.refused(lambda: executor.clear(table, arena.ranges), arena, Status.OUTSIDE_RANGES, 1)


@pytest.fixture
def fresh_choice() -> None:
    executor.host_executor.cache_clear()


@pytest.mark.usefixtures("library", "fresh_choice")
def test_the_library_is_chosen_where_it_loads() -> None:
    assert executor.host_executor() is ops


@pytest.mark.usefixtures("fresh_choice")
def test_without_a_library_the_log_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def load() -> None:
        raise NativeError("not built")

    monkeypatch.setattr(_library, "load", load)
    with caplog.at_level(logging.WARNING):
        assert executor.host_executor() is reference
        assert executor.host_executor() is reference
    assert [record.getMessage().endswith("not built") for record in caplog.records] == [True]
    executor.host_executor.cache_clear()


def test_ranges_may_be_an_array(executor: Executor) -> None:
    buffer = np.ones(64, np.uint8)
    table = make_table([MemoryCopy(address_of(buffer), 0, [], 8)], 8)
    executor.clear(table, np.array([[address_of(buffer), 64]], np.int64))
    assert buffer.sum() == 56
