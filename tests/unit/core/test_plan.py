"""Who reads what from whom: replicated heads, unlike block sizes and layouts, stages, refusals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest

from mooncake_hetero_tp.core.comparison import compare
from mooncake_hetero_tp.core.copies import StridedCopy
from mooncake_hetero_tp.core.plan import plan_pulls
from mooncake_hetero_tp.core.regions import STATE, Axis, Group, RankTable, Region, Span, whole_span
from mooncake_hetero_tp.errors import IncompatiblePeer, PeerProtocolError
from mooncake_hetero_tp.types import Rank, Severity, TokenRange
from tests.tables import DST, SRC, Dense, bound, planned, producer_tables, region, table

GQA = Dense(heads=4, tokens=128, head_size=128, item=2, blocks=1)
"""One page of vllm#52516: 4 KV heads, a head slice of 65,536 bytes, 262,144 a full page."""
SLICE = 65_536
PAGE = TokenRange(0, 128)


def _sends(producer_tp: int, consumer_tp: int, consumer_rank: int) -> list[int | None]:
    """Per producer rank: the destination offset of its one slice, or None where it is not read."""
    consumer = replace(GQA, tp=consumer_tp, rank=consumer_rank, base=DST).table()
    plans = planned(consumer, producer_tables(replace(GQA, tp=producer_tp)))
    offsets: list[int | None] = [None] * producer_tp
    for rank, plan in plans.items():
        ((src, dst, length),) = bound(plan, PAGE, [0], [0])
        assert (src, length) == (0, SLICE)
        offsets[rank.tp] = dst
    return offsets


def _sources(producer_tp: int) -> list[int]:
    """Per consumer rank of TP 8: the source offset of its one slice."""
    offsets = []
    for rank in range(8):
        consumer = replace(GQA, tp=8, rank=rank, base=DST).table()
        ((_, plan),) = planned(consumer, producer_tables(replace(GQA, tp=producer_tp)), prefer=rank).items()
        ((src, dst, length),) = bound(plan, PAGE, [0], [0])
        assert (dst, length) == (0, SLICE)
        offsets.append(src)
    return offsets


def test_replicated_heads_of_many_ranks_into_one() -> None:
    # vllm#52516: P TP8 -> D TP1; every second rank is a replica.
    assert _sends(8, 1, 0) == [0, None, 65_536, None, 131_072, None, 196_608, None]


def test_replicated_heads_of_many_ranks_into_two() -> None:
    assert _sends(8, 2, 0) == [0, None, 65_536, None, None, None, None, None]
    assert _sends(8, 2, 1) == [None, None, None, None, 0, None, 65_536, None]


@pytest.mark.parametrize(
    "producer_tp, offsets",
    [
        (1, [0, 0, 65_536, 65_536, 131_072, 131_072, 196_608, 196_608]),
        (2, [0, 0, 65_536, 65_536, 0, 0, 65_536, 65_536]),
        (4, [0] * 8),
    ],
)
def test_fewer_ranks_into_replicated_heads(producer_tp: int, offsets: list[int]) -> None:
    assert _sources(producer_tp) == offsets


@pytest.mark.parametrize("producer_tp, consumer_tp", [(1, 8), (8, 1)])
def test_pages_of_twice_the_size_are_refused(producer_tp: int, consumer_tp: int) -> None:
    # vllm#52516: 262,144 against 65,536 bytes is right (above), against 131,072 it is not: once as twice the
    # content of a head, once as a second head that does not exist.
    wide = replace(GQA, tp=8, head_size=256)
    tables = {1: replace(GQA, base=DST if consumer_tp == 1 else SRC).table(), 8: wide.table()}
    with pytest.raises(IncompatiblePeer, match=r"channels: producer has (128|256), consumer has (128|256)"):
        plan_pulls(tables[consumer_tp], {Rank(): tables[producer_tp]})


def test_a_head_that_does_not_exist_is_named() -> None:
    consumer = replace(GQA, heads=8, tp=4, rank=2, base=DST).table()  # believes in heads 4 and 5 of 8
    with pytest.raises(IncompatiblePeer, match=r"units: .*dp0.pp0.tp0: 0..3, consumer has needs 4..5"):
        plan_pulls(consumer, producer_tables(GQA))


