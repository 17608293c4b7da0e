"""core/handshake.py and its rules in core/comparison.py: every difference is named, at once, with its remedy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import pytest

from mooncake_hetero_tp.core.handshake import Agreement, Sides, agree, combine, compare, explain
from mooncake_hetero_tp.core.layout import KVLayout
from mooncake_hetero_tp.core.regions import Axis, Buffer, Group, RankTable, Region, attention_spans, whole_span
from mooncake_hetero_tp.core.tables import validate_table
from mooncake_hetero_tp.errors import IncompatiblePeer
from mooncake_hetero_tp.types import Mismatch, Severity

BLOCKS = 8


@dataclass(frozen=True)
class Engine:
    """What one rank of a small dense engine would tell; `table` spells it out as regions."""

    tp: int = 1
    rank: int = 0
    pp: int = 1
    layout: str = "LBHNC"
    block_size: int = 16
    kernel_block_size: int = 16
    heads: int = 4
    head_size: int = 64
    dtype: str = "bfloat16"
    item_bytes: int = 2
    encoding: str = "packed"
    layers: tuple[str, ...] = ("model.layers.0.attn", "model.layers.1.attn")
    model: tuple[tuple[str, str], ...] = (("kv_heads", "4"), ("head_size", "64"))

    @property
    def table(self) -> RankTable:
        strides = KVLayout.from_name(self.layout).strides(self.counts, self.item_bytes)
        regions = tuple(self.region(name, place, strides) for place, name in enumerate(self.layers))
        length = strides[self.layout[0]] * self.counts[self.layout[0]]
        return RankTable(
            tp_size=self.tp,
            pp_size=self.pp,
            layout=self.layout,
            model=dict(self.model),
            groups=(Group(0, "attention", self.block_size, self.kernel_block_size),),
            regions=regions,
            buffers=(Buffer(4096, length),),
        )

    @property
    def counts(self) -> dict[str, int]:
        pages = BLOCKS * self.block_size // self.kernel_block_size
        heads = max(self.heads // self.tp, 1)
        return {"L": len(self.layers), "B": pages, "H": heads, "N": self.kernel_block_size, "C": 2 * self.head_size}

    def region(self, layer: str, place: int, strides: dict[str, int]) -> Region:
        counts = self.counts
        return Region(
            layer=layer,
            component="kv",
            group=0,
            base=4096 + place * strides["L"],
            block_stride=strides["B"],
            num_blocks=counts["B"],
            spans=attention_spans(self.heads, self.tp, self.rank),
            unit=Axis(counts["H"], strides["H"]),
            token=Axis(counts["N"], strides["N"]),
            channel=Axis(counts["C"], strides["C"]),
            item_bytes=self.item_bytes,
            dtype=self.dtype,
            encoding=self.encoding,
        )


P = Engine()
D = Engine(tp=2)


def with_regions(table: RankTable, **changes: object) -> RankTable:
    """All regions of a table with some fields replaced."""
    regions = tuple(msgspec.structs.replace(region, **changes) for region in table.regions)
    return msgspec.structs.replace(table, regions=regions)


def with_groups(table: RankTable, *groups: Group) -> RankTable:
    return msgspec.structs.replace(table, groups=groups)


def refusals(producer: RankTable, consumer: RankTable) -> list[Mismatch]:
    return [found for found in compare(producer, consumer) if found.severity is Severity.REFUSE]


def fields(found: Sequence[Mismatch], severity: Severity | None = None) -> list[str]:
    return [difference.field for difference in found if severity in {None, difference.severity}]


def test_the_fixture_is_a_valid_engine() -> None:
    for engine in (P, D, replace(P, layout="BLNHC"), replace(P, kernel_block_size=4)):
        validate_table(engine.table)


def test_an_engine_agrees_with_itself() -> None:
    assert compare(P.table, P.table) == ()
    assert agree(P.table, P.table) == Agreement(
        tp=Sides(1, 1),
        pp=Sides(1, 1),
        layout=Sides("LBHNC", "LBHNC"),
        groups=agree(P.table, P.table).groups,
        encodings=(Sides("packed", "packed"),),
        layers=("model.layers.0.attn", "model.layers.1.attn"),
        bytes_per_token=2 * 4 * 2 * 64 * 2,
        bytes_per_slot=0,
        run_bytes=4 * 16 * 2 * 64 * 2,
    )


@pytest.mark.parametrize(
    "field,producer,consumer,values",
    [
        ("dtype", P.table, replace(D, dtype="float16").table, ("bfloat16", "float16")),
        ("item bytes", P.table, replace(D, item_bytes=4).table, ("2", "4")),
        ("channels", P.table, replace(D, head_size=32).table, ("128", "64")),
        ("model.kv_heads", P.table, replace(D, model=(("kv_heads", "8"), ("head_size", "64"))).table, ("4", "8")),
        ("model.head_size", P.table, replace(D, model=(("kv_heads", "4"),)).table, ("64", "(absent)")),
        ("model.cache_dtype", replace(P, model=(*P.model, ("cache_dtype", "fp8"))).table, D.table, ("fp8", "(absent)")),
        ("units", replace(P, heads=2).table, replace(D, rank=1).table, ("up to 1 at TP1", "up to 3 at TP2")),
        ("units", replace(D, heads=8, rank=1).table, P.table, ("up to 7 at TP2", "up to 3 at TP1")),
        ("groups", P.table, with_groups(D.table, *D.table.groups, Group(1, "attention", 16, 16)), ("1", "2")),
        (
            "kind of group 0",
            P.table,
            with_groups(D.table, Group(0, "sliding_window", 16, 16)),
            ("attention", "sliding"),
        ),
        ("layers", P.table, replace(D, layers=(*D.layers, "draft.0")).table, ("(absent)", "kv")),
        ("components", with_regions(P.table, component="k"), D.table, ("k", "kv")),
        (
            "encoding",
            replace(P, encoding="opaque:x").table,
            replace(P, encoding="packed").table,
            ("opaque:x", "packed"),
        ),
        ("encoding", replace(P, encoding="opaque:x").table, replace(P, encoding="opaque:y").table, ("opaque:x", "y")),
        (
            "kernel block size",
            replace(P, encoding="opaque:x").table,
            replace(P, encoding="opaque:x", block_size=32, kernel_block_size=32).table,
            ("16", "32"),
        ),
    ],
)
def test_a_difference_that_matters_is_refused_by_name(
    field: str, producer: RankTable, consumer: RankTable, values: tuple[str, str]
) -> None:
    found = refusals(producer, consumer)
    assert field in fields(found)
    one = next(difference for difference in found if difference.field == field)
    assert values[0] in one.producer
    assert values[1] in one.consumer
    assert one.effect
    assert one.remedy
    with pytest.raises(IncompatiblePeer) as refusal:
        agree(producer, consumer)
    assert refusal.value.mismatches == tuple(found)
    for word in (field, one.producer, one.consumer, one.effect, one.remedy):
        assert word in str(refusal.value)


def test_a_single_difference_is_a_single_refusal() -> None:
    other = msgspec.structs.replace(D.table, model={"kv_heads": "4", "head_size": "128"})
    assert fields(refusals(P.table, other)) == ["model.head_size"]
    assert fields(refusals(P.table, replace(D, dtype="float16").table)) == ["dtype"]
    assert fields(refusals(P.table, replace(D, layers=(*D.layers, "draft.0")).table)) == ["layers"]


def test_all_differences_come_at_once() -> None:
    other = replace(D, dtype="float32", item_bytes=4, head_size=32, layout="BLNHC", block_size=32, kernel_block_size=8)
    consumer = with_groups(
        replace(other, model=(("kv_heads", "2"),)).table, Group(0, "mla", 32, 8), Group(1, "x", 1, 1)
    )
    assert set(fields(compare(P.table, consumer))) == {
        "model.kv_heads", "model.head_size", "tp", "groups", "kind of group 0", "block_size of group 0",
        "kernel_block_size of group 0", "dtype", "item bytes", "channels",
    }  # fmt: skip


def test_what_the_plan_converts_is_only_noted() -> None:
    other = replace(D, pp=2, layout="LHBNC", block_size=64, kernel_block_size=64, encoding="transposed")
    found = compare(replace(P, block_size=64, kernel_block_size=32).table, other.table)
    assert fields(found, Severity.REFUSE) == []
    assert fields(found) == ["tp", "pp", "kernel_block_size of group 0", "encoding", "layout"]
    assert {difference.severity for difference in found[:-1]} == {Severity.NOTE}
    assert [difference.layer for difference in found if difference.field == "encoding"] == [
        "model.layers.0.attn/kv and 1 more"
    ]


def test_block_sizes_that_follow_from_tp_are_converted() -> None:
    """vllm#49612: hybrid blocks of 4192 tokens (kernel 32) at TP1 and 2112 (kernel 64) at TP4."""
    ours = replace(P, block_size=4192, kernel_block_size=32)
    theirs = replace(P, tp=4, block_size=2112, kernel_block_size=64)
    found = compare(ours.table, theirs.table)
    assert [(one.producer, one.consumer) for one in found if "block_size" in one.field] == [
        ("4192", "2112"),
        ("32", "64"),
    ]
    group = agree(ours.table, theirs.table).groups[0]
    assert (group.block_size, group.kernel_block_size) == (Sides(4192, 2112), Sides(32, 64))


