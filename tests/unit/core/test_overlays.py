"""Groups that share memory: told apart by their pages, or else by their bytes."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from mooncake_hetero_tp.core.binding import bind
from mooncake_hetero_tp.core.forecast import forecast
from mooncake_hetero_tp.core.overlays import groups_apart
from mooncake_hetero_tp.core.pairing import PairPlan
from mooncake_hetero_tp.core.regions import Group, RankTable
from mooncake_hetero_tp.errors import PlanError
from mooncake_hetero_tp.types import Rank, TokenRange
from tests.tables import DST, SRC, Dense, ids, planned, region, table

WHOLE = [TokenRange(0, 8)] * 2


def overlaid(*, shift: int = 0, stride: int = 32, token: int = 4) -> PairPlan:
    """Two layers of two groups, of 16 bytes a page; the second begins `shift` bytes after the first."""

    def side(base: int, distance: int) -> RankTable:
        made = [
            region(
                name, "k", base=base + group * distance, pages=(8, stride), token=(4, token), channels=4, group=group
            )
            for group, name in enumerate(("full", "window"))
        ]
        return table(made, groups=[Group(number, "attention", 4, 4) for number in range(2)])

    return planned(side(DST, shift), {Rank(): side(SRC, 4096)})[Rank()]


def test_blocks_of_their_own_are_apart() -> None:
    assert groups_apart(overlaid(), WHOLE, [ids([1, 2]), ids([3, 4])])


def test_one_block_in_both_is_not() -> None:
    assert not groups_apart(overlaid(), WHOLE, [ids([1, 2]), ids([4, 2])])


def test_one_block_may_be_given_twice_where_its_parts_lie_side_by_side() -> None:
    assert groups_apart(overlaid(shift=16), WHOLE, [ids([1, 2]), ids([1, 2])])
    assert not groups_apart(overlaid(shift=15), WHOLE, [ids([1, 2]), ids([1, 2])])


def test_pages_that_reach_over_one_another_are_looked_at_closer() -> None:
    """Tokens of the two layers take turns: no byte is shared, and what is too large to be bound is bound all the same."""
    plan, blocks = overlaid(shift=4, token=8), [ids([1, 2]), ids([1, 2])]
    assert not groups_apart(plan, WHOLE, blocks)
    found = forecast(plan, WHOLE, blocks, blocks, exact_segments=0)
    assert found.bound is not None
    assert found.bound.bytes == 2 * 8 * 4


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
def test_blocks_of_their_own_are_apart_in_every_layout(layout: str) -> None:
    """Else what is too large to be bound would be bound in those where blocks lie between the heads of a page."""

    def side(base: int) -> RankTable:
        like = Dense(heads=4, layers=3, tokens=4, blocks=8, layout=layout, base=base).table()
        twice = [
            replace(region, group=group, layer=f"{region.layer}.{group}")
            for group in range(2)
            for region in like.regions
        ]
        return replace(
            like, regions=tuple(twice), groups=tuple(Group(number, "attention", 4, 4) for number in range(2))
        )

    plan = planned(side(DST), {Rank(): side(SRC)})[Rank()]
    assert groups_apart(plan, WHOLE, [ids([1, 5]), ids([2, 4])])
    assert not groups_apart(plan, WHOLE, [ids([1, 5]), ids([2, 5])])


def test_what_is_not_read_is_no_matter() -> None:
    ranges = [TokenRange(0, 8), TokenRange(4, 4)]
    assert groups_apart(overlaid(), ranges, [ids([1, 2]), ids([1, 2])])


def test_what_is_apart_is_never_written_twice() -> None:
    rng = random.Random(1)
    apart = twice = 0
    for _ in range(400):
        plan = overlaid(shift=rng.choice((0, 4, 8, 16, 24, 32, 64, 100)), stride=rng.choice((16, 24, 32)))
        blocks = [ids(rng.sample(range(1, 8), 2)) for _ in range(2)]
        told = groups_apart(plan, WHOLE, blocks)
        try:
            bind(plan, WHOLE, blocks, blocks)
        except PlanError:
            twice += 1
            assert not told
        apart += told
    assert min(apart, twice) > 50


def test_large_pulls_are_refused_like_small_ones() -> None:
    blocks = [ids([1, 2]), ids([4, 2])]
    with pytest.raises(PlanError, match="would be written twice"):
        forecast(overlaid(), WHOLE, blocks, blocks, exact_segments=0)
