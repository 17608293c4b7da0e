"""Layers that tensor parallelism does not cut, beside those that it does: vLLM's specs and views, planned and moved.

Each value says which layer, head, token and channel it is, so that a byte in the wrong place is seen.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from vllm.v1 import kv_cache_interface as kinds

from mooncake_hetero_tp.core.binding import bind
from mooncake_hetero_tp.core.handshake import agree, compare
from mooncake_hetero_tp.core.plan import PairPlan, plan_pulls, prove
from mooncake_hetero_tp.core.regions import RankTable
from mooncake_hetero_tp.core.tables import validate_table
from mooncake_hetero_tp.errors import IncompatiblePeer
from mooncake_hetero_tp.types import Rank, Severity, TokenRange
from mooncake_hetero_tp.vllm_adapter.probe import build_table
from tests.tables import ids
from tests.unit.vllm_adapter.doubles import Model, attention_module

pytestmark = pytest.mark.vllm

NUM_BLOCKS = 12
UNTOUCHED = 77
HEADS = 4
"""KV heads of the model."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One cached layer: its spec for a rank that holds `heads` heads, and its backend."""

    name: str
    backend: str
    width: int
    latent: bool = False
    content_bytes: int | None = None
    dtype: torch.dtype = torch.bfloat16

    def spec(self, heads: int, block_size: int) -> Any:
        sizes: dict[str, Any] = {"block_size": block_size, "head_size": self.width, "dtype": self.dtype}
        if self.latent:
            return kinds.MLAAttentionSpec(num_kv_heads=1, state_content_bytes=self.content_bytes, **sizes)
        return kinds.FullAttentionSpec(num_kv_heads=heads, **sizes)