@pytest.mark.parametrize(
    "producer,consumer,run_bytes",
    [
        (replace(P, layout="BLNHC"), replace(D, layout="BLNHC"), 512),
        (P, replace(D, layout="LBNHC"), 256),
        (P, D, 2 * 4096),
        (P, replace(D, tp=4), 4096),
        (replace(P, layout="LBNHC"), replace(D, tp=1, layout="BLNHC"), 16384),
    ],
)
def test_tiny_copies_ask_for_staging(producer: Engine, consumer: Engine, run_bytes: int) -> None:
    """Only where a page falls into several pieces: one small piece is no fault of the layout."""
    assert agree(producer.table, consumer.table).run_bytes == run_bytes
    asked = fields(compare(producer.table, consumer.table), Severity.STAGING) == ["layout"]
    whole = consumer.counts["H"] * consumer.counts["N"] * consumer.counts["C"] * 2
    assert asked == (run_bytes < whole)


def test_keys_and_values_side_by_side_count_as_one_run() -> None:
    """K and V as separate components that lie together on both sides move as one."""
    tables = []
    for engine in (P, D):
        regions = []
        for region in engine.table.regions:
            half = msgspec.structs.replace(region, channel=Axis(64, 2), component="k")
            regions += [half, msgspec.structs.replace(half, component="v", base=region.base + 128)]
        tables.append(msgspec.structs.replace(engine.table, regions=tuple(regions)))
    assert agree(*tables).run_bytes == agree(P.table, D.table).run_bytes == 8192
    assert agree(*tables).bytes_per_token == agree(P.table, D.table).bytes_per_token