@pytest.mark.parametrize(
    "producer_tp, consumer_tp, sources",
    [
        (1, 4, [[0], [0], [0], [0]]),
        (4, 1, [[0, 2]]),
        (4, 8, [[0], [0], [0], [0], [2], [2], [2], [2]]),
    ],
)
def test_two_heads_over_more_ranks(producer_tp: int, consumer_tp: int, sources: list[list[int]]) -> None:
    # sglang#19086, sglang#23746: modulo over ranks cycled through the replicas.
    like = Dense(heads=2)
    found = []
    for rank in range(consumer_tp):
        consumer = replace(like, tp=consumer_tp, rank=rank, base=DST).table()
        found.append([held.tp for held in planned(consumer, producer_tables(replace(like, tp=producer_tp)))])
    assert found == sources


def test_heads_that_do_not_divide_come_from_both_neighbours() -> None:
    # 6 heads, TP 2 -> TP 3: the middle rank needs head 2 of rank 0 and head 3 of rank 1.
    like = Dense(heads=6, tokens=1)
    consumer = replace(like, tp=3, rank=1, base=DST).table()
    plans = planned(consumer, producer_tables(replace(like, tp=2)))
    copies = {rank.tp: bound(plan, TokenRange(0, 1), [0], [0]) for rank, plan in plans.items()}
    assert copies == {0: [(8, 0, 4)], 1: [(0, 4, 4)]}


def test_equal_replicas_are_spread_by_preference() -> None:
    latent = [region("mla", "latent", base=SRC, pages=(4, 16), token=(4, 4), channels=4)]
    producers = {Rank(tp=rank): table(latent, 8) for rank in range(8)}
    consumer = table([msgspec.structs.replace(latent[0], base=DST)], 8)
    chosen = [list(planned(consumer, producers, prefer=rank)) for rank in range(10)]
    assert chosen == [[Rank(tp=rank % 8)] for rank in range(10)]


def test_a_rank_that_serves_all_is_preferred_to_several() -> None:
    like = Dense(heads=4)
    whole = msgspec.structs.replace(replace(like, base=SRC + (9 << 34)).table(), tp_size=2)
    producers = producer_tables(replace(like, tp=2)) | {Rank(tp=7): whole}
    assert list(planned(replace(like, base=DST).table(), producers, prefer=1)) == [Rank(tp=7)]


def test_the_cut_follows_strides_not_names() -> None:
    # vllm#59594: head 1 of a page of 16 bytes, 2 heads, 4 tokens, 2 channels.
    def copies(layout: str) -> list[tuple[int, int, int]]:
        like = Dense(heads=2, head_size=1, layout=layout)
        consumer = replace(like, layout="LBHNC", tp=2, rank=1, base=DST).table()
        return bound(planned(consumer, {Rank(): like.table()})[Rank()], TokenRange(0, 4), [0], [0])

    assert copies("LBHNC") == [(8, 0, 8)]
    assert copies("LBNHC") == [(2, 0, 2), (6, 2, 2), (10, 4, 2), (14, 6, 2)]


@pytest.mark.parametrize("rank, offset", [(2, 4096), (6, 12_288)])
def test_head_offsets_come_from_content_not_from_padded_pages(rank: int, offset: int) -> None:
    # vllm#52516 review: 4 heads x 16 tokens x 2x64 x 2 bytes = 16,384, padded to 20,480.
    like = Dense(heads=4, tokens=16, head_size=64, item=2, page_bytes=20_480)
    consumer = replace(like, tp=8, rank=rank, page_bytes=5_120, base=DST).table()
    plan = planned(consumer, {Rank(): like.table()})[Rank()]
    assert bound(plan, TokenRange(0, 16), [0], [0]) == [(offset, 0, 4096)]
    assert bound(plan, TokenRange(0, 32), [0, 1], [0, 1])[1] == (20_480 + offset, 5_120, 4096)


def test_an_indexer_that_every_rank_holds_whole_is_read_once() -> None:
    # vllm#55523: heads 65,536 bytes each over 4 ranks, index rows of 128 tokens x 256 bytes on every rank.
    def side(like: Dense) -> RankTable:
        index = region("l", "index", base=like.base + (1 << 30), pages=(1, 32_768), token=(128, 256), channels=256)
        return table([*like.regions(), index], like.tp)

    producers = {Rank(tp=rank): side(replace(GQA, tp=4, rank=rank, base=SRC + (rank << 34))) for rank in range(4)}
    plans = planned(side(replace(GQA, base=DST)), producers, prefer=2)
    heads = {rank.tp: bound(plan.only({"layers.0"}), PAGE, [0], [0]) for rank, plan in plans.items()}
    assert heads == {rank: [(0, rank * SLICE, SLICE)] for rank in range(4)}
    assert [rank.tp for rank, plan in plans.items() if "l" in plan.layers] == [2]


