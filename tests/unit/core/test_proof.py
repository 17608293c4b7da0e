"""Planted wrong plans: the proof must see each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest

from mooncake_hetero_tp.core.copies import Loop
from mooncake_hetero_tp.core.pairing import CopyClass, Geometry, PairPlan, RegionPair, Templates, make_pair_plan
from mooncake_hetero_tp.core.plan import plan_pulls
from mooncake_hetero_tp.core.proof import prove
from mooncake_hetero_tp.core.regions import Axis, Buffer, RankTable
from mooncake_hetero_tp.errors import PlanError
from mooncake_hetero_tp.types import Rank
from tests.tables import DST, Dense, producer_tables

Plans = dict[Rank, PairPlan]


@pytest.fixture
def consumer() -> RankTable:
    """Rank 0 of TP 2: heads 0 and 1 of 4, three layers, padded pages."""
    return Dense(heads=4, tp=2, layers=3, tokens=4, page_bytes=48, base=DST).table()


@pytest.fixture
def plans(consumer: RankTable) -> Plans:
    """Heads 0 and 1 come from ranks 0 and 2 of TP 8."""
    made = plan_pulls(consumer, producer_tables(Dense(heads=4, tp=8, layers=3)), prefer=0)
    assert [rank.tp for rank in made] == [0, 2]
    return made


def test_a_right_plan_passes(consumer: RankTable, plans: Plans) -> None:
    prove(consumer, plans)


def test_a_unit_nobody_reads(consumer: RankTable, plans: Plans) -> None:
    # vllm#52516: 65,536 of 262,144 bytes arrived and the request was marked ready.
    del plans[Rank(tp=2)]
    with pytest.raises(PlanError, match=r"layers.0/k: 1 of 2 units are read, unit 1 is missing"):
        prove(consumer, plans)
    del plans[Rank(tp=0)]
    with pytest.raises(PlanError, match=r"0 of 2 units are read"):
        prove(consumer, plans)


def test_the_first_unit_is_missing(consumer: RankTable, plans: Plans) -> None:
    del plans[Rank(tp=0)]
    with pytest.raises(
        PlanError, match=r"unit 0 of 2 is missing .next read: units 1..1 from producer rank dp0.pp0.tp2"
    ):
        prove(consumer, plans)


def test_a_unit_read_twice(consumer: RankTable, plans: Plans) -> None:
    plans[Rank(tp=1)] = plans[Rank(tp=0)]  # a replica of the same head
    with pytest.raises(PlanError, match=r"layers.0/k: unit 0 of 2 is read twice"):
        prove(consumer, plans)


def test_a_layer_nobody_reads(consumer: RankTable, plans: Plans) -> None:
    for rank, plan in plans.items():
        plans[rank] = plan.only({"layers.0", "layers.1"})
    with pytest.raises(PlanError, match=r"layers.2/k: 0 of 2 units are read"):
        prove(consumer, plans)
    with pytest.raises(PlanError, match=r"layers.2/k: 0 of 2 units are read"):  # the producer has it, draft or not
        prove(msgspec.structs.replace(consumer, draft_layers=("layers.2",)), plans)


def test_a_draft_layer_the_producer_lacks_stays_unread() -> None:
    like = Dense(heads=2, layers=2)
    consumer = replace(like, layers=3, base=DST).table()
    plans = plan_pulls(msgspec.structs.replace(consumer, draft_layers=("layers.2",)), {Rank(): like.table()})
    prove(msgspec.structs.replace(consumer, draft_layers=("layers.2",)), plans)
    with pytest.raises(PlanError, match=r"layers.2/k: 0 of 2 units are read"):
        prove(consumer, plans)


def test_a_region_of_another_consumer(consumer: RankTable, plans: Plans) -> None:
    fewer = msgspec.structs.replace(consumer, regions=consumer.regions[:-1])
    with pytest.raises(PlanError, match=r"layers.2/v: the plan writes a region that is not in the consumer's table"):
        prove(fewer, plans)


def _wrong_part(geometry: Geometry) -> Geometry:
    first, *others = geometry.parts
    return msgspec.structs.replace(
        geometry, parts=(msgspec.structs.replace(first, dst_offset=first.dst_offset + 1), *others)
    )


def _wrong_source(geometry: Geometry) -> Geometry:
    first, *others = geometry.parts
    return msgspec.structs.replace(
        geometry, parts=(msgspec.structs.replace(first, src_offset=first.src_offset + 1), *others)
    )


def _missing_part(geometry: Geometry) -> Geometry:
    return msgspec.structs.replace(geometry, parts=geometry.parts[1:])


def _one_channel_more(geometry: Geometry) -> Geometry:
    parts = [msgspec.structs.replace(part, channels=Loop(part.channels.count + 1, 1, 1)) for part in geometry.parts]
    return msgspec.structs.replace(geometry, parts=tuple(parts[:1]))


def _into_the_padding(geometry: Geometry) -> Geometry:
    return msgspec.structs.replace(
        geometry, dst=msgspec.structs.replace(geometry.dst, block_stride=geometry.dst.block_stride - 16)
    )


def _wrong_source_pages(geometry: Geometry) -> Geometry:
    return msgspec.structs.replace(
        geometry, src=msgspec.structs.replace(geometry.src, block_stride=geometry.src.block_stride + 1)
    )


def _wrong_token_stride(geometry: Geometry) -> Geometry:
    return msgspec.structs.replace(
        geometry, dst=msgspec.structs.replace(geometry.dst, token_stride=geometry.dst.token_stride + 1)
    )


def _wrong_bases(members: CopyClass) -> CopyClass:
    bases = members.dst_bases.copy()
    bases[-1] += 1
    return replace(members, dst_bases=bases, templates=Templates({}, {}))


def _swapped_layers(members: CopyClass) -> CopyClass:
    return replace(members, src_bases=members.src_bases[::-1], templates=Templates({}, {}))


def _lost_member(members: CopyClass) -> CopyClass:
    return replace(
        members,
        members=members.members[:-1],
        src_bases=members.src_bases[:-1],
        dst_bases=members.dst_bases[:-1],
        templates=Templates({}, {}),
    )


@pytest.mark.parametrize(
    "change",
    [
        _wrong_part,
        _wrong_source,
        _missing_part,
        _one_channel_more,
        _into_the_padding,
        _wrong_source_pages,
        _wrong_token_stride,
    ],
)
def test_a_wrong_geometry_is_seen(consumer: RankTable, plans: Plans, change: Callable[[Geometry], Geometry]) -> None:
    plan = plans[Rank(tp=0)]
    (members,) = plan.classes
    wrong = replace(members, geometry=change(members.geometry), templates=Templates({}, {}))
    plans[Rank(tp=0)] = replace(plan, classes=(wrong,))
    with pytest.raises(PlanError, match=r"exactly its elements|would be written twice"):
        prove(consumer, plans)


@pytest.mark.parametrize("plant", [_wrong_bases, _swapped_layers, _lost_member])
def test_wrong_members_are_seen(consumer: RankTable, plans: Plans, plant: Callable[[CopyClass], CopyClass]) -> None:
    plan = plans[Rank(tp=0)]
    plans[Rank(tp=0)] = replace(plan, classes=tuple(plant(members) for members in plan.classes))
    with pytest.raises(PlanError):
        prove(consumer, plans)


def test_a_stride_of_one_layer_that_differs_from_its_class(consumer: RankTable, plans: Plans) -> None:
    """A class takes its geometry from its first member; the proof looks at every one."""
    plan = plans[Rank(tp=0)]
    (members,) = plan.classes
    other = tuple(_with_row(pair, 5) for pair in members.members[-1])
    wrong = replace(members, members=(*members.members[:-1], other), templates=Templates({}, {}))
    plans[Rank(tp=0)] = replace(plan, classes=(wrong,))
    with pytest.raises(PlanError, match=r"layers.2/k, layers.2/v from producer rank dp0.pp0.tp0: a run of 1 tokens"):
        prove(consumer, plans)


def _with_row(pair: RegionPair, stride: int) -> RegionPair:
    token = Axis(pair.producer.token.count, stride)
    return msgspec.structs.replace(pair, producer=msgspec.structs.replace(pair.producer, token=token))


@pytest.mark.parametrize("side", ["consumer", "producer"])
def test_pages_outside_of_registered_memory(consumer: RankTable, plans: Plans, side: str) -> None:
    plan = plans[Rank(tp=2)]
    held: RankTable = getattr(plan, side)
    short = [Buffer(buffer.address, buffer.length_bytes - 1) for buffer in held.buffers]
    tables = {"consumer": plan.consumer, "producer": plan.producer}
    tables[side] = msgspec.structs.replace(held, buffers=tuple(short))
    plans[Rank(tp=2)] = make_pair_plan(tables["consumer"], tables["producer"], plan.pairs)
    with pytest.raises(PlanError, match=f"layers.2/v: bytes .* leave every registered buffer of (the )?{side}"):
        prove(consumer, plans)


def test_regions_of_the_consumer_that_share_bytes(consumer: RankTable, plans: Plans) -> None:
    first, second, *others = consumer.regions
    shared = msgspec.structs.replace(
        consumer, regions=(first, msgspec.structs.replace(second, base=first.base), *others)
    )
    with pytest.raises(PlanError, match=r"the consumer's own table: region layers.0/v: expected bytes of its own"):
        prove(shared, plans)
