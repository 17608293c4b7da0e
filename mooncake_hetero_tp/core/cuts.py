"""A pair plan in few numbers, so that the producer makes the same one from the two region tables.

Both sides cut a staged pull into chunks by the plan. It is the consumer that chooses which producer rank gives which
units, so it says so, in the order of its plan; everything else is in the tables.
"""

from __future__ import annotations

from collections.abc import Iterable
from weakref import WeakKeyDictionary

from mooncake_hetero_tp.core.messages import PairCut
from mooncake_hetero_tp.core.pairing import PairPlan, RegionPair, make_pair_plan
from mooncake_hetero_tp.core.regions import RankTable, Region, UnitCut, intersect
from mooncake_hetero_tp.errors import PeerProtocolError

_known: WeakKeyDictionary[PairPlan, tuple[PairCut, ...]] = WeakKeyDictionary()
"""As long as the plan lives: a consumer rank asks several times a pull, in the thread that answers everybody."""


def pair_cuts(plan: PairPlan) -> tuple[PairCut, ...]:
    """What is read from which region into which."""
    cuts = _known.get(plan)
    if cuts is None:
        cuts = _known[plan] = _cuts(plan)
    return cuts


def _cuts(plan: PairPlan) -> tuple[PairCut, ...]:
    consumer, producer = _places(plan.consumer), _places(plan.producer)
    return tuple(
        PairCut(consumer[_key(pair.consumer)], producer[_key(pair.producer)], cut.global_start, cut.count)
        for pair in plan.pairs
        for cut in pair.cuts
    )


def plan_of_cuts(consumer: RankTable, producer: RankTable, cuts: Iterable[PairCut]) -> PairPlan:
    """The plan that a consumer's cuts name.

    Raises:
        PeerProtocolError: a region that is not there, or units that one side does not hold.
    """
    pairs: dict[tuple[int, int], list[UnitCut]] = {}
    for cut in cuts:
        place = (cut.consumer_region, cut.producer_region)
        pairs.setdefault(place, []).append(_unit_cut(consumer, producer, cut))
    regions = ((consumer.regions[theirs], producer.regions[ours], cut) for (theirs, ours), cut in pairs.items())
    return make_pair_plan(consumer, producer, (RegionPair(into, source, tuple(cut)) for into, source, cut in regions))


def _places(table: RankTable) -> dict[tuple[str, str], int]:
    return {_key(region): place for place, region in enumerate(table.regions)}


def _key(region: Region) -> tuple[str, str]:
    return region.layer, region.component


def _unit_cut(consumer: RankTable, producer: RankTable, cut: PairCut) -> UnitCut:
    if cut.consumer_region >= len(consumer.regions) or cut.producer_region >= len(producer.regions):
        raise PeerProtocolError(
            f"{cut}: expected places in tables of {len(consumer.regions)} and {len(producer.regions)} regions; "
            f"run the same mooncake-hetero-tp version on both sides"
        )
    into, source = consumer.regions[cut.consumer_region], producer.regions[cut.producer_region]
    for both in intersect(into.spans, source.spans):
        ahead = cut.global_start - both.global_start
        if ahead >= 0 and ahead + cut.count <= both.count:
            return UnitCut(cut.global_start, cut.count, both.consumer_local + ahead, both.producer_local + ahead)
    raise PeerProtocolError(
        f"{cut}: expected units that both {into.name} and {source.name} hold, got some outside of {into.spans} and "
        f"{source.spans}; run the same mooncake-hetero-tp version on both sides"
    )
