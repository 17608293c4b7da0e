"""What the staged rows measure is what they say: shapes, the check of the bytes, the counts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mooncake_hetero_tp.core.binding import bind
from mooncake_hetero_tp.core.plan import plan_pulls
from mooncake_hetero_tp.types import Rank, TokenRange
from tests.benchmarks import counts, staged
from tests.benchmarks.caches import CROWD, LOGICAL, SHAPES, TOKEN_MAJOR, Cache, Expected, Shape, block_ids, shape
from tests.benchmarks.residence import Residence
from tests.benchmarks.rows import Report
from tests.benchmarks.shared import SharedEngine
from tests.tables import DST, SRC

PIECES = {"256_b": 256, "4_kib": 4096, "16_kib": 16384, "32_kib": 32768, "64_kib": 65536, "1_6_mb": 1_638_400}


@pytest.mark.parametrize("name", SHAPES)
def test_pieces_are_as_long_as_the_row_says(name: str) -> None:
    made = SHAPES[name]
    sides = [replace(made.producer, base=SRC).table(), replace(made.like, base=DST).table()]
    plan = plan_pulls(sides[1], {Rank(): sides[0]})[Rank()]
    ids = [block_ids(made, side)[::7] for side in ("producer", "consumer")]
    found = bind(plan, [TokenRange(0, 16 * ids[0].size)], [ids[0]], [ids[1]], null_block=0)
    assert np.median(found.length) == made.piece_bytes == PIECES[name]
    assert found.bytes == made.block_bytes * ids[0].size


def test_a_pull_is_as_long_as_the_row_says() -> None:
    assert {made.pull_bytes for made in (*SHAPES.values(), CROWD) if made.name not in {"crowd", "1_6_mb"}} == {64 << 20}
    assert {made.piece_bytes * made.sizes["pieces"] for made in (*SHAPES.values(), CROWD)} == {
        made.pull_bytes for made in (*SHAPES.values(), CROWD)
    }


@pytest.mark.parametrize("layout", [LOGICAL, TOKEN_MAJOR, "BHLNC"])
def test_a_byte_in_the_wrong_place_is_found(layout: str) -> None:
    made = shape("small", 2, 8, 3, 1, (layout, LOGICAL))
    made = replace(made, blocks=5, like=replace(made.like, blocks=6))
    source, cache = Cache.of(made.producer), Cache.of(made.like)
    source.fill()
    targets = block_ids(made, "consumer")
    assert sorted(targets) == list(range(1, 6))
    _pull(made, source, cache)
    assert Expected(made).wrong_bytes(cache, targets) == 0
    assert Expected(made).wrong_bytes(cache, targets[:2]) == 0
    cache.logical[1, targets[3], 0, 7, 2] ^= 1
    assert Expected(made).wrong_bytes(cache, targets) == 1
    assert Expected(made).wrong_bytes(cache, targets[::-1]) > 1000


def _pull(made: Shape, source: Cache, cache: Cache) -> None:
    """Byte by byte, as the package plans it."""
    plan = plan_pulls(cache.table, {Rank(): source.table})[Rank()]
    ids = [block_ids(made, side) for side in ("producer", "consumer")]
    found = bind(plan, [made.tokens], [ids[0]], [ids[1]], null_block=0)
    columns = ((found.src - source.dense.base).tolist(), (found.dst - cache.dense.base).tolist(), found.length.tolist())
    for src, dst, length in zip(*columns, strict=True):
        cache.memory[dst : dst + length] = source.memory[src : src + length]


def test_every_shape_has_its_rows_and_targets() -> None:
    assert len({row.name for row in staged.rows()}) == 3 * len(SHAPES)
    assert [row.target for row in staged.rows_of(SHAPES["4_kib"])] == ["ratio >= 0.75", "ratio >= 0.95", "ratio >= 6.0"]


def test_modes_are_compared_within_rounds() -> None:
    """Staged has the higher median over all rounds, and is slower in two of three."""
    speeds = [(100.0, 90.0, 95.0), (1000.0, 990.0, 980.0), (200.0, 999.0, 400.0)]
    found = staged.Found([dict(zip(("direct", "staged", "auto"), speed, strict=True)) for speed in speeds])
    assert found.median("staged") > found.median("direct")
    assert found.better_mode == "direct"
    assert [pair.ratio for pair in found.beside("auto", found.better_mode)] == [0.95, 0.98, 2.0]


def test_buffers_that_several_share_are_registered_once() -> None:
    foreign = FakeForeign()
    shared = SharedEngine(foreign)  # type: ignore[arg-type]
    assert [shared.register_memory(start, 64) for start in (1, 1, 2)] == [0, 0, 0]
    assert shared.register_memory(1, 65) != 0, "another buffer at the same address is an error"
    assert shared.unregister_memory(1) == 0
    assert foreign.registered == [1, 2]


class FakeForeign:
    """Refuses overlaps at one address, as Mooncake does."""

    def __init__(self) -> None:
        self.registered: list[int] = []

    def register_memory(self, buffer_addr: int, _capacity: int) -> int:
        if buffer_addr in self.registered:
            return -7
        self.registered.append(buffer_addr)
        return 0


def test_descriptors_are_counted(tmp_path: Path) -> None:
    report = Report(tmp_path / "bench.json")
    report.plan(counts.rows())
    counts.measure(report)
    found = report.rows["descriptors_slots_of_32_mib"]
    assert (found.value, found.baseline_value, found.met) == (18, 18_432, True)


def test_touched_memory_counts_as_resident_though_it_is_given_back() -> None:
    residence = Residence()
    np.ones(64 << 20, np.uint8)
    assert 60 << 20 < residence.growth_bytes() < 80 << 20