# --- layers ----------------------------------------------------------------------------------------------------------


def test_a_draft_model_on_one_side_only() -> None:
    """vllm#49230: not loaded, whichever side has it; the model's own layers are."""
    draft = "draft.layers.0.attn"
    more = msgspec.structs.replace(replace(P, layers=(*P.layers, draft)).table, draft_layers=(draft,))
    for producer, consumer in ((more, P.table), (P.table, more)):
        (note,) = compare(producer, consumer)
        assert (note.field, note.severity, note.layer) == ("draft layers", Severity.NOTE, draft)
        assert note.effect.startswith("not loaded")
        assert agree(producer, consumer).layers == P.layers


def test_a_layer_of_the_model_on_one_side_only() -> None:
    more = replace(P, layers=(*P.layers, "model.layers.2.attn"))
    for producer, consumer in ((more, P), (P, more)):
        (refusal,) = compare(producer.table, consumer.table)
        assert (refusal.severity, refusal.layer) == (Severity.REFUSE, "model.layers.2.attn")


def test_a_stage_may_lack_layers() -> None:
    """vllm#56033: of eight layers a stage of PP4 has two, a stage of PP2 four; pairing is by name."""
    names = tuple(f"model.layers.{i}.attn" for i in range(8))
    stages = [replace(P, pp=4, layers=names[i : i + 2]) for i in range(0, 8, 2)]
    readers = [replace(P, pp=2, layers=names[i : i + 4]) for i in range(0, 8, 4)]
    shared = [[agree(stage.table, reader.table).layers for reader in readers] for stage in stages]
    assert shared == [[names[0:2], ()], [names[2:4], ()], [(), names[4:6]], [(), names[6:8]]]
    assert agree(stages[3].table, readers[0].table).run_bytes == 0
    for stage in stages:
        assert all(fields(compare(stage.table, reader.table)) == ["pp"] for reader in readers)


def test_a_whole_engine_shows_what_it_lacks_even_to_stages() -> None:
    stage = replace(P, pp=2, layers=(P.layers[1],))
    assert fields(compare(P.table, stage.table)) == ["pp"]
    assert fields(compare(stage.table, P.table)) == ["pp"]
    other = replace(P, pp=2, layers=("model.layers.7.attn",))
    assert fields(refusals(P.table, other.table)) == ["layers"]
    assert fields(refusals(other.table, P.table)) == ["layers"]


def test_a_name_twice_on_one_side_is_an_error() -> None:
    twice = msgspec.structs.replace(P.table, regions=(*P.table.regions, P.table.regions[0]))
    for found in (refusals(twice, P.table), refusals(P.table, twice)):
        assert [(one.field, one.layer) for one in found] == [("occurrences", P.layers[0])]
        assert {found[0].producer, found[0].consumer} == {"2 x kv", "1 x kv"}


def test_many_layers_are_told_once() -> None:
    names = tuple(f"model.layers.{i}.attn" for i in range(80))
    found = compare(replace(P, layers=names).table, replace(D, layers=names, dtype="float16").table)
    assert fields(found) == ["tp", "dtype"]
    assert found[1].layer == "model.layers.0.attn/kv and 79 more"


