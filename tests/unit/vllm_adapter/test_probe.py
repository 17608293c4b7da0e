"""probe: tables that agree with vLLM's own views, and refusals by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from vllm.v1 import kv_cache_interface as kinds

from mooncake_hetero_tp.core.layout import VLLM_LAYOUTS, KVLayout
from mooncake_hetero_tp.core.regions import Group, RankTable, Region, Span
from mooncake_hetero_tp.core.tables import validate_table
from mooncake_hetero_tp.errors import ConfigError
from mooncake_hetero_tp.types import Encoding
from mooncake_hetero_tp.vllm_adapter.probe import build_table, model_fingerprint
from tests.unit.vllm_adapter.doubles import Model, attention_module


def table_of(model: Model, config: Any = None) -> tuple[RankTable, dict[str, torch.Tensor]]:
    config = model.cache_config() if config is None else config
    views = model.allocate(config)
    return build_table(model.engine(config), views), views


def read(region: Region, view: torch.Tensor) -> torch.Tensor:
    """`[page, unit, token, channel]` through the Region's own numbers."""
    item = region.item_bytes
    flat = view.as_strided((view.untyped_storage().nbytes() // item,), (1,), 0)
    start = (region.base - view.untyped_storage().data_ptr()) // item
    axes = (region.unit, region.token, region.channel)
    shape = (region.num_blocks, *(axis.count for axis in axes))
    strides = (region.block_stride // item, *(axis.stride // item for axis in axes))
    return flat.as_strided(shape, strides, start)


PAGES_ARE_RUNS = [name for name in VLLM_LAYOUTS if KVLayout.from_name(name).is_page_outermost]


@pytest.mark.parametrize(
    "layout,padding",
    [*((layout, None) for layout in VLLM_LAYOUTS), *((layout, 64) for layout in PAGES_ARE_RUNS)],
)
def test_regions_address_what_the_views_address(layout: str, padding: int | None) -> None:
    """Pages are padded only where a page is one run; vLLM refuses the rest."""
    model = Model(layout=layout, page_size_padded=None if padding is None else 16 * 4 * 2 * 8 * 4 + padding)
    table, views = table_of(model)
    validate_table(table)
    assert table.layout == layout
    for region in table.regions:
        view = views[region.layer]
        view.copy_(torch.arange(view.numel(), dtype=view.dtype).reshape(view.shape))
        part = view[..., :8] if region.component == "k" else view[..., 8:]
        assert torch.equal(read(region, view), part)


def test_buffers_are_real_allocations_once() -> None:
    table, views = table_of(Model())
    storage = next(iter(views.values())).untyped_storage()
    assert [(buffer.address, buffer.length_bytes) for buffer in table.buffers] == [
        (storage.data_ptr(), storage.nbytes())
    ]


@pytest.mark.parametrize(
    "heads,tp_size,rank,span",
    [(4, 1, 0, Span(0, 0, 4)), (4, 2, 1, Span(0, 2, 2)), (2, 4, 3, Span(0, 1, 1)), (8, 8, 5, Span(0, 5, 1))],
)
def test_spans_come_from_the_model_total(heads: int, tp_size: int, rank: int, span: Span) -> None:
    """vllm#52516: local heads x TP would give 4 heads for 2 heads over TP 4."""
    table, _ = table_of(Model(heads=heads, tp_size=tp_size, tp_rank=rank))
    assert {region.spans for region in table.regions} == {(span,)}
    assert table.model["kv_heads"] == str(heads)


def test_a_head_cut_that_differs_from_vllms_is_refused() -> None:
    model = Model(heads=8, tp_size=2)
    config = model.cache_config(model.spec(num_kv_heads=3))
    with pytest.raises(ConfigError, match=r"rank 0 of 2 holds 4 KV heads, but vLLM allocated 3"):
        table_of(model, config)


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC"])
def test_kernel_blocks_inside_logical_blocks(layout: str) -> None:
    table, views = table_of(Model(block_size=48, kernel_block_size=16, layout=layout))
    validate_table(table)
    assert table.groups == (Group(0, "full_attention", 48, 16),)
    assert {region.num_blocks for region in table.regions} == {18}
    view = views[table.regions[0].layer]
    view.copy_(torch.arange(view.numel(), dtype=view.dtype).reshape(view.shape))
    assert torch.equal(read(table.regions[0], view), view[..., :8])


def test_mixed_kernel_blocks_in_a_group_are_refused() -> None:
    model = Model(block_size=32)
    config = model.cache_config()
    views = model.allocate(config)
    last = model.names[1]
    views[last] = views[last].reshape(6, 4, 2, 16, 16).transpose(1, 2).flatten(0, 1)
    with pytest.raises(ConfigError, match=r"mixes kernel block sizes \(.*: 32, .*: 16\)"):
        build_table(model.engine(config), views)


def test_an_unknown_view_is_refused_with_its_shape() -> None:
    model = Model()
    config = model.cache_config()
    views = {name: view.flatten(0, 1) for name, view in model.allocate(config).items()}
    with pytest.raises(ConfigError, match=r"got shape \(24, 16, 16\)"):
        build_table(model.engine(config), views)


def test_layers_outside_the_groups_and_aliases_are_left_out() -> None:
    """KV-sharing layers arrive as aliases; other pipeline ranks' layers do not arrive."""
    model = Model()
    config = model.cache_config()
    views = model.allocate(config)
    views["model.layers.9.self_attn.attn"] = views[model.names[0]]
    config.kv_cache_groups[0].layer_names.append("model.layers.7.self_attn.attn")
    shared = "model.layers.8.self_attn.attn"
    config.kv_cache_groups[0].layer_names.append(shared)
    views[shared] = views[model.names[1]]
    table = build_table(model.engine(config), views)
    assert {region.layer for region in table.regions} == set(model.names)


def test_mla_is_one_unit_on_every_rank() -> None:
    model = Model(tp_size=4, tp_rank=2, backend="FLASHMLA", block_size=64)
    spec = kinds.MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    table, views = table_of(model, model.cache_config(spec))
    assert {region.component for region in table.regions} == {"latent"}
    assert {region.spans for region in table.regions} == {(Span(0, 0, 1),)}
    view = views[table.regions[0].layer]
    view.copy_(torch.arange(view.numel()).remainder(128).reshape(view.shape))
    assert torch.equal(read(table.regions[0], view), view)


def test_sliding_window_layers_are_a_group_of_their_own_kind() -> None:
    table, _ = table_of(Model(window=24))
    assert table.groups[0].kind == "sliding_window"


def test_per_layer_specs_of_a_uniform_group_are_used() -> None:
    model = Model(layout="BLHNC")
    narrow, wide = model.spec(head_size=4), model.spec()
    uniform = kinds.UniformTypeKVCacheSpecs(
        block_size=16, kv_cache_specs=dict(zip(model.names, (narrow, wide), strict=True))
    )
    tensors = [
        kinds.KVCacheTensor(size=6 * 12288, layers=[name], layer_stride=0x1000, block_stride=12288, offset=offset)
        for name, offset in zip(model.names, (0, 4096), strict=True)
    ]
    config = kinds.KVCacheConfig(
        num_blocks=6,
        kv_cache_tensors=tensors,
        kv_cache_groups=[kinds.KVCacheGroupSpec(model.names, uniform)],
        kv_cache_layout="BLHNC",
    )
    table, _ = table_of(model, config)
    validate_table(table)
    assert {(region.layer, region.channel.count) for region in table.regions} == {
        (model.names[0], 4),
        (model.names[1], 8),
    }


def mamba() -> Any:
    return kinds.MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(torch.float32,), mamba_cache_mode="all")


def sinks() -> Any:
    return kinds.SinkFullAttentionSpec(block_size=16, num_kv_heads=4, head_size=8, dtype=torch.float32, sink_len=4)


def ring() -> Any:
    return kinds.CircularBufferSpec(block_size=16, num_kv_heads=4, head_size=8, dtype=torch.float32)


def hot() -> Any:
    return kinds.HiSparseHotSpec(block_size=16, page_size=64, blocks_per_request=1)


def compressed() -> Any:
    return kinds.MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32, tokens_per_state=4)


@pytest.mark.parametrize(
    "spec,kind,reason",
    [
        (mamba, "MambaSpec", "only the newest state of a request moves, not those of --mamba-cache-mode all"),
        (sinks, "SinkFullAttentionSpec", "consecutive prompt tokens"),
        (ring, "CircularBufferSpec", "consecutive prompt tokens"),
        (hot, "HiSparseHotSpec", "raw buffer"),
        (compressed, "MLAAttentionSpec", "one state for 4 tokens"),
    ],
)
def test_unsupported_kinds_are_refused_at_start_up_by_name(spec: Any, kind: str, reason: str) -> None:
    model = Model()
    config = replace(model.cache_config(), kv_cache_groups=[kinds.KVCacheGroupSpec(model.names, spec())])
    with pytest.raises(ConfigError) as caught:
        build_table(model.engine(config), {})
    assert str(caught.value).startswith(f"{model.names[0]}: {kind} KV cache cannot be transferred")
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    "written,name",
    [("auto", "float32"), ("bfloat16", "bfloat16"), ("fp8", "fp8_e4m3"), ("fp8_e5m2", "fp8_e5m2")],
)
def test_the_fingerprint_names_the_dtype_in_full(written: str, name: str) -> None:
    """Two sides that mean the same must not be refused for having said it differently."""
    config = Model().vllm_config()
    config.cache_config.cache_dtype = written
    assert model_fingerprint(config) == {
        "architecture": "TinyForCausalLM",
        "layers": "2",
        "kv_heads": "4",
        "head_size": "8",
        "kv_cache_dtype": name,
    }