def test_an_indexer_of_another_width_is_refused() -> None:
    def side(base: int, width: int) -> RankTable:
        return table([region("l", "index", base=base, pages=(1, 128 * width), token=(128, width), channels=width)])

    with pytest.raises(IncompatiblePeer, match=r"l/index: channels: producer has 256, consumer has 1024"):
        plan_pulls(side(DST, 1024), {Rank(): side(SRC, 256)})


CONV = (("conv.k", 4), ("conv.q", 4), ("conv.v", 8))


def _conv(tp: int, rank: int, base: int, *, rows_first: bool = False) -> RankTable:
    """Conv state of K=4, K=4, V=8 channels, 3 states of 2 bytes: one slot of 96 bytes at TP 1."""
    made: list[Region] = []
    offset = base
    for component, channels in CONV:
        count = channels // tp
        unit, row = (2, 2 * count) if rows_first else (6, 2)
        spans = (Span(0, rank * count, count),)
        made.append(
            region("gdn", component, base=offset, pages=(4, 96 // tp), token=(3, row), spans=spans, unit=unit, item=2)
        )
        offset += 6 * count
    return table(made, tp, groups=[Group(0, STATE, 64, 64)])


def test_each_part_of_a_conv_state_is_cut_by_itself() -> None:
    # vllm#53078, sglang#20655: a flat cut of the slot gives (48, 48), which is all V.
    plan = planned(_conv(2, 1, DST), {Rank(): _conv(1, 0, SRC)})[Rank()]
    assert bound(plan, TokenRange(0, 5), [0], [0]) == [(12, 0, 12), (36, 12, 12), (72, 24, 24)]


def test_conv_parts_come_back_together() -> None:
    producers = {Rank(tp=rank): _conv(2, rank, SRC + (rank << 34)) for rank in range(2)}
    plans = planned(_conv(1, 0, DST), producers)
    copies = {rank.tp: bound(plan, TokenRange(0, 5), [0], [0]) for rank, plan in plans.items()}
    assert copies == {
        0: [(0, 0, 12), (12, 24, 12), (24, 48, 24)],
        1: [(0, 12, 12), (12, 36, 12), (24, 72, 24)],
    }


def test_conv_parts_of_four_ranks_land_by_their_place_in_the_consumer_rank() -> None:
    # TP 4 -> TP 2: producer rank 3 is the second writer of consumer rank 1.
    producers = {Rank(tp=rank): _conv(4, rank, SRC + (rank << 34)) for rank in range(4)}
    plans = planned(_conv(2, 1, DST), producers)
    copies = {rank.tp: bound(plan, TokenRange(0, 5), [0], [0]) for rank, plan in plans.items()}
    assert copies == {
        2: [(0, 0, 6), (6, 12, 6), (12, 24, 12)],
        3: [(0, 6, 6), (6, 18, 6), (12, 36, 12)],
    }


def test_conv_rows_are_cut_one_by_one() -> None:
    # The (state, channel) order: every row is cut, nothing else is possible.
    plan = planned(_conv(2, 1, DST, rows_first=True), {Rank(): _conv(1, 0, SRC, rows_first=True)})[Rank()]
    assert bound(plan, TokenRange(0, 5), [0], [0]) == [
        *((4 + 8 * row, 4 * row, 4) for row in range(3)),
        *((24 + 4 + 8 * row, 12 + 4 * row, 4) for row in range(3)),
        *((48 + 8 + 16 * row, 24 + 8 * row, 8) for row in range(3)),
    ]


def _stages(layers: int, pp: int, base: int) -> dict[Rank, RankTable]:
    each = layers // pp
    return {
        Rank(pp=stage): Dense(heads=2, layers=each, first_layer=stage * each, base=base + (stage << 34)).table()
        for stage in range(pp)
    }


def test_stages_pair_layers_by_name() -> None:
    # vllm#56033: 8 layers, PP 4 -> PP 2; paired by position the later stages write wrong layers.
    producers = _stages(8, 4, SRC)
    for stage, consumer in _stages(8, 2, DST).items():
        plans = planned(consumer, producers)
        assert {rank.pp: plan.layers for rank, plan in plans.items()} == {
            2 * stage.pp: (f"layers.{4 * stage.pp}", f"layers.{4 * stage.pp + 1}"),
            2 * stage.pp + 1: (f"layers.{4 * stage.pp + 2}", f"layers.{4 * stage.pp + 3}"),
        }


@pytest.mark.parametrize("side", ["consumer", "producer rank dp0.pp0.tp0"])
def test_a_layer_named_twice_is_refused(side: str) -> None:
    good = Dense(heads=2, layers=2).table()
    twice = msgspec.structs.replace(good, regions=good.regions + good.regions[:1])
    tables = {"consumer": good, "producer rank dp0.pp0.tp0": good, side: twice}
    with pytest.raises(PeerProtocolError, match=f"layers.0/k: the {side} lists it twice"):
        plan_pulls(tables["consumer"], {Rank(): tables["producer rank dp0.pp0.tp0"]})


def test_a_draft_layer_only_the_consumer_has() -> None:
    # vllm#49230: refused by name, unless the table says that it is a draft's.
    like = Dense(heads=2, layers=4)
    draft = Dense(heads=2, first_layer=9, base=DST + (1 << 20)).regions()
    consumer = table([*replace(like, base=DST).regions(), *draft])
    with pytest.raises(
        IncompatiblePeer, match=r"layers.9/k and 1 more: layer set: producer has no such layer component"
    ) as caught:
        plan_pulls(consumer, {Rank(): like.table()})
    assert {mismatch.severity for mismatch in caught.value.mismatches} == {Severity.REFUSE}
    consumer = msgspec.structs.replace(consumer, draft_layers=("layers.9",))
    plans = planned(consumer, {Rank(): like.table()})
    assert plans[Rank()].layers == tuple(f"layers.{i}" for i in range(4))


def test_a_draft_layer_that_both_have_is_read() -> None:
    like = Dense(heads=2, layers=2)
    consumer = msgspec.structs.replace(replace(like, base=DST).table(), draft_layers=("layers.1",))
    plans = planned(consumer, {Rank(): like.table()})
    assert plans[Rank()].layers == ("layers.0", "layers.1")


def test_a_draft_layer_only_the_producer_has_is_skipped() -> None:
    like = Dense(heads=2, layers=4)
    draft = Dense(heads=2, first_layer=9, base=SRC + (1 << 20)).regions()
    plans = planned(replace(like, base=DST).table(), {Rank(): table([*like.regions(), *draft])})
    assert plans[Rank()].layers == tuple(f"layers.{i}" for i in range(4))


def test_groups_in_another_order_give_the_same_plan() -> None:
    # vllm#52592, vllm#32204: only the first group's backend was asked.
    def side(base: int, order: Sequence[str]) -> RankTable:
        groups = [Group(i, STATE if kind == "state" else "attention", 4, 4) for i, kind in enumerate(order)]
        made = [msgspec.structs.replace(r, group=order.index("full")) for r in Dense(heads=2, base=base).regions()]
        made.append(
            region("s", "ssm", base=base + 4096, pages=(8, 32), token=(2, 16), channels=16, group=order.index("state"))
        )
        return table(made, groups=groups)

    for order in (["full", "state"], ["state", "full"]):
        plan = planned(side(DST, ["full", "state"]), {Rank(): side(SRC, order)})[Rank()]
        assert plan.layers == ("layers.0", "s")
        assert {pair.producer.group for pair in plan.pairs if pair.consumer.layer == "s"} == {order.index("state")}


def _refusal(field: str, have: RankTable, want: RankTable) -> str:
    with pytest.raises(IncompatiblePeer) as caught:
        plan_pulls(want, {Rank(): have})
    (mismatch,) = caught.value.mismatches
    assert mismatch.field == field
    assert mismatch.remedy
    return str(caught.value)


def _changed(good: RankTable, **changes: object) -> RankTable:
    return msgspec.structs.replace(good, regions=tuple(msgspec.structs.replace(r, **changes) for r in good.regions))


def test_each_difference_is_refused_by_name() -> None:
    have, want = Dense(heads=2).table(), Dense(heads=2, base=DST).table()
    assert "producer has bfloat16, consumer has uint8" in _refusal("dtype", _changed(have, dtype="bfloat16"), want)
    assert "producer has 2, consumer has 1" in _refusal("item bytes", _changed(have, item_bytes=2), want)
    assert "producer has 3, consumer has 2" in _refusal("channels", _changed(have, channel=Axis(3, 1)), want)
    state = msgspec.structs.replace(want, groups=(Group(0, STATE, 4, 4),))
    assert "producer has attention, consumer has state" in _refusal("group kind", have, state)
    other_state = _changed(msgspec.structs.replace(have, groups=state.groups), token=Axis(3, 4))
    assert "producer has 3, consumer has 4" in _refusal("state rows", other_state, state)


def test_all_reasons_come_at_once() -> None:
    have = _changed(Dense(heads=2, layers=3).table(), dtype="bfloat16")
    want = _changed(Dense(heads=2, layers=4, base=DST).table(), channel=Axis(1, 1))
    with pytest.raises(IncompatiblePeer) as caught:
        plan_pulls(want, {Rank(): have})
    assert {mismatch.field for mismatch in caught.value.mismatches} == {"dtype", "channels", "layer set"}
    assert "and 5 more" in str(caught.value)  # like layers are told once


# --- opaque encodings: whole kernel pages only ---------------------------------------------------


def _opaque(
    base: int, heads: int, *, first: int = 0, tokens: int = 4, unit: int = 16, row: int = 4, name: str = "opaque:X"
) -> RankTable:
    """Pages of `heads` units of 4 tokens x 4 bytes."""
    made = region(
        "l",
        "kv",
        base=base,
        pages=(8, 64 * tokens),
        token=(tokens, row),
        spans=(Span(0, first, heads),),
        unit=unit,
        channels=4,
        encoding=name,
    )
    return table([made])


def test_equal_opaque_pages_move_whole_even_half_filled() -> None:
    plan = planned(_opaque(DST, 4), {Rank(): _opaque(SRC, 4)})[Rank()]
    assert bound(plan, TokenRange(4, 9), [5, 6, 7], [1, 2, 3]) == [(6 * 256, 2 * 256, 64), (7 * 256, 3 * 256, 64)]


def test_opaque_pages_may_be_cut_where_units_are_outermost() -> None:
    plan = planned(_opaque(DST, 2, first=2), {Rank(): _opaque(SRC, 4)})[Rank()]
    assert plan.classes[0].template(4) == (StridedCopy(32, 0, (), 32),)


def test_opaque_pages_with_units_inside_are_refused() -> None:
    token_major = _opaque(SRC, 4, unit=4, row=16)
    text = _refusal("units of an opaque page", token_major, _opaque(DST, 2, first=2, unit=4, row=16))
    assert "l/kv" in text
    assert "opaque:X" in text
    planned(_opaque(DST, 4, unit=4, row=16), {Rank(): token_major})  # uncut it is fine


def test_whole_opaque_pages_of_unlike_unit_order_are_refused_by_plan_and_handshake() -> None:
    # All units move, but where one's bytes lie between another's, unlike distances tell of unlike content.
    producer, consumer = _opaque(SRC, 4, unit=4, row=32), _opaque(DST, 4, unit=8, row=32)
    _refusal("units of an opaque page", producer, consumer)
    assert "unit_order" in {found.field for found in compare(producer, consumer)}
    known = [_opaque(base, 4, unit=unit, row=32, name="packed") for base, unit in ((SRC, 4), (DST, 8))]
    assert planned(known[1], {Rank(): known[0]})


@pytest.mark.parametrize(
    "field, want",
    [
        ("encoding", _opaque(DST, 4, name="opaque:Y")),
        ("encoding", _opaque(DST, 4, name="packed")),
        ("kernel block size", _opaque(DST, 4, tokens=2)),
        ("strides", _opaque(DST, 4, row=8, unit=32)),
    ],
)
def test_unlike_opaque_pages_are_refused(field: str, want: RankTable) -> None:
    assert "l/kv" in _refusal(field, _opaque(SRC, 4), want)


def test_unlike_known_encodings_convert() -> None:
    # vLLM's CPU attention keeps K as [H][D][N]; a packed page as [H][N][K|V].
    spans = whole_span(1)
    transposed = region(
        "l", "k", base=SRC, pages=(2, 8), token=(4, 1), channels=2, channel=4, spans=spans, encoding="cpu"
    )
    packed = region("l", "k", base=DST, pages=(2, 16), token=(4, 4), channels=2, spans=spans)
    plan = planned(table([packed]), {Rank(): table([transposed])})[Rank()]
    assert bound(plan, TokenRange(0, 2), [0], [0]) == [(0, 0, 1), (4, 1, 1), (1, 4, 1), (5, 5, 1)]
