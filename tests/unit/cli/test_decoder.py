"""A decoder rebuilt from a producer is, region for region, what such an engine would register itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import msgspec
import pytest

from mooncake_hetero_tp.cli.decoder import build_decoder
from mooncake_hetero_tp.cli.wish import read_wish
from mooncake_hetero_tp.core.layout import VLLM_LAYOUTS, KVLayout
from mooncake_hetero_tp.core.plan import plan_pulls, prove
from mooncake_hetero_tp.core.regions import Group, RankTable, Region, attention_spans, whole_span
from mooncake_hetero_tp.core.tables import validate_table
from mooncake_hetero_tp.errors import ConfigError, IncompatiblePeer
from mooncake_hetero_tp.types import Rank
from mooncake_hetero_tp.vllm_adapter.components import LayerFacts, PageView
from mooncake_hetero_tp.vllm_adapter.encodings import encode
from tests.tables import SRC, Dense, producer_tables, region, table

Tables = dict[Rank, RankTable]


def regions(held: Tables) -> dict[tuple[Rank, str], Region]:
    """Regions of all ranks, their places counted from the rank's first buffer."""
    found = {}
    for rank, one in held.items():
        for own in one.regions:
            start = one.buffers[0].address
            found[rank, own.name] = msgspec.structs.replace(own, base=own.base - start)
    return found


def decoder(producers: Tables, wish: str) -> Tables:
    return build_decoder(producers, read_wish(wish)).tables


# --- pages that keep a token's content together ----------------------------------------------------------------------


