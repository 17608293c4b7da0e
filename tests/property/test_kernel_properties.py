"""Any table: a gather equals its definition, and what is scattered is what was gathered."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_hetero_tp.core.copy_table import Axis, MemoryCopy, Strided
from mooncake_hetero_tp.native import _library, ops, reference
from mooncake_hetero_tp.native.executor import Executor
from tests.unit.native.arena import Arena, listed
from tests.unit.native.emulation import Emulation, build


@pytest.fixture(scope="module", params=["reference", "library", "emulation"])
def executor(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Executor:
    if request.param == "reference":
        return reference
    if request.param == "library":
        if not _library.is_built():
            pytest.skip("no native library here")
        return ops
    if not shutil.which("c++"):
        pytest.skip("no C++ compiler here")
    return Emulation(build(Path(tmp_path_factory.mktemp("emulation"))))


@st.composite
def copies(draw: st.DrawFn, at: int, packed: int) -> tuple[MemoryCopy, int, int]:
    """A copy in memory of its own from `at`, and where memory and packed bytes end."""
    run = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 16, 24, 32, 64, 100, 256, 700]))
    sizes = draw(st.lists(st.integers(1, 6), max_size=4))
    axes: list[Axis] = [Strided(1, 0)] * len(sizes)
    extent = run
    for place in draw(st.permutations(range(len(sizes)))):  # any nesting, so transposes too
        step = extent + draw(st.sampled_from([0, 0, 1, 8, 30]))
        extent += step * (sizes[place] - 1)
        strided = Strided(sizes[place], step)
        order = draw(st.permutations(range(sizes[place]))) if draw(st.booleans()) else None
        axes[place] = strided if order is None else listed(*(step * number for number in order))
    base = at + draw(st.integers(0, 17))
    begin = packed + draw(st.integers(0, 17))
    return MemoryCopy(base, begin, axes, run), base + extent, begin + run * int(np.prod(sizes))


@st.composite
def arenas(draw: st.DrawFn) -> tuple[Arena, list[MemoryCopy]]:
    found: list[MemoryCopy] = []
    at = packed = 0
    for _ in range(draw(st.integers(0, 3))):
        copy, at, packed = draw(copies(at, packed))
        found.append(copy)
    shifts = draw(st.tuples(st.integers(0, 16), st.integers(0, 16)))
    return Arena(at + 1, packed + 1, at=shifts[0], packed_at=shifts[1]), draw(st.permutations(found))


@given(case=arenas(), threads=st.integers(1, 3))
def test_there_and_back(executor: Executor, case: tuple[Arena, list[MemoryCopy]], threads: int) -> None:
    arena, found = case
    table = arena.table(*found)
    expected = arena.gathered(table)
    executor.gather(table, arena.packed_address, arena.ranges, threads=threads)
    np.testing.assert_array_equal(arena.packed, expected)
    before = arena.memory.copy()
    executor.clear(table, arena.ranges, threads=threads)
    executor.scatter(table, arena.packed_address, arena.ranges, threads=threads, check_overlap=True)
    np.testing.assert_array_equal(arena.memory, before)
    assert arena.guards_hold()
