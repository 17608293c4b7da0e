"""Which rank gives what: few ranks, and replicas that share where it is worth it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import msgspec
import pytest

from mooncake_hetero_tp.core.cover import SHARE_BYTES, SHARE_TOKENS, cover_units
from mooncake_hetero_tp.core.pairing import PairPlan
from mooncake_hetero_tp.core.regions import STATE, Group, RankTable, Region
from mooncake_hetero_tp.types import Rank, TokenRange
from tests.tables import DST, SRC, Dense, bound, planned, producer_tables, region, table

LATENT = 1_152
"""Bytes of a DeepSeek-V3 latent a token; its cache has 61 layers."""


def _latents(base: int, tp: int, layers: Iterable[int] = range(61), *, layer_first: bool = True) -> RankTable:
    """MLA latents of 4 blocks of 64 tokens, each rank's whole."""
    layers = tuple(layers)
    page = 64 * LATENT
    layer, block = (4 * page, page) if layer_first else (page, len(layers) * page)
    return table(
        [
            region(f"layers.{i}", "latent", base=base + place * layer, pages=(4, block), token=(64, LATENT),
                   channels=LATENT // 2, item=2)
            for place, i in enumerate(layers)
        ],
        tp,
    )  # fmt: skip


def _engine(tp: int, *, layer_first: bool = True) -> dict[Rank, RankTable]:
    return {Rank(tp=rank): _latents(SRC + (rank << 34), tp, layer_first=layer_first) for rank in range(tp)}


def _bytes(plans: dict[Rank, PairPlan]) -> dict[int, int]:
    return {rank.tp: plan.bytes_per_token(0) for rank, plan in plans.items()}


def test_latents_of_eight_ranks_are_read_from_all_of_them() -> None:
    plans = planned(_latents(DST, 1), _engine(8))
    shares = _bytes(plans)
    assert sorted(shares) == list(range(8))
    assert sum(shares.values()) == 61 * LATENT
    assert max(shares.values()) - min(shares.values()) <= LATENT  # one layer
    order = [layer for rank in sorted(plans) for layer in plans[rank].layers]
    assert order == [f"layers.{i}" for i in range(61)]  # consecutive layers each
    assert all(plan.classes[0].spacing for plan in plans.values())  # and still one loop to bind


@pytest.mark.parametrize("consumer_tp, each", [(2, 4), (4, 2), (8, 1), (16, 1)])
def test_consumer_ranks_spread_by_themselves_first(consumer_tp: int, each: int) -> None:
    readers: Counter[int] = Counter()
    for rank in range(consumer_tp):
        plans = planned(_latents(DST, consumer_tp), _engine(8), prefer=rank)
        assert len(plans) == each
        readers.update(producer.tp for producer in plans)
    assert set(readers.values()) == {max(1, consumer_tp // 8)}
    assert sorted(readers) == list(range(8))


def test_what_is_small_comes_from_one_rank() -> None:
    # A rank more must give SHARE_BYTES of a request of SHARE_TOKENS: two layers of 1,152 bytes are just above once.
    assert 2 * LATENT * SHARE_TOKENS // SHARE_BYTES == 1
    producers = {Rank(tp=rank): _latents(SRC, 8, range(2)) for rank in range(8)}
    assert list(planned(_latents(DST, 1, range(2)), producers)) == [Rank()]
    producers = {Rank(tp=rank): _latents(SRC, 8, range(4)) for rank in range(8)}
    assert len(planned(_latents(DST, 1, range(4)), producers)) == 2


def test_a_stage_gives_only_its_layers() -> None:
    halves = (range(31), range(31, 61))
    producers = {
        Rank(pp=pp, tp=tp): _latents(SRC + ((4 * pp + tp) << 34), 4, half)
        for pp, half in enumerate(halves)
        for tp in range(4)
    }
    plans = planned(_latents(DST, 1), producers)
    assert sorted(plans) == sorted(producers)
    for rank, plan in plans.items():
        assert {int(layer.split(".")[1]) for layer in plan.layers} <= set(halves[rank.pp])


def test_replicated_heads_share_too() -> None:
    # 4 KV heads on 16 ranks: each head on four of them. D TP1 reads from all 16, D TP8 from two each.
    like = Dense(heads=4, layers=48, tokens=16, head_size=128, item=2)
    producers = producer_tables(replace(like, tp=16))
    assert len(planned(replace(like, base=DST).table(), producers)) == 16
    readers: Counter[Rank] = Counter()
    for rank in range(8):
        plans = planned(replace(like, tp=8, rank=rank, base=DST).table(), producers, prefer=rank)
        assert len(plans) == 2
        readers.update(list(plans))
    assert set(readers.values()) == {1}


def _with_index(like: Dense, width: int = 256) -> RankTable:
    heads = [msgspec.structs.replace(held, group=0) for held in like.regions()]
    index = [
        region(f"layers.{i}", "index", base=like.base + (1 << 32) + i * (width << 9), pages=(1, 128 * width),
               token=(128, width), channels=width)
        for i in range(like.layers)
    ]  # fmt: skip
    return table([*heads, *index], like.tp)


def test_an_indexer_beside_sharded_heads_is_shared_by_the_ranks_that_are_read_anyway() -> None:
    """vllm#55523: two components of one layer with unlike expansion, 57 layers; heads over 4 ranks, index on each."""
    like = Dense(heads=4, tokens=128, head_size=128, item=2, blocks=1, layers=57)
    producers = {
        Rank(tp=rank): _with_index(replace(like, tp=4, rank=rank, base=SRC + (rank << 34))) for rank in range(4)
    }
    plans = planned(_with_index(replace(like, base=DST)), producers)
    index = [
        [pair.consumer.layer for pair in plan.pairs if pair.consumer.component == "index"] for plan in plans.values()
    ]
    assert sorted(len(layers) for layers in index) == [14, 14, 14, 15]
    assert sorted(layer for layers in index for layer in layers) == sorted(f"layers.{i}" for i in range(57))
    assert {sum(pair.consumer.component != "index" for pair in plan.pairs) for plan in plans.values()} == {2 * 57}


@pytest.mark.parametrize("layer_first, alone, shared", [(True, 61, 61), (False, 1, 8)])
def test_sharing_makes_no_small_copies(layer_first: bool, alone: int, shared: int) -> None:
    """Copies of two neighbouring blocks: the pages of a layer, or all layers of a block, cut once for each rank."""
    consumer = _latents(DST, 1, layer_first=layer_first)
    copies = {}
    for ranks in (1, 8):
        plans = planned(consumer, _engine(ranks, layer_first=layer_first))
        found = [bound(plan, TokenRange(0, 128), [2, 3], [0, 1]) for plan in plans.values()]
        copies[ranks] = sum(map(len, found))
        assert min(length for copy in found for _, _, length in copy) >= 64 * LATENT
    assert copies == ({1: alone, 8: shared} if layer_first else {1: alone, 8: 2 * shared})


def test_slots_of_a_state_weigh_once_a_request() -> None:
    def side(base: int, tp: int, rows: int) -> RankTable:
        return table(
            [
                region(f"layers.{i}", "ssm", base=base + (i << 28), pages=(4, rows << 10), token=(rows, 1 << 10),
                       channels=1 << 10)
                for i in range(8)
            ],
            tp,
            groups=[Group(0, STATE, 64, 64)],
        )  # fmt: skip

    for rows, ranks in ((64, 1), (1_024, 4)):  # 64 KiB and 1 MiB a slot
        producers = {Rank(tp=rank): side(SRC + (rank << 34), 4, rows) for rank in range(4)}
        assert len(planned(side(DST, 1, rows), producers)) == ranks


def test_what_nobody_holds_is_said() -> None:
    wanted = {("layers.0", "k"): Dense(heads=8, base=DST).regions()[0]}
    held: dict[Rank, dict[tuple[str, str], Region]] = {Rank(): {("layers.0", "k"): Dense(heads=4).regions()[0]}}
    cover = cover_units(Dense(heads=8, base=DST).table(), wanted, held, 0)
    (lack,) = cover.lacking.values()
    assert [(span.global_start, span.count) for span in lack.missing] == [(4, 4)]


def test_the_same_tables_give_the_same_shares() -> None:
    producers = _engine(8)
    turned = dict(reversed(producers.items()))
    plans = [planned(_latents(DST, 1), given) for given in (producers, turned)]
    assert [plan.layers for plan in plans[0].values()] == [plan.layers for plan in plans[1].values()]