@dataclass(frozen=True, kw_only=True)
class Side:
    """One rank's memory: all layers of a block in a row, as vLLM packs layers of unlike page sizes."""

    layers: tuple[Layer, ...]
    table: RankTable
    views: Mapping[str, torch.Tensor]
    block_size: int
    first_head: int

    @classmethod
    def of(cls, layers: Sequence[Layer], *, block_size: int, tp: int = 1, rank: int = 0, hidden: int = 8) -> Side:
        model = Model(
            heads=HEADS,
            tp_size=tp,
            tp_rank=rank,
            num_blocks=NUM_BLOCKS,
            layout="BLHNC",
            layers=hidden,
            block_size=block_size,
        )
        specs = {layer.name: layer.spec(model.local_heads, block_size) for layer in layers}
        config = _packed_config(specs, block_size)
        engine = model.engine(config)
        context = engine.vllm_config.compilation_config.static_forward_context
        context.update({layer.name: attention_module(layer.backend, None) for layer in layers})
        views = model.allocate(config)
        for view in views.values():
            view.view(torch.uint8).fill_(UNTOUCHED)
        table = build_table(engine, views)
        validate_table(table)
        first = rank * HEADS // tp
        return cls(layers=tuple(layers), table=table, views=views, block_size=block_size, first_head=first)

    def pages(self, layer: Layer, blocks: Sequence[int], tokens: int) -> torch.Tensor:
        """A copy of `[token, head, byte]` of a request in these blocks."""
        view = self.views[layer.name].view(torch.uint8)
        token = torch.arange(tokens)
        return view[torch.tensor(blocks)[token // self.block_size], :, token % self.block_size]

    def fill(self, blocks: Sequence[int], tokens: int) -> None:
        token = torch.arange(tokens)
        where = (torch.tensor(blocks)[token // self.block_size], slice(None), token % self.block_size)
        for layer in self.layers:
            view = self.views[layer.name].view(torch.uint8)
            view[where] = values(layer, self.first_head, view.shape[1], tokens, view.shape[3])


def _packed_config(specs: Mapping[str, Any], block_size: int) -> Any:
    uniform = kinds.UniformTypeKVCacheSpecs(block_size=block_size, kv_cache_specs=dict(specs))
    stride = sum(spec.page_size_bytes for spec in specs.values())
    tensors, offset = [], 0
    for name, spec in specs.items():
        tensors.append(
            kinds.KVCacheTensor(
                size=NUM_BLOCKS * stride, layers=[name], layer_stride=stride, block_stride=stride, offset=offset
            )
        )
        offset += spec.page_size_bytes
    return kinds.KVCacheConfig(
        num_blocks=NUM_BLOCKS,
        kv_cache_tensors=tensors,
        kv_cache_groups=[kinds.KVCacheGroupSpec([*specs], uniform)],
        kv_cache_layout="BLHNC",
    )


def values(layer: Layer, first_head: int, heads: int, tokens: int, length: int) -> torch.Tensor:
    """`[token, head, byte]`: unlike for neighbours along every axis, and never `UNTOUCHED` throughout."""
    start = 0 if layer.latent else first_head
    axes = torch.meshgrid(torch.arange(tokens), torch.arange(heads) + start, torch.arange(length), indexing="ij")
    token, head, byte = axes
    return ((token * 37 + head * 101 + byte * 11 + sum(layer.name.encode()) * 53) % 251).to(torch.uint8)


def planned(consumer: Side, producers: Sequence[Side]) -> dict[Rank, PairPlan]:
    plans = plan_pulls(consumer.table, {Rank(tp=rank): side.table for rank, side in enumerate(producers)})
    prove(consumer.table, plans)
    return plans


def pull(consumer: Side, producers: Sequence[Side], tokens: int) -> dict[Rank, PairPlan]:
    """Fill the producers, carry every descriptor out, compare all that the consumer should have now."""
    source = [11 - place for place in range(-(-tokens // producers[0].block_size))]
    target = [1 + 2 * place for place in range(-(-tokens // consumer.block_size))]
    for side in producers:
        side.fill(source, tokens)
    plans = planned(consumer, producers)
    for plan in plans.values():
        found = bind(plan, [TokenRange(0, tokens)], [ids(source)], [ids(target)])
        for src, dst, length in zip(found.src.tolist(), found.dst.tolist(), found.length.tolist(), strict=True):
            ctypes.memmove(dst, src, length)
    held = {layer.name for side in producers for layer in side.layers}
    for layer in consumer.layers:
        pages = consumer.pages(layer, target, tokens)
        wanted = values(layer, consumer.first_head, pages.shape[1], tokens, pages.shape[2])
        expected = wanted if layer.name in held else torch.full_like(pages, UNTOUCHED)
        assert torch.equal(pages, expected), layer.name
        assert (consumer.views[layer.name].view(torch.uint8)[[0, 2, 4]] == UNTOUCHED).all(), layer.name
    return plans


def ranks(layers: Sequence[Layer], tp: int, block_size: int) -> list[Side]:
    return [Side.of(layers, block_size=block_size, tp=tp, rank=rank) for rank in range(tp)]


# --- an indexer beside grouped heads ---------------------------------------------------------------------------------

HEADS_LAYER = Layer(name="model.layers.0.self_attn.attn", backend="FLASH_ATTN", width=128)
INDEX = Layer(name="model.layers.0.self_attn.index_cache", backend="MINIMAX_M3_INDEXER", width=128, latent=True)
MINIMAX = (HEADS_LAYER, INDEX)
TOKENS = 300


def page_bytes(table: RankTable, layer: str) -> int:
    """Of one page, all components of a layer together."""
    return sum(
        region.unit.count * region.token.count * region.channel.count * region.item_bytes
        for region in table.regions
        if region.layer == layer
    )


def test_heads_are_cut_beside_an_indexer_that_every_rank_holds() -> None:
    """vllm#55523, its region 60: P TP4, D TP1; index pages of 32,768 bytes on both sides are no cut by four."""
    consumer, producers = Side.of(MINIMAX, block_size=128), ranks(MINIMAX, 4, 128)
    assert [page_bytes(side.table, HEADS_LAYER.name) for side in (consumer, producers[0])] == [262_144, 65_536]
    assert [page_bytes(side.table, INDEX.name) for side in (consumer, producers[0])] == [32_768] * 2
    plans = pull(consumer, producers, TOKENS)
    read = [(pair.consumer.layer, pair.consumer.component) for plan in plans.values() for pair in plan.pairs]
    assert sorted(plans) == [Rank(tp=rank) for rank in range(4)]
    assert read.count((INDEX.name, "kv")) == 1
    assert read.count((HEADS_LAYER.name, "k")) == 4
    cuts = [
        pair.cuts[0].consumer_local for plan in plans.values() for pair in plan.pairs if pair.consumer.unit.count > 1
    ]
    assert [place * 65_536 for place in sorted(set(cuts))] == [0, 65_536, 131_072, 196_608]


@pytest.mark.parametrize("producer_tp,consumer_tp", [(1, 4), (2, 4), (4, 2), (8, 1), (1, 8)])
def test_the_same_at_other_sizes(producer_tp: int, consumer_tp: int) -> None:
    producers = ranks(MINIMAX, producer_tp, 128)
    for rank in range(consumer_tp):
        pull(Side.of(MINIMAX, block_size=128, tp=consumer_tp, rank=rank), producers, TOKENS)


# --- latents ---------------------------------------------------------------------------------------------------------

LATENT = (
    Layer(name="model.layers.0.self_attn.attn", backend="TRITON_MLA", width=576, latent=True),
    Layer(name="model.layers.1.self_attn.attn", backend="TRITON_MLA", width=576, latent=True),
)
SPARSE = (
    # DeepSeek-V3.2: rows of 656 bytes, and an indexer that keeps its scales behind the rows of a page.
    Layer(
        name="model.layers.0.self_attn.attn",
        backend="FLASHMLA_SPARSE",
        width=576,
        latent=True,
        content_bytes=656,
        dtype=torch.uint8,
    ),
    Layer(
        name="model.layers.0.self_attn.indexer.k_cache",
        backend="DEEPSEEK_V32_INDEXER",
        width=132,
        latent=True,
        dtype=torch.uint8,
    ),
)


@pytest.mark.parametrize("producer_tp,consumer_tp", [(1, 2), (2, 1), (2, 4)])
@pytest.mark.parametrize("blocks", [(16, 64), (64, 16), (48, 32)])
def test_latent_rows_between_unlike_blocks(producer_tp: int, consumer_tp: int, blocks: tuple[int, int]) -> None:
    producers = ranks(LATENT, producer_tp, blocks[0])
    for rank in range(consumer_tp):
        pull(Side.of(LATENT, block_size=blocks[1], tp=consumer_tp, rank=rank), producers, 90)


def test_sparse_latents_and_their_indexer_move_in_whole_pages() -> None:
    producers = ranks(SPARSE, 2, 64)
    for rank in range(4):
        consumer = Side.of(SPARSE, block_size=64, tp=4, rank=rank)
        assert {region.encoding for region in consumer.table.regions} == {
            "opaque:FLASHMLA_SPARSE", "opaque:DEEPSEEK_V32_INDEXER",
        }  # fmt: skip
        pull(consumer, producers, 128)


def test_sparse_latents_between_unlike_blocks_are_refused_by_name() -> None:
    with pytest.raises(
        IncompatiblePeer, match=r"self_attn.attn/kv and 1 more: kernel block size: producer has 64, consumer has 128"
    ):
        planned(Side.of(SPARSE, block_size=128), ranks(SPARSE, 1, 64))


# --- a draft on one side ---------------------------------------------------------------------------------------------

TARGET = tuple(Layer(name=f"model.layers.{place}.self_attn.attn", backend="FLASH_ATTN", width=8) for place in range(4))
DRAFT = Layer(name="model.layers.4.self_attn.attn", backend="FLASH_ATTN", width=8)


def test_a_draft_on_the_decode_side_only_stays_empty_and_the_request_is_served() -> None:
    """vllm#49230, vllm-ascend#8540: four layers are loaded, the fifth, a draft's, is said not to be."""
    producer = Side.of(TARGET, block_size=16, hidden=4)
    consumer = Side.of((*TARGET, DRAFT), block_size=16, hidden=4)
    assert consumer.table.draft_layers == (DRAFT.name,)
    plans = pull(consumer, [producer], 40)
    assert plans[Rank()].layers == tuple(layer.name for layer in TARGET)
    notes = [found for found in compare(producer.table, consumer.table) if found.field == "draft layers"]
    assert [(note.layer, note.severity) for note in notes] == [(DRAFT.name, Severity.NOTE)]


def test_a_draft_on_the_prefill_side_only_is_left_there() -> None:
    producer = Side.of((*TARGET, DRAFT), block_size=16, hidden=4)
    consumer = Side.of(TARGET, block_size=32, hidden=4)
    pull(consumer, [producer], 40)
    assert DRAFT.name not in agree(producer.table, consumer.table).layers


def test_a_layer_that_is_no_drafts_is_refused() -> None:
    """The same five layers, of a model that has five."""
    with pytest.raises(IncompatiblePeer, match=rf"{DRAFT.name}/k and 1 more: layer set"):
        planned(Side.of((*TARGET, DRAFT), block_size=16, hidden=5), [Side.of(TARGET, block_size=16, hidden=5)])
