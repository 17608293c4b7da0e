"""A plan in few numbers and back."""

from __future__ import annotations

import gc
import weakref

import msgspec
import pytest

from mooncake_hetero_tp.core.cuts import pair_cuts, plan_of_cuts
from mooncake_hetero_tp.core.messages import PairCut
from mooncake_hetero_tp.core.plan import plan_pulls
from mooncake_hetero_tp.errors import PeerProtocolError
from mooncake_hetero_tp.types import Rank
from tests.tables import DST, SRC, Dense

PRODUCERS = {Rank(tp=tp): Dense(4, tp=2, rank=tp, layers=2, base=SRC).table() for tp in range(2)}
CONSUMER = Dense(4, layers=2, base=DST).table()


@pytest.mark.parametrize("rank", PRODUCERS, ids=str)
def test_the_producer_makes_the_same_plan(rank: Rank) -> None:
    plan = plan_pulls(CONSUMER, PRODUCERS)[rank]
    again = plan_of_cuts(CONSUMER, PRODUCERS[rank], pair_cuts(plan))
    assert again.pairs == plan.pairs
    assert [made.geometry for made in again.classes] == [made.geometry for made in plan.classes]


def test_cuts_are_places_in_both_tables_and_global_units() -> None:
    second = PRODUCERS[Rank(tp=1)]
    turned = msgspec.structs.replace(second, regions=tuple(reversed(second.regions)))
    plan = plan_pulls(CONSUMER, {**PRODUCERS, Rank(tp=1): turned})[Rank(tp=1)]
    last = len(CONSUMER.regions) - 1
    assert pair_cuts(plan) == tuple(PairCut(place, last - place, 2, 2) for place in range(last + 1))


@pytest.mark.parametrize(
    "cut,words",
    [
        (PairCut(99, 0, 0, 2), "expected places in tables"),
        (PairCut(0, 99, 0, 2), "expected places in tables"),
        (PairCut(0, 0, 2, 2), "expected units that both"),
        (PairCut(0, 0, 1, 2), "expected units that both"),
    ],
    ids=["consumer region", "producer region", "foreign units", "too many units"],
)
def test_cuts_that_name_what_is_not_there(cut: PairCut, words: str) -> None:
    with pytest.raises(PeerProtocolError, match=words):
        plan_of_cuts(CONSUMER, PRODUCERS[Rank(tp=0)], (cut,))


def test_cuts_are_made_once_a_plan_and_live_as_long() -> None:
    """However many producer ranks there are; a plan holds two region tables."""
    plans = [plan_pulls(CONSUMER, PRODUCERS)[Rank()] for _ in range(100)]
    made = [pair_cuts(plan) for plan in plans]
    assert all(pair_cuts(plan) is cuts for plan, cuts in zip(plans, made, strict=True))
    last = weakref.ref(plans[-1])
    plans.clear()
    gc.collect()
    assert last() is None