@pytest.mark.parametrize("layout,tp", [*product(VLLM_LAYOUTS, (1, 2))])
def test_packed_pages_in_every_layout_and_tp_size(layout: str, tp: int) -> None:
    producers = producer_tables(Dense(4, tp=tp, layers=3, layout=layout, tokens=4))
    for asked_layout, asked_tp, tokens in product(VLLM_LAYOUTS, (1, 2, 4, 8), (4, 8)):
        wanted = producer_tables(
            Dense(4, tp=asked_tp, layers=3, layout=asked_layout, tokens=tokens, blocks=8 * 4 // tokens)
        )
        found = decoder(producers, f"tp={asked_tp},layout={asked_layout},block_size={tokens}")
        assert regions(found) == regions(wanted)
        assert {rank: (one.tp_size, one.layout, one.groups) for rank, one in found.items()} == {
            rank: (asked_tp, asked_layout, one.groups) for rank, one in wanted.items()
        }


def test_nothing_asked_is_the_producer_without_its_addresses_and_padding() -> None:
    padded = producer_tables(Dense(4, tp=2, layers=2, page_bytes=1024))
    dense = producer_tables(Dense(4, tp=2, layers=2))
    assert regions(decoder(padded, "")) == regions(decoder(dense, "")) == regions(dense)


def test_kernel_blocks_inside_logical_ones() -> None:
    whole = producer_tables(Dense(4, layers=2, tokens=8, blocks=4))
    split = producer_tables(Dense(4, layers=2, tokens=8, kernel_tokens=2, blocks=4))
    assert regions(decoder(whole, "kernel_block_size=2")) == regions(split)
    assert regions(decoder(split, "kernel_block_size=8")) == regions(whole)
    # Split pages stay as they are when the logical block grows, whole ones grow with it.
    assert decoder(split, "block_size=16")[Rank()].groups == (Group(0, "attention", 16, 2),)
    assert decoder(whole, "block_size=16")[Rank()].groups == (Group(0, "attention", 16, 16),)


def test_capacity_in_tokens_is_kept_as_far_as_blocks_allow() -> None:
    producers = producer_tables(Dense(2, tokens=4, blocks=7))
    found = decoder(producers, "block_size=16,kernel_block_size=8")[Rank()]
    assert [one.num_blocks for one in found.regions] == [2 * 2] * 2


# --- what real backends register -------------------------------------------------------------------------------------


def view(layout: str, heads: int, tokens: int, content_bytes: int) -> tuple[PageView, int]:
    """The view of one layer's page that vLLM hands over, in an array of one layer; and the stride of pages."""
    counts = {"L": 1, "B": 8, "H": heads, "N": tokens, "C": content_bytes}
    step = KVLayout.from_name(layout).strides(counts, 1)
    page = PageView(
        heads=heads, tokens=tokens, content_bytes=content_bytes, head_stride=step["H"], token_stride=step["N"]
    )
    return page, step["B"]


class Backend(msgspec.Struct, frozen=True, kw_only=True):
    """An engine of one layer as the adapter would describe it; sizes are the model's."""

    name: str
    isa: str | None = None
    heads: int = 4
    head_size: int = 8
    latent: bool = False
    quantisation: str = "NONE"
    slots: int | None = None
    tp: int = 1
    tokens: int = 16
    layout: str = "LBHNC"

    def tables(self) -> Tables:
        return {Rank(tp=rank): self._table(rank) for rank in range(self.tp)}

    def _table(self, rank: int) -> RankTable:
        spans = whole_span(1) if self.latent else attention_spans(self.heads, self.tp, rank)
        held = sum(span.count for span in spans)
        slots = 2 * held if self.quantisation == "NVFP4" else self.slots or held
        page, block_stride = view(self.layout, slots, self.tokens, self._content_bytes(held))
        encoding, components = encode(self._facts(held), page)
        own = [
            Region(
                layer="layers.0",
                component=part.name,
                group=0,
                base=SRC + part.offset,
                block_stride=block_stride,
                num_blocks=8,
                spans=spans,
                unit=part.unit,
                token=part.token,
                channel=part.channel,
                item_bytes=part.item_bytes,
                dtype=part.dtype or "bfloat16",
                encoding=encoding,
            )
            for part in components
        ]
        made = table(own, self.tp)
        return msgspec.structs.replace(made, layout=self.layout, model={"kv_cache_dtype": "bfloat16"})

    def _content_bytes(self, held: int) -> int:
        match self.quantisation:
            case "NVFP4":
                return self.head_size // 2 + self.head_size // 16
            case "FP8_PER_TOKEN_HEAD":
                return 2 * (self.head_size + 4)
        sides = 1 if self.latent or self.name == "B12X" else 2
        return self.head_size * 2 * sides * (held if self.slots else 1)

    def _facts(self, held: int) -> LayerFacts:
        return LayerFacts(
            layer="layers.0",
            backend=self.name,
            isa=self.isa,
            latent=self.latent,
            kv_heads=held,
            head_size=self.head_size,
            head_size_v=self.head_size,
            item_bytes=2 if self.quantisation == "NONE" else 1,
            dtype="bfloat16",
            own_slots=self.slots is not None or self.quantisation == "NVFP4",
            own_content=self.quantisation != "NONE",
            quantisation=self.quantisation,
        )

    def changed(self, **settings: Any) -> Backend:
        return msgspec.structs.replace(self, **settings)


CPU = Backend(name="CPU_ATTN", isa="vec")
LATENT = Backend(name="TRITON_MLA", latent=True)
UNKNOWN = Backend(name="CPU_ATTN", isa="amx")
SLOTS = Backend(name="ROCM_ATTN", slots=2)
PLANES = Backend(name="B12X", slots=2)
INLINE_SCALES = Backend(name="TRITON_ATTN", quantisation="FP8_PER_TOKEN_HEAD")
SIDE_SCALES = Backend(name="FLASHINFER", quantisation="NVFP4", head_size=16)
TOKEN_MAJOR = {"layout": "LBNHC"}


@pytest.mark.parametrize(
    "producer,wish,changes",
    [
        (CPU, "tp=2", {"tp": 2}),
        (CPU.changed(tp=2), "tp=1", {"tp": 1}),
        (CPU, "block_size=32", {"tokens": 32}),
        (CPU.changed(tokens=32), "tp=4,block_size=16", {"tp": 4, "tokens": 16}),
        (CPU, "tp=8,layout=BLHNC", {"tp": 8, "layout": "BLHNC"}),
        (CPU.changed(heads=1), "tp=2", {"tp": 2}),
        (LATENT, "tp=4", {"tp": 4}),
        (LATENT.changed(tp=4), "tp=1,block_size=64", {"tp": 1, "tokens": 64}),
        (LATENT, "layout=BLNHC", {"layout": "BLNHC"}),
        (UNKNOWN, "tp=2", {"tp": 2}),
        (UNKNOWN, "tp=2,layout=LBNHC", {"tp": 2} | TOKEN_MAJOR),
        (UNKNOWN, "block_size=32", {"tokens": 32}),
        (SLOTS, "tp=2", {"tp": 2}),
        (SLOTS, "layout=LBNHC", TOKEN_MAJOR),
        (SLOTS.changed(layout="LBNHC", tp=2), "tp=1,layout=LBHNC", {"tp": 1, "layout": "LBHNC"}),
        (SLOTS, "block_size=32", {"tokens": 32}),
        (PLANES, "tp=2,block_size=32", {"tp": 2, "tokens": 32}),
        (PLANES.changed(tp=2), "tp=1,layout=BLHNC", {"tp": 1, "layout": "BLHNC"}),
        (INLINE_SCALES, "tp=2,block_size=32", {"tp": 2, "tokens": 32}),
        (INLINE_SCALES.changed(tp=2), "tp=1,layout=LBNHC", {"tp": 1} | TOKEN_MAJOR),
        (SIDE_SCALES, "tp=2,block_size=32", {"tp": 2, "tokens": 32}),
        (SIDE_SCALES.changed(tp=2), "tp=1,layout=LBNHC", {"tp": 1} | TOKEN_MAJOR),
        (SIDE_SCALES.changed(**TOKEN_MAJOR), "tp=4,layout=LBHNC", {"tp": 4, "layout": "LBHNC"}),
    ],
)
def test_a_backends_own_tables(producer: Backend, wish: str, changes: Mapping[str, Any]) -> None:
    wanted = producer.changed(**changes).tables()
    found = decoder(producer.tables(), wish)
    tokens = producer.tokens * 8
    for rank, one in regions(wanted).items():
        pages = tokens // one.token.count
        assert regions(found)[rank] == msgspec.structs.replace(one, num_blocks=pages), (
            f"{wish}: {one} is not {regions(found)[rank]}"
        )
    assert len(regions(found)) == len(regions(wanted))


def test_a_dtype_scales_all_distances_and_the_models_field() -> None:
    found = decoder(CPU.tables(), "dtype=float32")[Rank()]
    for one, own in zip(found.regions, CPU.tables()[Rank()].regions, strict=True):
        assert (one.item_bytes, one.dtype, one.channel.count) == (4, "float32", own.channel.count)
        assert (one.unit.stride, one.token.stride) == (2 * own.unit.stride, 2 * own.token.stride)
    assert found.model == {"kv_cache_dtype": "float32"}


@pytest.mark.parametrize("dtype", ["bfloat16", "uint8"])
def test_a_dtype_by_either_of_its_names_changes_nothing(dtype: str) -> None:
    own = CPU.tables()[Rank()]
    told = msgspec.structs.replace(own, model={"kv_cache_dtype": "uint8"})
    assert regions(decoder({Rank(): told}, f"dtype={dtype}")) == regions(decoder({Rank(): told}, ""))


# --- groups, stages, states ------------------------------------------------------------------------------------------


def hybrid(tp: int = 1) -> Tables:
    """Four attention layers and a state layer, two groups."""
    held = {}
    for rank in range(tp):
        attention = Dense(4, tp=tp, rank=rank, layers=4).regions()
        start = attention[-1].base + (1 << 20)
        # Three heads' worth of state rows, channels inside units inside rows, as SD conv states lie.
        units = 4 // tp
        state = region(
            "layers.4", "conv", base=start, pages=(8, 4096), token=(3, units * 16), spans=attention_spans(4, tp, rank),
            unit=16, channels=16, group=1, encoding="conv",
        )  # fmt: skip
        ssm = region(
            "layers.4", "ssm", base=start + 3 * units * 16, pages=(8, 4096), token=(1, 0),
            spans=attention_spans(4, tp, rank), unit=32, channels=32, group=1, encoding="ssm",
        )  # fmt: skip
        groups = (Group(0, "attention", 4, 4), Group(1, "state", 4, 4))
        held[Rank(tp=rank)] = table([*attention, state, ssm], tp, groups=groups)
    return held


def test_states_are_dense_in_the_producers_order_of_axes() -> None:
    one, two = decoder(hybrid(), ""), decoder(hybrid(), "tp=2")
    found = regions(one)[Rank(), "layers.4/conv"]
    assert (found.unit.stride, found.token.stride, found.channel.stride) == (16, 64, 1)
    found = regions(two)[Rank(tp=1), "layers.4/conv"]
    assert (found.unit.count, found.unit.stride, found.token.stride) == (2, 16, 32)
    first, second = (regions(two)[Rank(tp=1), f"layers.4/{part}"] for part in ("conv", "ssm"))
    assert second.base - first.base == 3 * 2 * 16
    assert found.block_stride == 3 * 2 * 16 + 2 * 32


def test_block_sizes_are_those_of_groups_with_tokens() -> None:
    groups = decoder(hybrid(), "block_size=8")[Rank()].groups
    assert groups == (Group(0, "attention", 8, 8), Group(1, "state", 4, 4))
    assert decoder(hybrid(), "block_size=8/99")[Rank()].groups == groups


def test_units_that_all_ranks_of_a_producer_hold_are_not_cut() -> None:
    held = {}
    for rank in range(2):
        own = region("layers.0", "x", base=SRC, pages=(8, 64), token=(4, 16), spans=whole_span(4), unit=4, channels=4)
        held[Rank(tp=rank)] = table([own], 2)
    assert [one.regions[0].spans for one in decoder(held, "tp=4").values()] == [whole_span(4)] * 4


def stages_of(held: Tables) -> list[list[str]]:
    return [list(dict.fromkeys(own.layer for own in one.regions)) for rank, one in held.items() if rank.tp == 0]


def test_stages_are_cut_as_vllm_cuts_hidden_layers() -> None:
    producers = producer_tables(Dense(2, layers=5))
    assert [len(names) for names in stages_of(decoder(producers, "pp=2"))] == [3, 2]
    # The same names with layers between them that have no KV cache, and a draft model's after the last.
    sparse = producers[Rank()]
    numbers = {f"layers.{place}": f"layers.{number}" for place, number in enumerate((1, 3, 5, 7, 8))}
    renamed = tuple(msgspec.structs.replace(own, layer=numbers[own.layer]) for own in sparse.regions)
    told = msgspec.structs.replace(sparse, regions=renamed, model={"layers": "8"})
    assert stages_of(decoder({Rank(): told}, "pp=2")) == [
        ["layers.1", "layers.3"],
        ["layers.5", "layers.7", "layers.8"],
    ]


def test_a_producers_stages_are_joined() -> None:
    held = {
        Rank(pp=stage): msgspec.structs.replace(
            Dense(2, layers=2, first_layer=2 * stage, base=SRC + (stage << 30)).table(), pp_size=2
        )
        for stage in range(2)
    }
    assert stages_of(decoder(held, "pp=1")) == [[f"layers.{place}" for place in range(4)]]
    assert regions(decoder(held, "pp=1")) == regions(producer_tables(Dense(2, layers=4)))


# --- what cannot be --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wish,word",
    [
        ("kernel_block_size=3", "kernel_block_size 3 does not divide block_size 16 of group 0"),
        ("block_size=16/32", "block_size lists 2 groups, the producer has 1"),
        ("pp=2", "pp=2 leaves stage 1 without a KV cache layer"),
        ("block_size=4194304", "a page of 4 heads x 4194304 tokens"),
    ],
)
def test_settings_that_do_not_fit_are_errors(wish: str, word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        decoder(CPU.tables(), wish)
    assert word in str(caught.value)


def test_the_producers_kernel_block_may_not_fit() -> None:
    split = producer_tables(Dense(4, tokens=8, kernel_tokens=4))
    with pytest.raises(ConfigError, match=r"kernel_block_size 4 \(the producer's\) does not divide block_size 6"):
        decoder(split, "block_size=6")


@pytest.mark.parametrize(
    "wish,field,values,remedy",
    [
        ("tp=3", "tp", ("TP1", "TP3"), "tensor_parallel_size"),
        ("layout=LBHCN", "layout", ("LBHNC", "LBHCN"), "ends in C"),
        ("layout=LBNHC", "layout", ("LBHNC", "LBNHC"), "ends in NC"),
        (
            "kernel_block_size=8,layout=BLHNC",
            "kernel_block_size",
            ("16 of 16 tokens in LBHNC", "8 of 16 tokens in BLHNC"),
            "kernel_block_size = block_size",
        ),
    ],
)
def test_memory_that_no_engine_has_is_refused(wish: str, field: str, values: tuple[str, str], remedy: str) -> None:
    with pytest.raises(IncompatiblePeer) as caught:
        decoder(CPU.tables(), wish)
    (found,) = caught.value.mismatches
    assert (found.field, found.producer, found.consumer) == (field, *values)
    assert remedy in found.remedy


@pytest.mark.parametrize(
    "producer,dtypes",
    [(INLINE_SCALES, "bfloat16 and float32"), (SIDE_SCALES, "bfloat16"), (UNKNOWN, "bfloat16"), (SLOTS, "bfloat16")],
)
def test_pages_with_scales_or_of_unknown_content_have_no_other_dtype(producer: Backend, dtypes: str) -> None:
    with pytest.raises(IncompatiblePeer) as caught:
        decoder(producer.tables(), "dtype=float16,tp=2")
    (found,) = caught.value.mismatches
    assert (found.field, found.producer, found.consumer, found.layer) == ("dtype", dtypes, "float16", "layers.0")
    assert producer.name in found.effect or "packed.scales" in found.effect
    assert "leave dtype out" in found.remedy


def assumed(held: Tables, wish: str) -> str:
    return "\n".join(build_decoder(held, read_wish(wish)).assumptions)


def test_what_only_the_decoder_knows_is_told() -> None:
    assert "attention backend, which lays pages out as halves.transposed_k" in assumed(CPU.tables(), "tp=2")
    assert "layout and the block sizes" not in assumed(CPU.tables(), "tp=2")
    assert "layout and the block sizes" in assumed(CPU.tables(), "block_size=32")
    assert "VLLM_PP_LAYER_PARTITION" in assumed(producer_tables(Dense(2, layers=2)), "pp=2")
    assert "which are replicated" in assumed(hybrid(), "tp=2")
    assert "which are replicated" not in assumed(hybrid(), "tp=1")


def wishes() -> Iterator[str]:
    for tp, layout, sizes in product((1, 2, 8), ("BLHNC", "LBNHC"), ("", "block_size=8", "block_size=2")):
        yield f"tp={tp},layout={layout},{sizes}"


@pytest.mark.parametrize("wish", [*wishes()])
def test_every_decoder_is_valid_and_can_be_planned(wish: str) -> None:
    producers = hybrid()
    if "tp=8" in wish:
        producers = producer_tables(Dense(4, tp=2, layers=3))
    for rank, one in decoder(producers, wish).items():
        validate_table(one)
        prove(one, plan_pulls(one, producers, prefer=rank.tp))
