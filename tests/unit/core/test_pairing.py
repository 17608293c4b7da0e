"""Classes, templates and what a PairPlan answers."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from mooncake_hetero_tp.core.copies import Loop, StridedCopy
from mooncake_hetero_tp.core.pairing import PairPlan, Templates, make_pair_plan, seams
from mooncake_hetero_tp.core.regions import STATE, Buffer, Group, RankTable, Span
from mooncake_hetero_tp.errors import PlanError
from mooncake_hetero_tp.types import Rank, TokenRange
from tests.tables import DST, SRC, Dense, planned, region, table


def _plan(producer: RankTable, consumer: RankTable) -> PairPlan:
    return planned(consumer, {Rank(): producer})[Rank()]


def test_like_layers_are_one_class_with_both_halves_in_each_member() -> None:
    plan = _plan(Dense(heads=4, layers=3).table(), Dense(heads=4, tp=2, layers=3, base=DST).table())
    (members,) = plan.classes
    assert [[pair.consumer.name for pair in member] for member in members.members] == [
        [f"layers.{i}/k", f"layers.{i}/v"] for i in range(3)
    ]
    assert plan.layers == ("layers.0", "layers.1", "layers.2")


def test_layers_of_another_shape_are_a_class_of_their_own() -> None:
    def both(base: int) -> RankTable:
        draft = Dense(heads=2, first_layer=3, base=base + (1 << 20)).regions()
        return table([*Dense(heads=4, layers=3, base=base).regions(), *draft])

    plan = _plan(both(SRC), both(DST))
    assert [len(members.members) for members in plan.classes] == [3, 1]


def test_evenly_spaced_layers_fold_into_the_copies() -> None:
    # BLHNC on both sides: a block row holds all layers, so a page is one run.
    like = Dense(heads=4, layers=3, layout="BLHNC")
    (members,) = _plan(like.table(), replace(like, base=DST).table()).classes
    row = 4 * 4 * 4  # heads, tokens, k and v of two channels
    assert members.spacing == Loop(3, row, row)
    assert members.template(4) == (StridedCopy(0, 0, (), 3 * row),)


@pytest.mark.parametrize("uneven", ["producer", "consumer", "both"])
def test_unevenly_spaced_layers_stay_an_axis_of_bases(uneven: str) -> None:
    def spaced(base: int, *places: int) -> RankTable:
        return table(
            [r for i, at in enumerate(places) for r in Dense(heads=4, first_layer=i, base=base + at).regions()]
        )

    sides = {"producer": (0, 1000, 2000), "consumer": (0, 1000, 2000), uneven: (0, 1000, 5000)}
    if uneven == "both":
        sides |= dict.fromkeys(("producer", "consumer"), (0, 1000, 5000))
    (members,) = _plan(spaced(SRC, *sides["producer"]), spaced(DST, *sides["consumer"])).classes
    assert members.spacing is None
    assert members.origins[0].tolist() == [SRC + place for place in sides["producer"]]
    assert members.template(4)


def test_templates_of_head_major_and_token_major_pages() -> None:
    # 2 heads, 4 tokens, rows of 4 bytes; consumer rank 1 of 2 takes head 1. vllm#59594.
    consumer = Dense(heads=2, tp=2, rank=1, base=DST).table()
    head_major = _plan(Dense(heads=2, layout="LBHNC").table(), consumer).classes[0]
    token_major = _plan(Dense(heads=2, layout="LBNHC").table(), consumer).classes[0]
    assert head_major.template(4) == (StridedCopy(16, 0, (), 16),)
    assert token_major.template(4) == (StridedCopy(4, 0, (Loop(4, 8, 4),), 4),)
    assert token_major.template(1) == (StridedCopy(4, 0, (), 4),)


def test_a_template_that_is_not_the_regions_elements_is_refused() -> None:
    (members,) = _plan(Dense(heads=2).table(), Dense(heads=2, tp=2, base=DST).table()).classes
    part = members.geometry.parts[0]
    off_by_one = msgspec.structs.replace(part, units=Loop(1, 0, 0), channels=Loop(2, 2, 1))
    parts = off_by_one, *members.geometry.parts[1:]
    wrong = replace(members, geometry=msgspec.structs.replace(members.geometry, parts=parts))
    with pytest.raises(PlanError, match=r"layers.0/k, layers.0/v: the copies of a run of 3 tokens"):
        replace(wrong, templates=Templates({}, {})).template(3)


def test_bytes_per_token_and_slot() -> None:
    groups = [Group(0, "attention", 4, 4), Group(1, STATE, 64, 64)]

    def both(base: int) -> RankTable:
        ssm = region("s", "ssm", base=base + 4096, pages=(2, 64), token=(3, 8), channels=8, group=1)
        return table([*Dense(heads=4, layers=2, base=base).regions(), ssm], groups=groups)

    plan = _plan(both(SRC), both(DST))
    assert [plan.bytes_per_token(group) for group in (0, 1)] == [2 * 4 * 4, 0]
    assert [plan.bytes_per_slot(group) for group in (0, 1)] == [0, 24]


def test_a_plan_of_some_layers() -> None:
    like = Dense(heads=4, layers=3)
    plan = _plan(like.table(), replace(like, base=DST).table())
    assert plan.only({"layers.1"}).layers == ("layers.1",)
    assert plan.only(set()).classes == ()


def test_ranges_follow_the_producers_group_order() -> None:
    # vllm#52592, vllm#32204: groups in another order on the other side.
    def two(base: int, first: int) -> RankTable:
        names = [("full", first), ("window", 1 - first)]
        made = [
            region(name, "k", base=base + 64 * i, pages=(2, 16), token=(4, 4), channels=4, group=group)
            for i, (name, group) in enumerate(names)
        ]
        return table(made, groups=[Group(i, "attention", 4, 4) for i in range(2)])

    plan = _plan(two(SRC, 1), two(DST, 0))
    assert plan.producer_ranges([TokenRange(0, 7), TokenRange(4, 7)]) == (TokenRange(4, 7), TokenRange(0, 7))
    assert plan.producer_ranges([TokenRange(3, 3), TokenRange(4, 7)]) == (TokenRange(4, 7), TokenRange(0, 0))


def test_groups_merged_on_the_producer_get_the_hull_of_the_ranges() -> None:
    def two(base: int, groups: tuple[int, int]) -> RankTable:
        made = [
            region(name, "k", base=base + 64 * i, pages=(2, 16), token=(4, 4), channels=4, group=group)
            for i, (name, group) in enumerate(zip(("full", "window"), groups, strict=True))
        ]
        return table(made, groups=[Group(i, "attention", 4, 4) for i in range(max(groups) + 1)])

    plan = _plan(two(SRC, (0, 0)), two(DST, (0, 1)))
    assert plan.producer_ranges([TokenRange(0, 7), TokenRange(4, 8)]) == (TokenRange(0, 8),)


def test_seams_are_where_buffers_touch() -> None:
    assert seams([Buffer(0, 8), Buffer(8, 8), Buffer(20, 4)]).tolist() == [8]
    assert seams([]).dtype == np.int64


def test_an_empty_plan_reads_nothing() -> None:
    both = Dense(heads=1).table()
    plan = make_pair_plan(both, both, [])
    assert plan.layers == ()
    assert plan.producer_ranges([TokenRange(0, 4)]) == (TokenRange(0, 0),)


def test_scattered_spans_are_cut_piece_by_piece() -> None:
    swapped = (Span(0, 2, 2), Span(2, 0, 2))
    want = region("l", "k", base=DST, pages=(2, 64), token=(4, 4), spans=swapped, unit=16, channels=4)
    have = region("l", "k", base=SRC, pages=(2, 64), token=(4, 4), spans=(Span(0, 0, 4),), unit=16, channels=4)
    (members,) = _plan(table([have]), table([want])).classes
    assert members.template(4) == (StridedCopy(32, 0, (), 32), StridedCopy(0, 32, (), 32))
