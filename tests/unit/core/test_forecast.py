"""Descriptors of a direct read: counted where they are few, estimated where they are many."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from mooncake_hetero_tp.core.binding import bind
from mooncake_hetero_tp.core.copies import Int64
from mooncake_hetero_tp.core.forecast import forecast
from mooncake_hetero_tp.core.pairing import PairPlan
from mooncake_hetero_tp.core.regions import STATE, Group, RankTable
from mooncake_hetero_tp.errors import PlanError
from mooncake_hetero_tp.types import Rank, TokenRange
from tests.tables import DST, SRC, Dense, ids, planned, region, table

LIKE = Dense(heads=4, layers=3, tokens=16, blocks=300)
TOKENS = TokenRange(5, 16 * 250 - 3)


def _plan(producer: Dense, consumer: Dense) -> PairPlan:
    return planned(replace(consumer, base=DST).table(), {Rank(): producer.table()})[Rank()]


def _blocks(scattered: bool) -> tuple[list[Int64], list[Int64]]:
    rng = np.random.default_rng(2)
    sides = [rng.permutation(250) if scattered else np.arange(250) for _ in range(2)]
    return [1 + sides[0]], [1 + sides[1]]


@pytest.mark.parametrize("scattered", [True, False])
@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
@pytest.mark.parametrize("tp", [1, 2])
def test_an_estimate_is_near_the_count(layout: str, tp: int, scattered: bool) -> None:
    plan = _plan(replace(LIKE, layout=layout), replace(LIKE, layout=layout, tp=tp))
    blocks = _blocks(scattered)
    exact = bind(plan, [TOKENS], *blocks)
    counted = forecast(plan, [TOKENS], *blocks)
    assert (counted.descriptors, counted.length_bytes) == (exact.count, exact.bytes)
    rough = forecast(plan, [TOKENS], *blocks, exact_segments=300)
    assert rough.length_bytes == exact.bytes
    # Where all blocks join, a part of them has as many ends as all.
    assert rough.descriptors == pytest.approx(exact.count, rel=0.1 if exact.count > 100 else 3)


def test_millions_of_pieces_take_no_time() -> None:
    like = Dense(heads=8, layers=80, tokens=16, head_size=128, item=2, blocks=2_100, layout="LBNHC")
    plan = _plan(like, replace(like, tp=2, layout="BLHNC"))
    blocks = [1 + np.random.default_rng(1).permutation(2_099)[:2_048]]
    start = time.perf_counter()
    found = forecast(plan, [TokenRange(0, 2_048 * 16)], blocks, blocks)
    assert time.perf_counter() - start < 1.0  # 0.04 s measured; all descriptors: 4.5
    assert found.descriptors == 80 * 2_048 * 16 * 4


def test_a_state_group_keeps_its_slot() -> None:
    def side(base: int) -> RankTable:
        made = [
            region("l", "k", base=base, pages=(300, 32), token=(4, 8), channels=4),
            region("s", "ssm", base=base + 10_000, pages=(300, 32), token=(2, 16), channels=16, group=1),
        ]
        return table(made, groups=[Group(0, "attention", 4, 4), Group(1, STATE, 4, 4)])

    plan = planned(side(DST), {Rank(): side(SRC)})[Rank()]
    states = ids([0] * 99 + [7])  # only the last one is kept
    blocks = [1 + np.arange(100), states]
    ranges = [TokenRange(0, 400)] * 2
    exact = bind(plan, ranges, blocks, blocks)
    found = forecast(plan, ranges, blocks, blocks, exact_segments=100)
    assert found.length_bytes == exact.bytes
    assert found.descriptors == pytest.approx(exact.count, rel=0.1)


def test_an_empty_range_takes_nothing() -> None:
    plan = _plan(LIKE, LIKE)
    found = forecast(plan, [TokenRange(3, 3)], [ids([])], [ids([])], exact_segments=0)
    assert (found.descriptors, found.length_bytes) == (0, 0)


def test_bad_blocks_are_refused_as_by_binding() -> None:
    with pytest.raises(PlanError, match="null page"):
        forecast(_plan(LIKE, LIKE), [TokenRange(0, 16)], [ids([0])], [ids([1])])