def test_groups_that_vllm_does_not_transfer_may_be_anything() -> None:
    model = Model()
    config = model.cache_config()
    config.kv_cache_groups.append(kinds.KVCacheGroupSpec(["ring"], ring(), enable_kv_transfer=False))
    views = model.allocate(config)
    assert len(build_table(model.engine(config), views).groups) == 1


def test_no_layer_at_all_is_an_error() -> None:
    model = Model()
    with pytest.raises(ConfigError, match="received nothing"):
        build_table(model.engine(model.cache_config()), {})


def test_geometry_is_per_layer_not_the_first_layers() -> None:
    """vllm#43765: the backend of the first layer was taken for all."""
    model = Model(isa="vec")
    config = model.cache_config()
    engine = model.engine(config)
    engine.vllm_config.compilation_config.static_forward_context[model.names[1]] = attention_module("CPU_ATTN", "vec")
    table = build_table(engine, model.allocate(config))
    assert {(region.layer, region.encoding) for region in table.regions} == {
        (model.names[0], "packed"),
        (model.names[1], "halves.transposed_k"),
    }


def test_context_parallel_sizes_are_stated() -> None:
    model = Model()
    assert (table_of(model)[0].dcp_size, table_of(model)[0].pcp_size) == (1, 1)
    config = model.cache_config()
    engine = model.engine(config)
    engine.vllm_config.parallel_config.decode_context_parallel_size = 4
    engine.vllm_config.parallel_config.prefill_context_parallel_size = 2
    table = build_table(engine, model.allocate(config))
    assert (table.dcp_size, table.pcp_size) == (4, 2)


@pytest.mark.parametrize("layout", VLLM_LAYOUTS)
def test_a_declared_backend_is_addressed_in_every_layout_and_stated(layout: str) -> None:
    model = Model(layout=layout, backend="OURS")
    config = model.cache_config()
    views = model.allocate(config)
    engine = replace(model.engine(config), backend_encodings={"OURS": Encoding.PACKED})
    table = build_table(engine, views)
    validate_table(table)
    assert table.declared_encodings == {"OURS": "packed"}
    assert {region.encoding for region in table.regions} == {"packed"}
    for region in table.regions:
        view = views[region.layer]
        view.copy_(torch.arange(view.numel(), dtype=view.dtype).reshape(view.shape))
        assert torch.equal(read(region, view), view[..., :8] if region.component == "k" else view[..., 8:])


def test_a_backend_nobody_declared_is_opaque() -> None:
    table, _ = table_of(Model(backend="OURS"))
    assert table.declared_encodings == {}
    assert {region.encoding for region in table.regions} == {"opaque:OURS"}