# --- replicas, opaque pages, groups ----------------------------------------------------------------------------------


def indexer(engine: Engine, length_bytes: int = 32768) -> RankTable:
    """The engine's table and an indexer cache that every rank holds whole: 128 tokens a page."""
    table = replace(engine, block_size=128, kernel_block_size=128, layers=("model.layers.0.attn",)).table
    base = table.buffers[0].end
    width = length_bytes // 128
    cache = Region(
        layer="model.layers.0.indexer",
        component="index",
        group=0,
        base=base,
        block_stride=length_bytes,
        num_blocks=BLOCKS,
        spans=whole_span(1),
        unit=Axis(1, length_bytes),
        token=Axis(128, width),
        channel=Axis(width // 2, 2),
        item_bytes=2,
        dtype="bfloat16",
        encoding="packed",
    )
    buffers = (*table.buffers, Buffer(base, length_bytes * BLOCKS))
    return msgspec.structs.replace(table, regions=(*table.regions, cache), buffers=buffers)


def test_replication_is_a_property_of_a_region() -> None:
    """vllm#55523: heads are cut four ways beside an indexer cache that all ranks hold whole."""
    consumer = indexer(P)
    for rank in range(4):
        producer = indexer(replace(P, tp=4, rank=rank))
        assert fields(refusals(producer, consumer)) == []
        assert agree(producer, consumer).bytes_per_token == 2 * 64 * 2 + 128 * 2
    found = refusals(indexer(replace(P, tp=4)), indexer(P, 131072))
    assert [(one.field, one.layer) for one in found] == [("channels", "model.layers.0.indexer/index")]
    assert (found[0].producer, found[0].consumer) == ("128", "512")


@pytest.mark.parametrize("tp", [8, 16])
def test_replicated_heads_are_no_mismatch(tp: int) -> None:
    """vllm#52516: four KV heads at TP8; ranks 2i and 2i+1 hold head i whole."""
    for rank in range(tp):
        wide = replace(P, tp=tp, rank=rank).table
        assert fields(refusals(P.table, wide)) == fields(refusals(wide, P.table)) == []
        assert agree(P.table, wide).run_bytes == 4096


def test_opaque_pages_are_cut_only_by_outermost_units() -> None:
    opaque = replace(P, encoding="opaque:new_backend")
    assert fields(compare(opaque.table, opaque.table)) == []
    assert fields(refusals(opaque.table, replace(opaque, tp=2).table)) == []
    inner = replace(opaque, layout="LBNHC")
    assert fields(compare(inner.table, inner.table)) == []
    cut = refusals(inner.table, replace(inner, tp=2).table)
    assert "unit_order" in fields(cut)
    assert "units 0..3" in cut[-1].producer


def test_group_order_may_differ() -> None:
    """vllm#52592, vllm#32204: groups are matched by the layers they hold, not by their place."""
    names = ("a", "b", "c")
    kinds = {"a": "state", "b": "state", "c": "attention"}
    tables = []
    for order in (("a", "b", "c"), ("c", "b", "a")):
        table = replace(P, layers=names).table
        groups = tuple(Group(i, kinds[name], 16, 16) for i, name in enumerate(order))
        regions = tuple(msgspec.structs.replace(region, group=order.index(region.layer)) for region in table.regions)
        tables.append(msgspec.structs.replace(table, groups=groups, regions=regions))
    assert compare(*tables) == ()
    agreed = agree(*tables)
    assert [(group.kind, group.index) for group in agreed.groups] == [
        ("state", Sides(0, 2)),
        ("state", Sides(1, 1)),
        ("attention", Sides(2, 0)),
    ]
    assert agreed.bytes_per_slot == 2 * 16 * agreed.bytes_per_token


# --- telling people --------------------------------------------------------------------------------------------------


def test_explain_puts_the_worst_first() -> None:
    found = compare(P.table, replace(D, dtype="float16", layout="BLNHC").table)
    lines = explain(found).splitlines()
    assert lines[0].startswith("[refuse] ")
    assert "producer has bfloat16, consumer has float16" in lines[0]
    assert [line.split()[0] for line in lines[1:]] == ["[note]"]
    assert explain(()) == ""


def test_combine_adds_up_an_engine() -> None:
    ranks = [replace(P, tp=2, rank=rank) for rank in range(2)]
    whole = combine([agree(P.table, rank.table) for rank in ranks])
    assert whole == msgspec.structs.replace(
        agree(P.table, ranks[0].table), bytes_per_token=agree(P.table, P.table).bytes_per_token
    )


def test_an_agreement_survives_the_wire() -> None:
    agreed = agree(P.table, D.table)
    assert msgspec.json.decode(msgspec.json.encode(agreed), type=Agreement) == agreed
